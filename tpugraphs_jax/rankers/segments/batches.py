"""Batches of Graph Segment Training: of a few segments per graph, or of sums over all segments.

A segment is a small graph with the configurations of its nodes. A batch of G graphs with S fresh
segments each is a `LayoutBatch` of G * S slates, whose size does not depend on the sizes of the
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tpugraphs_jax.data.batching import Budget, LayoutBatch, PreparedGraph, Slate, targets
from tpugraphs_jax.graph import LayoutConfigs


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentedGraph:
  """The prepared segments of a graph, with the fields that plans and metrics read."""

  name: str
  opcode: np.ndarray  # [N] int32
  configs: LayoutConfigs  # of the whole graph
  segments: tuple[PreparedGraph, ...]
  edges: int  # of the whole graph
  cut_edges: int  # between segments, left out
  sizes: dict[str, int]  # largest size of its fresh segments, by entry of a budget


def segmented(
    graph: Any, segments: Sequence[PreparedGraph], *, fresh: int, cut_edges: int
) -> SegmentedGraph:
  """The `SegmentedGraph` of an `OpGraph` and its prepared segments.

  Args:
    graph: the whole graph.
    segments: its segments.
    fresh: number of segments of the graph in a training batch.
    cut_edges: number of edges between segments.
  """
  largest = {key: sum(sorted(s.sizes[key] for s in segments)[-fresh:]) for key in segments[0].sizes}
  return SegmentedGraph(
      name=graph.name, opcode=graph.node_opcode.astype(np.int32), configs=graph.configs,
      segments=tuple(segments), edges=graph.num_edges, cut_edges=cut_edges, sizes=largest)


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

  Axis J has an entry per segment, or one entry for the sum of all.
  """

  value: np.ndarray  # [G, C, J, P] float32 or bfloat16
  known_mask: np.ndarray  # [G, C, J] bool


class Others(NamedTuple):
  """A batch of segments without gradients."""

  batch: LayoutBatch  # G * S slates
  graph: np.ndarray  # [G * S] int32 index of the graph in the batch, G in padding


class SegmentBatch(NamedTuple):
  """G graphs, each with S segments and C configurations."""

  fresh: LayoutBatch  # G * S slates, graph after graph
  fresh_id: np.ndarray  # [G, S] int32 segment numbers, -1 in padding
  segments: np.ndarray  # [G] int32 number of segments J of the graph, 1 in padding
  target: np.ndarray  # [G, C] float32, larger = slower
  config_mask: np.ndarray  # [G, C] bool
  graph_id: np.ndarray  # [G] int32 number of the training graph, -1 in padding
  config_id: np.ndarray  # [G, C] int32 configuration number, -1 in padding
  others: tuple[Others, ...] = ()  # the training step recomputes them
  stale: Stale | None = None  # set by the training step


def assemble(
    slates: Sequence[SegmentSlate], budget: Budget, *, graphs: int, configs: int, fresh: int,
    assemble_layout: Callable[..., LayoutBatch], with_others: bool = False,
) -> SegmentBatch:
  """A padded batch of segments.

  Args:
    slates: at most `graphs` slates, each with `fresh` segments.
    budget: of the fresh segments.
    graphs: graphs G.
    configs: configurations C per graph.
    fresh: segments S per graph.
    assemble_layout: `(slates, budget, graphs=, configs=) -> LayoutBatch`.
    with_others: include the other segments, for recomputation.
  """
  def layout(chosen: Sequence[Iterable[int]]) -> LayoutBatch:
    pieces = [
        Slate(slate.graph.segments[number], slate.config_ids, slate.target, slate.graph_id)
        for slate, numbers in zip(slates, chosen) for number in numbers]
    return assemble_layout(pieces, budget, graphs=graphs * fresh, configs=configs)

  pad = lambda rows, fill: np.concatenate(
      [rows, np.full((graphs - len(slates), *rows.shape[1:]), fill, rows.dtype)])
  target, mask = targets(slates, graphs, configs)
  ids = np.full((graphs, configs), -1, np.int32)
  ids[mask] = np.concatenate([slate.config_ids for slate in slates])
  return SegmentBatch(
      fresh=layout([slate.fresh for slate in slates]),
      fresh_id=pad(np.array([s.fresh for s in slates], np.int32).reshape(-1, fresh), -1),
      segments=pad(np.array([len(s.graph.segments) for s in slates], np.int32), 1),
      target=target, config_mask=mask,
      graph_id=pad(np.array([s.graph_id for s in slates], np.int32), -1),
      config_id=ids,
      others=_others(slates, graphs, fresh, layout) if with_others else ())


def _others(slates, graphs: int, fresh: int, layout) -> tuple[Others, ...]:
  """Batches of at most S other segments of each graph, in the budget of the fresh segments."""
  rounds = -(-max((len(slate.others) for slate in slates), default=0) // fresh)
  batches = []
  for start in range(0, rounds * fresh, fresh):
    chosen = [slate.others[start : start + fresh] for slate in slates]
    owner = np.full(graphs * fresh, graphs, np.int32)
    owned = np.repeat(np.arange(len(slates)), [len(numbers) for numbers in chosen])
    owner[: len(owned)] = owned
    batches.append(Others(layout(chosen), owner))
  return tuple(batches)


def align(batches: Sequence[SegmentBatch]) -> list[SegmentBatch]:
  """Pads `others` of the batches of several devices with empty batches to one length."""
  rounds = max(len(batch.others) for batch in batches)
  fill = next((batch.others[-1] for batch in batches if batch.others), None)
  if fill is not None:
    owners, graphs = len(fill.graph), len(batches[0].graph_id)
    fill = fill._replace(graph=np.full(owners, graphs, np.int32))
  return [
      batch._replace(others=batch.others + (fill,) * (rounds - len(batch.others)))
      for batch in batches]


@dataclasses.dataclass(frozen=True, eq=False)
class HeadGraph:
  """Sums of readouts of some configurations of a graph, to train the head alone."""

  name: str
  configs: LayoutConfigs
  total: np.ndarray  # [configs, P] float32 sums over all segments, memory-mapped
  segments: int
  sizes: dict[str, int]  # one row per batch, by entry of a budget


class HeadBatch(NamedTuple):
  """G slates with sums of readouts."""

  total: np.ndarray  # [G, C, P] float32
  segments: np.ndarray  # [G] int32
  target: np.ndarray  # [G, C] float32, larger = slower
  config_mask: np.ndarray  # [G, C] bool


def assemble_head(slates: Sequence[Slate[HeadGraph]], *, graphs: int, configs: int) -> HeadBatch:
  """A batch of at most `graphs` slates of `HeadGraph`s with `configs` configurations each."""
  width = slates[0].graph.total.shape[1]
  total = np.zeros((graphs, configs, width), np.float32)
  segments = np.ones(graphs, np.int32)
  for i, slate in enumerate(slates):
    total[i, : len(slate.config_ids)] = slate.graph.total[slate.config_ids]
    segments[i] = slate.graph.segments
  return HeadBatch(total, segments, *targets(slates, graphs, configs))
