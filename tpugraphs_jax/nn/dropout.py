"""Dropout, with equal masks on any number of devices.

A mask depends on the step, on the number of the slate in the batch of all devices, and on the
position of a row in its slate, but not on devices or padding.
"""

from __future__ import annotations

from typing import TypeVar

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn.nodes import Nodes, Slates

Features = TypeVar("Features", Nodes, jax.Array)


class Dropout(nn.Module):
  """Drops features in training, the same in all configurations of a node.

  Published systems draw a mask per configuration, which adds noise to the differences that a
  ranking loss compares.

  Attributes:
    rate: share of features to drop.
  """

  rate: float

  @nn.compact
  def __call__(self, x: Features, *, train: bool) -> Features:
    """Node features `[N, C, F]`, or graph features `[G, C, F]`; remaining features are scaled."""
    if not self.rate or not train:
      return x
    if isinstance(x, Nodes):
      factor = _factor(node_keys(self.make_rng("dropout"), x.slates), self.rate, (x.width,))
      return x * x.slates.nodes(factor.astype(x.dtype))
    keys = parallel.slate_keys(self.make_rng("dropout"), len(x))
    return x * _factor(keys, self.rate, x.shape[-1:])[:, None].astype(x.dtype)


class SlateDropout(nn.Module):
  """Drops numbers in training, of rows that belong to slates, such as groups of nodes.

  Attributes:
    rate: share of numbers to drop.
  """

  rate: float

  @nn.compact
  def __call__(self, x: jax.Array, slate_of: jax.Array, slates: int, *, train: bool) -> jax.Array:
    """`x [n, ...]` with some numbers 0 and the others scaled; `x` unless `train`.

    Args:
      x: rows; rows of a slate are contiguous.
      slate_of: `[n]` int32 slate of each row on this device; `slates` or more in padding.
      slates: number of slates of this device.
      train: drop numbers.
    """
    if not self.rate or not train:
      return x
    keys = row_keys(self.make_rng("dropout"), slate_of, slates)
    return x * _factor(keys, self.rate, x.shape[1:])


def node_keys(key: jax.Array, slates: Slates) -> jax.Array:
  """A key for every node, `[N]`."""
  return row_keys(key, slates.graph_of, slates.graphs)


def row_keys(key: jax.Array, slate_of: jax.Array, slates: int) -> jax.Array:
  """A key for every row, `[n]`; arguments as in `SlateDropout`."""
  rows, slate_of = jnp.arange(len(slate_of)), jnp.asarray(slate_of)
  first = jax.ops.segment_min(rows, slate_of, slates)
  slate_of = jnp.minimum(slate_of, slates - 1)
  keys = parallel.slate_keys(key, slates)[slate_of]
  return jax.vmap(jax.random.fold_in)(keys, rows - first[slate_of])


def _factor(keys: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
  """Random `[n, *shape]` float32 from `keys [n]`: 1 / (1 - rate), or 0 with probability rate."""
  mask = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys)
  return mask / jnp.float32(1 - rate)
