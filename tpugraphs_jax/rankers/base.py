"""Base classes of networks and ranker families.

    OpGraph -> prepare -> draw, assemble -> batch -> network -> scores [G, C], larger = slower

A `Network` is a flax module from a batch of slates to scores, in two parts:

  embed(batch, train=) -> [G, C, P]   the readout of every graph and configuration
  score(readout [..., P]) -> [...]    the head

A `Family` holds a network and all code that depends on its kind. It prepares graphs, draws slates,
assembles batches, scores configurations, and refuses fields of a config.
A family is a folder or file of `rankers`; code outside of `rankers` works with any family.
`TileFamily` is the base of families that rank tiles of kernels, `LayoutFamily` of those that rank
layouts of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import inspect
from typing import Any, ClassVar, TYPE_CHECKING

from flax import linen as nn
import jax
import numpy as np
import optax

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.config_fields import check_value, Limits, limits_of, MOST, option, Registry
from tpugraphs_jax.data import batching, features, reduction
from tpugraphs_jax.data.batching import Budget, LayoutBatch, PreparedGraph, PreparedProgram, Slate
from tpugraphs_jax.data.plan import Draw, draw_slates, Sampler
from tpugraphs_jax.data.transforms import Transform
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs
from tpugraphs_jax.nn.layers import Precise, PRECISIONS
from tpugraphs_jax.rankers.scorer import Encoder, network_step

if TYPE_CHECKING:
  from tpugraphs_jax.rankers.config import Config

# Networks.

TILE_MODELS, LAYOUT_MODELS = Registry("model.name"), Registry("model.name")
MODELS = {"tile": TILE_MODELS, "layout": LAYOUT_MODELS}


class Network(Precise):
  """Base of all networks: scores are the head applied to readouts.

  Subclasses define `embed` and `score`. They create layers in `setup`, because flax allows
  `nn.compact` on only one method of a module. Operations on node features `[N, C, F]` are in
  `nn.nodes`.

  Attributes:
    embeds_integers: layout configurations are embedded as integers and must not be scaled.
    reads: blocks of node features whose columns the network reads by number. These blocks are the
      last ones, in this order, and are not scaled.
    max_norms: largest length of rows of embedding tables, by the path of a table in the parameters.
    distinct: width of the last block of node features, which the token encoder of a kernel network
      reads. Nodes of a kernel with equal values in this block share one result of the encoder.
    precision: of matrix products, see `nn.layers.Precise`.
    opcodes: rows of the embedding table, for opcodes 0 to `opcodes` - 1.
  """

  embeds_integers = False
  reads: ClassVar[tuple[str, ...]] = ()
  max_norms: ClassVar[Mapping[tuple[str, ...], float]] = {}
  distinct = 0
  opcodes = OPCODES
  precision: str = option(
    "highest", "precision of matrix products", kw_only=True, one_of=PRECISIONS
  )

  def __post_init__(self):
    for name, (default, limits) in limits_of_network(type(self)).items():
      check_value(f"model.{name}", getattr(self, name), default, limits)
    super().__post_init__()

  @property
  def hops(self) -> int:
    """Rounds of message passing that run on split features (`nn.nodes`).

    Nodes that no configuration has reached yet are computed once. 0 means that the features of
    all nodes are `[N, C, F]`.
    """
    return 0

  @property
  def compares_configs(self) -> bool:
    """Whether a score depends on the other configurations of its slate."""
    return False

  @property
  def sees_whole_graph(self) -> bool:
    """Whether a readout depends on nodes at any distance, which no single segment has."""
    return False

  @property
  def family(self) -> Callable[..., Family] | None:
    """The class of the network's family; None = `TileFamily` or `LayoutFamily`."""
    return None

  def __call__(self, batch: Any, *, train: bool = False) -> jax.Array:
    """Scores `[G, C]` float32 of a batch."""
    return self.score(self.embed(batch, train=train))

  def embed(self, batch: Any, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32."""
    raise NotImplementedError

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` of readouts `[..., P]`."""
    raise NotImplementedError


def options_of(build: Callable[..., Any]) -> dict[str, Any]:
  """Defaults of the options of a registered network by name, or `inspect.Parameter.empty`.

  `functools.partial` fixes arguments by the network's name: they cannot be set.
  """
  fixed = build.keywords if isinstance(build, functools.partial) else {}
  parameters, hidden = inspect.signature(build).parameters, {"parent", "name", *fixed}
  return {name: known.default for name, known in parameters.items() if name not in hidden}


def limits_of_network(build: Callable[..., Any]) -> dict[str, tuple[Any, Limits]]:
  """Default and limits of the options of a registered network, by name.

  An attribute without `config_fields.option` takes a value of any type, and a number of at most
  `config_fields.MOST`.
  """
  maker = build.func if isinstance(build, functools.partial) else build
  declared = limits_of(maker) if inspect.isclass(maker) else {}
  plain = None, Limits("an option of the network, without a description", most=MOST)
  return {name: declared.get(name, plain) for name in options_of(build)}


def check_options(kind: str, name: str, options: Mapping[str, Any]) -> None:
  """Refuses (ValueError) an unknown network or option, and a value beyond its limits.

  Args:
    kind: `tile` or `layout`.
    name: of a network.
    options: values by name.
  """
  known = limits_of_network(MODELS[kind][name])
  for field, value in options.items():
    if field not in known:
      raise ValueError(
        f"model {name} has no option {field!r}; it has {', '.join(sorted(known))}: "
        f"config.model = {{'name': {name!r}}} takes their defaults"
      )
    check_value(f"model.{field}", value, *known[field])


def create_network(kind: str, name: str, **options: Any) -> Network:
  """Creates a registered network.

  Args:
    kind: `tile` or `layout`.
    name: the registered name of a module class, or of a function that makes a module.
    **options: attributes of the class, or arguments of the function.

  Raises:
    ValueError: as `check_options`, or for a network without `embed` and `score`.
  """
  check_options(kind, name, options)
  network = MODELS[kind][name](**options)
  if not isinstance(network, Network):
    raise ValueError(
      f"model {name} is of type {type(network).__name__}, expected a module that is "
      "derived from tpugraphs_jax.rankers.base.Network"
    )
  for method in ("embed", "score"):
    if getattr(type(network), method) is getattr(Network, method):
      raise ValueError(
        f"model {name} has no method {method!r}: a network has embed(batch, train=) "
        "and score(readout); see docs/add_your_own.md"
      )
  return network


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
    config_ids: Sequence[np.ndarray],
    *,
    progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores `[n]` float32 of configurations `[n]` int64 of each graph, for `scorer.score`."""
    return self.encoder(params, graphs, config_ids, progress=progress)


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
