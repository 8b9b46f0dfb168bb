"""Activations, and normalisation of node features over channels, their graph or their slate."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.split_nodes import SplitNodes
from tpugraphs_jax.rankers.composed import nodes
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates

EPSILON = 1e-5


class Activation(nn.Module):
  """One of `options.ACTIVATIONS` on node features."""

  kind: str

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """`[N, C, F]` of `x [N, C, F]`, in its form."""
    if self.kind == "none":
      return x
    if self.kind == "prelu":
      return jax.tree.map(nn.PReLU(negative_slope_init=0.25, name="prelu"), x)
    return jax.tree.map(getattr(nn, self.kind), x)


class Norm(nn.Module):
  """One of `options.NORMS` on node features.

  Attributes:
    kind: which.
    dtype: of the computation of `layer`.
  """

  kind: str
  dtype: Any = None

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> Nodes:
    """Normalised `x [N, C, F]`; plain if the kind looks at all nodes of a graph."""
    if self.kind == "none":
      return x
    if self.kind == "layer":
      return jax.tree.map(nn.LayerNorm(dtype=self.dtype, name="layer"), x)
    if self.kind == "configuration":
      return over_configurations(x, slates)
    if self.kind == "instance":
      return over_nodes(x, slates)
    shape = 1, 1, (x.shared if isinstance(x, SplitNodes) else x).shape[-1]
    ones, zeros = nn.initializers.ones, nn.initializers.zeros
    centre = self.param("centre", ones, shape, jnp.float32)
    result = over_nodes(x, slates, centre=centre)
    scale, bias = self.param("scale", ones, shape), self.param("bias", zeros, shape)
    return (result * scale + bias).astype(result.dtype)


def over_nodes(x: Nodes, slates: Slates, *, centre: jax.Array | float = 1.0) -> jax.Array:
  """Mean 0 and variance 1 over the nodes of each graph, for every configuration and channel.

  `(x - c m) / sqrt(mean((x - c m)^2) + 1e-5)` with m the mean and c the centre (GraphNorm,
  Cai et al. 2021; c = 1 is instance normalisation). A node that is stored once for all
  configurations counts once in the sums of each.

  Args:
    x: `[N, C, F]` in either form.
    slates: of the nodes.
    centre: part of the mean that is taken off, `[1, 1, F]` or a number.

  Returns:
    `[N, C, F]`.
  """
  mean = nodes.graph_mean(x, slates)
  # A shift near the mean keeps the digits of the squares. The variance is the same for any.
  shift = jax.lax.stop_gradient(mean.mean(axis=1))
  near = nodes.spread(pooling.per_node(shift, slates.graph_of), x, slates)
  square = nodes.graph_mean(jax.tree.map(lambda v, s: jnp.square(v - s), x, near), slates)
  variance = square - jnp.square(mean - shift[:, None])
  variance = jnp.maximum(variance, 0) + jnp.square((1 - centre) * mean)
  factor = jax.lax.rsqrt(variance + EPSILON)
  of_nodes = lambda value: pooling.per_node(value, slates.graph_of)
  full = nodes.everywhere(x, slates)
  return ((full - of_nodes(centre * mean)) * of_nodes(factor)).astype(full.dtype)


def over_configurations(x: Nodes, slates: Slates) -> Nodes:
  """Mean 0 and variance 1 over the real configurations of each slate, for `x [N, C, F]`.

  A node that is the same in all configurations is 0.
  """
  normal = lambda rows, mask: masked_normal(rows, mask).astype(rows.dtype)
  if not isinstance(x, SplitNodes):
    return normal(x, slates.node_configs)
  mask = nodes.spread(slates.node_configs, x, slates).varying[:, 0]
  return SplitNodes(jnp.zeros_like(x.shared), normal(x.varying, mask), x.hop)


def masked_normal(x: jax.Array, mask: jax.Array) -> jax.Array:
  """`x [n, C, F]` less its mean over C, by its deviation; `mask [n, C]` says what counts."""
  where = mask[..., None]
  count = jnp.maximum(where.sum(axis=1, keepdims=True), 1)
  # Equal values are exactly 0 from each other, and exactly 0 from their mean then.
  x = x - jax.lax.stop_gradient(x[:, :1])
  moment = lambda value: jnp.sum(jnp.where(where, value, 0), axis=1, keepdims=True) / count
  centred = x.astype(jnp.float32) - moment(x.astype(jnp.float32))
  return centred * jax.lax.rsqrt(moment(jnp.square(centred)) + EPSILON)
