"""Feature statistics: fitted on the training split, saved with the model.

A `Transform` drops columns that are constant in training and scales the others.
The same transform is applied to every split and to graphs ranked later; it is
never refitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import json
import re
from pathlib import Path

import numpy as np

from tpugraphs_jax import files
from tpugraphs_jax.graph import OpGraph

KINDS = ("none", "varying", "minmax", "standardize", "signed_log1p")
_LOG_OFFSET = re.compile(r"log_offset\(([0-9.]+)\)")

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
  """`(f(x[kept]) - offset) / scale`, f the signed logarithm or log(x + shift) where asked for."""

  kept: np.ndarray  # [F'] int64 columns
  log: np.ndarray  # [F'] bool
  offset: np.ndarray  # [F'] float32
  scale: np.ndarray  # [F'] float32
  shift: np.ndarray | None = None  # [F'] float32 above 0 where f is log(x + shift); None = nowhere

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """Maps raw features `[n, F]` to `[n, F']` float32.

    Raises:
      ValueError: a number whose shifted logarithm is not finite.
    """
    x = np.asarray(x, np.float32)[:, self.kept]
    if self.log.any():
      x = np.where(self.log, _signed_log1p(x), x)
    if self.shift is not None:
      x = _log_shifted(x, self.shift, self.kept)
    return (x - self.offset) / self.scale

  def to_dict(self) -> dict:
    """JSON types."""
    fields = dataclasses.asdict(self)
    return {name: array.tolist() for name, array in fields.items() if array is not None}

  @classmethod
  def from_dict(cls, values: Mapping) -> Transform:
    dtypes = {"kept": np.int64, "log": bool, "offset": np.float32, "scale": np.float32}
    dtypes |= {"shift": np.float32} if "shift" in values else {}
    return cls(**{name: np.array(values[name], dtype) for name, dtype in dtypes.items()})


def _signed_log1p(x: np.ndarray) -> np.ndarray:
  return np.sign(x) * np.log1p(np.abs(x))


def _log_shifted(x: np.ndarray, shift: np.ndarray, columns: np.ndarray) -> np.ndarray:
  """log(x + shift) where shift is above 0, else x; `columns` name the columns in errors."""
  is_asked = shift > 0
  if len(bad := np.argwhere(is_asked & (x + shift <= 0))):
    row, column = bad[0]
    raise ValueError(f"log_offset({shift[column]:g}) of column {columns[column]}, which holds "
                     f"{x[row, column]:g}: take a larger number, or signed_log1p")
  return np.where(is_asked, np.log(np.where(is_asked, x + shift, 1.0)), x)


def _shift_of(kind: str) -> float:
  """The k of `log_offset(k)`, 0 for any other kind."""
  found = _LOG_OFFSET.fullmatch(kind)
  return float(found[1]) if found else 0.0


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
    if kind not in KINDS and not _shift_of(kind):
      raise ValueError(f"{field} of {group} is {kind!r}, expected one of "
                       f"{', '.join(KINDS)} or log_offset(K) with K above 0")
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
  standardizes. `log_offset(K)` takes log(x + K) and leaves it so (3rd, 5th and 10th place:
  K = 1, 1 - the smallest and 3). These drop columns that are constant in training, and so
  does `varying`, which leaves the others as they are; `none` keeps every column as it is.

  Args:
    arrays: raw features `[n, F]` of the training graphs.
    kinds: `[F]` of `KINDS`.
  """
  log, log_shift = kinds == "signed_log1p", np.array([_shift_of(kind) for kind in kinds])
  count, total, square, origin = 0, 0.0, 0.0, None
  low, high = np.inf, -np.inf
  for array in arrays:
    if not len(array):
      continue
    x = np.asarray(array, np.float64)
    x = np.where(log, _signed_log1p(x), x) if log.any() else x
    x = _log_shifted(x, log_shift, np.arange(len(kinds))) if log_shift.any() else x
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
  is_plain = (kinds == "none") | (kinds == "varying") | (log_shift > 0)
  offset = np.select([is_plain, kinds == "minmax"], [0.0, low], mean)
  scale = np.select([is_plain, kinds == "minmax"], [1.0, high - low], deviation)
  kept = np.flatnonzero((low != high) | (kinds == "none"))
  return Transform(
      kept, log[kept], offset[kept].astype(np.float32), scale[kept].astype(np.float32),
      log_shift[kept].astype(np.float32) if log_shift.any() else None)


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
  with files.replacing(path) as file:
    file.write(json.dumps(files.sealed(values)) + "\n")


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
    values = files.unsealed(json.loads(path.read_text()))
    return {name: Transform.from_dict(v) for name, v in values.items()}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{path} is damaged ({error}); train again") from None
