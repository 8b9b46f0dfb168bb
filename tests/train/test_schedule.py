"""When a run evaluates, saves, logs and ends, against the steps written out."""

import pytest

from tpugraphs_jax.train.schedule import Schedule


def steps_where(schedule, is_due):
  return [step for step in range(1, schedule.total_steps + 1) if is_due(step)]


def test_a_run_evaluates_after_every_so_many_epochs_and_at_its_end():
  schedule = Schedule(total_epochs=7, steps_per_epoch=4, eval_every_epochs=3)
  assert schedule.total_steps == 28
  assert steps_where(schedule, schedule.is_evaluated) == [12, 24, 28]
  every = Schedule(total_epochs=3, steps_per_epoch=2)
  assert steps_where(every, every.is_evaluated) == [2, 4, 6]


def test_checkpoints_between_evaluations_come_only_when_asked_for():
  never = Schedule(total_epochs=2, steps_per_epoch=5)
  assert steps_where(never, never.is_saved) == []
  some = Schedule(total_epochs=2, steps_per_epoch=5, checkpoint_every_steps=3)
  assert steps_where(some, some.is_saved) == [3, 6, 9]


def test_metrics_are_logged_every_so_many_steps_across_epochs():
  schedule = Schedule(total_epochs=2, steps_per_epoch=5, log_every_steps=4)
  assert steps_where(schedule, schedule.is_logged) == [4, 8]
  assert steps_where(schedule, schedule.is_epoch_end) == [5, 10]


@pytest.mark.parametrize("best_step, expected", [(None, [6, 8, 10]), (2, [8, 10]), (8, [])])
def test_a_run_ends_early_at_the_end_of_an_epoch_without_improvement(best_step, expected):
  schedule = Schedule(total_epochs=5, steps_per_epoch=2, early_stop_epochs=3)
  assert steps_where(
      schedule, lambda step: schedule.is_early_stop(step, best_step)) == expected


@pytest.mark.parametrize("best_step, expected", [
    (None, [6, 12, 18, 20]), (6, [12, 18, 20]), (12, [18, 20])])
def test_a_run_never_ends_early_between_two_evaluations(best_step, expected):
  schedule = Schedule(total_epochs=10, steps_per_epoch=2, early_stop_epochs=2, eval_every_epochs=3)
  assert steps_where(
      schedule, lambda step: schedule.is_early_stop(step, best_step)) == expected


def test_a_run_never_ends_early_unless_asked_to():
  schedule = Schedule(total_epochs=5, steps_per_epoch=2)
  assert not steps_where(schedule, lambda step: schedule.is_early_stop(step, None))


@pytest.mark.parametrize("field, value", [
    ("total_epochs", 0), ("steps_per_epoch", 0), ("eval_every_epochs", 0),
    ("early_stop_epochs", -1), ("log_every_steps", 0), ("checkpoint_every_steps", -1)])
def test_numbers_that_are_too_small_are_refused_by_name(field, value):
  options = dict(total_epochs=1, steps_per_epoch=1) | {field: value}
  with pytest.raises(ValueError, match=f"{field} is {value}, expected at least"):
    Schedule(**options)
