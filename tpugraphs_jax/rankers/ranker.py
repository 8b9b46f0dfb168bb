"""Rankers: graphs to scores and orders.

    config -> features, ranker family                 `Ranker(config)`
    transforms and parameters                         fitted and trained, or loaded
    OpGraph -> prepare -> `Family.scores`             validation, evaluation, own programs

`model_file` reads and writes trained rankers. An `Ensemble` averages their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import copy
import functools
import os
from pathlib import Path
from typing import Any

from absl import logging
import jax
import numpy as np
import optax
import scipy

from tpugraphs_jax import columns, config_fields, metrics, rankers
from tpugraphs_jax.data import plan, reduction, selection
from tpugraphs_jax.data.factoring import factor_layout_configs, output_orders
from tpugraphs_jax.data.transforms import fit, from_saved, NodeFeatures, to_saved, Transform
from tpugraphs_jax.graph import BEFORE_LAYOUTS, LayoutConfigs, LOWERED, OpGraph, TileConfigs
from tpugraphs_jax.infra import console, files, parallel, trust
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.explain import (
  check_numbers,
  exchanges,
  Explanation,
  Proposals,
  with_rows,
)
from tpugraphs_jax.rankers.tables.family import ChoicesFamily, TablesFamily

_CONFIGS = {"tile": TileConfigs, "layout": LayoutConfigs}


class Ranker:
  """Scores and ranks graphs of a collection.

  Args:
    config: see `rankers.config`; fields of training alone are not read.

  Attributes:
    config: the argument.
    collection: of the graphs.
    features: node features, with their transforms once fitted or loaded.
    family: see `rankers.family`.
    params: of the network, once trained or loaded.
    about: origin of a loaded model: step, labels, versions, ...

  Raises:
    ValueError: fields of the config contradict each other.
  """

  def __init__(self, config: Config):
    self.config, self.collection = config, config.collection
    self.features = NodeFeatures(config.data)
    self.family = rankers.create(config, self.features.unscaled)
    self.params: optax.Params | None = None
    self.about: Mapping[str, Any] = {}

  def __repr__(self) -> str:
    state = "not trained"
    if self.params is not None:
      state = f"{optax.tree.size(self.params):,} parameters"
    return f"<Ranker {self.config.model.name} of {self.collection.name}: {state}>"

  @classmethod
  def load(cls, place: str | os.PathLike[str], config: Config | None = None) -> Ranker:
    """The trained ranker of a working folder or model file; see `model_file.read`.

    Raises:
      FileNotFoundError, ValueError: as `model_file.read`. Without `config` also ValueError for a
        model that needs a module which is not imported.
    """
    artefact = model_file.read(place, None if config is None else config.to_dict())
    if config is not None:
      return cls(config)._with(artefact, place)
    trust.check_imported(artefact.config["extensions"])
    with trust.reading(place, model_file.AGAIN):
      ranker = cls(Config.from_dict(artefact.config))._with(artefact, place)
      if not artefact.config["extensions"]:  # a family of the user may need other graphs
        ranker.check_params()
    return ranker

  def _with(self, artefact: model_file.Artefact, place: str | os.PathLike[str]) -> Ranker:
    self.use_transforms(artefact.transforms, where=place)
    self.params, self.about = artefact.params, artefact.about
    return self

  def check_params(self) -> None:
    """Refuses (ValueError) parameters or transforms that do not fit the network."""
    shapes = self.param_shapes(_small_graph(self.collection.kind))
    if difference := model_file.first_difference(self.params, shapes):
      name, parameter, expected = difference
      raise ValueError(f"{name} is {parameter}, the model of its config has {expected}")

  def param_shapes(self, graph: OpGraph) -> optax.Params:
    """Shapes and dtypes of the network's parameters, from a graph, without computing them."""
    sampler = lambda number, rng, turn: (np.arange(2), np.zeros(2, np.float32))
    draft = self.family.draw([self.prepare(graph)], sampler)(0, np.random.default_rng(0), 0)
    (budget,) = plan.choose_budgets([draft.sizes])
    batch = self.family.assemble([draft.finish()], budget, graphs=1, configs=2)
    return jax.eval_shape(self.family.network.init, jax.random.key(0), batch)["params"]

  def copy(self) -> Ranker:
    """A copy with its own attributes; both rankers share compiled functions.

    Arrays of parameters are shared too, and read-only.
    """
    result = copy.copy(self)
    result.about = copy.deepcopy(self.about)
    result.params = jax.tree.map(lambda array: array, self.params)
    result.features = copy.copy(self.features)
    result.features.transforms = copy.deepcopy(self.features.transforms)
    if self.family.config_transform is None:  # each gets its own
      result.family = rankers.create(self.config, self.features.unscaled)
    return result

  # Transforms.

  def _set_config_transform(self, transform: Transform | None) -> None:
    # Copies share the family, which scores with its transform from now on.
    if self.family.config_transform is not None:
      raise ValueError(f"{self!r} has its transforms: make another Ranker for other ones")
    if transform is not None and not len(transform.kept):
      raise ValueError(
        f"data.config_transform is {self.config.data.config_transform!r}, which leaves out "
        "columns that are constant in training, and all columns of configurations are: no ranker "
        "can tell such configurations apart, so train on others, or set it to 'none'"
      )
    self.family.config_transform = transform

  def fit_configs(self, config_values: Sequence[np.ndarray]) -> None:
    """Fits the transform of configurations `[n, F]` alone.

    Raises:
      ValueError: the ranker has one, or no column is left.
    """
    kinds = np.full(config_values[0].shape[1], self.config.data.config_transform, dtype=object)
    self._set_config_transform(fit(config_values, kinds))

  @property
  def transforms(self) -> dict[str, Transform]:
    """The fitted transforms, by their names in files."""
    return to_saved(self.features.transforms, self.family.transform)

  def use_transforms(
    self, transforms: Mapping[str, Transform], *, where: str | os.PathLike[str]
  ) -> None:
    """Sets the transforms, as read from a file.

    Raises:
      ValueError: they are for other feature blocks than the config names, or the ranker has
        transforms.
    """
    nodes, configs = from_saved(transforms, where)
    if set(nodes) != set(self.features.names):
      raise ValueError(
        f"{where} was trained on the feature blocks {', '.join(nodes)}, and "
        f"data.features is {', '.join(self.features.names)}: give the same"
      )
    self._set_config_transform(configs)
    self.features.transforms = nodes

  # Graphs.

  def check(self, graph: OpGraph) -> None:
    """Refuses (ValueError) a graph whose configurations are not of the ranker's kind.

    Warns, once per program, if it is from another stage of compilation than the training programs.
    """
    selection.check_kind(graph, _CONFIGS[self.collection.kind])
    if self.collection.kind == "layout" and graph.stage and not graph.stage.startswith(self.stage):
      _warn_of_stage(graph.name, graph.stage, self.stage)

  @property
  def metrics(self) -> Mapping[str, float]:
    """Metrics of validation that the model file holds, by name; empty without any.

    A model that ships has means over the validation programs (`kendaltau`); `about["figures"]` has
    more of them. A model file of a run has metrics of the sample of validation at its step
    (`kendaltau_mean`).
    """
    figures = self.about.get("figures", {}).get("valid", {}).get("this model")
    return figures or self.about.get(metrics.SAMPLE, {})

  @property
  def target(self) -> str:
    """The TPU target of the estimates in the training labels; empty for measured labels."""
    return self.about.get("labels", {}).get("target") or ""

  @property
  def stage(self) -> str:
    """The stage of compilation of the training programs; empty if unknown."""
    if self.collection.is_released:
      return BEFORE_LAYOUTS
    if "labels" not in self.about:
      return ""
    return f"{BEFORE_LAYOUTS} for {self.target}" if self.target else LOWERED

  def prepare(self, graph: OpGraph) -> Any:
    """Computes and transforms features, and prepares the graph; see `Family.prepare`."""
    graph = self._seen(graph).for_rankers()
    if self.config.data.virtual_node == "output":
      graph = reduction.with_output(graph)
    return self.family.prepare(graph, self.features(graph))

  def _seen(self, graph: OpGraph) -> OpGraph:
    """The graph as in training, with output layouts alone for such `data.config_features`."""
    return output_orders(graph) if "outputs" in self.config.data.config_features else graph

  # Scores.

  def scores(
    self, graphs: Sequence[OpGraph], config_ids: Sequence[np.ndarray] | None = None
  ) -> list[np.ndarray]:
    """Scores of configurations of each graph, `[n]` float32, larger = slower.

    Args:
      graphs: with configurations.
      config_ids: `[n]` int64 for each graph; all configurations in file order unless given.

    Raises:
      ValueError: a graph has no configurations of the ranker's kind.
    """
    prepared = []
    with console.working("preparing", total=len(graphs), unit="graphs") as work:
      for graph in graphs:
        self.check(graph)
        prepared.append(self.prepare(graph))
        work.update()
    return self.family.scores(self.params, prepared, config_ids)

  def rank(self, graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
    """Configuration numbers of a graph from fastest to slowest, `[C]` int64, and all scores.

    Equal scores stay in file order. Scores are `[C]` float32 in file order, larger = slower.
    """
    (scores,) = self.scores([graph])
    if metrics.is_tied(scores):
      logging.warning(f"{graph.name}: the five best have equal scores, and stay in file order")
    return np.argsort(scores, kind="stable"), scores

  @property
  def predicts_times(self) -> bool:
    """Whether scores are times of the whole program in microseconds, as of labels by time."""
    unit = self.about.get("labels", {}).get("config_runtime", "")
    return self.family.network.predicts_kernels and unit.startswith("picoseconds")

  def kernel_times(self, graphs: Sequence[OpGraph]) -> list[np.ndarray]:
    """Predicted times of the kernels of programs in each configuration, each `[C, D]` float32.

    They are in the unit of the scores (microseconds of labels by `tpu_estimate`); 0 where a
    configuration has no such kernel.

    Args:
      graphs: with times of kernels (`graph.KernelTimes`), which tell the nodes of each kernel.

    Raises:
      ValueError: the model predicts no times of kernels, or a graph has none.
    """
    if not (isinstance(self.family, ChoicesFamily) and self.family.network.predicts_kernels):
      raise ValueError(f"model {self.config.model.name} predicts no times of kernels")
    for graph in graphs:
      self.check(graph)
      if graph.configs.kernels is None:
        raise ValueError(
          f"{graph.name} has no kernels: label it with tpu_estimate (docs/collect.md)"
        )
    return self.family.kernel_times(self.params, list(map(self.prepare, graphs)))

  @console.working("explaining")
  def explain(self, graph: OpGraph, config: int, *, against: int | None = None) -> Explanation:
    """How much each choice of a configuration changes its score, the largest change first.

    Score tables give charges that add up to the score; of a model that predicts times they are
    microseconds of all operations of the program, the dearest first. For other rankers,
    `exchanges` replaces one choice at a time.

    Args:
      graph: with configurations.
      config: number of the configuration to explain.
      against: number of a configuration to compare with; only choices in which the two differ are
        explained. `exchanges` compares with the best-ranked configuration unless given.

    Raises:
      ValueError: a number that the graph does not have.
    """
    self.check(graph)
    graph = self._seen(graph)
    check_numbers(graph, config, against)
    if isinstance(self.family, TablesFamily):
      charges = self.family.charges(self.params, self.prepare(graph), config, against=against)
      return Explanation(charges, graph, config, against, self._time_of(graph, config))
    rows = exchanges(lambda changed: self.scores([changed])[0], graph, config, against=against)
    return Explanation(rows, graph, config, against)

  def _time_of(self, graph: OpGraph, config: int) -> str:
    """The predicted milliseconds of a configuration, and their error; empty for other scores."""
    if not self.predicts_times:
      return ""
    (scores,) = self.scores([graph], [np.array([config])])
    said = f"{1e-3 * scores[0]:.4g} ms"
    if error := self.about.get("errors", {}).get("program"):
      said += f", an error of {error:.0%} on half of the test programs"
    return said

  @console.working("proposing")
  def propose(self, graph: OpGraph, n: int = 10, *, near: int | None = None) -> Proposals:
    """The n configurations with the lowest predicted cost, whether measured or not.

    A group can have any row that it has in some configuration of the graph.

    Args:
      graph: with configurations.
      n: number of proposals; fewer if there are fewer combinations.
      near: number of a trusted configuration, for instance the default of the compiler. The
        proposals then lead from it to the cheapest, with more and more changes; see
        `rankers.tables.search.propose_near`.

    Raises:
      ValueError: the ranker has no score table, n is below 1, or the graph has no such number.
    """
    graph = self._seen(graph)
    if not isinstance(self.family, TablesFamily):
      raise ValueError(
        f"model {self.config.model.name} has no score table: train a model with score "
        "tables (variant tables of configs/layout.py)"
      )
    self.check(graph)
    check_numbers(graph, near)
    rows, cost, gap, is_exact = self.family.cheapest(self.params, self.prepare(graph), n, near=near)
    return Proposals(with_rows(graph, rows), cost, gap, is_exact)

  # Files.

  def save(
    self,
    path: str | os.PathLike[str],
    params: optax.Params | None = None,
    about: Mapping[str, Any] | None = None,
  ) -> None:
    """Writes a model file.

    Args:
      path: the file, such as `model.npz`.
      params: of the network; `self.params` unless given.
      about: origin of the model, in JSON types; `self.about` unless given.

    Raises:
      ValueError: the ranker was neither trained nor loaded.
    """
    params = self.params if params is None else params
    if params is None:
      raise ValueError("the ranker has no parameters: train it, or load one")
    about = self.about if about is None else about
    # The model does not depend on the folder of its training data.
    config = self.config.replace(data_root="").to_dict()
    artefact = model_file.Artefact(trust.config(config), self.transforms, params, dict(about))
    model_file.write(Path(path), artefact)


def _small_graph(kind: str) -> OpGraph:
  """A dot and a reshape, as a program or a kernel with two configurations."""
  ids, times = columns.opcode_ids(), np.array([1, 2])
  feat = np.zeros((4, columns.NODE_FEATURES), np.float32)
  feat[:, columns.NODE["shape"]][:, :2] = 8
  tiles = np.ones((2, columns.TILE_CONFIG_FEATURES), np.float32)
  configs: TileConfigs | LayoutConfigs = TileConfigs(tiles, times, times)
  config_node = np.zeros(0, np.int32)
  if kind == "layout":
    rows = np.full((2, 2, columns.LAYOUT_CONFIG_FEATURES), -1, np.float32)
    rows[1, :, :2] = 1, 0
    configs, config_node = factor_layout_configs(rows, times), np.array([2, 3], np.int32)
  names = ("parameter", "parameter", "dot", "reshape")
  opcodes = np.array([ids[name] for name in names], np.uint8)
  edges = np.array([[2, 0], [2, 1], [3, 2]], np.int32)
  return OpGraph("small", feat, opcodes, edges, np.array([0, 4]), config_node, configs)


@functools.cache
def _warn_of_stage(name: str, stage: str, expected: str) -> None:
  logging.warning(
    f"{name} is a program {stage}, and the model was trained on programs {expected}: its ranking "
    "is less reliable"
  )


@functools.lru_cache(maxsize=4)
def _loaded(place: Path, state: tuple[Any, ...]) -> Ranker:
  del state  # key of the cache: a model that has changed is loaded again
  return Ranker.load(place)


@console.working("reading a model")
def load(place: str | os.PathLike[str], *, extensions: Sequence[str] = ()) -> Ranker:
  """The trained ranker of a working folder or a model file.

  While the files are unchanged, later calls return copies that share its compiled functions.
  Loading a model imports no module that it names: if a module registers its parts, name it in
  `extensions` or import it first.

  Args:
    place: a folder that `run_tile.py` or `run_layout.py` trained in, a `model.npz`, or the
      name of a model that ships (`model_file.shipped_names()`).
    extensions: names of modules to import, which register parts of the model.

  Raises:
    FileNotFoundError: no trained model there.
    ValueError: the model is damaged, of a newer version, or needs a module that is not imported.

  Examples:
    >>> import tpugraphs_jax
    >>> tpugraphs_jax.load("layout-cpu-measured").collection.kind
    'layout'
  """
  config_fields.import_extensions(extensions)
  shipped = lambda: model_file.shipped_file(place)
  source = place if files.is_remote(place) else parallel.on_primary(shipped)
  path = files.fetch(source).absolute()
  # All processes load the model, or none: `model_file.read` is a call of all of them.
  return _loaded(path, parallel.on_primary(lambda: model_file.state_of(path))).copy()


def min_max(scores: np.ndarray) -> np.ndarray:
  """Scores `[C]` scaled to [0, 1]; zeros if all are equal (5th place)."""
  width = scores.max() - scores.min()
  return (scores - scores.min()) / width if width else np.zeros(len(scores))


# Functions of scores `[C]`, applied before the average over rankers (`mean`: 1st, 2nd and 10th
# place). With `rank`, equal scores share their mean rank, counted from 1.
COMBINATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
  "mean": lambda scores: scores,
  "min_max": min_max,
  "rank": lambda scores: scipy.stats.rankdata(scores),
}


class Ensemble:
  """Rankers of one collection whose scores are averaged, graph by graph.

  Args:
    places: folders or model files, see `load`.
    combine: one of `COMBINATIONS`: the average of scores, of scores scaled to [0, 1] per graph,
      or of ranks.

  Raises:
    ValueError: no ranker, an unknown combination, or rankers of different collections.

  Examples:
    >>> len(Ensemble(["layout-cpu-measured", "layout-cpu-measured"], combine="rank").rankers)
    2
  """

  def __init__(self, places: Sequence[str | os.PathLike[str]], *, combine: str = "mean"):
    if combine not in COMBINATIONS:
      raise ValueError(f"combine is {combine!r}, expected one of {', '.join(COMBINATIONS)}")
    if not places:
      raise ValueError("an ensemble needs at least one folder with a trained model")
    self.rankers = [load(place) for place in places]
    self._combine = COMBINATIONS[combine]
    names = {str(place): r.collection.name for place, r in zip(places, self.rankers)}
    if len(set(names.values())) > 1:
      text = ", ".join(f"{place} is of {name}" for place, name in names.items())
      raise ValueError(f"an ensemble takes models of one collection: {text}")
    self.collection = self.rankers[0].collection

  def __repr__(self) -> str:
    return f"<Ensemble of {len(self.rankers)} rankers of {self.collection.name}>"

  def scores(
    self, graphs: Sequence[OpGraph], config_ids: Sequence[np.ndarray] | None = None
  ) -> list[np.ndarray]:
    """Combined scores of configurations of each graph, `[n]` float64, larger = slower.

    Args:
      graphs: with configurations.
      config_ids: `[n]` int64 for each graph; all configurations in file order unless given.
    """
    by_ranker = [ranker.scores(graphs, config_ids) for ranker in self.rankers]
    return [
      np.mean([self._combine(scores.astype(np.float64)) for scores in of_graph], axis=0)
      for of_graph in zip(*by_ranker)
    ]

  def rank(self, graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
    """Order `[C]` int64, fastest first, and scores `[C]` float64 of one graph."""
    (scores,) = self.scores([graph])
    return np.argsort(scores, kind="stable"), scores


def propose(
  place: str | os.PathLike[str] | Ranker, graph: OpGraph, n: int = 10, *, near: int | None = None
) -> Proposals:
  """The n configurations with the lowest cost in a trained score table.

  Args:
    place: as in `load`, or a loaded ranker.
    graph: an `OpGraph` with layout configurations, whose rows are the choices of each group.
    n: number of proposals.
    near: number of a trusted configuration, such as the default of the compiler, from which the
      proposals lead to the cheapest; None searches freely.

  Raises:
    FileNotFoundError, ValueError: as `load`; or the model has no score table.
  """
  return _ranker(place, "propose").propose(graph, n, near=near)


def explain(
  place: str | os.PathLike[str] | Ranker, graph: OpGraph, config: int, *, against: int | None = None
) -> Explanation:
  """How much each choice of a configuration changes its score; see `Ranker.explain`.

  Args:
    place: as in `load`, or a loaded ranker.
    graph: with configurations.
    config: number of the configuration to explain.
    against: number of a configuration to compare with.

  Returns:
    A list of choices that prints as a table.

  Raises:
    FileNotFoundError, ValueError: as `load`; a number that the graph does not have.

  Examples:
    >>> import tpugraphs_jax
    >>> graph = tpugraphs_jax.read_layout(
    ...     "data/own/npz/layout/own/programs_cpu/test/experts_layer.npz")
    >>> rows = tpugraphs_jax.explain("layout-cpu-measured", graph, 3, against=0)
    >>> all(abs(one.change) >= abs(other.change) for one, other in zip(rows, rows[1:]))
    True
  """
  return _ranker(place, "explain").explain(graph, config, against=against)


def _ranker(place: str | os.PathLike[str] | Ranker | Ensemble, method: str) -> Any:
  """The ranker of a place, loaded unless it is one; refuses (ValueError) one without `method`."""
  if isinstance(place, (str, os.PathLike)):
    return load(place)
  if not hasattr(place, method):
    raise ValueError(
      f"the model is of type {type(place).__name__}, expected a folder, a model "
      "file, the name of a model that ships, or a ranker from `load`"
    )
  return place


def rank(
  place: str | os.PathLike[str] | Ranker | Ensemble, graph: OpGraph
) -> tuple[np.ndarray, np.ndarray]:
  """Ranks the configurations of a graph with a trained model.

  Args:
    place: as in `load`, or a loaded `Ranker` or `Ensemble`.
    graph: an `OpGraph` with `configs`, from a file or from `tpugraphs_jax.hlo`.

  Returns:
    Configuration numbers from fastest to slowest, `[C]` int64, and the score of
    each configuration, `[C]` float32, larger = slower.

  Raises:
    FileNotFoundError, ValueError: as `load` and `Ranker.scores`.

  Examples:
    >>> import tpugraphs_jax
    >>> graph = tpugraphs_jax.read_layout(
    ...     "data/own/npz/layout/own/programs_cpu/test/experts_layer.npz")
    >>> order, scores = tpugraphs_jax.rank("layout-cpu-measured", graph)
    >>> len(order) == len(scores) == len(graph.configs)
    True
    >>> bool(scores[order[0]] == scores.min())
    True
  """
  return _ranker(place, "rank").rank(graph)
