"""The time left counts steps, evaluations and what is compiled on the way."""

import pytest

from tpugraphs_jax.train import remaining as remaining_lib
from tpugraphs_jax.train.schedule import Schedule


@pytest.fixture
def clock(monkeypatch):
  """`clock.now` is what the module takes for the time."""
  class Clock:
    now = 1000.0
    monotonic = lambda self: self.now

  found = Clock()
  monkeypatch.setattr(remaining_lib, "time", found)
  return found


def test_before_a_step_nothing_is_known():
  left = remaining_lib.Remaining(Schedule(2, 10))
  left.start(1)
  assert left.text(1, evaluated_step=0) == ""


def test_until_an_evaluation_was_timed_their_number_is_told(clock):
  left = remaining_lib.Remaining(Schedule(3, 10))
  left.start(1)
  clock.now += 8  # four steps of two seconds
  left.count_steps(5)
  assert left.text(5, evaluated_step=0) == "0:00:50 left, and 3 evaluations"


def test_evaluations_count_as_the_newest_one_took(clock):
  left = remaining_lib.Remaining(Schedule(3, 10))
  left.start(0)
  for seconds in (60, 30):  # the first compiles
    clock.now += 20
    left.count_steps(10)
    clock.now += seconds
    left.count_evaluation(10)
  # Twenty steps at four seconds and two evaluations of half a minute.
  assert left.text(10, evaluated_step=10) == "0:02:20 left"


@pytest.mark.parametrize("epochs, every, after, expected", [
    (3, 1, 0, 3), (3, 1, 10, 2), (3, 2, 0, 2), (3, 2, 20, 1), (3, 2, 30, 0), (4, 2, 20, 1)])
def test_the_schedule_knows_how_many_evaluations_come(epochs, every, after, expected):
  schedule = Schedule(epochs, 10, eval_every_epochs=every)
  assert schedule.evaluations_after(after) == expected
  assert expected == sum(map(schedule.is_evaluated, range(after + 1, schedule.total_steps + 1)))


def test_the_schedule_says_why_a_run_ended():
  schedule = Schedule(5, 10, early_stop_epochs=2, best_metric="opa")
  assert schedule.why_ended(50) == "last epoch (5)"
  assert schedule.why_ended(30) == "early stopping: opa did not improve in 2 epochs"
