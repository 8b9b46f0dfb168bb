"""Neighbour tables of one graph, and the hops of its nodes from configurable ones."""

from __future__ import annotations

import numpy as np

from tpugraphs_jax.data.batch import ABSENT, Adjacency, Neighbours

# Width of the tables. 99 % of nodes have at most four operands and users; on a
# 2-core CPU a table of this width is 1.5 to 2.9 times faster than a sorted segment
# sum (benchmarks/aggregation.py). For a TPU v3 its compiler estimates 22 times the
# time of a sorted segment sum for a table of four slots (8 gathers instead of one,
# 2.63 ms instead of 0.12 on [6000, 1024]; benchmarks/tpu_sums.json). No TPU has measured
# it, and the estimate for a gather is less than its bytes can take.
SLOTS = 4
_SLOTS_OF_PLATFORM = {"cpu": SLOTS, "tpu": 0}


def slots_of(platform: str) -> int:
  """The width of tables on a platform of jax (`cpu`, `gpu`, `tpu`)."""
  return _SLOTS_OF_PLATFORM.get(platform, SLOTS)


def neighbours(
    receiver: np.ndarray, sender: np.ndarray, nodes: int, *, slots: int = SLOTS
) -> Neighbours:
  """Table of senders per receiver; see `batch.Neighbours`.

  Args:
    receiver: `[E]` int32 node that sums.
    sender: `[E]` int32 node that is summed.
    nodes: number of nodes.
    slots: width of the table; 0 puts every edge into the overflow table.
  """
  order = np.lexsort((sender, receiver))
  receiver, sender = receiver[order], sender[order]
  slot = np.arange(len(receiver)) - np.searchsorted(receiver, receiver)
  index = np.full((nodes, slots), ABSENT, np.int32)
  fits = slot < slots
  index[receiver[fits], slot[fits]] = sender[fits]
  receiver, sender, slot = receiver[~fits], sender[~fits], slot[~fits] - slots
  width = max(slots, 1)
  column = slot % width
  overflow_index = np.full((np.sum(column == 0), width), ABSENT, np.int32)
  overflow_index[np.cumsum(column == 0) - 1, column] = sender
  return Neighbours(index, overflow_index, receiver[column == 0].astype(np.int32))


def adjacency(
    consumer: np.ndarray, producer: np.ndarray, nodes: int, *, slots: int = SLOTS
) -> Adjacency:
  """Both directions of the edges `consumer [E]` uses `producer [E]`."""
  return Adjacency(
      operands=neighbours(consumer, producer, nodes, slots=slots),
      users=neighbours(producer, consumer, nodes, slots=slots))


def hops_from(
    start: np.ndarray, edge_index: np.ndarray, nodes: int, *, hops: int
) -> np.ndarray:
  """Edges between each node and the nearest of `start`, against or along edges.

  Args:
    start: `[K]` int node numbers.
    edge_index: `[E, 2]` int rows (consumer, producer).
    nodes: number of nodes N.
    hops: nodes farther away than this count as not reached.

  Returns:
    `[N]` int32, ABSENT where not reached.
  """
  hop_of = np.full(nodes, ABSENT, np.int32)
  hop_of[start] = 0
  for hop in range(hops):
    near = hop_of[edge_index] <= hop
    touched = edge_index[near.any(axis=1)]
    hop_of[touched] = np.minimum(hop_of[touched], hop + 1)
  return hop_of
