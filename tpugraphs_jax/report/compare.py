"""Several runs: groups with one config, their spread over seeds, tests between groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
from scipy import stats

from tpugraphs_jax.report.runs import Judged, Run


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that differ in their seeds alone.

  Attributes:
    name: of the first run.
    runs: at least one.
  """

  name: str
  runs: tuple[Run, ...]

  def spread(self, metric: str) -> tuple[float, float]:
    """Mean and standard deviation (n - 1; NaN for one run) of a metric over the runs."""
    values = [run.means[metric] for run in self.runs if metric in run.means]
    if not values:
      return math.nan, math.nan
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

  def taus(self) -> dict[str, float]:
    """Kendall tau of each graph, mean over the runs; graphs without one are left out."""
    means = self.means_of(lambda graph: graph.kendall_tau)
    return {name: value for name, value in means.items() if not math.isnan(value)}

  def means_of(self, value: Callable[[Judged], float]) -> dict[str, float]:
    """A number of each graph, mean over the runs."""
    by_graph: dict[str, list[float]] = {}
    for graph in itertools.chain.from_iterable(run.judged for run in self.runs):
      by_graph.setdefault(graph.name, []).append(value(graph))
    return {name: float(np.mean(values)) for name, values in by_graph.items()}


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Two groups on the graphs that both judged.

  Attributes:
    first: name of one group.
    second: name of the other one.
    graphs: how many graphs both judged.
    difference: mean over graphs of the second's Kendall tau less the first's.
    p_value: of the Wilcoxon signed-rank test that pairs graphs, NaN when there is nothing
      to test.
  """

  first: str
  second: str
  graphs: int
  difference: float
  p_value: float


def groups_of(runs: Sequence[Run]) -> list[Group]:
  """Runs by config, in the order in which they come."""
  found: dict[str, list[Run]] = {}
  for run in runs:
    found.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
  return [Group(group[0].name, tuple(group)) for group in found.values()]


def pairs(groups: Sequence[Group]) -> list[Comparison]:
  """Every two groups compared, graph by graph."""
  return [compare(*two) for two in itertools.combinations(groups, 2)]


def compare(first: Group, second: Group) -> Comparison:
  """Whether one group ranks better than the other, over graphs."""
  one, two = first.taus(), second.taus()
  common = sorted(one.keys() & two.keys())
  change = np.array([two[name] - one[name] for name in common])
  p_value = math.nan
  if len(change) > 1 and change.any():
    p_value = float(stats.wilcoxon(change).pvalue)
  return Comparison(first.name, second.name, len(common),
                    float(change.mean()) if len(change) else math.nan, p_value)


def differences(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
  """Fields in which the groups' configs differ, with the value of each group."""
  configs = [group.runs[0].config for group in groups]
  names = sorted(set().union(*configs))
  table = [(name, [config.get(name, "none") for config in configs]) for name in names]
  return [(name, values) for name, values in table
          if any(value != values[0] for value in values)]
