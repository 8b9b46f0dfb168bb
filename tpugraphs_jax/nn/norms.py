"""Norms over the nodes of a graph and over the configurations of a slate."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.nodes import Nodes

EPSILON = 1e-5  # PyTorch's default for instance norm and layer norm


def instance_norm(x: Nodes) -> Nodes:
  """`(x - mean) / sqrt(variance + 1e-5)`, over the nodes of a graph per configuration and channel.

  A node whose features are stored once counts once for each configuration.
  """
  slates = x.slates
  per_node = lambda value: pooling.per_node(value, slates.graph_of)
  mean = pooling.mean(x)
  # Squares lose precision far from 0. The variance does not depend on the shift.
  shift = jax.lax.stop_gradient(mean.mean(axis=1))
  centred = x - slates.nodes(per_node(shift))
  square = pooling.mean(centred.map(jnp.square))
  variance = jnp.maximum(square - jnp.square(mean - shift[:, None]), 0)
  factor = jax.lax.rsqrt(variance + EPSILON)
  full = x.everywhere()
  result = ((full - per_node(mean)) * per_node(factor)).astype(full.dtype)
  return slates.from_all(result, x)


def slate_norm(x: jax.Array, mask: jax.Array) -> jax.Array:
  """`x [n, C, F]` with mean 0 and variance 1 over C, where `mask [n, C]` is True."""
  where = mask[..., None]
  count = jnp.maximum(where.sum(axis=1, keepdims=True), 1)
  # After this subtraction equal values are exactly 0, and so is their difference from the mean.
  x = x - jax.lax.stop_gradient(x[:, :1])
  moment = lambda value: jnp.sum(jnp.where(where, value, 0), axis=1, keepdims=True) / count
  centred = x.astype(jnp.float32) - moment(x.astype(jnp.float32))
  return centred * jax.lax.rsqrt(moment(jnp.square(centred)) + EPSILON)
