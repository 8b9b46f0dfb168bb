"""The base class of networks, and the registries of their names.

A `Network` is a flax module from a batch of slates to scores, in two parts:

  embed(batch, train=) -> [G, C, P]   the readout of every graph and configuration
  score(readout [..., P]) -> [...]    the head

`family` has the code around a network: batches of graphs, and their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import inspect
from typing import Any, ClassVar

import jax

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.config_fields import check_value, Limits, limits_of, MOST, option, Registry
from tpugraphs_jax.nn.layers import Precise, PRECISIONS

TILE_MODELS, LAYOUT_MODELS = Registry("model.name"), Registry("model.name")
MODELS = {"tile": TILE_MODELS, "layout": LAYOUT_MODELS}


class Network(Precise):
  """Base of all networks: scores are the head applied to readouts.

  Subclasses define `embed` and `score`. They create layers in `setup`, because flax allows only one
  compact method of a module. Operations on node features `[N, C, F]` are in
  `nn.nodes`.

  Attributes:
    embeds_integers: layout configurations are embedded as integers and must not be scaled.
    reads: blocks of node features whose columns the network reads by number. These blocks are the
      last ones, in this order, and are not scaled.
    max_norms: largest length of rows of embedding tables, by the path of a table in the parameters.
    predicts_kernels: scores are times, and the method `kernels` of a batch with
      `data.batching.KernelBatch` gives the times `[D, C]` of kernels, which it also sows.
    distinct: width of the last block of node features, which the token encoder of a kernel network
      reads. Nodes of a kernel with equal values in this block share one result of the encoder.
    precision: of matrix products, see `nn.layers.Precise`.
    opcodes: rows of the embedding table, for opcodes 0 to `opcodes` - 1.
  """

  embeds_integers = False
  reads: ClassVar[tuple[str, ...]] = ()
  max_norms: ClassVar[Mapping[tuple[str, ...], float]] = {}
  predicts_kernels = False
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
  def family(self) -> Callable[..., Any] | None:
    """The class of the network's family; None = `family.TileFamily` or `family.LayoutFamily`."""
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
