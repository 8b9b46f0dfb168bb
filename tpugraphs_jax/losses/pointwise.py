"""Losses of single items: the score is a prediction of the label or of its logarithm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import rax

from tpugraphs_jax.losses.slates import LossSum, checked, count


def mse(scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None) -> LossSum:
  """Mean over real items of (s - y)^2; arrays are `[graphs, configs]`."""
  scores, labels, where = checked(scores, labels, where)
  total = rax.pointwise_mse_loss(scores, labels, where=where, reduce_fn=jnp.sum)
  return total, count(where)


def log_mse(scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None) -> LossSum:
  """Mean over real items of (s - log y)^2: the score is an absolute log runtime.

  The fusion task's loss of Kaufman et al., "A Learned Performance Model for Tensor
  Processing Units" (MLSys 2021).

  Args:
    labels: `[graphs, configs]`, must be positive where real.
  """
  scores, labels, where = checked(scores, labels, where)
  return mse(scores, jnp.log(jnp.where(where, labels, 1.0)), where=where)


def mape(scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None) -> LossSum:
  """Mean over real items of |s - y| / y: the score is an absolute runtime.

  The 2nd place of the competition adds it to its pairwise loss with weight 1.

  Args:
    labels: `[graphs, configs]`, must be positive where real.
  """
  scores, labels, where = checked(scores, labels, where)
  share = jnp.abs(scores - labels) / jnp.where(where, labels, 1.0)
  return jnp.sum(share, where=where), count(where)
