"""How far a model's order can be trusted, beside the best order that noise allows.

Measurements are noisy: even the order of the true runtimes does not fit them wholly. Of
synthetic data the true runtimes are known, and their order is the ceiling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpugraphs_jax import metrics
from tpugraphs_jax.report.runs import Judged, Run

# Between how many times as slow the slower configuration of a pair is.
RATIOS = (1.0, 1.001, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0, np.inf)
_PAIRS = 20_000  # of a graph, drawn at random where it has more


def ordered_by_ratio(
    scores: np.ndarray, runtime_ns: np.ndarray, *, pairs: int = _PAIRS
) -> tuple[np.ndarray, np.ndarray]:
  """Pairs in the right order and all pairs, by the ratio of their runtimes.

  Pairs with equal runtimes count nowhere; of equal scores one half counts as right, as
  drawing lots would have it. (For `metrics.ordered_pairs`, as published, they are mistakes.)

  Args:
    scores: `[configs]`, larger = slower.
    runtime_ns: `[configs]`, positive.
    pairs: drawn with a fixed seed where there are more.

  Returns:
    Two arrays `[len(RATIOS) - 1]`, float64 and int64.
  """
  count = len(scores)
  if count * (count - 1) // 2 <= pairs:
    first, second = np.triu_indices(count, 1)
  else:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, count, (2, pairs))
  slow = np.where(runtime_ns[first] > runtime_ns[second], first, second)
  fast = np.where(runtime_ns[first] > runtime_ns[second], second, first)
  differ = runtime_ns[slow] != runtime_ns[fast]
  slow, fast = slow[differ], fast[differ]
  which = np.searchsorted(RATIOS, runtime_ns[slow] / runtime_ns[fast], side="right") - 1
  bins = len(RATIOS) - 1
  share = (1 + np.sign(scores[slow] - scores[fast])) / 2
  right = np.bincount(which, weights=share, minlength=bins)
  return right, np.bincount(which, minlength=bins)


def accuracy(judged: Sequence[Judged], *, of_ceiling: bool = False) -> np.ndarray:
  """Share of pairs in the right order by the ratio of their runtimes, `[bins]`; NaN: no pair.

  Args:
    judged: graphs.
    of_ceiling: judges the order of the true runtimes instead of the model's.
  """
  totals = np.zeros((2, len(RATIOS) - 1))
  for graph in judged:
    totals += ordered_by_ratio(
        graph.ceiling_ns if of_ceiling else graph.scores, graph.runtime_ns)
  with np.errstate(invalid="ignore"):
    return totals[0] / totals[1]


def ceiling(run: Run) -> dict[str, float]:
  """The metrics of the order without noise, by name; empty where it is not known."""
  known = [graph for graph in run.judged if graph.ceiling_ns is not None]
  if not known or len(known) < len(run.judged):
    return {}
  orders = [(graph.ceiling_ns, graph.runtime_ns) for graph in known]
  found = {"opa_pooled": metrics.pooled_opa(metrics.ordered_pairs(*order) for order in orders),
           "kendaltau_mean": float(np.nanmean([metrics.kendall_tau(*order) for order in orders]))}
  for name in run.means:
    if name.startswith("slowdown"):
      k = int(name.removeprefix("slowdown").removesuffix("_mean"))
      found[name] = float(np.mean([metrics.top_k_slowdown(*order, [k])[k] for order in orders]))
  return found
