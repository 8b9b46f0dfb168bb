"""Exact ranking metrics on the host, for one graph at a time.

Scores rank configurations from fastest (smallest) to slowest. Runtimes are
measured, noise-free or normalised: any positive numbers, int64 nanoseconds or
float64. Counting is done on integer ranks, so nothing is lost to rounding.

Arrays of every function:
  scores: [configs], floating or integer, no NaN.
  runtime: [configs], int64 nanoseconds or floating, no NaN.
All runtimes zero means that the graph is not labelled; that, NaN and other
shapes are ValueErrors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import math

import numpy as np
import scipy  # imports `scipy.stats`, which takes long, at its first use

from tpugraphs_jax.infra import console

# Prefix of metrics of evaluations during training, which judge a sample of configurations.
SAMPLE = "valid_sample"


def ordered_pairs(scores: np.ndarray, runtime: np.ndarray) -> tuple[int, int]:
  """Pairs ranked correctly and pairs with a right order, `(concordant, pairs)`.

  A pair counts if its runtimes differ. It is concordant if the slower one has the strictly larger
  score: a tie in scores is a mistake. Takes O(n log n) time.

  Args:
    scores: `[configs]`.
    runtime: `[configs]`.
  """
  scores, runtime = _checked(scores=scores, runtime=runtime)
  _, score_rank, score_ties = np.unique(scores, return_inverse=True, return_counts=True)
  _, runtime_rank, runtime_ties = np.unique(runtime, return_inverse=True, return_counts=True)
  cells = score_rank * len(runtime_ties) + runtime_rank
  tied_in_both = _pairs_within(np.unique(cells, return_counts=True)[1])
  all_pairs = _pairs_within(np.array([len(scores)]))
  comparable = all_pairs - _pairs_within(runtime_ties)
  score_differs = all_pairs - _pairs_within(score_ties)
  if not comparable or not score_differs:
    return 0, comparable
  # tau-b is (concordant - discordant) / sqrt(comparable * score_differs), and both
  # kinds together are the pairs tied in neither.
  tau = scipy.stats.kendalltau(score_rank, runtime_rank).statistic
  difference = round(float(tau) * math.sqrt(comparable) * math.sqrt(score_differs))
  untied = comparable + score_differs - all_pairs + tied_in_both
  return (untied + difference) // 2, comparable


def opa(scores: np.ndarray, runtime: np.ndarray) -> float:
  """Ordered pair accuracy: share of pairs with y_i > y_j for which s_i > s_j, of `[configs]`.

  NaN when no two runtimes differ: there is no pair to order.

  Examples:
    >>> opa(np.array([0.5, 0.1, 0.2]), np.array([30, 10, 20]))
    1.0
  """
  return pooled_opa([ordered_pairs(scores, runtime)])


def pooled_opa(counts: Iterable[tuple[int, int]]) -> float:
  """OPA over many graphs from their `ordered_pairs`; a graph weighs by its pairs.

  This is the official validation metric. NaN when there is no pair at all.
  """
  concordant, pairs = 0, 0
  for graph_concordant, graph_pairs in counts:
    concordant += graph_concordant
    pairs += graph_pairs
  return concordant / pairs if pairs else math.nan


def kendall_tau(scores: np.ndarray, runtime: np.ndarray) -> float:
  """Kendall's tau-b between scores and runtimes, in [-1, 1].

  NaN when all runtimes are equal: there is no order to find. Equal scores of all configurations
  count as 0, as a random order does. The definition (and SciPy, which the
  official code calls) gives NaN there, so that a mean over graphs leaves the graph out.

  Examples:
    >>> round(kendall_tau(np.array([0.5, 0.1, 0.2]), np.array([30, 20, 10])), 3)
    0.333
  """
  scores, runtime = _checked(scores=scores, runtime=runtime)
  score_rank = np.unique(scores, return_inverse=True)[1]
  runtime_rank = np.unique(runtime, return_inverse=True)[1]
  if not runtime_rank.any():
    return math.nan
  if not score_rank.any():
    return 0.0
  return float(scipy.stats.kendalltau(score_rank, runtime_rank).statistic)


def best_of_top_k(scores: np.ndarray, runtime: np.ndarray, k: int) -> int | float:
  """Best runtime, in its own unit, among the k of `[configs]` with the lowest scores.

  Tied scores keep the order of the file; k beyond the number of configurations
  means all of them.
  """
  scores, runtime = _checked(scores=scores, runtime=runtime)
  if k < 1:
    raise ValueError(f"k is {k}, expected at least 1")
  return runtime[np.argsort(scores, kind="stable")[:k]].min().item()


def top_k_slowdown(scores: np.ndarray, runtime: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
  """(best among the k lowest scores - best) / best of `[configs]`, for each k; 0 is perfect.

  Raises:
    ValueError: also for a runtime that is not positive.

  Examples:
    >>> top_k_slowdown(np.array([0.1, 0.2, 0.5]), np.array([30, 20, 10]), ks=(1, 3))
    {1: 2.0, 3: 0.0}
  """
  scores, runtime = _checked(scores=scores, runtime=runtime)
  _require_positive("runtime", runtime)
  best = runtime.min().item()
  return {k: (best_of_top_k(scores, runtime, k) - best) / best for k in ks}


def random_slowdown(runtime: np.ndarray, ks: Sequence[int]) -> dict[int, float]:
  """The mean of `top_k_slowdown` of `[configs]` over all orders, for each k.

  Raises:
    ValueError: a runtime that is not positive, or no configuration at all.
  """
  ordered, _ = _checked(ordered=np.sort(runtime), runtime=runtime)
  _require_positive("runtime", ordered)
  count, slowdown = len(ordered), {}
  for k in ks:
    draws, place = min(k, count), np.arange(count - 1)
    # weight[i] is the probability that the i-th fastest is the best of `draws` random ones.
    rarer = np.maximum(count - place - draws, 0) / (count - place - 1)
    weight = draws / count * np.concatenate([[1.0], np.cumprod(rarer)])
    slowdown[k] = float((weight * ordered).sum() / ordered[0] - 1)
  return slowdown


def tile_size_ape(first: np.ndarray, best: np.ndarray) -> float:
  """Tile-Size APE, in percent: 100 * sum |first - best| / sum best over kernels.

  Args:
    first: [graphs], runtime of the tile that a model ranks first, `best_of_top_k` with k 1.
    best: [graphs], each kernel's fastest runtime, same unit.

  Source: Kaufman et al., "A Learned Performance Model for Tensor Processing Units"
  (MLSys 2021).
  """
  first, best = _checked(first=first, best=best)
  _require_positive("best", best)
  return 100.0 * float(np.abs(first - best).sum() / best.sum())


def mape(predicted: np.ndarray, runtime: np.ndarray) -> float:
  """Mean absolute percentage error of absolute runtimes `[n]`: 100 * mean |p - y| / y."""
  predicted, runtime = _checked(predicted=predicted, runtime=runtime)
  _require_positive("runtime", runtime)
  return 100.0 * float(np.mean(np.abs(predicted - runtime) / runtime))


def program_of(name: str) -> str:
  """Program a tile kernel belongs to: its name up to the last `_`."""
  return name.rpartition("_")[0] or name


def mean_by_program(value_of: Mapping[str, float]) -> dict[str, float]:
  """Mean of per-graph values, except NaN, over each program's kernels, programs sorted."""
  groups: dict[str, list[float]] = {}
  for name, value in value_of.items():
    groups.setdefault(program_of(name), []).append(value)
  return {program: mean(groups[program]) for program in sorted(groups)}


def mean(values: Iterable[float]) -> float:
  """Mean of the values that are not NaN; NaN without any."""
  numbers = [value for value in values if not math.isnan(value)]
  return float(np.mean(numbers)) if numbers else math.nan


def mean_of(graphs: int, without_order: Sequence[str]) -> str:
  """Says how many graphs a mean has, and names the graphs without an order.

  Examples:
    >>> mean_of(2, ["p1"])
    'mean of 1 of 2 graphs; p1 has no order'
  """
  if not without_order:
    return f"mean of {graphs} graph{'s' * (graphs != 1)}"
  have = "has" if len(without_order) == 1 else "have"
  names = console.some(without_order)
  return f"mean of {graphs - len(without_order)} of {graphs} graphs; {names} {have} no order"


def _checked(**named: np.ndarray) -> list[np.ndarray]:
  """Checks two arrays of one shape, of which the second has runtimes, and returns them."""
  arrays = {name: np.asarray(array) for name, array in named.items()}
  (first_name, first), (name, runtime) = arrays.items()
  if first.ndim != 1 or first.shape != runtime.shape or not first.size:
    raise ValueError(
      f"{first_name} {first.shape} and {name} {runtime.shape} must have one shape "
      "[configs] with at least one configuration"
    )
  for array_name, array in arrays.items():
    bad = np.flatnonzero(np.isnan(array))
    if bad.size:
      raise ValueError(f"{array_name} hold NaN, first at index {bad[0]}")
  if not runtime.any():
    raise ValueError(f"{name}: all zero, so the graph is not labelled and can only be ranked")
  return [first, runtime]


def _require_positive(name: str, values: np.ndarray) -> None:
  bad = np.flatnonzero(values <= 0)
  if bad.size:
    raise ValueError(f"{name}[{bad[0]}] is {values[bad[0]]}, expected positive runtimes")


def _pairs_within(group_sizes: np.ndarray) -> int:
  """Number of unordered pairs inside groups of the given sizes."""
  sizes = group_sizes.astype(np.int64)
  return int((sizes * (sizes - 1) // 2).sum())


def is_tied(scores: np.ndarray) -> bool:
  """Whether the best five of more than five scores `[C]` are equal."""
  return len(scores) > 5 and np.ptp(np.partition(scores, 4)[:5]) == 0
