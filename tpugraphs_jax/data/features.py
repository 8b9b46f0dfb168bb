"""Feature statistics: fitted on the training split, saved with the model.

A `Transform` drops columns that are constant in training and scales the others.
The same transform is applied to every split and to graphs ranked later; it is
never refitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import json
from pathlib import Path

import numpy as np

from tpugraphs_jax import atomic, integrity
from tpugraphs_jax.graph import OpGraph

KINDS = ("none", "minmax", "standardize", "signed_log1p")

# Columns of the 140 node features by what they describe.
NODE_GROUPS: dict[str, range] = {
    "type": range(0, 21),  # root flag, element type
    "shape": range(21, 31),  # dimensions, their sum and product, tuple size, parameter number
    "dimensions": range(31, 37),
    "window": range(37, 93),
    "convolution": range(93, 109),
    "slice": range(109, 125),
    "padding": range(125, 133),
    "sort": range(133, 134),
    "layout": range(134, 140),
}
_SHAPE_DIMENSIONS = slice(21, 27)
_LAYOUT = slice(134, 140)


@dataclasses.dataclass(frozen=True, eq=False)
class Transform:
  """`(f(x[kept]) - offset) / scale`, f the signed logarithm where asked for."""

  kept: np.ndarray  # [F'] int64 columns
  log: np.ndarray  # [F'] bool
  offset: np.ndarray  # [F'] float32
  scale: np.ndarray  # [F'] float32

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """Maps raw features `[n, F]` to `[n, F']` float32."""
    x = np.asarray(x, np.float32)[:, self.kept]
    if self.log.any():
      x = np.where(self.log, _signed_log1p(x), x)
    return (x - self.offset) / self.scale

  def to_dict(self) -> dict:
    """JSON types."""
    return {name: array.tolist() for name, array in dataclasses.asdict(self).items()}

  @classmethod
  def from_dict(cls, values: Mapping) -> Transform:
    dtypes = {"kept": np.int64, "log": bool, "offset": np.float32, "scale": np.float32}
    return cls(**{name: np.array(values[name], dtype) for name, dtype in dtypes.items()})


def _signed_log1p(x: np.ndarray) -> np.ndarray:
  return np.sign(x) * np.log1p(np.abs(x))


def parse_kinds(
    text: str, groups: Mapping[str, range], *, field: str = "feature_transform"
) -> np.ndarray:
  """Kind of each column, `[F]` object.

  Args:
    text: one kind for all columns (`minmax`), or kinds by group with `*` for the
      rest (`shape=signed_log1p,window=signed_log1p,*=standardize`).
    groups: columns of each group.
    field: name of the option, for errors.

  Raises:
    ValueError: an unknown kind or group, or groups without a kind.
  """
  columns = sum(len(group) for group in groups.values())
  if "=" not in text:
    text = f"*={text}"
  chosen = dict(part.strip().partition("=")[::2] for part in text.split(","))
  for group, kind in chosen.items():
    if group not in groups and group != "*":
      raise ValueError(f"{field} names group {group!r}, expected one of "
                       f"{', '.join(groups)} or *")
    if kind not in KINDS:
      raise ValueError(f"{field} of {group} is {kind!r}, expected one of "
                       f"{', '.join(KINDS)}")
  missing = [group for group in groups if group not in chosen]
  if missing and "*" not in chosen:
    raise ValueError(f"{field} {text!r} leaves out {missing[0]}; add *=KIND for the rest")
  kinds = np.full(columns, chosen.get("*", "none"), dtype=object)
  for group in groups:
    if group in chosen:
      kinds[list(groups[group])] = chosen[group]
  return kinds


def fit(arrays: Iterable[np.ndarray], kinds: np.ndarray) -> Transform:
  """Fits a transform in one pass, in float64.

  `minmax` (official baseline) maps the training range to [0, 1]; `standardize`
  (1st and 6th place of the competition, Graph Segment Training) gives mean 0 and
  deviation 1; `signed_log1p` (2nd place) takes sign(x) log(1 + |x|) and then
  standardizes. All three drop columns that are constant in training; `none`
  keeps every column as it is.

  Args:
    arrays: raw features `[n, F]` of the training graphs.
    kinds: `[F]` of `KINDS`.
  """
  log = kinds == "signed_log1p"
  count, total, square, origin = 0, 0.0, 0.0, None
  low, high = np.inf, -np.inf
  for array in arrays:
    if not len(array):
      continue
    x = np.asarray(array, np.float64)
    x = np.where(log, _signed_log1p(x), x) if log.any() else x
    # Sums are taken from the first row, so that a small spread far from 0 is not lost.
    origin = x[0] if origin is None else origin
    count += len(x)
    total = total + (x - origin).sum(axis=0)
    square = square + np.square(x - origin).sum(axis=0)
    low, high = np.minimum(low, x.min(axis=0)), np.maximum(high, x.max(axis=0))
  if not count:
    raise ValueError("no training features to fit a transform on")
  shift = total / count
  mean = origin + shift
  deviation = np.sqrt(np.maximum(square / count - np.square(shift), 1e-12))
  offset = np.select([kinds == "none", kinds == "minmax"], [0.0, low], mean)
  scale = np.select([kinds == "none", kinds == "minmax"], [1.0, high - low], deviation)
  kept = np.flatnonzero((low != high) | (kinds == "none"))
  return Transform(
      kept, log[kept], offset[kept].astype(np.float32), scale[kept].astype(np.float32))


def node_features(graph: OpGraph, *, pad_value: int) -> np.ndarray:
  """Raw node features `[N, 140]` or more, with the layout block padded by `pad_value`.

  Args:
    graph: host graph.
    pad_value: 0 leaves the released features; -1 marks positions of the layout
      block beyond the rank of the shape, where the release has 0, which is also a
      real dimension (1st place of the competition).
  """
  if pad_value == 0:
    return graph.node_feat
  feat = graph.node_feat.copy()
  rank = np.cumprod(feat[:, _SHAPE_DIMENSIONS] != 0, axis=1).sum(axis=1)
  beyond = np.arange(6)[None] >= rank[:, None]
  feat[:, _LAYOUT][beyond] = pad_value
  return feat


def save(path: Path, transforms: Mapping[str, Transform]) -> None:
  """Writes transforms by name as JSON."""
  values = {name: transform.to_dict() for name, transform in transforms.items()}
  with atomic.replacing(path) as file:
    file.write(json.dumps(integrity.sealed(values)) + "\n")


def load(path: Path) -> dict[str, Transform]:
  """Reads what `save` wrote.

  Raises:
    FileNotFoundError: the working folder has no such file.
    ValueError: it is damaged.
  """
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: --workdir must name a folder that a model "
                            "was trained in")
  try:
    values = integrity.unsealed(json.loads(path.read_text()))
    return {name: Transform.from_dict(v) for name, v in values.items()}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{path} is damaged ({error}); train again") from None
