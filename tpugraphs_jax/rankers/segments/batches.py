"""Segments of graphs, and batches of Graph Segment Training.

`partition` cuts a graph into segments of bounded size. Every node is in one segment. Edges between
segments belong to no segment. A batch has a few segments per graph, or sums over all segments.

A segment is a small graph with the configurations of its nodes. A batch of G graphs with S fresh
segments each is a `LayoutBatch` of G * S slates, whose size does not depend on the sizes of the
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Array, Budget, LayoutBatch, PreparedProgram, Slate, targets
from tpugraphs_jax.data.reduction import edge_matrix, part_of
from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.infra import console

# Parts of METIS differ by a few percent in size. Smaller parts seldom need a second attempt.
_METIS_SLACK = 0.95


def partition(graph: OpGraph, *, method: str, max_nodes: int) -> np.ndarray:
  """Segment of each node, `[N]` int32, numbered from 0 without gaps; deterministic.

  Args:
    graph: layout graph.
    method: one of `PARTITIONS`. `contiguous`: even ranges of node numbers, which are in topological
      order in released files; `published`: ranges as in Graph Segment Training for TpuGraphs;
      `metis`: few cut edges.
    max_nodes: most nodes in a segment, at least 2.

  Raises:
    ValueError: `metis` without the package pymetis.
  """
  return PARTITIONS[method](graph, max_nodes).astype(np.int32)


def _even_ranges(nodes: int, max_nodes: int) -> np.ndarray:
  """Number of the range of each of `nodes` positions; sizes differ by at most one."""
  ranges = -(-nodes // max_nodes)
  return np.arange(nodes) * ranges // max(nodes, 1)


def _published_ranges(nodes: int, max_nodes: int) -> np.ndarray:
  """Number of the range of each of `nodes` positions, as published.

  There are `parts = nodes // max_nodes + 1` parts. A range has `nodes // parts + 1` positions, and
  the last range has the rest; there can be fewer ranges than parts.
  """
  parts = nodes // max_nodes + 1
  return np.arange(nodes) // (nodes // parts + 1)


def _metis(graph: OpGraph, max_nodes: int) -> np.ndarray:
  try:
    import pymetis  # pylint: disable=import-outside-toplevel
  except ImportError:
    raise ValueError(
      f"segments.partition is 'metis', which needs pymetis: {console.to_install('partition')}"
    ) from None
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


PARTITIONS: dict[str, Callable[[OpGraph, int], np.ndarray]] = {
  "contiguous": lambda graph, max_nodes: _even_ranges(graph.num_nodes, max_nodes),
  "published": lambda graph, max_nodes: _published_ranges(graph.num_nodes, max_nodes),
  "metis": _metis,
}


def split(graph: OpGraph[LayoutConfigs], segment: np.ndarray) -> list[OpGraph[LayoutConfigs]]:
  """The segments as graphs, without the edges between segments.

  A segment has the configurations of the graph, restricted to its nodes, without a copy.

  Args:
    graph: the program.
    segment: `[N]` int32 from `partition`.
  """
  ends = segment[graph.edge_index]
  owner_of_edge = np.where(ends[:, 0] == ends[:, 1], ends[:, 0], -1)
  pieces = []
  for number, nodes in enumerate(rows_of_segments(np.arange(graph.num_nodes), segment)):
    mask = segment[graph.config_node] == number
    edges = graph.edge_index[owner_of_edge == number]
    piece = part_of(graph, nodes, edges, graph.config_node[mask])
    configs = dataclasses.replace(piece.configs, node_group=graph.configs.node_group[mask])
    pieces.append(dataclasses.replace(piece, name=f"{graph.name}[{number}]", configs=configs))
  return pieces


def rows_of_segments(values: np.ndarray, segment: np.ndarray) -> list[np.ndarray]:
  """Splits `values [N, ...]` of nodes into the values of each segment, in the order of `split`."""
  order = np.argsort(segment, kind="stable")
  return np.split(values[order], np.cumsum(np.bincount(segment))[:-1])


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentedGraph:
  """The prepared segments of a graph, with the fields that plans and metrics read."""

  name: str
  opcode: np.ndarray  # [N] int32
  configs: LayoutConfigs  # of the whole graph
  segments: tuple[PreparedProgram, ...]
  edges: int  # of the whole graph
  sizes: dict[str, int]  # largest size of its fresh segments, by entry of a budget


def segmented(
  graph: OpGraph[LayoutConfigs], segments: Sequence[PreparedProgram], *, fresh: int
) -> SegmentedGraph:
  """The `SegmentedGraph` of an `OpGraph` and its prepared segments.

  Args:
    graph: the whole graph.
    segments: its segments.
    fresh: number of segments of the graph in a training batch.
  """
  largest = {key: sum(sorted(s.sizes[key] for s in segments)[-fresh:]) for key in segments[0].sizes}
  return SegmentedGraph(
    name=graph.name,
    opcode=graph.node_opcode.astype(np.int32),
    configs=graph.configs,
    segments=tuple(segments),
    edges=graph.num_edges,
    sizes=largest,
  )


class SegmentSlate(NamedTuple):
  """A slate of one graph, and the segments that get gradients."""

  graph: SegmentedGraph
  config_ids: np.ndarray  # [<= C] int64 configuration numbers
  target: np.ndarray  # [<= C] float32, larger = slower
  graph_id: int  # number of the graph among the training graphs
  fresh: np.ndarray  # [S] int64 segment numbers, ascending

  @property
  def others(self) -> np.ndarray:
    """The segments without gradients, `[J - S]` int64."""
    return np.setdiff1d(np.arange(len(self.graph.segments)), self.fresh)


class Stale(NamedTuple):
  """Values of the segments without gradients.

  Axis J has an entry per segment, or a single entry for the sum over segments.
  """

  value: Array  # [G, C, J, P] float32 or bfloat16
  known_mask: Array  # [G, C, J] bool


class Others(NamedTuple):
  """A batch of segments without gradients."""

  batch: LayoutBatch  # G * S slates
  graph: Array  # [G * S] int32 index of the graph in the batch, G in padding


class SegmentBatch(NamedTuple):
  """G graphs, each with S segments and C configurations."""

  fresh: LayoutBatch  # G * S slates, graph after graph
  fresh_id: Array  # [G, S] int32 segment numbers, -1 in padding
  segments: Array  # [G] int32 number of segments J of the graph, 1 in padding
  target: Array  # [G, C] float32, larger = slower
  config_mask: Array  # [G, C] bool
  graph_id: Array  # [G] int32 number of the training graph, -1 in padding
  config_id: Array  # [G, C] int32 configuration number, -1 in padding
  others: tuple[Others, ...] = ()  # the training step recomputes them
  stale: Stale | None = None  # set by the training step


def assemble(
  slates: Sequence[SegmentSlate],
  budget: Budget,
  *,
  graphs: int,
  configs: int,
  fresh: int,
  assemble_layout: Callable[..., LayoutBatch],
  with_others: bool = False,
) -> SegmentBatch:
  """A padded batch of segments.

  Args:
    slates: at most `graphs` slates, each with `fresh` segments.
    budget: of the fresh segments.
    graphs: graphs G.
    configs: configurations C per graph.
    fresh: segments S per graph.
    assemble_layout: `(slates, budget, graphs=, configs=) -> LayoutBatch`.
    with_others: include the segments without gradients, for recomputation.
  """

  def layout(numbers_of: Sequence[Iterable[int]]) -> LayoutBatch:
    pieces = [
      Slate(slate.graph.segments[number], slate.config_ids, slate.target, slate.graph_id)
      for slate, numbers in zip(slates, numbers_of)
      for number in numbers
    ]
    return assemble_layout(pieces, budget, graphs=graphs * fresh, configs=configs)

  pad = lambda rows, fill: batching.padded([rows], graphs, fill)
  target, mask = targets(slates, graphs, configs)
  ids = np.full((graphs, configs), -1, np.int32)
  ids[mask] = np.concatenate([slate.config_ids for slate in slates])
  return SegmentBatch(
    fresh=layout([slate.fresh for slate in slates]),
    fresh_id=pad(np.array([s.fresh for s in slates], np.int32).reshape(-1, fresh), -1),
    segments=pad(np.array([len(s.graph.segments) for s in slates], np.int32), 1),
    target=target,
    config_mask=mask,
    graph_id=pad(np.array([s.graph_id for s in slates], np.int32), -1),
    config_id=ids,
    others=_others(slates, graphs, fresh, layout) if with_others else (),
  )


def _others(slates, graphs: int, fresh: int, layout) -> tuple[Others, ...]:
  """Batches of at most S other segments of each graph, with the budget of the fresh segments."""
  rounds = -(-max((len(slate.others) for slate in slates), default=0) // fresh)
  batches = []
  for start in range(0, rounds * fresh, fresh):
    numbers_of = [slate.others[start : start + fresh] for slate in slates]
    rows = np.repeat(np.arange(len(slates)), [len(numbers) for numbers in numbers_of])
    owner = np.full(graphs * fresh, graphs, np.int32)
    owner[: len(rows)] = rows
    batches.append(Others(layout(numbers_of), owner))
  return tuple(batches)


def align(batches: Sequence[SegmentBatch]) -> list[SegmentBatch]:
  """Pads `others` of the batches of several devices with empty batches to one length."""
  rounds = max(len(batch.others) for batch in batches)
  fill = next((batch.others[-1] for batch in batches if batch.others), None)
  if fill is None:
    return list(batches)
  owners, graphs = len(fill.graph), len(batches[0].graph_id)
  fill = fill._replace(graph=np.full(owners, graphs, np.int32))
  return [
    batch._replace(others=batch.others + (fill,) * (rounds - len(batch.others)))
    for batch in batches
  ]


@dataclasses.dataclass(frozen=True, eq=False)
class HeadGraph:
  """Sums of readouts of some configurations of a graph, to train the head alone."""

  name: str
  configs: LayoutConfigs
  total: np.ndarray  # [configs, P] float32 sums over all segments, memory-mapped
  segments: int
  sizes: dict[str, int]  # of the graph, by entry of a budget


class HeadBatch(NamedTuple):
  """G slates with sums of readouts."""

  total: Array  # [G, C, P] float32
  segments: Array  # [G] int32
  target: Array  # [G, C] float32, larger = slower
  config_mask: Array  # [G, C] bool


def assemble_head(slates: Sequence[Slate[HeadGraph]], *, graphs: int, configs: int) -> HeadBatch:
  """A batch of at most `graphs` slates of `HeadGraph`s with `configs` configurations each."""
  width = slates[0].graph.total.shape[1]
  total = np.zeros((graphs, configs, width), np.float32)
  segments = np.ones(graphs, np.int32)
  for i, slate in enumerate(slates):
    total[i, : len(slate.config_ids)] = slate.graph.total[slate.config_ids]
    segments[i] = slate.graph.segments
  return HeadBatch(total, segments, *targets(slates, graphs, configs))
