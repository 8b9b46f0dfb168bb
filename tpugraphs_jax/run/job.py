"""What a config is made of: data, and a ranker for them; which graphs take part."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any

import ml_collections

from tpugraphs_jax import registry
from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data import selection
from tpugraphs_jax.data.selection import LayoutData, TileData
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.run import checks
from tpugraphs_jax.serve.ranker import Ranker

_ALSO = "also"  # folder of the other collections' results


@dataclasses.dataclass(frozen=True)
class Job:
  """What a config is made of.

  Attributes:
    config: see `configs/`; `config.data_root` names the data.
    data: loads graphs and says what is learnt from them.
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
    with config.unlocked():
      config.extensions = registry.import_extensions(config.extensions)
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
    """Graphs as the ranker's batcher wants them."""
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
  """Graphs that nothing speaks against; the others are named. ValueError if none is left."""
  least, data = job.config.batch.min_configs, job.data
  kept = selection.keep(
      graphs, "training", lambda configs: data.why_not_trained(configs, min_configs=least))
  if not kept:
    raise ValueError(
        f"none of the {len(graphs)} training graphs of {data.collection.name} can be trained on: "
        f"the lines above say why (batch.min_configs is {least})")
  return kept


def judged(graphs: Sequence[OpGraph]) -> list[OpGraph]:
  """Labelled graphs with at least two configurations; the others are named."""
  return selection.keep(graphs, "evaluation", selection.why_not_judged)


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
    return TileData(collection, **common, config_features=tuple(data.config_features))
  return LayoutData(
      collection, **common, store_dir=data.store_dir,
      duplicate_policy=data.duplicate_policy, entropy_threshold=data.entropy_threshold,
      max_configs=data.max_configs,
      indices_dir=config.eval.indices_dir, max_validated=config.eval.max_configs,
      seed=config.seed)
