"""Reads working folders: runs, their judged graphs, and groups of runs with one config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

from flax import traverse_util
import numpy as np
import scipy

from tpugraphs_jax import metrics
from tpugraphs_jax.data import folds
from tpugraphs_jax.datasets import Collection, SYNTHETIC, UNKNOWN
from tpugraphs_jax.infra import console, files, trust
from tpugraphs_jax.train import evaluation

RANDOM, DEFAULT = "a random order", "the compiler's own choice"
KS = (1, 2, 5, 10, 20, 50, 100)
TAU = "kendaltau_mean"
FEWEST_TESTED = 6  # graphs with which a signed-rank test can have p < 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class ValidationGraph(evaluation.GraphScores):
  """Scores of a validation graph beside its labels and the compiler's own choice, if it is known.

  Attributes:
    default: index of the compiler's own choice among the scored configurations.
  """

  default: int | None = None

  @functools.cached_property
  def slowdowns(self) -> dict[int, float]:
    """Top-k slowdown by k, for k up to the number of configurations."""
    ks = [k for k in KS if k <= len(self.scores)]
    return metrics.top_k_slowdown(self.scores, self.labels, ks)

  @property
  def default_slowdown(self) -> float:
    """Slowdown of the compiler's own choice; NaN where it is not known."""
    if self.default is None:
      return math.nan
    return float(self.labels[self.default] / self.labels.min() - 1)

  @property
  def ranks(self) -> tuple[np.ndarray, np.ndarray]:
    """Predicted rank and rank by label of every configuration, `[n]` each, 0 = fastest."""
    place = lambda values: np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return place(self.scores), place(self.labels)


# Metrics that tables and figures show of every graph, by name.
BY_GRAPH: dict[str, Callable[[ValidationGraph], float]] = {
  "Kendall tau": lambda graph: graph.kendall_tau,
  "slowdown1": lambda graph: graph.slowdowns[1],
}


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """One run.

  Attributes:
    name: the last parts of its path, so many that the names of runs differ.
    config: flat, by field (`batch.graphs`), without seed and fold.
    seed: of the run.
    summary: `summary.json`; empty if there is none.
    rows: lines of `metrics.jsonl`.
    judged: graphs of the split of `section`; empty before evaluation.
    folder: its place, as it was given.
    data_root: place of its data.
    about: command, versions, devices and date of `config.json`.
    fold: number of the test fold; None without folds.
    division: the fold of every graph; empty without folds. Runs with another division do not
      compare.
  """

  name: str
  config: dict[str, Any]
  seed: int
  summary: dict[str, Any]
  rows: list[dict[str, Any]]
  judged: tuple[ValidationGraph, ...]
  folder: str = ""
  data_root: str = ""
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fold: int | None = None
  division: str = ""

  @property
  def collection(self) -> str:
    return self.summary.get("collection", "")

  @property
  def labels(self) -> str:
    """The kind of the labels, see `datasets.label_kind`."""
    return self.summary.get("labels", UNKNOWN)

  @property
  def section(self) -> str:
    """The section of the summary with the figures, `validation` or `test`."""
    return evaluation.final_split(self.summary | {"folds": self.config.get("data.folds", 0)})

  def file_of(self, graph: str) -> Path:
    """The file of a judged graph, where its data are on this machine and still there.

    There is no such file for data in a bucket.
    """
    root, collection = files.expanded(self.data_root), Collection(self.collection)
    splits = (
      ("train", "valid") if self.division else ("test" if self.section == "test" else "valid",)
    )
    places = [collection.folder(root, split) / f"{graph}.npz" for split in splits]
    return places[0] if places[0].exists() else places[-1]

  @property
  def protocol(self) -> tuple[Any, ...]:
    """Collection, labels, graphs and their sizes; runs that differ here do not compare.

    Of runs on folds it has the folds and the limit of sizes: each run judges other graphs.
    """
    if self.division and self.judged:
      return self.collection, self.labels, self.division, self.config.get("eval.max_configs")
    sizes = frozenset((graph.name, len(graph.scores)) for graph in self.judged)
    return self.collection, self.labels, sizes

  @property
  def ks(self) -> list[int]:
    """The k of the slowdowns on the page: 1, and those below the largest graph's configurations."""
    most = max((len(graph.scores) for graph in self.judged), default=0)
    return [k for k in Collection(self.collection).slowdown_ks if k == 1 or k < most]

  @functools.cached_property
  def means(self) -> dict[str, float]:
    """Metrics over the judged graphs, by name."""
    if not self.judged:
      return {}
    rows, means = evaluation.evaluate(self.judged, self.ks)
    return _named(means, opa_mean=evaluation.mean_row(rows)["opa"])

  @functools.cached_property
  def references(self) -> dict[str, dict[str, float]]:
    """The same metrics of other orders than the model's, as far as they are known."""
    if not self.judged:
      return {}
    random = evaluation.random_order([graph.labels for graph in self.judged], self.ks)
    orders = {RANDOM: _named(random, opa_mean=0.5)}
    if all(graph.default is not None for graph in self.judged):  # one choice, which orders nothing
      slowdown = float(np.mean([graph.default_slowdown for graph in self.judged]))
      orders[DEFAULT] = {f"slowdown{k}_mean": slowdown for k in self.ks}
    return orders


def _named(means: Mapping[str, float], *, opa_mean: float) -> dict[str, float]:
  """Means of `train.evaluation` by the names that say how graphs were put together."""
  named = {evaluation.mean_name(metric): value for metric, value in means.items()}
  pooled = named.pop("opa_pooled")
  return named | {"opa_pooled": pooled, "opa_mean": opa_mean}


@dataclasses.dataclass(frozen=True)
class RunGroup:
  """Runs that differ only in seeds and folds.

  Attributes:
    name: the common part of its runs' names.
    runs: at least one.
  """

  name: str
  runs: tuple[RunRecord, ...]

  @property
  def judged(self) -> list[ValidationGraph]:
    """The judged graphs of all runs."""
    return [graph for run in self.runs for graph in run.judged]

  @property
  def graphs(self) -> list[ValidationGraph]:
    """Every judged graph, of the first run that judged it."""
    first: dict[str, ValidationGraph] = {}
    for graph in self.judged:
      first.setdefault(graph.name, graph)
    return list(first.values())

  @property
  def folds(self) -> list[int]:
    """The test folds of its runs; empty without folds."""
    return sorted({run.fold for run in self.runs if run.fold is not None})

  @functools.cached_property
  def out_of_fold(self) -> RunGroup:
    """The same config with one run for each seed, which has the judged graphs of all its folds.

    Each graph is judged by the model of the fold that tests it. A seed that lacks a fold of another
    seed is left out. If every seed lacks a fold, the graphs of all seeds make one run.
    """
    if not self.folds:
      return self
    by_seed: dict[int, list[RunRecord]] = {}
    for run in self.runs:
      by_seed.setdefault(run.seed, []).append(run)
    of_seeds = [RunGroup(self.name, tuple(some)) for some in by_seed.values()]
    whole = [group for group in of_seeds if group.folds == self.folds] or [self]
    return RunGroup(self.name, tuple(group.whole for group in whole))

  @property
  def whole(self) -> RunRecord:
    """The first run, with the judged graphs of all runs of the group."""
    return dataclasses.replace(self.runs[0], judged=tuple(self.graphs), fold=None)

  @functools.cached_property
  def taus(self) -> dict[str, float]:
    """Kendall tau of each graph with an order, mean over the runs."""
    taus = self.by_graph(lambda graph: graph.kendall_tau)
    return {name: tau for name, tau in taus.items() if not math.isnan(tau)}

  @property
  def by_tau(self) -> list[ValidationGraph]:
    """Its graphs, the lowest mean of Kendall tau first, then graphs without an order."""
    return sorted(self.graphs, key=lambda graph: self.taus.get(graph.name, 2))

  @property
  def without_order(self) -> list[str]:
    """Names of the graphs that no ranker can order."""
    return [graph.name for graph in self.graphs if graph.name not in self.taus]

  @property
  def means(self) -> dict[str, float]:
    """Metrics by name, means over the runs."""
    return {name: self.spread(name)[0] for name in self.runs[0].means}

  def spread(self, metric: str) -> tuple[float, float]:
    """Mean and standard deviation (n - 1; NaN for one run) of a metric over the runs."""
    values = [run.means[metric] for run in self.runs if metric in run.means]
    return metrics.mean(values), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

  def by_graph(self, value: Callable[[ValidationGraph], float]) -> dict[str, float]:
    """A number of each graph, mean over the runs."""
    numbers: dict[str, list[float]] = {}
    for graph in self.judged:
      numbers.setdefault(graph.name, []).append(value(graph))
    return {name: metrics.mean(values) for name, values in numbers.items()}


def groups_of(runs: Sequence[RunRecord]) -> list[RunGroup]:
  """Runs by config, the largest Kendall tau first."""
  by_config: dict[str, list[RunRecord]] = {}
  for run in runs:
    by_config.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)
  names = [_common_name([run.name for run in group]) for group in by_config.values()]
  groups = [
    RunGroup(name if names.count(name) == 1 else group[0].name, tuple(group))
    for name, group in zip(names, by_config.values())
  ]
  tau = lambda group: group.out_of_fold.spread(TAU)[0]
  return sorted(groups, key=lambda group: -np.nan_to_num(tau(group), nan=-2))


def _common_name(names: Sequence[str]) -> str:
  """`base` of `base/seed_0` and `base/seed_1`; the first name where nothing else is in common."""
  prefix = os.path.commonprefix(names)
  if prefix in names:
    return prefix
  common = re.sub(r"((^|[/,._-]+)(s|seed|fold)=?)?[/,._-]*\d*$", "", prefix)
  return common or f"{names[0]} and {len(names) - 1} more"


class Lead(NamedTuple):
  """How far the first of several groups is ahead of another one, graph by graph.

  Attributes:
    config: the other group's name.
    graphs: those with an order, in both.
    gain: mean over graphs of Kendall tau of the first minus Kendall tau of the other.
    better: graphs on which the first has the larger Kendall tau.
    spread: standard deviation (n - 1) over seeds of the gain; NaN if either has a single seed.
    p_value: of the Wilcoxon signed-rank test that pairs graphs; NaN with fewer than
      `FEWEST_TESTED` graphs that differ.
  """

  config: str
  graphs: int
  gain: float
  better: int
  spread: float
  p_value: float


def leads(groups: Sequence[RunGroup]) -> list[Lead]:
  """The first group beside every other group."""
  first, *others = groups
  rows = []
  for group in others:
    names = sorted(first.taus.keys() & group.taus.keys())
    change = np.array([first.taus[name] - group.taus[name] for name in names])
    is_tested = np.count_nonzero(change) >= FEWEST_TESTED
    p_value = float(scipy.stats.wilcoxon(change).pvalue) if is_tested else math.nan
    gain, better = metrics.mean(change), int((change > 0).sum())
    spread = _spread_of_gain(first, group)
    rows.append(Lead(group.name, len(change), gain, better, spread, p_value))
  return rows


def _spread_of_gain(first: RunGroup, second: RunGroup) -> float:
  """The spread over seeds of the difference in Kendall tau, of pairs of equal seeds where known."""
  first, second = first.out_of_fold, second.out_of_fold
  by_seed = lambda group: {run.seed: run.means.get(TAU, math.nan) for run in group.runs}
  ours, theirs = by_seed(first), by_seed(second)
  gains = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
  if len(gains) > 1:
    return float(np.std(gains, ddof=1))
  return math.hypot(first.spread(TAU)[1], second.spread(TAU)[1])


@dataclasses.dataclass(frozen=True)
class RunComparison:
  """Runs that compare: of one collection and kind of labels, judged on the same graphs.

  Attributes:
    runs: at least one.
    groups: by config, the largest Kendall tau first.
  """

  runs: tuple[RunRecord, ...]
  groups: tuple[RunGroup, ...]

  @property
  def references(self) -> dict[str, dict[str, float]]:
    """Metrics of other orders than the models', by name, on the graphs of the first group."""
    return self.groups[0].out_of_fold.whole.references

  @property
  def verdict(self) -> list[str]:
    """Which config is first, by how much, and how good its choices are, in sentences."""
    first, *others = self.groups
    if not first.judged:
      return [f"{', '.join(group.name for group in self.groups)}: not evaluated yet."]
    graphs = metrics.mean_of(len(first.graphs), first.without_order)
    where, of = ", ".join(map(str, first.folds)), first.runs[0].config.get("data.folds")
    where = f" out of fold (test folds {where} of {of})" * bool(first.folds)
    tau = f"Kendall tau {first.out_of_fold.spread(TAU)[0]:.3f}{where}, {graphs}"
    sentences = [f"{first.name}: {tau} (1 is the right order, 0 a random one)."]
    if others:
      sentences = [self._lead(tau)]
    sentences.append(self._first_choices())
    if first.taus:
      name = first.by_tau[0].name
      slowdown = first.by_graph(lambda graph: graph.slowdowns[1])[name]
      sentences.append(
        f"Its lowest Kendall tau is {first.taus[name]:.3f}, of {name}, whose first "
        f"choice is {_percent(slowdown)} slower than the fastest."
      )
    return sentences + self._behind_random()

  def _lead(self, tau: str) -> str:
    """Whether the first group is ahead of the second by more than the spread over seeds."""
    first, lead = self.groups[0].name, leads(self.groups)[0]
    test = f"p = {lead.p_value:.2g}, Wilcoxon signed rank"
    if math.isnan(lead.p_value):
      test = "too few graphs for a test"
    gain = f"{tau}, {lead.gain:.3f} above {lead.config}"
    by_graph = f"better on {lead.better} of {lead.graphs} ({test})"
    if math.isnan(lead.spread):
      chance = "Without several seeds of each, this may be chance."
      return f"{first} is ahead: {gain} and {by_graph}. {chance}"
    spread = f"the spread over seeds ({lead.spread:.3f})"
    if lead.gain > lead.spread:
      return f"{first} is first: {gain}, more than {spread}, and {by_graph}."
    return f"{first} and {lead.config} are level: {gain}, within {spread}, and {by_graph}."

  def _first_choices(self) -> str:
    """The slowdown of first choices, beside the slowdown of other orders."""
    first, *others = (group.out_of_fold for group in self.groups)
    means = {f"the first choice of {group.name}": group.means for group in others[:1]}
    means["a random one"] = self.references[RANDOM]
    end = ""
    if DEFAULT in self.references:
      means[DEFAULT] = self.references[DEFAULT]
      is_default = [graph.ranks[0][graph.default] == 0 for graph in first.judged]
      end = f"; {sum(is_default)} of {len(is_default)} first choices are the compiler's own"
    rest = ", ".join(f"{name} {_percent(of['slowdown1_mean'])}" for name, of in means.items())
    slowdown = _percent(first.means["slowdown1_mean"])
    return f"Its first choice is {slowdown} slower than the fastest configuration ({rest}){end}."

  def _behind_random(self) -> list[str]:
    """Says for which numbers of choices the best one is worse than the best of random ones."""
    first, worse = self.groups[0].out_of_fold, []
    judged = first.graphs
    most = max(len(graph.scores) for graph in judged)
    for k in sorted({5, *first.whole.ks} - {1}):
      best = metrics.mean(graph.slowdowns.get(k, 0.0) for graph in first.judged)
      random = metrics.mean(metrics.random_slowdown(graph.labels, [k])[k] for graph in judged)
      if k < most and best > random:
        worse.append(
          f"the best of {k} is {_percent(best)} slower, of {k} random ones {_percent(random)}"
        )
    return [f"Its first choices are behind random ones: {'; '.join(worse)}."] if worse else []


def _percent(slowdown: float) -> str:
  return f"{100 * slowdown:.2g} %" if slowdown < 1 else f"{100 * slowdown:.0f} %"


def comparisons(runs: Sequence[RunRecord]) -> list[RunComparison]:
  """The runs of each protocol; runs of different collections are separate."""
  by_protocol: dict[tuple[Any, ...], list[RunRecord]] = {}
  for run in runs:
    by_protocol.setdefault(run.protocol, []).append(run)
  return [RunComparison(tuple(some), tuple(groups_of(some))) for some in by_protocol.values()]


def differences(groups: Sequence[RunGroup]) -> list[list[str]]:
  """Fields in which the groups' configs differ, each with the value of every group."""
  configs = [group.runs[0].config for group in groups]
  rows = [
    [name, *(str(config.get(name, "none")) for config in configs)]
    for name in sorted(set().union(*configs))
  ]
  return [row for row in rows if len(set(row[1:])) > 1]


def read_all(folders: Sequence[str | os.PathLike[str]]) -> list[RunRecord]:
  """The runs of working folders, with as much of each path as tells them apart.

  Args:
    folders: of runs, or of sweeps, whose runs are all read.

  Raises:
    FileNotFoundError, ValueError: as `read`.
  """
  places = list(dict.fromkeys(place for folder in folders for place in _runs_in(folder)))
  paths = []
  for place in places:
    path = files.expanded(place).absolute()
    paths.append(Path(place.replace("://", "/")) if files.is_remote(place) else path)
  depth = 1
  while len({path.parts[-depth:] for path in paths}) < len(set(paths)):
    depth += 1
  runs = []
  for place, path in zip(places, paths):
    run, name = read(files.fetch(place)), console.printable("/".join(path.parts[-depth:]))
    runs.append(dataclasses.replace(run, name=name, folder=place))
  return runs


def _runs_in(folder: str | os.PathLike[str]) -> list[str]:
  """The folder of a run, or of the runs that have begun in a sweep (`POINT/seed_N`) or a point."""
  local = files.fetch(folder)
  if (local / "config.json").exists():
    return [os.fspath(folder)]
  configs = [*local.glob("*/config.json"), *local.glob("*/*/config.json")]
  runs = sorted(path.parent.relative_to(local) for path in configs)
  return [files.join(folder, *run.parts) for run in runs] or [os.fspath(folder)]


_ABOUT = {
  "command": str,
  "machine": str,
  "date": str,
  "versions": {...: str},
  "devices": trust.Record(kind=str, count=trust.COUNT),
}
_CONFIG = {
  "data": {"folds": trust.COUNT, "fold": trust.COUNT},
  "seed": trust.COUNT,
  "data_root": str,
  "task": str,
  "train": {"best_metric": str},
}
_MANIFEST = trust.Record(config=trust.Record(model=trust.Record(name=str)))
_JUDGED = trust.Record(
  split=str, graphs=trust.COUNT, configurations=str, configurations_judged=trust.COUNT
)
_SUMMARY = {
  "collection": str,
  "labels": str,
  "training": {
    "ended": str,
    "step": trust.COUNT,
    "seconds": trust.NUMBER,
    "peak_memory": trust.Record(bytes=trust.NUMBER),
    "best": trust.Record(step=trust.COUNT, value=(*trust.NUMBER, type(None))),
  },
  "validation": _JUDGED,
  "test": _JUDGED,
}
_ROW = trust.Record({"step": trust.COUNT, ...: (*trust.NUMBER, type(None))})


def read(folder: Path) -> RunRecord:
  """The run of a working folder.

  Raises:
    FileNotFoundError: no run was started there.
    ValueError: a file of the run is damaged.
  """
  path = folder / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: name a folder that a model was trained in")
  with trust.json_of(path, _MANIFEST, "train again") as manifest:
    trust.check(manifest, _ABOUT | {"config": _CONFIG}, "it")
    flat = traverse_util.flatten_dict(manifest["config"], sep=".")
    shown = lambda value: console.printable(value) if isinstance(value, str) else value
    config: dict[str, Any] = {name: shown(value) for name, value in flat.items()}
  seed = config.pop("seed", 0)
  data_root, path = config.pop("data_root", ""), folder / "summary.json"
  fold, is_divided = config.pop("data.fold", 0), bool(config.get("data.folds", 0))
  fold, division = fold if is_divided else None, ""
  if is_divided:
    division = json.dumps(folds.read(folder / folds.FILE)[0].fold_of, sort_keys=True)
  summary = {}
  if path.exists():
    with trust.json_of(path, _SUMMARY, "evaluate again") as summary:
      trust.check(summary.get("training", {"ended": ""}), trust.Record(ended=str), "training")
      if summary.get("collection"):
        Collection(summary["collection"])  # refuses what is none
  rows, name = _rows(folder / "metrics.jsonl"), folder.name or str(folder)
  about = {key: manifest[key] for key in _ABOUT if key in manifest}
  run = RunRecord(
    name, config, seed, summary, rows, (), str(folder), data_root, about, fold, division
  )
  scores = evaluation.SCORES_FILE.format(run.section)
  return dataclasses.replace(run, judged=_judged(folder / scores, run))


def _rows(path: Path) -> list[dict[str, Any]]:
  """Whole lines: the last one may be cut short while a run goes on."""
  rows = []
  for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
    try:
      row = trust.parse(line)
    except ValueError:
      continue
    with trust.reading(path, "remove the line"):
      trust.check(row, _ROW, f"line {number}")
    rows.append(row)
  return rows


def _judged(path: Path, run: RunRecord) -> tuple[ValidationGraph, ...]:
  if not path.exists():
    return ()
  if not run.collection:
    raise ValueError(f"{path.with_name('summary.json')} names no collection: evaluate again")
  # In a collection made by `collect`, whose labels are of a known kind, it is configuration 0.
  is_own = not Collection(run.collection).is_released
  has_default = is_own and run.labels not in (SYNTHETIC, UNKNOWN)
  judged = []
  for graph in evaluation.read_scores(path):
    ids = graph.config_ids
    default = int(np.argmin(ids)) if has_default and not ids.min() else None
    judged.append(ValidationGraph(**vars(graph), default=default))
  return tuple(judged)
