"""Instructions of compiled programs that only move."""

from tests.support import hlo_modules
from tpugraphs_jax.tuning import moves


def _node(opcode, id, order=(1, 0), operands=(), **fields):
  node = hlo_modules.instruction(opcode, id, operands, (8, 128), **fields)
  node.shape.layout.minor_to_major.extend(order)
  node.metadata.op_name = f"jit(f)/{opcode}_{id}"
  return node


def _moves(*nodes, callees=()):
  module = hlo_modules.module(*callees, hlo_modules.computation(*nodes, id=9))
  module.entry_computation_id = 9
  return moves.moves(module)


def test_copies_of_arguments_and_results_may_be_removed_by_an_entry_layout():
  found = _moves(
    _node("parameter", 1),
    _node("copy", 2, (0, 1), [1]),
    _node("tanh", 3, (0, 1), [2]),
    _node("copy", 4, (1, 0), [3]),
    _node("tuple", 5, operands=[4]),
  )
  assert found == {
    "copy.2": moves.Move("{1,0} to {0,1}", "argument jit(f)/parameter_1", "an entry layout"),
    "copy.4": moves.Move("{0,1} to {1,0}", "result", "an entry layout"),
  }


def test_copies_beside_products_and_reshapes_may_be_removed_by_tune():
  around = [_node("parameter", 1), _node("tanh", 2, operands=[1])]
  copy, end = _node("copy", 3, (0, 1), [2]), _node("exp", 5, (0, 1), [4])
  used = [*around, copy, _node("dot", 4, (0, 1), [3, 3]), end]
  assert _moves(*used)["copy.3"] == moves.Move("{1,0} to {0,1}", "jit(f)/tanh_2", "tune")
  unused = [*around, copy, _node("add", 4, (0, 1), [3, 3]), end]
  assert _moves(*unused)["copy.3"].remedy == ""
  fused = hlo_modules.computation(_node("parameter", 11), _node("convolution", 12), id=1)
  inside = [*around, copy, _node("fusion", 4, (0, 1), [3], callees=[1]), end]
  assert _moves(*inside, callees=[fused])["copy.3"].remedy == "tune"


def test_a_copy_in_the_same_order_and_a_fusion_that_computes_change_no_layout():
  body = [_node("parameter", 11), _node("transpose", 12, (0, 1), [11])]
  nodes = [
    _node("parameter", 1),
    _node("copy", 2, operands=[1]),
    _node("fusion", 3, (0, 1), [2], callees=[1]),
    _node("exp", 4, (0, 1), [3]),
  ]
  only = hlo_modules.computation(*body, id=1)
  assert set(_moves(*nodes, callees=[only])) == {"fusion.3", "transpose.12"}
  computes = hlo_modules.computation(*body, _node("tanh", 13, (0, 1), [12]), id=1)
  assert "fusion.3" not in _moves(*nodes, callees=[computes])
