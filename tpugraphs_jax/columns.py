"""Names of the columns of all features: 140 of a node, 24 of a tile, 18 of a layout.

`NODE` and `TILE` map the name of a block to its slice of columns. A block that comes from a
list, such as the dimensions of a shape, has the first entries of the list, padded with 0. The
blocks in `AGGREGATED` and all blocks of `TILE` end with the sum and the product of the whole
list, where the product of no entries is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
import csv
import functools
from importlib import resources
import itertools
from typing import NamedTuple

MAX_RANK = 6  # dimensions of a shape that have columns


class ElementType(NamedTuple):
  """A type of array elements: its number in XLA, its short name, bytes of an element."""

  number: int
  name: str
  bytes: int


# In the order of the one-hot columns. Types that are no arrays count 0 bytes.
ELEMENT_TYPES = tuple(itertools.starmap(ElementType, (
    (0, "invalid", 0), (1, "pred", 1), (2, "s8", 1), (3, "s16", 2), (4, "s32", 4), (5, "s64", 8),
    (6, "u8", 1), (7, "u16", 2), (8, "u32", 4), (9, "u64", 8), (10, "f16", 2), (11, "f32", 4),
    (12, "f64", 8), (16, "bf16", 2), (15, "c64", 8), (18, "c128", 16), (13, "tuple", 0),
    (14, "opaque", 0), (17, "token", 0))))

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
    "shape", "window_size", "window_stride", "window_padding_low", "window_padding_high",
    "window_dilation", "base_dilation", "slice_start", "slice_stride", "slice_limit",
    "dynamic_slice_sizes", "edge_padding_low", "edge_padding_high")


def _slices(widths: Mapping[str, int]) -> dict[str, slice]:
  ends = itertools.accumulate(widths.values())
  return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends)}


NODE = _slices(_NODE_WIDTHS)
TILE = _slices(dict.fromkeys(("kernel_bounds", "output_bounds", "input_bounds"),
                             MAX_RANK + _AGGREGATES))
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


@functools.cache
def opcode_ids() -> dict[str, int]:
  """Number of every opcode, 1 to 120, by its name in HLO text."""
  text = resources.files(__package__).joinpath("opcodes.csv").read_text("utf-8")
  return {row["opcode"]: int(row["id"]) for row in csv.DictReader(text.splitlines())}
