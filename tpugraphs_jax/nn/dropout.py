"""Dropout, with the same masks on any number of devices.

A mask is drawn for each slate from a key of its own. It leaves out the same features in all
configurations of a node. Published systems draw anew for each configuration, which puts noise
on the differences that a ranking loss looks at.
"""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax import parallel
from tpugraphs_jax.nn.nodes import Nodes, Slates


class Dropout(nn.Module):
  """Leaves out features in training.

  Attributes:
    rate: share of the features that is left out.
  """

  rate: float

  @nn.compact
  def __call__(self, x: Nodes | jax.Array, *, train: bool) -> Nodes | jax.Array:
    """Node features `[N, C, F]`, or graph features `[G, C, F]`, with the others scaled up."""
    if not self.rate or not train:
      return x
    if isinstance(x, Nodes):
      kept = self._kept(node_keys(self.make_rng("dropout"), x.slates), x.width)
      return x * x.slates.nodes(kept.astype(x.dtype))
    keys = parallel.slate_keys(self.make_rng("dropout"), len(x))
    return x * self._kept(keys, x.shape[-1])[:, None].astype(x.dtype)

  def _kept(self, keys: jax.Array, width: int) -> jax.Array:
    """`[n, width]` float32: 1 / (1 - rate) where a feature stays, else 0, by `keys [n]`."""
    draw = lambda key: jax.random.bernoulli(key, 1 - self.rate, (width,))
    return jax.vmap(draw)(keys) / (1 - self.rate)


def node_keys(key: jax.Array, slates: Slates) -> jax.Array:
  """A key for every node, `[N]`, by the place of its slate in the step and its own in it."""
  count = slates.batch.graph.n_node
  place = jnp.arange(slates.num_nodes) - (jnp.cumsum(count) - count)[slates.graph_of]
  keys = parallel.slate_keys(key, slates.graphs).at[slates.graph_of].get(mode="clip")
  return jax.vmap(jax.random.fold_in)(keys, place)
