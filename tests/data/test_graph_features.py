"""Feature blocks of the 3rd place against loops, and against the columns from protobufs."""

import dataclasses
import math

import numpy as np
import random_graphs

from tpugraphs_jax.data import feature_blocks, features, graph_features
from tpugraphs_jax.graph import NODE_FEATURES

_WIDE = [*range(21, 27), *range(31, 37), *range(37, 43), *range(53, 59), *range(61, 67)]


def graph_of(seed, nodes=20, edges=30):
  """A program with whole numbers as features, and some convolutions and products."""
  rng = np.random.default_rng(seed)
  graph = random_graphs.layout_graph(
      rng, nodes=nodes, edges=edges, config_nodes=[0], configs=2)
  feat = rng.integers(-3, 400, (nodes, NODE_FEATURES)).astype(np.float32)
  opcode = rng.choice([26, 34, 7, 1], nodes).astype(np.uint8)
  return dataclasses.replace(graph, node_feat=feat, node_opcode=opcode)


def slow_shapes(graph):
  rows = []
  for node in range(graph.num_nodes):
    if graph.node_opcode[node] not in (26, 34):
      rows.append([-2.0] * 16)
      continue
    operands = [v for u, v in graph.edge_index.tolist() if u == node][:2]
    row = [value for v in operands for value in graph.node_feat[v, 21:29].tolist()]
    rows.append(row + [-1.0] * (16 - len(row)))
  return np.array(rows, np.float32)


def test_operand_shapes_equal_loops():
  for seed in range(6):
    graph = graph_of(seed)
    found = graph_features.operand_shapes(graph)
    np.testing.assert_array_equal(found, slow_shapes(graph))
    assert found.dtype == np.float32


def test_programs_without_edges_and_of_one_node_have_missing_operands():
  for nodes in (1, 5):
    graph = graph_of(1, nodes=nodes, edges=0)
    np.testing.assert_array_equal(graph_features.operand_shapes(graph), slow_shapes(graph))


def test_tile_modulo_equals_the_formula_of_every_column():
  graph = graph_of(3)
  found = graph_features.tile_modulo(graph)
  assert found.shape == (20, 60)
  for node in range(20):
    for k, column in enumerate(_WIDE):
      x = float(graph.node_feat[node, column])
      assert abs(found[node, k] - ((x + 127) % 128) / 128) < 1e-6
      assert abs(found[node, 30 + k] - math.floor(x / 128) / 10) < 1e-6
  full = dataclasses.replace(graph, node_feat=np.full_like(graph.node_feat, 128))
  np.testing.assert_allclose(
      graph_features.tile_modulo(full), [[127 / 128] * 30 + [0.1] * 30] * 20, rtol=1e-6)


def test_blocks_are_known_by_name_and_take_logarithms_of_their_own():
  graphs = [graph_of(seed) for seed in (1, 2)]
  blocks = feature_blocks.NodeFeatures(
      ("released", "operand_shapes", "tile_modulo"),
      kinds="operand_shapes=log_offset(4),tile_modulo=varying,*=signed_log1p")
  blocks.fit(graphs)
  inputs = blocks(graphs[0])
  shapes = blocks.transforms["operand_shapes"]
  width = len(blocks.transforms["released"].kept)
  np.testing.assert_allclose(
      inputs.node_feat[:, width: width + len(shapes.kept)],
      np.log(slow_shapes(graphs[0])[:, shapes.kept] + 4), rtol=1e-6)
  again = features.Transform.from_dict(shapes.to_dict())
  np.testing.assert_array_equal(again.shift, shapes.shift)
