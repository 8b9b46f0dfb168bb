"""Integers that kernels read, against NumPy; kernels inside loops, branches and calls."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import hlo_modules
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.hlo.scalar_operands import scalar_operands

_SIZES = np.array([3, 0, 5], np.int32)
_X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def _copy(ends_ref, x_ref, out_ref):
  out_ref[...] = x_ref[...] + ends_ref[0]


def kernel(ends, x):
  """A kernel that reads `ends` as scalars."""
  return pl.pallas_call(_copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(ends, x)


def module(*kernels):
  """A compiled program with kernels of these words and rows."""
  nodes = []
  for words, rows in kernels:
    first = 3 * len(nodes)
    shapes = (words,), (rows, 128)
    nodes += [hlo_modules.instruction("parameter", first + n, (), s) for n, s in enumerate(shapes)]
    nodes[-2].shape.element_type = 4  # s32
    inputs = (first, first + 1)
    call = hlo_modules.instruction("custom-call", first + 2, inputs, (rows, 128))
    call.custom_call_target = "tpu_custom_call"
    nodes.append(call)
  return hlo_modules.module(hlo_modules.computation(*nodes))


def found(function, *args, kernels=((3, 8),)):
  call = Call(function, args, {})
  known = {n: array for n, array in enumerate(call.arrays) if isinstance(array, np.ndarray)}
  operands = scalar_operands(call, known, module(*kernels)).values
  return {name: {n: v.tolist() for n, v in values.items()} for name, values in operands.items()}


def _grouped(x, group_sizes):
  return kernel(jnp.cumsum(group_sizes), x)


@pytest.mark.parametrize("how, ends", [("assumed", [3, 6, 8]), ("lowest", [8, 8, 8])])
def test_sizes_of_groups_without_values_are_assumed_by_their_name(how, ends):
  """Also where the program computes them: here by the function that it calls."""
  sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
  for function in (_grouped, lambda x, s: jax.jit(_grouped)(x, 2 * s)):
    operands = scalar_operands(Call(function, (_X, sizes), {}), {}, module((3, 8)), how)
    ((values,),) = (operand.values() for operand in operands.values.values())
    assert values.tolist() == ends
    assert operands.assumed["group_sizes"].limits == (8,)


def test_sizes_with_values_are_not_assumed():
  call = Call(_grouped, (_X, _SIZES), {})
  operands = scalar_operands(call, {1: _SIZES}, module((3, 8)))
  assert not operands.assumed


def test_integers_that_select_blocks_are_assumed_to_be_any_of_them():
  def select(places, x):
    spec = pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(3,),
      in_specs=[pl.BlockSpec((8, 128), lambda i, places: (places[i], 0))],
      out_specs=pl.BlockSpec((8, 128), lambda i, places: (i, 0)),
    )
    copy = lambda places_ref, x_ref, out_ref: out_ref.__setitem__(..., x_ref[...])
    shape = jax.ShapeDtypeStruct((24, 128), jnp.float32)
    return pl.pallas_call(copy, out_shape=shape, grid_spec=spec)(places, x)

  args = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((80, 128), jnp.float32)
  compiled = module((3, 80))
  compiled.computations[0].instructions[-1].shape.dimensions[0] = 24
  operands = scalar_operands(Call(select, args, {}), {}, compiled)
  ((values,),) = (operand.values() for operand in operands.values.values())
  assert values.shape == (3,) and values.min() >= 0 and values.max() < 10
  (meaning,) = operands.assumed.values()
  assert meaning.limits == (10,)


def _looped(sizes, x):
  return jax.lax.fori_loop(0, 4, lambda _, x: kernel(jnp.cumsum(sizes), x), x)


def _scanned(sizes, x):
  return jax.lax.scan(lambda x, _: (kernel(jnp.cumsum(sizes), x), None), x, length=4)[0]


def _branched(sizes, x):
  return jax.lax.cond(x.sum() > 0, lambda x: kernel(jnp.cumsum(sizes), x), lambda x: x, x)


@jax.custom_vjp
def _with_rule(sizes, x):
  return kernel(jnp.cumsum(sizes), x)


_with_rule.defvjp(lambda sizes, x: (_with_rule(sizes, x), sizes), lambda s, g: (None, kernel(s, g)))


@pytest.mark.parametrize(
  "function",
  [
    lambda sizes, x: kernel(jnp.cumsum(sizes), x),
    jax.jit(lambda sizes, x: kernel(jax.jit(jnp.cumsum)(sizes), 2 * x)),
    jax.checkpoint(lambda sizes, x: kernel(jnp.cumsum(sizes), x)),
    _looped,
    _scanned,
    _branched,
    _with_rule,
    lambda sizes, x: kernel(jax.lax.scan(lambda c, s: (c + s, c + s), 0, sizes)[1], x),
  ],
)
def test_integers_are_computed_from_those_of_the_arguments(function):
  assert found(function, _SIZES, _X) == {"custom-call.2": {0: np.cumsum(_SIZES).tolist()}}


def test_of_kernels_with_equal_shapes_only_common_integers_are_known():
  # The forward pass reads the sums of the sizes, the backward pass the sizes.
  loss = jax.grad(lambda x, sizes: _with_rule(sizes, x).sum())
  assert found(loss, _X, _SIZES) == {}
  two = lambda sizes, x: kernel(sizes, x) + kernel(sizes, 2 * x)
  assert found(two, _SIZES, _X) == {"custom-call.2": {0: _SIZES.tolist()}}


def test_kernels_are_told_apart_by_their_shapes():
  both = lambda sizes, x: kernel(sizes, x), lambda sizes, x: kernel(sizes[:2] + 1, x[:4])
  function = lambda sizes, x: [part(sizes, x) for part in both]
  assert found(function, _SIZES, _X, kernels=((2, 4), (3, 8), (5, 8))) == {
    "custom-call.2": {0: [4, 1]},
    "custom-call.11": {0: [3, 0, 5]},
  }


@pytest.mark.parametrize(
  "function, args",
  [
    (lambda sizes, x: kernel(sizes, x), (jax.ShapeDtypeStruct((3,), jnp.int32), _X)),
    (lambda sizes, x: kernel(sizes + x[0, 0].astype(int), x), (_SIZES, _X)),
    (lambda sizes, x: _scan_over(sizes, x), (_SIZES, _X)),
    (lambda sizes, x: x, (_SIZES, _X)),
    (lambda sizes, x: _solved(sizes, kernel(sizes, x)), (_SIZES, _X)),
    (lambda sizes, x: _awaited(sizes, kernel(sizes, x)), (_SIZES, _X)),
  ],
)
def test_integers_that_data_or_an_iteration_decides_are_not_known(function, args):
  assert found(function, *args) == {}


def test_kernels_that_integers_alone_reach_are_not_run():
  x = np.ones((8, 128), np.int32)
  looped = lambda sizes, x: jax.lax.fori_loop(0, 4, lambda _, x: kernel(sizes, x), x)
  last = lambda sizes, x: kernel(looped(sizes, x)[0, :3], looped(sizes, x))
  assert found(looped, _SIZES, x) == {"custom-call.2": {0: _SIZES.tolist()}}
  assert found(last, _SIZES, x) == {}  # two kernels of these shapes: one has unknown integers


def _solved(sizes, x):
  """A kernel inside a primitive of which no inputs are known reads other integers."""
  solve = lambda _, b: kernel(sizes + 1, b)
  return jax.lax.custom_linear_solve(lambda x: 2 * x, x, solve, symmetric=True)


def _awaited(sizes, x):
  """The condition of a loop has a kernel, which reads other integers."""
  go_on = lambda x: kernel(sizes + 1, x).sum() < 0
  return jax.lax.while_loop(go_on, lambda x: 2 * x, x)


def _scan_over(sizes, x):
  step = lambda x, size: (kernel(jnp.full(3, size), x), None)
  return jax.lax.scan(step, x, sizes)[0]


def _split(sizes, x):
  mesh = jax.sharding.AbstractMesh((2,), ("data",))
  P = jax.sharding.PartitionSpec

  def of_device(sizes, starts, x):
    starts = jax.lax.ppermute(starts, "data", [(0, 1), (1, 0)])  # which no device knows
    return kernel(jnp.cumsum(sizes) + jax.lax.axis_index("data"), x) + kernel(starts, x[:4])[:1]

  specs = P("data"), P("data"), P("data")
  mapped = jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
  return mapped(sizes, sizes, x)


def test_a_kernel_of_a_mesh_reads_the_integers_of_the_first_device():
  sizes, x = np.array([3, 0, 5, 1, 1, 1], np.int32), jax.ShapeDtypeStruct((16, 128), jnp.float32)
  assert found(_split, sizes, x, kernels=((3, 8), (3, 4))) == {"custom-call.2": {0: [3, 3, 8]}}


def test_integers_are_computed_here_under_a_mesh_of_other_devices():
  mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    values = found(lambda sizes, x: kernel(jnp.cumsum(sizes), x), _SIZES, _X)
    assert values == {"custom-call.2": {0: [3, 3, 8]}}
    assert not jax.sharding.get_abstract_mesh().empty
