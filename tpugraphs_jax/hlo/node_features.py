"""The 140 features of an instruction.

`columns` names the columns. Every number is computed in int64, which wraps, and then
rounded once to float32.
"""

from __future__ import annotations

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.columns import NODE
from tpugraphs_jax.hlo import proto
from tpugraphs_jax.hlo.ragged import Ragged

# The list of an instruction that each block of columns is made of.
_LISTS = {
    "shape": lambda i: i.shape.dimensions,
    "dimensions": lambda i: i.dimensions,
    "window_size": lambda i: [d.size for d in i.window.dimensions],
    "window_stride": lambda i: [d.stride for d in i.window.dimensions],
    "window_padding_low": lambda i: [d.padding_low for d in i.window.dimensions],
    "window_padding_high": lambda i: [d.padding_high for d in i.window.dimensions],
    "window_dilation": lambda i: [d.window_dilation for d in i.window.dimensions],
    "base_dilation": lambda i: [d.base_dilation for d in i.window.dimensions],
    "input_spatial_dimensions":
        lambda i: i.convolution_dimension_numbers.input_spatial_dimensions,
    "kernel_spatial_dimensions":
        lambda i: i.convolution_dimension_numbers.kernel_spatial_dimensions,
    "slice_start": lambda i: [d.start for d in i.slice_dimensions],
    "slice_stride": lambda i: [d.stride for d in i.slice_dimensions],
    "slice_limit": lambda i: [d.limit for d in i.slice_dimensions],
    "dynamic_slice_sizes": lambda i: i.dynamic_slice_sizes,
    "edge_padding_low": lambda i: [d.edge_padding_low for d in i.padding_config.dimensions],
    "edge_padding_high": lambda i: [d.edge_padding_high for d in i.padding_config.dimensions],
    "minor_to_major": lambda i: i.shape.layout.minor_to_major,
}
_SCALARS = {
    "tuple_size": lambda i: len(i.shape.tuple_shapes),
    "parameter_number": lambda i: i.parameter_number,
    "feature_group_count": lambda i: i.feature_group_count,
    "batch_group_count": lambda i: i.batch_group_count,
    "is_stable": lambda i: i.is_stable,
}
# Blocks that have the name of a field of `convolution_dimension_numbers`.
_DIMENSION_NUMBERS = (
    "input_batch_dimension", "input_feature_dimension", "kernel_input_feature_dimension",
    "kernel_output_feature_dimension", "output_batch_dimension", "output_feature_dimension")


def instructions(module: proto.HloModuleProto) -> list[proto.HloInstructionProto]:
  """All instructions in the order of the module: one per node."""
  return [instruction for computation in module.computations
          for instruction in computation.instructions]


def is_root(module: proto.HloModuleProto) -> np.ndarray:
  """`[N]` bool: whether a node is the root of its own computation."""
  return np.array(
      [instruction.id == computation.root_id for computation in module.computations
       for instruction in computation.instructions], bool)


def node_features(module: proto.HloModuleProto) -> np.ndarray:
  """The features of all instructions, `[N, 140]` float32."""
  nodes = instructions(module)
  result = np.zeros((len(nodes), columns.NODE_FEATURES), np.float32)
  result[:, NODE["is_root"].start] = is_root(module)
  types = [kind.number for kind in columns.ELEMENT_TYPES]
  element_type = np.array([node.shape.element_type for node in nodes], np.int64)
  result[:, NODE["element_type"]] = element_type[:, None] == types
  for name, values in _LISTS.items():
    ragged, width = Ragged([values(node) for node in nodes]), NODE[name].stop - NODE[name].start
    result[:, NODE[name]] = (
        ragged.aggregate(width - 2) if name in columns.AGGREGATED else ragged.leading(width))
  for name, value in _SCALARS.items():
    result[:, NODE[name].start] = np.array([value(node) for node in nodes], np.int64)
  for name in _DIMENSION_NUMBERS:
    result[:, NODE[name].start] = np.array(
        [getattr(node.convolution_dimension_numbers, name) for node in nodes], np.int64)
  result[:, NODE["window_reversal"]] = _window_reversal(nodes)
  return result


def _window_reversal(nodes: list[proto.HloInstructionProto]) -> np.ndarray:
  """`[N, 8]`: six flags, the number of true flags, the number of false ones."""
  flags = Ragged([[d.window_reversal for d in node.window.dimensions] for node in nodes])
  true = flags.sum()
  return np.column_stack([flags.leading(6), true, flags.counts - true])
