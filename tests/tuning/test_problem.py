import hlo_modules
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

from tpugraphs_jax import collect, hlo
from tpugraphs_jax.hlo import names, tpu_kernels
from tpugraphs_jax.tuning import labels, problem

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
  kernels = [
    tpu_kernels.KernelCycles((f"{tag}3/dot_general", f"{tag}1/reshape"), 5),
    tpu_kernels.KernelCycles(("jit(f)/add", f"{tag}1/dot_general"), 7),
    tpu_kernels.KernelCycles(("jit(f)/add",), 11),
    tpu_kernels.KernelCycles((), 0),
    tpu_kernels.KernelCycles((f"{tag}12/{names.LAYOUT_GROUP}3/dot_general",), 13),
  ]
  assert labels.cycles_by_group(kernels) == {"3": [5, 13], "1": [7], "rest": [11, 0]}


def test_a_rank_without_layouts_is_the_reason():
  function = lambda x, w: jnp.tensordot(x.reshape(2, 3, 2, 2, 2, 2, 3), w, ((1,), (0,)))
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((12, 24), (3, 4))]
  with pytest.raises(ValueError, match="rank 7, and layouts are chosen up to rank 6"):
    problem.Problem(function, args, labels.BytesEstimate())


def test_the_fingerprint_is_that_of_the_program_and_needs_no_compiler(monkeypatch):
  kernel = lambda rows, out: out.__setitem__(..., rows[...] @ rows[...])
  square = jax.ShapeDtypeStruct((8, 8), jnp.float32)

  def function(x, s):
    return jnp.tanh(x @ x) @ pl.pallas_call(kernel, out_shape=square)(x) * s

  def fingerprint(function, *args):
    return problem.Problem(function, args, label).fingerprint()

  label = labels.BytesEstimate()
  interpreted = lambda x, s: jnp.tanh(x @ x) @ x * s
  module = label.graph(collect.apply(interpreted, {}), (square, 1.0))
  monkeypatch.setattr(labels.BytesEstimate, "graph", lambda *args: module)
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
  found = problem.Problem(function, args, labels.BytesEstimate())
  count = found.choices.left_out["custom_linear_solve"]
  assert found.left_out == (
    f"; {count} operations inside custom_linear_solve are left to the compiler"
  )
  assert problem.Problem(_product, (_X, _W), labels.BytesEstimate()).left_out == ""
