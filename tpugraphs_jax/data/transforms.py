"""Transforms of features: fitted on the training split, saved with the model.

A `Transform` scales columns. Most kinds drop columns that are constant in training. `NodeFeatures`
applies a transform to each block of node features and concatenates the results:

    graph -> blocks -> transforms -> inputs of the network [N, F]

The fitted transforms are applied to all splits and to graphs ranked later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import os
from pathlib import Path
import re
from typing import NamedTuple

import numpy as np

from tpugraphs_jax.columns import NODE, NODE_FEATURES, span
from tpugraphs_jax.config_fields import option, Options, Registry
from tpugraphs_jax.data.features import BLOCKS, RELEASED, signed_log
from tpugraphs_jax.graph import OpGraph, SPLITS
from tpugraphs_jax.infra import files, trust

_LOG_OFFSET = re.compile(r"log_offset\((\d+\.?\d*|\.\d+)\)")


class Statistics(NamedTuple):
  """Statistics of columns over all nodes of the training graphs.

  For `signed_log1p` and `signed_log` the statistics describe logarithms.
  """

  count: int  # type: ignore[assignment]  # nodes; hides a method of tuple
  mean: np.ndarray  # [F] float64
  deviation: np.ndarray  # [F] float64, population, at least 1e-6
  low: np.ndarray  # [F] float64, smallest value
  high: np.ndarray  # [F] float64, largest value


class Scaling(NamedTuple):
  """Parameters of a kind of transform; see `Transform`."""

  offset: np.ndarray  # [F]
  scale: np.ndarray  # [F]
  shift: np.ndarray | float = 0.0  # [F] k of log(x + k); 0 = no logarithm
  keeps_constant: bool = False  # whether columns that are constant in training stay


# Functions from `Statistics` to `Scaling`, by kind of transform.
KINDS = Registry("data.feature_transform")
_LEFT_OUT = "left_out"
_SIGNED_LOGARITHMS = ("signed_log1p", "signed_log")


@KINDS.register("none")
def _none(statistics: Statistics) -> Scaling:
  return _unscaled(statistics)._replace(keeps_constant=True)


@KINDS.register(_LEFT_OUT)
@KINDS.register("signed_log")
@KINDS.register("varying")
def _unscaled(statistics: Statistics) -> Scaling:
  return Scaling(np.zeros_like(statistics.mean), np.ones_like(statistics.mean))


@KINDS.register("minmax")
def _minmax(statistics: Statistics) -> Scaling:
  return Scaling(statistics.low, statistics.high - statistics.low)


@KINDS.register("signed_log1p")
@KINDS.register("standardize")
def _standardize(statistics: Statistics) -> Scaling:
  return Scaling(statistics.mean, statistics.deviation)


def _scaling(kind: str, statistics: Statistics) -> Scaling:
  """The scaling of a kind of `KINDS` or of `log_offset(K)`."""
  if shift := _shift_of(kind):
    return _unscaled(statistics)._replace(shift=shift)
  return KINDS[kind](statistics)


# Columns of the 140 node features, by property.
NODE_GROUPS: dict[str, range] = {
  group: range(*span(NODE, first, last).indices(NODE_FEATURES))
  for group, first, last in (
    ("type", "is_root", "element_type"),
    ("shape", "shape", "parameter_number"),
    ("dimensions", "dimensions", "dimensions"),
    ("window", "window_size", "window_reversal"),
    ("convolution", "input_batch_dimension", "output_feature_dimension"),
    ("groups", "feature_group_count", "batch_group_count"),
    ("slice", "slice_start", "dynamic_slice_sizes"),
    ("padding", "edge_padding_low", "edge_padding_high"),
    ("sort", "is_stable", "is_stable"),
    ("layout", "minor_to_major", "minor_to_major"),
  )
}


@dataclasses.dataclass(frozen=True, eq=False)
class Transform:
  """`(f(x[kept]) - offset) / scale`; f by column: x, its signed logarithm, or log(x + shift)."""

  kept: np.ndarray  # [F'] int64 columns
  log: np.ndarray  # [F'] bool
  offset: np.ndarray  # [F'] float32
  scale: np.ndarray  # [F'] float32
  shift: np.ndarray | None = None  # [F'] float32 above 0 where f is log(x + shift); None = nowhere

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """Maps raw features `[n, F]` to `[n, F']` float32.

    Raises:
      ValueError: log(x + shift) is not finite.
    """
    x = np.asarray(x, np.float32)[:, self.kept]
    if self.log.any():
      x = np.where(self.log, signed_log(x), x)
    if self.shift is not None:
      x = _log_shifted(x, self.shift, self.kept)
    return (x - self.offset) / self.scale

  def to_dict(self) -> dict:
    """The transform in JSON types."""
    fields = dataclasses.asdict(self)
    return {name: array.tolist() for name, array in fields.items() if array is not None}

  @classmethod
  def from_dict(cls, values: Mapping) -> Transform:
    """The transform from JSON types.

    Raises:
      ValueError, KeyError: malformed values.
    """
    dtypes = {"kept": np.int64, "log": bool, "offset": np.float32, "scale": np.float32}
    dtypes |= {"shift": np.float32} if "shift" in values else {}
    for name, dtype in dtypes.items():
      kind = bool if dtype is bool else int if dtype is np.int64 else trust.NUMBER
      trust.check(values[name], [kind], name)
    transform = cls(**{name: np.array(values[name], dtype) for name, dtype in dtypes.items()})
    transform._check()
    return transform

  def _check(self) -> None:
    """Refuses (ValueError) columns and numbers that no fitted transform has."""
    fields = {name: value for name, value in vars(self).items() if value is not None}
    if len({len(value) for value in fields.values()}) > 1:
      counts = ", ".join(f"{len(value)} of {name}" for name, value in fields.items())
      raise ValueError(f"its columns have {counts}")
    if (self.kept < 0).any() or (np.diff(self.kept) <= 0).any():
      raise ValueError("kept is no ascending list of columns")
    if not all(np.isfinite(value).all() for value in fields.values()) or (self.scale == 0).any():
      raise ValueError("offset, scale or shift is not finite, or scale is 0")


def _log_shifted(x: np.ndarray, shift: np.ndarray, columns: np.ndarray) -> np.ndarray:
  """log(x + shift) where shift is above 0, else x; `columns` are numbers for errors."""
  is_shifted = shift > 0
  if len(bad := np.argwhere(is_shifted & (x + shift <= 0))):
    row, column = bad[0]
    raise ValueError(
      f"log_offset({shift[column]:g}) of column {columns[column]}, which holds "
      f"{x[row, column]:g}: take a larger number, or signed_log1p"
    )
  return np.where(is_shifted, np.log(np.where(is_shifted, x + shift, 1.0)), x)


def _shift_of(kind: str) -> float:
  """The k of `log_offset(k)`, 0 for any other kind."""
  match = _LOG_OFFSET.fullmatch(kind)
  return float(match[1]) if match else 0.0


def parse_kinds(text: str, groups: Sequence[str]) -> dict[str, str]:
  """The kind of each group of columns.

  Args:
    text: one kind for all columns (`minmax`), or kinds by group, with `*` for all other groups
      (`shape=signed_log1p,window=signed_log1p,*=standardize`).
    groups: names of all groups.

  Raises:
    ValueError: an unknown kind or group, or groups without a kind.
  """
  if "=" not in text:
    text = f"*={text}"
  chosen = dict(part.strip().partition("=")[::2] for part in text.split(","))
  for group, kind in chosen.items():
    if group not in groups and group != "*":
      raise ValueError(
        f"data.feature_transform names group {group!r}, expected one of {', '.join(groups)} or *"
      )
    if kind not in KINDS and not _shift_of(kind):
      raise ValueError(
        f"data.feature_transform of {group} is {kind!r}, expected one of "
        f"{', '.join(KINDS)} or log_offset(K) with K above 0"
      )
  missing = [group for group in groups if group not in chosen]
  if missing and "*" not in chosen:
    raise ValueError(
      f"data.feature_transform {text!r} leaves out {missing[0]}; add *=KIND for the rest"
    )
  return {group: chosen[group if group in chosen else "*"] for group in groups}


def fit(arrays: Iterable[np.ndarray], kinds: np.ndarray) -> Transform:
  """Fits a transform in one pass, in float64.

      minmax               the training range becomes [0, 1], as in the official baseline
      standardize          mean 0 and deviation 1
      signed_log1p         sign(x) log(1 + |x|), then standardized
      signed_log           sign(x) log(1 + |x|)
      log_offset(K)        log(x + K) (3rd and 10th place: K = 3)
      varying              x
      none                 x, also of constant columns
      left_out             no column
      first, sixth, gst    standardized as published, also constant columns

  The other kinds drop columns that are constant in training.

  Args:
    arrays: raw features `[n, F]` of the training graphs.
    kinds: `[F]` names of `KINDS`, or `log_offset(K)`.
  """
  log = np.isin(kinds.astype(str), _SIGNED_LOGARITHMS)
  statistics = _statistics(arrays, log)
  varies = statistics.low != statistics.high
  offset, scale, shift = np.zeros(len(kinds)), np.ones(len(kinds)), np.zeros(len(kinds))
  kept = np.zeros(len(kinds), bool)
  for kind in dict.fromkeys(kinds):
    scaling, columns = _scaling(kind, statistics), kinds == kind
    for values, new in ((offset, scaling.offset), (scale, scaling.scale), (shift, scaling.shift)):
      values[columns] = np.broadcast_to(new, len(kinds))[columns]
    kept[columns] = (scaling.keeps_constant | varies)[columns] & (kind != _LEFT_OUT)
  _log_shifted(statistics.low[None], shift, np.arange(len(kinds)))  # refuses logarithms below 0
  of_kept = lambda values: values[kept].astype(np.float32)
  shifts = of_kept(shift) if shift.any() else None
  return Transform(np.flatnonzero(kept), log[kept], of_kept(offset), of_kept(scale), shifts)


def _statistics(arrays: Iterable[np.ndarray], log: np.ndarray) -> Statistics:
  """Statistics of arrays `[n, F]`, of signed logarithms where `log [F]` is set."""
  count, total, square, origin = 0, 0.0, 0.0, np.array(0.0)
  low, high = np.array(np.inf), np.array(-np.inf)
  for array in arrays:
    if not len(array):
      continue
    x = np.asarray(array, np.float64)
    x = np.where(log, signed_log(x), x) if log.any() else x
    # Sums of distances from the first row keep small differences of large numbers.
    origin = origin if count else x[0]
    count += len(x)
    total = total + (x - origin).sum(axis=0)
    square = square + np.square(x - origin).sum(axis=0)
    low, high = np.minimum(low, x.min(axis=0)), np.maximum(high, x.max(axis=0))
  if not count:
    raise ValueError("no training features to fit a transform on")
  shift = total / count
  deviation = np.sqrt(np.maximum(square / count - np.square(shift), 1e-12))
  return Statistics(count, origin + shift, deviation, low, high)


@dataclasses.dataclass(frozen=True)
class FeatureOptions(Options):
  """Features of nodes and configurations, and their transforms."""

  section = "data"
  features: tuple[str, ...] = option((RELEASED,), "blocks of node features", some_of=lambda: BLOCKS)
  feature_transform: str = option(
    "none", "transform of all columns, or by group: shape=log_offset(3),*=minmax"
  )
  config_transform: str = option(
    "none",
    "transform of configurations",
    one_of=lambda: [kind for kind in KINDS if kind != _LEFT_OUT],  # a model needs columns
  )
  pad_value: int = option(
    0, "positions of a layout beyond the rank: 0 as released, or -1", one_of=(0, -1)
  )
  fit_splits: tuple[str, ...] = option(
    ("train",), "splits whose nodes (never labels) feature_transform is fitted on", some_of=SPLITS
  )
  fit_reduced: bool = option(False, "fit feature_transform on the nodes that graph_reduction keeps")


class NodeFeatures:
  """The blocks of node features of a model, each with its transform.

  Args:
    options: names of blocks in the order of their columns, and kinds of transforms by group
      (`parse_kinds`). The block `released` has the groups `NODE_GROUPS`; any other block is one
      group with its own name.

  Attributes:
    transforms: by name of block; set by `fit`, or from a file.

  Raises:
    ValueError: an unknown or repeated block, or impossible kinds.
  """

  def __init__(self, options: FeatureOptions):
    names = self.names = tuple(options.features)
    if not names or len(set(names)) < len(names):
      raise ValueError(
        f"data.features is {names}, expected one or more different blocks of {', '.join(BLOCKS)}"
      )
    self._blocks = {name: BLOCKS[name] for name in names}
    if RELEASED in names:
      self._blocks[RELEASED] = functools.partial(BLOCKS[RELEASED], pad_value=options.pad_value)
    others = [name for name in names if name != RELEASED]
    self._kinds = parse_kinds(options.feature_transform, (*NODE_GROUPS, *others))
    self.transforms: dict[str, Transform] = {}

  @property
  def unscaled(self) -> tuple[str, ...]:
    """Blocks that no transform changes."""
    return tuple(name for name in self.names if set(self._kinds_of(name, 1)) == {"none"})

  def _kinds_of(self, name: str, columns: int) -> np.ndarray:
    """The kind of each column of a block, `[columns]` object."""
    if name != RELEASED:  # one kind for all columns
      return np.full(columns, self._kinds[name], object)
    return np.array(
      [self._kinds[group] for group, names in NODE_GROUPS.items() for _ in names], object
    )

  def raw(self, graph: OpGraph, name: str) -> np.ndarray:
    """A block of a graph before its transform, `[N, F]`.

    Raises:
      ValueError: the block is not one row of finite numbers per node.
    """
    values = np.asarray(self._blocks[name](graph))
    if values.ndim != 2 or len(values) != graph.num_nodes or values.dtype.kind not in "fiub":
      raise ValueError(
        f"feature block {name!r} gave {values.dtype} {list(values.shape)} for {graph.name}, "
        f"expected numbers [{graph.num_nodes}, F], a row per node"
      )
    if not np.isfinite(values).all():
      raise ValueError(f"feature block {name!r} gave values for {graph.name} that are not finite")
    return values

  def fit(self, graphs: Sequence[OpGraph], nodes: Sequence[np.ndarray] | None = None) -> None:
    """Fits every block's transform on training graphs.

    Args:
      graphs: with released features.
      nodes: numbers of the nodes of each graph to fit on; all nodes unless given.
    """
    for name in self.names:
      columns = self.raw(graphs[0], name).shape[1]
      values = (self._with_columns(graph, name, columns) for graph in graphs)
      if nodes is not None:
        values = (value[kept] for value, kept in zip(values, nodes, strict=True))
      self.transforms[name] = fit(values, self._kinds_of(name, columns))

  def _with_columns(self, graph: OpGraph, name: str, columns: int) -> np.ndarray:
    values = self.raw(graph, name)
    if values.shape[1] != columns:
      raise ValueError(
        f"feature block {name!r} gave {values.shape[1]} columns for {graph.name} "
        f"and {columns} for another graph: the number must not change"
      )
    return values

  def __call__(self, graph: OpGraph) -> np.ndarray:
    """The inputs of a network `[N, F]` float32 for a graph with the released features."""
    parts = [self._transformed(graph, name) for name in self.names]
    return np.ascontiguousarray(np.concatenate(parts, axis=1), np.float32)

  def _transformed(self, graph: OpGraph, name: str) -> np.ndarray:
    transform, values = self.transforms[name], self.raw(graph, name)
    needed = int(transform.kept.max(initial=-1)) + 1
    if values.shape[1] < needed:
      raise ValueError(
        f"feature block {name!r} of {graph.name} has {values.shape[1]} columns, the "
        f"model was trained on {needed}"
      )
    return transform(values)


def save(path: Path, transforms: Mapping[str, Transform]) -> None:
  """Writes transforms by name as JSON."""
  values = {name: transform.to_dict() for name, transform in transforms.items()}
  files.write_json(path, files.seal(values))


def load(path: Path) -> dict[str, Transform]:
  """Reads the transforms that `save` wrote, by name.

  Raises:
    FileNotFoundError: the working folder has no such file.
    ValueError: the file is damaged.
  """
  if not path.exists():
    raise FileNotFoundError(
      f"{path} is missing: --workdir must name a folder that a model was trained in"
    )
  with trust.json_of(path, {}, "train again") as values:
    return {name: Transform.from_dict(v) for name, v in files.unseal(values).items()}


CONFIG = "config"  # name of the transform of configurations in a file
_NODE = "node/"  # prefix of names of blocks in a file


def to_saved(nodes: Mapping[str, Transform], config: Transform) -> dict[str, Transform]:
  """All transforms of a model, by their names in a file."""
  return {f"{_NODE}{name}": transform for name, transform in nodes.items()} | {CONFIG: config}


def from_saved(
  saved: Mapping[str, Transform], where: str | os.PathLike[str]
) -> tuple[dict[str, Transform], Transform]:
  """Transforms by block, and the transform of configurations; the inverse of `to_saved`.

  Raises:
    ValueError: a transform is missing.
  """
  nodes = {name.removeprefix(_NODE): t for name, t in saved.items() if name.startswith(_NODE)}
  if CONFIG not in saved or not nodes:
    raise ValueError(f"{where} is damaged (a transform is missing); train again")
  return nodes, saved[CONFIG]
