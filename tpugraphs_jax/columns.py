"""The columns of all features, by name: 140 of a node, 24 of a tile, 18 of a layout.

`NODE` and `TILE` map the name of a block to its slice of columns. A block that comes from a
list, such as the dimensions of a shape, has the first entries of the list, padded with 0. The
blocks in `AGGREGATED` and all blocks of `TILE` end with the sum and the product of the whole
list. The product of no entries is 1 for a node and 0 for a tile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import csv
import functools
from importlib import resources
import itertools
from typing import NamedTuple

import numpy as np

MAX_RANK = 6  # dimensions of a shape that have columns


class ElementType(NamedTuple):
  """A type of array elements: its number in XLA, its short name, bytes of an element."""

  number: int
  name: str
  bytes: float


# In the order of the one-hot columns. Types that are no arrays count 0 bytes.
ELEMENT_TYPES = (
  ElementType(0, "invalid", 0),
  ElementType(1, "pred", 1),
  ElementType(2, "s8", 1),
  ElementType(3, "s16", 2),
  ElementType(4, "s32", 4),
  ElementType(5, "s64", 8),
  ElementType(6, "u8", 1),
  ElementType(7, "u16", 2),
  ElementType(8, "u32", 4),
  ElementType(9, "u64", 8),
  ElementType(10, "f16", 2),
  ElementType(11, "f32", 4),
  ElementType(12, "f64", 8),
  ElementType(16, "bf16", 2),
  ElementType(15, "c64", 8),
  ElementType(18, "c128", 16),
  ElementType(13, "tuple", 0),
  ElementType(14, "opaque", 0),
  ElementType(17, "token", 0),
)

# Types that XLA has added since the data set was made, which have no columns.
LATER_TYPES = (
  ElementType(19, "f8e5m2", 1),
  ElementType(20, "f8e4m3fn", 1),
  ElementType(21, "s4", 1 / 2),
  ElementType(22, "u4", 1 / 2),
  ElementType(23, "f8e4m3b11fnuz", 1),
  ElementType(24, "f8e5m2fnuz", 1),
  ElementType(25, "f8e4m3fnuz", 1),
  ElementType(26, "s2", 1 / 4),
  ElementType(27, "u2", 1 / 4),
  ElementType(28, "f8e4m3", 1),
  ElementType(29, "f8e3m4", 1),
  ElementType(32, "f4e2m1fn", 1 / 2),
  ElementType(33, "f8e8m0fnu", 1),
)

_AGGREGATES = 2  # the sum and the product
_NODE_WIDTHS = {
  "is_root": 1,  # of the node's own computation
  "unused": 1,  # always 0
  "element_type": len(ELEMENT_TYPES),
  "shape": MAX_RANK + _AGGREGATES,
  "tuple_size": 1,
  "parameter_number": 1,
  "dimensions": MAX_RANK,
  "window_size": MAX_RANK + _AGGREGATES,
  "window_stride": MAX_RANK + _AGGREGATES,
  "window_padding_low": MAX_RANK + _AGGREGATES,
  "window_padding_high": MAX_RANK + _AGGREGATES,
  "window_dilation": MAX_RANK + _AGGREGATES,
  "base_dilation": MAX_RANK + _AGGREGATES,
  "window_reversal": MAX_RANK + 2,  # flags, how many are true, how many are false
  "input_batch_dimension": 1,
  "input_feature_dimension": 1,
  "input_spatial_dimensions": 4,
  "kernel_input_feature_dimension": 1,
  "kernel_output_feature_dimension": 1,
  "kernel_spatial_dimensions": 4,
  "output_batch_dimension": 1,
  "output_feature_dimension": 1,
  "feature_group_count": 1,
  "batch_group_count": 1,
  "slice_start": 2 + _AGGREGATES,
  "slice_stride": 2 + _AGGREGATES,
  "slice_limit": 2 + _AGGREGATES,
  "dynamic_slice_sizes": 2 + _AGGREGATES,
  "edge_padding_low": 2 + _AGGREGATES,
  "edge_padding_high": 2 + _AGGREGATES,
  "is_stable": 1,
  "minor_to_major": MAX_RANK,
}
AGGREGATED = (
  "shape window_size window_stride window_padding_low window_padding_high window_dilation "
  "base_dilation slice_start slice_stride slice_limit dynamic_slice_sizes edge_padding_low "
  "edge_padding_high"
).split()


def _slices(widths: Mapping[str, int]) -> dict[str, slice]:
  ends = itertools.accumulate(widths.values())
  return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends)}


NODE = _slices(_NODE_WIDTHS)
_BOUNDS = ("kernel_bounds", "output_bounds", "input_bounds")
TILE = _slices(dict.fromkeys(_BOUNDS, MAX_RANK + _AGGREGATES))
NODE_FEATURES = NODE["minor_to_major"].stop
TILE_CONFIG_FEATURES = TILE["input_bounds"].stop
# A layout configuration of a node: minor-to-major orders of output, input and kernel.
LAYOUT_CONFIG_FEATURES = 3 * MAX_RANK
LAYOUT_VALUE_RANGE = (-1, MAX_RANK - 1)  # dimension numbers; -1 means "not given"
# Numbers of opcodes are 1 to 120; 0 stands for an instruction that the data set does not know.
OPCODES = 121


def span(columns: Mapping[str, slice], first: str, last: str) -> slice:
  """All columns from the block `first` to the block `last`."""
  return slice(columns[first].start, columns[last].stop)


def sizes(block: slice) -> slice:
  """The places of one size per dimension, without the sum and the product after them."""
  return slice(block.start, block.start + MAX_RANK)


Lists = Sequence[Collection[int]] | np.ndarray  # of integers


class Ragged:
  """Rows of int64 of any length. Sums and products wrap modulo 2^64."""

  def __init__(self, rows: Lists):
    self.counts = np.fromiter(map(len, rows), np.int64, len(rows))
    values = itertools.chain.from_iterable(rows)
    self._values = np.fromiter(values, np.int64, int(self.counts.sum()))
    self._starts = np.cumsum(self.counts) - self.counts

  def leading(self, width: int) -> np.ndarray:
    """The first `width` values of every row, `[rows, width]` int64, 0 beyond its end."""
    column = np.arange(width)
    present = column < self.counts[:, None]
    result = np.zeros(present.shape, np.int64)
    result[present] = self._values[(self._starts[:, None] + column)[present]]
    return result

  def aggregate(self, width: int, *, empty_product: int = 1) -> np.ndarray:
    """Leading values, then sum and product of all, `[rows, width + 2]` int64."""
    product = self.reduce(np.multiply, empty=empty_product)
    return np.column_stack([self.leading(width), self.reduce(np.add), product])

  def reduce(self, ufunc: np.ufunc, *, empty: int = 0) -> np.ndarray:
    """Every row reduced by `ufunc`, `[rows]` int64."""
    result = np.full(len(self.counts), empty, np.int64)
    is_filled = self.counts > 0
    if is_filled.any():
      # Without the empty rows, each start is the end of the row before.
      result[is_filled] = ufunc.reduceat(self._values, self._starts[is_filled])
    return result


def node_features(lists: Mapping[str, Sequence[Collection[int]]], nodes: int) -> np.ndarray:
  """The features `[nodes, 140]` float32 of nodes.

  Args:
    lists: by name of a block the list of integers of every node; `window_reversal` takes flags. A
      block without lists is 0, except that the product of no entries is 1.
    nodes: number of nodes.
  """
  result = np.zeros((nodes, NODE_FEATURES), np.float32)
  for name in (*AGGREGATED, *(lists.keys() - AGGREGATED)):
    ragged, block = Ragged(lists.get(name, [()] * nodes)), NODE[name]
    width = block.stop - block.start
    if name in AGGREGATED:
      result[:, block] = ragged.aggregate(width - _AGGREGATES)
    elif name == "window_reversal":
      true = ragged.reduce(np.add)
      result[:, block] = np.column_stack([ragged.leading(MAX_RANK), true, ragged.counts - true])
    else:
      result[:, block] = ragged.leading(width)
  return result


def released_tile_features(kernel: Lists, output: Lists, input_: Lists) -> np.ndarray:
  """The features `[C, 24]` float32 of C tiles, from the bounds of their three windows."""
  windows = (kernel, output, input_)
  blocks = [Ragged(bounds).aggregate(MAX_RANK, empty_product=0) for bounds in windows]
  return np.concatenate(blocks, axis=1).astype(np.float32)


def tile_name(column: int) -> str:
  """The name of a column of a tile, such as `kernel bounds 0` or `input bounds product`."""
  name, block = next(item for item in TILE.items() if column < item[1].stop)
  place = column - block.start
  part = str(place) if place < MAX_RANK else ("sum", "product")[place - MAX_RANK]
  return f"{name.replace('_', ' ')} {part}"


def layout_row(orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
  """The 18 integers of a node: up to six of each of three tensors, minor to major, then -1."""
  parts = [(*order, *(-1,) * MAX_RANK)[:MAX_RANK] for order in orders]
  return tuple(itertools.chain(*parts, (-1,) * LAYOUT_CONFIG_FEATURES))[:LAYOUT_CONFIG_FEATURES]


def row_text(row: Sequence[int]) -> str:
  """The layouts that a row gives, minor dimension first: `output {1,0} input {0,1}`."""
  orders = [row[start : start + MAX_RANK] for start in range(0, LAYOUT_CONFIG_FEATURES, MAX_RANK)]
  roles = zip(("output", "input", "kernel"), orders)
  text = lambda order: ",".join(str(dim) for dim in order if dim >= 0)
  given = [f"{role} {{{text(order)}}}" for role, order in roles if order[0] >= 0]
  return " ".join(given) or "open"


@functools.cache
def opcode_ids() -> dict[str, int]:
  """Number of every opcode, 1 to 120, by its name in HLO text."""
  text = resources.files(__package__).joinpath("opcodes.csv").read_text("utf-8")
  return {row["opcode"]: int(row["id"]) for row in csv.DictReader(text.splitlines())}


@functools.cache
def opcode_names() -> dict[int, str]:
  """Name of every opcode by its number; 0 stands for one that the data set does not know."""
  return {0: "unknown"} | {number: name for name, number in opcode_ids().items()}
