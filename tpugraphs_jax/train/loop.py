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
  step: int
  progress: checkpoint.Progress
  why: str  # reason of the end, in words
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
    evaluate: computes metrics of parameters, also the metric of the timetable.
    workdir: receives `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `profile/`.
    run: what all phases of the run share.
    save_model: called with parameters, step and metrics of the evaluation that makes the model,
      before its checkpoint is saved. If the run is killed in between, the resumed run calls it
      again.

  Raises:
    ValueError: the folder holds a run and `run.resume` is False; a checkpoint of another config or
      with other files; no metric of that name; or batches that end early.
    FloatingPointError: the loss, the training state or a score is not finite.
    SystemExit: after SIGTERM or Ctrl-C, with everything saved; code 128 + signal.
  """
  timetable = training.timetable
  with Session(training, Path(workdir), run or Run()) as session:
    state, step = session.restore()
    while True:
      if timetable.is_evaluated(step) and step > session.progress.evaluated_step:
        session.evaluate(state, step, evaluate, save_model)
      if session.is_stop_asked(step):
        raise session.stopped(state, step)
      if timetable.is_end(step, session.progress.best_step):
        break
      if timetable.is_saved(step):
        session.save(state, step)
      batch = session.next_batch(step)
      with session.timing(step):
        state, metrics = training.train_step(state, batch)
      step += 1
      session.log_step(step, metrics)
    session.log_end(step)
    why, seconds = timetable.why_ended(step), session.compile_seconds
    return TrainResult(parallel.unreplicate(state), step, session.progress, why, seconds)
