"""Dropped edges: the same in every table, at random rates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import random_graphs, system_cases
from tests.support.system_cases import BATCH, EDGES, GRAPH, NODES, TILES
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn import dropout
from tpugraphs_jax.nn.nodes import Slates


def on_a_device(function):
  """The result of `function` on one device, which keys of slates need."""
  found = jax.jit(jax.vmap(lambda _: function(), axis_name=parallel.DEVICES))(jnp.zeros(1))
  return jax.tree.map(lambda leaf: np.asarray(leaf)[0], found)


def thinned(batch, key, max_rate):
  return on_a_device(lambda: dropout.drop_edges(Slates.of(batch), jax.random.key(key), max_rate))


def table_edges(adjacency, node_of):
  """Edges (consumer, producer) of both halves of an adjacency, each sorted."""
  operands, users = (
    node_of[random_graphs.table_edges(table)] for table in (adjacency.operands, adjacency.users)
  )
  return [sorted(map(tuple, ends.tolist())) for ends in (operands, users[:, ::-1])]


def test_every_table_drops_the_same_edges():
  slates, thin = Slates.of(BATCH), thinned(BATCH, 3, 0.9)
  whole = sorted(zip(GRAPH.receivers[:EDGES].tolist(), GRAPH.senders[:EDGES].tolist()))
  listed = sorted(
    (int(c), int(p))
    for c, p, kept in zip(GRAPH.receivers, GRAPH.senders, np.asarray(thin.edge_mask))
    if kept
  )
  first, second = table_edges(thin.batch.adjacency, np.arange(NODES))
  assert first == second == listed and 0 < len(listed) < EDGES
  assert set(listed) <= set(whole)
  # All occurrences of an edge go together.
  assert all(listed.count(edge) in (0, whole.count(edge)) for edge in set(whole))
  node_of = np.concatenate(BATCH.by_hop.nodes)
  among, again = table_edges(thin.batch.by_hop.adjacency, node_of)
  before, _ = table_edges(slates.batch.by_hop.adjacency, node_of)
  assert among == again == [edge for edge in before if edge in set(listed)]


def test_kernels_lose_edges_too():
  thin = thinned(TILES, 0, 0.9)
  first, second = table_edges(thin.batch.adjacency, np.arange(len(TILES.graph.nodes["opcode"])))
  assert first == second and 0 < len(first) < int(TILES.graph.n_edge[:-1].sum())


def test_edges_go_at_a_rate_that_is_drawn_from_zero_to_the_largest():
  consumers, producers = np.divmod(np.arange(NODES**2, dtype=np.int32), NODES)
  slates = Slates.of(BATCH)
  keys = jax.random.split(jax.random.key(0), 48)
  largest = jnp.repeat(jnp.array([0.2, 0.9, 0.0]), 16)
  kept = on_a_device(
    lambda: jax.vmap(
      lambda key, rate: dropout.keep_function(key, rate, slates)(consumers, producers)
    )(keys, largest)
  )
  low, high, none = np.split(np.asarray(kept), 3)
  rates = 1 - low.mean(axis=1)
  assert max(rates) < 0.25 and min(rates) < 0.05 and 0.05 < np.mean(rates) < 0.15
  square = high[0].reshape(NODES, NODES)
  assert not np.array_equal(square, square.T)
  assert none.all() and not high.all(axis=1).any()


def test_two_devices_drop_what_one_does():
  """Masks of the edge list of four programs, and of two programs on each of two devices."""
  programs = system_cases.raw_layouts()[:4]
  mask = lambda batch: dropout.drop_edges(Slates.of(batch), jax.random.key(3), 0.9).edge_mask

  def kept(*shares):
    masks = system_cases.on_devices(mask, system_cases.batches_of(*shares))
    edges = [sum(graph.num_edges for graph in share) for share in shares]
    return np.concatenate([mask[:count] for mask, count in zip(masks, edges)])

  together = kept(programs)
  np.testing.assert_array_equal(kept(programs[:2], programs[2:]), together)
  assert together.any() and not together.all()
