"""What a ranker is: the methods that it has and what it looks at.

A ranker is a flax module that maps a batch of slates to scores `[G, C]`, larger =
slower. It does so in two parts:

  embed(batch, train=) -> [G, C, P]   the readout of every graph and configuration
  score(readout [..., P]) -> [...]    the head

Graph Segment Training adds readouts up over the segments of a graph before it calls
the head; everything else calls the two one after the other. `sees` declares what the
two look at, and `Use` what a run is about to do: `check_use` refuses, in this one
place, what does not go together.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from flax import linen as nn
import jax

from tpugraphs_jax.registry import Registry

BLOCKS = ("never", "training", "always")

TILE_MODELS, LAYOUT_MODELS = Registry("model.name"), Registry("model.name")
MODELS = {"tile": TILE_MODELS, "layout": LAYOUT_MODELS}


@dataclasses.dataclass(frozen=True)
class Sees:
  """What a ranker looks at, besides one configuration of one graph at a time.

  Attributes:
    hops: rounds of message passing that keep nodes apart which no configuration has
      reached yet (`split_nodes`). 0 for rankers that work on all nodes `[N, C, F]`.
    slates: a score depends on the other configurations of the slate.
    whole_graph: a readout depends on nodes anywhere in the graph, however far away:
      the readout of a segment depends on the segments around it.
    tables: the ranker takes `TableBatch`es and computes costs of choices from a program
      alone; its method `tables` gives them.
    residual: a score is more than the sum of such costs; the ranker's method `residuals`
      gives the rest.
    late_join: configurations meet the graph after its readout: the ranker's methods
      `pooled(batch) -> [G, F]` and `join(pooled, configurations)` are the two halves of
      `embed`.
    integers: layout configurations are embedded as the integers that they are, and must
      not be scaled.
    reads: blocks of node features that the ranker reads column by column: they come last,
      in this order, and nothing scales them.
    distinct: how many of the last columns of node features decide a part of the ranker that
      tiles enter: it is computed once for nodes of a kernel that are equal there.
    blocks: when the ranker looks at the sampled block of nodes of a batch alone: one
      of `BLOCKS`.
  """

  hops: int = 0
  slates: bool = False
  whole_graph: bool = False
  tables: bool = False
  residual: bool = False
  late_join: bool = False
  integers: bool = False
  reads: tuple[str, ...] = ()
  distinct: int = 0
  blocks: str = "never"

  def __post_init__(self):
    if self.blocks not in BLOCKS:
      raise ValueError(f"blocks is {self.blocks!r}, expected one of {', '.join(BLOCKS)}")
    if self.hops < 0:
      raise ValueError(f"hops is {self.hops}, expected at least 0")


class Ranker(nn.Module):
  """Base of all rankers: the scores are the readouts through the head.

  Subclasses have `embed` and `score`, and `sees` where they look at more than single
  configurations. They make their layers in `setup`: flax allows `nn.compact` on one
  method of a module only. `plain` has what a model on `[N, C, F]` node features needs.
  """

  @property
  def sees(self) -> Sees:
    """What the ranker looks at."""
    return Sees()

  def __call__(self, batch: Any, *, train: bool = False) -> jax.Array:
    """Scores `[G, C]` float32 of a batch of slates."""
    return self.score(self.embed(batch, train=train))

  def embed(self, batch: Any, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32."""
    raise NotImplementedError

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` of readouts `[..., P]`."""
    raise NotImplementedError


def create(kind: str, name: str, **options: Any) -> Ranker:
  """The ranker of that name with these options.

  Args:
    kind: `tile` or `layout`.
    name: the registered name of a module class, or of a function that makes a module.
    **options: attributes of the class, or arguments of the function.

  Raises:
    ValueError: an unknown name, an option that the model does not have, or a model
      that lacks what a ranker needs.
  """
  build = MODELS[kind][name]
  # A partial sets attributes that are the meaning of its name: they are no options.
  fixed = build.keywords if isinstance(build, functools.partial) else {}
  known = set(inspect.signature(build).parameters) - {"parent", "name", *fixed}
  if unknown := sorted(set(options) - known):
    raise ValueError(f"model {name} has no option {unknown[0]!r}; it has "
                     f"{', '.join(sorted(known))}")
  return check(build(**options), name)


def check(model: Any, name: str) -> Ranker:
  """The model, if it is a ranker.

  Raises:
    ValueError: it is no flax module, lacks a method, or does not say what it sees.
  """
  if not isinstance(model, nn.Module):
    raise ValueError(f"model {name} is of type {type(model).__name__}, expected a flax.linen "
                     "module: derive it from tpugraphs_jax.rankers.base.Ranker")
  for method in ("embed", "score"):
    own = getattr(type(model), method, None)
    if own is None or own is getattr(Ranker, method):
      raise ValueError(f"model {name} has no method {method!r}: a ranker has embed(batch, train=) "
                       "and score(readout); see docs/add_your_own.md")
  if not isinstance(getattr(model, "sees", None), Sees):
    raise ValueError(f"model {name} does not say what it sees: derive it from "
                     "tpugraphs_jax.rankers.base.Ranker, or give it a property `sees`")
  return model


@dataclasses.dataclass(frozen=True)
class Use:
  """What a run does with a ranker.

  Attributes:
    slate: configurations per slate in training.
    scored: configurations per slate in validation and ranking.
    chunk: configurations that pass through the model at a time; 0 = the whole slate.
    config_transform: how configurations are scaled, one of `data.features.KINDS`.
    features: blocks of node features, in order.
    unscaled: those of them that no transform changes.
    segments: the ranker sees segments of a graph instead of the whole graph.
    history: readouts of other segments come from earlier training steps.
  """

  slate: int
  scored: int
  chunk: int = 0
  config_transform: str = "none"
  features: tuple[str, ...] = ()
  unscaled: tuple[str, ...] = ()
  segments: bool = False
  history: bool = False


def check_use(sees: Sees, use: Use) -> None:
  """Refuses what a ranker that sees this much cannot do.

  Raises:
    ValueError: with the field to change.
  """
  if sees.slates:
    if use.slate < 2:
      raise ValueError(f"batch.configs is {use.slate}, but this model compares the configurations "
                       "of a slate with each other: set it to at least 2")
    if use.slate != use.scored:
      raise ValueError(
          f"eval.configs is {use.scored} and batch.configs is {use.slate}, but this model's "
          "scores depend on the other configurations of the slate: set both to the same number")
    if use.chunk:
      raise ValueError(
          f"batch.config_chunk is {use.chunk}, but this model's scores depend on all "
          "configurations of the slate: set it to 0")
  if sees.tables and (use.chunk or use.segments):
    what = "segments" if use.segments else "batch.config_chunk"
    raise ValueError(f"{what} does not go with this model, which sees a program once for all of "
                     "its configurations: train it on whole graphs, batch.config_chunk=0")
  if sees.integers and use.config_transform != "none":
    raise ValueError(
        f"data.config_transform is {use.config_transform!r}, but this model embeds the integers of "
        "configurations: set it to 'none', or take another model")
  _check_features(sees.reads, use)
  if use.segments and sees.blocks != "never":
    raise ValueError(
        "this model looks at sampled blocks of nodes, and segments take the place of blocks: set "
        "model.dropout to fullgraph, or train on whole graphs (variant full)")
  if use.history and (sees.slates or sees.whole_graph):
    what = "across configurations" if sees.slates else "at the whole graph"
    raise ValueError(
        f"this model looks {what}: the history table keeps a segment's readout of an earlier step, "
        "with other segments and configurations around it. Train without a table (variants full, "
        "gst and one)")


def _check_features(reads: tuple[str, ...], use: Use) -> None:
  """Refuses other blocks of node features than a ranker that reads these can have."""
  last = use.features[len(use.features) - len(reads) :]
  if last != reads:
    raise ValueError(f"data.features is {use.features}, but this model reads the columns of "
                     f"{', '.join(reads)}: put these blocks last, in this order")
  if scaled := [name for name in reads if name not in use.unscaled]:
    raise ValueError(f"data.feature_transform scales the block {scaled[0]}, but this model reads "
                     f"its columns as they are: add {scaled[0]}=none to data.feature_transform")
