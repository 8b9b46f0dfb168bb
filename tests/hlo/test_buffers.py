"""Buffers of programs: their sizes, who shares them, and when they are live."""

import json
import math

import pytest

from tests.support import commands
from tests.support.hlo_modules import computation, instruction, module
from tpugraphs_jax.hlo import buffers, proto, work

_F32, _BF16, _TUPLE = 11, 16, 13


def _array(shape, dimensions, *, tiles=(), element_type=_F32, space=0):
  shape.element_type = element_type
  shape.dimensions.extend(dimensions)
  shape.layout.minor_to_major.extend(reversed(range(len(dimensions))))
  shape.layout.memory_space = space
  for tile in tiles:
    shape.layout.tiles.add(dimensions=tile)
  return shape


def _node(opcode, id, operands=(), *, kilobytes=1, space=0, parts=(), **fields):
  """An instruction whose result has so many kilobytes, or a tuple of such arrays."""
  node = instruction(opcode, id, operands, **fields)
  if parts:
    node.shape.element_type = _TUPLE
    for size in parts:
      _array(node.shape.tuple_shapes.add(), [256 * size])
  else:
    _array(node.shape, [256 * kilobytes], space=space)
  return node


def _live(*computations, aliases=()):
  whole = module(*computations)
  whole.entry_computation_id = computations[-1].id
  for part in computations:
    ids = [node.id for node in part.instructions]
    whole.schedule.sequences[part.id].instruction_ids.extend(ids)
  for output, parameter in aliases:
    entry = whole.input_output_alias.entries.add(parameter_number=parameter)
    entry.output_shape_index.extend(output)
  return buffers.live_memory(whole)


def _padded(dimensions, tiles, **options):
  node = instruction()
  return buffers.padded_size(_array(node.shape, dimensions, tiles=tiles, **options))


@pytest.mark.parametrize(
  "dimensions, tiles, element_type, expected",
  [  # sizes of libtpu's buffer assignment
    ([8, 2], [(8, 128)], _F32, 8 * 128 * 4),
    ([2048, 1024], [(8, 128), (2, 1)], _BF16, 2048 * 1024 * 2),
    ([3, 100], [(8, 128), (2, 1)], _BF16, 8 * 128 * 2),
    ([], [(128,)], _F32, 512),
    ([4, 100, 2], [(8, 128)], _F32, 4 * 104 * 128 * 4),
    ([7, 5], [], _F32, 7 * 5 * 4),
  ],
)
def test_a_size_has_the_padding_of_tiles(dimensions, tiles, element_type, expected):
  assert _padded(dimensions, tiles, element_type=element_type) == expected


def test_a_tile_may_join_dimensions():
  assert _padded([3, 5, 7], [(-(2**63), 16, 8)]) == 4 * 16 * math.ceil(15 / 16) * 8


def test_a_temporary_is_live_from_its_definition_to_its_last_use():
  live = _live(
    computation(
      _node("parameter", 1, kilobytes=1),
      _node("add", 2, [1], kilobytes=10),
      _node("add", 3, [2], kilobytes=100),
      _node("add", 4, [3], kilobytes=1000),
      _node("add", 5, [4, 3], kilobytes=1),
    )
  )
  assert [size // 1024 for size in live.sizes] == [1, 11, 111, 1101, 1102]
  assert [(buffer.name, buffer.kind) for buffer in live.buffers] == [
    ("add.4", buffers.TEMPORARY),
    ("add.3", buffers.TEMPORARY),
    ("parameter.1", buffers.ARGUMENT),
    ("add.5", buffers.OUTPUT),
  ]
  assert live.peak_bytes == 1102 * 1024 == sum(buffer.size for buffer in live.buffers)


def test_views_and_updates_in_place_take_no_memory():
  live = _live(
    computation(
      _node("add", 1, kilobytes=8),
      _node("bitcast", 2, [1], kilobytes=8),
      _node("add", 3, kilobytes=1),
      _node("dynamic-update-slice", 4, [2, 3], kilobytes=8),
      _node("tuple", 5, [4], parts=[8]),
      _node("get-tuple-element", 6, [5], kilobytes=8),
    )
  )
  assert live.peak_bytes == 9 * 1024


def test_a_loop_carries_its_buffers_and_its_body_adds_its_own():
  body = computation(
    _node("parameter", 1, parts=[4, 16]),
    _node("get-tuple-element", 2, [1], kilobytes=4),
    _node("get-tuple-element", 3, [1], kilobytes=16, tuple_index=1),
    _node("add", 4, [2, 3], kilobytes=32),
    _node("fusion", 5, [4, 3], kilobytes=16),
    _node("tuple", 6, [2, 5], parts=[4, 16]),
    name="body",
    id=1,
  )
  aliasing = {"aliasing_operands": {"lists": [{"indices": ["1", "2"]}]}}  # its result: operand 1
  body.instructions[4].backend_config = json.dumps(aliasing).encode()
  entry = computation(
    _node("parameter", 11, kilobytes=4),
    _node("add", 12, [11], kilobytes=16),
    _node("copy", 13, [11], kilobytes=4),
    _node("tuple", 14, [13, 12], parts=[4, 16]),
    _node("while", 15, [14], parts=[4, 16], callees=[1]),
    _node("get-tuple-element", 16, [15], kilobytes=16, tuple_index=1),
    id=2,
  )
  live = _live(body, entry)
  assert live.peak_bytes == (4 + 16 + 4 + 32) * 1024
  assert live.instructions[live.peak] == "add.4"
  assert [buffer.kind for buffer in live.buffers] == [
    "temporary",
    "output",
    "argument",
    "temporary",
  ]


def test_a_part_of_a_tuple_is_live_until_its_own_last_use_and_not_that_of_the_others():
  live = _live(
    computation(
      _node("parameter", 1),
      _node("add", 2, [1], kilobytes=16),
      _node("copy", 3, [1], kilobytes=4),
      _node("tuple", 4, [2, 3], parts=[16, 4]),
      _node("get-tuple-element", 5, [4], kilobytes=16),
      _node("reduce", 6, [5]),
      _node("broadcast", 7, [6], kilobytes=8),
      _node("get-tuple-element", 8, [4], kilobytes=4, tuple_index=1),
      _node("fusion", 9, [7, 8]),
    )
  )
  assert live.sizes[5] == live.peak_bytes == (1 + 16 + 4 + 1) * 1024
  assert live.sizes[6] == (1 + 4 + 1 + 8) * 1024


def test_a_donated_argument_is_one_buffer_with_its_output():
  nodes = [
    _node("parameter", 1, kilobytes=64),
    _node("add", 2, [1], kilobytes=64),
    _node("tuple", 3, [2], parts=[64]),
  ]
  assert _live(computation(*nodes)).peak_bytes == 128 * 1024
  assert _live(computation(*nodes), aliases=[([0], 0)]).peak_bytes == 64 * 1024


def test_memory_on_the_chip_and_constants_do_not_count():
  live = _live(
    computation(
      _node("constant", 1, kilobytes=64),
      _node("add", 2, [1], kilobytes=64, space=1),
      _node("add", 3, [2], kilobytes=1),
    )
  )
  assert live.peak_bytes == 1024


def test_a_copy_beside_the_program_is_a_buffer_and_its_source_another():
  live = _live(
    computation(
      _node("parameter", 1, kilobytes=8),
      _node("copy-start", 2, [1], parts=[8, 8, 1]),
      _node("copy-done", 3, [2], kilobytes=8),
    )
  )
  assert sorted(buffer.size // 1024 for buffer in live.buffers) == [1, 8, 8]


def test_a_module_of_a_compiler_has_the_bytes_of_its_arguments_and_outputs():
  data = (commands.ROOT / "tests/data/hlo/mlp_train_opt.hlo.pb").read_bytes()
  whole = proto.parse_module(data, where="module")
  live = buffers.live_memory(whole)
  (entry,) = (part for part in whole.computations if part.id == whole.entry_computation_id)
  given = [node for node in entry.instructions if node.opcode == "parameter"]
  (root,) = (node for node in entry.instructions if node.id == entry.root_id)
  total = lambda kind: sum(buffer.size for buffer in live.buffers if buffer.kind == kind)
  assert total(buffers.ARGUMENT) == sum(work.size(node.shape) for node in given)
  assert live.sizes[-1] >= total(buffers.ARGUMENT) + work.size(root.shape)
  assert max(live.sizes) == live.peak_bytes == sum(buffer.size for buffer in live.buffers)


def test_without_a_schedule_nothing_is_known():
  assert buffers.live_memory(module(computation(_node("add", 1)))) == buffers.LiveMemory()


def test_a_reference_to_nothing_is_refused():
  with pytest.raises(ValueError, match="99"):
    _live(computation(_node("add", 1, [99])))


def test_the_plan_of_a_compiler_counts_what_is_in_the_large_memory():
  plan = proto.HloProto(hlo_module=module(computation(_node("add", 1))))
  for size, color in ((1000, 0), (30, 1), (200, 0), (5000, 5)):
    plan.buffer_assignment.buffer_allocations.add(size=size, color=color)
  plan.buffer_assignment.buffer_allocations.add(size=7000, is_constant=True)
  assert buffers.planned_bytes(plan.SerializeToString()) == 1200


def test_a_module_alone_and_other_bytes_have_no_plan():
  assert buffers.planned_bytes(module(computation(_node("add", 1))).SerializeToString()) == 0
  assert buffers.planned_bytes(b"\xff") == 0
