"""The features of instructions, as the data set's extractor computes them.

`columns` names the columns. Every number is computed in int64, which wraps, and then
rounded once to float32.
"""

from __future__ import annotations

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.columns import NODE
from tpugraphs_jax.hlo import proto

# Block of columns: the list of an instruction that fills it.
_LISTS = {
  "shape": lambda i: i.shape.dimensions,
  "dimensions": lambda i: i.dimensions,
  "window_size": lambda i: [d.size for d in i.window.dimensions],
  "window_stride": lambda i: [d.stride for d in i.window.dimensions],
  "window_padding_low": lambda i: [d.padding_low for d in i.window.dimensions],
  "window_padding_high": lambda i: [d.padding_high for d in i.window.dimensions],
  "window_dilation": lambda i: [d.window_dilation for d in i.window.dimensions],
  "base_dilation": lambda i: [d.base_dilation for d in i.window.dimensions],
  "window_reversal": lambda i: [d.window_reversal for d in i.window.dimensions],
  "input_spatial_dimensions": lambda i: i.convolution_dimension_numbers.input_spatial_dimensions,
  "kernel_spatial_dimensions": lambda i: i.convolution_dimension_numbers.kernel_spatial_dimensions,
  "slice_start": lambda i: [d.start for d in i.slice_dimensions],
  "slice_stride": lambda i: [d.stride for d in i.slice_dimensions],
  "slice_limit": lambda i: [d.limit for d in i.slice_dimensions],
  "dynamic_slice_sizes": lambda i: i.dynamic_slice_sizes,
  "edge_padding_low": lambda i: [d.edge_padding_low for d in i.padding_config.dimensions],
  "edge_padding_high": lambda i: [d.edge_padding_high for d in i.padding_config.dimensions],
  "minor_to_major": lambda i: i.shape.layout.minor_to_major,
  "tuple_size": lambda i: (len(i.shape.tuple_shapes),),
  "parameter_number": lambda i: (i.parameter_number,),
  "feature_group_count": lambda i: (i.feature_group_count,),
  "batch_group_count": lambda i: (i.batch_group_count,),
  "is_stable": lambda i: (i.is_stable,),
}
# Blocks that have the name of a field of `convolution_dimension_numbers`.
_DIMENSION_NUMBERS = (
  "input_batch_dimension input_feature_dimension kernel_input_feature_dimension "
  "kernel_output_feature_dimension output_batch_dimension output_feature_dimension"
).split()


def with_later_types(node_feat: np.ndarray, module: proto.HloModuleProto) -> np.ndarray:
  """Node features in which `columns.LATER_TYPES` count: their bytes are in the column of u8 or s8.

  The extractor has no type for them, and so 0 bytes. Bytes of unsigned integers count in the column
  of u8, and bytes of all other types in the column of s8.

  Args:
    node_feat: `[N, 140]` float32 of the module, returned where the module has no such type.
    module: with N instructions.
  """
  names = [kind.name for kind in columns.ELEMENT_TYPES]
  element_type = np.array([node.shape.element_type for node in proto.instructions(module)])
  kinds = [kind for kind in columns.LATER_TYPES if (element_type == kind.number).any()]
  result = node_feat.copy() if kinds else node_feat
  for kind in kinds:
    column = NODE["element_type"].start + names.index("u8" if kind.name[0] == "u" else "s8")
    result[element_type == kind.number, column] = kind.bytes
  return result


def node_features(module: proto.HloModuleProto) -> np.ndarray:
  """The features of all instructions of a module, `[N, 140]` float32."""
  nodes = proto.instructions(module)
  lists = {name: [values(node) for node in nodes] for name, values in _LISTS.items()}
  for name in _DIMENSION_NUMBERS:
    lists[name] = [(getattr(node.convolution_dimension_numbers, name),) for node in nodes]
  result = columns.node_features(lists, len(nodes))
  is_root = [node.id == owner.root_id for node, owner in zip(nodes, proto.owners(module))]
  result[:, NODE["is_root"].start] = is_root
  types = [kind.number for kind in columns.ELEMENT_TYPES]
  element_type = np.array([node.shape.element_type for node in nodes], np.int64)
  result[:, NODE["element_type"]] = element_type[:, None] == types
  return result
