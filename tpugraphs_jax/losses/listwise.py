"""Losses that look at the order of a whole list."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import rax

from tpugraphs_jax.losses.slates import LossSum, Noise, checked, count


def listmle(
    scores: jax.Array,
    labels: jax.Array,
    *,
    where: jax.Array | None = None,
    temperature: float = 1.0,
    key: jax.Array | None = None,
    noise: Noise = Noise(),
) -> LossSum:
  """ListMLE: negative log likelihood of the order from slowest to fastest.

  L = sum_k [log sum_{l >= k} exp(s_l / T) - s_k / T] over a list sorted by label,
  largest first; the mean is over lists with at least one real item (Xia et al.
  2008; temperature as in TF-Ranking, which the official baseline uses).

  Args:
    temperature: T > 0; the official tile models use 10, the layout model 1.
    key: puts tied labels in random order: one key, or `[graphs]` keys, one per
      list, which make the order independent of how lists are split over devices.
      None keeps tied items in the order given.
    noise: with a key, items that are closer than this also change places at random,
      the more often the closer they are; items further apart never do.
  """
  if not temperature > 0:
    raise ValueError(f"temperature is {temperature}, expected a number above 0")
  scores, labels, where = checked(scores, labels, where)
  if key is not None and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    key = jax.random.wrap_key_data(key)
  if key is not None and noise.relative:
    labels = _shaken(labels, where, key, noise)
  per_list_loss = functools.partial(rax.listmle_loss, reduce_fn=None)
  if key is None:
    per_list = per_list_loss(scores / temperature, labels, where=where)
  else:
    if key.ndim:
      per_list_loss = jax.vmap(per_list_loss)
    per_list = per_list_loss(scores / temperature, labels, where=where, key=key)
  return jnp.sum(per_list), count(jnp.any(where, axis=-1))


def _shaken(labels, where, key, noise: Noise):
  """Logarithms of the runtimes in units of the noise, plus a random number from 0 to 1."""
  runtime = jnp.where(where, labels + noise.origin, 1.0)
  level = jnp.log(runtime) / jnp.log1p(noise.relative)
  if not key.ndim:
    return level + jax.random.uniform(jax.random.fold_in(key, 1), level.shape)
  row = lambda key: jax.random.uniform(jax.random.fold_in(key, 1), level.shape[1:])
  return level + jax.vmap(row)(key)
