"""Loads the graphs of a run, and fits the transforms of its ranker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpugraphs_jax.data import folds, selection, transforms
from tpugraphs_jax.data.selection import Data, LayoutData, TileData
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import files, parallel
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.config import Config, LayoutDataOptions
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.train import log

_ALSO = "also"  # folder for results of further collections


def data_of(config: Config) -> tuple[Data, ...]:
  """The collections of a run: the one that the config names, then those of `data.also`."""
  section, target, first = config.data, config.batch.target, config.collection
  if not isinstance(section, LayoutDataOptions):
    return (TileData(first, config.data_root, section, target, (first.name,)),)
  collections = (first, *map(Collection, section.also))
  names = tuple(collection.name for collection in collections)
  return tuple(
    LayoutData(collection, config.data_root, section, target, names, config.eval, config.seed)
    for collection in collections
  )


def with_folders(collections: Sequence[Data], workdir: Path) -> list[tuple[Data, Path]]:
  """The collections of a run with the folders of their results; the first collection comes last."""
  first, *others = collections
  folder = lambda data: workdir / _ALSO / data.collection.name.replace(":", "_")
  return [*((data, folder(data)) for data in others), (first, workdir)]


def trainable(data: Data, graphs: Sequence[OpGraph], *, min_configs: int) -> list[OpGraph]:
  """Graphs that can be trained on. Logs every graph that cannot, with the reason.

  Raises:
    ValueError: no graph is left.
  """
  why_not = lambda configs: data.why_not_trained(configs, min_configs=min_configs)
  result = selection.keep(graphs, "training", why_not)
  if not result:
    raise ValueError(
      f"none of the {len(graphs)} training graphs of {data.collection.name} can be trained on: "
      f"the lines above say why (batch.min_configs is {min_configs})"
    )
  return result


def evaluable(graphs: Sequence[OpGraph]) -> list[OpGraph]:
  """Labelled graphs with at least two configurations. Logs the names of all other graphs."""
  return selection.keep(graphs, "evaluation", selection.why_not_judged)


def fit(ranker: Ranker, collections: Sequence[Data], train_graphs: Sequence[OpGraph]) -> None:
  """Fits the transforms of a ranker on training graphs of all collections together.

  Transforms of node features are also fitted on the graphs of `data.fit_splits`.
  """
  config, nodes = ranker.config, None
  graphs = list(train_graphs)
  for split in (split for split in config.data.fit_splits if split != "train"):
    graphs += _load(collections, split)
  if config.data.fit_reduced:
    nodes = [ranker.family.reduce(graph).nodes for graph in graphs]
  ranker.features.fit(graphs, nodes)
  ranker.fit_configs([collections[0].config_values(graph) for graph in train_graphs])


def _load(collections: Sequence[Data], split: str) -> list[OpGraph]:
  return [graph for data in collections for graph in data.load(split)]


def load_graphs(
  ranker: Ranker, collections: Sequence[Data], workdir: Path, *, resume: bool
) -> tuple[list[Any], list[Any]]:
  """Loads graphs, fits transforms (a resumed run loads them) and prepares the graphs.

  Returns:
    Training graphs of all collections, and labelled validation graphs of the first one.
  """
  config, data = ranker.config, collections[0]
  if not resume:
    forget_folds(collections, workdir)
  keep_folds(collections, workdir)
  train_graphs = _load(collections, "train")
  train_graphs = trainable(data, train_graphs, min_configs=config.batch.min_configs)
  valid_graphs = evaluable(data.load("valid"))
  if not any(graph.configs.has_order for graph in valid_graphs):
    raise ValueError(
      f"no labelled validation graph of {data.collection.name} in {config.data_root} whose "
      "runtimes and features of configurations differ; choosing the best checkpoint needs one"
    )
  path = workdir / model_file.TRANSFORMS_FILE
  if parallel.from_primary(resume and path.exists()):
    ranker.use_transforms(parallel.on_primary(lambda: transforms.load(path)), where=path)
  else:
    fit(ranker, collections, train_graphs)
    parallel.primary_only(transforms.save)(path, ranker.transforms)
  log.write_manifest(workdir, config.to_dict())
  for collection in collections:  # raises before training starts
    for graph in valid_graphs if collection is data else collection.load("valid"):
      collection.validation_ids(graph.name, graph.configs)
  return [ranker.prepare(graph) for graph in train_graphs], list(map(ranker.prepare, valid_graphs))


def forget_folds(collections: Sequence[Data], workdir: Path) -> None:
  """Removes the folds of an earlier run."""

  def forget() -> None:
    for _, folder in with_folders(collections, workdir):
      (folder / folds.FILE).unlink(missing_ok=True)

  parallel.on_primary(forget)


def keep_folds(collections: Sequence[Data], workdir: Path) -> None:
  """Writes the folds of a run beside its results, or compares them with an earlier file.

  Raises:
    ValueError: the folds differ, because the files of the data have changed.
  """

  def keep() -> None:
    for data, folder in with_folders(collections, workdir):
      division, fold = data.division(), data.options.fold
      if not (folder / folds.FILE).exists():
        division.write(folder / folds.FILE, fold)
      else:
        division.check(folder / folds.FILE, fold)

  if collections[0].options.folds:
    parallel.on_primary(keep)


def transforms_digest(workdir: Path) -> dict[str, str]:
  """SHA-256 of the file of transforms; empty without one."""
  path = workdir / model_file.TRANSFORMS_FILE
  return {path.name: files.digest_of(path)} if path.exists() else {}
