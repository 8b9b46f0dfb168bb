"""Loads collections, and selects the graphs and configurations of a run.

`TileData` and `LayoutData` load the graphs of a split, give reasons to leave graphs out of training
or evaluation, select configurations, and compute training targets. The log names and counts graphs
and files that are left out.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Generic

from absl import logging
import numpy as np

from tpugraphs_jax.config_fields import option, Options
from tpugraphs_jax.data import batching, features, folds, graph_folder, npz, store
from tpugraphs_jax.data.factoring import output_orders
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.graph import Configs, distinct_rows, LayoutConfigs, OpGraph, TileConfigs
from tpugraphs_jax.infra import files, trust

TARGETS = ("official", "ratio", "rank", "absolute")
_LAYOUT_UNIT_NS = 1e7  # unit of layout labels in the official code
DUPLICATE_POLICIES = ("keep", "first", "min")


@dataclasses.dataclass(frozen=True)
class TileOptions(Options):
  """The kernels and tiles of a run."""

  section = "data"
  skip_bad_files: bool = option(False, "leave out malformed files, by name, instead of stopping")
  config_features: tuple[str, ...] = option(
    ("released",), "blocks of features of a tile", one_of=features.CONFIG_FEATURES["tile"]
  )
  duplicate_policy: str = option(
    "keep",
    "equal configurations of a training graph: keep all, the first, or the fastest (min)",
    one_of=DUPLICATE_POLICIES,
  )
  folds: int = option(
    0, "divide labelled graphs of train and valid into folds; 0 = the released splits", least=0
  )
  fold: int = option(0, "the fold that is the test split; the next one validates", least=0)

  def check(self) -> None:
    """Refuses (ValueError) folds that cannot test, validate and train."""
    if 0 < self.folds < folds.LEAST:
      raise ValueError(
        f"data.folds is {self.folds}, expected 0 (the released splits) or at least {folds.LEAST}: "
        "one fold tests, one validates, the others train"
      )
    if self.fold >= max(self.folds, 1):
      raise ValueError(
        f"data.fold is {self.fold}, expected less than data.folds, which is {self.folds}"
      )


@dataclasses.dataclass(frozen=True)
class LayoutOptions(TileOptions):
  """The programs and layouts of a run."""

  config_features: tuple[str, ...] = option(
    ("released",),
    "integers of a configurable node: all 18, or outputs, the 6 of its output",
    one_of=features.CONFIG_FEATURES["layout"],
  )
  store_dir: str = option("", "random-access copy; empty = <data_root>/store")
  leave_out: tuple[str, ...] = option(
    (), "leave out training graphs with one of these words in the name"
  )
  skip_constant: bool = option(
    True, "leave out training graphs whose configurations or runtimes are all equal"
  )
  max_configs: int = option(
    0, "most configurations of a training graph: thirds fastest, slowest, random; 0 = all", least=0
  )


@dataclasses.dataclass(frozen=True)
class JudgedOptions(Options):
  """The layouts that the final evaluation judges."""

  section = "eval"
  indices_dir: str = option("", "folder of the published validation indices; empty = none")
  max_configs: int = option(1000, "most configurations per graph (seeded sample); 0 = all", least=0)


@dataclasses.dataclass(frozen=True)
class Data(Generic[Configs]):
  """Base of tile and layout collections.

  Attributes:
    collection: of graphs of one kind.
    root: folder or bucket with `tile/` and `layout/`.
    options: of graphs and configurations.
    target: one of `TARGETS`.
    together: names of all collections of the run; in each of them a cohort has the same fold.
  """

  collection: Collection
  root: str = ""
  options: TileOptions = TileOptions()
  target: str = "official"
  together: tuple[str, ...] = ()

  def division(self) -> folds.Division:
    """The folds of the collections of the run.

    Raises:
      ValueError, FileNotFoundError: as `folds.divide`.
    """
    names = self.together or (self.collection.name,)
    skip = self.options.skip_bad_files
    return folds.divide(self.root, names, self.options.folds, skip_bad_files=skip)

  def files(self, split: str) -> list[Path]:
    """The files of a split, or with `data.folds` of its folds, sorted by name.

    Raises:
      ValueError, FileNotFoundError: as `npz.split_files` and `folds.divide`.
    """
    if not self.options.folds:
      return npz.split_files(self.root, self.collection.name, split)
    return self.division().files(self.root, self.collection, self.options.fold, split)

  def load(self, split: str) -> list[OpGraph[Configs]]:
    """Graphs of a split, sorted by name; options for training apply to the split `train`.

    Raises:
      ValueError: a file is malformed (with `skip_bad_files`: all files are).
      FileNotFoundError: there are no files.
    """
    files = self.files(split)
    try:
      graphs = self._read(files)
    except npz.NpzError as error:
      raise ValueError(f"{error}; data.skip_bad_files=True leaves such files out") from None
    if not graphs:
      raise ValueError(f"all {len(files)} files in {files[0].parent} are malformed")
    if len(graphs) < len(files):
      skipped = len(files) - len(graphs)
      logging.warning(f"skipped {skipped} of {len(files)} files in {files[0].parent}")
    return self._for_training(graphs) if split == "train" else graphs

  def _read(self, files: Sequence[Path]) -> list[OpGraph[Configs]]:
    raise NotImplementedError

  def _for_training(self, graphs: list[OpGraph[Configs]]) -> list[OpGraph[Configs]]:
    return [drop_duplicates(graph, self.options.duplicate_policy) for graph in graphs]

  def why_not_trained(self, configs: Configs, *, min_configs: int) -> str:
    """The reason to leave a graph out of training; empty if there is none."""
    if len(configs) < min_configs:
      return f"fewer than {min_configs} configurations"
    return "" if configs.is_labelled else "no runtimes"

  def config_values(self, graph: OpGraph[Configs]) -> np.ndarray:
    """Values `[n, F]` of a graph to fit the transform of configurations on."""
    raise NotImplementedError

  def targets(self, configs: Configs, config_ids: np.ndarray) -> np.ndarray:
    """Training target `[len(config_ids)]` float32, larger = slower."""
    raise NotImplementedError

  def validation_ids(self, name: str, configs: Configs) -> np.ndarray:
    """Configurations `[n]` int64 of the final evaluation of the graph `name`: all."""
    del name
    return np.arange(len(configs))


class TileData(Data[TileConfigs]):
  """A tile collection: fused kernels, read from their files."""

  def _read(self, files: Sequence[Path]) -> list[OpGraph[TileConfigs]]:
    graphs = []
    for path in files:
      try:
        graphs.append(npz.read_tile(path))
      except npz.NpzError as error:
        if not self.options.skip_bad_files:
          raise
        logging.warning(f"skipped {error}")
    return graphs

  def config_values(self, graph: OpGraph[TileConfigs]) -> np.ndarray:
    """Values to fit the transform of configurations on, `[C, 24 or more]` float32."""
    graph = features.with_config_features(graph, self.options.config_features)
    return graph.configs.config_feat

  def targets(self, configs: TileConfigs, config_ids: np.ndarray) -> np.ndarray:
    """Training target `[len(config_ids)]` float32, larger = slower."""
    if self.target == "absolute":
      return (configs.runtime_ns / configs.unit_ns("absolute"))[config_ids].astype(np.float32)
    return slate_target(configs.labels[config_ids], self.target)


@dataclasses.dataclass(frozen=True)
class LayoutData(Data[LayoutConfigs]):
  """A layout collection: whole programs, read through the store.

  Attributes:
    judged: options of the final evaluation.
    seed: of samples.
  """

  options: LayoutOptions = LayoutOptions()
  judged: JudgedOptions = JudgedOptions()
  seed: int = 0

  def _read(self, files: Sequence[Path]) -> list[OpGraph[LayoutConfigs]]:
    name, store_dir = self.collection.name, self.options.store_dir or None
    skip = self.options.skip_bad_files
    folders: dict[tuple[str, str], Path] = {}
    for split in sorted({file.parent.name for file in files}):
      built = store.ensure_store(self.root, name, split, store_dir=store_dir, skip_bad_files=skip)
      folders |= {(split, folder.name): folder for folder in built}
    places = [(file.parent.name, file.stem) for file in files]
    graphs = [graph_folder.read(folders[place]) for place in places if place in folders]
    return list(map(output_orders, graphs)) if "outputs" in self.options.config_features else graphs

  def _for_training(self, graphs: list[OpGraph[LayoutConfigs]]) -> list[OpGraph[LayoutConfigs]]:
    graphs = self._left(graphs)
    total = sum(len(graph.configs) for graph in graphs)
    graphs = [self._limit_configs(graph) for graph in super()._for_training(graphs)]
    rest = sum(len(graph.configs) for graph in graphs)
    if rest < total:
      logging.info(
        f"{self.collection.name}: data.duplicate_policy and data.max_configs keep {rest:,} of "
        f"{total:,} training configurations"
      )
    return graphs

  def _left(self, graphs: list[OpGraph[LayoutConfigs]]) -> list[OpGraph[LayoutConfigs]]:
    words = self.options.leave_out
    left = [graph for graph in graphs if not any(word in graph.name for word in words)]
    if len(left) < len(graphs):
      count = f"{len(graphs) - len(left)} of {len(graphs)} training graphs"
      logging.warning(f"data.leave_out leaves out {count} of {self.collection.name}")
    return left

  def _limit_configs(self, graph: OpGraph[LayoutConfigs]) -> OpGraph[LayoutConfigs]:
    if not 0 < self.options.max_configs < len(graph.configs):
      return graph
    rng = np.random.default_rng(self.seed)
    ids = thirds(graph.configs.labels, self.options.max_configs, rng)
    return dataclasses.replace(graph, configs=graph.configs.subset(ids))

  def config_values(self, graph: OpGraph[LayoutConfigs]) -> np.ndarray:
    """Values to fit the transform of configurations on, `[R, 18]` int8."""
    return graph.configs.rows

  def why_not_trained(self, configs: LayoutConfigs, *, min_configs: int) -> str:
    """The reason to leave a program out of training; empty if there is none."""
    reason = super().why_not_trained(configs, min_configs=min_configs)
    if reason or not self.options.skip_constant:
      return reason
    if not configs.differ:
      return "all configurations equal"
    return "all runtimes equal" if np.ptp(configs.labels) == 0 else ""

  def targets(self, configs: LayoutConfigs, config_ids: np.ndarray) -> np.ndarray:
    """Training target `[len(config_ids)]` float32, larger = slower."""
    labels = configs.labels[config_ids]
    if self.target == "absolute":
      return (labels / batching.ABSOLUTE_UNIT).astype(np.float32)
    if self.target == "official":  # float32 as published: it decides which labels are ties
      return labels.astype(np.float32) / np.float32(_LAYOUT_UNIT_NS)
    return slate_target(labels, self.target)

  @functools.cached_property
  def _indices(self) -> dict[str, np.ndarray]:
    _, source, search = self.collection.name.split(":")
    return _load_indices(self.judged.indices_dir, source, search)

  def validation_ids(self, name: str, configs: LayoutConfigs) -> np.ndarray:
    """Configurations of the final evaluation, `[n]` int64.

    The published indices with `indices_dir`, else all configurations or a seeded sample.
    """
    if self.judged.indices_dir:
      return _select_indices(self._indices, name, len(configs))
    return some_configs(len(configs), self.judged.max_configs, np.random.default_rng(self.seed))


def keep(
  graphs: Sequence[OpGraph[Configs]], purpose: str, why_not: Callable[[Configs], str]
) -> list[OpGraph[Configs]]:
  """Graphs to keep. Logs the graphs that are left out, with their reasons.

  Args:
    graphs: of one kind.
    purpose: of the graphs, for the log.
    why_not: the reason to leave out a graph with these configurations; empty without one.
  """
  usable: list[OpGraph[Configs]] = []
  skipped: dict[str, list[OpGraph[Configs]]] = collections.defaultdict(list)
  for graph in graphs:
    reason = why_not(graph.configs)
    (skipped[reason] if reason else usable).append(graph)
  for reason, group in skipped.items():
    names = ", ".join(graph.name for graph in group)
    count = f"{len(group)} of {len(graphs)} graphs"
    logging.warning(f"skipped {count} for {purpose}: {reason}: {names}")
  return usable


def why_not_judged(configs: TileConfigs | LayoutConfigs) -> str:
  """The reason to leave a graph out of evaluation; empty if there is none."""
  if len(configs) < 2:
    return "fewer than 2 configurations"
  return "" if configs.is_labelled else "no runtimes (ranked, not scored)"


def check_kind(graph: OpGraph, kind: type) -> None:
  """Refuses (ValueError) a graph whose configurations are not of the class `kind`."""
  if not isinstance(graph, OpGraph):
    raise ValueError(
      f"the graph is a {type(graph).__name__}, expected an OpGraph: read a file "
      "with tpugraphs_jax.read_layout or read_tile, a program with hlo.featurize"
    )
  if graph.configs is None:
    raise ValueError(
      f"{graph.name} has no configurations to rank: call graph.with_layouts(300) of "
      "a program from hlo.featurize, or read it with its configurations"
    )
  if not isinstance(graph.configs, kind):
    given = type(graph.configs).__name__
    raise ValueError(f"{graph.name} has configs of type {given}; the model ranks {kind.__name__}")


def drop_duplicates(graph: OpGraph[Configs], policy: str) -> OpGraph[Configs]:
  """Merges equal configurations.

  Args:
    graph: program or kernel.
    policy: `keep` merges nothing, as the official baseline and Graph Segment Training; `first`
      takes the first measurement (1st place of the competition), `min` the fastest (2nd place).
      Configurations stay in the order of their first occurrence. The fastest tile has the smallest
      runtime / normalizer, and `min` takes both numbers from it.
  """
  if policy == "keep":
    return graph
  configs = graph.configs
  first, which = distinct_rows(configs.choices)
  kept = configs.subset(first)
  if policy == "min":
    order = np.lexsort((configs.labels, which))
    kept = configs.subset(order[np.searchsorted(which[order], np.arange(len(first)))])
  return dataclasses.replace(graph, configs=kept)


def _load_indices(indices_dir: str, source: str, search: str) -> dict[str, np.ndarray]:
  """Configuration numbers by graph name.

  Args:
    indices_dir: folder with `<source>_<search>.json`, as published with the data.
    source: `xla` or `nlp`.
    search: `random` or `default`.

  Returns:
    `[n]` int64 for each graph, as published: a number may occur twice.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is not a table of index lists.
  """
  path = files.fetch(indices_dir) / f"{source}_{search}.json"
  if not path.exists():
    raise FileNotFoundError(
      f"{path} is missing: eval.indices_dir must name the folder with the published index files"
    )
  with trust.json_of(path, {...: [int]}, "expected a table of configuration numbers") as table:
    if not all(table.values()):
      raise ValueError("a graph has no number")
    return {name: np.array(ids, np.int64) for name, ids in table.items()}


def _select_indices(indices: dict[str, np.ndarray], name: str, configs: int) -> np.ndarray:
  """The configuration numbers of one graph, `[n]` int64.

  Raises:
    ValueError: the graph is not in the table, or has fewer configurations.
  """
  if name not in indices:
    raise ValueError(
      f"the published validation indices do not name graph {name}; leave "
      "eval.indices_dir empty for other data"
    )
  ids = indices[name]
  wrong = ids[(ids < 0) | (ids >= configs)]
  if len(wrong):
    raise ValueError(f"validation index {wrong[0]} of {name}, which has {configs} configurations")
  return ids


def some_configs(total: int, limit: int, rng: np.random.Generator) -> np.ndarray:
  """Ascending numbers of at most `limit` of `total` configurations, `[n]` int64; 0 = all."""
  if not 0 < limit < total:
    return np.arange(total)
  return np.sort(rng.choice(total, limit, replace=False))


def slate_target(label: np.ndarray, kind: str) -> np.ndarray:
  """The target of a model for one slate, `[C]` float32, larger = slower.

  Targets are computed in the dtype of the labels and then rounded to float32: `rank` keeps distinct
  labels distinct, `ratio` labels whose ratios differ in float32.

  Args:
    label: `[C]` int64 or float64 labels of the slate.
    kind: `official`: the label; `ratio`: label / smallest label - 1; `rank`: share of the other
      distinct labels of the slate that are smaller (4th place of the competition).
  """
  if kind == "official":
    return label.astype(np.float32)
  if kind == "ratio":
    fastest = label.min()
    return ((label - fastest) / fastest).astype(np.float32)
  distinct, rank = np.unique(label, return_inverse=True)
  return (rank / max(len(distinct) - 1, 1)).astype(np.float32)


def thirds(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
  """Selects configurations: a third the fastest, a third the slowest, the rest at random.

  Args:
    labels: `[C]` int64.
    count: number of configurations to select.
    rng: source of randomness.

  Returns:
    `[min(count, C)]` ascending configuration numbers.

  Source: `max_configs` of the official layout trainer.
  """
  order = np.argsort(labels, kind="stable")
  if count >= len(order):
    return np.arange(len(order))
  third = count // 3
  middle = rng.choice(order[third : len(order) - third], count - 2 * third, replace=False)
  return np.sort(np.concatenate([order[:third], middle, order[len(order) - third :]]))
