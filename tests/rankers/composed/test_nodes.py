"""Dropped edges: the same in every table, at random rates."""

from __future__ import annotations

import jax
import numpy as np
from system_cases import BATCH, EDGES, GRAPH, NODES

from tpugraphs_jax.rankers.composed import nodes


def table_edges(adjacency, node_of):
  """Edges (consumer, producer) of both halves of an adjacency, each sorted."""
  halves = []
  for table, consumers in ((adjacency.operands, True), (adjacency.users, False)):
    index, receivers = np.asarray(table.index), np.arange(len(table.index))
    more, which = np.asarray(table.overflow_index), np.asarray(table.overflow_receiver)
    pairs = [(r, s) for rows, lines in ((receivers, index), (which, more))
             for r, line in zip(rows, lines) for s in line if s < len(node_of)]
    ends = [(int(node_of[r]), int(node_of[s])) for r, s in pairs]
    halves.append(sorted(ends if consumers else [end[::-1] for end in ends]))
  return halves


def test_every_table_drops_the_same_edges():
  slates = nodes.Slates.of(BATCH)
  thin = nodes.drop_edges(slates, jax.random.key(3), 0.9)
  whole = sorted(zip(GRAPH.receivers[:EDGES].tolist(), GRAPH.senders[:EDGES].tolist()))
  listed = sorted((int(c), int(p)) for c, p, kept in zip(
      GRAPH.receivers, GRAPH.senders, np.asarray(thin.edge_mask)) if kept)
  first, second = table_edges(thin.adjacency, np.arange(NODES))
  assert first == second == listed and 0 < len(listed) < EDGES
  assert set(listed) <= set(whole)
  # All occurrences of an edge go together.
  assert all(listed.count(edge) in (0, whole.count(edge)) for edge in set(whole))
  node_of = np.concatenate(BATCH.by_hop.nodes)
  among, again = table_edges(thin.by_hop.adjacency, node_of)
  before, _ = table_edges(slates.by_hop.adjacency, node_of)
  assert among == again == [edge for edge in before if edge in set(listed)]


def test_edges_go_at_a_rate_that_is_drawn_from_zero_to_the_largest():
  consumers, producers = np.divmod(np.arange(10_000, dtype=np.int32), 100)
  rates = []
  for number in range(40):
    keep = nodes.keep_function(jax.random.key(number), 0.2, 100)
    rates.append(1 - np.mean(keep(consumers, producers)))
  assert max(rates) < 0.23 and min(rates) < 0.03 and 0.07 < np.mean(rates) < 0.13
  assert not np.array_equal(keep(consumers, producers), keep(producers, consumers))
  nothing = nodes.keep_function(jax.random.key(0), 0.0, 100)
  assert nothing(consumers, producers).all()
