"""The training loop: steps, evaluation, early stopping, checkpoints, signals.

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


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Decides after which steps a run evaluates, logs, saves and ends.

  Attributes:
    options: of the run.
    epochs: most epochs.
    steps_per_epoch: batches per epoch.
    metric: name of the metric to maximise; the first of equal values is the best.
  """

  options: TrainOptions
  epochs: int
  steps_per_epoch: int
  metric: str

  @property
  def total_steps(self) -> int:
    return self.epochs * self.steps_per_epoch

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
class Stage:
  """A stage of training: its first state, its step, its batches and its schedule.

  Attributes:
    state: initial state, without a device axis, equal in every process.
    train_step: `(state, batch) -> (state, metrics)` from `parallel.pmap`. Metrics are scalars,
      reduced over devices, and include `loss`. May donate the state.
    batches: iterator of batches with a leading device axis: the part of this process, of equal
      length in every process. `get_state` and `set_state` save and restore its position (grain
      `DatasetIterator`, `rankers.segments.history.BatchesWithHistory`).
    schedule: of the stage.
    learning_rate: the learning rate by number of steps taken.
  """

  state: TrainState
  train_step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
  batches: Any
  schedule: Schedule
  learning_rate: Callable[[int], float]


# `(params, step) -> metrics, histograms`, equal in every process. Parameters are NumPy arrays,
# averaged if the optimizer averages. TensorBoard shows histograms of arrays `[graphs]`.
Evaluate = Callable[[optax.Params, int], tuple[dict[str, float], dict[str, np.ndarray]]]
OnBest = Callable[[optax.Params, int, dict[str, float]], None]  # `(params, step, metrics)`


@dataclasses.dataclass
class Progress:
  """Bookkeeping of the loop, saved with every checkpoint."""

  # The best evaluation so far, or with `result=last` the newest one; its step becomes the model.
  # None before an evaluation that gives a number.
  best_value: float | None = None
  best_step: int | None = None
  evaluated_step: int = 0  # step of the last evaluation
  # Metrics of each step since the last row.
  window: list[dict[str, float]] = dataclasses.field(default_factory=list)
  # The next row, which may wait for the evaluation of its step.
  row: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """The end of a run."""

  state: TrainState  # the last state, of numpy arrays without a device axis
  step: int
  progress: Progress
  why: str  # reason of the end, in words
  compile_seconds: float  # of the first step, which compiles


def train(
  stage: Stage,
  evaluate: Evaluate,
  workdir: str | Path,
  *,
  on_best: OnBest | None = None,
  resume: bool = False,
  about: Mapping[str, Any] | None = None,
  config: Mapping[str, Any] | None = None,
  digests: Mapping[str, str] | None = None,
  profiled_steps: tuple[int, int] = (0, 0),
) -> TrainResult:
  """Trains until the last epoch, or until the validation metric stops improving.

  Args:
    stage: state, step, batches and schedule.
    evaluate: computes metrics of parameters, also the metric of the schedule.
    workdir: receives `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `profile/`.
    on_best: called with parameters, step and metrics after the best evaluation so far, before its
      checkpoint is saved. If the run is killed in between, the resumed run calls it again.
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
  workdir, schedule = Path(workdir), stage.schedule
  profile = Profile(profiled_steps, workdir / "profile")
  with contextlib.ExitStack() as stack:
    stack.enter_context(parallel.stop_together())
    signals = stack.enter_context(tasks.StopSignals())
    check_workdir(workdir, resume=resume, config=config, digests=digests)
    files.tidy(workdir)
    checkpoints = checkpoint.Checkpoints(workdir / CHECKPOINTS, config=config, digests=digests)
    stack.callback(checkpoints.close)
    saved = checkpoints.newest(stage.state)
    if saved is None:
      saved = checkpoint.Saved(0, stage.state, data=None, progress={})
    else:
      stage.batches.set_state(saved.data)
    step, progress = saved.step, Progress(**saved.progress)
    first_step = step - bool(progress.row)  # a row that waits for its evaluation is not written yet
    log = Log(workdir, total_steps=schedule.total_steps, first_step=first_step)
    stack.callback(log.close)
    stack.callback(profile.stop)
    parameters = optax.tree.size(stage.state.params)
    log.events.describe(about or {}, metric=f"{SAMPLE}/{schedule.metric}", parameters=parameters)
    if resume:
      console.say(f"resumed at step {step}" if step else "nothing to resume: step 0")
    state = parallel.replicate(saved.state)
    return _Loop(
      stage=stage,
      evaluate=evaluate,
      on_best=on_best,
      checkpoints=checkpoints,
      log=log,
      profile=profile,
      signals=signals,
      state=state,
      step=step,
      progress=progress,
    ).run()


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


@dataclasses.dataclass
class _Loop:
  """The state of a call of `train`."""

  stage: Stage
  evaluate: Evaluate
  on_best: OnBest | None
  checkpoints: checkpoint.Checkpoints
  log: Log
  profile: Profile
  signals: tasks.StopSignals
  state: TrainState  # with a leading device axis
  step: int  # steps that `state` has taken
  progress: Progress

  def __post_init__(self):
    self.schedule = self.stage.schedule
    self.saved_step = self.step
    self.compile_seconds = 0.0
    self.last_finite, self.last_loss = "none since the start", math.nan
    # (step, metrics), oldest first
    self.in_flight: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()
    self.began = (self.step, time.monotonic())  # set again after the first step, which compiles
    self.shown_metric = f"{SAMPLE}/{self.schedule.metric}"
    self.shown_best = f"{self.schedule.options.result} {self.shown_metric}"

  def run(self) -> TrainResult:
    while True:
      if self._is_evaluation_due():
        self._evaluate()
      self._stop_if_asked()
      is_last = self.step >= self.schedule.total_steps
      if is_last or self.schedule.is_early_stop(self.step, self.progress.best_step):
        return self._finish()
      if self.schedule.is_saved(self.step) and self.step > self.saved_step:
        self._save()
      self._take_step()

  def _is_evaluation_due(self) -> bool:
    return self.schedule.is_evaluated(self.step) and self.step > self.progress.evaluated_step

  def _take_step(self) -> None:
    self.profile.before(self.step, wait=self._wait)
    try:
      with self.log.waiting():
        batch = next(self.stage.batches)
    except StopIteration:
      raise ValueError(
        f"the batches ended after step {self.step}, expected {self.schedule.total_steps} "
        f"({self.schedule.steps_per_epoch} per epoch): the iterator must be longer"
      ) from None
    if not self.compile_seconds:
      console.say("compiling the training step")
    started = time.monotonic()
    with jax.profiler.StepTraceAnnotation("train", step_num=self.step):
      self.state, metrics = self.stage.train_step(self.state, batch)
    self.step += 1
    self.in_flight.append((self.step, metrics))
    if not self.compile_seconds:
      self._wait()
      self.compile_seconds = time.monotonic() - started
      console.say(f"first step, with compilation: {self.compile_seconds:.1f} s")
      self.log.restart_clock(self.step)
      self.began = (self.step, time.monotonic())
    self._wait(keep=_STEPS_IN_FLIGHT)
    self.log.say_progress(self.step, self._progress_text)
    if self.schedule.is_logged(self.step):
      self._log()

  def _progress_text(self) -> str:
    """The loss, the best evaluation, and the time left at the mean rate."""
    parts = [f"loss {self.last_loss:.5g}"]
    if self.progress.best_value is not None:
      parts.append(f"{self.shown_best} {self.progress.best_value:.4f}")
    first, since = self.began
    if self.step > first:
      seconds = (time.monotonic() - since) / (self.step - first)
      left = seconds * (self.schedule.total_steps - self.step)
      parts.append(f"{console.duration(left)} left")
    return "  ".join(parts)

  def _wait(self, *, keep: int = 0) -> None:
    """Waits for all steps but the newest `keep`, and checks their losses."""
    while len(self.in_flight) > keep:
      step, metrics = self.in_flight.popleft()
      values = {k: float(v) for k, v in parallel.unreplicate(metrics).items()}
      loss = values["loss"]
      if not math.isfinite(loss):
        raise self._divergence(f"the loss is {loss} at step {step}")
      self.last_finite, self.last_loss = f"{loss:.6g} at step {step}", loss
      self.progress.window.append(values)

  def _divergence(self, what: str) -> FloatingPointError:
    saved = f"step {self.saved_step} is saved" if self.saved_step else "nothing is saved"
    return FloatingPointError(
      f"{what} (last finite loss: {self.last_finite});"
      f" lower optimizer.learning_rate or set optimizer.clip_norm; {saved}"
    )

  def _finite_state(self) -> TrainState:
    """The state without its device axis; FloatingPointError if it is not finite."""
    self._wait()
    state = parallel.unreplicate(self.state)
    if part := not_finite(state):
      raise self._divergence(f"the state{part} is not finite after step {self.step}")
    return state

  def _log(self) -> None:
    """Writes a row of metrics: means over the steps since the last row, and the rate."""
    self._wait()
    self._average_window()
    self.progress.row["steps_per_second"] = self.log.steps_per_second(self.step)
    self.progress.row["train/learning_rate"] = self.stage.learning_rate(self.step - 1)
    self.log.measure(self.step)
    if not self._is_evaluation_due():
      self._write_row()

  def _average_window(self) -> None:
    """Moves the metrics since the last row, averaged over steps, into the next row."""
    steps, self.progress.window = self.progress.window, []
    for name in steps[-1]:
      self.progress.row[f"train/{name}"] = sum(step[name] for step in steps) / len(steps)

  def _write_row(self) -> None:
    row = {"epoch": self.step / self.schedule.steps_per_epoch, **self.progress.row}
    self.log.write(self.step, row)
    self.progress.row = {}

  def _evaluate(self) -> None:
    """Evaluates and saves; a resumed run repeats an interrupted evaluation."""
    params = self._finite_state().eval_params
    try:
      with self.signals.interrupting():
        metrics, by_graph = self.evaluate(params, self.step)
    except tasks.Interrupted:
      return
    except FloatingPointError as error:
      raise FloatingPointError(f"step {self.step}: {error}") from error
    progress, metric = self.progress, self.schedule.metric
    if metric not in metrics:
      raise ValueError(f"best_metric is {metric!r}, expected one of {sorted(metrics)}")
    value = metrics[metric]
    is_first, progress.evaluated_step = not progress.evaluated_step, self.step
    takes_last = self.schedule.options.result == "last"
    earlier = -math.inf if progress.best_value is None else progress.best_value
    is_best = takes_last or value > earlier
    if is_best:
      progress.best_value, progress.best_step = value, self.step
    if progress.window:  # a run that is shorter than `log_every_steps` has a loss too
      self._average_window()
    progress.row |= {f"{SAMPLE}/{name}": value for name, value in metrics.items()}
    histograms = {f"{SAMPLE}/{name}": values for name, values in by_graph.items()}
    self.log.events.histograms(self.step, histograms)
    self._write_row()
    if is_best and self.on_best is not None:
      # A run that is killed before it saves the checkpoint comes here again.
      self.on_best(params, self.step, metrics)
    self._save()
    text = f"{self.shown_metric} {value:.4f}"
    if progress.best_step is not None and not takes_last:
      text += f" (best {progress.best_value:.4f} at step {progress.best_step})"
    self.log.restart_clock(self.step)  # rates leave out the evaluation
    self.log.say_progress(self.step, lambda: text, is_due=is_first)

  def _save(self) -> None:
    state, data = self._finite_state(), self.stage.batches.get_state()
    progress = dataclasses.asdict(self.progress)
    self.checkpoints.save(self.step, state, data=data, progress=progress)
    self.saved_step = self.step

  def _stop_if_asked(self) -> None:
    """Saves and ends the run after a signal.

    Several processes decide together, at logged steps and at ends of epochs.
    """
    is_asked = self.signals.received is not None
    if parallel.process_count() > 1:
      is_time = self.schedule.is_epoch_end(self.step) or self.schedule.is_logged(self.step)
      is_asked = is_time and parallel.any_process(is_asked)
    if not is_asked:
      return
    if self.step > self.saved_step:
      self._save()
    number = self.signals.received or signal.SIGTERM
    name = signal.Signals(number).name
    console.say(f"{name}: saved step {self.step}; go on with --resume")
    raise SystemExit(128 + number)

  def _finish(self) -> TrainResult:
    self._wait()
    progress, why = self.progress, self.schedule.why_ended(self.step)
    text = f"training ended at step {self.step}: {why}"
    if progress.best_step is not None:
      text += f"; {self.shown_best} {progress.best_value:.4f} at step {progress.best_step}"
    console.say(text)
    what, peak_bytes = peak_memory()
    console.say(f"peak memory of the {what}: {console.size(peak_bytes)}")
    parallel.barrier("end of training")
    state = parallel.unreplicate(self.state)
    return TrainResult(state, self.step, progress, why, self.compile_seconds)
