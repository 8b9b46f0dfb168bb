"""A trained ranker ready for use: from graphs to scores and orders.

    config -> features, ranker family                 `Ranker(config)`
    transforms and parameters                         fitted and trained, or loaded
    OpGraph -> prepare -> scorer                      validation, evaluation, own programs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import functools
import os
from pathlib import Path
from typing import Any

from absl import logging
import jax
import numpy as np

from tpugraphs_jax import collections, parallel, rankers, registry, remote
from tpugraphs_jax.data import feature_blocks, features, selection
from tpugraphs_jax.graph import (
    BEFORE_LAYOUTS, LOWERED, LayoutConfigs, OpGraph, TileConfigs, output_orders)
from tpugraphs_jax.rankers.scorer import Scorer
from tpugraphs_jax.serve import saved, shipped
from tpugraphs_jax.serve.saved import Artefact
from tpugraphs_jax.train import loop

_CONFIGS = {"tile": TileConfigs, "layout": LayoutConfigs}


class Ranker:
  """Everything that turns graphs into scores, made from a config.

  Args:
    config: nested fields, see `configs/`; training's own fields are not read.

  Attributes:
    config: the same.
    collection: whose graphs it ranks.
    features: node features, with their transforms once fitted or loaded.
    family: what is particular to the kind of ranker, see `rankers.base`.
    params: of the family's network, once trained or loaded.
    about: where a loaded model comes from: step, labels, versions, ...

  Raises:
    ValueError: what the config asks for cannot be.
  """

  def __init__(self, config: Mapping[str, Any]):
    registry.import_extensions(config["extensions"])
    self.config, data = config, config["data"]
    kind = "tile" if config["task"] == "tile" else "layout"
    self.collection = collections.of(kind, data["source"], data["search"])
    self.features = features.NodeFeatures(
        data["features"], kinds=data["feature_transform"],
        options=feature_blocks.Options(
            data["pad_value"], data["extra_dir"] and str(remote.fetch(data["extra_dir"]))))
    self.family = rankers.create(config, self.features.unscaled)
    self.params: Any = None
    self.about: Mapping[str, Any] = {}

  def __repr__(self) -> str:
    state = "not trained" if self.params is None else (
        f"{sum(leaf.size for leaf in jax.tree.leaves(self.params)):,} parameters")
    return f"<Ranker {self.config['model']['name']} of {self.collection.name}: {state}>"

  @classmethod
  def load(
      cls, place: str | os.PathLike[str], config: Mapping[str, Any] | None = None
  ) -> Ranker:
    """The trained ranker of a working folder or model file; see `saved.read`."""
    found = saved.read(place, config)
    ranker = cls(config or found.config)
    ranker.use_transforms(found.transforms, where=place)
    ranker.params, ranker.about = found.params, found.about
    return ranker

  # Transforms.

  def fit(self, graphs: Sequence[OpGraph], config_values: Sequence[np.ndarray]) -> None:
    """Fits the transforms on training graphs and their configurations `[n, F]`."""
    self.features.fit(graphs)
    self.fit_configs(config_values)

  def fit_configs(self, config_values: Sequence[np.ndarray]) -> None:
    """Fits the transform of configurations `[n, F]` alone."""
    kind, columns = self.config["data"]["config_transform"], config_values[0].shape[1]
    self.family.config_transform = features.fit(
        config_values, np.full(columns, kind, dtype=object))

  @property
  def transforms(self) -> dict[str, features.Transform]:
    """Everything that was fitted, by the names under which it is saved."""
    return features.to_saved(self.features.transforms, self.family.config_transform)

  def use_transforms(
      self, transforms: Mapping[str, features.Transform], *, where: str | os.PathLike[str]
  ) -> None:
    """Takes transforms that were saved.

    Raises:
      ValueError: they are of other feature blocks than the config names.
    """
    nodes, self.family.config_transform = features.from_saved(transforms, where)
    if set(nodes) != set(self.features.names):
      raise ValueError(f"{where} was trained on the feature blocks {', '.join(nodes)}, and "
                       f"data.features is {', '.join(self.features.names)}: give the same")
    self.features.transforms = nodes

  # Graphs.

  def check(self, graph: OpGraph) -> None:
    """Refuses (ValueError) a graph whose configurations are not of the ranker's kind.

    Warns of a program from another stage of compilation than the programs of training.
    """
    selection.check_kind(graph, _CONFIGS[self.collection.kind])
    if self.collection.kind == "layout" and graph.stage and not graph.stage.startswith(self.stage):
      logging.warning("%s is a program %s, and the model was trained on programs %s: its order "
                      "is worth less", graph.name, graph.stage, self.stage)

  @property
  def target(self) -> str:
    """The TPU target of which the labels of training are estimates; empty for run times."""
    return self.about.get("labels", {}).get("target") or ""

  @property
  def stage(self) -> str:
    """The stage of compilation of the training programs; empty where it is not known."""
    if self.collection.is_released:
      return BEFORE_LAYOUTS
    if "labels" not in self.about:
      return ""
    return f"{BEFORE_LAYOUTS} for {self.target}" if self.target else LOWERED

  def prepare(self, graph: OpGraph) -> Any:
    """A graph as the family wants it: features computed and transformed, tables built."""
    graph = self._seen(graph)
    return self.family.prepare(self.features(graph), graph)

  def _seen(self, graph: OpGraph) -> OpGraph:
    """The graph with what the ranker knows of its configurations."""
    # Models that shipped before layouts had the field know all integers.
    blocks = self.config["data"].get("config_features", ())
    return output_orders(graph) if "outputs" in blocks else graph

  # Scores.

  @functools.cached_property
  def scorer(self) -> Scorer:
    """Scores prepared graphs with any parameters of the network."""
    return self.family.scorer()

  def scores(
      self, graphs: Sequence[OpGraph], config_ids: Sequence[np.ndarray] | None = None, *,
      progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores of configurations of each graph, `[n]` float32, larger = slower.

    Args:
      graphs: with configurations.
      config_ids: `[n]` int64 for each graph; all of them in file order unless given.
      progress: shows a bar.

    Raises:
      ValueError: a graph has no configurations of the ranker's kind.
    """
    for graph in graphs:
      self.check(graph)
    prepared = [self.prepare(graph) for graph in graphs]
    return self.scorer(self.params, prepared, config_ids, progress=progress)

  def rank(self, graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
    """Configuration numbers of a graph from fastest to slowest, `[C]` int64, and all scores.

    Equal scores stay in file order. Scores are `[C]` float32 in file order, larger = slower.
    """
    (scores,) = self.scores([graph])
    return np.argsort(scores, kind="stable"), scores

  def explain(
      self, graph: OpGraph, config: int, *, against: int | None = None
  ) -> list[Any]:
    """What the score of a configuration owes to each choice, largest first.

    Score tables give the charges that add up to the score (`rankers.tables.charges`). Any
    other family exchanges choices one by one (`rankers.base.exchange_charges`).
    """
    self.check(graph)
    return self.family.explain(self, self._seen(graph), config, against=against)

  def propose(
      self, graph: OpGraph, n: int = 10, *, near: int | None = None, **options: Any
  ) -> Any:
    """The n cheapest of all choices of a graph; see `rankers.tables.family`.

    Raises:
      ValueError: the family has no table of costs to search.
    """
    return self.family.propose(self, self._seen(graph), n, near=near, **options)

  # Keeping.

  def save(self, path: Path, params: Any, about: Mapping[str, Any]) -> None:
    """Writes a model file with these parameters."""
    # Where the data of training lay is nothing of the model's.
    kept = {k: v for k, v in self.config.items() if k != "data_root"}
    if "store_dir" in kept["data"]:
      kept["data"] = {**kept["data"], "store_dir": ""}
    saved.save(path, Artefact(kept, self.transforms, params, dict(about)))


@functools.lru_cache(maxsize=4)
def _loaded(place: Path, saved_ns: int) -> Ranker:
  del saved_ns  # a newer checkpoint needs another ranker
  return Ranker.load(place)


def load(place: str | os.PathLike[str]) -> Ranker:
  """The trained ranker of a working folder or a model file; loaded once while it is unchanged.

  Args:
    place: a folder that `run_tile.py` or `run_layout.py` trained in, a `model.npz`, or the
      name of a model that ships (`shipped.names()`).

  Raises:
    FileNotFoundError: no trained model there.
    ValueError: what is there is damaged or of a newer version.
  """
  found = place if remote.is_remote(place) else parallel.from_primary(
      shipped.find(Path(place).expanduser()) if parallel.is_primary() else None)
  path = remote.fetch(found).absolute()
  # Of the last phase too, whatever its folder is called.
  marks = (path, path / saved.FILE, *path.glob(loop.CHECKPOINTS),
           *path.glob(f"*/{loop.CHECKPOINTS}"))
  return _loaded(path, max((mark.stat().st_mtime_ns for mark in marks if mark.exists()), default=0))


def propose(
    place: str | os.PathLike[str] | Ranker, graph: OpGraph, n: int = 10, *,
    near: int | None = None,
) -> Any:
  """The n configurations that a trained score table finds cheapest among all choices.

  Args:
    place: as in `load`, or a ranker that is loaded already.
    graph: an `OpGraph` with layout configurations, which say what there is to choose.
    n: how many.
    near: number of a configuration to trust, such as the compiler's own, from which the
      proposals lead to the cheapest; None searches freely.

  Raises:
    FileNotFoundError, ValueError: as `load`; no table of costs to search.
  """
  return _ranker(place).propose(graph, n, near=near)


def explain(
    place: str | os.PathLike[str] | Ranker, graph: OpGraph, config: int, *,
    against: int | None = None,
) -> list[Any]:
  """What the score of a configuration owes to each choice; see `Ranker.explain`.

  Args:
    place: as in `load`, or a ranker that is loaded already.
    graph: with configurations.
    config: number of the configuration to explain.
    against: number of a configuration to compare it with.
  """
  return _ranker(place).explain(graph, config, against=against)


def _ranker(place: Any) -> Any:
  """What `load` gives for a place; a loaded model as it is."""
  return load(place) if isinstance(place, (str, os.PathLike)) else place


def rank(place: Any, graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
  """Ranks the configurations of a graph with a trained model.

  Args:
    place: as in `load`, or a `Ranker` or `Ensemble` that is loaded already.
    graph: an `OpGraph` with `configs`, from a file or from `tpugraphs_jax.hlo`.

  Returns:
    Configuration numbers from fastest to slowest, `[C]` int64, and the score of
    each configuration, `[C]` float32, larger = slower.

  Raises:
    FileNotFoundError, ValueError: as `load` and `Ranker.scores`.
  """
  return _ranker(place).rank(graph)
