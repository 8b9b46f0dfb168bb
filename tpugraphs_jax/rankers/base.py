"""Ranker families: the base classes of networks and families, which all commands go through.

    OpGraph -> prepare -> draw, assemble -> batch -> network -> scores [G, C], larger = slower

A `Network` is a flax module from a batch of slates to scores. It works in two parts:

  embed(batch, train=) -> [G, C, P]   the readout of every graph and configuration
  score(readout [..., P]) -> [...]    the head

A `Family` holds a network and everything that is particular to its kind: how graphs are
prepared and drawn, the structure of a batch, how configurations are scored, explained and
proposed, and which fields of a config it refuses. A family lives in one folder or file of
`rankers`, and nothing outside asks which family it has. `Kernels` and `Programs` are the
families of networks that see whole kernels or whole programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from flax import linen as nn
import jax
import numpy as np
import optax

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.data import batching, feature_blocks, plan, reduction
from tpugraphs_jax.data.batching import Budget, LayoutBatch, PreparedGraph, Slate, TileBatch
from tpugraphs_jax.data.features import Transform
from tpugraphs_jax.data.plan import ConfigSampler, Draw, draw_slates
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs
from tpugraphs_jax.nn.linear import keep_rows_short
from tpugraphs_jax.nn.precision import Precise
from tpugraphs_jax.options import check_value, limits_of
from tpugraphs_jax.rankers.scorer import Encoder, network_step, Scorer
from tpugraphs_jax.rankers.settings import Settings
from tpugraphs_jax.registry import Registry

TILE_MODELS, LAYOUT_MODELS = Registry("model.name"), Registry("model.name")
MODELS = {"tile": TILE_MODELS, "layout": LAYOUT_MODELS}
SECOND_STAGE = "head"  # folder of a second stage of training, under the working folder


class Network(Precise):
  """Base of all networks: the scores are the readouts through the head.

  Subclasses have `embed` and `score`. They make their layers in `setup`: flax allows
  `nn.compact` on one method of a module only. `nn.nodes` has the operations that a network on
  `[N, C, F]` node features needs.

  Attributes:
    hops: rounds of message passing that keep nodes apart which no configuration has
      reached yet (`nn.nodes`); 0 for networks on all nodes `[N, C, F]`.
    compares_configs: a score depends on the other configurations of its slate.
    sees_whole_graph: a readout depends on nodes at any distance, so that the readout of a
      segment depends on the segments around it.
    embeds_integers: layout configurations are embedded as integers and must not be scaled.
    reads: blocks of node features that the network reads column by column: they come last,
      in this order, and nothing scales them.
    max_norms: longest rows of embedding tables, by the path of a table in the parameters.
    distinct: number of last columns of node features on which a part of a network of kernels
      depends alone. Nodes of a kernel with equal values there share the result of that part.
    precision: of all products, see `nn.precision`; an option of most networks.
    opcodes: opcodes that the network has embeddings of, from 0.
  """

  hops = 0
  compares_configs = False
  sees_whole_graph = False
  embeds_integers = False
  reads = ()
  max_norms: ClassVar[Mapping[tuple[str, ...], float]] = {}
  distinct = 0
  opcodes = OPCODES

  def __post_init__(self):
    for name, (default, limits) in limits_of(type(self)).items():
      check_value(f"model.{name}", getattr(self, name), default, limits)
    super().__post_init__()

  @property
  def family(self) -> Callable[..., Family] | None:
    """The class of this network's family; None: `Kernels` or `Programs`."""
    return None

  def __call__(self, batch: Any, *, train: bool = False) -> jax.Array:
    """Scores `[G, C]` float32 of a batch of slates."""
    return self.score(self.embed(batch, train=train))

  def embed(self, batch: Any, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32."""
    raise NotImplementedError

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` of readouts `[..., P]`."""
    raise NotImplementedError


def options_of(build: Callable[..., Any]) -> dict[str, Any]:
  """Names of the options of a registered network, with their defaults (or `Parameter.empty`).

  Arguments bound by `functools.partial` are fixed by the name of the network and cannot be set.
  """
  fixed = build.keywords if isinstance(build, functools.partial) else {}
  return {name: parameter.default for name, parameter in inspect.signature(build).parameters.items()
          if name not in {"parent", "name", *fixed}}


def create_network(kind: str, name: str, **options: Any) -> Network:
  """The network of that name with these options.

  Args:
    kind: `tile` or `layout`.
    name: the registered name of a module class, or of a function that makes a module.
    **options: attributes of the class, or arguments of the function.

  Raises:
    ValueError: an unknown name, an option that the network does not have, or a network
      without `embed` and `score`.
  """
  build = MODELS[kind][name]
  known = options_of(build)
  if unknown := sorted(set(options) - set(known)):
    raise ValueError(f"model {name} has no option {unknown[0]!r}; it has "
                     f"{', '.join(sorted(known))}")
  network = build(**options)
  if not isinstance(network, Network):
    raise ValueError(f"model {name} is of type {type(network).__name__}, expected a module that is "
                     "derived from tpugraphs_jax.rankers.base.Network")
  for method in ("embed", "score"):
    if getattr(type(network), method) is getattr(Network, method):
      raise ValueError(f"model {name} has no method {method!r}: a network has embed(batch, train=) "
                       "and score(readout); see docs/add_your_own.md")
  return network


class SecondStage(NamedTuple):
  """A further run of the training loop, which goes on from the parameters of the first."""

  family: Family
  graphs: Sequence[Any]  # prepared training graphs of the family
  epochs: int
  optimizer: Mapping[str, Any]  # options of `train.state.create_optimizer`


class Family:
  """A kind of ranker: from graphs to batches, and from a network to scores.

  Args:
    network: the network whose parameters are trained.
    settings: of the run.
    unscaled: blocks of node features that no transform changes.

  Attributes:
    network, settings: the same.
    config_transform: transform of configurations; set when transforms are fitted or loaded.
    sown: flax collections that the network sows in training, for the steps of `training`.
    can_propose: whether the family has the method `propose`.
    encodes: the method of the network that `encoder` runs; None: the scores.

  Raises:
    ValueError: the config asks for something that the network cannot do.
  """

  sown: tuple[str, ...] = ()
  can_propose = False
  encodes: str | None = None

  def __init__(
      self, network: nn.Module, settings: Settings, unscaled: Sequence[str] = ()
  ):
    self.network, self.settings, self.unscaled = network, settings, unscaled
    self.config_transform: Transform | None = None
    slots = settings.data.neighbour_slots
    self.slots = batching.slots_of(jax.default_backend()) if slots < 0 else slots
    self.check()

  def check(self) -> None:
    """Refuses (ValueError) fields of the config that the network cannot work with."""
    _check_features(self.network.reads, self.settings.data.features, self.unscaled)
    if self.network.compares_configs:
      _check_slates(self.settings.batch)
    transform = self.settings.data.config_transform
    if self.network.embeds_integers and transform != "none":
      raise ValueError(
          f"data.config_transform is {transform!r}, but this model embeds the integers of "
          "configurations: set it to 'none', or take another model")

  def kept_nodes(self, graph: OpGraph) -> np.ndarray:
    """Numbers of the nodes `[n]` int64 of a graph that the network sees."""
    return reduction.kept_nodes(graph, self.settings.data)

  # Batches.

  def prepare(self, inputs: OpGraph, raw: OpGraph | None = None) -> Any:
    """The arrays of a graph that do not depend on the batch.

    Args:
      inputs: its `node_feat` are model inputs.
      raw: the same graph with the released features; `inputs` itself unless given.
    """
    raise NotImplementedError

  def check_graphs(self, graphs: Sequence[Any]) -> None:
    """Refuses (ValueError) prepared training graphs that the family cannot train on."""

  def draw(self, graphs: Sequence[Any], sampler: ConfigSampler) -> Draw:
    """Draws slates of prepared graphs, see `data.pipeline.BatchPlan`."""
    return draw_slates(graphs, sampler)

  def assemble(
      self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> Any:
    """A padded batch of at most `graphs` slates with `configs` configurations each."""
    raise NotImplementedError

  def align(self, batches: Sequence[Any]) -> Sequence[Any]:
    """Batches of several devices, as pytrees of one structure; most families return them as is."""
    return batches

  # Training.

  def training(
      self, step: Callable, batches: Any, *, params: Any, batch: Any, graphs: Sequence[Any],
      workdir: Path,
  ) -> tuple[Callable, Any]:
    """Wraps the training step and the batches; a family may add work before and after a step.

    Args:
      step: mapped `(state, batch) -> (state, metrics)` of the network.
      batches: iterator over batches that can be saved and restored.
      params: of the network, before training.
      batch: the first batch of one device.
      graphs: prepared training graphs.
      workdir: for files of the family's own.
    """
    del params, batch, graphs, workdir
    return step, batches

  def optimizer(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer as the network needs it, or one that changes a part of the parameters."""
    norms = self.network.max_norms
    return keep_rows_short(optimizer, norms) if norms else optimizer

  def second_stage(self, params: Any, graphs: Sequence[Any], folder: Path) -> SecondStage:
    """The second stage of training; called only where `has_second_stage`.

    Args:
      params: after the first stage.
      graphs: prepared training graphs of the first stage.
      folder: for files of the second stage.
    """
    raise NotImplementedError

  @property
  def has_second_stage(self) -> bool:
    """Whether the config asks for a second stage of training."""
    return False

  # Scores.

  @functools.cached_property
  def encoder(self) -> Encoder:
    """Scores `[G, C]` of batches, for families that score in one pass."""
    options = self.settings.eval
    return Encoder(
        network_step(self.network), self.assemble, graphs=options.graphs,
        configs=options.configs, even_slates=self.network.compares_configs)

  def scores(
      self, params: Any, graphs: Sequence[Any], config_ids: Sequence[np.ndarray], *,
      progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores of configurations `[n]` int64 of each prepared graph, `[n]` float32.

    `scorer` adds what holds for all families: equal configurations get equal scores.
    """
    return [scores for _, scores in self.encoder.run(params, graphs, config_ids, progress=progress)]

  def scorer(self) -> Scorer:
    """Scores prepared graphs with any parameters of the network."""
    return self.scorer_of(self.scores)

  def scorer_of(self, scores: Callable[..., Sequence[np.ndarray]]) -> Scorer:
    """A scorer that gets its scores from `scores`, see the method of that name."""
    return Scorer(scores, self.settings.eval, seed=self.settings.seed,
                  compares_configs=self.network.compares_configs)

  # Explanations and proposals. `ranker` is a trained `serve.ranker.Ranker` of this family.

  def explain(
      self, ranker: Any, graph: OpGraph, config: int, *, against: int | None = None
  ) -> list[Any]:
    """How much each choice of a configuration adds to its score; see `exchanges`."""
    return exchanges(
        lambda one: ranker.scores([one])[0], graph, config, against=against)

  def propose(
      self, ranker: Any, graph: OpGraph, n: int, *, near: int | None = None, **options: Any
  ) -> Any:
    """The n configurations that the ranker finds cheapest among all choices of a graph.

    Raises:
      ValueError: the family cannot search without scoring each configuration.
    """
    del ranker, graph, n, near, options
    raise ValueError(f"model {self.settings.model} has no table of costs: train one with "
                     "score tables (variant tables of configs/layout.py)")


def _check_slates(batch: plan.BatchOptions) -> None:
  """Refuses other slates than a network needs that compares the configurations of a slate."""
  if batch.config_chunk:
    raise ValueError(
        f"batch.config_chunk is {batch.config_chunk}, but this model's scores depend on all "
        "configurations of the slate: set it to 0")


def _check_features(
    reads: Sequence[str], features: tuple[str, ...], unscaled: Sequence[str]
) -> None:
  """Refuses other blocks of node features than a network that reads columns can have."""
  last = features[len(features) - len(reads) :]
  if last != tuple(reads):
    raise ValueError(f"data.features is {features}, but this model reads the columns of "
                     f"{', '.join(reads)}: put these blocks last, in this order")
  if scaled := [name for name in reads if name not in unscaled]:
    raise ValueError(f"data.feature_transform scales the block {scaled[0]}, but this model reads "
                     f"its columns as they are: add {scaled[0]}=none to data.feature_transform")


def _check_opcodes(graph: OpGraph, network: Network) -> None:
  """Refuses a graph with an opcode that the network has no embedding of."""
  largest = int(graph.node_opcode.max(initial=0))
  if largest >= network.opcodes:
    raise ValueError(
        f"{graph.name} has opcode {largest}, and the model has embeddings of the opcodes 0 to "
        f"{network.opcodes - 1}: its weights were trained on data without that opcode")


class Kernels(Family):
  """Fused kernels with tile configurations."""

  def prepare(self, inputs: OpGraph, raw: OpGraph | None = None) -> PreparedGraph:
    """A kernel with its neighbour tables; a kernel is never reduced, but gets virtual nodes."""
    _check_opcodes(inputs, self.network)
    small = reduction.reduce_graph(inputs, self.settings.data)
    blocks = self.settings.data.config_features
    small = dataclasses.replace(
        small, configs=feature_blocks.extended(raw or inputs, blocks).configs)
    return batching.prepare(
        small, small.node_feat, slots=self.slots, distinct=self.network.distinct)

  def assemble(
      self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> TileBatch:
    """A padded batch; see `batching.assemble_tile`."""
    return batching.assemble_tile(
        slates, budget, graphs=graphs, configs=configs, transform=self.config_transform)


class Programs(Family):
  """Whole programs with layout configurations."""

  def reduce(self, inputs: OpGraph) -> OpGraph:
    """The part of a program that the network gets."""
    return reduction.reduce_graph(inputs, self.settings.data)

  def prepare(self, inputs: OpGraph, raw: OpGraph | None = None) -> PreparedGraph:
    """A program, reduced, with its neighbour tables; see `Family.prepare`."""
    del raw
    return self.prepare_part(self.reduce(inputs))

  def prepare_part(self, graph: OpGraph) -> PreparedGraph:
    """`prepare` without the reduction: for reduced programs and segments of them."""
    _check_opcodes(graph, self.network)
    return batching.prepare(graph, graph.node_feat, hops=self.network.hops, slots=self.slots)

  def assemble(
      self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> LayoutBatch:
    """A padded batch; see `batching.assemble_layout`."""
    return batching.assemble_layout(
        slates, budget, graphs=graphs, configs=configs, transform=self.config_transform)


class Exchange(NamedTuple):
  """One choice of a configuration that differs from the one it is compared with."""

  nodes: tuple[int, ...]  # numbers of the configurable nodes that share the choice; empty for tiles
  choice: tuple[int, ...]  # layout row [18] of these nodes, or (column, value) of a tile
  instead: tuple[int, ...]  # the other configuration's row, or (column, value)
  score: float  # score with the choice minus score without it: above 0 = it costs time


def exchanges(
    scores: Callable[[OpGraph], np.ndarray], graph: OpGraph, config: int, *,
    against: int | None = None,
) -> list[Exchange]:
  """How much every choice of `config` adds to its score, largest first.

  Each choice in which `config` differs from `against` is exchanged for the other's,
  alone, and the graph is scored again. Charges need not add up to the difference of
  the two scores: choices act on each other.

  Args:
    scores: `[C]` float32 of all configurations of a graph.
    graph: with configurations.
    config: number of the configuration to explain.
    against: number of the configuration it is compared with; the best-ranked one
      unless given.

  Raises:
    ValueError: a number that the graph does not have.
  """
  check_numbers(graph, config, against)
  if against is None:
    against = int(np.argsort(scores(graph), kind="stable")[0])
  exchange = _exchange_rows if isinstance(graph.configs, LayoutConfigs) else _exchange_columns
  changed, parts = exchange(graph, config, against)
  if not parts:
    return []
  scored = scores(dataclasses.replace(graph, configs=changed)).astype(np.float64)
  rows = [Exchange(*part, float(scored[0] - one)) for part, one in zip(parts, scored[1:])]
  return sorted(rows, key=lambda row: -row.score)


def check_numbers(graph: OpGraph, *numbers: int | None) -> None:
  """Refuses (ValueError) numbers of configurations that a graph does not have; None passes."""
  for number in numbers:
    if number is not None and not 0 <= number < len(graph.configs):
      raise ValueError(f"configuration {number} of {graph.name}, expected 0 to "
                       f"{len(graph.configs) - 1}")


def _exchange_rows(graph: OpGraph, config: int, against: int):
  """The configuration itself, then one per group that differs, with the other's row there."""
  configs = graph.configs
  own, other = (np.asarray(configs.group_row[number]) for number in (config, against))
  groups = np.flatnonzero(own != other)
  group_row = np.repeat(own[None], len(groups) + 1, axis=0)
  group_row[np.arange(1, len(groups) + 1), groups] = other[groups]
  parts = [
      (tuple(graph.config_node[configs.node_group == group].tolist()),
       tuple(configs.rows[own[group]].tolist()), tuple(configs.rows[other[group]].tolist()))
      for group in groups]
  changed = dataclasses.replace(
      configs, group_row=group_row, runtime_ns=np.zeros(len(group_row), np.int64))
  return changed, parts


def _exchange_columns(graph: OpGraph, config: int, against: int):
  """The configuration itself, then one per column that differs, with the other's value."""
  configs = graph.configs
  own, other = configs.config_feat[config], configs.config_feat[against]
  columns = np.flatnonzero(own != other)
  feat = np.repeat(own[None], len(columns) + 1, axis=0)
  feat[np.arange(1, len(columns) + 1), columns] = other[columns]
  parts = [((), (int(c), int(own[c])), (int(c), int(other[c]))) for c in columns]
  some = np.zeros(len(feat), np.int64)
  return TileConfigs(feat, some, some + 1), parts
