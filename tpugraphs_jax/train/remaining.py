"""How long a training run still takes."""

from __future__ import annotations

import datetime
import time

from tpugraphs_jax.train.schedule import Schedule


class Remaining:
  """Steps, what is compiled on their way, checkpoints and evaluations, from those so far.

  The first step, which compiles the program that all others use, counts for nothing.
  """

  def __init__(self, schedule: Schedule):
    self._schedule = schedule
    self._mark: tuple[int, float] | None = None
    self._steps, self._step_seconds = 0, 0.0
    self._evaluation_seconds: float | None = None

  def start(self, step: int) -> None:
    """From here on time counts."""
    self._mark = (step, time.monotonic())

  def count_steps(self, step: int) -> None:
    """The time since the last call went into steps, of which `step` are taken."""
    if self._mark is not None:
      first, since = self._mark
      self._steps += step - first
      self._step_seconds += time.monotonic() - since
    self.start(step)

  def count_evaluation(self, step: int) -> None:
    """The time since the last call went into an evaluation and its checkpoint."""
    if self._mark is not None:  # The newest one tells: the first one compiled.
      self._evaluation_seconds = time.monotonic() - self._mark[1]
    self.start(step)

  def text(self, step: int, *, evaluated_step: int) -> str:
    """The time left, or what is known of it; empty before anything is known.

    Args:
      step: steps taken.
      evaluated_step: the last step that was evaluated.
    """
    if not self._steps:
      return ""
    evaluations = self._schedule.evaluations_after(evaluated_step)
    seconds = (self._schedule.total_steps - step) * self._step_seconds / self._steps
    if self._evaluation_seconds is None:
      return f"{_clock(seconds)} left, and {evaluations} evaluation" + "s" * (evaluations != 1)
    return f"{_clock(seconds + evaluations * self._evaluation_seconds)} left"


def _clock(seconds: float) -> str:
  return str(datetime.timedelta(seconds=round(seconds)))
