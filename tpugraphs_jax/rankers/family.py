"""Base classes of ranker families.

    OpGraph -> prepare -> draw, assemble -> batch -> network -> scores [G, C], larger = slower

A `Family` holds a network and all code that depends on its kind. It prepares graphs, draws slates,
assembles batches, scores configurations, and refuses fields of a config.
A family is a folder or file of `rankers`; code outside of `rankers` works with any family.
`TileFamily` is the base of families that rank tiles of kernels, `LayoutFamily` of those that rank
layouts of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any

from flax import linen as nn
import jax
import numpy as np
import optax

from tpugraphs_jax.data import batching, features, reduction
from tpugraphs_jax.data.batching import Budget, LayoutBatch, PreparedGraph, PreparedProgram, Slate
from tpugraphs_jax.data.plan import Draw, draw_slates, Sampler
from tpugraphs_jax.data.transforms import Transform
from tpugraphs_jax.graph import distinct_rows, LayoutConfigs, OpGraph, TileConfigs
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn.embeddings import keep_rows_short
from tpugraphs_jax.optimizer import Optimizer
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.scorer import Encoder, network_step, rng_of

_FEWER = "; a run takes less with a smaller eval.graphs"


@dataclasses.dataclass(frozen=True)
class Phase:
  """A part of the training of a ranker.

  Attributes:
    family: of the network.
    graphs: prepared training graphs.
    folder: for checkpoints and files of the family.
    optimizer: settings of the optimizer.
    epochs: length.
    params: first parameters; None: initialised from the seed.
    is_last: whether its evaluations make the model.
  """

  family: Family
  graphs: Sequence[Any]
  folder: Path
  optimizer: Optimizer
  epochs: int
  params: optax.Params | None = None
  is_last: bool = True


class Family:
  """Base of ranker families: graphs to batches, batches to scores.

  Args:
    network: the network to train.
    config: of the run.
    unscaled: blocks of node features that no transform changes.

  Attributes:
    network, config: the arguments.
    config_transform: transform of configurations; set when transforms are fitted or loaded.

  Raises:
    ValueError: fields of the config that the network cannot work with.
  """

  def __init__(self, network: nn.Module, config: Config, unscaled: Sequence[str] = ()):
    self.network, self.config, self.unscaled = network, config, unscaled
    self.config_transform: Transform | None = None
    slots = config.data.neighbour_slots
    self.slots = batching.slots_of(jax.default_backend()) if slots < 0 else slots
    self.check()

  def check(self) -> None:
    """Refuses (ValueError) fields of the config that the network cannot work with."""
    _check_features(self.network.reads, self.config.data.features, self.unscaled)
    chunk = self.config.batch.config_chunk
    if chunk and self.network.compares_configs:
      raise ValueError(
        f"batch.config_chunk is {chunk}, but this model's scores depend on all configurations of "
        "the slate: set it to 0"
      )
    if self.config.loss.kernels and not self.network.predicts_kernels:
      raise ValueError(
        f"loss.kernels is {self.config.loss.kernels}, but this model predicts no times of kernels: "
        "set it to 0, or take a model that does, such as TimeTables"
      )
    transform = self.config.data.config_transform
    if self.network.embeds_integers and transform != "none":
      raise ValueError(
        f"data.config_transform is {transform!r}, but this model embeds the integers of "
        "configurations: set it to 'none', or take another model"
      )

  @property
  def transform(self) -> Transform:
    """The fitted transform of configurations; a family without one raises ValueError."""
    if self.config_transform is None:
      raise ValueError("no transform of configurations: fit one (`Ranker.fit_configs`) or load one")
    return self.config_transform

  def reduce(self, graph: OpGraph) -> reduction.Subgraph:
    """The part of a graph that the network sees, with virtual nodes."""
    return reduction.reduce_graph(graph, self.config.data)

  # Batches.

  def prepare(self, graph: OpGraph, feat: np.ndarray) -> Any:
    """The arrays of a graph that are equal in all batches.

    Args:
      graph: as read from a file.
      feat: `[N, F]` float32 inputs of the network, see `data.transforms.NodeFeatures`.
    """
    raise NotImplementedError

  def draw(self, graphs: Sequence[Any], sampler: Sampler) -> Draw:
    """The function that draws slates of prepared graphs, see `data.plan.BatchPlan`."""
    return draw_slates(graphs, sampler)

  def assemble(self, slates: Sequence[Any], budget: Budget, *, graphs: int, configs: int) -> Any:
    """A padded batch of at most `graphs` slates of `draw`, `configs` configurations each."""
    raise NotImplementedError

  def stack(self, batches: Sequence[Any]) -> Any:
    """Batches of the local devices as one."""
    return parallel.stack_for_devices(batches)

  # Training.

  def first_phase(self, graphs: Sequence[Any], folder: Path) -> Phase:
    """The first phase on prepared training graphs; mostly the only one."""
    return Phase(self, graphs, folder, self.config.optimizer, self.config.train.epochs)

  def next_phase(self, phase: Phase, params: optax.Params) -> Phase:
    """The phase after one that is not the last, which ended with these parameters."""
    raise NotImplementedError

  def check_graphs(self, graphs: Sequence[Any]) -> None:
    """Refuses (ValueError) training graphs that the family cannot train on."""

  def constrain(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with what the network bounds or freezes."""
    norms = self.network.max_norms
    return keep_rows_short(optimizer, norms) if norms else optimizer

  def attach_readouts(
    self,
    step: Callable,
    batches: Any,
    *,
    params: optax.Params,
    batch: Any,
    graphs: Sequence[Any],
    folder: Path,
  ) -> tuple[Callable, Any]:
    """The step and the batches with what the family keeps beside them; here they stay.

    Args:
      step: mapped `(state, batch) -> (state, metrics)`.
      batches: iterator of batches whose position can be saved and restored.
      params: initial parameters.
      batch: the first batch of one device.
      graphs: prepared training graphs.
      folder: for files.
    """
    del params, batch, graphs, folder
    return step, batches

  # Scores.

  @functools.cached_property
  def encoder(self) -> Encoder:
    """Runs the network on batches, for families that score in one pass."""
    options = self.config.eval
    return Encoder(
      network_step(self.network),
      self.assemble,
      graphs=options.graphs,
      configs=options.configs,
      even_slates=self.network.compares_configs,
    )

  def scores(
    self,
    params: optax.Params,
    graphs: Sequence[Any],
    config_ids: Sequence[np.ndarray] | None = None,
    *,
    permutations: int | None = None,
  ) -> list[np.ndarray]:
    """Scores of configurations of each graph, `[n]` float32, larger = slower.

    Configurations with equal values are scored once, so that rounding cannot order them. A network
    that compares the configurations of a slate is the exception. It scores all configurations in
    several orders, each cut into slates, and its scores are averaged (1st place, 10 orders).

    Args:
      params: of the network.
      graphs: prepared graphs.
      config_ids: `[n]` int64 for each graph; all configurations in file order unless given.
      permutations: number of orders, the first as given; `eval.permutations` unless given.

    Raises:
      FloatingPointError: a score is not finite.
      ValueError: the memory does not suffice.
    """
    if config_ids is None:
      config_ids = [np.arange(len(graph.configs)) for graph in graphs]
    if not len(graphs):
      return []
    options, compares = self.config.eval, self.network.compares_configs
    with parallel.explaining_memory(
      f"the model compares {options.configs} configurations of a graph (eval.configs of its run) "
      "and takes no fewer at a time: rank where there is more memory"
      if compares
      else "scoring takes as few configurations at a time as free memory asks for: end other "
      f"programs, or rank where there is more memory{_FEWER * (options.graphs > 1)}"
    ):
      if compares:
        orders = options.permutations if permutations is None else permutations
        scores = self._mean_over_orders(params, graphs, config_ids, orders)
      else:
        parts = [distinct_rows(g.configs.choices[ids]) for g, ids in zip(graphs, config_ids)]
        once = [ids[first] for ids, (first, _) in zip(config_ids, parts)]
        distinct = self.run_network(params, graphs, once)
        scores = [of_graph[which] for of_graph, (_, which) in zip(distinct, parts)]
    for graph, of_graph in zip(graphs, scores):
      _check_finite(graph.name, of_graph)
    return scores

  def run_network(
    self, params: optax.Params, graphs: Sequence[Any], config_ids: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Runs the network: scores `[n]` float32 of configurations `[n]` int64 of each graph."""
    return self.encoder(params, graphs, config_ids)

  def _mean_over_orders(self, params, graphs, config_ids, orders: int):
    rngs = [rng_of(graph, self.config.seed) for graph in graphs]
    total = [np.zeros(len(ids)) for ids in config_ids]
    for number in range(orders):
      order = [np.arange(len(ids)) for ids in config_ids]
      if number:
        order = [rng.permutation(len(ids)) for rng, ids in zip(rngs, config_ids)]
      permuted = [ids[o] for ids, o in zip(config_ids, order)]
      scores = self.run_network(params, graphs, permuted)
      for sums, o, new in zip(total, order, scores):
        sums[o] += new
    return [(sums / orders).astype(np.float32) for sums in total]


def _check_finite(name: str, scores: np.ndarray) -> None:
  """Refuses scores of a graph that are not finite."""
  if bad := np.count_nonzero(~np.isfinite(scores)):
    raise FloatingPointError(
      f"{name}: {bad} of {len(scores)} scores are not finite, because its features "
      "or the parameters are too large for the model: train with a data.feature_transform "
      "that bounds features, model.dtype=float32 or a lower optimizer.learning_rate"
    )


def _check_features(
  reads: Sequence[str], features: tuple[str, ...], unscaled: Sequence[str]
) -> None:
  """Refuses blocks of node features that do not fit a network that reads columns."""
  last = features[len(features) - len(reads) :]
  if last != tuple(reads):
    raise ValueError(
      f"data.features is {features}, but this model reads the columns of "
      f"{', '.join(reads)}: put these blocks last, in this order"
    )
  if scaled := [name for name in reads if name not in unscaled]:
    raise ValueError(
      f"data.feature_transform scales the block {scaled[0]}, but this model reads "
      f"its columns unscaled: add {scaled[0]}=none to data.feature_transform"
    )


def _check_opcodes(graph: OpGraph, opcodes: int) -> None:
  """Refuses a graph with an opcode that a network with so many embeddings does not know."""
  largest = int(graph.node_opcode.max(initial=0))
  if largest >= opcodes:
    raise ValueError(
      f"{graph.name} has opcode {largest}, and the model has embeddings of the opcodes 0 to "
      f"{opcodes - 1}: its weights were trained on data without that opcode"
    )


class TileFamily(Family):
  """Fused kernels with tile configurations, which networks read in `TileBatch.config_feat`."""

  def prepare(self, graph: OpGraph[TileConfigs], feat: np.ndarray) -> PreparedGraph[TileConfigs]:
    """A kernel with its neighbour tables. Reduction only adds virtual nodes to kernels."""
    _check_opcodes(graph, self.network.opcodes)
    reduced = self.reduce(graph)
    configs = features.with_config_features(graph, self.config.data.config_features).configs
    kernel, distinct = dataclasses.replace(reduced.graph, configs=configs), self.network.distinct
    return batching.prepare(kernel, reduced.rows(feat), slots=self.slots, distinct=distinct)

  def assemble(
    self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> batching.TileBatch:
    """A padded batch; see `batching.assemble_tile`."""
    return batching.assemble_tile(
      slates, budget, graphs=graphs, configs=configs, transform=self.transform
    )


class LayoutFamily(Family):
  """Whole programs with layout configurations."""

  def prepare(self, graph: OpGraph[LayoutConfigs], feat: np.ndarray) -> PreparedProgram:
    """A reduced program with its neighbour tables; see `Family.prepare`."""
    reduced = self.reduce(graph)
    return self.prepare_part(reduced.graph, reduced.rows(feat))

  def prepare_part(self, graph: OpGraph[LayoutConfigs], feat: np.ndarray) -> PreparedProgram:
    """`prepare` without the reduction, for reduced programs and their segments."""
    _check_opcodes(graph, self.network.opcodes)
    return batching.prepare_program(graph, feat, hops=self.network.hops, slots=self.slots)

  def assemble(
    self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> LayoutBatch:
    """A padded batch; see `batching.assemble_layout`."""
    return batching.assemble_layout(
      slates, budget, graphs=graphs, configs=configs, transform=self.transform
    )
