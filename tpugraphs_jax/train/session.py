"""The files of a phase of a run: opens and closes them, and writes what the loop hands over."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import math
from pathlib import Path
import signal
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from tpugraphs_jax.infra import console, files, parallel, tasks
from tpugraphs_jax.metrics import SAMPLE
from tpugraphs_jax.train.checkpoint import Checkpoints, FOLDER, Progress, Saved
from tpugraphs_jax.train.log import Log, peak_memory, Profile
from tpugraphs_jax.train.step import not_finite, TrainState
from tpugraphs_jax.train.timetable import Timetable

# Steps dispatched ahead: enough to keep devices busy while the host prepares a batch, few enough
# that their batches take little memory.
_STEPS_IN_FLIGHT = 2

# `(params, step) -> metrics, histograms`, equal in every process. Parameters are NumPy arrays,
# averaged if the optimizer averages. TensorBoard shows histograms of arrays `[graphs]`.
Evaluate = Callable[[optax.Params, int], tuple[dict[str, float], dict[str, np.ndarray]]]
SaveModel = Callable[[optax.Params, int, dict[str, float]], None]  # `(params, step, metrics)`
TrainStep = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


class Training(NamedTuple):
  """What the loop trains.

  Attributes:
    state: initial state, without a device axis, equal in every process.
    train_step: `(state, batch) -> (state, metrics)` from `parallel.pmap`. Metrics are scalars,
      reduced over devices, and include `loss`. May donate the state.
    batches: iterator of batches with a leading device axis: the part of this process, of equal
      length in every process. `get_state` and `set_state` save and restore its position (grain
      `DatasetIterator`, `rankers.segments.history.BatchesWithHistory`).
    timetable: after which steps the run evaluates, logs, saves and ends.
  """

  state: TrainState
  train_step: TrainStep
  batches: Any
  timetable: Timetable


@dataclasses.dataclass(frozen=True)
class Run:
  """What all phases of a run share.

  Attributes:
    resume: continue from the newest checkpoint in the working folder, if there is one.
    config, digests: must equal the config and digests of the checkpoint to resume, see
      `Checkpoints`.
    about: nested fields to show in TensorBoard.
    profiled_steps: the first step of the trace, counted from 0, and the one after its last.
  """

  resume: bool = False
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  profiled_steps: tuple[int, int] = (0, 0)


def check_workdir(workdir: str | Path, run: Run) -> None:
  """Refuses a folder that `Session` would refuse; writes nothing.

  Raises:
    ValueError: the folder holds a run and `run.resume` is False, or the run has another config or
      other files.
  """
  folder = Path(workdir) / FOLDER
  checkpoints = Checkpoints(folder, config=run.config, digests=run.digests, read_only=True)
  with contextlib.closing(checkpoints):
    checkpoints.check(resume=run.resume)


class Session(contextlib.AbstractContextManager):
  """The open files of a phase: checkpoints, metrics, TensorBoard, profile; and its signals.

  Args:
    training: what is trained.
    workdir: of the phase.
    run: what all phases of the run share.

  Attributes:
    progress: bookkeeping that is saved with every checkpoint.
  """

  progress: Progress

  def __init__(self, training: Training, workdir: Path, run: Run):
    self._training, self._workdir, self._run = training, workdir, run
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> Session:
    with contextlib.ExitStack() as stack:  # closes what is open if the next one fails
      self._work = stack.enter_context(console.working("training"))
      stack.enter_context(parallel.stop_together())
      self._signals = stack.enter_context(tasks.StopSignals())
      check_workdir(self._workdir, self._run)
      files.tidy(self._workdir)
      self._checkpoints = Checkpoints(
        self._workdir / FOLDER, config=self._run.config, digests=self._run.digests
      )
      stack.callback(self._checkpoints.close)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *error: Any) -> bool | None:
    return self._stack.__exit__(*error)

  def restore(self) -> tuple[TrainState, int]:
    """The newest saved state with a device axis, and its step; else the initial one and 0."""
    saved = self._checkpoints.newest(self._training.state) or Saved(
      0, self._training.state, None, {}
    )
    if saved.data is not None:
      self._training.batches.set_state(saved.data)
    step, self.progress = saved.step, Progress(**saved.progress)
    self._metrics = MetricsWriter(
      self._workdir, self._training.timetable, self.progress, self._checkpoints, step
    )
    self._stack.callback(self._metrics.log.close)
    self._metrics.describe(self._run.about, saved.state.params)
    self._profile = Profile(self._run.profiled_steps, self._workdir / "profile")
    self._stack.callback(self._profile.stop)
    if self._run.resume:
      console.say(f"resumed at step {step}" if step else "nothing to resume: step 0")
    return parallel.replicate(saved.state), step

  @property
  def compile_seconds(self) -> float:
    """Seconds of the first step, which compiles; 0 before it."""
    return self._metrics.compile_seconds

  def next_batch(self, step: int) -> Any:
    """The batch of the next step.

    Raises:
      ValueError: there is none.
    """
    self._profile.before(step, wait=self._metrics.wait)
    with self._metrics.log.waiting():
      batch = next(self._training.batches, None)
    if batch is None:
      timetable = self._training.timetable
      raise ValueError(
        f"the batches ended after step {step}, expected {timetable.total_steps} "
        f"({timetable.steps_per_epoch} per epoch): the iterator must be longer"
      )
    return batch

  @contextlib.contextmanager
  def timing(self, step: int) -> Iterator[None]:
    """Surrounds the call of a step: marks it in a trace, and times the first one."""
    if not self.compile_seconds:
      console.say("compiling the training step")
    self._work.begin(f"training step {step + 1} of {self._training.timetable.total_steps}")
    self._started = time.monotonic()
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      yield

  def log_step(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Logs the metrics of a dispatched step, see `MetricsWriter.write_step`."""
    self._metrics.write_step(step, metrics, self._started)

  def evaluate_and_save(
    self, state: TrainState, step: int, evaluate: Evaluate, save_model: SaveModel | None
  ) -> None:
    """Evaluates, writes the model if this evaluation makes it, and saves.

    Does nothing after a signal: a resumed run repeats the evaluation.
    """
    params, timetable = self._metrics.finite(state, step).eval_params, self._training.timetable
    try:
      with self._signals.interrupting():
        metrics, histograms = evaluate(params, step)
    except tasks.Interrupted:
      return
    except FloatingPointError as error:
      raise FloatingPointError(f"step {step}: {error}") from error
    is_model = self.progress.keep_best(
      step, metrics, of=timetable.metric, last=timetable.takes_last
    )
    self._metrics.write_evaluation(step, metrics, histograms)
    if is_model and save_model is not None:
      save_model(params, step, metrics)
    self._save(state, step)
    self._metrics.say_evaluation(step, metrics)

  def save(self, state: TrainState, step: int) -> None:
    """Saves a checkpoint unless this step is saved already."""
    if step > self._checkpoints.saved_step:
      self._save(state, step)

  def _save(self, state: TrainState, step: int) -> None:
    host, place = self._metrics.finite(state, step), self._training.batches.get_state()
    self._checkpoints.save(step, host, data=place, progress=dataclasses.asdict(self.progress))

  def is_stop_asked(self, step: int) -> bool:
    """Whether a signal asks for the end of the run.

    Several processes decide together, at logged steps and at ends of epochs.
    """
    is_asked, timetable = self._signals.received is not None, self._training.timetable
    if parallel.process_count() == 1:
      return is_asked
    is_time = timetable.is_epoch_end(step) or timetable.is_logged(step)
    return is_time and parallel.any_process(is_asked)

  def exit_after_signal(self, step: int) -> SystemExit:
    """The exception that ends a run that a signal has stopped, with code 128 + signal."""
    number = self._signals.received or signal.SIGTERM
    console.say(f"{signal.Signals(number).name}: saved step {step}; go on with --resume")
    return SystemExit(128 + number)

  def log_end(self, step: int, reason: str) -> None:
    """Says why the run ended, once all processes have ended it."""
    self._metrics.say_end(step, reason)
    parallel.barrier("end of training")


class MetricsWriter:
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
    progress: Progress,
    checkpoints: Checkpoints,
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
    if not (self._timetable.evaluation_due(step) and step > self._progress.evaluated_step):
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

  def say_end(self, step: int, reason: str) -> None:
    """Prints why the run ended, its model, and its peak memory."""
    self.wait()
    progress = self._progress
    text = f"training ended at step {step}: {reason}"
    if progress.best_step is not None:
      text += f"; {self._model} {progress.best_value:.4f} at step {progress.best_step}"
    console.say(text)
    what, peak_bytes = peak_memory()
    console.say(f"peak memory of the {what}: {console.size(peak_bytes)}")
