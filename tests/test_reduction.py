"""The neighbourhood of the configurable nodes, against walks in plain Python."""

import itertools

import numpy as np
import pytest
import random_graphs

from tpugraphs_jax.data import reduction

OPTIONS = list(itertools.product((1, 2, 5), reduction.DIRECTIONS, reduction.INDUCED))


def reduce_graph(graph, **options):
  return reduction.reduce_graph(graph, reduction.Options(**options))



def graph_of(seed):
  rng = np.random.default_rng(seed)
  return random_graphs.layout_graph(
      rng, nodes=24, edges=30, config_nodes=rng.permutation(24)[:3], configs=4)


def slow(graph, hops, direction, induced):
  """Kept nodes, and kept edges as pairs of original nodes in file order."""
  edges = [tuple(edge) for edge in graph.edge_index.tolist()]
  kept, walked = set(graph.config_node.tolist()), set()
  for _ in range(hops):
    reached = set(kept)
    for number, (consumer, producer) in enumerate(edges):
      if direction != "users" and consumer in kept:
        walked.add(number)
        reached.add(producer)
      if direction != "operands" and producer in kept:
        walked.add(number)
        reached.add(consumer)
    kept = reached
  if induced == "node":
    walked = {n for n, edge in enumerate(edges) if kept.issuperset(edge)}
  return sorted(kept), [edges[number] for number in sorted(walked)]


@pytest.mark.parametrize("hops, direction, induced", OPTIONS)
def test_reduction_equals_a_slow_walk(hops, direction, induced):
  for seed in range(8):
    graph = graph_of(seed)
    found = reduce_graph(
        graph, reduction="config_neighborhood", hops=hops, direction=direction, induced=induced)
    kept, edges = slow(graph, hops, direction, induced)
    np.testing.assert_array_equal(found.node_feat, graph.node_feat[kept])
    np.testing.assert_array_equal(found.node_opcode, graph.node_opcode[kept])
    original = np.array(kept)
    np.testing.assert_array_equal(original[found.config_node], graph.config_node)
    assert [tuple(edge) for edge in original[found.edge_index].tolist()] == edges
    assert found.configs is graph.configs
    np.testing.assert_array_equal(found.node_splits, [0, len(kept)])
    assert found.edge_index.dtype == found.config_node.dtype == np.int32


def test_edge_induced_graphs_lose_edges_at_the_rim_only():
  """A chain 1 <- 0 -> 2 with an edge between 1 and 2: one hop does not walk it."""
  rng = np.random.default_rng(0)
  graph = random_graphs.layout_graph(rng, nodes=4, edges=3, config_nodes=[0], configs=2)
  graph.edge_index[:] = [[0, 1], [2, 0], [2, 1]]
  options = dict(reduction="config_neighborhood", hops=1)
  assert len(reduce_graph(graph, induced="edge", **options).edge_index) == 2
  assert len(reduce_graph(graph, induced="node", **options).edge_index) == 3


def test_a_graph_whose_nodes_are_all_near_stays_whole():
  graph = graph_of(0)
  found = reduce_graph(
      graph, reduction="config_neighborhood", hops=24, direction="both", induced="node")
  touched = np.unique([*graph.edge_index.ravel(), *graph.config_node])
  assert found.num_nodes <= len(touched) and found.num_edges <= graph.num_edges
  again = reduce_graph(
      found, reduction="config_neighborhood", hops=24, direction="both", induced="node")
  np.testing.assert_array_equal(again.edge_index, found.edge_index)
  np.testing.assert_array_equal(again.node_feat, found.node_feat)


def test_a_graph_without_edges_keeps_its_configurable_nodes():
  rng = np.random.default_rng(1)
  graph = random_graphs.layout_graph(rng, nodes=5, edges=0, config_nodes=[4, 2], configs=2)
  found = reduce_graph(graph, reduction="config_neighborhood", hops=2)
  np.testing.assert_array_equal(found.config_node, [1, 0])
  assert found.edge_index.shape == (0, 2)


def test_no_reduction_leaves_the_graph_alone():
  graph = graph_of(2)
  assert reduce_graph(graph) is graph
