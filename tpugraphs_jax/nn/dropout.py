"""Dropout of features and edges, with equal masks on any number of devices.

A mask depends on the step, on the index of the slate in the global batch, and on the position of a
row in its slate. It does not depend on the number of devices or on padding.

`drop_edges` removes a random part of the edges (DropEdge, Rong et al. 2020). An edge is in the list
of edges and in several tables: operands and users of all nodes, and of reached nodes. A hash of
random numbers of its two ends decides whether it is kept, so that all tables agree.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import TypeVar

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import ABSENT, Adjacency, Array, LayoutBatch, Neighbours
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn.nodes import Nodes, Slates

Features = TypeVar("Features", Nodes, jax.Array)


class Dropout(nn.Module):
  """Drops features in training, the same features for all configurations of a node.

  Published systems draw a mask per configuration, which adds noise to the differences between
  configurations in a ranking loss.

  Attributes:
    rate: share of features to drop.
  """

  rate: float

  @nn.compact
  def __call__(self, x: Features, *, train: bool) -> Features:
    """Drops features of nodes `[N, C, F]` or graphs `[G, C, F]`, and scales the others."""
    if not self.rate or not train:
      return x
    if isinstance(x, Nodes):
      factor = _factor(node_keys(self.make_rng("dropout"), x.slates), self.rate, (x.width,))
      return x * x.slates.nodes(factor.astype(x.dtype))
    keys = parallel.slate_keys(self.make_rng("dropout"), len(x))
    return x * _factor(keys, self.rate, x.shape[-1:])[:, None].astype(x.dtype)


class SlateDropout(nn.Module):
  """Drops values in training, in rows that belong to slates, such as groups of nodes.

  Attributes:
    rate: share of values to drop.
  """

  rate: float

  @nn.compact
  def __call__(self, x: jax.Array, slate_of: Array, slates: int, *, train: bool) -> jax.Array:
    """Drops values of `x [n, ...]`, and scales the others.

    Args:
      x: rows; rows of a slate are contiguous.
      slate_of: `[n]` int32 slate of each row on this device; `slates` or more in padding.
      slates: number of slates of this device.
      train: drop values; otherwise `x` is returned.
    """
    if not self.rate or not train:
      return x
    keys = row_keys(self.make_rng("dropout"), slate_of, slates)
    return x * _factor(keys, self.rate, x.shape[1:])


def node_keys(key: jax.Array, slates: Slates) -> jax.Array:
  """A key for every node, `[N]`."""
  return row_keys(key, slates.graph_of, slates.graphs)


def row_keys(key: jax.Array, slate_of: Array, slates: int) -> jax.Array:
  """A key for every row, `[n]`; arguments as in `SlateDropout`."""
  rows, slate_of = jnp.arange(len(slate_of)), jnp.asarray(slate_of)
  first = jax.ops.segment_min(rows, slate_of, slates)
  slate_of = jnp.minimum(slate_of, slates - 1)
  keys = parallel.slate_keys(key, slates)[slate_of]
  return jax.vmap(jax.random.fold_in)(keys, rows - first[slate_of])


def _factor(keys: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
  """Random factors `[n, *shape]` float32: 0 with probability `rate`, otherwise 1 / (1 - rate)."""
  mask = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys)
  return mask / jnp.float32(1 - rate)


# DropEdge.

Keep = Callable[[jax.Array, jax.Array], jax.Array]  # `(consumers, producers) -> mask`


def drop_edges(slates: Slates, key: jax.Array, max_rate: float) -> Slates:
  """Removes a random part of the edges of slates.

  The rate is uniform from 0 to `max_rate` (5th place: 0.15). Edges with equal ends are kept or
  removed together.

  Args:
    slates: slates with all edges.
    key: `[]` key that determines the rate and the edges.
    max_rate: largest share of removed edges.
  """
  batch, graph = slates.batch, slates.batch.graph
  keep = keep_function(key, max_rate, slates)
  batch = batch._replace(adjacency=_thin(batch.adjacency, keep, jnp.arange(slates.num_nodes)))
  edge_mask = slates.edge_mask & keep(graph.receivers, graph.senders)
  if isinstance(batch, LayoutBatch):
    among_rows = _thin(batch.by_hop.adjacency, keep, jnp.concatenate(batch.by_hop.nodes))
    batch = batch._replace(by_hop=batch.by_hop._replace(adjacency=among_rows))
  return dataclasses.replace(slates, batch=batch, edge_mask=edge_mask)


def keep_function(key: jax.Array, max_rate: float, slates: Slates) -> Keep:
  """A function from consumers and producers `[...]` int32 to the mask `[...]` of kept edges."""
  rate_key, bits_key = jax.random.split(key)
  rate = jax.random.uniform(rate_key, maxval=max_rate)
  draw = lambda key: jax.random.bits(key, (2,), jnp.uint32)
  bits = jax.vmap(draw)(node_keys(bits_key, slates)).T

  def keep(consumer, producer):
    of_node = lambda part, node: part.at[node].get(mode="fill", fill_value=0)
    first, second = map(of_node, bits, (consumer, producer))
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

  def thin(receiver, index, to_consumers):
    ends = node_of(receiver)[:, None], node_of(index)
    return jnp.where(keep(*(ends if to_consumers else ends[::-1])), index, ABSENT)

  def table(side: Neighbours, to_consumers: bool) -> Neighbours:
    rows = jnp.arange(len(side.index))
    index = thin(rows, side.index, to_consumers)
    overflow = thin(side.overflow_receiver, side.overflow_index, to_consumers)
    return Neighbours(index, overflow, side.overflow_receiver)

  return Adjacency(table(adjacency.operands, True), table(adjacency.users, False))
