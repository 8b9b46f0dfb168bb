"""Decides after which steps a run evaluates, logs, saves and ends."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from tpugraphs_jax.rankers.config import TrainOptions


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

  def evaluation_due(self, step: int) -> bool:
    """Whether an evaluation is due after this step."""
    every = self.options.eval_every_epochs * self.steps_per_epoch
    return step % every == 0 or step == self.total_steps

  def stop_reason(self, step: int, best_step: int | None) -> str | None:
    """Why the run ends after this step; None where it goes on.

    Args:
      step: of the last batch.
      best_step: of the best evaluation. Only an evaluation can end a run before its last epoch.
    """
    if step >= self.total_steps:
      return f"last epoch ({self.epochs})"
    epochs = self.options.early_stop_epochs
    most_steps = epochs * self.steps_per_epoch
    if self.evaluation_due(step) and 0 < most_steps <= step - (best_step or 0):
      return f"early stopping: {self.metric} did not improve in {epochs} epochs"
    return None

  def is_logged(self, step: int) -> bool:
    return step % self.options.log_every_steps == 0

  def save_due(self, step: int) -> bool:
    """Whether a checkpoint is due after this step, even without an evaluation."""
    every = self.options.checkpoint_every_steps
    return bool(every) and step % every == 0
