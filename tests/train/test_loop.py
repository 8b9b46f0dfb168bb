"""Stopping and resuming equals never stopping; nothing is lost on the way."""

import itertools
import math
import os
import signal
import subprocess
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import commands, run_folders, toy
from tests.support.comparing import assert_same_trees
from tests.support.run_folders import metrics
from tests.support.toy import make_batches
from tpugraphs_jax.infra import parallel, tasks
from tpugraphs_jax.train import checkpoint, session
from tpugraphs_jax.train.step import TrainState


def run(workdir, **changes):
  return toy.train(workdir, **{"log_every_steps": 3, **changes})


def stopping_batches(at, number=signal.SIGTERM):
  """Batches with a signal in the middle of batch `at`, from 1."""
  iterator = make_batches()

  class Stopping:
    taken = 0

    def __next__(self):
      self.taken += 1
      if self.taken == at:
        os.kill(os.getpid(), number)
      return next(iterator)

    def get_state(self):
      return iterator.get_state()

    def set_state(self, state):
      iterator.set_state(state)

  return Stopping()


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("unstopped")
  return run(workdir), metrics(workdir)


def test_training_equals_a_plain_loop_on_one_device(unstopped):
  apply = jax.jit(lambda state, grads: state.apply_gradients(grads, toy.OPTIMIZER))
  state = toy.make_state()
  for index in range(toy.STEPS):
    batch = toy.make_batch(index)
    x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
    params = {k: float(v) for k, v in state.params.items()}
    error = params["slope"] * x + params["offset"] - y
    grads = {"slope": 2 * np.mean(error * x), "offset": 2 * np.mean(error)}
    grads = {k: jnp.asarray(v, jnp.float32) for k, v in grads.items()}
    state = apply(state, grads)
  result, _ = unstopped
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    result.state.params,
    state.params,
  )
  assert result.step == toy.STEPS == result.state.step and result.stop_reason.startswith(
    "last epoch"
  )


def test_metrics_file_has_the_mean_of_each_window_and_every_evaluation(unstopped):
  _, rows = unstopped
  assert [row["step"] for row in rows if "train/loss" in row] == [3, 4, 6, 8, 9, 12]
  assert [row["step"] for row in rows if "valid_sample/opa" in row] == [4, 8, 12]
  losses, state = [], parallel.replicate(toy.make_state())
  for index in range(6):
    state, metrics = toy.TRAIN_STEP(state, toy.make_batch(index))
    losses.append(float(metrics["loss"][0]))
  assert rows[0]["train/loss"] == sum(losses[:3]) / 3
  assert rows[1]["train/loss"] == losses[3] and rows[2]["train/loss"] == sum(losses[4:]) / 2
  assert rows[1]["epoch"] == 1.0


def test_the_learning_rate_of_each_step_is_on_its_line(tmp_path):
  run(tmp_path, learning_rate=lambda taken: taken / 10)
  rates = {
    row["step"]: row["train/learning_rate"]
    for row in metrics(tmp_path)
    if "train/learning_rate" in row
  }
  assert rates == {3: 0.2, 6: 0.5, 9: 0.8, 12: 1.1}  # step 3 follows 2 taken steps


def test_a_best_evaluation_whose_use_was_cut_off_is_used_after_a_resume(tmp_path):
  improving, used = itertools.count(), []
  evaluate = lambda params, step: ({"opa": float(next(improving))}, {})

  def cut_off(params, step, metrics):
    if step == toy.STEPS:
      raise KeyboardInterrupt("a kill")

  with pytest.raises(KeyboardInterrupt):
    run(tmp_path, evaluate=evaluate, save_model=cut_off)
  use = lambda params, step, metrics: used.append((step, params))
  run(tmp_path, evaluate=evaluate, resume=True, save_model=use)
  ((step, params),) = used
  assert step == toy.STEPS
  assert_same_trees(params, run_folders.newest_of(tmp_path / checkpoint.FOLDER).params)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_and_resumed_equals_never_stopped(tmp_path, unstopped, number, capsys):
  with pytest.raises(SystemExit) as stop:
    run(tmp_path, batches=stopping_batches(6, number))
  assert stop.value.code == 128 + number
  assert "saved step 6; go on with --resume" in capsys.readouterr().out
  result = run(tmp_path, resume=True)
  expected, rows = unstopped
  assert_same_trees(result.state, expected.state)
  assert metrics(tmp_path) == rows
  assert result.progress == expected.progress


def test_stopping_at_every_step_equals_never_stopping(tmp_path, unstopped):
  for step in range(toy.STEPS):
    with pytest.raises(SystemExit):
      run(tmp_path, batches=stopping_batches(1), resume=step > 0)
  result = run(tmp_path, resume=True)
  assert_same_trees(result.state, unstopped[0].state)
  assert metrics(tmp_path) == unstopped[1]


def test_a_signal_during_evaluation_saves_and_evaluates_after_resume(tmp_path, unstopped):
  def slow(params, step):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal did not interrupt")

  with pytest.raises(SystemExit):
    run(tmp_path, evaluate=slow, log_every_steps=2)
  assert [row["step"] for row in metrics(tmp_path)] == [2]
  result = run(tmp_path, resume=True, log_every_steps=2)
  assert_same_trees(result.state, unstopped[0].state)
  rows = metrics(tmp_path)
  assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
  assert "train/loss" in rows[1] and "valid_sample/opa" in rows[1]


@pytest.mark.parametrize("stop_at", [None, 3, 7, 10])
def test_early_stopping_counts_epochs_since_the_best(tmp_path, stop_at):
  values = [0.1, 0.5, 0.5, float("nan"), 0.4, 0.9, 1.0]

  def by_step(params, step):
    assert float(params["count"]) == step
    return {"opa": values[step // 2 - 1]}, {}

  def count(state, batch):
    loss = jnp.mean(batch["x"])
    counted = {"count": state.params["count"] + 1}
    state = state.replace(step=state.step + 1, params=counted)
    return state, {"loss": jax.lax.pmean(loss, parallel.DEVICES)}

  def go(batches, **changes):
    state = TrainState.create({"count": jnp.zeros(())}, toy.OPTIMIZER).replace(opt_state=())
    changes |= dict(total_epochs=7, steps_per_epoch=2, early_stop_epochs=3, evaluate=by_step)
    step = parallel.pmap(count)
    return toy.train(tmp_path, state, train_step=step, batches=batches, **changes)

  if stop_at is None:
    result = go(make_batches())
  else:
    with pytest.raises(SystemExit):
      go(stopping_batches(stop_at))
    result = go(make_batches(), resume=True)
  assert result.stop_reason.startswith("early stopping") and result.step == 10
  assert (result.progress.best_value, result.progress.best_step) == (0.5, 4)


def test_the_model_can_be_of_the_last_evaluation_which_is_not_called_the_best(tmp_path, capsys):
  falling = lambda params, step: ({"opa": 1 / step}, {})
  result = toy.train(tmp_path, evaluate=falling, result="last")
  assert (result.progress.best_step, result.progress.best_value) == (result.step, 1 / result.step)
  out = capsys.readouterr().out
  assert "best" not in out and f"last valid_sample/opa {1 / result.step:.4f} at step" in out
  assert run_folders.newest_of(tmp_path / checkpoint.FOLDER).step == result.step


def test_a_loss_that_is_not_finite_names_the_step(tmp_path):
  def with_nan(index):
    batch = toy.make_batch(index)
    return batch | {"y": batch["y"] * (math.nan if index == 6 else 1)}

  batches = iter(grain.MapDataset.range(100).map(with_nan).to_iter_dataset())
  with pytest.raises(FloatingPointError, match="nan at step 7"):
    run(tmp_path, batches=batches, checkpoint_every_steps=1, log_every_steps=100)
  saved = checkpoint.Checkpoints(tmp_path / checkpoint.FOLDER).newest(toy.make_state())
  assert saved.step == 6
  assert np.isfinite(saved.state.params["slope"])


def steps_that_overflow(at):
  """A step whose parameters are not finite after step `at`; all losses are finite."""
  multiply = parallel.pmap(
    lambda params, factor: jax.tree.map(lambda x: x * factor, params), in_axes=(0, None)
  )

  def step(state, batch):
    state, metrics = toy.TRAIN_STEP(state, batch)
    is_last = int(parallel.unreplicate(state.step)) == at
    params = multiply(state.params, math.inf if is_last else 1.0)
    return state.replace(params=params), metrics

  return step


@pytest.mark.parametrize("at, every", [(6, 1), (8, 0), (toy.STEPS, 0)])
def test_a_state_that_is_not_finite_is_neither_saved_nor_judged(tmp_path, at, every):
  with pytest.raises(FloatingPointError, match=f"after step {at} "):
    run(tmp_path, train_step=steps_that_overflow(at), checkpoint_every_steps=every)
  saved = checkpoint.Checkpoints(tmp_path / checkpoint.FOLDER).newest(toy.make_state())
  assert saved.step == (5 if every else at - 4)


def test_scores_that_are_not_finite_name_the_step(tmp_path):
  def evaluate(params, step):
    raise FloatingPointError("a graph: 3 of 4 scores are not finite")

  with pytest.raises(FloatingPointError, match="step 4"):
    run(tmp_path, evaluate=evaluate)
  assert checkpoint.Checkpoints(tmp_path / checkpoint.FOLDER).newest(toy.make_state()) is None


def test_a_folder_in_use_is_refused_without_resume(tmp_path):
  run(tmp_path)
  with pytest.raises(ValueError, match="--resume"):
    run(tmp_path)
  with pytest.raises(ValueError, match="--resume"):
    session.check_workdir(tmp_path, session.Run())
  session.check_workdir(tmp_path, session.Run(resume=True))


def test_too_few_batches_are_refused(tmp_path):
  with pytest.raises(ValueError, match="step 5"):
    run(tmp_path, batches=make_batches(5))


def test_an_unknown_best_metric_is_refused(tmp_path):
  with pytest.raises(ValueError, match="mrr"):
    run(tmp_path, metric="mrr")


@pytest.mark.parametrize("steps", [(2, 4), (10, 50)])
def test_profile_is_written(tmp_path, steps):
  run(tmp_path, profiled_steps=steps)
  assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
  "which, options, expected",
  [
    ("evaluation_due", dict(total_epochs=7, steps_per_epoch=4, eval_every_epochs=3), [12, 24, 28]),
    ("evaluation_due", dict(total_epochs=3, steps_per_epoch=2), [2, 4, 6]),
    ("save_due", dict(total_epochs=2, steps_per_epoch=5), []),
    ("save_due", dict(total_epochs=2, steps_per_epoch=5, checkpoint_every_steps=3), [3, 6, 9]),
    ("is_logged", dict(total_epochs=2, steps_per_epoch=5, log_every_steps=4), [4, 8]),
    ("is_epoch_end", dict(total_epochs=2, steps_per_epoch=5), [5, 10]),
  ],
)
def test_a_timetable_says_what_is_due_after_each_step(which, options, expected):
  timetable = toy.timetable(**options)
  is_due = getattr(timetable, which)
  assert [step for step in range(1, timetable.total_steps + 1) if is_due(step)] == expected


@pytest.mark.parametrize(
  "best_step, options, expected",
  [
    (None, dict(total_epochs=5, early_stop_epochs=3), [6, 8, 10]),
    (2, dict(total_epochs=5, early_stop_epochs=3), [8, 10]),
    (8, dict(total_epochs=5, early_stop_epochs=3), []),
    (None, dict(total_epochs=5), []),
    # Never between two evaluations.
    (None, dict(total_epochs=10, early_stop_epochs=2, eval_every_epochs=3), [6, 12, 18, 20]),
    (6, dict(total_epochs=10, early_stop_epochs=2, eval_every_epochs=3), [12, 18, 20]),
    (12, dict(total_epochs=10, early_stop_epochs=2, eval_every_epochs=3), [18, 20]),
  ],
)
def test_a_run_ends_early_at_an_evaluation_without_improvement(best_step, options, expected):
  timetable = toy.timetable(steps_per_epoch=2, **options)
  reasons = {
    step: timetable.stop_reason(step, best_step) for step in range(1, timetable.total_steps + 1)
  }
  last = timetable.total_steps
  assert {step for step, reason in reasons.items() if reason} == {*expected, last}
  assert all("early stopping" in reasons[step] for step in expected if step < last)
  assert "last epoch" in reasons[last]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process(number):
  program = (
    "from tpugraphs_jax.infra import tasks\n"
    "say = lambda: print('waiting', flush=True)\n"
    "import queue\nwith tasks.StopSignals():\n  say()\n  queue.Queue().get()\n"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=commands.ROOT
  )
  try:
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    assert not ended(process, seconds=0.3)  # the first one alone is a request
    # Again and again: on a busy machine two signals can arrive as one.
    assert any(process.send_signal(number) or ended(process, seconds=1) for _ in range(30))
    assert process.returncode == -number
  finally:
    process.kill()
    process.communicate()


def ended(process, *, seconds):
  try:
    return process.wait(timeout=seconds) is not None
  except subprocess.TimeoutExpired:
    return False


def test_earlier_signal_handlers_are_restored():
  handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  for _ in range(2):
    with tasks.StopSignals():
      os.kill(os.getpid(), signal.SIGTERM)
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
