"""Modules of other frameworks are read: one training step, as each of them gives it."""

import numpy as np
import pytest

from tests.support import commands
import tpugraphs_jax
from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import proto

FOLDER = commands.ROOT / "tests" / "data" / "frameworks"
# The step has these arrays (`record.py` there).
IMAGES, KERNEL, WIDE, DENSE, LOGITS = (
  4 * 8 * 8 * 3,
  3 * 3 * 3 * 16,
  4 * 8 * 8 * 16,
  8 * 8 * 16 * 10,
  4 * 10,
)
# Convolutions and dots by the elements of their outputs. TensorFlow and PyTorch also write the
# gradient by the images, which nothing reads.
CONVOLUTIONS = {
  "tensorflow": [WIDE, IMAGES, KERNEL],
  "torch_xla": [WIDE, IMAGES, KERNEL],
  "dump": [WIDE, KERNEL],
}
DOTS = [LOGITS, WIDE, DENSE]


def graph_of(framework):
  return hlo.featurize(FOLDER / f"{framework}.hlo.pb")


@pytest.mark.parametrize("framework", CONVOLUTIONS)
def test_a_training_step_has_its_convolutions_and_dots(framework):
  nodes = proto.instructions(graph_of(framework).module)
  sizes = lambda opcode: sorted(
    int(np.prod(node.shape.dimensions)) for node in nodes if node.opcode == opcode
  )
  assert sizes("convolution") == sorted(CONVOLUTIONS[framework])
  assert sizes("dot") == sorted(DOTS)


@pytest.mark.parametrize("framework", CONVOLUTIONS)
def test_every_operation_is_in_the_table_and_linked_to_its_operands(framework):
  graph = graph_of(framework)
  assert graph.node_opcode.all()
  position = {node.id: index for index, node in enumerate(proto.instructions(graph.module))}
  edges = {
    (position[node.id], position[operand])
    for node in proto.instructions(graph.module)
    for operand in node.operand_ids
  }
  assert edges <= set(map(tuple, graph.edge_index.tolist()))


def test_its_layouts_are_ranked():
  graphs = [graph_of(framework).with_layouts(20) for framework in CONVOLUTIONS]
  assert [len(graph.configs) for graph in graphs] == [20] * 3
  order, scores = tpugraphs_jax.rank("layout-cpu-measured", graphs[0])
  assert sorted(order) == list(range(20))
  assert np.isfinite(scores).all() and len(set(scores.tolist())) > 1


def test_operations_keep_the_names_of_tensorflow():
  graph = graph_of("tensorflow")
  named = {origin.op_name for origin in graph.origins}
  assert {"Conv2D", "Relu", "gradient_tape/Conv2DBackpropFilter"} <= named
