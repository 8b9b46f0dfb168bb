"""Device batch types: padded arrays of fixed shapes around `jraph.GraphsTuple`.

Kept apart from `graph.py` so that reading and converting data never imports jax.

Conventions. Node-level tensors are `[N, C, F]` (nodes, configurations,
features). A batch has G graphs and, as jraph asks, one more graph at the
end that owns all padding nodes and edges. An index that is too large for the
array it points into means "absent": gathers give 0 there and scatters drop it,
so that padding needs no mask of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jraph
import numpy as np

# Marks an empty place: no array is that long, and adding an offset to it neither
# overflows int32 nor makes it a valid index.
ABSENT = 1 << 30


class Neighbours(NamedTuple):
  """For every receiver the rows it sums: a table of fixed width and the rest.

  Nearly all instructions have at most four operands and users, and a table of
  that width turns aggregation into a few dense gathers. Receivers with more have
  further rows of that width in a second table, sorted by receiver. With no slots
  that table has one column and every edge, and aggregation is a sorted segment sum.
  """

  index: np.ndarray  # [receivers, slots] int32 row of the sender, or ABSENT
  overflow_index: np.ndarray  # [overflow, max(slots, 1)] int32 likewise
  overflow_receiver: np.ndarray  # [overflow] int32 ascending, or ABSENT


class Adjacency(NamedTuple):
  """The same edges from both ends; each half is the transpose of the other."""

  operands: Neighbours  # receiver = consumer, senders = its operands
  users: Neighbours  # receiver = producer, senders = its users


class NodesByHop(NamedTuple):
  """Nodes whose values depend on the configuration, nearest first.

  The hop of a node is the number of edges, in either direction, between it and the
  nearest configurable node. Before any message passing only nodes of hop 0 differ
  between configurations, after h rounds nodes of hops 0..h do; every other node has
  one value for all configurations. Tensors of these nodes have a row per node, hop
  after hop.
  """

  nodes: tuple[np.ndarray, ...]  # per hop [nodes of that hop] int32 node, or ABSENT
  hop: np.ndarray  # [N] int32 hop of each node, or ABSENT
  adjacency: Adjacency  # among rows


class DistinctNodes(NamedTuple):
  """Sets of nodes of one graph with equal features: what depends on these is computed once."""

  first: np.ndarray  # [T] int32 the first node of each set, or ABSENT
  which: np.ndarray  # [N] int32 the set of each node, or ABSENT


class TileBatch(NamedTuple):
  """G slates, each with one kernel and C of its tile configurations."""

  graph: jraph.GraphsTuple  # nodes {"opcode" [N] int32, "feat" [N, F] float32}
  adjacency: Adjacency
  config_feat: np.ndarray  # [G, C, F] float32, transformed
  target: np.ndarray  # [G, C] float32, larger = slower
  config_mask: np.ndarray  # [G, C] bool
  distinct: DistinctNodes | None = None  # for rankers that ask for it (`Kernels.distinct`)


class LayoutBatch(NamedTuple):
  """G slates, each with one graph and C of its layout configurations."""

  graph: jraph.GraphsTuple  # nodes {"opcode" [N] int32, "feat" [N, F] float32}
  adjacency: Adjacency
  by_hop: NodesByHop
  rows: np.ndarray  # [R, F] float32 dictionary of configuration rows of all slates
  row_id: np.ndarray  # [hop 0, C] int32 row of each configurable node, or ABSENT
  block_mask: np.ndarray  # [N] bool nodes of the sampled block (all, if none is sampled)
  target: np.ndarray  # [G, C] float32, larger = slower
  config_mask: np.ndarray  # [G, C] bool


def take_configs(batch: TileBatch | LayoutBatch, start: jax.Array, size: int):
  """The same graphs with the configurations `start` to `start + size` alone, `[G, size]`.

  Args:
    batch: with C configurations per slate.
    start: int32 scalar, may be traced.
    size: how many, at most C.
  """
  fields = ["target", "config_mask"]
  fields += ["config_feat"] if isinstance(batch, TileBatch) else ["row_id"]
  return batch._replace(**{
      name: jax.lax.dynamic_slice_in_dim(getattr(batch, name), start, size, axis=1)
      for name in fields})
