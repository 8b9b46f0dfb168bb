"""The training loop: restore, evaluate, stop, save, step, log.

The loop does not depend on models or data. A run that is stopped (SIGTERM, Ctrl-C, a crash) and
resumed equals an uninterrupted run, bit for bit on CPU: a checkpoint holds the training state, the
position in the data and the bookkeeping of the loop. `session` reads and writes the files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tpugraphs_jax.infra import parallel
from tpugraphs_jax.train import checkpoint
from tpugraphs_jax.train.session import Evaluate, Run, SaveModel, Session, Training
from tpugraphs_jax.train.step import TrainState


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """The end of a run."""

  state: TrainState  # the last state, of numpy arrays without a device axis
  step: int  # number of steps taken
  progress: checkpoint.Progress  # the last and the best evaluation
  stop_reason: str  # in words
  compile_seconds: float  # of the first step, which compiles


def train(
  training: Training,
  evaluate: Evaluate,
  workdir: str | Path,
  run: Run | None = None,
  *,
  save_model: SaveModel | None = None,
) -> TrainResult:
  """Trains until the last epoch, or until the validation metric stops improving.

  Args:
    training: first state, step, batches and timetable.
    evaluate: gives the metrics of parameters by name, that of the timetable among them.
    workdir: receives `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `profile/`.
    run: whether it resumes, what its checkpoint must agree with, and what is shown and profiled.
    save_model: called with the parameters, the step and the metrics of each evaluation that is the
      best so far, before its checkpoint is saved. If the run is killed in between, the resumed run
      calls it again.

  Raises:
    ValueError: the folder holds a run and `run.resume` is False; its checkpoint is of another
      config or of other data; `evaluate` gives no metric of the timetable's name; or batches end
      before the last epoch.
    FloatingPointError: the loss, the training state or a score is not finite.
    SystemExit: after SIGTERM or Ctrl-C, with everything saved; code 128 + signal.
  """
  timetable = training.timetable
  with Session(training, Path(workdir), run or Run()) as session:
    state, step = session.restore()
    while True:
      # A resumed run does not repeat the evaluation of its checkpoint.
      if timetable.evaluation_due(step) and step > session.progress.evaluated_step:
        session.evaluate_and_save(state, step, evaluate, save_model)
      if session.is_stop_asked(step):
        session.save(state, step)
        raise session.exit_after_signal(step)
      # After the evaluation of this step, whose metric may be the reason.
      if reason := timetable.stop_reason(step, session.progress.best_step):
        break
      if timetable.save_due(step):
        session.save(state, step)  # does nothing where the evaluation has saved this step
      batch = session.next_batch(step)
      with session.timing(step):
        state, metrics = training.train_step(state, batch)
      step += 1
      session.log_step(step, metrics)
    session.log_end(step, reason)
    return TrainResult(
      state=parallel.unreplicate(state),
      step=step,
      progress=session.progress,
      stop_reason=reason,
      compile_seconds=session.compile_seconds,
    )
