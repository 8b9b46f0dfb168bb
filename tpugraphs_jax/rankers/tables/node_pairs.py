"""Pairs of configurable nodes whose layouts meet: one reaches the other, or both a third node.

The output of a configurable node passes through nodes that are not configurable, which may keep its
layout. It ends at another configurable node (a direct pair), or meets the output of another
configurable node at a node that has both as operands (a meeting). If the two layouts differ, the
compiler may insert a copy there.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from absl import logging
import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.graph import OpGraph

HOPS = 10
MAX_PAIRS = 200_000
# Nodes with more operands have no meetings: the tuple at the end of a program, or a long
# concatenation, would pair all nodes.
MEETING_OPERANDS = 4
NO_OPERAND = 255
_ROWS_PER_PAIR = 20  # limit of rows per allowed pair, which can lower the number of hops

_TYPES, _PRODUCT = columns.NODE["element_type"], columns.NODE["shape"].stop - 1


@dataclasses.dataclass(frozen=True, eq=False)
class NodePairs:
  """P pairs of configurable nodes; two nodes form a pair for every node where they meet.

  In a direct pair the first end reaches the second, which is also the node where they meet. In a
  meeting the path of the first end arrives at the lower operand.
  """

  ends: np.ndarray  # [P, 2] int32 numbers among the configurable nodes
  via: np.ndarray  # [P] int32 node where the two meet
  hops: np.ndarray  # [P, 2] uint8 edges from each end to `via`; 0 for the second of a direct pair
  operand: np.ndarray  # [P, 2] uint8 operand of `via` at which each path arrives, or NO_OPERAND
  nbytes: np.ndarray  # [P, 2] float32 bytes of the smallest tensor on each path, 0 without a path
  hop_limit: int  # most edges between two ends; lowered if there were too many pairs

  def __len__(self) -> int:
    return len(self.via)

  @property
  def is_direct(self) -> np.ndarray:
    """`[P]` bool: the first end reaches the second."""
    return self.hops[:, 1] == 0


class Paths(NamedTuple):
  """Shortest paths from configurable nodes to the nodes that they reach; rows by hop."""

  source: np.ndarray  # [M] int64 number among the configurable nodes
  node: np.ndarray  # [M] int64
  hops: np.ndarray  # [M] uint8 edges between the two, at least 1
  operand: np.ndarray  # [M] uint8 operand of the node at which the path arrives
  nbytes: np.ndarray  # [M] float32 bytes of the smallest tensor on the path

  def at(self, which: np.ndarray) -> Paths:
    """The rows `which`, given by a mask or by numbers."""
    return Paths(*(part[which] for part in self))


def tensor_bytes(node_feat: np.ndarray) -> np.ndarray:
  """Bytes of each node's output `[N]` float32, from node features `[N, 140 or more]`.

  Tuples and unknown element types have 0 bytes (see `OpGraph.for_rankers`). Released products of
  dimensions can be negative after an overflow: their absolute value is used.
  """
  type_bytes = np.array([kind.bytes for kind in columns.ELEMENT_TYPES], np.float32)
  element = node_feat[:, _TYPES] @ type_bytes
  return np.abs(node_feat[:, _PRODUCT]) * element


def find_pairs(graph: OpGraph, *, hops: int = HOPS, max_pairs: int = MAX_PAIRS) -> NodePairs:
  """All pairs of a graph whose ends are at most `hops` edges apart.

  Paths are shortest paths; of equally short paths the path through the lowest node is used. With
  more than `max_pairs` pairs, a warning names the graph, and pairs of fewer hops (`hop_limit`) are
  returned.

  Args:
    graph: graph with node features.
    hops: most edges between two ends, counted through the node where they meet; 0 to 200.
    max_pairs: largest number of pairs.
  """
  nbytes = tensor_bytes(graph.node_feat)
  rows, limit = find_paths(graph, nbytes, hops=hops, max_rows=_ROWS_PER_PAIR * max_pairs)
  while (pairs := _pairs_within(graph, rows, limit, max_pairs)) is None:
    limit -= 1
  if limit < hops:
    logging.warning(
      f"{graph.name} has more than {max_pairs} pairs of configurable nodes within {hops} hops: the "
      f"{len(pairs)} pairs within {limit} hops are used"
    )
  return pairs


def find_paths(
  graph: OpGraph, nbytes: np.ndarray, *, hops: int, max_rows: int
) -> tuple[Paths, int]:
  """Nodes that configurable nodes reach along users, through nodes that are not configurable.

  Args:
    graph: host graph.
    nbytes: `[N]` float32 bytes of each node's output.
    hops: most edges of a path.
    max_rows: largest number of rows; longer paths are left out to keep this limit.

  Returns:
    The rows, and the number of hops up to which they are complete.
  """
  users = _users(graph)
  is_config = np.zeros(graph.num_nodes, bool)
  is_config[graph.config_node] = True
  source = np.arange(len(graph.config_node), dtype=np.int64)
  node, least = graph.config_node.astype(np.int64), nbytes[graph.config_node]
  levels: list[Paths] = []
  old, total = source * graph.num_nodes + node, 0
  for hop in range(1, hops + 1):
    row, edge = users.edges(node)
    # Rows are sorted by source and node: the first of equal keys is through the lowest node.
    key, first = np.unique(source[row] * graph.num_nodes + users.node[edge], return_index=True)
    new = ~np.isin(key, old, assume_unique=True)
    row, edge = row[first[new]], edge[first[new]]
    total += len(row)
    if total > max_rows:
      return _concat(levels), hop - 1
    old = np.concatenate([old, key[new]])
    source, node, least = source[row], users.node[edge], least[row]
    levels.append(Paths(source, node, np.full(len(row), hop, np.uint8), users.operand[edge], least))
    is_open = ~is_config[node]  # paths end at configurable nodes
    source, node, least = source[is_open], node[is_open], np.minimum(least, nbytes[node])[is_open]
  return _concat(levels), hops


class _Users(NamedTuple):
  """Edges by producer."""

  start: np.ndarray  # [N + 1] int64 first edge of each producer
  node: np.ndarray  # [E] int64 consumer
  operand: np.ndarray  # [E] uint8 operand number of the consumer

  def edges(self, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The edges from `node [n]` to users: for each the index in `node`, and the edge."""
    count = self.start[node + 1] - self.start[node]
    row = np.repeat(np.arange(len(node)), count)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return row, self.start[node[row]] + offset


def _users(graph: OpGraph) -> _Users:
  consumer, producer = graph.edge_index[:, 0].astype(np.int64), graph.edge_index[:, 1]
  # The operand number is the position among the rows of a consumer, in file order.
  by_consumer = np.argsort(consumer, kind="stable")
  ordered = consumer[by_consumer]
  number = np.empty(len(consumer), np.int64)
  number[by_consumer] = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
  by_producer = np.argsort(producer, kind="stable")
  start = np.searchsorted(producer[by_producer], np.arange(graph.num_nodes + 1))
  operand = np.minimum(number, NO_OPERAND - 1).astype(np.uint8)
  return _Users(start, consumer[by_producer], operand[by_producer])


def _concat(levels: list[Paths]) -> Paths:
  empty = Paths(*(np.zeros(0, d) for d in (np.int64, np.int64, np.uint8, np.uint8, np.float32)))
  return Paths(*(np.concatenate(parts) for parts in zip(empty, *levels)))


def _pairs_within(graph: OpGraph, rows: Paths, limit: int, max_pairs: int) -> NodePairs | None:
  """The pairs of at most `limit` hops, or None if there are more than `max_pairs`."""
  rows = rows.at(rows.hops <= limit)
  number = np.full(graph.num_nodes, -1, np.int32)
  number[graph.config_node] = np.arange(len(graph.config_node))
  direct, places = rows.at(number[rows.node] >= 0), rows.at(number[rows.node] < 0)
  zero = np.zeros(len(direct.node), np.uint8)
  ends = Paths(number[direct.node], direct.node, zero, zero + NO_OPERAND, zero)
  places = _meeting_places(graph, places)
  meetings = _meetings(places, limit, _ROWS_PER_PAIR * max_pairs)
  if meetings is None or len(direct.node) + len(meetings[0]) > max_pairs:
    return None
  first, second = (_concat([end, places.at(row)]) for end, row in zip((direct, ends), meetings))
  stack = lambda a, b, dtype: np.stack([a, b], axis=1).astype(dtype)
  return NodePairs(
    stack(first.source, second.source, np.int32),
    first.node.astype(np.int32),
    stack(first.hops, second.hops, np.uint8),
    stack(first.operand, second.operand, np.uint8),
    stack(first.nbytes, second.nbytes, np.float32),
    limit,
  )


def _meeting_places(graph: OpGraph, rows: Paths) -> Paths:
  """Rows at nodes with 2 to MEETING_OPERANDS operands, sorted by node and operand."""
  operands = np.bincount(graph.edge_index[:, 0], minlength=graph.num_nodes)[rows.node]
  order = np.flatnonzero((operands > 1) & (operands <= MEETING_OPERANDS))
  order = order[np.lexsort((rows.source[order], rows.operand[order], rows.node[order]))]
  return rows.at(order)


def _meetings(places: Paths, limit: int, most: int) -> tuple[np.ndarray, np.ndarray] | None:
  """The two rows of every meeting; None if there are more than `most` candidates."""
  # Each row meets the later rows of the same node that have a higher operand.
  end = np.searchsorted(places.node, places.node, side="right")
  key = places.node * (NO_OPERAND + 1) + places.operand
  begin = np.searchsorted(key, key, side="right")
  count = end - begin
  if count.sum() > most:
    return None
  first = np.repeat(np.arange(len(count)), count)
  second = np.arange(len(first)) - np.repeat(np.cumsum(count) - count, count) + begin[first]
  near = places.hops[first].astype(int) + places.hops[second] <= limit
  near &= places.source[first] != places.source[second]
  return first[near], second[near]
