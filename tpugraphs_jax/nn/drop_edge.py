"""DropEdge: training without a random part of the edges (Rong et al. 2020).

An edge is in several tables: of operands and users, of all nodes and of reached nodes, and in the
list of edges. A hash of random numbers of its two ends decides whether it stays, so that all tables
agree.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import ABSENT, Adjacency, Neighbours
from tpugraphs_jax.nn.dropout import node_keys
from tpugraphs_jax.nn.nodes import Slates

Keep = Callable[[jax.Array, jax.Array], jax.Array]  # `(consumers, producers) -> mask`


def drop_edges(slates: Slates, key: jax.Array, max_rate: float) -> Slates:
  """Removes a random part of the edges of slates.

  A key gives one rate, uniform from 0 to `max_rate` (5th place: 0.15). Edges with equal ends stay
  or go together.

  Args:
    slates: with all edges.
    key: `[]` of the rate and the edges.
    max_rate: largest share of removed edges.
  """
  graph = slates.batch.graph
  keep = keep_function(key, max_rate, slates)
  dropped = dataclasses.replace(
      slates, adjacency=_thin(slates.adjacency, keep, jnp.arange(slates.num_nodes)),
      edge_mask=slates.edge_mask & keep(graph.receivers, graph.senders))
  if slates.by_hop is None:
    return dropped
  among_rows = _thin(slates.by_hop.adjacency, keep, jnp.concatenate(slates.by_hop.nodes))
  return dataclasses.replace(dropped, by_hop=slates.by_hop._replace(adjacency=among_rows))


def keep_function(key: jax.Array, max_rate: float, slates: Slates) -> Keep:
  """A function of consumers and producers `[...]` int32: the mask `[...]` of edges that stay."""
  rate_key, bits_key = jax.random.split(key)
  rate = jax.random.uniform(rate_key, maxval=max_rate)
  draw = lambda key: jax.random.bits(key, (2,), jnp.uint32)
  bits = jax.vmap(draw)(node_keys(bits_key, slates)).T

  def keep(consumer, producer):
    first, second = (part.at[end].get(mode="fill", fill_value=0)
                     for part, end in zip(bits, (consumer, producer)))
    return _uniform(first ^ (second * jnp.uint32(0x9E3779B1))) >= rate

  return keep


def _uniform(bits: jax.Array) -> jax.Array:
  """Mixes bits `[...]` uint32 (finaliser of MurmurHash3) to numbers in [0, 1)."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
  bits ^= bits >> 16
  return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _thin(adjacency: Adjacency, keep: Keep, node: jax.Array) -> Adjacency:
  """The tables without removed edges; `node [rows]` is the node of each row."""
  node_of = lambda row: jnp.asarray(node).at[row].get(mode="fill", fill_value=ABSENT)

  def thin(receiver, index, consumers):
    ends = node_of(receiver)[:, None], node_of(index)
    return jnp.where(keep(*(ends if consumers else ends[::-1])), index, ABSENT)

  def table(side: Neighbours, consumers: bool) -> Neighbours:
    rows = jnp.arange(len(side.index))
    return Neighbours(
        thin(rows, side.index, consumers),
        thin(side.overflow_receiver, side.overflow_index, consumers), side.overflow_receiver)

  return Adjacency(table(adjacency.operands, True), table(adjacency.users, False))
