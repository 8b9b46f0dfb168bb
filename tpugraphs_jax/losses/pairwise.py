"""Losses that sum over pairs of items of which one is slower.

Items that are closer than `noise` make no pair. Arrays are as for every loss, and
`reduction` is one of `REDUCTIONS`:

  items: the sum over all pairs of all lists, divided by the number of real items
    (TF-Ranking, official baseline).
  pairs: a list's sum over its n (n - 1) / 2 pairs, mean over lists that have pairs
    (MLSys 2021, 2nd and 6th place of the competition).
  sum: a list's sum, mean over lists (Graph Segment Training, 3rd place).
  mean_all: a list's sum over n^2, mean over lists (1st and 5th place).
  mean_valid: a list's sum over its pairs with an order, mean over lists that have any.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
import rax

from tpugraphs_jax.losses.slates import LossSum, Noise, checked, clearly_slower, count

REDUCTIONS = ("items", "pairs", "sum", "mean_all", "mean_valid")


def pairwise_hinge(
    scores: jax.Array,
    labels: jax.Array,
    *,
    where: jax.Array | None = None,
    margin: float = 1.0,
    reduction: str = "items",
    noise: Noise = Noise(),
) -> LossSum:
  """Hinge over ordered pairs: sum of relu(margin - (s_i - s_j)) where y_i > y_j.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars.

  Args:
    margin: > 0; 1 officially, 0.1 in Graph Segment Training (arXiv 2305.12322).
    reduction: what a list's sum is divided by.
    noise: pairs that are closer have no order.
  """
  scores, labels, where = checked(scores, labels, where)
  pairs = _hinge_pairs(scores, labels, where, _checked_margin(margin), noise)
  return _reduce(margin * pairs, labels, where, reduction, noise)


def diff_mat(
    scores: jax.Array,
    labels: jax.Array,
    *,
    where: jax.Array | None = None,
    margin: float = 0.005,
    reduction: str = "pairs",
    noise: Noise = Noise(),
) -> LossSum:
  """Hinge counted in margins, relu(1 - (s_i - s_j) / margin), for scores in the target's unit.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars.
  Beside `mape` the scores are runtimes, and their differences must exceed the margin.
  Source: DiffMat of the 2nd place, whose rule of thumb is the mean runtime / 200.

  Args:
    margin: > 0, in the unit of the labels.
    reduction: what a list's sum is divided by.
    noise: pairs that are closer have no order.
  """
  scores, labels, where = checked(scores, labels, where)
  pairs = _hinge_pairs(scores, labels, where, _checked_margin(margin), noise)
  return _reduce(pairs, labels, where, reduction, noise)


def pairwise_logistic(
    scores: jax.Array,
    labels: jax.Array,
    *,
    where: jax.Array | None = None,
    reduction: str = "items",
    noise: Noise = Noise(),
) -> LossSum:
  """Logistic over ordered pairs: sum of log(1 + exp(s_j - s_i)) where y_i > y_j.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars.

  Args:
    reduction: what a list's sum is divided by; the 6th place takes `pairs`.
    noise: pairs that are closer have no order.
  """
  scores, labels, where = checked(scores, labels, where)
  pairs = rax.pairwise_logistic_loss(
      scores, labels, where=where, lambdaweight_fn=_weights(noise), reduce_fn=None)
  return _reduce(pairs, labels, where, reduction, noise)


def dcg_hinge(
    scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None,
    noise: Noise = Noise(),
) -> LossSum:
  """Pairwise hinge where a pair weighs what swapping it changes in the list's DCG.

  The gain of a configuration is fastest label / its label and its discount
  1 / log2(1 + its rank by score), so that mistakes among the fast ones and near
  the top count most. Reduced like the official hinge.

  Args:
    labels: `[graphs, configs]`, must be positive where real.
    noise: pairs that are closer have no order.
  """
  scores, labels, where = checked(scores, labels, where)
  positive = jnp.where(where, labels, jnp.inf)
  fastest = jnp.min(positive, axis=-1, keepdims=True)
  gain = jnp.where(where, fastest / positive, 0.0)
  pairs = rax.pairwise_hinge_loss(
      -scores,
      gain,
      where=where,
      lambdaweight_fn=functools.partial(rax.dcg_lambdaweight, gain_fn=lambda g: g),
      reduce_fn=None,
  )
  if noise.relative:  # of a pair (i, j) here i is the faster one
    clear = jnp.swapaxes(clearly_slower(labels, noise), 1, 2)
    pairs = pairs * clear.reshape(pairs.shape)
  # rax multiplies by the padded list size, which would let padding change the loss.
  return _reduce(pairs / scores.shape[-1], labels, where, "items", noise)


def inverse_log_hinge(
    scores: jax.Array,
    labels: jax.Array,
    *,
    where: jax.Array | None = None,
    margin: float = 1.0,
    noise: Noise = Noise(),
) -> LossSum:
  """-1 / log(2 + h), h the sum of the hinges of a list's pairs; mean over lists.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars. The
  gradient fades in lists with many mistakes. Source: "DCG hinge" of the 3rd place's
  tile model.

  Args:
    margin: > 0, of the hinges.
    noise: pairs that are closer have no order.
  """
  scores, labels, where = checked(scores, labels, where)
  pairs = _hinge_pairs(scores, labels, where, _checked_margin(margin), noise)
  total, is_real = margin * jnp.sum(pairs, axis=-1), jnp.any(where, axis=-1)
  return jnp.sum(-1.0 / jnp.log(2.0 + total), where=is_real), count(is_real)


def across_graphs(loss: Callable[..., LossSum]) -> Callable[..., LossSum]:
  """The loss over all configurations of a step as one list, whatever graph they are of.

  Labels must mean the same in every graph. Source: half of the 5th place's loss.

  Args:
    loss: one of this module, with `mean_all` unless told otherwise.

  Returns:
    The same with the option `axis`, the name of the axis of devices; None = one device.
  """
  def cross(scores, labels, *, where=None, axis=None, reduction="mean_all", noise=Noise(),
            **options):
    scores, labels, where = checked(scores, labels, where)
    shares = 1
    if axis is not None:
      scores, labels, where = (
          jax.lax.all_gather(array, axis, tiled=True) for array in (scores, labels, where))
      shares = jax.lax.psum(1, axis)
    total, lists = loss(
        scores.reshape(1, -1), labels.reshape(1, -1), where=where.reshape(1, -1),
        reduction=reduction, noise=noise, **options)
    # Every device has all of it; sums over devices have it once.
    return total / shares, lists / shares

  cross.of_one_list = loss
  return cross


def _checked_margin(margin: float) -> float:
  if not margin > 0:
    raise ValueError(f"margin is {margin}, expected a number above 0")
  return margin


def _hinge_pairs(scores, labels, where, margin, noise):
  """relu(1 - (s_i - s_j) / margin) of every ordered pair, `[graphs, configs**2]`."""
  return rax.pairwise_hinge_loss(
      scores / margin, labels, where=where, lambdaweight_fn=_weights(noise), reduce_fn=None)


def _weights(noise: Noise):
  """What rax multiplies pairs with: 0 for those that are closer than the noise."""
  if not noise.relative:
    return None

  def weigh(scores, labels, **unused):
    return clearly_slower(labels, noise).reshape(len(scores), -1).astype(scores.dtype)

  return weigh


def _reduce(pairs, labels, where, reduction, noise):
  """Total and count of pair losses `[graphs, configs**2]`, see the module."""
  per_list = jnp.sum(pairs, axis=-1)
  items = jnp.sum(where, axis=-1, dtype=jnp.float32)
  if reduction == "items":
    return jnp.sum(per_list), jnp.sum(items)
  if reduction == "sum":
    return jnp.sum(per_list), count(items > 0)
  if reduction == "mean_all":
    return jnp.sum(per_list / jnp.maximum(items**2, 1.0)), count(items > 0)
  if reduction == "pairs":
    number = items * (items - 1.0) / 2.0
  elif reduction == "mean_valid":
    is_pair = clearly_slower(labels, noise) & where[:, :, None] & where[:, None, :]
    number = jnp.sum(is_pair, axis=(1, 2), dtype=jnp.float32)
  else:
    raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
  return jnp.sum(per_list / jnp.maximum(number, 1.0)), count(number > 0)
