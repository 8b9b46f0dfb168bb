import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax.tuning import compiler, measure

_X = jax.ShapeDtypeStruct((3, 4), jnp.float32)


class _Timer:
  """A timer whose call number k, from 1, returns `seconds(function, k)`."""

  def __init__(self, seconds):
    self.seconds, self.order = seconds, []

  def __call__(self, function, values, calls):
    self.order.append(function)
    return self.seconds(function, len(self.order))


@pytest.fixture
def take_time(monkeypatch):
  """A function that replaces the timer by a `_Timer` of `seconds`, and returns it."""

  def replace(seconds=lambda function, k: 0.01):
    timer = _Timer(seconds)
    monkeypatch.setattr(measure, "seconds_of_call", timer)
    return timer

  return replace


def _measured(*functions):
  versions = ((number, function, {}) for number, function in enumerate(functions))
  return dict(measure.measure(versions, (_X,)))


def _doubled(x):
  return 2 * x


def _same(x):
  return x + x


def test_every_round_times_every_version_and_two_copies_of_the_first(take_time):
  timer = take_time()
  versions = [(0, _doubled, {}), (7, _same, {})]
  found, order = dict(measure.measure(versions, (_X,))), timer.order
  assert list(found) == [0, 7]
  assert len(found[0]["seconds"]) == len(found[7]["seconds"]) == 20
  assert found[0]["noise"] == 0
  warm_up = 2 * 4  # two versions and two copies: a first call, then a count of calls that take 5 ms
  rounds = [order[k : k + 4] for k in range(warm_up, len(order), 4)]
  assert len(rounds) == 20 and all(len(set(map(id, times))) == 4 for times in rounds)
  assert len({tuple(map(id, times)) for times in rounds}) > 1  # in a new order each time


def test_a_version_with_other_outputs_is_refused(take_time):
  take_time()
  found = _measured(_doubled, lambda x: 3 * x, lambda x: x @ x)
  assert "outputs differ" in str(found[1])
  assert isinstance(found[2], TypeError)
  assert set(found[0]) == {"seconds", "noise"}


def test_versions_are_compiled_with_their_options(take_time):
  take_time()
  known, unknown = {"xla_cpu_enable_fast_math": True}, {"xla_no_such": True}
  versions = [(0, _doubled, {}), (1, _same, known), (2, _same, unknown)]
  found = dict(measure.measure(versions, (_X,)))
  assert "xla_no_such" in str(found[2]) and set(found[1]) == {"seconds", "noise"}
  with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such"):
    measure.compare(_doubled, _same, (_X,), unknown)


def test_a_busy_machine_is_refused(take_time):
  take_time(lambda function, k: 0.01 * k)  # slower at every call
  with pytest.raises(measure.NoisyMachineError):
    _measured(_doubled)


def test_a_copy_of_the_default_that_takes_another_time_is_noise(take_time):
  # The function warmed up last is a copy of the default: the same program, compiled again.
  timer = take_time(lambda function, k: 0.0104 if k > 6 and function is timer.order[6] else 0.01)
  found = _measured(_doubled, _same)
  assert found[0]["noise"] == pytest.approx(0.04) and found[1]["noise"] == found[0]["noise"]
  assert len(found[1]["seconds"]) == 400  # more rounds, because of the noise


def test_rounds_go_on_until_the_machine_is_quiet(take_time):
  # A busy spell of 25 rounds of four, in which every call has its own load.
  load = iter(np.random.default_rng(0).uniform(1.5, 5, 8 + 25 * 4))
  take_time(lambda function, k: 0.01 * next(load, 1.0))
  found = _measured(_doubled, _same)
  assert found[0]["noise"] < 0.03 and 20 < len(found[0]["seconds"]) <= 26
  assert min(found[1]["seconds"]) == pytest.approx(0.01)


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_pairs_tell_which_version_is_faster(ratio, take_time):
  # First both are timed twice, to find how many calls take 5 ms; then come the pairs.
  noise = iter(np.random.default_rng(0).uniform(1, 1.02, 1000))
  timer = take_time(
    lambda function, k: (
      next(noise) * (0.01 if k < 3 or function is timer.order[0] else 0.01 * ratio)
    )
  )
  median, low, high = measure.compare(_doubled, _same, (_X,), {})
  order = timer.order
  assert low < median < high and (low < ratio < high or median == pytest.approx(ratio, rel=0.02))
  assert (high < 1) == (ratio < 1)
  pairs = [order[k : k + 2] for k in range(4, len(order), 2)]
  assert len(pairs) == 25 and all(len(set(map(id, pair))) == 2 for pair in pairs)
  assert {pair[0] is order[0] for pair in pairs} == {True, False}  # the two take turns to begin


def test_the_interval_of_equal_times_holds_one(take_time):
  noise = iter(np.random.default_rng(1).uniform(0.9, 1.1, 1000))
  take_time(lambda function, k: 0.01 * next(noise))
  _, low, high = measure.compare(_doubled, _same, (_X,), {})
  assert low < 1 < high


def test_functions_may_return_keys(take_time):
  take_time()
  with_key = lambda x: (2 * x, jax.random.key(0))
  other = lambda x: (2 * x, jax.random.key(1))
  found = _measured(with_key, with_key, other)
  assert set(found[0]) == set(found[1]) == {"seconds", "noise"}
  assert "outputs differ" in str(found[2])


def _outputs(*values):
  return (np.array(values, np.float32),)


_NAN, _INF = np.nan, np.inf


@pytest.mark.parametrize(
  "first, second, is_close",
  [
    ((_NAN, 1), (_NAN, 1.0000002), True),
    ((_NAN, 1), (_NAN, 2), False),
    ((_NAN, 1), (1, _NAN), False),
    ((_INF, 1), (_INF, 1.0000002), True),
    ((_INF, 1), (_INF, 2), False),
    ((_INF, 1), (-_INF, 1), False),
    ((_INF, 1), (5, 1), False),
    ((5, 1), (_INF, 1), False),
    ((_NAN, _NAN), (_NAN, _NAN), True),
    ((), (), True),
    ((1000, 0.5), (1000, 0.9), True),  # small beside the largest
    ((1000, 0.5), (1000, 2.9), False),
  ],
)
def test_outputs_are_compared_by_their_finite_values(first, second, is_close):
  assert measure._close(_outputs(*first), _outputs(*second)) is is_close


@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4, jnp.bool_, jnp.complex64]
)
def test_outputs_of_every_type_are_compared(dtype):
  one = (jnp.array([1, 0, 1], dtype),)
  assert measure._close(one, one) and not measure._close(one, (jnp.array([0, 1, 1], dtype),))


def test_arrays_are_used_as_given(monkeypatch):
  seen = []
  variance = jnp.array([2.0, 0.25, 4.0])

  def timer(function, values, calls):
    seen.append(values)
    return 0.01

  monkeypatch.setattr(measure, "seconds_of_call", timer)
  args = ({"variance": variance, "scale": 3.0}, _X)
  function = lambda tree, x: x / jnp.sqrt(tree["variance"])[:, None] * tree["scale"]
  assert "seconds" in dict(measure.measure([(0, function, {})], args))[0]
  tree, x = seen[0]
  assert tree["variance"] is variance and tree["scale"] == 3.0 and x.shape == _X.shape


def test_an_error_of_the_first_one_ends_it_and_a_callback_has_a_reason():
  def missing(x):
    raise KeyError("no such table")

  function = lambda x: jax.pure_callback(missing, _X, x) * 2
  ((number, error),) = measure.measure([(3, function, {}), (4, _doubled, {})], (_X,))
  assert number == 3 and compiler.reason(error) == "KeyError: 'no such table'"


def test_on_a_busy_machine_the_reason_for_which_all_others_failed_wins(take_time):
  times = {}  # every compilation takes another time
  take_time(lambda function, k: 0.01 * times.setdefault(id(function), len(times) + 1))
  other = lambda x: x.reshape(5, 5)
  found = _measured(_doubled, other, other)
  assert set(found) == {0, 1, 2} and "seconds" in found[0]
  assert all("reshape" in str(found[number]) for number in (1, 2))
  with pytest.raises(measure.NoisyMachineError):
    _measured(_doubled, other, _same)
