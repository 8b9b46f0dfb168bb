"""Few fixed shapes for batches of very different sizes.

Every shape costs one compilation and every padded node costs time: a long run uses
more shapes than a short one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpugraphs_jax.data.batching import Budget

MAX_BUDGETS = 8
# Rows of features that training works through in the time of a compilation: on two CPU
# cores that takes about 6 s, and training 0.25 million rows a second (width 64).
_ROWS_PER_COMPILATION = 1.5e6
# Configurations of a slate (layout presets: 16).
_CONFIGS = 16


def cost(sizes: Sequence[dict[str, int]]) -> np.ndarray:
  """Rows of features that batches of these sizes take, `[len(sizes)]` int64.

  For layouts their nodes, and every node that configurations reach once per configuration; for
  kernels their nodes once per configuration; for score tables, whose network sees no
  configuration, their nodes.
  """
  varying = {k for k in sizes[0] if k.startswith("hop")}
  if not varying and "choices" not in sizes[0]:
    varying = {"nodes"}
  rows = {k: _CONFIGS if k in varying else int(k == "nodes") for k in sizes[0]}
  return np.array([[size[k] for k in rows] for size in sizes]) @ list(rows.values())


def choose_budgets(
    sizes: Sequence[dict[str, int]], *, steps: float = np.inf, max_budgets: int = MAX_BUDGETS,
    multiple: int = 16,
) -> list[dict[str, int]]:
  """Budgets that hold every batch, smallest first, with which a run takes the least time.

  Batches are sorted by cost and cut into runs so that padding costs the least
  possible (dynamic programming over at most 150 candidate cuts); each run gets
  the maximum of every entry.

  Args:
    sizes: what each batch takes (`batching.total_sizes`); at least one.
    steps: length of the run that these batches stand for; without end unless given.
    max_budgets: most budgets allowed.
    multiple: entries are rounded up to a multiple of this.
  """
  keys = list(sizes[0])
  # Distinct batches only: epochs repeat sizes, and the maximum does not care.
  table, counts = np.unique(
      np.array([[size[k] for k in keys] for size in sizes]), axis=0, return_counts=True)
  rows = cost([dict(zip(keys, row)) for row in table])
  by_rows = np.argsort(rows, kind="stable")
  table, counts, rows = table[by_rows], counts[by_rows], rows[by_rows]
  ends = _candidate_cuts(len(rows))
  options = [_best_cuts(rows, counts, ends, budgets) for budgets in range(1, max_budgets + 1)]
  # Relative to the run without padding.
  compilation = _ROWS_PER_COMPILATION / (steps * np.average(rows, weights=counts))
  time = lambda cuts: _padded(rows, counts, cuts) + compilation * len(cuts)
  cuts = min(options, key=time)
  starts = [0] + [cut + 1 for cut in cuts[:-1]]
  chosen = [table[start : stop + 1].max(axis=0) for start, stop in zip(starts, cuts)]
  return [
      {k: _round_up(int(v) + (k == "nodes"), multiple) for k, v in zip(keys, budget)}
      for budget in chosen
  ]


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


def _candidate_cuts(batches: int) -> np.ndarray:
  """Evenly spaced batches, and more of the largest ones, where padding costs most."""
  even = np.linspace(0, batches - 1, min(batches, 128)).round().astype(int)
  from_the_end = 2 ** np.arange(batches.bit_length() - 1)
  return np.union1d(even, batches - 1 - from_the_end)


def _best_cuts(rows, counts, ends, budgets: int) -> list[int]:
  """Last batch of each of at most `budgets` runs, with the least padded cost in all."""
  total = np.concatenate([[0], np.cumsum(counts)])
  # padded[j]: of batches 0..ends[j] with the runs so far.
  padded = total[ends + 1] * rows[ends]
  choice = []
  for _ in range(budgets - 1):
    # run (i, j] after the best solution up to ends[i]
    run = (total[ends + 1][None, :] - total[ends + 1][:, None]) * rows[ends][None, :]
    options = np.where(np.tri(len(ends), k=0, dtype=bool).T, padded[:, None] + run, np.inf)
    choice.append(options.argmin(axis=0))
    padded = options.min(axis=0)
  cuts = [len(ends) - 1]
  for best in reversed(choice):
    cuts.append(int(best[cuts[-1]]))
  return [int(ends[cut]) for cut in sorted(set(cuts))]


def _padded(rows, counts, cuts) -> float:
  """Cost of all batches with padding, relative to that without."""
  budget = rows[np.array(cuts)[np.searchsorted(cuts, np.arange(len(rows)))]]
  return float((budget * counts).sum() / (rows * counts).sum())


def smallest_fit(sizes: Sequence[dict[str, int]], budgets: Sequence[Budget]) -> int | None:
  """Number of the first budget that holds every one of `sizes`, or None."""
  for i, budget in enumerate(budgets):
    if all(_fits(size, budget) for size in sizes):
      return i
  return None


def _fits(size: dict[str, int], budget: Budget) -> bool:
  # One node stays free for the padding graph.
  return size["nodes"] < budget["nodes"] and all(size[k] <= budget[k] for k in size)
