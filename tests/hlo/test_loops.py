"""Lengths of loops, against loops that count their iterations, and of modules by hand."""

import json

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import hlo_modules
from tpugraphs_jax.hlo import loops, proto

_S = jax.ShapeDtypeStruct
_KEEP = {
  "<": jnp.less,
  "<=": jnp.less_equal,
  ">": jnp.greater,
  ">=": jnp.greater_equal,
  "!=": jnp.not_equal,
}


def _lengths(function, *args):
  """The lengths of a function's loops, sorted: as lowered, and as compiled.

  The compiler removes loops without iterations.
  """
  lowered = jax.jit(function).lower(*args)
  (compiled,) = lowered.compile().runtime_executable().hlo_modules()
  found = []
  for module in (lowered.compiler_ir("hlo").as_hlo_module(), compiled):
    data = module.as_serialized_hlo_module_proto()
    counts = loops.iterations(proto.parse_module(data, where="test"))
    lengths = [count for count in counts.values() if count != 0]
    found.append(sorted(lengths, key=lambda count: -1 if count is None else count))
  return found


def _while(keep, move, start):
  """A loop that counts its iterations beside its state; its result is the number."""

  def run(x):
    state = (start, jnp.int32(0), x)
    step = lambda state: (move(state[0]), state[1] + 1, jnp.tanh(state[2]))
    return lax.while_loop(lambda state: keep(state[0]), step, state)[1:]

  return run


def _cases():
  i32 = jnp.int32
  return {
    "down to 1": (lambda i: i > 0, lambda i: i - 1, i32(100)),
    "down to 0 by 3": (lambda i: i >= 0, lambda i: i - 3, i32(100)),
    "from 50": (lambda i: i < 100, lambda i: i + 1, i32(50)),
    "steps of 10": (lambda i: i < 95, lambda i: i + 10, i32(0)),
    "a bound on the left": (lambda i: 100 > i, lambda i: 7 + i, i32(-3)),
    "a product": (lambda i: i * i < 100, lambda i: i + 1, i32(0)),
    "doubling": (lambda i: i < 1000, lambda i: 2 * i, i32(1)),
    "halving": (lambda i: i > 0, lambda i: i // 2, i32(1000)),
    "collatz": (lambda i: i != 1, lambda i: jnp.where(i % 2 == 0, i // 2, 3 * i + 1), i32(27)),
    "floating point": (lambda i: i < 1, lambda i: i + jnp.float32(0.01), jnp.float32(0)),
    "wrapping around": (lambda i: i > 100, lambda i: i + 1, jnp.uint8(120)),
    "shifts": (lambda i: i < 2**30, lambda i: i << 1 | 1, i32(1)),
    "unsigned": (lambda i: i >= 5, lambda i: i - 5, jnp.uint32(52)),
    "small": (lambda i: i < 100, lambda i: i + jnp.int16(7), jnp.int16(-50)),
    "a flag": (lambda i: ~(i > 4), lambda i: i + 1, i32(0)),
    "a clamp": (lambda i: i < 30, lambda i: i + jnp.clip(i, 1, 5), i32(0)),
    "no iteration": (lambda i: i < 0, lambda i: i + 1, i32(0)),
    "many": (lambda i: i < 40_000, lambda i: i + 1, i32(0)),
    "many of a product": (lambda i: i * i < 2_000_000_000, lambda i: i + 1, i32(0)),
  }


@pytest.mark.parametrize("name", _cases())
def test_the_length_of_a_loop_is_the_number_of_its_iterations(name):
  function = _while(*_cases()[name])
  expected = int(jax.jit(function)(1.0)[0])
  for found in _lengths(function, 1.0):
    assert found == ([expected] if expected else [])


@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_random_loops_are_the_numbers_of_their_iterations(seed):
  rng = np.random.default_rng(seed)
  starts, steps = rng.integers(-50, 50, 8), rng.integers(1, 9, 8)
  signs, lengths = rng.choice([-1, 1], 8), rng.integers(0, 40, 8)
  functions = []
  for start, step, sign, length in zip(starts, steps * signs, signs, lengths):
    keep = _KEEP[str(rng.choice(["<", "<="] if sign > 0 else [">", ">="]))]
    bound = jnp.int32(start + step * length)
    counts_to = lambda i, keep=keep, bound=bound: keep(i, bound)
    functions.append(_while(counts_to, lambda i, step=int(step): i + step, jnp.int32(start)))
  all_of = lambda x: [function(x) for function in functions]
  counts = [int(count) for count, _ in jax.jit(all_of)(1.0)]
  expected = sorted(count for count in counts if count)
  for found in _lengths(all_of, 1.0):
    assert found == expected


@pytest.mark.parametrize("has_x64", [False, True])
def test_scans_and_their_gradients_have_lengths_with_integers_of_32_and_64_bits(has_x64):
  with jax.enable_x64(has_x64):
    layers = lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()
    x, w = _S((4, 4), jnp.float32), _S((13, 4, 4), jnp.float32)
    for found in _lengths(layers, x, w):
      assert found == [13]
    assert _lengths(jax.grad(layers), x, w)[1] == [13, 13]
    assert _lengths(lambda x: lax.fori_loop(0, 3_000_000, lambda i, x: x @ x, x), x)[1] == [3e6]


def test_inner_loops_have_their_mean_length():
  def within(bound):
    inner = lambda i, x: lax.fori_loop(0, bound(i), lambda j, x: jnp.sin(x), x)
    return lambda x, *n: lax.fori_loop(0, 10, inner, x)

  for found in _lengths(within(lambda i: 5), 1.0):
    assert found == [5, 10]
  for found in _lengths(within(lambda i: i + 1), 1.0):  # 1 to 10
    assert found == [5.5, 10]

  def twice(x):
    count, x = lax.while_loop(
      lambda state: state[0] < 7, lambda state: (state[0] + 2, state[1] * 3), (jnp.int32(0), x)
    )
    return lax.fori_loop(0, count, lambda _, x: jnp.sin(x), x)

  assert _lengths(twice, 1.0) == [[4, 8], [4, 8]]


def test_loops_that_end_on_data_have_no_length():
  ends_on_data = {
    "traced": lambda x, n: lax.fori_loop(n, 100, lambda i, x: x @ x, x),
    "until": lambda x, n: lax.while_loop(lambda x: jnp.sum(x > 0.5) > 0, jnp.tanh, x),
    "either": lambda x, n: lax.while_loop(
      lambda state: (state[0] < 9) & (state[1][0, 0] < 1),
      lambda state: (state[0] + 1, state[1] * 2),
      (jnp.int32(0), x),
    ),
    "step": lambda x, n: lax.while_loop(
      lambda state: state[0] < 9, lambda state: (state[0] + n, state[1] * 2), (jnp.int32(0), x)
    ),
    "exp": lambda x, n: lax.while_loop(
      lambda state: jnp.exp(state[0]) < 9,
      lambda state: (state[0] + 1, state[1] * 2),
      (jnp.float32(0), x),
    ),
  }
  for name, function in ends_on_data.items():
    for found in _lengths(function, _S((4, 4), jnp.float32), _S((), jnp.int32)):
      assert found == [None], name
  both = lambda x, n: lax.fori_loop(0, 3, lambda i, x: ends_on_data["until"](x, n), x)
  for found in _lengths(both, _S((4, 4), jnp.float32), 1):
    assert found == [None, 3]


def test_branches_run_their_loops():
  short, long = (lambda x, n=n: lax.fori_loop(0, n, lambda i, x: jnp.sin(x), x) for n in (2, 9))
  for found in _lengths(lambda x, n: lax.cond(n > 0, short, long, x), 1.0, 1):
    assert found == [2, 9]


def test_arguments_that_are_known_give_a_length():
  lowered = jax.jit(lambda n, x: lax.fori_loop(n, 100, lambda i, x: jnp.sin(x), x)).lower(1, 1.0)
  data = lowered.compiler_ir("hlo").as_hlo_module().as_serialized_hlo_module_proto()
  module = proto.parse_module(data, where="test")
  assert list(loops.iterations(module, [40]).values()) == [60]
  assert list(loops.iterations(module, [None, 1.0]).values()) == [None]


def test_endless_and_very_long_loops_have_no_length():
  endless = _while(lambda i: i < 5, lambda i: i - 0, jnp.int32(0))
  chaotic = _while(lambda i: i != 12345, lambda i: i * 1664525 + 1013904223, jnp.uint32(1))
  for function in (endless, chaotic):
    lowered = jax.jit(function).lower(1.0)
    data = lowered.compiler_ir("hlo").as_hlo_module().as_serialized_hlo_module_proto()
    assert list(loops.iterations(proto.parse_module(data, where="test")).values()) == [None]


def test_the_number_of_the_compiler_counts_where_there_is_no_other():
  node = hlo_modules.instruction
  body = hlo_modules.computation(node("parameter", 1), id=1)
  condition = hlo_modules.computation(node("parameter", 1), id=2)
  loop = node("while", 2, operands=[1], callees=[1, 2])
  for config, expected in (
    ({"known_trip_count": {"n": "3"}}, 3),
    ({}, None),
    ({"known_trip_count": {"n": "-2"}}, None),
  ):
    loop.backend_config = json.dumps(config).encode()
    main = hlo_modules.computation(node("parameter", 1), loop, id=3)
    module = hlo_modules.module(body, condition, main)
    module.entry_computation_id = 3
    assert loops.iterations(module) == {"while.2": expected}
    assert loops.trip_count(loop) == expected
