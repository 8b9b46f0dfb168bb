"""Feature blocks of the 3rd place against loops and dense matrix powers."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tests.support.random_graphs import whole_numbers
from tpugraphs_jax.data.reduction import with_output
from tpugraphs_jax.rankers.systems import third

_COUNTED = [*range(21, 27), *range(31, 37), *range(37, 43), *range(53, 59), *range(61, 67)]


def slow_shapes(graph):
  """Operand shapes `[N, 16]` by a loop.

  Random shapes fit no product and no window, so that operands stay in the order of edges.
  """
  rows = []
  for node in range(graph.num_nodes):
    if graph.node_opcode[node] not in (26, 34):
      rows.append([-2.0] * 16)
      continue
    operands = [v for u, v in graph.edge_index.tolist() if u == node][:2]
    row = [value for v in operands for value in graph.node_feat[v, 21:29].tolist()]
    rows.append(row + [-1.0] * (16 - len(row)))
  return np.array(rows, np.float32)


@pytest.mark.parametrize("nodes, edges", [(20, 30), (1, 0), (5, 0)])
def test_operand_shapes_equal_loops(nodes, edges):
  for seed in range(3):
    graph = whole_numbers(seed, nodes=nodes, edges=edges)
    found = third.operand_shapes(graph)
    np.testing.assert_array_equal(found, slow_shapes(graph))
    assert found.dtype == np.float32


def test_the_wide_columns_of_the_3rd_place_are_logarithms():
  """The 43 columns of its published list; the others stay as they are."""
  graph = whole_numbers(1)
  wide = [
    *range(21, 31),
    37,
    38,
    39,
    43,
    44,
    52,
    53,
    54,
    59,
    60,
    68,
    76,
    84,
    *range(107, 113),
    *range(117, 125),
    126,
    127,
    *range(129, 133),
  ]
  found, x = third.wide_logarithms(graph), graph.node_feat.astype(np.float64)
  assert len(wide) == 43
  expected = [
    [
      math.copysign(math.log(1 + abs(v)), v) if column in wide else v
      for column, v in enumerate(row)
    ]
    for row in x.tolist()
  ]
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_tile_modulo_equals_the_formula_of_every_column():
  graph = whole_numbers(3)
  found = third.tile_modulo(graph)
  assert found.shape == (20, 60)
  for node in range(20):
    for k, column in enumerate(_COUNTED):
      x = float(graph.node_feat[node, column])
      assert abs(found[node, k] - ((x + 127) % 128) / 128) < 1e-6
      assert abs(found[node, 30 + k] - math.floor(x / 128) / 10) < 1e-6
  full = dataclasses.replace(graph, node_feat=np.full_like(graph.node_feat, 128))
  np.testing.assert_allclose(
    third.tile_modulo(full), [[127 / 128] * 30 + [0.1] * 30] * 20, rtol=1e-6
  )


def test_walks_on_a_chain_of_three_nodes_by_hand():
  """Node a feeds b, b feeds c, c feeds the output: a walk to consumers never comes back."""
  graph = whole_numbers(0, nodes=3, edges=0)
  feat = np.zeros_like(graph.node_feat)
  feat[2, 0] = 1  # the root
  edges = np.array([[1, 0], [2, 1]], np.int32)  # consumer, producer
  graph = with_output(dataclasses.replace(graph, node_feat=feat, edge_index=edges))
  found = third.directed_walk(graph)
  np.testing.assert_allclose(found[:, 0], [1 / 2] * 3 + [1])  # stay, or go on
  # Two steps: nobody else comes to a; to b from a by 1/2 * 1/2 + 1/2 * 1/2; to c from b
  # likewise and from a by 1/4.
  np.testing.assert_allclose(found[:3, 1], [0, 1 / 2, 3 / 4])
  both = third.return_probabilities(graph)
  # Undirected, two steps from a and back: 1/2 * 1/2 by staying, 1/2 * 1/3 by way of b.
  np.testing.assert_allclose(both[0, 16], 1 / 4 + 1 / 6, rtol=1e-6)
  np.testing.assert_array_equal(both[:, :16], found)


def slow_walks(graph):
  """`[N, 128]` by definition, with dense matrix powers in float64."""
  nodes = graph.num_nodes
  directed = np.eye(nodes)
  directed[graph.edge_index[:, 1], graph.edge_index[:, 0]] = 1
  undirected = np.minimum(directed + directed.T, 1)
  walk = directed / directed.sum(axis=1, keepdims=True)
  columns, power = [np.diag(walk)], walk
  for _ in range(15):
    power = power @ walk
    columns.append(power.sum(axis=0) - np.diag(power))
  walk = undirected / undirected.sum(axis=1, keepdims=True)
  power = walk
  for _ in range(112):
    power = power @ walk
    columns.append(np.diag(power))
  return np.stack(columns, axis=1)


@pytest.mark.parametrize("nodes, edges", [(1, 0), (5, 0), (12, 20), (40, 300), (300, 500)])
def test_random_walks_are_those_of_the_definition(nodes, edges):
  graph = whole_numbers(nodes, nodes=nodes, edges=edges)
  found = third.return_probabilities(graph)
  assert found.shape == (nodes, 128) and found.dtype == np.float32
  np.testing.assert_allclose(found, slow_walks(graph), rtol=2e-4, atol=2e-6)


def test_the_output_node_has_no_operands_and_fills_no_register():
  graph = with_output(whole_numbers(2))
  np.testing.assert_array_equal(third.operand_shapes(graph)[-1], -1)
  np.testing.assert_allclose(third.tile_modulo(graph)[-1], [127 / 128] * 30 + [0] * 30)
  assert not third.wide_logarithms(graph)[-1].any()
