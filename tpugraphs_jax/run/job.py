"""A job: the data and the ranker that a config names, and the graphs that take part."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any

import ml_collections

from tpugraphs_jax import registry
from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data import features, selection
from tpugraphs_jax.data.selection import LayoutData, TileData
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers.settings import Settings
from tpugraphs_jax.run import schema
from tpugraphs_jax.serve import model_file
from tpugraphs_jax.serve.ranker import Ranker
from tpugraphs_jax.train import log

_ALSO = "also"  # folder of the other collections' results


@dataclasses.dataclass(frozen=True)
class Job:
  """The parts that a config names.

  Attributes:
    config: see `configs/`; `config.data_root` names the data.
    data: loads graphs and gives the targets of training.
    ranker: scores graphs.
    also: data of further layout collections that the network is trained on (`data.also`).
  """

  config: ml_collections.ConfigDict
  data: TileData | LayoutData
  ranker: Ranker
  also: tuple[LayoutData, ...] = ()

  @classmethod
  def of(cls, config: ml_collections.ConfigDict) -> Job:
    """The job of a config, which is refused (ValueError) if it cannot work."""
    registry.import_extensions(config.extensions)
    schema.check(config)
    ranker = Ranker(config.to_dict())
    own, *also = (_data_of(config, collection) for collection in (
        ranker.collection, *map(Collection, config.data.get("also", ()))))
    return cls(config, own, ranker, tuple(also))

  def judged_in(self, workdir: Path) -> list[tuple[Job, Path]]:
    """A job for each collection, with the folder of its results; the run's own comes last."""
    others = [(dataclasses.replace(self, data=data, also=()),
               workdir / _ALSO / data.collection.name.replace(":", "_")) for data in self.also]
    return [*others, (self, workdir)]

  def load(self, split: str) -> list[OpGraph]:
    """Graphs of a split of all collections that the network is trained on."""
    return [graph for data in (self.data, *self.also)
            for graph in data.load(self.config.data_root, split)]

  def prepare(self, graphs: Sequence[OpGraph]) -> list[Any]:
    """Graphs in the form that the ranker's family trains on and scores."""
    return [self.ranker.prepare(graph) for graph in graphs]

  def described(self, graphs: Sequence[OpGraph]) -> list[OpGraph]:
    """The graphs whose nodes the statistics of features describe.

    Args:
      graphs: training graphs, which take part in any case.
    """
    others = [split for split in self.config.data.get("fit_splits", ()) if split != "train"]
    return [*graphs, *(graph for split in others for graph in self.load(split))]

  def fit(self, graphs: Sequence[OpGraph]) -> None:
    """Fits the ranker's transforms on training graphs of all collections together."""
    seen, cut = self.described(graphs), None
    if self.config.data.get("fit_reduced", False):
      cut = [self.ranker.family.reduce(graph).nodes for graph in seen]
    self.ranker.features.fit(seen, cut)
    self.ranker.fit_configs([self.data.config_values(graph) for graph in graphs])


def trainable(job: Job, graphs: Sequence[OpGraph]) -> list[OpGraph]:
  """Graphs that can be trained on. Logs the name of every other graph and the reason.

  Raises:
    ValueError: no graph is left.
  """
  least, data = job.config.batch.min_configs, job.data
  kept = selection.keep(
      graphs, "training", lambda configs: data.why_not_trained(configs, min_configs=least))
  if not kept:
    raise ValueError(
        f"none of the {len(graphs)} training graphs of {data.collection.name} can be trained on: "
        f"the lines above say why (batch.min_configs is {least})")
  return kept


def judged(graphs: Sequence[OpGraph]) -> list[OpGraph]:
  """Labelled graphs with at least two configurations. Logs the name of every other graph."""
  return selection.keep(graphs, "evaluation", selection.why_not_judged)


def prepare(job: Job, workdir: Path, *, resume: bool) -> tuple[list[Any], list[Any]]:
  """Loads, fits and prepares graphs; the raw ones are not kept.

  Returns:
    Training graphs of all collections, and labelled validation graphs of the run's own.
  """
  config, data = job.config, job.data
  train_graphs = trainable(job, job.load("train"))
  valid_graphs = judged(data.load(config.data_root, "valid"))
  if not valid_graphs:
    raise ValueError(f"no labelled validation graph of {data.collection.name} in "
                     f"{config.data_root}; choosing the best checkpoint needs at least one")
  _fit_once(job, train_graphs, workdir, resume=resume)
  log.write_manifest(workdir, config.to_dict())
  for each in (data, *job.also):  # errors show before training
    for graph in valid_graphs if each is data else each.load(config.data_root, "valid"):
      each.validation_ids(graph.name, graph.configs)
  return job.prepare(train_graphs), job.prepare(valid_graphs)


def _fit_once(job: Job, graphs: Sequence[OpGraph], workdir: Path, *, resume: bool) -> None:
  """Fits the transforms; a run that goes on keeps those that it began with."""
  path = workdir / model_file.TRANSFORMS_FILE
  if parallel.from_primary(resume and path.exists()):
    job.ranker.use_transforms(parallel.on_primary(lambda: features.load(path)), where=path)
    return
  job.fit(graphs)
  if parallel.is_primary():
    features.save(path, job.ranker.transforms)


def digests(workdir: Path) -> dict[str, str]:
  """SHA-256 of the file with the transforms, if it is there."""
  path = workdir / model_file.TRANSFORMS_FILE
  return model_file.digests([path] if path.exists() else [], workdir)


def _data_of(config: ml_collections.ConfigDict, collection: Collection) -> TileData | LayoutData:
  found = Settings.of(config.to_dict())
  if collection.kind == "tile":
    return TileData(collection, found.data, found.batch.target)
  return LayoutData(collection, found.data, found.batch.target, found.eval, found.seed)
