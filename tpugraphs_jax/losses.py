"""Ranking and regression losses on slates: one row of scores per graph.

Larger labels mean slower, and a good model gives them larger scores. Every loss
returns `(total, count)`, two float32 scalars whose quotient is the loss. Both add
up over any split of the graphs, so a step on several devices sums each of them
over the devices before dividing and gets what one device would have got.

Arrays of every function:
  scores: [graphs, configs], floating; computed in float32.
  labels: [graphs, configs], floating, normalised on the host.
  where: [graphs, configs] bool, True = real; None = everything is real. What
    stands in masked slots, even NaN, has no influence on values or gradients.
Any other shape or dtype is a ValueError.

>>> losses = parse_losses("ListMLELoss:1,MSE:0.25")
>>> losses
(('ListMLELoss', 0.8), ('MSE', 0.2))
>>> scores = labels = jnp.array([[1.0, 2.0]])
>>> totals, counts = loss_sums(losses, scores, labels)
>>> print(f"{combine(losses, totals, counts):.4f}")  # 0.8 * log(1 + exp(-1))
0.2506
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import math

import jax
import jax.numpy as jnp
import rax

from tpugraphs_jax.registry import Registry

LossSum = tuple[jax.Array, jax.Array]
WeightedLosses = Sequence[tuple[str, float]]


def listmle(
    scores: jax.Array,
    labels: jax.Array,
    *,
    where: jax.Array | None = None,
    temperature: float = 1.0,
    key: jax.Array | None = None,
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
  """
  if not temperature > 0:
    raise ValueError(f"temperature is {temperature}, expected a number above 0")
  scores, labels, where = _checked(scores, labels, where)
  per_list_loss = functools.partial(rax.listmle_loss, reduce_fn=None)
  if key is None:
    per_list = per_list_loss(scores / temperature, labels, where=where)
  else:
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
      key = jax.random.wrap_key_data(key)
    if key.ndim:
      per_list_loss = jax.vmap(per_list_loss)
    per_list = per_list_loss(scores / temperature, labels, where=where, key=key)
  return jnp.sum(per_list), _count(jnp.any(where, axis=-1))


def pairwise_hinge(
    scores: jax.Array,
    labels: jax.Array,
    *,
    where: jax.Array | None = None,
    margin: float = 1.0,
    reduction: str = "items",
) -> LossSum:
  """Hinge over ordered pairs: sum of relu(margin - (s_i - s_j)) where y_i > y_j.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars.

  Args:
    margin: > 0; 1 officially, 0.1 in Graph Segment Training (arXiv 2305.12322).
    reduction: what a list's sum is divided by, see `_reduce_pairs`.
  """
  if not margin > 0:
    raise ValueError(f"margin is {margin}, expected a number above 0")
  scores, labels, where = _checked(scores, labels, where)
  pairs = rax.pairwise_hinge_loss(scores / margin, labels, where=where, reduce_fn=None)
  return _reduce_pairs(margin * pairs, where, reduction)


def pairwise_logistic(
    scores: jax.Array,
    labels: jax.Array,
    *,
    where: jax.Array | None = None,
    reduction: str = "items",
) -> LossSum:
  """Logistic over ordered pairs: sum of log(1 + exp(s_j - s_i)) where y_i > y_j.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars.

  Args:
    reduction: what a list's sum is divided by, see `_reduce_pairs`.
  """
  scores, labels, where = _checked(scores, labels, where)
  pairs = rax.pairwise_logistic_loss(scores, labels, where=where, reduce_fn=None)
  return _reduce_pairs(pairs, where, reduction)


def dcg_hinge(scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None) -> LossSum:
  """Pairwise hinge where a pair weighs what swapping it changes in the list's DCG.

  The gain of a configuration is fastest label / its label and its discount
  1 / log2(1 + its rank by score), so that mistakes among the fast ones and near
  the top count most. Reduced like the official hinge.

  Args:
    labels: `[graphs, configs]`, must be positive where real.
  """
  scores, labels, where = _checked(scores, labels, where)
  labels = jnp.where(where, labels, jnp.inf)
  fastest = jnp.min(labels, axis=-1, keepdims=True)
  gain = jnp.where(where, fastest / labels, 0.0)
  pairs = rax.pairwise_hinge_loss(
      -scores,
      gain,
      where=where,
      lambdaweight_fn=functools.partial(rax.dcg_lambdaweight, gain_fn=lambda g: g),
      reduce_fn=None,
  )
  # rax multiplies by the padded list size, which would let padding change the loss.
  return _reduce_pairs(pairs / scores.shape[-1], where, "items")


def mse(scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None) -> LossSum:
  """Mean over real items of (s - y)^2; arrays are `[graphs, configs]`."""
  scores, labels, where = _checked(scores, labels, where)
  total = rax.pointwise_mse_loss(scores, labels, where=where, reduce_fn=jnp.sum)
  return total, _count(where)


def log_mse(scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None) -> LossSum:
  """Mean over real items of (s - log y)^2: the score is an absolute log runtime.

  The fusion task's loss of Kaufman et al., "A Learned Performance Model for Tensor
  Processing Units" (MLSys 2021).

  Args:
    labels: `[graphs, configs]`, must be positive where real.
  """
  scores, labels, where = _checked(scores, labels, where)
  return mse(scores, jnp.log(jnp.where(where, labels, 1.0)), where=where)


# Official names first. `Rank*` are the tile task's losses of the MLSys 2021 paper,
# `SumHingeLoss` is that of Graph Segment Training.
LOSSES = Registry("loss.losses")
for _name, _loss in {
    "ListMLELoss": listmle,
    "PairwiseHingeLoss": pairwise_hinge,
    "PairwiseLogisticLoss": pairwise_logistic,
    "MSE": mse,
    "RankHingeLoss": functools.partial(pairwise_hinge, reduction="pairs"),
    "RankLogisticLoss": functools.partial(pairwise_logistic, reduction="pairs"),
    "SumHingeLoss": functools.partial(pairwise_hinge, margin=0.1, reduction="lists"),
    "DCGHingeLoss": dcg_hinge,
    "LogMSE": log_mse,
}.items():
  LOSSES.register(_name)(_loss)


def parse_losses(text: str) -> tuple[tuple[str, float], ...]:
  """Reads `name:weight,name:weight`; the weights returned sum to 1.

  Raises:
    ValueError: an unknown or repeated name, or a weight that is not above 0.
  """
  weights: dict[str, float] = {}
  for part in text.split(","):
    name, colon, number = (piece.strip() for piece in part.partition(":"))
    if not colon:
      raise ValueError(f"losses: {part!r} in {text!r}, expected NAME:WEIGHT")
    if name not in LOSSES:
      raise ValueError(
          f"losses: unknown loss {name!r} in {text!r}, expected one of " + ", ".join(LOSSES)
      )
    if name in weights:
      raise ValueError(f"losses: {name} stands twice in {text!r}, add the weights up")
    weights[name] = _weight(number, text)
  total = sum(weights.values())
  return tuple((name, weight / total) for name, weight in weights.items())


def loss_sums(
    losses: WeightedLosses,
    scores: jax.Array,
    labels: jax.Array,
    *,
    where: jax.Array | None = None,
    temperature: float = 1.0,
    key: jax.Array | None = None,
) -> LossSum:
  """Totals and counts, both `[len(losses)]` float32, of each loss in `losses`.

  `temperature` and `key` concern ListMLE only: the official pairwise losses and
  MSE take the raw scores whatever their temperature.
  """
  options = {"ListMLELoss": {"temperature": temperature, "key": key}}
  pairs = [LOSSES[name](scores, labels, where=where, **options.get(name, {})) for name, _ in losses]
  totals, counts = zip(*pairs)
  return jnp.stack(totals), jnp.stack(counts)


def combine(losses: WeightedLosses, totals: jax.Array, counts: jax.Array) -> jax.Array:
  """The weighted loss, a float32 scalar: sum of weight * total / count, each `[len(losses)]`.

  With several devices, give the local totals and the counts summed over all
  devices: the results, and their gradients, then add up to those of the whole
  batch. A loss without any item to count is 0.
  """
  weights = jnp.array([weight for _, weight in losses], jnp.float32)
  return jnp.sum(weights * totals / jnp.maximum(counts, 1.0))


def _checked(scores, labels, where):
  """Float32 scores and labels, zero where masked, and the mask itself."""
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


def _reduce_pairs(pairs, where, reduction):
  """Total and count of pair losses `[graphs, configs**2]`.

  `items`: all pairs' sum over the number of real items (official, TF-Ranking).
  `pairs`: a list's sum over its n (n - 1) / 2 pairs, mean over lists that have
    pairs (MLSys 2021).
  `lists`: a list's sum, mean over lists (Graph Segment Training).
  """
  per_list = jnp.sum(pairs, axis=-1)
  items = jnp.sum(where, axis=-1, dtype=jnp.float32)
  if reduction == "items":
    return jnp.sum(per_list), jnp.sum(items)
  if reduction == "pairs":
    pairs_per_list = items * (items - 1.0) / 2.0
    mean = per_list / jnp.maximum(pairs_per_list, 1.0)
    return jnp.sum(mean), _count(pairs_per_list > 0)
  if reduction == "lists":
    return jnp.sum(per_list), _count(items > 0)
  raise ValueError(f"reduction is {reduction!r}, expected items, pairs or lists")


def _count(mask):
  return jnp.sum(mask, dtype=jnp.float32)


def _weight(number: str, text: str) -> float:
  try:
    weight = float(number)
  except ValueError:
    weight = math.nan
  if not 0 < weight < math.inf:
    raise ValueError(f"losses: weight {number!r} in {text!r}, expected a number above 0")
  return weight
