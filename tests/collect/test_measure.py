import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax.collect import measure

_X = jax.ShapeDtypeStruct((3, 4), jnp.float32)


def _timed(monkeypatch, seconds):
  """Replaces the timer: its call number k, from 1, says `seconds(function, k)`."""
  order = []

  def time(function, values, calls):
    order.append(function)
    return seconds(function, len(order))
  monkeypatch.setattr(measure, "_time", time)
  return order


def _doubled(x):
  return 2 * x


def _same(x):
  return x + x


def test_every_round_has_every_version_and_three_copies_of_the_first_one(monkeypatch):
  order = _timed(monkeypatch, lambda function, k: .01)
  found = dict(measure.measure([(0, _doubled), (7, _same)], (_X,)))
  assert list(found) == [0, 7]
  assert len(found[0]["seconds"]) == len(found[7]["seconds"]) == 20
  assert found[0]["noise"] == 0
  warm_up = 2 * 4  # two versions and two copies: a first call, and how many take 5 ms
  rounds = [order[k:k + 4] for k in range(warm_up, len(order), 4)]
  assert len(rounds) == 20 and all(len(set(map(id, each))) == 4 for each in rounds)
  assert len({tuple(map(id, each)) for each in rounds}) > 1  # in a new order each time


def test_a_version_with_other_outputs_is_refused(monkeypatch):
  _timed(monkeypatch, lambda function, k: .01)
  found = dict(measure.measure(
      [(0, _doubled), (1, lambda x: 3 * x), (2, lambda x: x @ x)], (_X,)))
  assert "outputs differ" in str(found[1])
  assert isinstance(found[2], TypeError)
  assert set(found[0]) == {"seconds", "noise"}


def test_a_busy_machine_is_refused(monkeypatch):
  _timed(monkeypatch, lambda function, k: .01 * k)  # ever slower
  with pytest.raises(measure.NoisyMachineError):
    dict(measure.measure([(0, _doubled)], (_X,)))


def test_a_copy_of_the_default_that_takes_another_time_is_noise(monkeypatch):
  # The last one that is warmed up is a copy: the same program, compiled again.
  order = _timed(
      monkeypatch, lambda function, k: .0104 if k > 6 and function is order[6] else .01)
  monkeypatch.setattr(measure, "_MOST_ROUNDS", 30)
  found = dict(measure.measure([(0, _doubled), (1, _same)], (_X,)))
  assert found[0]["noise"] == pytest.approx(.04) and found[1]["noise"] == found[0]["noise"]
  assert len(found[1]["seconds"]) == 30  # it went on, in the hope of less noise


def test_rounds_go_on_until_the_machine_is_quiet(monkeypatch):
  # A busy spell of 25 rounds of four, in which every call has its own load.
  load = iter(np.random.default_rng(0).uniform(1.5, 5, 8 + 25 * 4))
  _timed(monkeypatch, lambda function, k: .01 * next(load, 1.))
  found = dict(measure.measure([(0, _doubled), (1, _same)], (_X,)))
  assert found[0]["noise"] < .03 and 20 < len(found[0]["seconds"]) <= 26
  assert min(found[1]["seconds"]) == pytest.approx(.01)


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_pairs_tell_which_version_is_faster(monkeypatch, ratio):
  # As in turn: both are timed twice to find how many calls take 5 ms, then the pairs.
  noise = iter(np.random.default_rng(0).uniform(1, 1.02, 1000))
  order = _timed(monkeypatch, lambda function, k: next(noise) * (
      .01 if k < 3 or function is order[0] else .01 * ratio))
  median, low, high = measure.compare(_doubled, _same, (_X,))
  assert low < median < high and (low < ratio < high or median == pytest.approx(ratio, rel=.02))
  assert (high < 1) == (ratio < 1)
  pairs = [order[k:k + 2] for k in range(4, len(order), 2)]
  assert len(pairs) == 25 and all(len(set(map(id, pair))) == 2 for pair in pairs)
  assert {pair[0] is order[0] for pair in pairs} == {True, False}  # who begins takes turns


def test_the_interval_of_equal_times_holds_one(monkeypatch):
  noise = iter(np.random.default_rng(1).uniform(.9, 1.1, 1000))
  _timed(monkeypatch, lambda function, k: .01 * next(noise))
  _, low, high = measure.compare(_doubled, _same, (_X,))
  assert low < 1 < high
