"""When a run evaluates, saves, logs, profiles and ends."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The length of a run, and what happens how often.

  Attributes:
    total_epochs: length of the run.
    steps_per_epoch: batches that make an epoch.
    eval_every_epochs: evaluation comes after every so many epochs, and at the end.
    early_stop_epochs: stop at the first evaluation after so many epochs without improvement;
      0 = never.
    best_metric: key of the metric to maximise; of equal values the first counts.
    log_every_steps: metrics are averaged over and reported every so many steps.
    checkpoint_every_steps: besides those after each evaluation; 0 = none.
    profile_steps: `first:last`, counted from 0, last excluded; empty = no profile.

  Raises:
    ValueError: a number that is too small.
  """

  total_epochs: int
  steps_per_epoch: int
  eval_every_epochs: int = 1
  early_stop_epochs: int = 0
  best_metric: str = "opa"
  log_every_steps: int = 100
  checkpoint_every_steps: int = 0
  profile_steps: str = ""

  def __post_init__(self):
    for field, least in (
        ("total_epochs", 1), ("steps_per_epoch", 1), ("eval_every_epochs", 1),
        ("early_stop_epochs", 0), ("log_every_steps", 1), ("checkpoint_every_steps", 0)):
      value = getattr(self, field)
      if value < least:
        raise ValueError(f"{field} is {value}, expected at least {least}")

  @property
  def total_steps(self) -> int:
    return self.total_epochs * self.steps_per_epoch

  def is_epoch_end(self, step: int) -> bool:
    return step % self.steps_per_epoch == 0

  def is_evaluated(self, step: int) -> bool:
    """Whether an evaluation comes after this step."""
    every = self.eval_every_epochs * self.steps_per_epoch
    return step % every == 0 or step == self.total_steps

  def evaluations_after(self, step: int) -> int:
    """Evaluations that come after later steps than this one, to the last epoch."""
    every = self.eval_every_epochs * self.steps_per_epoch
    is_extra = self.total_steps % every > 0 and step < self.total_steps
    return self.total_steps // every - step // every + is_extra

  def why_ended(self, step: int) -> str:
    """Why a run that was not interrupted ended after this step."""
    if step >= self.total_steps:
      return f"last epoch ({self.total_epochs})"
    return (f"early stopping: {self.best_metric} did not improve in {self.early_stop_epochs} "
            "epochs")

  def is_early_stop(self, step: int, best_step: int | None) -> bool:
    """Whether the run ends after this step for want of improvement since `best_step`.

    It ends with an evaluation, which may be the best one.
    """
    without = step - (best_step or 0)
    return self.is_evaluated(step) and (
        0 < self.early_stop_epochs * self.steps_per_epoch <= without)

  def is_logged(self, step: int) -> bool:
    return step % self.log_every_steps == 0

  def is_saved(self, step: int) -> bool:
    """Whether a checkpoint is due after this step, evaluation or not."""
    every = self.checkpoint_every_steps
    return bool(every) and step % every == 0
