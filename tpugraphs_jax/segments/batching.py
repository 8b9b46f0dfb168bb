"""Segmented graphs, and training batches of a few segments of each graph.

A segment is an ordinary small graph with the configurations of its own nodes, so
that a batch of G graphs with S fresh segments each is a `LayoutBatch` of G * S
slots, whose size does not depend on the graphs' sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from tpugraphs_jax.batch import LayoutBatch
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate, targets
from tpugraphs_jax.graph import LayoutConfigs
from tpugraphs_jax.train import parallel


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentedGraph:
  """A graph as its prepared segments; offers what plans and metrics ask of a graph."""

  name: str
  opcode: np.ndarray  # [N] int32
  configs: LayoutConfigs  # of the whole graph
  segments: tuple[PreparedGraph, ...]
  edges: int  # of the whole graph
  cut_edges: int  # between segments, not used
  sizes: dict[str, int]  # the most that the graph's fresh segments take of a budget


def segmented(
    graph: Any, segments: Sequence[PreparedGraph], *, fresh: int, cut_edges: int
) -> SegmentedGraph:
  """Puts the prepared segments of an `OpGraph` together.

  Args:
    graph: the whole graph.
    segments: its segments.
    fresh: how many of them a training batch takes.
    cut_edges: edges between segments.
  """
  largest = {
      key: sum(sorted(s.sizes[key] for s in segments)[-fresh:]) for key in segments[0].sizes
  }
  return SegmentedGraph(
      name=graph.name, opcode=graph.node_opcode.astype(np.int32), configs=graph.configs,
      segments=tuple(segments), edges=graph.num_edges, cut_edges=cut_edges, sizes=largest)


class SegmentSlate(NamedTuple):
  """A slate of one graph, and the segments that get gradients."""

  graph: SegmentedGraph
  config_ids: np.ndarray  # [<= C] int64 configuration numbers
  target: np.ndarray  # [<= C] float32, larger = slower
  graph_id: int  # number of the graph among those trained on
  fresh: np.ndarray  # [S] int64 segment numbers, ascending

  @property
  def others(self) -> np.ndarray:
    """The segments without gradients, `[J - S]` int64."""
    return np.setdiff1d(np.arange(len(self.graph.segments)), self.fresh)


class Stale(NamedTuple):
  """What is known of the segments without gradients.

  Axis J counts entries: one per segment, or one for all of them together.
  """

  value: np.ndarray  # [G, C, J, P] float32 or bfloat16
  known_mask: np.ndarray  # [G, C, J] bool


class Others(NamedTuple):
  """One batch of segments without gradients."""

  batch: LayoutBatch  # G * S slots
  graph: np.ndarray  # [G * S] int32 the graph slot of each, G for empty slots


class SegmentBatch(NamedTuple):
  """G graphs, each with S segments and C configurations."""

  fresh: LayoutBatch  # G * S slots, those of a graph side by side
  fresh_id: np.ndarray  # [G, S] int32 segment numbers, -1 for empty slots
  segments: np.ndarray  # [G] int32 number of segments J of the graph, 1 for empty slots
  target: np.ndarray  # [G, C] float32, larger = slower
  config_mask: np.ndarray  # [G, C] bool
  graph_id: np.ndarray  # [G] int32 number of the graph among those trained on, -1 for empty slots
  config_id: np.ndarray  # [G, C] int32 configuration number, -1 for padding
  others: tuple[Others, ...] = ()  # to be recomputed by the training step
  stale: Stale | None = None  # filled in by the training step


def assemble(
    slots: Sequence[SegmentSlate], budget: Budget, *, graphs: int, configs: int, fresh: int,
    assemble_layout: Callable[..., LayoutBatch], with_others: bool = False,
) -> SegmentBatch:
  """A padded batch of segments.

  Args:
    slots: at most `graphs` slots, each with `fresh` segments.
    budget: room for the fresh segments.
    graphs: graph slots G.
    configs: configurations C per graph.
    fresh: segments S per graph.
    assemble_layout: `(slots, budget, graphs=, configs=) -> LayoutBatch`.
    with_others: whether the other segments are to be recomputed, and so belong
      to the batch.
  """
  def layout(chosen: Sequence[Sequence[int]]) -> LayoutBatch:
    pieces = [
        Slate(slot.graph.segments[number], slot.config_ids, slot.target, slot.graph_id)
        for slot, numbers in zip(slots, chosen) for number in numbers
    ]
    return assemble_layout(pieces, budget, graphs=graphs * fresh, configs=configs)

  pad = lambda rows, fill: np.concatenate(
      [rows, np.full((graphs - len(slots), *rows.shape[1:]), fill, rows.dtype)])
  target, mask = targets(slots, graphs, configs)
  ids = np.full((graphs, configs), -1, np.int32)
  ids[mask] = np.concatenate([slot.config_ids for slot in slots])
  return SegmentBatch(
      fresh=layout([slot.fresh for slot in slots]),
      fresh_id=pad(np.array([s.fresh for s in slots], np.int32).reshape(-1, fresh), -1),
      segments=pad(np.array([len(s.graph.segments) for s in slots], np.int32), 1),
      target=target, config_mask=mask,
      graph_id=pad(np.array([s.graph_id for s in slots], np.int32), -1),
      config_id=ids,
      others=_others(slots, graphs, fresh, layout) if with_others else ())


def _others(slots, graphs: int, fresh: int, layout) -> tuple[Others, ...]:
  """Batches of at most S other segments of each graph, which fit the fresh ones' budget."""
  rounds = -(-max((len(slot.others) for slot in slots), default=0) // fresh)
  batches = []
  for start in range(0, rounds * fresh, fresh):
    chosen = [slot.others[start : start + fresh] for slot in slots]
    owner = np.full(graphs * fresh, graphs, np.int32)
    owned = np.repeat(np.arange(len(slots)), [len(numbers) for numbers in chosen])
    owner[: len(owned)] = owned
    batches.append(Others(layout(chosen), owner))
  return tuple(batches)


def stack_for_devices(batches: Sequence[SegmentBatch]) -> SegmentBatch:
  """`parallel.stack_for_devices`; devices with fewer others get some that count nothing."""
  rounds = max(len(batch.others) for batch in batches)
  fill = next((batch.others[-1] for batch in batches if batch.others), None)
  if fill is not None:
    slots, graphs = len(fill.graph), len(batches[0].graph_id)
    fill = fill._replace(graph=np.full(slots, graphs, np.int32))
  return parallel.stack_for_devices([
      batch._replace(others=batch.others + (fill,) * (rounds - len(batch.others)))
      for batch in batches
  ])


def check(graphs: Sequence[SegmentedGraph], *, fresh: int, max_nodes: int) -> None:
  """Refuses segments that the training graphs cannot have, and says what they are.

  Raises:
    ValueError: segments larger than the largest graph, or a graph with fewer
      segments than a batch takes.
  """
  largest = max(graphs, key=lambda graph: len(graph.opcode))
  if max_nodes > len(largest.opcode):
    raise ValueError(
        f"--config.segments.max_nodes is {max_nodes}, but the largest training graph, "
        f"{largest.name}, has {len(largest.opcode)} nodes: take smaller segments, or train "
        "on whole graphs (variant full)")
  fewest = min(graphs, key=lambda graph: len(graph.segments))
  if fresh > len(fewest.segments):
    raise ValueError(
        f"--config.segments.fresh is {fresh}, but {fewest.name} has {len(fewest.segments)} "
        "segment(s): lower it, or take smaller segments (--config.segments.max_nodes)")
  segments = [len(graph.segments) for graph in graphs]
  edges, cut = sum(g.edges for g in graphs), sum(g.cut_edges for g in graphs)
  logging.info(
      "%d graphs in %d segments (%d to %d each); %d of %d edges (%.1f %%) are between segments "
      "and not used", len(graphs), sum(segments), min(segments), max(segments), cut, edges,
      100 * cut / max(edges, 1))
