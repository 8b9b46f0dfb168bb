"""Reads working folders: runs, their judged graphs, and groups of runs with one config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import math
import os
from pathlib import Path
import re
from typing import Any

from flax import traverse_util
import numpy as np
from scipy import stats

from tpugraphs_jax import metrics, synthetic
from tpugraphs_jax.collections import Collection, SYNTHETIC, UNKNOWN
from tpugraphs_jax.infra import remote, trust
from tpugraphs_jax.serve import judge

RANDOM, DEFAULT, NOISELESS = "a random order", "the compiler's own choice", "ceiling (no noise)"
KS = (1, 2, 5, 10, 20, 50, 100)


@dataclasses.dataclass(frozen=True, eq=False)
class Judged(judge.Judged):
  """Scores of a validation graph beside its labels and other orders, as far as they are known.

  Attributes:
    default: index of the compiler's own choice among the scored configurations.
    ceiling_ns: `[n]` float64, runtimes without noise.
  """

  default: int | None = None
  ceiling_ns: np.ndarray | None = None

  @functools.cached_property
  def kendall_tau(self) -> float:
    return metrics.kendall_tau(self.scores, self.label)

  @functools.cached_property
  def slowdowns(self) -> dict[int, float]:
    """Top-k slowdown by k, for k up to the number of configurations."""
    ks = [k for k in KS if k <= len(self.scores)]
    return metrics.top_k_slowdown(self.scores, self.label, ks)

  @property
  def default_slowdown(self) -> float:
    """Slowdown of the compiler's own choice; NaN where it is not known."""
    if self.default is None:
      return math.nan
    return float(self.label[self.default] / self.label.min() - 1)

  @property
  def ranks(self) -> tuple[np.ndarray, np.ndarray]:
    """Predicted rank and rank by label of every configuration, `[n]` each, 0 = fastest."""
    place = lambda values: np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return place(self.scores), place(self.label)


@dataclasses.dataclass(frozen=True)
class Run:
  """One run.

  Attributes:
    name: its folder, as short as tells it apart.
    config: flat, by field (`batch.graphs`), without the seed.
    seed: of the run.
    summary: `summary.json`; empty if there is none.
    rows: lines of `metrics.jsonl`.
    judged: validation graphs; empty before evaluation.
  """

  name: str
  config: dict[str, Any]
  seed: int
  summary: dict[str, Any]
  rows: list[dict[str, Any]]
  judged: tuple[Judged, ...]

  @property
  def collection(self) -> str:
    return self.summary.get("collection", "")

  @property
  def labels(self) -> str:
    """The kind of the labels, see `collections.label_kind`."""
    return self.summary.get("labels", UNKNOWN)

  @property
  def protocol(self) -> tuple[Any, ...]:
    """Split, graphs and configurations that were judged; runs with others do not compare."""
    validation = self.summary.get("validation", {})
    return tuple(validation.get(name) for name in ("split", "graphs", "configurations_judged"))

  @property
  def ks(self) -> list[int]:
    """The k of the slowdowns on the page: 1, and those below the largest graph's configurations."""
    most = max((len(graph.scores) for graph in self.judged), default=0)
    return [k for k in Collection(self.collection).slowdown_ks if k == 1 or k < most]

  @functools.cached_property
  def means(self) -> dict[str, float]:
    """Metrics over the judged graphs, by name."""
    return self._means(self.judged) if self.judged else {}

  def _means(self, judged: Sequence[judge.Judged]) -> dict[str, float]:
    rows, means = judge.judge(judged, self.ks)
    return _named(means, opa_mean=judge.mean_row(rows)["opa"])

  @functools.cached_property
  def references(self) -> dict[str, dict[str, float]]:
    """The same metrics of other orders than the model's, as far as they are known."""
    if not self.judged:
      return {}
    random = judge.random_order([graph.label for graph in self.judged], self.ks)
    orders = {RANDOM: _named(random, opa_mean=0.5)}
    if all(graph.default is not None for graph in self.judged):  # one choice, which orders nothing
      slowdown = float(np.mean([graph.default_slowdown for graph in self.judged]))
      orders[DEFAULT] = {f"slowdown{k}_mean": slowdown for k in self.ks}
    if all(graph.ceiling_ns is not None for graph in self.judged):
      orders[NOISELESS] = self._means(
          [dataclasses.replace(graph, scores=graph.ceiling_ns) for graph in self.judged])
    return orders

  @property
  def verdict(self) -> str:
    """How good the first choices are, beside random ones and the compiler's own, in words."""
    if not self.judged:
      return "not evaluated yet"
    orders = {"the first choice": self.means, **self.references}
    return "slowdown of " + ", ".join(f"{name} {means['slowdown1_mean']:.3f}"
                                      for name, means in orders.items() if name != NOISELESS)


def _named(means: Mapping[str, float], *, opa_mean: float) -> dict[str, float]:
  """Means of `serve.judge` by the names that say how graphs were put together."""
  named = {judge.mean_name(metric): value for metric, value in means.items()}
  return {"opa_pooled": named.pop("opa_pooled"), "opa_mean": opa_mean} | named


def _mean(values: Iterable[float]) -> float:
  """Mean of those that are numbers; NaN without any."""
  numbers = [value for value in values if not math.isnan(value)]
  return float(np.mean(numbers)) if numbers else math.nan


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that differ in their seeds alone.

  Attributes:
    name: the common part of its runs' names.
    runs: at least one.
  """

  name: str
  runs: tuple[Run, ...]

  @property
  def judged(self) -> list[Judged]:
    """The judged graphs of all runs."""
    return [graph for run in self.runs for graph in run.judged]

  def spread(self, metric: str) -> tuple[float, float]:
    """Mean and standard deviation (n - 1; NaN for one run) of a metric over the runs."""
    values = [run.means[metric] for run in self.runs if metric in run.means]
    return _mean(values), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

  def by_graph(self, value: Callable[[Judged], float]) -> dict[str, float]:
    """A number of each graph, mean over the runs."""
    numbers: dict[str, list[float]] = {}
    for graph in self.judged:
      numbers.setdefault(graph.name, []).append(value(graph))
    return {name: _mean(values) for name, values in numbers.items()}


def groups_of(runs: Sequence[Run]) -> list[Group]:
  """Runs by config, in the order in which they come."""
  by_config: dict[str, list[Run]] = {}
  for run in runs:
    by_config.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
  names = [_common_name([run.name for run in group]) for group in by_config.values()]
  return [Group(name if names.count(name) == 1 else group[0].name, tuple(group))
          for name, group in zip(names, by_config.values())]


def _common_name(names: Sequence[str]) -> str:
  """`base` of `base/seed_0` and `base/seed_1`; the first name if they have nothing in common."""
  prefix = os.path.commonprefix(names)
  if prefix in names:
    return prefix
  return re.sub(r"[/._-]*(seed)?[/._-]*\d*$", "", prefix) or names[0]


def comparisons(groups: Sequence[Group]) -> list[tuple[str, str, int, float, float]]:
  """Every two groups compared, graph by graph.

  Returns:
    For each pair the second name and the first, how many graphs have a Kendall tau in both, the
    mean over graphs of the second's less the first's, and the p-value of the Wilcoxon signed-rank
    test that pairs graphs, NaN when there is nothing to test.
  """
  rows = []
  for pair in itertools.combinations(groups, 2):
    one, two = (group.by_graph(lambda graph: graph.kendall_tau) for group in pair)
    change = np.array([two[name] - one[name] for name in sorted(one.keys() & two.keys())])
    change = change[~np.isnan(change)]
    is_tested = len(change) > 1 and change.any()
    rows.append((pair[1].name, pair[0].name, len(change), _mean(change),
                 float(stats.wilcoxon(change).pvalue) if is_tested else math.nan))
  return rows


def differences(groups: Sequence[Group]) -> list[list[str]]:
  """Fields in which the groups' configs differ, each with the value of every group."""
  configs = [group.runs[0].config for group in groups]
  rows = [[name, *(str(config.get(name, "none")) for config in configs)]
          for name in sorted(set().union(*configs))]
  return [row for row in rows if len(set(row[1:])) > 1]


def read_all(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
  """The runs of working folders, with as much of each path as tells them apart.

  Raises:
    FileNotFoundError, ValueError: as `read`.
  """
  paths = [Path(os.fspath(folder).replace("://", "/") if remote.is_remote(folder)
                else Path(folder).expanduser().absolute()) for folder in folders]
  depth = 1
  while len({path.parts[-depth:] for path in paths}) < len(set(paths)):
    depth += 1
  return [dataclasses.replace(read(remote.fetch(folder)), name="/".join(path.parts[-depth:]))
          for folder, path in zip(folders, paths)]


_CONFIG = {"seed": trust.COUNT, "data_root": str, "task": str, "train": {"best_metric": str}}
_SUMMARY = {
    "collection": str, "labels": str,
    "training": {"ended": str, "step": trust.COUNT, "seconds": trust.NUMBER,
                 "peak_memory": trust.Record(bytes=trust.NUMBER),
                 "best": trust.Record(step=trust.COUNT, value=(*trust.NUMBER, type(None)))},
    "validation": trust.Record(split=str, graphs=trust.COUNT, configurations=str,
                               configurations_judged=trust.COUNT)}
_ROW = trust.Record({"step": trust.COUNT, ...: (*trust.NUMBER, str, type(None))})


def read(folder: Path) -> Run:
  """The run of a working folder.

  Raises:
    FileNotFoundError: no run was started there.
    ValueError: its config.json is damaged.
  """
  path = folder / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: name a folder that a model was trained in")
  with trust.reading(path, "train again"):
    manifest = trust.parsed(path.read_bytes())
    trust.check(manifest, trust.Record(config=trust.Record(model=trust.Record(name=str))), "it")
    trust.check(manifest["config"], _CONFIG, "config")
    config = traverse_util.flatten_dict(manifest["config"], sep=".")
  seed = config.pop("seed", 0)
  data_root, path = config.pop("data_root", ""), folder / "summary.json"
  summary = {}
  if path.exists():
    with trust.reading(path, "evaluate again"):
      summary = trust.parsed(path.read_bytes())
      trust.check(summary, _SUMMARY, "it")
      if "training" in summary:
        trust.check(summary["training"], trust.Record(ended=str), "training")
      if summary.get("collection"):
        Collection(summary["collection"])  # refuses what is none
  run = Run(folder.name or str(folder), config, seed, summary, _rows(folder / "metrics.jsonl"), ())
  return dataclasses.replace(
      run, judged=_judged(folder / judge.SCORES_FILE, data_root, run))


def _rows(path: Path) -> list[dict[str, Any]]:
  """Whole lines: the last one may be cut short while a run goes on."""
  rows = []
  for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
    try:
      row = trust.parsed(line)
    except ValueError:
      continue
    with trust.reading(path, "remove the line"):
      trust.check(row, _ROW, f"line {number}")
    rows.append(row)
  return rows


def _judged(path: Path, data_root: str, run: Run) -> tuple[Judged, ...]:
  if not path.exists():
    return ()
  if not run.collection:
    raise ValueError(f"{path.with_name('summary.json')} names no collection: evaluate again")
  # In a collection made by `collect`, whose labels are of a known kind, it is configuration 0.
  has_default = run.collection and not Collection(run.collection).is_released and (
      run.labels not in (SYNTHETIC, UNKNOWN))
  return tuple(
      Judged(**vars(one),
             default=int(np.argmin(one.config_ids))
             if has_default and not one.config_ids.min() else None,
             ceiling_ns=_ceiling(data_root, run.collection, one))
      for one in judge.read_scores(path))


def _ceiling(data_root: str, collection: str, judged: judge.Judged) -> np.ndarray | None:
  """Runtimes without noise, `[n]`, of synthetic data that are still there and the same."""
  if not collection or remote.is_remote(data_root):
    return None
  try:
    ceiling = synthetic.read_ceiling(data_root, collection, "valid", judged.name)
    is_same = np.array_equal(ceiling.measured_ns[judged.config_ids], judged.runtime_ns)
  except (OSError, ValueError, IndexError):
    return None
  return ceiling.runtime_ns[judged.config_ids] if is_same else None
