import logging

import numpy as np
import pytest

from tests.support import hlo_modules
from tpugraphs_jax import columns, hlo
from tpugraphs_jax.hlo import module_graph, proto
from tpugraphs_jax.rankers.tables import node_pairs


def _featurize(module, **options):
  return hlo.featurize(module.SerializeToString(), **options)


def test_a_module_without_instructions_is_refused():
  for module in (
    proto.HloModuleProto(name="empty"),
    hlo_modules.module(hlo_modules.computation(name="while"), hlo_modules.computation(name="main")),
  ):
    with pytest.raises(ValueError, match="no instruction"):
      _featurize(module)


def test_a_callee_listed_twice_is_two_edges_in_insertion_order_and_refused_in_sorted():
  callee = hlo_modules.computation(hlo_modules.instruction(id=1), name="branch", id=7)
  main = hlo_modules.computation(hlo_modules.instruction("conditional", id=2, callees=[7, 7]))
  module = hlo_modules.module(callee, main)
  assert _featurize(module, edge_order="insertion").edge_index.tolist() == [[1, 0]] * 2
  with pytest.raises(ValueError, match="twice"):
    _featurize(module)


def test_where_ids_collide_the_last_instruction_has_the_edges():
  main = hlo_modules.computation(
    hlo_modules.instruction("parameter", id=1),
    hlo_modules.instruction("parameter", id=1),
    hlo_modules.instruction(id=2, operands=[1]),
    hlo_modules.instruction(id=2),
  )
  assert _featurize(hlo_modules.module(main)).edge_index.tolist() == [[3, 1]]


def test_ids_keep_all_64_bits():
  high = (5 << 32) | 1
  main = hlo_modules.computation(
    hlo_modules.instruction(id=1),
    hlo_modules.instruction(id=high, operands=[1]),
    hlo_modules.instruction(id=-3, operands=[high]),
  )
  assert _featurize(hlo_modules.module(main)).edge_index.tolist() == [[1, 0], [2, 1]]


@pytest.mark.parametrize(
  "fields, problem",
  [
    ({"operands": [99]}, "operand id 99"),
    ({"callees": [98]}, "computation id 98"),
    ({"callees": [8]}, "root of computation id 8"),
    ({"operands": [2]}, "consumes itself"),
    ({"callees": [1]}, "consumes itself"),
  ],
)
def test_a_reference_that_leads_nowhere_is_named(fields, problem):
  main = hlo_modules.computation(
    hlo_modules.instruction(id=1), hlo_modules.instruction("map", id=2, **fields)
  )
  broken = hlo_modules.computation(name="broken", id=8, root_id=77)
  with pytest.raises(ValueError, match=problem):
    _featurize(hlo_modules.module(main, broken))


def test_opcodes_outside_the_table_have_id_0_and_are_reported_once(caplog):
  main = hlo_modules.computation(
    *(hlo_modules.instruction("erf", id=k) for k in range(3)),
    hlo_modules.instruction("add", id=5),
    hlo_modules.instruction("Add", id=6),
  )
  with caplog.at_level(logging.WARNING, logger="absl"):
    graph = _featurize(hlo_modules.module(main))
  assert graph.node_opcode.tolist() == [0, 0, 0, 2, 0]
  assert graph.node_opcode.dtype == np.uint8
  (record,) = caplog.records
  assert "'erf' (3), 'Add' (1)" in record.getMessage()


# Bits of an element, from the name.
LATER = {"s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "f8e5m2": 8, "f8e4m3fn": 8}


def _of_types(*numbers, shape=(3, 5)):
  main = hlo_modules.computation(
    *(hlo_modules.instruction("parameter", id=k, shape=shape) for k in range(len(numbers)))
  )
  for instruction, number in zip(main.instructions, numbers):
    instruction.shape.element_type = number
  return hlo_modules.module(main)


def test_types_that_the_data_set_does_not_know_cost_their_bytes_and_are_reported_once(caplog):
  number = {kind.name: kind.number for kind in columns.LATER_TYPES}
  with caplog.at_level(logging.WARNING, logger="absl"):
    graph = _featurize(_of_types(*(number[name] for name in LATER), number["s4"], 11, 99))
  (record,) = caplog.records
  assert "9 arrays" in record.getMessage()
  assert "'s4' (2)" in record.getMessage() and "'type 99' (1)" in record.getMessage()
  nbytes = node_pairs.tensor_bytes(graph.for_rankers().node_feat)
  assert nbytes.tolist() == [15 * bits / 8 for bits in (*LATER.values(), 4, 32, 0)]
  # The data set's own features have no type there.
  assert graph.node_feat[:, columns.NODE["element_type"]].sum() == 1
  shapes = [proto.shape_text(node.shape) for node in proto.instructions(graph.module)]
  assert shapes[:3] == ["s2[3,5]", "u2[3,5]", "s4[3,5]"]


def test_a_graph_of_known_types_is_the_same_for_rankers():
  graph = _featurize(_of_types(*(kind.number for kind in columns.ELEMENT_TYPES)))
  assert graph.for_rankers() is graph


@pytest.mark.parametrize("is_tuple", [False, True])
def test_a_dimension_without_a_size_is_refused(is_tuple):
  module = _of_types(12, shape=(-(2**63), 16))
  if is_tuple:
    shape = module.computations[0].instructions[0].shape
    module.computations[0].instructions[0].shape.CopyFrom(
      proto.ShapeProto(element_type=13, tuple_shapes=[shape])
    )
  with pytest.raises(ValueError, match=r"'parameter.0'.*\[\?,16\]"):
    _featurize(module)


@pytest.mark.parametrize(
  "files, line",
  [
    (("/v/site-packages/jax/lax.py", "/home/me/model.py", "<frozen runpy>"), "model.py:2"),
    (("/v/site-packages/jax/lax.py", "<frozen runpy>"), "lax.py:1"),
    (("<frozen runpy>",), ""),
  ],
)
def test_the_line_of_an_instruction_is_the_users_and_never_the_interpreters(files, line):
  node = hlo_modules.instruction()
  module = hlo_modules.module(hlo_modules.computation(node))
  node.metadata.stack_frame_id = 1
  stack = module.stack_frame_index
  for number, file in enumerate(files, 1):
    stack.file_names.append(file)
    stack.file_locations.add(file_name_id=number, line=number)
    stack.stack_frames.add(file_location_id=number, parent_frame_id=(number + 1) % (len(files) + 1))
  assert module_graph.origin(node, module).where == line
