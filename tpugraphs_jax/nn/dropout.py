"""Dropout, with the same masks on any number of devices.

A mask follows from the step, from the number of the slate in the batch of all devices, and from
the place of a row in its slate. It does not depend on how slates are spread over devices or
padded.
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
  """Leaves out features in training, the same ones in all configurations of a node.

  Published systems draw anew for each configuration, which puts noise on the differences that a
  ranking loss looks at.

  Attributes:
    rate: share of the features that is left out.
  """

  rate: float

  @nn.compact
  def __call__(self, x: Features, *, train: bool) -> Features:
    """Node features `[N, C, F]`, or graph features `[G, C, F]`, with the others scaled up."""
    if not self.rate or not train:
      return x
    if isinstance(x, Nodes):
      kept = _kept(node_keys(self.make_rng("dropout"), x.slates), self.rate, (x.width,))
      return x * x.slates.nodes(kept.astype(x.dtype))
    keys = parallel.slate_keys(self.make_rng("dropout"), len(x))
    return x * _kept(keys, self.rate, x.shape[-1:])[:, None].astype(x.dtype)


class SlateDropout(nn.Module):
  """Leaves out numbers in training, of rows that belong to slates, such as groups of nodes.

  Attributes:
    rate: share of the numbers that is left out.
  """

  rate: float

  @nn.compact
  def __call__(self, x: jax.Array, slate_of: jax.Array, slates: int, *, train: bool) -> jax.Array:
    """`x [n, ...]` without some of its numbers, the others scaled; `x` itself unless `train`.

    Args:
      x: rows; those of a slate follow each other.
      slate_of: `[n]` int32, the slate of each row on this device; larger for padding.
      slates: of this device.
      train: whether anything is left out.
    """
    if not self.rate or not train:
      return x
    keys = row_keys(self.make_rng("dropout"), slate_of, slates)
    return x * _kept(keys, self.rate, x.shape[1:])


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


def _kept(keys: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
  """`[n, *shape]` float32 by `keys [n]`: 1 / (1 - rate) where a number stays, else 0."""
  kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys)
  return kept / jnp.float32(1 - rate)
