"""Run times of many versions of one function, to be compared with each other.

All versions are compiled first, and their outputs are compared with the outputs of the first.
Then each round times every version for at least 5 ms, in a new order. A version that is 20 times
slower than the best one leaves after three rounds. The time of a version is the minimum over
rounds, since other load on the machine can only add to a time. The first version is compiled
three times, and all three take part in every round. The noise is the difference of their minima.
There are at least 20 rounds. More follow until the noise is below 3 %, or a minute has passed. If
the noise is then above 5 %, all times are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import time
from typing import Any, final, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.infra import console

_ROUNDS, _MOST_ROUNDS, _MOST_SECONDS = 20, 400, 60.0
_BATCH_SECONDS = 5e-3
_COPIED_BYTES = 2**28  # of donated arrays, copied before the calls of a batch
_NOISE = 0.05  # above it the times are refused
_STILL = 0.03  # below it no more rounds are needed
# A version that is this many times slower than the best one is timed in so many rounds only.
_HOPELESS_ROUNDS, _HOPELESS = 3, 20.0
_COPIES = (-1, -2)  # numbers of the two other compilations of the first version
_PAIRS, _RESAMPLED, _CONFIDENCE = 25, 2000, 0.95


class NoisyMachineError(ValueError):
  """Compilations of one function took different times."""


CompilerOptions = Mapping[str, Any]  # as of `jax.jit`
# The versions of a function: number, function of arrays, and what to compile it with.
Functions = Iterable[tuple[int, Callable[..., Any], CompilerOptions]]


def seconds_of_call(function: Callable[..., Any], values: tuple, calls: int) -> float:
  """The mean time of so many calls, in seconds, without the time of copies of donated arrays."""
  leaves = zip(jax.tree.leaves(values), _is_donated(function))
  size = sum(leaf.nbytes for leaf, is_donated in leaves if is_donated)
  at_once = max(1, _COPIED_BYTES // size) if size else calls
  seconds, left = 0.0, calls
  while left > 0:
    batch = [_fresh(function, values) for _ in range(min(at_once, left))]
    start = time.perf_counter()
    for args in batch:
      outputs = function(*args)
    jax.block_until_ready(outputs)
    seconds += time.perf_counter() - start
    left -= len(batch)
  return seconds / calls


@final
class Rounds(TypedDict):
  """The measured times of a function."""

  seconds: list[float]  # of a call, a number for each round
  noise: float  # of the machine in these rounds


def _is_donated(function: Callable[..., Any]) -> list[bool]:
  """Of each argument's arrays, whether a compiled function takes their memory."""
  infos = getattr(function, "args_info", ())
  return [info.donated for info in jax.tree.leaves(infos, is_leaf=lambda x: hasattr(x, "donated"))]


def _fresh(function: Callable[..., Any], values: tuple) -> tuple:
  """The arguments of one call, with copies of the arrays that it deletes."""
  donated = _is_donated(function)
  if not any(donated):
    return values
  leaves, tree = jax.tree.flatten(values)
  copies = [jnp.array(leaf) if taken else leaf for leaf, taken in zip(leaves, donated)]
  return jax.tree.unflatten(tree, jax.block_until_ready(copies))


def measure(
  functions: Functions, args: tuple, *, seed: int = 0
) -> Iterator[tuple[int, Rounds | Exception]]:
  """Measures functions that compute the same outputs; the first one is the default.

  Args:
    functions: with their numbers and compiler options.
    args: example arguments. Arrays are used as given; the functions get random values for
      `jax.ShapeDtypeStruct`.
    seed: of these values and of the order of measurements.

  Yields:
    The number of a function and its times, or the error with which it was refused. Nothing more
    after an error of the first one.

  Raises:
    NoisyMachineError: copies of the default differ by more than 5 %.
  """
  values = _values(args, seed)
  compiled: dict[int, Callable[..., Any]] = {}
  first = expected = None
  failed = 0
  for number, function, compiler_options in functions:
    try:
      with console.working(f"compiling version {len(compiled) + failed + 1}"):
        version = compile_function(function, values, compiler_options)
        outputs = jax.block_until_ready(version(*_fresh(version, values)))
    except (jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError) as error:
      yield number, error
      if first is None:
        break
      failed += 1
      continue
    if first is None:
      first, expected = (function, values, compiler_options), outputs
    elif not _close(outputs, expected):
      yield number, ValueError("its outputs differ from the outputs of the compiler's own choice")
      failed += 1
      continue
    compiled[number] = version
  if first is None:
    return
  default = next(iter(compiled))
  copies = {copy: compile_function(*first) for copy in _COPIES}
  seconds = _rounds({**compiled, **copies}, [default, *copies], values, seed)
  noise, equal = _noise(seconds, [default, *copies])
  if noise > _NOISE and not (failed and len(compiled) == 1):  # else there is nothing to compare
    raise NoisyMachineError(
      f"the same program took {equal[0]:.3g} s and {equal[-1]:.3g} s, {noise:.1%} apart, "
      f"expected at most {_NOISE:.0%}: the machine is busy; stop what else runs on it and try "
      "again"
    )
  for number in compiled:
    yield number, {"seconds": seconds[number], "noise": noise}


def compare(
  default: Callable[..., Any],
  version: Callable[..., Any],
  args: tuple,
  compiler_options: CompilerOptions,
  *,
  seed: int = 0,
) -> tuple[float, float, float]:
  """The time of a version divided by the time of the default, in alternating pairs.

  Args:
    default: a function.
    version: computes the same.
    args: example arguments of both.
    compiler_options: of the version.
    seed: of random arrays and of the resampling.

  Returns:
    The median ratio of the pairs' times, and the ends of its 95 % bootstrap interval.
  """
  values = _values(args, seed)
  pair = [
    compile_function(default, values, {}),
    compile_function(version, values, compiler_options),
  ]
  calls = [_calls(function, values) for function in pair]
  rng, ratios = np.random.default_rng(seed), []
  for turn in range(_PAIRS):
    order = (0, 1) if turn % 2 == 0 else (1, 0)  # the two take turns in being timed first
    times = {place: seconds_of_call(pair[place], values, calls[place]) for place in order}
    ratios.append(times[1] / times[0])
  medians = np.median(rng.choice(ratios, (_RESAMPLED, _PAIRS)), axis=1)
  low, high = np.quantile(medians, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
  return float(np.median(ratios)), float(low), float(high)


def _rounds(
  compiled: dict[int, Callable[..., Any]], equal: list[int], values: tuple, seed: int
) -> dict[int, list[float]]:
  """Seconds of a call by version and round; goes on until the `equal` versions agree."""
  rng, started = np.random.default_rng(seed), time.monotonic()
  calls = {number: _calls(function, values) for number, function in compiled.items()}
  seconds: dict[int, list[float]] = {number: [] for number in compiled}
  with console.working("measuring") as work:
    for turn in range(_MOST_ROUNDS):
      if turn >= _ROUNDS and (
        _noise(seconds, equal)[0] < _STILL or time.monotonic() - started > _MOST_SECONDS
      ):
        break
      work.begin(f"measuring {len(compiled)} versions, round {turn + 1} of {_ROUNDS} or more")
      best = min((min(times) for times in seconds.values() if times), default=np.inf)
      for number in rng.permutation(list(compiled)).tolist():
        if turn >= _HOPELESS_ROUNDS and min(seconds[number]) > _HOPELESS * best:
          continue
        seconds[number].append(seconds_of_call(compiled[number], values, calls[number]))
  return seconds


def _noise(seconds: dict[int, list[float]], equal: list[int]) -> tuple[float, list[float]]:
  """The relative difference of the minima of equal versions, and the minima in order."""
  minima = sorted(min(seconds[number]) for number in equal)
  return minima[-1] / minima[0] - 1, minima


def compile_function(
  function: Callable[..., Any], args: tuple, compiler_options: CompilerOptions
) -> jax.stages.Compiled:
  """The function as the compiler of this machine compiles it, jitted as it is."""
  call = Call(function, args, {})
  return call.lower(call.arrays).compile(compiler_options=call.compiler_options(compiler_options))


def _calls(function: Callable[..., Any], values: tuple) -> int:
  """How many calls take at least 5 ms, without the first one, which takes longer."""
  seconds_of_call(function, values, 1)
  calls = 1
  while seconds_of_call(function, values, calls) * calls < _BATCH_SECONDS:
    calls *= 2
  return calls


def _values(args: tuple, seed: int) -> tuple:
  """The arguments, with arrays for shapes.

  Numbers are standard normal; integers are 0 or 1, indices that every table has.
  """
  rng = np.random.default_rng(seed)

  def values(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
      return jax.device_put(leaf) if isinstance(leaf, np.ndarray) else leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jax.random.split(jax.random.key(seed), leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
    return jnp.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)

  return jax.tree.map(values, args)


def _close(outputs: Any, expected: Any) -> bool:
  """Whether outputs are equal up to rounding, with NaN and infinities at the same places."""

  def is_close(a: Any, b: Any) -> bool:
    finite = np.abs(b)[np.isfinite(b)]
    atol = 1e-3 * (finite.max(initial=0) + 1e-30)
    return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-3, atol=atol, equal_nan=True)

  wide = lambda leaf: np.asarray(leaf, np.result_type(leaf.dtype, np.float64))
  return all(
    is_close(wide(a), wide(b)) for a, b in zip(_leaves(outputs), _leaves(expected), strict=True)
  )


def _leaves(outputs: Any) -> list[jax.Array]:
  """The arrays of outputs; of keys, which NumPy cannot hold, their data."""
  return [
    jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    for leaf in jax.tree.leaves(outputs)
  ]
