"""A job on one collection: what tile and layout jobs share."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from tpugraphs_jax import evaluate, losses, metrics, submission
from tpugraphs_jax.data import (
    adjacency, batching, buckets, distinct, extra_features, features, pipeline, sampling)
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate
from tpugraphs_jax.graph import LayoutConfigs, NODE_FEATURES, OpGraph, TileConfigs
from tpugraphs_jax.tasks import checks, loading
from tpugraphs_jax.train import parallel, report, state as state_lib, step as step_lib

_PRECISIONS = ("default", "high", "highest")  # of jax.lax.Precision
_DTYPES = ("float32", "bfloat16")  # of the computation; parameters are float32
_MAXIMISED = ("opa", "kendaltau")  # metrics that can say which checkpoint is best


@dataclasses.dataclass(frozen=True)
class Phase:
  """One run of the training loop; a job has one or more, one after the other."""

  state: state_lib.TrainState
  train_step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
  batches: Any
  scorer: Any  # judges validation graphs meanwhile
  epochs: int
  steps_per_epoch: int
  folder: str = ""  # under the working folder
  following: Callable[[state_lib.TrainState], Phase] | None = None  # from the last state


class Task(abc.ABC):
  """Turns a config into data, model, steps and metrics of one collection.

  Attributes:
    config: see `configs/`.
    collection: one of `graph.COLLECTIONS`.
    model: flax module from a batch to scores `[G, C]`.
    transforms: feature transforms, set by `fit` or `load_transforms`.
  """

  slowdown_ks: Sequence[int]  # of the per-graph metrics
  final_folder = ""  # of the last phase of training, under the working folder

  def __init__(self, config: ml_collections.ConfigDict, collection: str):
    self.config = config
    self.collection = collection
    self.losses = losses.parse_losses(config.loss.losses)
    options = dict(config.model)
    self.model = self.create_model(options.pop("name"), **options)
    self.transforms: dict[str, features.Transform] = {}
    self._check(config)

  def _check(self, config) -> None:
    """Refuses what cannot work, before any data is read."""
    checks.one_of(config, {
        "batch.sampling": sampling.SAMPLINGS, "batch.target": sampling.TARGETS,
        "data.pad_value": (0, -1), "data.config_transform": features.KINDS,
        "model.precision": _PRECISIONS, "model.dtype": _DTYPES,
        "train.best_metric": _MAXIMISED,
    })
    checks.at_least(config, {
        "seed": 0, "batch.graphs": 1, "batch.configs": 2, "batch.min_configs": 2,
        "batch.slates_per_epoch": 0, "batch.config_chunk": 0, "data.loader_threads": 0,
        "data.neighbour_slots": -1, "eval.graphs": 1,
        "eval.configs": 2, "loss.kernel_l2": 0, "loss.activity_l2": 0, "train.epochs": 1,
        "train.eval_every_epochs": 1, "train.early_stop_epochs": 0, "train.valid_configs": 0,
        "train.log_every_steps": 1, "train.checkpoint_every_steps": 0,
    })
    checks.at_least(config, {f"model.{name}": 1 for name in config.model
                             if name.endswith("_dim") or name.startswith("num_")})
    chunk = config.batch.config_chunk
    if chunk and config.batch.configs % chunk:
      raise ValueError(f"--config.batch.config_chunk is {chunk}, expected a divisor of "
                       f"--config.batch.configs, which is {config.batch.configs}, or 0")
    if not config.loss.temperature > 0:
      raise ValueError(f"--config.loss.temperature is {config.loss.temperature}, expected a "
                       "number above 0")
    columns = NODE_FEATURES + bool(config.data.extra_dir)
    features.parse_kinds(
        config.data.feature_transform, features.node_groups(columns),
        field="--config.data.feature_transform")
    report.Profile(config.profile_steps, Path())
    self.create_optimizer(total_steps=1)

  # What tile and layout jobs do in their own way.

  @abc.abstractmethod
  def create_model(self, name: str, **options: Any) -> Any:
    """The flax module of that name."""

  @abc.abstractmethod
  def load(self, data_root: str, split: str) -> list[OpGraph]:
    """Graphs of a split by name; bad files raise or are skipped by name."""

  @abc.abstractmethod
  def check_configs(self, graph: OpGraph) -> None:
    """ValueError if the graph's configurations are not of this task's kind."""

  @abc.abstractmethod
  def fit_configs(self, graphs: Sequence[OpGraph]) -> features.Transform:
    """Transform of configuration features, fitted on training graphs."""

  @abc.abstractmethod
  def prepare(self, graph: OpGraph) -> PreparedGraph:
    """Transformed features and neighbour tables of one graph."""

  @abc.abstractmethod
  def target(self, graph: PreparedGraph, config_ids: np.ndarray) -> np.ndarray:
    """Training target `[len(config_ids)]` float32."""

  @abc.abstractmethod
  def assemble(self, slots: Sequence[Slate], budget: Budget, *, graphs: int, configs: int) -> Any:
    """A padded batch."""

  @abc.abstractmethod
  def validation_ids(self, graph: PreparedGraph) -> np.ndarray:
    """Configurations that the final evaluation judges."""

  # Data.

  def fit(self, graphs: Sequence[OpGraph]) -> None:
    """Fits the feature transforms on training graphs."""
    pad = self.config.data.pad_value
    groups = features.node_groups(graphs[0].node_feat.shape[1])
    kinds = features.parse_kinds(self.config.data.feature_transform, groups)
    raw = (features.node_features(graph, pad_value=pad) for graph in graphs)
    self.transforms = {"node": features.fit(raw, kinds), "config": self.fit_configs(graphs)}

  @property
  def neighbour_slots(self) -> int:
    """Width of the neighbour tables; see `data.adjacency`."""
    chosen = self.config.data.neighbour_slots
    return adjacency.slots_of(jax.default_backend()) if chosen < 0 else chosen

  def save_transforms(self, path: Path) -> None:
    features.save(path, self.transforms)

  def load_transforms(self, path: Path) -> None:
    """Takes what process 0 finds there: the others may have no such disk."""
    found = features.load(path) if parallel.is_primary() else None
    self.transforms = parallel.from_primary(found)

  def node_input(self, graph: OpGraph) -> np.ndarray:
    raw = features.node_features(graph, pad_value=self.config.data.pad_value)
    needed = int(self.transforms["node"].kept.max(initial=-1)) + 1
    if raw.shape[1] < needed:
      raise ValueError(f"{graph.name} has {raw.shape[1]} node features, the model was trained on "
                       f"{needed}: add the extra ones (data.extra_features.append)")
    return self.transforms["node"](raw)

  def with_extra_features(self, graphs: Sequence[OpGraph]) -> list[OpGraph]:
    """Appends the second block of node features where the config names one."""
    folder = self.config.data.extra_dir
    return [extra_features.append_from(g, folder) for g in graphs] if folder else list(graphs)

  def trainable(self, graphs: Sequence[OpGraph]) -> list[OpGraph]:
    """Graphs that nothing in `why_not_trained` speaks against; the others are named."""
    kept = loading.keep(graphs, "training", self.why_not_trained)
    if not kept:
      raise ValueError(
          f"none of the {len(graphs)} training graphs of {self.collection} can be trained on: the "
          "lines above say why (--config.batch.min_configs is "
          f"{self.config.batch.min_configs})")
    return kept

  def why_not_trained(self, configs: TileConfigs | LayoutConfigs) -> str:
    """The reason to leave a graph out of training; empty if there is none."""
    least = self.config.batch.min_configs
    if len(configs) < least:
      return f"fewer than {least} configurations"
    return "" if configs.is_labelled else "no runtimes"

  def judged(self, graphs: Sequence[OpGraph]) -> list[OpGraph]:
    """Labelled graphs with at least two configurations; the others are named."""
    return loading.keep(graphs, "evaluation", self._why_not_judged)

  def _why_not_judged(self, configs: TileConfigs | LayoutConfigs) -> str:
    if len(configs) < 2:
      return "fewer than 2 configurations"
    return "" if configs.is_labelled else "no runtimes (ranked, not scored)"

  # Training.

  def create_optimizer(self, *, total_steps: int):
    return state_lib.create_optimizer(total_steps=total_steps, **self.config.optimizer)

  def draw(self, graphs: Sequence[PreparedGraph]) -> Callable[[int, np.random.Generator], Slate]:
    """Draws slates of these graphs; see `pipeline.BatchPlan`."""
    kind, configs = self.config.batch.sampling, self.config.batch.configs
    skewed = kind.startswith("skewed")
    weights = [
        sampling.skewed_keys(g.configs.runtime_ns) if skewed else len(g.configs) for g in graphs
    ]

    def draw(number: int, rng: np.random.Generator) -> Slate:
      ids = sampling.sample_configs(weights[number], configs, kind, rng)
      graph = graphs[number]
      return Slate(graph, ids, self.target(graph, ids), number, self.draw_block(graph, rng))

    return draw

  def slate_sizes(self, graphs: Sequence[PreparedGraph]):
    """What slates take of a budget, if not what their graphs do; see `pipeline.BatchPlan`."""
    del graphs
    return None

  def draw_block(self, graph: PreparedGraph, rng: np.random.Generator) -> tuple[int, int] | None:
    """Node range sampled for training, if the model trains on blocks."""
    del graph, rng
    return None

  def plan(
      self, graphs: Sequence[PreparedGraph], *, epochs: int | None = None
  ) -> pipeline.BatchPlan:
    """The batches of a run over these graphs, of `config.train.epochs` unless given."""
    batch = self.config.batch
    return pipeline.BatchPlan(
        graphs, slates_per_step=batch.graphs, devices=parallel.device_count(),
        draw=self.draw(graphs), slate_sizes=self.slate_sizes(graphs), seed=self.config.seed,
        epochs=epochs or self.config.train.epochs, slates_per_epoch=batch.slates_per_epoch)

  def batches(self, plan: pipeline.BatchPlan, total_steps: int):
    first = parallel.process_index() * parallel.local_device_count()
    assemble = lambda slots, budget: self.assemble(
        slots, budget, graphs=plan.slates_per_device, configs=self.config.batch.configs)
    return pipeline.training_batches(
        plan, total_steps=total_steps, assemble=assemble, stack=self.stack,
        local_devices=range(first, first + parallel.local_device_count()),
        threads=self.config.data.loader_threads)

  def stack(self, batches: Sequence[Any]) -> Any:
    """Puts the batches of the local devices on a leading axis."""
    return parallel.stack_for_devices(batches)

  def example_batch(self, graph: PreparedGraph) -> Any:
    """A batch of one configuration of a graph: gives the parameters their shapes."""
    slot = Slate(graph, np.arange(1), np.zeros(1, np.float32))
    (budget,) = buckets.choose_budgets([batching.total_sizes([graph])])
    return self.assemble([slot], budget, graphs=1, configs=1)

  def init_params(self, batch: Any) -> Any:
    """Fresh parameters for batches like this one (of one device)."""
    key = jax.random.key(self.config.seed)
    return jax.jit(self.model.init)(key, batch)["params"]

  def train_step(self, optimizer, *, model: Any = None, collections: Sequence[str] = ()):
    """The mapped step of `self.model`, or of one that shares its parameters."""
    loss = self.config.loss
    return step_lib.make_train_step(
        model or self.model, optimizer, losses=self.losses, temperature=loss.temperature,
        kernel_l2=loss.kernel_l2, activity_l2=loss.activity_l2, seed=self.config.seed,
        config_chunk=self.config.batch.config_chunk, collections=collections)

  def first_phase(self, graphs: Sequence[PreparedGraph], workdir: Path) -> Phase:
    """Training on these graphs from the start; files of its own go into `workdir`."""
    del workdir
    plan, epochs = self.plan(graphs), self.config.train.epochs
    total_steps = epochs * plan.steps_per_epoch
    params = self.init_params(
        self.assemble(plan.slots(0, 0), plan.budget(0), graphs=plan.slates_per_device,
                      configs=self.config.batch.configs))
    optimizer = self.create_optimizer(total_steps=total_steps)
    return Phase(
        state_lib.TrainState.create(params, optimizer), self.train_step(optimizer),
        self.batches(plan, total_steps), self.scorer(), epochs, plan.steps_per_epoch)

  def final_optimizer(self):
    """The optimiser of the last phase: gives its state a shape."""
    return self.create_optimizer(total_steps=1)

  # Evaluation.

  def scorer(self) -> evaluate.Scorer:
    options = self.config.eval
    return evaluate.Scorer(
        step_lib.make_score_step(self.model), self.assemble,
        graphs_per_batch=options.graphs, configs_per_batch=options.configs)

  def sampled_ids(self, graphs: Sequence[PreparedGraph]) -> list[np.ndarray]:
    """Configurations judged during training: a seeded sample of each graph."""
    rng = np.random.default_rng(self.config.seed)
    return [
        sampling.some_configs(len(graph.configs), self.config.train.valid_configs, rng)
        for graph in graphs
    ]

  def score(
      self, scorer: evaluate.Scorer, params: Any, graphs: Sequence[PreparedGraph],
      config_ids: Sequence[np.ndarray], *, progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores of the given configurations of each graph, `[len(ids)]` float32.

    Equal configurations are scored once: their places in a batch would round
    differently, and they could not stay in file order.
    """
    parts = [distinct.rows(g.configs.choices[ids]) for g, ids in zip(graphs, config_ids)]
    ids_once = [ids[first] for ids, (first, _) in zip(config_ids, parts)]
    scores = self.score_blocks(scorer, params, graphs, ids_once, progress=progress)
    return [s[which] for s, (_, which) in zip(scores, parts)]

  def score_blocks(
      self, scorer: evaluate.Scorer, params: Any, graphs: Sequence[PreparedGraph],
      config_ids: Sequence[np.ndarray], *, progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores as evaluation takes them; see `LayoutTask` for models that look at blocks."""
    return scorer.scores(params, graphs, config_ids=config_ids, progress=progress)

  def graph_row(
      self, graph: PreparedGraph, config_ids: np.ndarray, scores: np.ndarray
  ) -> dict[str, Any]:
    """Metrics of one labelled graph."""
    runtime = graph.configs.runtime_ns[config_ids]
    slowdown = metrics.top_k_slowdown(scores, runtime, self.slowdown_ks)
    return {
        "graph": graph.name,
        "nodes": len(graph.opcode),
        "configs": len(config_ids),
        "opa": metrics.opa(scores, runtime),
        "kendaltau": metrics.kendall_tau(scores, runtime),
        **{f"slowdown{k}": value for k, value in slowdown.items()},
    }

  def validate(
      self, scorer: evaluate.Scorer, params: Any, graphs: Sequence[PreparedGraph],
      config_ids: Sequence[np.ndarray], *, progress: bool = False,
  ) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """One row per graph, and their means with OPA pooled over all pairs."""
    scores = self.score(scorer, params, graphs, config_ids, progress=progress)
    triples = list(zip(graphs, config_ids, scores))
    rows = [self.graph_row(*triple) for triple in triples]
    pairs = [metrics.ordered_pairs(s, g.configs.runtime_ns[ids]) for g, ids, s in triples]
    return rows, evaluate.mean_row(rows) | {"opa": metrics.pooled_opa(pairs)}

  def summary(self, rows: Sequence[Mapping[str, Any]], means: Mapping[str, float]) -> str:
    """What evaluation prints."""
    shown = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
    return f"{self.collection}: {len(rows)} graphs  {shown}"

  def rank(
      self, scorer: evaluate.Scorer, params: Any, graphs: Sequence[PreparedGraph],
      *, progress: bool = False,
  ) -> dict[str, np.ndarray]:
    """Configurations of every graph, fastest first; equal ones stay in file order."""
    ids = [np.arange(len(graph.configs)) for graph in graphs]
    scores = self.score(scorer, params, graphs, ids, progress=progress)
    return {g.name: np.argsort(s, kind="stable") for g, s in zip(graphs, scores)}

  def write_results(self, path: Path, rankings: Mapping[str, np.ndarray]) -> None:
    submission.write_results(path, self.collection, rankings)
