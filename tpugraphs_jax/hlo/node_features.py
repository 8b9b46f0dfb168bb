"""The 140 features of an instruction.

Every number is computed in int64, which wraps, and then rounded once to
float32. Lists are cut or padded with 0 to a fixed width; "aggregated" lists are
followed by the sum and the product of all their elements, the product of no
elements being 1. Column 1 is always 0.
"""

from __future__ import annotations

import numpy as np

from tpugraphs_jax import graph
from tpugraphs_jax.hlo import opcodes, proto
from tpugraphs_jax.hlo.ragged import Ragged

# First column of an aggregated shape: six dimensions, sum, product.
SHAPE_COLUMN = 21
SHAPE_WIDTH = 8

_FIRST_TYPE = 2
_REVERSAL_COLUMN = 85
# First column, width, the list of an instruction.
_AGGREGATED = (
    (SHAPE_COLUMN, 6, lambda i: i.shape.dimensions),
    (37, 6, lambda i: [d.size for d in i.window.dimensions]),
    (45, 6, lambda i: [d.stride for d in i.window.dimensions]),
    (53, 6, lambda i: [d.padding_low for d in i.window.dimensions]),
    (61, 6, lambda i: [d.padding_high for d in i.window.dimensions]),
    (69, 6, lambda i: [d.window_dilation for d in i.window.dimensions]),
    (77, 6, lambda i: [d.base_dilation for d in i.window.dimensions]),
    (109, 2, lambda i: [d.start for d in i.slice_dimensions]),
    (113, 2, lambda i: [d.stride for d in i.slice_dimensions]),
    (117, 2, lambda i: [d.limit for d in i.slice_dimensions]),
    (121, 2, lambda i: i.dynamic_slice_sizes),
    (125, 2, lambda i: [d.edge_padding_low for d in i.padding_config.dimensions]),
    (129, 2, lambda i: [d.edge_padding_high for d in i.padding_config.dimensions]),
)
_LEADING = (
    (31, 6, lambda i: i.dimensions),
    (95, 4, lambda i: i.convolution_dimension_numbers.input_spatial_dimensions),
    (101, 4, lambda i: i.convolution_dimension_numbers.kernel_spatial_dimensions),
    (134, 6, lambda i: i.shape.layout.minor_to_major),
)
_SCALARS = (
    (29, lambda i: len(i.shape.tuple_shapes)),
    (30, lambda i: i.parameter_number),
    (93, lambda i: i.convolution_dimension_numbers.input_batch_dimension),
    (94, lambda i: i.convolution_dimension_numbers.input_feature_dimension),
    (99, lambda i: i.convolution_dimension_numbers.kernel_input_feature_dimension),
    (100, lambda i: i.convolution_dimension_numbers.kernel_output_feature_dimension),
    (105, lambda i: i.convolution_dimension_numbers.output_batch_dimension),
    (106, lambda i: i.convolution_dimension_numbers.output_feature_dimension),
    (107, lambda i: i.feature_group_count),
    (108, lambda i: i.batch_group_count),
    (133, lambda i: i.is_stable),
)


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
  result = np.zeros((len(nodes), graph.NODE_FEATURES), np.float32)
  result[:, 0] = is_root(module)
  types = [number for number, _ in opcodes.ELEMENT_TYPES]
  element_type = np.array([node.shape.element_type for node in nodes], np.int64)
  result[:, _FIRST_TYPE:_FIRST_TYPE + len(types)] = element_type[:, None] == types
  for column, width, values in _AGGREGATED:
    aggregate = Ragged([values(node) for node in nodes]).aggregate(width)
    result[:, column:column + width + 2] = aggregate
  for column, width, values in _LEADING:
    leading = Ragged([values(node) for node in nodes]).leading(width)
    result[:, column:column + width] = leading
  for column, value in _SCALARS:
    result[:, column] = np.array([value(node) for node in nodes], np.int64)
  result[:, _REVERSAL_COLUMN:_REVERSAL_COLUMN + 8] = _window_reversal(nodes)
  return result


def _window_reversal(nodes: list[proto.HloInstructionProto]) -> np.ndarray:
  """`[N, 8]`: six flags, the number of true flags, the number of false ones."""
  flags = Ragged([[d.window_reversal for d in node.window.dimensions] for node in nodes])
  true = flags.sum()
  return np.column_stack([flags.leading(6), true, flags.counts - true])
