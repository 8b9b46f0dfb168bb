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
import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp

from tpugraphs_jax.losses import formulas
from tpugraphs_jax.losses.formulas import (
    LossSum, Noise, across_graphs, clip_norm, cost_logistic, dcg_hinge, diff_mat,
    inverse_log_hinge, listmle, log_mse, mape, mse, pairwise_hinge, pairwise_logistic)
from tpugraphs_jax.registry import Registry

WeightedLosses = Sequence[tuple[str, float]]
OWN_REDUCTION = "own"
REDUCTIONS = (OWN_REDUCTION, *formulas.REDUCTIONS)

# Official names first. `Rank*` are the tile task's losses of the MLSys 2021 paper,
# `SumHingeLoss` is that of Graph Segment Training, `DiffMatLoss` that of the 2nd place,
# `InverseLogHingeLoss` that of the 3rd; `Cross*` compare configurations of all graphs, and
# `CostLogisticLoss` takes scores for costs.
LOSSES = Registry("loss.losses")
for _name, _loss in {
    "ListMLELoss": listmle,
    "PairwiseHingeLoss": pairwise_hinge,
    "PairwiseLogisticLoss": pairwise_logistic,
    "MSE": mse,
    "RankHingeLoss": functools.partial(pairwise_hinge, reduction="pairs"),
    "RankLogisticLoss": functools.partial(pairwise_logistic, reduction="pairs"),
    "SumHingeLoss": functools.partial(pairwise_hinge, margin=0.1, reduction="sum"),
    "DiffMatLoss": diff_mat,
    "CrossHingeLoss": across_graphs(pairwise_hinge),
    "CrossLogisticLoss": across_graphs(pairwise_logistic),
    "CostLogisticLoss": cost_logistic,
    "DCGHingeLoss": dcg_hinge,
    "InverseLogHingeLoss": inverse_log_hinge,
    "LogMSE": log_mse,
    "MAPE": mape,
}.items():
  LOSSES.register(_name)(_loss)
# They take the logarithm of a label or divide by it.
NEED_POSITIVE_LABELS = ("DCGHingeLoss", "LogMSE", "MAPE")


_OF_RUNTIMES, _OF_LOGARITHMS = {"MSE", "MAPE"}, {"LogMSE"}


def predicts(losses: WeightedLosses) -> str:
  """Meaning of a score trained with these losses: `runtime`, its `log`, or `order` alone.

  Ranking and regression losses together give `order` (official tile models), except with
  `DiffMatLoss`, whose scores are in the unit of the target.
  """
  names = {name for name, _ in losses}
  if names <= _OF_LOGARITHMS:
    return "log"
  is_runtime = names & _OF_RUNTIMES and names <= _OF_RUNTIMES | {"DiffMatLoss"}
  return "runtime" if is_runtime else "order"


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a run, each for all losses that have such an option.

  Attributes:
    reduction: what a list's sum over pairs is divided by, see `formulas`; `own` = what
      the loss of that name does.
    margin: of hinges; 0 = the loss's own.
    score_norm_clip: largest L2 norm of a list's scores, which are scaled down to it
      first; 0 = no limit.
    noise: which items are too close to have an order.
  """

  reduction: str = OWN_REDUCTION
  margin: float = 0.0
  score_norm_clip: float = 0.0
  noise: Noise = Noise()

  def __post_init__(self):
    if self.reduction not in REDUCTIONS:
      raise ValueError(f"loss.pair_reduction is {self.reduction!r}, expected one of "
                       f"{', '.join(REDUCTIONS)}")
    for field, value in (("margin", self.margin), ("score_norm_clip", self.score_norm_clip),
                         ("noise", self.noise.relative)):
      if not 0 <= value < math.inf:
        raise ValueError(f"loss.{field} is {value}, expected a number from 0 on")

  def of(self, loss: Any, **more: Any) -> dict[str, Any]:
    """The keyword arguments, out of these options and `more`, that `loss` accepts."""
    given = more | {"noise": self.noise}
    given |= {"margin": self.margin} if self.margin else {}
    given |= {"reduction": self.reduction} if self.reduction != OWN_REDUCTION else {}
    # Losses of several graphs hand options on to the loss of one.
    inner = inspect.signature(getattr(loss, "of_one_list", loss)).parameters
    known = {*inspect.signature(loss).parameters, *inner}
    return {name: value for name, value in given.items() if name in known}


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
    options: Options = Options(),
    axis: str | None = None,
) -> LossSum:
  """Totals and counts, both `[len(losses)]` float32, of each loss in `losses`.

  Args:
    losses: from `parse_losses`.
    scores: `[graphs, configs]`.
    labels: `[graphs, configs]`.
    where: `[graphs, configs]` bool.
    temperature: of ListMLE: the official pairwise losses and MSE take the raw scores
      whatever their temperature.
    key: of random order among ties, see `listmle`.
    options: of any loss.
    axis: name of the axis of devices, for losses across graphs; None = one device.
  """
  if options.score_norm_clip:
    real = jnp.ones(scores.shape, bool) if where is None else where
    scores = clip_norm(scores, real, options.score_norm_clip)
  pairs = []
  for name, _ in losses:
    loss = LOSSES[name]
    chosen = options.of(loss, temperature=temperature, key=key, axis=axis)
    pairs.append(loss(scores, labels, where=where, **chosen))
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


def _weight(number: str, text: str) -> float:
  try:
    weight = float(number)
  except ValueError:
    weight = math.nan
  if not 0 < weight < math.inf:
    raise ValueError(f"losses: weight {number!r} in {text!r}, expected a number above 0")
  return weight
