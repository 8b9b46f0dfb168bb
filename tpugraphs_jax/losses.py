"""Ranking and regression losses on slates: one row of scores per graph.

Larger labels mean slower, and a good model gives them larger scores. Every loss returns
`(total, count)`, two float32 scalars whose quotient is the loss. Totals and counts of several
devices can be added: their quotient is the loss of one device with all graphs.

Arrays of every function:
  scores: [graphs, configs], floating; computed in float32.
  labels: [graphs, configs], floating, normalised on the host.
  where: [graphs, configs] bool, True = real; None = all are real. Masked entries, even NaN, change
    neither values nor gradients.
Other shapes and dtypes raise ValueError.

A pairwise loss is a sum over pairs of items with different labels. Its `reduction` is one of
`PAIR_REDUCTIONS`:
  items: the sum over all pairs of all lists, divided by the number of real items
    (TF-Ranking, official baseline).
  pairs: per list the sum / (n (n - 1) / 2), mean over lists that have pairs
    (MLSys 2021, 6th place of the competition).
  sum: per list the sum, mean over lists (Graph Segment Training, 3rd place).
  mean_all: per list the sum / n^2, mean over lists (1st and 5th place).
  mean_valid: per list the mean over its ordered pairs, mean over lists that have any.

>>> losses = parse_losses("ListMLELoss:1,MSE:0.25")
>>> losses
(('ListMLELoss', 0.8), ('MSE', 0.2))
>>> scores = labels = jnp.array([[1.0, 2.0]])
>>> totals, counts = loss_sums(losses, scores, labels)
>>> print(f"{combine(losses, totals, counts):.4f}")  # 0.8 * log(1 + exp(-1))
0.2506
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import rax

from tpugraphs_jax.config_fields import option, Options, Registry

PAIR_REDUCTIONS = ("items", "pairs", "sum", "mean_all", "mean_valid")
LossSum = tuple[jax.Array, jax.Array]


def _clip_scores(scores: jax.Array, where: jax.Array, largest: float) -> jax.Array:
  """Scales each list of scores `[graphs, configs]` down to an L2 norm of at most `largest`.

  Masked scores become 0. Source: 2nd place of the competition, with 500.
  """
  scores = jnp.where(where, jnp.asarray(scores, jnp.float32), 0.0)
  square = jnp.sum(jnp.square(scores), axis=-1, keepdims=True)
  return scores * (largest / jnp.sqrt(jnp.maximum(square, largest**2)))


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
    key: `[graphs]` keys, one per list, of the random order of tied labels; it does not depend on
      the number of devices. None keeps tied items in the order given.
  """
  if not temperature > 0:
    raise ValueError(f"temperature is {temperature}, expected a number above 0")
  scores, labels, where = _checked(scores, labels, where)
  draws = jnp.zeros_like(labels)
  if key is not None:
    draws = jax.vmap(lambda key: jax.random.uniform(key, labels.shape[1:]))(key)
  scores = scores / temperature
  rest = _not_before(labels, draws) & where[:, None, :]
  # Each item has a sum over the rest of its list. A running sum over the sorted list is less work,
  # but a sequential loop on accelerators.
  of_rest = jnp.broadcast_to(scores[:, None, :], rest.shape)
  likelihood = scores - jax.nn.logsumexp(of_rest, axis=-1, where=rest)
  return -jnp.sum(likelihood, where=where), _count(jnp.any(where, axis=-1))


def _not_before(labels: jax.Array, draws: jax.Array) -> jax.Array:
  """Whether item j does not come before item i in a list, `[graphs, configs (i), configs (j)]`.

  Larger labels come first, then smaller draws, then the order given. An item does not come before
  itself.

  Args:
    labels: `[graphs, configs]`.
    draws: `[graphs, configs]`: the order of equal labels.
  """
  places = jnp.arange(labels.shape[1])[None]
  result = places[:, :, None] <= places[:, None, :]
  for key in (draws, -labels):  # the more important key last
    first, second = key[:, :, None], key[:, None, :]
    result = jnp.where(first == second, result, first < second)
  return result


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
    reduction: see the module.
  """
  scores, labels, where = _checked(scores, labels, where)
  pairs = _hinge_pairs(scores, labels, where, _checked_margin(margin))
  return _reduce(margin * pairs, labels, where, reduction)


def diff_mat(
  scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None, margin: float = 0.005
) -> LossSum:
  """Mean over pairs of relu(1 - sign(y_i - y_j) (s_i - s_j) / margin), for scores in units of y.

  Arrays are `[graphs, configs]`; the result is a total and a count of graphs with a pair, both
  scalars. Used with `mape`, where scores are runtimes. Pairs of equal labels add 1 and have no
  gradient. Source: DiffMat of the 2nd place; its rule of thumb for the margin is the mean
  runtime / 200.

  Args:
    margin: > 0, in the unit of the labels.
  """
  scores, labels, where = _checked(scores, labels, where)
  _checked_margin(margin)
  difference = lambda x: x[:, :, None] - x[:, None]
  is_pair = where[:, :, None] & where[:, None] & ~jnp.eye(scores.shape[1], dtype=bool)[None]
  hinge = jax.nn.relu(1 - jnp.sign(difference(labels)) * difference(scores) / margin)
  total, pairs = (jnp.sum(x, axis=(1, 2)) for x in (jnp.where(is_pair, hinge, 0), is_pair))
  return jnp.sum(total / jnp.maximum(pairs, 1)), _count(pairs > 0)


def pairwise_logistic(
  scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None, reduction: str = "items"
) -> LossSum:
  """Logistic over ordered pairs: sum of log(1 + exp(s_j - s_i)) where y_i > y_j.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars.

  Args:
    reduction: see the module.
  """
  scores, labels, where = _checked(scores, labels, where)
  pairs = rax.pairwise_logistic_loss(scores, labels, where=where, reduce_fn=None)
  return _reduce(pairs, labels, where, reduction)


def ordered_logistic(
  scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None
) -> LossSum:
  """`pairwise_logistic` with the reduction `pairs`, in which the first of equal labels is slower.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars.

  Source: 6th place of the competition, whose public code takes the cross entropy of `s_j - s_i`
  with `y_j > y_i` over all pairs `i < j`.
  """
  scores, labels, where = _checked(scores, labels, where)
  places = jnp.sum(_not_before(labels, jnp.zeros_like(labels)), axis=-1, dtype=jnp.float32)
  return pairwise_logistic(scores, places, where=where, reduction="pairs")


def cost_logistic(
  scores: jax.Array,
  labels: jax.Array,
  *,
  where: jax.Array | None = None,
  reduction: str = "mean_valid",
) -> LossSum:
  """`pairwise_logistic` of 2 log(1 + s / 0.01), for scores s that are relative costs.

  A score `[graphs, configs]`, at least 0, is the extra cost of a configuration over a reference
  configuration, relative to the whole program. The logarithm gives costs of 1 % and of many times
  the whole program gradients of similar size.
  """
  scores, labels, where = _checked(scores, labels, where)
  logarithm = 2 * jnp.log1p(jnp.maximum(scores, 0) / 0.01)
  return pairwise_logistic(logarithm, labels, where=where, reduction=reduction)


def inverse_log_hinge(
  scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None, margin: float = 1.0
) -> LossSum:
  """Mean over lists of -1 / log(2 + h), h the sum of hinges over the pairs of a list.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars. The
  gradient is small in lists with many mistakes. Source: "DCG hinge" of the 3rd place's
  tile model.

  Args:
    margin: > 0, of the hinges.
  """
  scores, labels, where = _checked(scores, labels, where)
  pairs = _hinge_pairs(scores, labels, where, _checked_margin(margin))
  total, is_real = margin * jnp.sum(pairs, axis=-1), jnp.any(where, axis=-1)
  return jnp.sum(-1.0 / jnp.log(2.0 + total), where=is_real), _count(is_real)


def cross_hinge(
  scores: jax.Array,
  labels: jax.Array,
  *,
  where: jax.Array | None = None,
  margin: float = 1.0,
  reduction: str = "mean_all",
  axis: str | None = None,
) -> LossSum:
  """`pairwise_hinge` over the configurations of all graphs of a step as one list.

  Arrays are `[graphs, configs]`; the result is a total and a count, both scalars. Labels of
  different graphs must be comparable. Source: half of the 5th place's loss.

  Args:
    margin: > 0, of the hinges.
    reduction: see the module.
    axis: name of the axis of devices; None = one device.
  """
  scores, labels, where = _checked(scores, labels, where)
  shares = 1
  if axis is not None:
    gather = lambda array: jax.lax.all_gather(array, axis, tiled=True)
    scores, labels, where = map(gather, (scores, labels, where))
    shares = jax.lax.psum(1, axis)
  scores, labels, where = (array.reshape(1, -1) for array in (scores, labels, where))
  total, lists = pairwise_hinge(scores, labels, where=where, margin=margin, reduction=reduction)
  # Every device has the whole list, and the sum over devices must count it once.
  return total / shares, lists / shares


def _checked_margin(margin: float) -> float:
  if not margin > 0:
    raise ValueError(f"margin is {margin}, expected a number above 0")
  return margin


def _hinge_pairs(scores, labels, where, margin):
  """relu(1 - (s_i - s_j) / margin) of every ordered pair, `[graphs, configs**2]`."""
  return rax.pairwise_hinge_loss(scores / margin, labels, where=where, reduce_fn=None)


def _reduce(pairs, labels, where, reduction):
  """Total and count of pair losses `[graphs, configs**2]`, see the module."""
  per_list = jnp.sum(pairs, axis=-1)
  items = jnp.sum(where, axis=-1, dtype=jnp.float32)
  if reduction == "items":
    return jnp.sum(per_list), jnp.sum(items)
  if reduction == "sum":
    return jnp.sum(per_list), _count(items > 0)
  if reduction == "mean_all":
    return jnp.sum(per_list / jnp.maximum(items**2, 1.0)), _count(items > 0)
  if reduction == "pairs":
    number = items * (items - 1.0) / 2.0
  elif reduction == "mean_valid":
    is_slower = labels[:, :, None] > labels[:, None, :]
    is_pair = is_slower & where[:, :, None] & where[:, None, :]
    number = jnp.sum(is_pair, axis=(1, 2), dtype=jnp.float32)
  else:
    raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(PAIR_REDUCTIONS)}")
  return jnp.sum(per_list / jnp.maximum(number, 1.0)), _count(number > 0)


def mse(scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None) -> LossSum:
  """Mean over real items of (s - y)^2; arrays are `[graphs, configs]`."""
  scores, labels, where = _checked(scores, labels, where)
  total = rax.pointwise_mse_loss(scores, labels, where=where, reduce_fn=jnp.sum)
  return total, _count(where)


def log_mse(scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None) -> LossSum:
  """Mean over real items of (s - log y)^2: the score predicts the logarithm of a runtime.

  The fusion task's loss of Kaufman et al., "A Learned Performance Model for Tensor
  Processing Units" (MLSys 2021).

  Args:
    labels: `[graphs, configs]`, must be positive where real.
  """
  scores, labels, where = _checked(scores, labels, where)
  return mse(scores, jnp.log(jnp.where(where, labels, 1.0)), where=where)


def mape(scores: jax.Array, labels: jax.Array, *, where: jax.Array | None = None) -> LossSum:
  """Mean over real items of |s - y| / y: the score predicts a runtime.

  The 2nd place of the competition adds it to its pairwise loss with weight 1.

  Args:
    labels: `[graphs, configs]`, must be positive where real.
  """
  scores, labels, where = _checked(scores, labels, where)
  share = jnp.abs(scores - labels) / jnp.where(where, labels, 1.0)
  return jnp.sum(share, where=where), _count(where)


def time_logistic(
  scores: jax.Array,
  labels: jax.Array,
  *,
  where: jax.Array | None = None,
  reduction: str = "mean_valid",
) -> LossSum:
  """`pairwise_logistic` of 50 log s, for scores s that are run times `[graphs, configs]`.

  Times that are 2 % apart differ by 1.
  """
  scores, labels, where = _checked(scores, labels, where)
  logarithm = 50 * jnp.log(jnp.where(where, jnp.maximum(scores, 1e-12), 1.0))
  return pairwise_logistic(logarithm, labels, where=where, reduction=reduction)


def kernel_error(times: jax.Array, labels: jax.Array) -> LossSum:
  """Mean of |log(s / y)| over the kernels of configurations: predicted times s, times y.

  A total and a count, as of a loss. The time of every kernel has the same weight (Kaufman et al.,
  MLSys 2021, whose loss of the fusion task is the square).

  Args:
    times: `[kernels, configs]` predicted times.
    labels: `[kernels, configs]` times; 0 where a configuration has no such kernel.
  """
  is_there = labels > 0
  log = lambda x: jnp.log(jnp.maximum(jnp.where(is_there, x, 1.0), 1e-12))
  return jnp.sum(jnp.abs(log(times) - log(labels)), where=is_there), _count(is_there)


def _checked(
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
    # An int64 runtime would overflow silently on a 32-bit device.
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} are {array.dtype}, expected a floating dtype")
  if where.dtype != bool:
    raise ValueError(f"where is {where.dtype}, expected bool (True = real)")
  where = jnp.asarray(where)
  scores = jnp.where(where, jnp.asarray(scores, jnp.float32), 0.0)
  labels = jnp.where(where, jnp.asarray(labels, jnp.float32), 0.0)
  return scores, labels, where


def _count(mask: jax.Array) -> jax.Array:
  """Number of True in `[...]`, a float32 scalar."""
  return jnp.sum(mask, dtype=jnp.float32)


WeightedLosses = Sequence[tuple[str, float]]
OWN_REDUCTION = "own"
REDUCTIONS = (OWN_REDUCTION, *PAIR_REDUCTIONS)

# Official names first. `DiffMatLoss` is from the 2nd, `InverseLogHingeLoss` from the 3rd and
# `OrderedLogisticLoss` from the 6th place; `CrossHingeLoss` compares configurations of all graphs.
LOSSES = Registry("loss.losses")
for _name, _loss in {
  "ListMLELoss": listmle,
  "PairwiseHingeLoss": pairwise_hinge,
  "PairwiseLogisticLoss": pairwise_logistic,
  "MSE": mse,
  "OrderedLogisticLoss": ordered_logistic,
  "DiffMatLoss": diff_mat,
  "CrossHingeLoss": cross_hinge,
  "CostLogisticLoss": cost_logistic,
  "TimeLogisticLoss": time_logistic,
  "InverseLogHingeLoss": inverse_log_hinge,
  "LogMSE": log_mse,
  "MAPE": mape,
}.items():
  LOSSES.register(_name)(_loss)
NEED_POSITIVE_LABELS = ("LogMSE", "MAPE")  # for a logarithm or a division
_OF_RUNTIMES, _OF_LOGARITHMS = {"MSE", "MAPE"}, {"LogMSE"}
_OF_SCALE = {"DiffMatLoss", "TimeLogisticLoss"}  # ranking losses of scores that are run times


def predicts(losses: WeightedLosses) -> str:
  """Meaning of a score trained with these losses: `runtime`, its `log`, or `order` alone.

  A ranking loss with a regression loss gives `order`, as in the official tile models. `DiffMatLoss`
  and `TimeLogisticLoss` are exceptions: their scores are in the unit of the target.
  """
  names = {name for name, _ in losses}
  if names <= _OF_LOGARITHMS:
    return "log"
  is_runtime = names & _OF_RUNTIMES and names <= _OF_RUNTIMES | _OF_SCALE
  return "runtime" if is_runtime else "order"


def parse_losses(text: str, *, normalize: bool = True) -> tuple[tuple[str, float], ...]:
  """Reads `name:weight,name:weight`.

  Args:
    text: names of losses with their weights.
    normalize: divide the weights by their sum, as the official baseline does.

  Raises:
    ValueError: an unknown or repeated name, or a weight that is not above 0.
  """
  weights: dict[str, float] = {}
  for part in text.split(","):
    name, colon, number = (piece.strip() for piece in part.partition(":"))
    if not colon:
      raise ValueError(
        f"loss.losses is {text!r}, expected NAME:WEIGHT, as in {part.strip() or 'ListMLELoss'}:1"
      )
    if name not in LOSSES:
      raise ValueError(
        f"loss.losses: unknown loss {name!r} in {text!r}, expected one of {', '.join(LOSSES)}"
      )
    if name in weights:
      raise ValueError(f"loss.losses: {name} stands twice in {text!r}, add the weights up")
    weights[name] = _weight(number, text)
  total = sum(weights.values()) if normalize else 1.0
  return tuple((name, weight / total) for name, weight in weights.items())


def _weight(number: str, text: str) -> float:
  try:
    weight = float(number)
  except ValueError:
    weight = math.nan
  if not 0 < weight < math.inf:
    raise ValueError(f"loss.losses: weight {number!r} in {text!r}, expected a number above 0")
  return weight


@dataclasses.dataclass(frozen=True)
class LossOptions(Options):
  """The losses of training. An option applies to every loss that has it."""

  section = "loss"
  losses: str = option("ListMLELoss:1", "NAME:WEIGHT,... of the losses to add")
  normalize_weights: bool = option(True, "divide weights by their sum, as the official code does")
  temperature: float = option(
    1.0, "divisor of scores in ListMLELoss; other losses take the scores as they are", above=0
  )
  kernel_l2: float = option(
    0.0, "factor of the sum of squared Dense kernels; officially 1e-4", least=0
  )
  kernels: float = option(
    0.0, "factor of the error of the times of kernels, where the data has them", least=0
  )
  activity_l2: float = option(
    0.0, "factor of the mean squared length of opcode embeddings; officially 1e-4", least=0
  )
  pair_reduction: str = option(
    OWN_REDUCTION,
    "mean over pairs and lists of pairwise losses; own = the default of each loss",
    one_of=REDUCTIONS,
  )
  margin: float = option(0.0, "margin of hinges; 0 = the default of each loss", least=0)
  score_norm_clip: float = option(
    0.0, "scores of a list are scaled down to this L2 norm; 0 = no limit", least=0
  )

  def check(self) -> None:
    """Refuses (ValueError) unknown or repeated losses, and impossible weights."""
    parse_losses(self.losses)

  @property
  def weighted(self) -> WeightedLosses:
    """Names and weights of the losses."""
    return parse_losses(self.losses, normalize=self.normalize_weights)

  def arguments(self, loss: Callable[..., Any], **more: Any) -> dict[str, Any]:
    """The keyword arguments of `loss` among these options and `more`.

    The argument of `pair_reduction` is `reduction`. Without a value, `margin` and `reduction` are
    the defaults of the loss.
    """
    values = more | dataclasses.asdict(self)
    values["reduction"] = values.pop("pair_reduction")
    unset = {"margin": 0.0, "reduction": OWN_REDUCTION}
    values = {name: value for name, value in values.items() if value != unset.get(name)}
    names = inspect.signature(loss).parameters
    return {name: value for name, value in values.items() if name in names}


def loss_sums(
  losses: WeightedLosses,
  scores: jax.Array,
  labels: jax.Array,
  *,
  where: jax.Array | None = None,
  key: jax.Array | None = None,
  options: LossOptions = LossOptions(),
  axis: str | None = None,
) -> LossSum:
  """Totals and counts, both `[len(losses)]` float32, of each loss in `losses`.

  Args:
    losses: from `parse_losses`.
    scores: `[graphs, configs]`.
    labels: `[graphs, configs]`.
    where: `[graphs, configs]` bool.
    key: `[graphs]` keys of the order of ties, see `listmle`.
    options: for every loss that has them.
    axis: name of the axis of devices, for losses across graphs; None = one device.
  """
  if options.score_norm_clip:
    real = jnp.ones(scores.shape, bool) if where is None else where
    scores = _clip_scores(scores, real, options.score_norm_clip)
  pairs = []
  for name, _ in losses:
    loss = LOSSES[name]
    result = loss(scores, labels, where=where, **options.arguments(loss, key=key, axis=axis))
    if not (isinstance(result, tuple) and len(result) == 2):
      raise ValueError(
        f"loss.losses: {name} returns a {type(result).__name__}, expected a pair "
        "(total, count) of scalars: the sum over items and their number; see "
        "docs/add_parts.md"
      )
    pairs.append(result)
  totals, counts = zip(*pairs)
  return jnp.stack(totals), jnp.stack(counts)


def combine(losses: WeightedLosses, totals: jax.Array, counts: jax.Array) -> jax.Array:
  """The weighted loss, a float32 scalar: sum of weight * total / count, each `[len(losses)]`.

  With several devices, pass local totals, and counts summed over all devices: results and gradients
  of the devices then add up to the loss and gradient of the whole batch. A loss with count 0 is 0.
  """
  weights = jnp.array([weight for _, weight in losses], jnp.float32)
  return jnp.sum(weights * totals / jnp.maximum(counts, 1.0))
