"""Operations and bytes of instructions, against XLA's own count and by hand."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import hlo_modules
from tpugraphs_jax.hlo import proto, work

_S = jax.ShapeDtypeStruct
_KINDS = {"f32": 11, "s32": 4, "bf16": 16, "s4": 21, "s8": 2}


def _flops(function, *args):
  """The operations of a function as lowered, as counted here and by XLA."""
  lowered = jax.jit(function).lower(*args)
  data = lowered.compiler_ir("hlo").as_hlo_module().as_serialized_hlo_module_proto()
  module = proto.parse_module(data, where="test")
  computations = {computation.id: computation for computation in module.computations}
  main = computations[module.entry_computation_id]
  nodes = {node.id: node for node in main.instructions}
  counted = sum(work.count(node, nodes, computations).flops for node in main.instructions)
  return counted, lowered.cost_analysis().get("flops", 0)


@pytest.mark.parametrize("seed", range(12))
def test_flops_of_convolutions_are_those_of_xla(seed):
  rng = np.random.default_rng(seed)
  draw = lambda high, size=None: rng.integers(1, high, size)
  groups, spatial = int(draw(3)), tuple(map(int, draw(9, 2)))
  window = tuple(map(int, draw(4, 2)))
  x = _S((int(draw(4)), *spatial, groups * int(draw(4))), jnp.float32)
  kernel = _S((*window, x.shape[-1] // groups, groups * int(draw(5))), jnp.float32)
  convolve = lambda x, kernel: lax.conv_general_dilated(
    *(x, kernel, tuple(map(int, draw(3, 2))), [tuple(map(int, draw(4, 2))) for _ in range(2)]),
    lhs_dilation=tuple(map(int, draw(3, 2))),
    rhs_dilation=tuple(map(int, draw(3, 2))),
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
    feature_group_count=groups,
  )
  counted, expected = _flops(convolve, x, kernel)
  assert counted == expected


def test_flops_of_products_reductions_and_elementwise_functions_are_those_of_xla():
  x, y = _S((3, 40, 50), jnp.bfloat16), _S((3, 50, 60), jnp.bfloat16)
  functions = (
    lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
    lambda x, y: jnp.tensordot(x, y, ((0, 2), (0, 1))),
    lambda x, y: x * 2 - jnp.maximum(x, 1),
    lambda x, y: jnp.tanh(x),
  )
  for function in functions:
    counted, expected = _flops(function, x, y)
    assert counted == expected
  counted, expected = _flops(lambda x, y: lax.reduce_max(x, (1,)), x, y)
  assert counted == pytest.approx(expected, rel=0.05)  # XLA leaves out the first element
  pool = lambda x, y: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3), (1, 2, 2), "VALID")
  counted, expected = _flops(pool, _S((3, 41, 51), jnp.float32), y)
  assert counted == expected > 0


def test_the_batch_of_a_product_that_became_a_window_counts_once():
  """The TPU compiler makes `bij,bjk->bik` a convolution whose window meets each batch once."""
  node = hlo_modules.instruction("convolution", 3, [1, 2], (6, 4, 5))
  numbers = node.convolution_dimension_numbers
  numbers.input_spatial_dimensions.append(0)
  numbers.output_spatial_dimensions.append(0)
  numbers.kernel_spatial_dimensions.append(0)
  numbers.input_batch_dimension, numbers.input_feature_dimension = 1, 2
  numbers.kernel_input_feature_dimension, numbers.kernel_output_feature_dimension = 1, 2
  node.window.dimensions.add(
    size=6, stride=5, padding_low=0, padding_high=0, window_dilation=1, base_dilation=6
  )
  nodes = {
    1: hlo_modules.instruction("parameter", 1, shape=(6, 4, 7)),
    2: hlo_modules.instruction("parameter", 2, shape=(6, 7, 5)),
  }
  assert work.count(node, nodes, {}).flops == 2 * 6 * 4 * 5 * 7


def test_products_of_8_bits_take_half_the_time_at_the_peak():
  for kinds, share in ((("s8", "s8"), 0.5), (("s8", "bf16"), 1.0), (("bf16", "bf16"), 1.0)):
    nodes = {
      1: _array("parameter", 1, 8, 16, kind=kinds[0]),
      2: _array("parameter", 2, 16, 4, kind=kinds[1]),
      3: _array("dot", 3, 8, 4, operands=[1, 2]),
    }
    nodes[3].dot_dimension_numbers.lhs_contracting_dimensions.append(1)
    found = work.count(nodes[3], nodes, {})
    assert found.flops == 2 * 8 * 4 * 16 and found.wide_flops == share * found.flops


def _array(opcode, id, *shape, kind="f32", space=0, operands=(), callees=(), **fields):
  node = hlo_modules.instruction(opcode, id, operands, shape, callees, **fields)
  node.shape.element_type = _KINDS[kind]
  node.shape.layout.memory_space = space
  return node


def _bytes(*nodes, fused=()):
  """The bytes of the last instruction of a computation."""
  computations = {2: hlo_modules.computation(*fused, id=2)}
  return work.count(nodes[-1], {node.id: node for node in nodes}, computations).bytes_accessed


def test_bytes_are_those_between_the_large_memory_and_the_chip():
  large, on_chip = _array("parameter", 1, 8, 16), _array("parameter", 2, 8, 16, space=1)
  assert _bytes(large, _array("tanh", 3, 8, 16, operands=[1])) == 2 * 512
  assert _bytes(large, on_chip, _array("add", 3, 8, 16, operands=[1, 2])) == 2 * 512
  assert _bytes(on_chip, _array("tanh", 3, 8, 16, space=1, operands=[2])) == 0
  assert _bytes(large, _array("multiply", 3, 8, 16, operands=[1, 1])) == 2 * 512
  assert _bytes(large, _array("bitcast", 3, 128, operands=[1])) == 0
  assert (
    _bytes(large, _array("custom-call", 3, 8, operands=[1], custom_call_target="X64Combine")) == 0
  )
  assert (
    _bytes(_array("parameter", 1, 9, kind="s4"), _array("copy", 3, 9, kind="bf16", operands=[1]))
    == 23
  )


def test_a_copy_to_the_chip_counts_once():
  large = _array("parameter", 1, 8, 16)
  start = _array("copy-start", 2, operands=[1])
  start.shape.CopyFrom(proto.ShapeProto(element_type=13))
  for space in (1, 0):  # the copy, its operand
    part = start.shape.tuple_shapes.add(element_type=11, dimensions=[8, 16])
    part.layout.memory_space = space
  assert _bytes(large, start) == 512
  done = _array("copy-done", 3, 8, 16, space=1, operands=[2])
  assert _bytes(large, start, done) == 0
  assert _bytes(large, start, done, _array("tanh", 4, 8, 16, operands=[3])) == 512


def test_a_copy_that_the_run_before_has_made_counts_nothing():
  start = _array("copy-start", 2, 8, 16, space=1, operands=[1], cross_program_prefetch_index=0)
  assert work.is_loaded_before(start) and _bytes(_array("parameter", 1, 8, 16), start) == 0


def test_a_slice_of_an_operand_and_an_update_in_place_count_their_own_bytes():
  whole, index = _array("parameter", 1, 64, 16), _array("parameter", 2, kind="s32")
  piece = _array("dynamic-slice", 3, 1, 16, operands=[1, 2, 2])
  assert _bytes(whole, index, piece) == 2 * 64 + 4
  update = _array("dynamic-update-slice", 4, 64, 16, operands=[1, 3, 2, 2])
  assert _bytes(whole, index, piece, update) == 2 * 64 + 4
  fusion = _array("fusion", 5, 16, operands=[1, 2], callees=[2])
  inner = [
    _array("parameter", 11, 64, 16),
    _array("parameter", 12, kind="s32", parameter_number=1),
    _array("bitcast", 13, 64, 16, operands=[11]),
    _array("dynamic-slice", 14, 1, 16, operands=[13, 12, 12]),
    _array("reshape", 15, 16, operands=[14]),
  ]
  assert _bytes(whole, index, fusion, fused=inner) == 2 * 64 + 4
  writer = _array("fusion", 5, 64, 16, operands=[1, 2], callees=[2])
  inner += [
    _array("tanh", 16, 1, 16, operands=[14]),
    _array("dynamic-update-slice", 17, 64, 16, operands=[11, 16, 12, 12]),
  ]
  assert _bytes(whole, index, writer, fused=inner) == 2 * 64 + 4
  inner.append(_array("add", 18, 64, 16, operands=[17, 11]))  # reads and writes all
  assert _bytes(whole, index, writer, fused=inner) == 2 * 64 * 64 + 4
