"""Segments: every node in one, of bounded size; only edges between segments are lost."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from tests.support import random_graphs
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers.segments import batches

METHODS = list(batches.PARTITIONS)


def graph(nodes: int = 90) -> OpGraph:
  rng = np.random.default_rng(nodes)
  return random_graphs.layout_graph(
    rng, nodes=nodes, edges=2 * nodes, config_nodes=range(1, nodes, 4), configs=6
  )


def needs(method: str) -> None:
  if method == "metis":
    pytest.importorskip("pymetis")


@pytest.mark.parametrize(
  "nodes, max_nodes, borders",
  [
    (372, 1000, [0, 372]),
    (999, 1000, [0, 999]),
    (1000, 1000, [0, 501, 1000]),
    (3163, 1000, [0, 791, 1582, 2373, 3163]),
    (4, 2, [0, 2, 4]),
    (7, 2, [0, 2, 4, 6, 7]),
  ],
)
def test_ranges_have_the_published_borders(nodes, max_nodes, borders):
  """Published: n // 1000 + 1 parts of n // parts + 1 nodes; the last may be short or missing."""
  segment = batches.partition(graph(nodes), method="published", max_nodes=max_nodes)
  assert np.searchsorted(segment, range(len(borders))).tolist() == borders


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_nodes", [2, 7, 40, 89, 90, 91, 200])
def test_every_node_is_in_one_segment_of_bounded_size(method, max_nodes):
  needs(method)
  segment = batches.partition(graph(), method=method, max_nodes=max_nodes)
  sizes = np.bincount(segment)
  assert segment.shape == (90,) and segment.dtype == np.int32 and segment.min() == 0
  assert 0 < sizes.min() and sizes.max() <= max_nodes
  assert (len(sizes) == 1) == (max_nodes >= 90 + (method == "published"))
  again = batches.partition(graph(), method=method, max_nodes=max_nodes)
  np.testing.assert_array_equal(again, segment)


@pytest.mark.parametrize("method", METHODS)
def test_segments_keep_nodes_edges_and_configurations(method):
  needs(method)
  whole = graph()
  segment = batches.partition(whole, method=method, max_nodes=20)
  pieces = batches.split(whole, segment)
  ids = np.array([4, 0, 5])
  edges, decoded = collections.Counter(), {}
  for number, piece in enumerate(pieces):
    nodes = np.flatnonzero(segment == number)  # the order within a segment is that of the file
    np.testing.assert_array_equal(piece.node_feat, whole.node_feat[nodes])
    np.testing.assert_array_equal(piece.node_opcode, whole.node_opcode[nodes])
    edges.update(map(tuple, nodes[piece.edge_index].tolist()))
    for node, rows in zip(nodes[piece.config_node], piece.configs.decode(ids).swapaxes(0, 1)):
      assert node not in decoded
      decoded[int(node)] = rows
  inner = [(int(u), int(v)) for u, v in whole.edge_index if segment[u] == segment[v]]
  assert edges == collections.Counter(inner)
  assert list(sorted(decoded)) == whole.config_node.tolist()
  expected = whole.configs.decode(ids)
  for i, node in enumerate(whole.config_node.tolist()):
    np.testing.assert_array_equal(decoded[node], expected[:, i])


def test_a_segment_without_edges_or_configurable_nodes_is_still_one():
  whole = random_graphs.with_configs(graph(6), node_group=np.zeros(1, np.int32))
  edges, config_node = np.array([[1, 0]], np.int32), np.array([0], np.int32)
  whole = dataclasses.replace(whole, edge_index=edges, config_node=config_node)
  pieces = batches.split(whole, np.array([0, 0, 0, 1, 1, 1], np.int32))
  assert [p.num_edges for p in pieces] == [1, 0]
  assert [len(p.config_node) for p in pieces] == [1, 0]
  assert pieces[1].configs.decode(np.arange(2)).shape == (2, 0, 18)


def test_metis_finds_the_clusters():
  pytest.importorskip("pymetis")
  rng = np.random.default_rng(0)
  cluster = rng.permutation(np.repeat(np.arange(4), 20))
  pairs = rng.integers(0, 80, (4000, 2))
  edges = pairs[(cluster[pairs[:, 0]] == cluster[pairs[:, 1]]) & (pairs[:, 0] != pairs[:, 1])]
  whole = dataclasses.replace(graph(80), edge_index=edges.astype(np.int32))
  segment = batches.partition(whole, method="metis", max_nodes=22)
  pieces = batches.split(whole, segment)
  assert sum(piece.num_edges for piece in pieces) == whole.num_edges
