"""Norms over the nodes of a graph and over the configurations of a slate."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.nodes import Nodes

EPSILON = 1e-5  # PyTorch's, of instance and layer norm


def instance_norm(x: Nodes) -> Nodes:
  """Mean 0 and variance 1 over the nodes of each graph, for every configuration and channel.

  `(x - mean) / sqrt(variance + 1e-5)`. A node that is stored once for all configurations
  counts once in the sums of each.
  """
  slates = x.slates
  of_nodes = lambda value: pooling.per_node(value, slates.graph_of)
  mean = pooling.mean(x)
  # A shift near the mean keeps precision of the squares. Any shift gives the same variance.
  shift = jax.lax.stop_gradient(mean.mean(axis=1))
  near = x - slates.nodes(of_nodes(shift))
  square = pooling.mean(near.map(jnp.square))
  variance = jnp.maximum(square - jnp.square(mean - shift[:, None]), 0)
  factor = jax.lax.rsqrt(variance + EPSILON)
  full = x.everywhere()
  normal = ((full - of_nodes(mean)) * of_nodes(factor)).astype(full.dtype)
  return slates.from_all(normal, x)


def slate_norm(x: jax.Array, mask: jax.Array) -> jax.Array:
  """`x [n, C, F]` with mean 0 and variance 1 over the C that `mask [n, C]` marks as real."""
  where = mask[..., None]
  count = jnp.maximum(where.sum(axis=1, keepdims=True), 1)
  # Equal values have exactly the difference 0, from each other and then from their mean.
  x = x - jax.lax.stop_gradient(x[:, :1])
  moment = lambda value: jnp.sum(jnp.where(where, value, 0), axis=1, keepdims=True) / count
  centred = x.astype(jnp.float32) - moment(x.astype(jnp.float32))
  return centred * jax.lax.rsqrt(moment(jnp.square(centred)) + EPSILON)
