"""A job: the data and the ranker that a config names, and the graphs that take part."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections

from tpugraphs_jax import parallel, registry
from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data import features, selection
from tpugraphs_jax.data.selection import LayoutData, TileData
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.run import checks
from tpugraphs_jax.serve import ranker as ranker_lib
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
    also: jobs of the other collections that the same network is trained on (`data.also`).
  """

  config: ml_collections.ConfigDict
  data: TileData | LayoutData
  ranker: Ranker
  also: tuple[Job, ...] = ()

  @classmethod
  def of(cls, config: ml_collections.ConfigDict) -> Job:
    """The job of a config, which is refused (ValueError) if it cannot work."""
    registry.import_extensions(config.extensions)
    checks.check(config)
    ranker = Ranker(config.to_dict())
    also = tuple(cls.of(_config_of(name, config)) for name in config.data.get("also", ()))
    return cls(config, _data_of(config, ranker.collection), ranker, also)

  def placed(self, workdir: Path) -> list[tuple[Job, Path]]:
    """This job and the others, each with the folder of its results."""
    return [(self, workdir), *(
        (other, workdir / _ALSO / other.data.collection.name.replace(":", "_"))
        for other in self.also)]

  def prepare(self, graphs: Sequence[OpGraph]) -> list[Any]:
    """Graphs in the form that the ranker's family trains on and scores."""
    return [self.ranker.prepare(graph) for graph in graphs]

  def fit(self, graphs: Sequence[OpGraph], also: Sequence[Sequence[OpGraph]] = ()) -> None:
    """Fits the rankers' transforms on training graphs.

    Nodes have one transform, fitted on all graphs. Configurations have one for all layouts
    and one for all tiles: a network cannot know of which collection a configuration is.

    Args:
      graphs: of this job.
      also: those of each other job.
    """
    everything = list(zip((self, *self.also), (graphs, *also), strict=True))
    self.ranker.features.fit([graph for _, own in everything for graph in own])
    for kind in {job.data.collection.kind for job, _ in everything}:
      of_kind = [(job, own) for job, own in everything if job.data.collection.kind == kind]
      values = [job.data.config_values(graph) for job, own in of_kind for graph in own]
      first, *others = (job.ranker for job, _ in of_kind)
      first.features.transforms = self.ranker.features.transforms
      first.fit_configs(values)
      for ranker in others:
        ranker.use_transforms(first.transforms, where="data.also")


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


class Prepared(NamedTuple):
  """Graphs with fitted transforms.

  Attributes:
    train: training graphs.
    valid: labelled validation graphs.
    also: training graphs of each of the job's other collections.
    files: SHA-256 of the files with the transforms, as checkpoints note them.
  """

  train: list[Any]
  valid: list[Any]
  also: list[list[Any]]
  files: dict[str, str]


def prepare(job: Job, workdir: Path, *, resume: bool) -> Prepared:
  """Loads, fits and prepares graphs; the raw ones are not kept."""
  config, data = job.config, job.data
  train_graphs, *also = (
      trainable(part, part.data.load(config.data_root, "train")) for part in (job, *job.also))
  valid_graphs = judged(data.load(config.data_root, "valid"))
  if not valid_graphs:
    raise ValueError(f"no labelled validation graph of {data.collection.name} in "
                     f"{config.data_root}; choosing the best checkpoint needs at least one")
  _fit_once(job, train_graphs, also, workdir, resume=resume)
  files = digests(job, workdir)
  log.write_manifest(workdir, config.to_dict())
  valid = job.prepare(valid_graphs)
  for part in (job, *job.also):  # errors show before training
    for graph in valid_graphs if part is job else part.data.load(config.data_root, "valid"):
      part.data.validation_ids(graph.name, graph.configs)
  return Prepared(job.prepare(train_graphs), valid, [
      other.prepare(graphs) for other, graphs in zip(job.also, also)], files)


def _fit_once(
    job: Job, graphs: Sequence[OpGraph], also: Sequence[Sequence[OpGraph]], workdir: Path, *,
    resume: bool,
) -> None:
  """Fits the transforms; a run that goes on keeps those that it began with."""
  files = {folder / ranker_lib.TRANSFORMS_FILE: part.ranker for part, folder in job.placed(workdir)}
  are_there = parallel.from_primary([resume and path.exists() for path in files])
  if not all(are_there):
    job.fit(graphs, also)
  for is_there, (path, ranker) in zip(are_there, files.items()):
    if is_there:
      use_saved(ranker, path)
    elif parallel.is_primary():
      path.parent.mkdir(parents=True, exist_ok=True)
      features.save(path, ranker.transforms)


def digests(job: Job, workdir: Path) -> dict[str, str]:
  """SHA-256 of the files with the transforms, of those that are there."""
  files = [folder / ranker_lib.TRANSFORMS_FILE for _, folder in job.placed(workdir)]
  return ranker_lib.digests([path for path in files if path.exists()], workdir)


def use_saved(ranker: Ranker, path: Path) -> None:
  """Gives a ranker the transforms that process 0 finds in a file."""
  ranker.use_transforms(parallel.on_primary(lambda: features.load(path)), where=path)


def _config_of(name: str, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """The config of another collection for the same network."""
  other, (kind, source, *search) = config.copy_and_resolve_references(), name.split(":")
  with other.unlocked():
    other.task = kind
    other.data.update(source=source, search="".join(search), also=())
    if kind == "tile":
      other.data.update(config_features=("released",), config_transform="none")
  return other


def _data_of(
    config: ml_collections.ConfigDict, collection: Collection
) -> TileData | LayoutData:
  data, common = config.data, dict(
      skip_bad_files=config.data.skip_bad_files, target=config.batch.target)
  if collection.kind == "tile":
    return TileData(collection, **common, config_features=tuple(data.config_features),
                    duplicate_policy=data.get("duplicate_policy", "keep"))
  return LayoutData(
      collection, **common, config_features=tuple(data.config_features),
      store_dir=data.store_dir, leave_out=tuple(data.get("leave_out", ())),
      skip_constant=data.skip_constant,
      duplicate_policy=data.duplicate_policy, entropy_threshold=data.entropy_threshold,
      max_configs=data.max_configs,
      indices_dir=config.eval.indices_dir, max_validated=config.eval.max_configs,
      seed=config.seed)
