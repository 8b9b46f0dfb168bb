"""Parts of a graph and virtual nodes, against walks in plain Python."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.support import random_graphs
from tpugraphs_jax.data import reduction
from tpugraphs_jax.graph import KernelTimes
from tpugraphs_jax.rankers import explain
from tpugraphs_jax.rankers.segments.batches import split

OPTIONS = list(itertools.product((1, 2, 5), reduction.DIRECTIONS, reduction.INDUCED))


def reduce_graph(graph, **options):
  return reduction.reduce_graph(graph, reduction.Reduction(**options)).graph


def graph_of(seed):
  rng = np.random.default_rng(seed)
  return random_graphs.layout_graph(
    rng, nodes=24, edges=30, config_nodes=rng.permutation(24)[:3], configs=4
  )


def test_times_of_kernels_stay_with_the_nodes_and_choices_that_they_are_of():
  plain = graph_of(0)
  times = KernelTimes(np.ones((4, 1), np.int64), np.array([[0, 23]], np.int32))
  graph = random_graphs.with_configs(plain, kernels=times)
  assert reduce_graph(graph, virtual_node="cluster").configs.kernels is times
  part = reduce_graph(graph, graph_reduction="config_neighborhood", reduction_hops=1)
  assert part.configs.kernels is None
  (piece,) = split(graph, np.zeros(24, np.int32))
  assert piece.configs.kernels is None
  assert explain.with_rows(graph, graph.configs.group_row[:2]).configs.kernels is None
  assert reduce_graph(plain, graph_reduction="config_neighborhood").configs is plain.configs


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
  options = reduction.Reduction(
    graph_reduction="config_neighborhood",
    reduction_hops=hops,
    reduction_direction=direction,
    reduction_induced=induced,
  )
  for seed in range(8):
    graph = graph_of(seed)
    found, nodes = reduction.reduce_graph(graph, options)
    kept, edges = slow(graph, hops, direction, induced)
    assert nodes.tolist() == kept
    np.testing.assert_array_equal(found.node_feat, graph.node_feat[kept])
    np.testing.assert_array_equal(found.node_opcode, graph.node_opcode[kept])
    original = np.array(kept)
    np.testing.assert_array_equal(original[found.config_node], graph.config_node)
    assert [tuple(edge) for edge in original[found.edge_index].tolist()] == edges
    assert found.configs is graph.configs
    np.testing.assert_array_equal(found.node_splits, [0, len(kept)])
    assert found.edge_index.dtype == found.config_node.dtype == np.int32


@pytest.mark.parametrize("nodes, config_nodes", [(1, [0]), (5, [4, 2])])
def test_graphs_without_edges_keep_their_configurable_nodes(nodes, config_nodes):
  rng = np.random.default_rng(0)
  graph = random_graphs.layout_graph(
    rng, nodes=nodes, edges=0, config_nodes=config_nodes, configs=2
  )
  found = reduce_graph(graph, graph_reduction="config_neighborhood", reduction_hops=1)
  np.testing.assert_array_equal(
    found.node_feat[found.config_node], graph.node_feat[graph.config_node]
  )
  assert found.edge_index.shape == (0, 2)


def with_roots(graph, roots):
  """The graph with the released mark of roots on these nodes alone."""
  feat = np.array(graph.node_feat)
  feat[:, 0] = 0
  feat[roots, 0] = 1
  return dataclasses.replace(graph, node_feat=feat)


def test_the_output_node_consumes_the_roots():
  graph = with_roots(graph_of(1), [2, 9])
  found, nodes = reduction.with_output(graph), graph.num_nodes
  assert found.num_nodes == found.node_splits[-1] == nodes + 1
  assert not found.node_feat[nodes].any() and not found.node_opcode[nodes]
  np.testing.assert_array_equal(found.node_feat[:nodes], graph.node_feat)
  np.testing.assert_array_equal(found.edge_index[:-2], graph.edge_index)
  assert found.edge_index[-2:].tolist() == [[nodes, 2], [nodes, 9]]


def test_without_a_root_the_output_node_consumes_the_nodes_without_users():
  graph = with_roots(graph_of(1), [])
  used = set(graph.edge_index[:, 1].tolist())
  new = reduction.with_output(graph).edge_index[graph.num_edges :].tolist()
  assert new == [[24, node] for node in range(24) if node not in used]


@pytest.mark.parametrize("size, clusters", [(1, 24), (5, 5), (24, 1), (100, 1)])
def test_cluster_nodes_consume_neighbours_in_the_order_of_nodes(size, clusters):
  graph = graph_of(2)
  found = reduce_graph(graph, virtual_node="cluster", cluster_nodes=size)
  assert found.num_nodes == 24 + clusters and found.node_opcode.dtype == np.uint8
  new = found.edge_index[graph.num_edges :].tolist()
  assert new == [[24 + node // size, node] for node in range(24)]


def test_no_reduction_leaves_the_graph_alone():
  graph = graph_of(2)
  assert reduce_graph(graph) is graph


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"virtual_node": "cluster", "cluster_nodes": 10},
    {"graph_reduction": "config_neighborhood", "reduction_hops": 1},
    {"graph_reduction": "config_neighborhood", "virtual_node": "cluster", "cluster_nodes": 3},
  ],
)
def test_values_beside_a_graph_are_those_of_its_nodes_and_0_of_virtual_ones(options):
  graph = graph_of(3)
  found = reduction.reduce_graph(graph, reduction.Reduction(**options))
  np.testing.assert_array_equal(found.rows(graph.node_feat), found.graph.node_feat)
