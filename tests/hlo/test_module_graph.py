import logging

import hlo_modules
import numpy as np
import pytest

from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import proto


def _featurize(module, **options):
  return hlo.featurize(module.SerializeToString(), **options)


def test_numbers_are_rounded_once_from_int64_to_float32():
  number = (1 << 54) + (1 << 30) + 1
  assert np.float32(np.float64(number)) != np.int64(number).astype(np.float32)
  module = hlo_modules.module(
      hlo_modules.computation(hlo_modules.instruction(shape=[number])))
  node_feat = _featurize(module).node_feat
  assert node_feat[0, 21] == np.int64(number).astype(np.float32)
  assert node_feat[0, 28] == node_feat[0, 21]


def test_products_wrap_modulo_two_to_the_64():
  module = hlo_modules.module(
      hlo_modules.computation(hlo_modules.instruction(shape=[1 << 62, 2, 3])))
  assert _featurize(module).node_feat[0, 28] == np.float32(-(1 << 63))


def test_a_module_without_computations_is_an_empty_graph():
  for module in (proto.HloModuleProto(name="empty"), hlo_modules.module(
      hlo_modules.computation(name="while"), hlo_modules.computation(name="main"))):
    graph = _featurize(module)
    assert graph.node_feat.shape == (0, 140)
    assert graph.edge_index.shape == (0, 2)
    assert graph.node_splits.tolist() == [0] + [0] * len(module.computations[:1])


def test_edges_of_an_instruction_are_its_operands_by_id_then_its_callees():
  callee = hlo_modules.computation(
      hlo_modules.instruction("parameter", id=50), name="callee", id=7)
  main = hlo_modules.computation(
      hlo_modules.instruction("parameter", id=9),
      hlo_modules.instruction("parameter", id=4),
      hlo_modules.instruction("map", id=60, operands=[9, 4, 9], callees=[7]))
  graph = _featurize(hlo_modules.module(callee, main), edge_order="insertion")
  assert graph.edge_index.tolist() == [[3, 2], [3, 1], [3, 0]]
  graph = _featurize(hlo_modules.module(callee, main))
  assert graph.edge_index.tolist() == [[3, 0], [3, 1], [3, 2]]
  assert graph.edge_index.dtype == np.int32


def test_a_callee_listed_twice_is_two_edges_in_insertion_order_and_refused_in_sorted():
  callee = hlo_modules.computation(hlo_modules.instruction(id=1), name="branch", id=7)
  main = hlo_modules.computation(
      hlo_modules.instruction("conditional", id=2, callees=[7, 7]))
  module = hlo_modules.module(callee, main)
  assert _featurize(module, edge_order="insertion").edge_index.tolist() == [[1, 0]] * 2
  with pytest.raises(ValueError, match="'main'.*'conditional.2'.*'add.1' twice"):
    _featurize(module)


def test_where_ids_collide_the_last_instruction_has_the_edges():
  main = hlo_modules.computation(
      hlo_modules.instruction("parameter", id=1),
      hlo_modules.instruction("parameter", id=1),
      hlo_modules.instruction(id=2, operands=[1]),
      hlo_modules.instruction(id=2))
  assert _featurize(hlo_modules.module(main)).edge_index.tolist() == [[3, 1]]


def test_ids_keep_all_64_bits():
  high = (5 << 32) | 1
  main = hlo_modules.computation(
      hlo_modules.instruction(id=1), hlo_modules.instruction(id=high, operands=[1]),
      hlo_modules.instruction(id=-3, operands=[high]))
  assert _featurize(hlo_modules.module(main)).edge_index.tolist() == [[1, 0], [2, 1]]


@pytest.mark.parametrize("fields, problem", [
    ({"operands": [99]}, "operand id 99"),
    ({"callees": [98]}, "computation id 98"),
    ({"callees": [8]}, "root of computation id 8"),
    ({"operands": [2]}, "consumes itself"),
    ({"callees": [1]}, "consumes itself"),
])
def test_a_reference_that_leads_nowhere_is_named(fields, problem):
  main = hlo_modules.computation(
      hlo_modules.instruction(id=1), hlo_modules.instruction("map", id=2, **fields))
  broken = hlo_modules.computation(name="broken", id=8, root_id=77)
  with pytest.raises(
      ValueError,
      match=f"'main', instruction 'map.2' .*{problem}"):
    _featurize(hlo_modules.module(main, broken))


def test_node_splits_follow_computations_named_after_loops_branches_and_clusters():
  names = ["main", "while_body", "second", "While", "Cluster", "xclusterx", "tail"]
  module = hlo_modules.module(*(
      hlo_modules.computation(hlo_modules.instruction(id=10 * k), name=name, id=k)
      for k, name in enumerate(names)))
  # "second" contains "cond"; capitals do not count.
  assert _featurize(module).node_splits.tolist() == [0, 2, 3, 6, 7]


def test_opcodes_outside_the_table_have_id_0_and_are_reported_once(caplog):
  main = hlo_modules.computation(
      *(hlo_modules.instruction("erf", id=k) for k in range(3)),
      hlo_modules.instruction("add", id=5), hlo_modules.instruction("Add", id=6))
  with caplog.at_level(logging.WARNING, logger="absl"):
    graph = _featurize(hlo_modules.module(main))
  assert graph.node_opcode.tolist() == [0, 0, 0, 2, 0]
  assert graph.node_opcode.dtype == np.uint8
  assert [record.getMessage() for record in caplog.records] == [
      "HLO bytes: 4 instructions have an opcode outside the table and get id 0: "
      "'erf' (3), 'Add' (1)"]


def test_convolution_dot_and_reshape_are_the_configurable_nodes():
  names = ["add", "dot", "convolution", "transpose", "reshape"]
  main = hlo_modules.computation(
      *(hlo_modules.instruction(name, id=k) for k, name in enumerate(names)))
  graph = _featurize(hlo_modules.module(main))
  assert graph.config_node.tolist() == [1, 2, 4]
  assert graph.config_node.dtype == np.int32


def test_repeated_numbers_may_be_packed_or_not():
  packed = hlo_modules.instruction(shape=[3, 4])
  shape = b"\x10\x0b" + b"\x18\x03\x18\x04"  # element_type 11, dimensions one by one
  each = b"\x12\x03add" + b"\x1a" + bytes([len(shape)]) + shape + b"\x98\x02\x01"
  body = b"\x0a\x04main" + b"\x12" + bytes([len(each)]) + each + b"\x28\x01\x30\x01"
  data = b"\x0a\x06module" + b"\x1a" + bytes([len(body)]) + body
  expected = _featurize(hlo_modules.module(hlo_modules.computation(packed)))
  graph = hlo.featurize(data)
  np.testing.assert_array_equal(graph.node_feat, expected.node_feat)
  assert graph.node_feat[0, 21:23].tolist() == [3, 4]


def test_an_unknown_edge_order_is_refused():
  with pytest.raises(ValueError, match="edge_order is 'random'"):
    _featurize(proto.HloModuleProto(name="empty"), edge_order="random")
