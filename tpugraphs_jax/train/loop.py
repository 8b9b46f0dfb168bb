"""The training loop: restore, step, log, evaluate, keep the best, save, stop.

The loop does not depend on models or data. A run that is stopped (SIGTERM, Ctrl-C, a crash) and
resumed equals an uninterrupted run, bit for bit on CPU: a checkpoint holds the training state, the
position in the data and the bookkeeping of the loop.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import math
from pathlib import Path
import signal
import time
from typing import Any

import jax
import numpy as np
import optax

from tpugraphs_jax.infra import console, files, parallel, tasks
from tpugraphs_jax.metrics import SAMPLE
from tpugraphs_jax.rankers.config import TrainOptions
from tpugraphs_jax.train import checkpoint
from tpugraphs_jax.train.log import Log, peak_memory, Profile
from tpugraphs_jax.train.step import not_finite, TrainState

CHECKPOINTS = "checkpoints"  # folder under the working folder
# Steps dispatched ahead: enough to keep devices busy while the host prepares a batch, few enough
# that their batches take little memory.
_STEPS_IN_FLIGHT = 2

# `(params, step) -> metrics, histograms`, equal in every process. Parameters are NumPy arrays,
# averaged if the optimizer averages. TensorBoard shows histograms of arrays `[graphs]`.
Evaluate = Callable[[optax.Params, int], tuple[dict[str, float], dict[str, np.ndarray]]]
SaveModel = Callable[[optax.Params, int, dict[str, float]], None]  # `(params, step, metrics)`
TrainStep = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def train(
  state: TrainState,
  train_step: TrainStep,
  batches: Any,
  timetable: Timetable,
  evaluate: Evaluate,
  workdir: str | Path,
  *,
  save_model: SaveModel | None = None,
  resume: bool = False,
  about: Mapping[str, Any] | None = None,
  config: Mapping[str, Any] | None = None,
  digests: Mapping[str, str] | None = None,
  profiled_steps: tuple[int, int] = (0, 0),
) -> TrainResult:
  """Trains until the last epoch, or until the validation metric stops improving.

  Args:
    state: initial state, without a device axis, equal in every process.
    train_step: `(state, batch) -> (state, metrics)` from `parallel.pmap`. Metrics are scalars,
      reduced over devices, and include `loss`. May donate the state.
    batches: iterator of batches with a leading device axis: the part of this process, of equal
      length in every process. `get_state` and `set_state` save and restore its position (grain
      `DatasetIterator`, `rankers.segments.history.BatchesWithHistory`).
    timetable: after which steps the run evaluates, logs, saves and ends.
    evaluate: computes metrics of parameters, also the metric of the timetable.
    workdir: receives `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `profile/`.
    save_model: called with parameters, step and metrics of the evaluation that makes the model,
      before its checkpoint is saved. If the run is killed in between, the resumed run calls it
      again.
    resume: continue from the newest checkpoint in `workdir`, if there is one.
    about: nested fields to show in TensorBoard.
    config, digests: must equal the config and digests of the checkpoint to resume, see
      `Checkpoints`.
    profiled_steps: the first step of the trace, counted from 0, and the one after its last.

  Raises:
    ValueError: the folder holds a run and `resume` is False; a checkpoint of another config or
      with other files; no metric of that name; or batches that end early.
    FloatingPointError: the loss, the training state or a score is not finite.
    SystemExit: after SIGTERM or Ctrl-C, with everything saved; code 128 + signal.
  """
  workdir = Path(workdir)
  with contextlib.ExitStack() as stack:
    stack.enter_context(parallel.stop_together())
    signals = stack.enter_context(tasks.StopSignals())
    check_workdir(workdir, resume=resume, config=config, digests=digests)
    files.tidy(workdir)
    checkpoints = checkpoint.Checkpoints(workdir / CHECKPOINTS, config=config, digests=digests)
    stack.callback(checkpoints.close)
    saved = checkpoints.newest(state) or checkpoint.Saved(0, state, data=None, progress={})
    if saved.data is not None:
      batches.set_state(saved.data)
    step, progress = saved.step, checkpoint.Progress(**saved.progress)
    rows = Rows(workdir, timetable, progress, checkpoints, step)
    stack.callback(rows.log.close)
    rows.describe(about or {}, saved.state.params)
    profile = Profile(profiled_steps, workdir / "profile")
    stack.callback(profile.stop)
    if resume:
      console.say(f"resumed at step {step}" if step else "nothing to resume: step 0")
    state = parallel.replicate(saved.state)

    def save() -> None:
      host, place = rows.finite(state, step), batches.get_state()
      checkpoints.save(step, host, data=place, progress=dataclasses.asdict(progress))

    while True:
      if timetable.is_evaluated(step) and step > progress.evaluated_step:
        params = rows.finite(state, step).eval_params
        if judged := _judge(evaluate, params, step, signals):
          metrics, histograms = judged
          is_model = progress.keep_best(
            step, metrics, of=timetable.metric, last=timetable.takes_last
          )
          rows.write_evaluation(step, metrics, histograms)
          if is_model and save_model is not None:
            save_model(params, step, metrics)
          save()
          rows.say_evaluation(step, metrics)
      if _is_stop_asked(signals, timetable, step):
        if step > checkpoints.saved_step:
          save()
        raise _stopped(signals, step)
      if step >= timetable.total_steps or timetable.is_early_stop(step, progress.best_step):
        break
      if timetable.is_saved(step) and step > checkpoints.saved_step:
        save()
      profile.before(step, wait=rows.wait)
      with rows.log.waiting():
        batch = next(batches, None)
      if batch is None:
        raise ValueError(
          f"the batches ended after step {step}, expected {timetable.total_steps} "
          f"({timetable.steps_per_epoch} per epoch): the iterator must be longer"
        )
      if not rows.compile_seconds:
        console.say("compiling the training step")
      started = time.monotonic()
      with jax.profiler.StepTraceAnnotation("train", step_num=step):
        state, step_metrics = train_step(state, batch)
      step += 1
      rows.write_step(step, step_metrics, started)
    rows.say_end(step)
    parallel.barrier("end of training")
    why, seconds = timetable.why_ended(step), rows.compile_seconds
    return TrainResult(parallel.unreplicate(state), step, progress, why, seconds)


def check_workdir(
  workdir: str | Path,
  *,
  resume: bool,
  config: Mapping[str, Any] | None = None,
  digests: Mapping[str, str] | None = None,
) -> None:
  """Refuses a folder that `train` would refuse; writes nothing.

  Raises:
    ValueError: the folder holds a run and `resume` is False, or the run has another config or
      other files.
  """
  folder = Path(workdir) / CHECKPOINTS
  checkpoints = checkpoint.Checkpoints(folder, config=config, digests=digests, read_only=True)
  with contextlib.closing(checkpoints):
    checkpoints.check(resume=resume)


def _judge(
  evaluate: Evaluate, params: optax.Params, step: int, signals: tasks.StopSignals
) -> tuple[dict[str, float], dict[str, np.ndarray]] | None:
  """The result of an evaluation; None after a signal: a resumed run repeats the evaluation."""
  try:
    with signals.interrupting():
      return evaluate(params, step)
  except tasks.Interrupted:
    return None
  except FloatingPointError as error:
    raise FloatingPointError(f"step {step}: {error}") from error


def _is_stop_asked(signals: tasks.StopSignals, timetable: Timetable, step: int) -> bool:
  """Whether a signal asks for the end of the run.

  Several processes decide together, at logged steps and at ends of epochs.
  """
  is_asked = signals.received is not None
  if parallel.process_count() == 1:
    return is_asked
  is_time = timetable.is_epoch_end(step) or timetable.is_logged(step)
  return is_time and parallel.any_process(is_asked)


def _stopped(signals: tasks.StopSignals, step: int) -> SystemExit:
  number = signals.received or signal.SIGTERM
  console.say(f"{signal.Signals(number).name}: saved step {step}; go on with --resume")
  return SystemExit(128 + number)


@dataclasses.dataclass(frozen=True)
class Timetable:
  """Decides after which steps a run evaluates, logs, saves and ends.

  Attributes:
    options: of the run.
    epochs: most epochs.
    steps_per_epoch: batches per epoch.
    metric: name of the metric to maximise; the first of equal values is the best.
    learning_rate: the learning rate by number of steps taken.
  """

  options: TrainOptions
  epochs: int
  steps_per_epoch: int
  metric: str
  learning_rate: Callable[[int], float]

  @property
  def total_steps(self) -> int:
    return self.epochs * self.steps_per_epoch

  @property
  def takes_last(self) -> bool:
    """Whether the newest evaluation makes the model, not the best one."""
    return self.options.result == "last"

  def is_epoch_end(self, step: int) -> bool:
    return step % self.steps_per_epoch == 0

  def is_evaluated(self, step: int) -> bool:
    """Whether an evaluation comes after this step."""
    every = self.options.eval_every_epochs * self.steps_per_epoch
    return step % every == 0 or step == self.total_steps

  def why_ended(self, step: int) -> str:
    """Why an uninterrupted run ended after this step."""
    if step >= self.total_steps:
      return f"last epoch ({self.epochs})"
    epochs = self.options.early_stop_epochs
    return f"early stopping: {self.metric} did not improve in {epochs} epochs"

  def is_early_stop(self, step: int, best_step: int | None) -> bool:
    """Whether the run ends after this step because nothing improved since `best_step`.

    Only an evaluation can end it.
    """
    most_steps = self.options.early_stop_epochs * self.steps_per_epoch
    return self.is_evaluated(step) and 0 < most_steps <= step - (best_step or 0)

  def is_logged(self, step: int) -> bool:
    return step % self.options.log_every_steps == 0

  def is_saved(self, step: int) -> bool:
    """Whether a checkpoint is due after this step, even without an evaluation."""
    every = self.options.checkpoint_every_steps
    return bool(every) and step % every == 0


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """The end of a run."""

  state: TrainState  # the last state, of numpy arrays without a device axis
  step: int
  progress: checkpoint.Progress
  why: str  # reason of the end, in words
  compile_seconds: float  # of the first step, which compiles


class Rows:
  """The metrics of a run on their way from devices to the log, and lines of progress.

  Steps are in flight on the devices; their metrics are averaged into rows. A loss or a state that
  is not finite ends the run.

  Args:
    workdir: working folder.
    timetable: of the run.
    progress: window and row are changed.
    checkpoints: names the step that a run can go back to.
    step: steps taken.

  Attributes:
    log: the files.
    compile_seconds: of the first step, which compiles; 0 before it.
  """

  def __init__(
    self,
    workdir: Path,
    timetable: Timetable,
    progress: checkpoint.Progress,
    checkpoints: checkpoint.Checkpoints,
    step: int,
  ):
    self._timetable, self._progress, self._checkpoints = timetable, progress, checkpoints
    # A row that waits for its evaluation is not written yet.
    first_step = step - bool(progress.row)
    self.log = Log(workdir, total_steps=timetable.total_steps, first_step=first_step)
    self.compile_seconds = 0.0
    self._last_finite, self._last_loss = "none since the start", math.nan
    # (step, metrics), oldest first
    self._in_flight: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()
    self._began = (step, time.monotonic())  # set again after the first step
    self._is_evaluated = bool(progress.evaluated_step)
    self._metric = f"{SAMPLE}/{timetable.metric}"
    self._model = f"{timetable.options.result} {self._metric}"

  def describe(self, about: Mapping[str, Any], params: optax.Params) -> None:
    """Writes the config and the number of parameters to TensorBoard."""
    self.log.events.describe(about, metric=self._metric, parameters=optax.tree.size(params))

  def write_step(self, step: int, metrics: dict[str, jax.Array], started: float) -> None:
    """Takes the metrics of a dispatched step; waits for all but the newest steps.

    Args:
      step: with this step.
      metrics: scalars on every device.
      started: time before the step.
    """
    self._in_flight.append((step, metrics))
    if not self.compile_seconds:
      self.wait()
      self.compile_seconds = time.monotonic() - started
      console.say(f"first step, with compilation: {self.compile_seconds:.1f} s")
      self.log.restart_clock(step)
      self._began = (step, time.monotonic())
    self.wait(keep=_STEPS_IN_FLIGHT)
    self.log.say_progress(step, lambda: self._progress_text(step))
    if self._timetable.is_logged(step):
      self._close_window(step)

  def wait(self, *, keep: int = 0) -> None:
    """Waits for all steps but the newest `keep`, and checks their losses."""
    while len(self._in_flight) > keep:
      step, metrics = self._in_flight.popleft()
      values = {k: float(v) for k, v in parallel.unreplicate(metrics).items()}
      loss = values["loss"]
      if not math.isfinite(loss):
        raise self._divergence(f"the loss is {loss} at step {step}")
      self._last_finite, self._last_loss = f"{loss:.6g} at step {step}", loss
      self._progress.window.append(values)

  def finite(self, state: TrainState, step: int) -> TrainState:
    """The state without its device axis; FloatingPointError if it is not finite."""
    self.wait()
    host = parallel.unreplicate(state)
    if part := not_finite(host):
      raise self._divergence(f"the state{part} is not finite after step {step}")
    return host

  def _divergence(self, what: str) -> FloatingPointError:
    step = self._checkpoints.saved_step
    return FloatingPointError(
      f"{what} (last finite loss: {self._last_finite});"
      f" lower optimizer.learning_rate or set optimizer.clip_norm;"
      f" {f'step {step} is saved' if step else 'nothing is saved'}"
    )

  def _close_window(self, step: int) -> None:
    """Makes a row: means over the steps since the last row, and the rates.

    The row of a step that is evaluated waits for the evaluation.
    """
    self.wait()
    self._average_window()
    row = self._progress.row
    row["steps_per_second"] = self.log.steps_per_second(step)
    row["train/learning_rate"] = self._timetable.learning_rate(step - 1)
    self.log.measure(step)
    if not (self._timetable.is_evaluated(step) and step > self._progress.evaluated_step):
      self._write_row(step)

  def _average_window(self) -> None:
    """Moves the metrics since the last row, averaged over steps, into the next row."""
    steps, self._progress.window = self._progress.window, []
    for name in steps[-1]:
      self._progress.row[f"train/{name}"] = sum(step[name] for step in steps) / len(steps)

  def _write_row(self, step: int) -> None:
    self.log.write(step, {"epoch": step / self._timetable.steps_per_epoch, **self._progress.row})
    self._progress.row = {}

  def write_evaluation(
    self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, np.ndarray]
  ) -> None:
    """Writes the row of a step with its evaluation."""
    if self._progress.window:  # a run that is shorter than `log_every_steps` has a loss too
      self._average_window()
    self._progress.row |= {f"{SAMPLE}/{name}": value for name, value in metrics.items()}
    arrays = {f"{SAMPLE}/{name}": values for name, values in histograms.items()}
    self.log.events.histograms(step, arrays)
    self._write_row(step)

  def say_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
    """Prints a line with an evaluation, always for the first one of a run."""
    progress, text = self._progress, f"{self._metric} {metrics[self._timetable.metric]:.4f}"
    if progress.best_step is not None and not self._timetable.takes_last:
      text += f" (best {progress.best_value:.4f} at step {progress.best_step})"
    self.log.restart_clock(step)  # rates leave out the evaluation
    self.log.say_progress(step, lambda: text, is_due=not self._is_evaluated)
    self._is_evaluated = True

  def _progress_text(self, step: int) -> str:
    """The loss, the best evaluation, and the time left at the mean rate."""
    parts = [f"loss {self._last_loss:.5g}"]
    if self._progress.best_value is not None:
      parts.append(f"{self._model} {self._progress.best_value:.4f}")
    first, since = self._began
    if step > first:
      seconds = (time.monotonic() - since) / (step - first)
      parts.append(f"{console.duration(seconds * (self._timetable.total_steps - step))} left")
    return "  ".join(parts)

  def say_end(self, step: int) -> None:
    """Prints why the run ended, its model, and its peak memory."""
    self.wait()
    progress = self._progress
    text = f"training ended at step {step}: {self._timetable.why_ended(step)}"
    if progress.best_step is not None:
      text += f"; {self._model} {progress.best_value:.4f} at step {progress.best_step}"
    console.say(text)
    what, peak_bytes = peak_memory()
    console.say(f"peak memory of the {what}: {console.size(peak_bytes)}")
