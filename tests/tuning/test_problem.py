import types

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

from tests.support import hlo_modules
from tpugraphs_jax import collect, hlo
from tpugraphs_jax.hlo import names, proto, sources, tpu
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.tuning import costs, labels, problem

_X = jax.ShapeDtypeStruct((4, 6), jnp.float32)
_W = jax.ShapeDtypeStruct((6, 8), jnp.float32)


def _product(x, w):
  return jnp.tanh(x @ w)


def _dot_graph(output, first, second, *, group=0, opcode="dot"):
  """A graph with one dot of these shapes, whose name states its group."""
  dot = hlo_modules.instruction(opcode, id=3, operands=[1, 2], shape=output)
  dot.metadata.op_name = f"jit(f)/{names.LAYOUT_GROUP}{group}/dot_general"
  module = hlo_modules.module(
    hlo_modules.computation(
      hlo_modules.instruction("parameter", id=1, shape=first),
      hlo_modules.instruction("parameter", id=2, shape=second),
      dot,
    )
  )
  return hlo.featurize(module.SerializeToString())


def _tensors(row):
  return [tuple(int(dim) for dim in row[start : start + 6] if dim >= 0) for start in (0, 6, 12)]


@pytest.mark.parametrize(
  "shapes, expected",
  [
    (((4, 8), (4, 6), (6, 8)), [(0, 1), (1, 0), (0, 1)]),
    (((8, 4), (4, 6), (6, 8)), [(1, 0), (1, 0), (0, 1)]),  # a transposed output
    (((4, 8), (6, 8), (4, 6)), [(0, 1), (0, 1), (1, 0)]),  # swapped operands
    (((4, 8), (4, 6), (8, 6)), [(0, 1), (1, 0), (1, 0)]),
    (((4, 8), (24,), (6, 8)), [(0, 1), (), (0, 1)]),  # a tensor of another shape
  ],
)
def test_orders_are_written_for_the_dimensions_of_the_node(shapes, expected):
  found = collect.choices(_product, _X, _W, operands=True)
  option = found.groups[0].options.index(((0, 1), (1, 0), (0, 1)))
  ((_, rows),) = problem.node_options(_dot_graph(*shapes), found)
  assert _tensors(rows[option]) == expected
  assert _tensors(rows[0]) == [(), (), ()]


def test_only_options_that_the_graph_tells_apart_are_drawn_from():
  found = collect.choices(_product, _X, _W, operands=True)
  graphs = {
    "whole": _dot_graph((4, 8), (4, 6), (6, 8)),
    "an operand of another shape": _dot_graph((4, 8), (24,), (6, 8)),
    "no such group": _dot_graph((4, 8), (4, 6), (6, 8), group=5),
    "no such opcode": _dot_graph((4, 8), (4, 6), (6, 8), opcode="reshape"),
  }
  count = {
    name: len(problem.visible_options(problem.node_options(graph, found), 1)[0])
    for name, graph in graphs.items()
  }
  assert count == {
    "whole": 9,
    "an operand of another shape": 5,
    "no such group": 1,
    "no such opcode": 1,
  }


def test_every_kernel_is_of_one_group_or_of_the_rest():
  tag = f"jit(f)/{names.LAYOUT_GROUP}"
  for operations, group in (
    ((f"{tag}3/dot_general", f"{tag}1/reshape"), 3),
    (("jit(f)/add", f"{tag}1/dot_general"), 1),
    (("jit(f)/add",), None),
    ((), None),
    ((f"{tag}12/{names.LAYOUT_GROUP}3/dot_general",), 3),
  ):
    kernel = costs.KernelCost(
      "fusion", operations=tuple(costs.Operation(name, "a.py:1", ()) for name in operations)
    )
    assert labels.group_of(kernel) == group


def test_the_nodes_of_a_kernel_are_those_of_the_operations_in_it():
  def net(x, w):
    for _ in range(2):
      x = jnp.tanh(x @ w)
    return x @ w[:, :2]

  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 6), (6, 6))]
  found = problem.Problem(Call(net, arrays), labels.BytesEstimate())
  module = found.graph.module
  of_opcode = lambda *opcodes: [
    node for node, each in enumerate(proto.instructions(module)) if each.opcode in opcodes
  ]
  operations = [costs.operation(node, module) for node in proto.instructions(module)]
  tanh, dots = of_opcode("tanh"), of_opcode("dot")
  equal, last = dots[:2], dots[2:]
  nodes = lambda *operations: found._nodes_of_all(operations)
  assert nodes(operations[tanh[0]]) == tanh and nodes(operations[last[0]]) == last
  assert nodes(operations[tanh[0]], operations[equal[0]]) == sorted(tanh + equal)
  # Another shape of the line, a copy of a group's layout, and an instruction of the compiler.
  assert nodes(operations[tanh[0]]._replace(shape=(3,))) == tanh
  copy = operations[last[0]].name.replace("dot_general", "layout_constraint")
  assert nodes(costs.Operation(copy, "", (2, 4))) == last
  assert nodes(costs.Operation("copy", "", ())) == []


def test_kernels_of_equal_nodes_add_up_in_each_choice():
  kernel = lambda picoseconds, *nodes: {"picoseconds": picoseconds, "nodes": list(nodes)}
  found = problem.kernel_times(
    [
      {"kernels": [kernel(5, 1, 2), kernel(7, 3), kernel(1), kernel(2, 1, 2)]},
      {"kernels": [kernel(11, 3), kernel(13, 2, 3)]},
    ]
  )
  assert found.node.tolist() == [[0, 1], [0, 2], [1, 3], [3, 2], [3, 3]]
  assert found.runtime.tolist() == [[7, 7, 1, 0], [0, 11, 0, 13]]
  assert problem.kernel_times([{"bytes_accessed": 3}]) is None
  assert problem.kernel_times([{"kernels": [kernel(1)]}]) is None


def test_a_rank_without_layouts_is_the_reason():
  function = lambda x, w: jnp.tensordot(x.reshape(2, 3, 2, 2, 2, 2, 3), w, ((1,), (0,)))
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((12, 24), (3, 4))]
  with pytest.raises(ValueError, match="rank 7, and layouts are chosen up to rank 6"):
    problem.Problem(Call(function, args), labels.BytesEstimate())


def test_the_fingerprint_is_that_of_the_program_and_needs_no_compiler(monkeypatch):
  kernel = lambda rows, out: out.__setitem__(..., rows[...] @ rows[...])
  square = jax.ShapeDtypeStruct((8, 8), jnp.float32)

  def function(x, s):
    return jnp.tanh(x @ x) @ pl.pallas_call(kernel, out_shape=square)(x) * s

  def fingerprint(function, *args):
    return problem.Problem(Call(function, args), label).fingerprint()

  label = labels.BytesEstimate()
  interpreted = lambda x, s: jnp.tanh(x @ x) @ x * s
  graph = hlo.featurize(collect.apply(interpreted, {}), square, 1.0)
  monkeypatch.setattr(hlo, "featurize", lambda *args, **kwargs: graph)
  monkeypatch.setattr(problem, "visible_options", lambda nodes, groups: [range(3)] * groups)
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  found = fingerprint(function, square, scalar)  # a kernel that no CPU compiles
  assert (
    found == fingerprint(function, square, 2.0) == fingerprint(jax.jit(function), square, scalar)
  )
  assert found != fingerprint(lambda x, s: jnp.sin(function(x, s)), square, scalar)


def test_operations_that_are_left_out_are_counted_in_words():
  function = lambda x, w: jnp.tanh(x @ jnp.linalg.inv(w))
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 6), (6, 6))]
  found = problem.Problem(Call(function, args), labels.BytesEstimate())
  count = found.choices.left_out["custom_linear_solve"]
  assert found.left_out == (
    f"; {count} operations inside custom_linear_solve are left to the compiler"
  )
  assert problem.Problem(Call(_product, (_X, _W)), labels.BytesEstimate()).left_out == ""


def test_the_graph_and_the_compilers_own_layouts_are_of_one_compilation(monkeypatch):
  calls = []

  def compiled(function, args, target, **options):
    del target, options
    calls.append(function)
    before = sources.load(function, *args).data
    return types.SimpleNamespace(before_layouts=before, module=before)

  monkeypatch.setattr(tpu, "compile_function", compiled)
  found = problem.Problem(Call(lambda x, w: x @ w, (_X, _W)), labels.TpuEstimate("tpu:v6e"))
  assert found.graph.stage == "before layout assignment for tpu:v6e"
  assert found.own_orders() == [(1, 0)] and len(calls) == 1
