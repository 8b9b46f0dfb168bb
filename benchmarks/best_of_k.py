"""Slowdown of the best of the first k layouts of AlexNet, by times measured on a TPU v3.

    python -m benchmarks.best_of_k --data_root DIR --out benchmarks/best_of_k.json

DIR holds the released layout data (`DIR/layout/xla/default/valid/alexnet.npz`). Four ways order
its 3,856 configurations; none of them has seen a time:

model      `layout-v3-estimate`, which has learnt the TPU v3 compiler's estimates of other programs
estimate   the optimal seconds of that compiler for AlexNet, of the configurations whose output
           orders `benchmarks/bridge.json` has
changed    the number of groups of nodes whose layouts differ from configuration 0, with which the
           search of the data set began
random     any order

Many scores are equal. Every figure is the mean over all orders of equal scores, and a random
order is the case in which all scores are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measured, pages, timing
from tpugraphs_jax import metrics
from tpugraphs_jax.data import npz
from tpugraphs_jax.rankers.ranker import load

KS = tuple(range(1, 21))
NAMES = {
  "model": "`layout-v3-estimate`",
  "estimate": "the compiler's estimate",
  "changed": "fewest changed layouts",
  "random": "random order",
}
_SHOWN = (1, 2, 3, 5, 10, 20)  # columns of the table


def slowdowns(scores: np.ndarray, runtime: np.ndarray, ks: Sequence[int]) -> list[float]:
  """Slowdown of the best of the first k, for each k: the mean over all orders of equal scores.

  Args:
    scores: `[C]`, smaller first.
    runtime: `[C]`, positive.
    ks: numbers of configurations.
  """
  return [_best(scores, runtime.astype(np.float64), k) / runtime.min() - 1 for k in ks]


def _best(scores: np.ndarray, runtime: np.ndarray, k: int) -> float:
  """The expected smallest run time of the first k."""
  values, counts = np.unique(scores, return_counts=True)
  before = np.cumsum(counts) - counts
  last = np.searchsorted(before, k) - 1  # of equal scores, with the k-th configuration in between
  known = runtime[scores < values[last]].min(initial=np.inf)
  tied = np.minimum(runtime[scores == values[last]], known)
  draws = int(k - before[last])
  return tied.min() * (1 + metrics.random_slowdown(tied, [draws])[draws])


def table(results: Mapping[str, Any]) -> str:
  """Slowdowns in percent for some k, as a Markdown table."""
  percent = lambda name: [f"{100 * results[name]['slowdown'][k - 1]:.2f} %" for k in _SHOWN]
  return pages.table(
    ["best of the first", *map(str, _SHOWN)],
    [[label, *percent(name)] for name, label in NAMES.items()],
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", required=True, type=Path, help="the released data")
  args = parser.parse_args()
  graph = npz.read_layout(args.data_root / "layout" / "xla" / "default" / "valid" / "alexnet.npz")
  runtime, group_row = graph.configs.labels[:], graph.configs.group_row[:]
  estimate = measured.estimated(graph)["optimal_seconds"]
  scores = {
    "model": load("layout-v3-estimate").scores([graph])[0],
    "estimate": estimate,
    "changed": (group_row != group_row[0]).sum(axis=1),
    "random": np.zeros(len(runtime)),
  }
  results: dict[str, Any] = {"machine": timing.machine(), "configs": len(runtime)}
  for name, values in scores.items():
    known = ~np.isnan(values)
    # Every order is compared with the fastest of all configurations.
    assert runtime[known].min() == runtime.min()
    results[name] = {
      "configs": int(known.sum()),
      "kendaltau": 0.0 if name == "random" else metrics.kendall_tau(values[known], runtime[known]),
      "slowdown": slowdowns(values[known], runtime[known], KS),
    }
  timing.write(results, args.out)
  print(table(results))


if __name__ == "__main__":
  main()
