"""What all losses share: checked arrays, counts, and which labels are too close to order."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LossSum = tuple[jax.Array, jax.Array]


class Noise(NamedTuple):
  """How far apart runtimes must be to have an order.

  Attributes:
    relative: runs whose runtimes differ by less than this share of the faster one are
      ties; 0 = equal labels alone are.
    origin: a label plus this is proportional to its runtime: 0 for labels that are
      runtimes, 1 for runtimes above the fastest, relative to it.
  """

  relative: float = 0.0
  origin: float = 0.0


def checked(
    scores: jax.Array, labels: jax.Array, where: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Float32 scores and labels, zero where masked, and the mask itself, `[graphs, configs]`.

  Raises:
    ValueError: other shapes or dtypes.
  """
  if where is None:
    where = jnp.ones(scores.shape, bool)
  if scores.ndim != 2 or not scores.shape == labels.shape == where.shape:
    raise ValueError(
        f"scores {scores.shape}, labels {labels.shape} and where {where.shape} "
        "must have one shape [graphs, configs]"
    )
  for name, array in (("scores", scores), ("labels", labels)):
    # An int64 runtime would silently wrap on its way to a 32-bit device.
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} are {array.dtype}, expected a floating dtype")
  if where.dtype != bool:
    raise ValueError(f"where is {where.dtype}, expected bool (True = real)")
  where = jnp.asarray(where)
  scores = jnp.where(where, jnp.asarray(scores, jnp.float32), 0.0)
  labels = jnp.where(where, jnp.asarray(labels, jnp.float32), 0.0)
  return scores, labels, where


def count(mask: jax.Array) -> jax.Array:
  """How many of `[...]` are True, a float32 scalar."""
  return jnp.sum(mask, dtype=jnp.float32)


def clearly_slower(labels: jax.Array, noise: Noise) -> jax.Array:
  """Whether item i is slower than item j beyond the noise, `[graphs, configs (i), configs (j)]`.

  Args:
    labels: `[graphs, configs]`.
    noise: what is too close.
  """
  slower, faster = labels[:, :, None], labels[:, None, :]
  beyond = slower - faster >= noise.relative * (faster + noise.origin)
  return (slower > faster) & beyond


def clip_norm(scores: jax.Array, where: jax.Array, largest: float) -> jax.Array:
  """Scores `[graphs, configs]`, of each list scaled down to an L2 norm of at most `largest`.

  Masked scores do not count. Source: 2nd place of the competition, with 500.
  """
  scores = jnp.where(where, jnp.asarray(scores, jnp.float32), 0.0)
  square = jnp.sum(jnp.square(scores), axis=-1, keepdims=True)
  return scores * (largest / jnp.sqrt(jnp.maximum(square, largest**2)))
