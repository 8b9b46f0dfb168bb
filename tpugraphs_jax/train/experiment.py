"""The data and the ranker of a config, and the graphs of a run."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any

from tpugraphs_jax.data import features, folds, selection
from tpugraphs_jax.data.selection import Data, LayoutData, TileData
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import files, parallel
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.config import Config, LayoutDataOptions
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.train import log

_ALSO = "also"  # folder for results of further collections


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The data and the ranker of a config.

  Attributes:
    config: see `configs/`; `config.data_root` is the folder of the data.
    data: loads graphs and computes training targets.
    ranker: scores graphs.
    also: further layout collections that the network is trained on (`data.also`).
  """

  config: Config
  data: Data
  ranker: Ranker
  also: tuple[Data, ...] = ()

  @classmethod
  def of(cls, config: Config) -> Experiment:
    """The experiment of a config; refuses (ValueError) a config that cannot work."""
    ranker = Ranker(config)
    also = config.data.also if isinstance(config.data, LayoutDataOptions) else ()
    collections = (ranker.collection, *map(Collection, also))
    together = tuple(collection.name for collection in collections)
    first, *others = (_create_data(config, each, together) for each in collections)
    return cls(config, first, ranker, tuple(others))

  def evaluations(self, workdir: Path) -> list[tuple[Experiment, Path]]:
    """The experiment and result folder of each collection; `data.also` comes first."""
    folder = lambda data: workdir / _ALSO / data.collection.name.replace(":", "_")
    others = [(dataclasses.replace(self, data=data, also=()), folder(data)) for data in self.also]
    return [*others, (self, workdir)]

  def load(self, split: str) -> list[OpGraph]:
    """Graphs of a split, from all collections that the network is trained on."""
    parts = [data.load(self.config.data_root, split) for data in (self.data, *self.also)]
    return [graph for graphs in parts for graph in graphs]

  def prepare(self, graphs: Sequence[OpGraph]) -> list[Any]:
    """Graphs prepared for training and scoring; see `Ranker.prepare`."""
    return [self.ranker.prepare(graph) for graph in graphs]

  def fit_transforms(self, train_graphs: Sequence[OpGraph]) -> None:
    """Fits the ranker's transforms on training graphs of all collections together.

    Transforms of node features are also fitted on the graphs of `data.fit_splits`.
    """
    section, nodes = self.config.data, None
    others = [split for split in section.fit_splits if split != "train"]
    graphs = [*train_graphs, *(graph for split in others for graph in self.load(split))]
    if section.fit_reduced:
      nodes = [self.ranker.family.reduce(graph).nodes for graph in graphs]
    self.ranker.features.fit(graphs, nodes)
    self.ranker.fit_configs([self.data.config_values(graph) for graph in train_graphs])


def trainable(experiment: Experiment, graphs: Sequence[OpGraph]) -> list[OpGraph]:
  """Graphs that can be trained on. Logs every graph that cannot, with the reason.

  Raises:
    ValueError: no graph is left.
  """
  least, data = experiment.config.batch.min_configs, experiment.data
  why_not = lambda configs: data.why_not_trained(configs, min_configs=least)
  result = selection.keep(graphs, "training", why_not)
  if not result:
    raise ValueError(
      f"none of the {len(graphs)} training graphs of {data.collection.name} can be trained on: "
      f"the lines above say why (batch.min_configs is {least})"
    )
  return result


def evaluable(graphs: Sequence[OpGraph]) -> list[OpGraph]:
  """Labelled graphs with at least two configurations. Logs the names of all other graphs."""
  return selection.keep(graphs, "evaluation", selection.why_not_judged)


def load_graphs(experiment: Experiment, workdir: Path, *, resume: bool) -> tuple[list, list]:
  """Loads graphs, fits transforms (a resumed run loads them) and prepares the graphs.

  Returns:
    Training graphs of all collections, and labelled validation graphs of `experiment.data`.
  """
  config, data = experiment.config, experiment.data
  keep_folds(experiment, workdir, replace=not resume)
  train_graphs = trainable(experiment, experiment.load("train"))
  valid_graphs = evaluable(data.load(config.data_root, "valid"))
  if not any(graph.configs.has_order for graph in valid_graphs):
    raise ValueError(
      f"no labelled validation graph of {data.collection.name} in {config.data_root} whose "
      "runtimes and features of configurations differ; choosing the best checkpoint needs one"
    )
  path = workdir / model_file.TRANSFORMS_FILE
  if parallel.from_primary(resume and path.exists()):
    experiment.ranker.use_transforms(parallel.on_primary(lambda: features.load(path)), where=path)
  else:
    experiment.fit_transforms(train_graphs)
    parallel.primary_only(features.save)(path, experiment.ranker.transforms)
  log.write_manifest(workdir, config.to_dict())
  for each in (data, *experiment.also):  # raises before training starts
    for graph in valid_graphs if each is data else each.load(config.data_root, "valid"):
      each.validation_ids(graph.name, graph.configs)
  return experiment.prepare(train_graphs), experiment.prepare(valid_graphs)


def keep_folds(experiment: Experiment, workdir: Path, *, replace: bool = False) -> None:
  """Writes the folds of a run beside its results, or compares them with an earlier file.

  Args:
    experiment: with the data.
    workdir: the working folder.
    replace: removes an earlier file.

  Raises:
    ValueError: the folds differ, because the files of the data have changed.
  """

  def keep() -> None:
    for each, folder in experiment.evaluations(workdir):
      if replace:
        (folder / folds.FILE).unlink(missing_ok=True)
      if experiment.config.data.folds:
        each.data.division(experiment.config.data_root).keep(folder, experiment.config.data.fold)

  parallel.on_primary(keep)


def transforms_digest(workdir: Path) -> dict[str, str]:
  """SHA-256 of the file of transforms; empty without one."""
  path = workdir / model_file.TRANSFORMS_FILE
  return {path.name: files.digest_of(path)} if path.exists() else {}


def _create_data(config: Config, collection: Collection, together: tuple[str, ...]) -> Data:
  section, target = config.data, config.batch.target
  if isinstance(section, LayoutDataOptions):
    return LayoutData(collection, section, target, together, config.eval, config.seed)
  return TileData(collection, section, target, together)
