"""Cuts graphs into segments of bounded size; every node is in one segment.

Edges between segments are in no segment; `SegmentedGraph` counts them.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import numpy as np

from tpugraphs_jax.data.reduction import edge_matrix
from tpugraphs_jax.graph import OpGraph

# Parts of METIS are a few percent uneven. With smaller parts a second attempt is seldom needed.
_METIS_SLACK = 0.95


def partition(graph: OpGraph, *, method: str, max_nodes: int) -> np.ndarray:
  """Segment of each node, `[N]` int32, numbered from 0 without gaps; deterministic.

  Args:
    graph: layout graph.
    method: one of `METHODS`. `contiguous`: even ranges of node numbers, which are in topological
      order in released files; `published`: ranges as in Graph Segment Training for TpuGraphs;
      `metis`: few cut edges.
    max_nodes: most nodes in a segment, at least 2.

  Raises:
    ValueError: `metis` without the package pymetis.
  """
  return METHODS[method](graph, max_nodes).astype(np.int32)


def _even_ranges(nodes: int, max_nodes: int) -> np.ndarray:
  """Number of the range of each of `nodes` positions; sizes differ by at most one."""
  ranges = -(-nodes // max_nodes)
  return np.arange(nodes) * ranges // max(nodes, 1)


def _published_ranges(nodes: int, max_nodes: int) -> np.ndarray:
  """Number of the range of each of `nodes` positions, as published.

  With `nodes // max_nodes + 1` parts a range has `nodes // parts + 1` positions, and the last range
  the rest; there can be fewer ranges than parts.
  """
  parts = nodes // max_nodes + 1
  return np.arange(nodes) // (nodes // parts + 1)


def _metis(graph: OpGraph, max_nodes: int) -> np.ndarray:
  try:
    import pymetis  # pylint: disable=import-outside-toplevel
  except ImportError:
    raise ValueError("segments.partition is 'metis', which needs pymetis: "
                     "pip install 'tpugraphs-jax[partition]'") from None
  nodes = graph.num_nodes
  if nodes <= max_nodes:
    return np.zeros(nodes)
  matrix = edge_matrix(graph.edge_index, nodes)
  matrix = (matrix + matrix.T).tocsr()
  matrix.setdiag(0)
  matrix.eliminate_zeros()
  adjacent = np.split(matrix.indices, matrix.indptr[1:-1])
  parts = -(-nodes // max(1, int(max_nodes * _METIS_SLACK)))
  while parts <= nodes:
    _, membership = pymetis.part_graph(parts, adjacency=adjacent)
    _, segment, sizes = np.unique(membership, return_inverse=True, return_counts=True)
    if sizes.max() <= max_nodes:
      return segment
    parts += 1
  return _even_ranges(nodes, max_nodes)


METHODS: dict[str, Callable[[OpGraph, int], np.ndarray]] = {
    "contiguous": lambda graph, max_nodes: _even_ranges(graph.num_nodes, max_nodes),
    "published": lambda graph, max_nodes: _published_ranges(graph.num_nodes, max_nodes),
    "metis": _metis}


def split(graph: OpGraph, segment: np.ndarray) -> tuple[list[OpGraph], int]:
  """The segments as graphs, and the number of edges between segments.

  A segment has the configurations of the graph, restricted to its nodes, without a copy.

  Args:
    graph: layout graph with configurations.
    segment: `[N]` int32 from `partition`.
  """
  order = np.argsort(segment, kind="stable")
  counts = np.bincount(segment)
  position = np.empty(graph.num_nodes, np.int64)
  position[order] = np.arange(graph.num_nodes) - np.repeat(np.cumsum(counts) - counts, counts)
  ends = segment[graph.edge_index]
  inner = ends[:, 0] == ends[:, 1]
  owner_of_edge = np.where(inner, ends[:, 0], -1)
  pieces = []
  for number, nodes in enumerate(np.split(order, np.cumsum(counts)[:-1])):
    edges = position[graph.edge_index[owner_of_edge == number]]
    mask = segment[graph.config_node] == number
    pieces.append(OpGraph(
        name=f"{graph.name}[{number}]", node_feat=graph.node_feat[nodes],
        node_opcode=graph.node_opcode[nodes], edge_index=edges.astype(np.int32).reshape(-1, 2),
        node_splits=np.array([0, len(nodes)]),
        config_node=position[graph.config_node[mask]].astype(np.int32),
        configs=dataclasses.replace(graph.configs, node_group=graph.configs.node_group[mask])))
  return pieces, int(np.sum(~inner))


def rows_of_segments(values: np.ndarray, segment: np.ndarray) -> list[np.ndarray]:
  """Splits `values [N, F]` of nodes into the values of each segment, in the order of `split`."""
  order = np.argsort(segment, kind="stable")
  return np.split(values[order], np.cumsum(np.bincount(segment))[:-1])
