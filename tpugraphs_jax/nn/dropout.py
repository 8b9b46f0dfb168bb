"""Dropout whose masks belong to slates: any number of devices draws the same ones."""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax import parallel


class SlateDropout(nn.Module):
  """`flax.linen.Dropout` on rows of slates, such as nodes or groups.

  A mask follows from the step, the number of the slate in the batch of all devices, and the place
  of a row in its slate. It does not depend on how slates are spread over devices or padded.

  Attributes:
    rate: share of the numbers that are left out.
  """

  rate: float

  @nn.compact
  def __call__(
      self, x: jax.Array, slate_of: jax.Array, slates: int, *, train: bool
  ) -> jax.Array:
    """`x [n, ...]` without some of its numbers, the others scaled; `x` itself unless `train`.

    Args:
      x: rows; those of a slate follow each other.
      slate_of: `[n]` int32, the slate of each row on this device; larger for padding.
      slates: of this device.
      train: whether anything is left out.
    """
    if not self.rate or not train:
      return x
    keys = parallel.slate_keys(self.make_rng("dropout"), slates)
    rows, slate_of = jnp.arange(len(x)), jnp.asarray(slate_of)
    first = jax.ops.segment_min(rows, slate_of, slates)
    slate_of = jnp.minimum(slate_of, slates - 1)
    row_keys = jax.vmap(jax.random.fold_in)(keys[slate_of], rows - first[slate_of])
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, x.shape[1:]))(row_keys)
    return jnp.where(kept, x / (1 - self.rate), 0)
