"""A ranker ready for use: from graphs to scores and orders, the same way for every use.

    config -> features, model, batcher, scorer       `Ranker(config)`
    transforms and parameters                        fitted and trained, or loaded
    OpGraph -> prepare -> score                      training's validation, evaluation, own programs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from tpugraphs_jax import collections, parallel, registry, remote
from tpugraphs_jax.data import feature_blocks, features, selection
from tpugraphs_jax.data.batching import PreparedGraph
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs, distinct_rows
from tpugraphs_jax.rankers import scorer as scorer_lib
from tpugraphs_jax.rankers.segments.model import SegmentModel
from tpugraphs_jax.rankers.segments.score import SegmentScorer
from tpugraphs_jax.rankers.tables import charges as table_charges, propose as tables
from tpugraphs_jax.rankers.tables.scorer import TableScorer
from tpugraphs_jax.rankers.tile.late_scorer import LateScorer
from tpugraphs_jax.serve import artefact, charges, saved, shipped
from tpugraphs_jax.serve.artefact import Artefact
from tpugraphs_jax.serve.batchers import Batcher, create_batcher
from tpugraphs_jax.serve.models import create_model
from tpugraphs_jax.train import loop, step as step_lib

_CONFIGS = {"tile": TileConfigs, "layout": LayoutConfigs}
# A model that looks at sampled blocks is judged on the mean of three (official).
_BLOCKS_IN_EVALUATION = 3


class Ranker:
  """Everything that turns graphs into scores, made from a config.

  Args:
    config: nested fields, see `configs/`; training's own fields are not read.

  Attributes:
    config: the same.
    collection: whose graphs it ranks.
    features: node features, with their transforms once fitted or loaded.
    model: flax module from a batch to scores `[G, C]`.
    sees: what the model looks at.
    params: of the model, once trained or loaded.

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
    ranker, self.model = create_model(config, self.features.unscaled)
    self.sees = ranker.sees
    self.params: Any = None
    self._config_transform: features.Transform | None = None

  @classmethod
  def load(
      cls, place: str | os.PathLike[str], config: Mapping[str, Any] | None = None
  ) -> Ranker:
    """The trained ranker of a working folder or model file; see `saved.read`."""
    found = saved.read(place, config)
    ranker = cls(config or saved.upgrade(found.config))
    ranker.use_transforms(found.transforms, where=place)
    ranker.params = found.params
    return ranker

  # Transforms.

  def fit(self, graphs: Sequence[OpGraph], config_values: Sequence[np.ndarray]) -> None:
    """Fits the transforms on training graphs and their configurations `[n, F]`."""
    self.features.fit(graphs)
    self.fit_configs(config_values)

  def fit_configs(self, config_values: Sequence[np.ndarray]) -> None:
    """Fits the transform of configurations `[n, F]` alone."""
    kind, columns = self.config["data"]["config_transform"], config_values[0].shape[1]
    self._config_transform = features.fit(config_values, np.full(columns, kind, dtype=object))

  @property
  def transforms(self) -> dict[str, features.Transform]:
    """Everything that was fitted, by the names under which it is saved."""
    return features.to_saved(self.features.transforms, self._config_transform)

  def use_transforms(
      self, transforms: Mapping[str, features.Transform], *, where: str | os.PathLike[str]
  ) -> None:
    """Takes transforms that were saved.

    Raises:
      ValueError: they are of other feature blocks than the config names.
    """
    nodes, self._config_transform = features.from_saved(transforms, where)
    if set(nodes) != set(self.features.names):
      raise ValueError(f"{where} was trained on the feature blocks {', '.join(nodes)}, and "
                       f"data.features is {', '.join(self.features.names)}: give the same")
    self.features.transforms = nodes

  # Graphs.

  @functools.cached_property
  def batcher(self) -> Batcher:
    """Prepares graphs and makes batches; needs the transforms."""
    return create_batcher(self.config, self.sees, self._config_transform)

  def check(self, graph: OpGraph) -> None:
    """Refuses (ValueError) a graph whose configurations are not of the ranker's kind."""
    selection.check_kind(graph, _CONFIGS[self.collection.kind])

  def prepare(self, graph: OpGraph) -> Any:
    """A graph as the batcher wants it: features computed and transformed, tables built."""
    return self.batcher.prepare(self.features(graph), graph)

  # Scores.

  def scorer(self) -> scorer_lib.Scorer | TableScorer | LateScorer:
    """Scores prepared graphs with any parameters of the model."""
    if self.sees.tables:
      return TableScorer(self.model, self.batcher.assemble)
    options = self.config["eval"]
    if self.sees.late_join:
      return LateScorer(self.model, self.batcher, graphs_per_batch=options["graphs"])
    sizes = dict(configs_per_batch=options["configs"], whole_slates=self.sees.slates)
    if isinstance(self.model, SegmentModel):
      return SegmentScorer(self.model, self.batcher.layout.assemble,
                           segments_per_batch=options["graphs"], **sizes)
    return scorer_lib.Scorer(step_lib.make_score_step(self.model), self.batcher.assemble,
                             graphs_per_batch=options["graphs"], **sizes)

  @functools.cached_property
  def _scorer(self) -> scorer_lib.Scorer | TableScorer | LateScorer:
    return self.scorer()

  def score(
      self, scorer: Any, params: Any, graphs: Sequence[PreparedGraph],
      config_ids: Sequence[np.ndarray], *, progress: bool = False,
      permutations: int | None = None,
  ) -> list[np.ndarray]:
    """Scores of the given configurations of each graph, `[len(ids)]` float32.

    Equal configurations are scored once: their places in a batch would round
    differently, and they could not stay in file order. A ranker that looks across a
    slate sees the configurations as they are, in several orders: its scores are means
    over the slates that these make (1st place of the competition, 10 orders).

    Args:
      scorer: `scorer()`, or one that gives the same scores in another way.
      params: of the model.
      graphs: prepared ones.
      config_ids: `[n]` int64 for each graph.
      progress: shows a bar.
      permutations: how many orders, the first as given; the config's unless given.

    Raises:
      FloatingPointError: a score is not finite.
      ValueError: the memory does not suffice.
    """
    orders = self.config["eval"]["permutations"] if permutations is None else permutations
    with scorer_lib.explaining_memory(self.config["eval"]):
      if self.sees.slates:
        found = self._score_orders(scorer, params, graphs, config_ids, progress, orders)
      else:
        found = self._score_once(scorer, params, graphs, config_ids, progress)
    for graph, scores in zip(graphs, found):
      if bad := np.count_nonzero(~np.isfinite(scores)):
        raise FloatingPointError(
            f"{graph.name}: {bad} of {len(scores)} scores are not finite, because its features or "
            "the parameters are too large for the model: train with a data.feature_transform that "
            "bounds them, model.dtype=float32 or a lower optimizer.learning_rate")
    return found

  def _score_once(self, scorer, params, graphs, config_ids, progress):
    """Scores of which equal configurations have equal ones."""
    parts = [distinct_rows(g.configs.choices[ids]) for g, ids in zip(graphs, config_ids)]
    ids_once = [ids[first] for ids, (first, _) in zip(config_ids, parts)]
    scores = self._score_blocks(scorer, params, graphs, ids_once, progress)
    return [s[which] for s, (_, which) in zip(scores, parts)]

  def _score_orders(self, scorer, params, graphs, config_ids, progress, orders):
    """Mean scores over slates made of the configurations in so many orders."""
    rng = np.random.default_rng(self.config["seed"])
    total = [np.zeros(len(ids)) for ids in config_ids]
    for number in range(orders):
      order = [rng.permutation(len(ids)) if number else np.arange(len(ids)) for ids in config_ids]
      chosen = [ids[o] for ids, o in zip(config_ids, order)]
      scores = self._score_blocks(scorer, params, graphs, chosen, progress)
      for sums, o, found in zip(total, order, scores):
        sums[o] += found
    return [(sums / orders).astype(np.float32) for sums in total]

  def _score_blocks(self, scorer, params, graphs, config_ids, progress) -> list[np.ndarray]:
    """Scores; where the model always looks at blocks the mean over three sampled ones."""
    if self.sees.blocks != "always":
      return scorer.scores(params, graphs, config_ids=config_ids, progress=progress)
    rng = np.random.default_rng(self.config["seed"])
    runs = [
        scorer.scores(params, graphs, config_ids=config_ids, progress=progress,
                      blocks=[self.batcher.draw_block(graph, rng) for graph in graphs])
        for _ in range(_BLOCKS_IN_EVALUATION)
    ]
    return [np.mean(scores, axis=0) for scores in zip(*runs)]

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
    if config_ids is None:
      config_ids = [np.arange(len(graph.configs)) for graph in graphs]
    return self.score(self._scorer, self.params, prepared, config_ids, progress=progress)

  def rank(self, graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
    """Configuration numbers of a graph from fastest to slowest, `[C]` int64, and all scores.

    Equal scores stay in file order. Scores are `[C]` float32 in file order, larger = slower.
    """
    (scores,) = self.scores([graph])
    return np.argsort(scores, kind="stable"), scores

  def explain(
      self, graph: OpGraph, config: int, *, against: int | None = None
  ) -> list[charges.Charge] | list[table_charges.Charge]:
    """Which choices of a configuration the score charges how much, largest first.

    Score tables give the charges that add up to the score (`tables.explain`). Of any
    other model choices are exchanged one by one (`charges.charges`).
    """
    self.check(graph)
    if self.sees.tables:
      return tables.explain(self, graph, config, against=against)
    return charges.charges(lambda one: self.scores([one])[0], graph, config, against=against)

  def propose(
      self, graph: OpGraph, n: int = 10, *, near: int | None = None
  ) -> tables.Proposed:
    """The n cheapest of all choices of a graph by a score table; see `tables.propose`."""
    return tables.propose(self, graph, n, near=near)

  # Keeping.

  def save(self, path: Path, params: Any, about: Mapping[str, Any]) -> None:
    """Writes a model file with these parameters."""
    # Where the data of training lay is nothing of the model's.
    kept = {k: v for k, v in self.config.items() if k != "data_root"}
    if "store_dir" in kept["data"]:
      kept["data"] = {**kept["data"], "store_dir": ""}
    artefact.save(path, Artefact(kept, self.transforms, params, dict(about)))


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
  marks = (path, path / artefact.FILE, *path.glob(loop.CHECKPOINTS),
           *path.glob(f"*/{loop.CHECKPOINTS}"))
  return _loaded(path, max((mark.stat().st_mtime_ns for mark in marks if mark.exists()), default=0))


def propose(
    place: str | os.PathLike[str] | Ranker, graph: OpGraph, n: int = 10, *,
    near: int | None = None,
) -> tables.Proposed:
  """The n configurations that a trained score table finds cheapest among all choices.

  Args:
    place: as in `load`, or a ranker that is loaded already.
    graph: an `OpGraph` with layout configurations, which say what there is to choose.
    n: how many.
    near: number of a configuration to trust, such as the compiler's own, from which the
      proposals lead to the cheapest; None searches freely.

  Raises:
    FileNotFoundError, ValueError: as `load` and `tables.propose`.
  """
  ranker = place if isinstance(place, Ranker) else load(place)
  return ranker.propose(graph, n, near=near)


def rank(place: str | os.PathLike[str], graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
  """Ranks the configurations of a graph with a trained model.

  Args:
    place: as in `load`.
    graph: an `OpGraph` with `configs`, from a file or from `tpugraphs_jax.hlo`.

  Returns:
    Configuration numbers from fastest to slowest, `[C]` int64, and the score of
    each configuration, `[C]` float32, larger = slower.

  Raises:
    FileNotFoundError, ValueError: as `load` and `Ranker.scores`.
  """
  return load(place).rank(graph)
