"""Node features as named blocks, computed in one place for every use of a model.

A block maps an `OpGraph` to `[N, F]`. A model sees its blocks side by side, each through
a `Transform` of its own that was fitted on the training graphs:

    raw graph -> blocks -> transforms -> the same graph with `node_feat` = model input

This comes before graphs are reduced or cut into segments, so that a block may look at
the whole graph. Training, ranking and own programs all come through `NodeFeatures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from pathlib import Path

import numpy as np

from tpugraphs_jax.data import (
    column_blocks, extra_features, features, graph_features, random_walk)
from tpugraphs_jax.data.features import Transform
from tpugraphs_jax.graph import NODE_FEATURES, OpGraph
from tpugraphs_jax.registry import Registry

Block = Callable[[OpGraph], np.ndarray]  # raw features [N, F] of a graph of N nodes
BLOCKS = Registry("data.features")
RELEASED, EXTRA = "released", "extra"


@dataclasses.dataclass(frozen=True)
class Options:
  """What the blocks of the project can be told.

  Attributes:
    pad_value: of the `released` block, see `features.node_features`.
    extra_dir: folder with a file of `extra` features per graph; graphs that carry
      such columns need none.
  """

  pad_value: int = 0
  extra_dir: str = ""


@BLOCKS.register(RELEASED)
def released(graph: OpGraph, options: Options = Options()) -> np.ndarray:
  """The 140 released columns, `[N, 140]` float32."""
  return features.node_features(graph, pad_value=options.pad_value)[:, :NODE_FEATURES]


@BLOCKS.register(EXTRA)
def extra(graph: OpGraph, options: Options = Options()) -> np.ndarray:
  """The columns of `hlo.extra_features`, `[N, X]` float32, from the graph or a file.

  Raises:
    ValueError: the graph carries none, and no folder is named.
    FileNotFoundError: the folder has no file of the graph's name.
  """
  if graph.node_feat.shape[1] > NODE_FEATURES:
    return graph.node_feat[:, NODE_FEATURES:]
  if not options.extra_dir:
    raise ValueError(
        f"{graph.name} has {graph.node_feat.shape[1]} node features, the model was trained on "
        "more: add the extra ones (data.extra_features.append), or name their folder in "
        "data.extra_dir")
  return extra_features.read(graph, options.extra_dir)


BLOCKS.register("random_walk")(random_walk.return_probabilities)
BLOCKS.register("operand_shapes")(graph_features.operand_shapes)
BLOCKS.register("tile_modulo")(graph_features.tile_modulo)
BLOCKS.register("dimension_tokens")(column_blocks.dimension_tokens)
BLOCKS.register("node_layout")(column_blocks.node_layout)


def _bound(name: str, options: Options) -> Block:
  block = BLOCKS[name]
  return functools.partial(block, options=options) if block in (released, extra) else block


class NodeFeatures:
  """The blocks of a model.

  Args:
    names: entries of `BLOCKS`, in the order of the columns.
    kinds: transforms by group, see `features.parse_kinds`; the groups of the `released`
      block are `features.NODE_GROUPS`, any other block is a group of its own name.
    options: of the project's own blocks.

  Attributes:
    transforms: a `Transform` for each name, set by `fit` or from what was saved.

  Raises:
    ValueError: an unknown or repeated block, or impossible kinds.
  """

  def __init__(self, names: Sequence[str], *, kinds: str, options: Options = Options()):
    if not names or len(set(names)) < len(names):
      raise ValueError(f"data.features is {tuple(names)}, expected one or more different blocks "
                       f"of {', '.join(BLOCKS)}")
    self.names = tuple(names)
    self._blocks = {name: _bound(name, options) for name in names}
    self._kinds = _kinds_of_blocks(kinds, self.names)
    self.transforms: dict[str, Transform] = {}

  @property
  def unscaled(self) -> tuple[str, ...]:
    """The blocks of which no column is scaled, moved or left out."""
    widths = dict.fromkeys(self.names, 1) | {RELEASED: NODE_FEATURES}
    return tuple(name for name in self.names if (self._kinds[name](widths[name]) == "none").all())

  def raw(self, graph: OpGraph, name: str) -> np.ndarray:
    """One block of a graph as it is, `[N, F]`.

    Raises:
      ValueError: the block does not give one row of finite numbers per node.
    """
    values = np.asarray(self._blocks[name](graph))
    if values.ndim != 2 or len(values) != graph.num_nodes or values.dtype.kind not in "fiub":
      raise ValueError(
          f"feature block {name!r} gave {values.dtype} {list(values.shape)} for {graph.name}, "
          f"expected numbers [{graph.num_nodes}, F], a row per node")
    if not np.isfinite(values).all():
      raise ValueError(f"feature block {name!r} gave values for {graph.name} that are not finite")
    return values

  def fit(self, graphs: Sequence[OpGraph]) -> None:
    """Fits every block's transform on training graphs."""
    for name in self.names:
      columns = self.raw(graphs[0], name).shape[1]
      self.transforms[name] = features.fit(
          (self._with_columns(graph, name, columns) for graph in graphs),
          self._kinds[name](columns))

  def _with_columns(self, graph: OpGraph, name: str, columns: int) -> np.ndarray:
    values = self.raw(graph, name)
    if values.shape[1] != columns:
      raise ValueError(f"feature block {name!r} gave {values.shape[1]} columns for {graph.name} "
                       f"and {columns} for another graph: it must always give as many")
    return values

  def __call__(self, graph: OpGraph) -> OpGraph:
    """The graph with model inputs `[N, F]` float32 as `node_feat`."""
    parts = [self._transformed(graph, name) for name in self.names]
    joined = np.concatenate(parts, axis=1)
    return dataclasses.replace(graph, node_feat=np.ascontiguousarray(joined, np.float32))

  def _transformed(self, graph: OpGraph, name: str) -> np.ndarray:
    transform, values = self.transforms[name], self.raw(graph, name)
    needed = int(transform.kept.max(initial=-1)) + 1
    if values.shape[1] < needed:
      raise ValueError(f"feature block {name!r} of {graph.name} has {values.shape[1]} columns, the "
                       f"model was trained on {needed}")
    return transform(values)


def _kinds_of_blocks(
    text: str, names: Sequence[str]
) -> dict[str, Callable[[int], np.ndarray]]:
  """For each block, the kinds of its columns given how many it has."""
  others = [name for name in names if name != RELEASED]
  # Blocks of any width take one column here: a block has one kind for all its columns.
  groups = features.NODE_GROUPS | {
      name: range(NODE_FEATURES + i, NODE_FEATURES + i + 1) for i, name in enumerate(others)}
  kinds = features.parse_kinds(text, groups, field="data.feature_transform")
  chosen = {name: kinds[NODE_FEATURES + i] for i, name in enumerate(others)}
  as_many = lambda kind: lambda columns: np.full(columns, kind, dtype=object)
  return {name: as_many(kind) for name, kind in chosen.items()} | {
      RELEASED: lambda columns: kinds[:NODE_FEATURES]}


CONFIG = "config"  # the transform of configurations, saved beside the blocks' own
_NODE = "node/"  # before the names of blocks in a file


def to_saved(nodes: Mapping[str, Transform], config: Transform) -> dict[str, Transform]:
  """All transforms of a model by the names under which `features.save` keeps them."""
  return {f"{_NODE}{name}": transform for name, transform in nodes.items()} | {CONFIG: config}


def from_saved(
    saved: Mapping[str, Transform], where: Path | str
) -> tuple[dict[str, Transform], Transform]:
  """What `to_saved` was given; reads files from before blocks as well.

  Raises:
    ValueError: a transform is missing.
  """
  if CONFIG not in saved:
    raise ValueError(f"{where} is damaged (no transform of configurations); train again")
  nodes = {name.removeprefix(_NODE): t for name, t in saved.items() if name.startswith(_NODE)}
  if not nodes and "node" in saved:
    nodes = _split_old(saved["node"])
  if not nodes:
    raise ValueError(f"{where} is damaged (no transform of node features); train again")
  return nodes, saved[CONFIG]


def _split_old(transform: Transform) -> dict[str, Transform]:
  """One transform over all columns as those of the blocks `released` and `extra`."""
  is_extra = transform.kept >= NODE_FEATURES
  part = lambda mask, first: Transform(
      transform.kept[mask] - first, transform.log[mask], transform.offset[mask],
      transform.scale[mask])
  blocks = {RELEASED: part(~is_extra, 0)}
  return blocks | ({EXTRA: part(is_extra, NODE_FEATURES)} if is_extra.any() else {})
