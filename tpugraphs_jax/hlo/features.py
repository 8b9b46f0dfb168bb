"""The features of instructions, as the data set's extractor computes them.

`columns` names the columns. Every number is computed in int64, which wraps, and then
rounded once to float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
    "tuple_size": lambda i: (len(i.shape.tuple_shapes),),
    "parameter_number": lambda i: (i.parameter_number,),
    "feature_group_count": lambda i: (i.feature_group_count,),
    "batch_group_count": lambda i: (i.batch_group_count,),
    "is_stable": lambda i: (i.is_stable,),
}
# Blocks that have the name of a field of `convolution_dimension_numbers`.
_DIMENSION_NUMBERS = (
    "input_batch_dimension", "input_feature_dimension", "kernel_input_feature_dimension",
    "kernel_output_feature_dimension", "output_batch_dimension", "output_feature_dimension")

# Extra features: name, number of columns, the list of an instruction.
_EXTRA_LISTS = (
    ("lhs_contracting_dimension", 3,
     lambda i: i.dot_dimension_numbers.lhs_contracting_dimensions),
    ("rhs_contracting_dimension", 3,
     lambda i: i.dot_dimension_numbers.rhs_contracting_dimensions),
    ("lhs_batch_dimension", 3, lambda i: i.dot_dimension_numbers.lhs_batch_dimensions),
    ("rhs_batch_dimension", 3, lambda i: i.dot_dimension_numbers.rhs_batch_dimensions),
    ("gather_offset_dimension", 3, lambda i: i.gather_dimension_numbers.offset_dims),
    ("gather_collapsed_slice_dimension", 3,
     lambda i: i.gather_dimension_numbers.collapsed_slice_dims),
    ("gather_start_index_map", 3, lambda i: i.gather_dimension_numbers.start_index_map),
    ("gather_slice_size", 5, lambda i: i.gather_slice_sizes),
)
_ABSENT = -1
_OTHER_OPCODE = -2  # in operand columns of instructions that are not convolution or dot
_OPERANDS = 2
_OPERAND_OPCODES = ("convolution", "dot")


def node_features(module: proto.HloModuleProto) -> np.ndarray:
  """The features of all instructions of a module, `[N, 140]` float32."""
  nodes = proto.instructions(module)
  lists = {name: [values(node) for node in nodes] for name, values in _LISTS.items()}
  lists |= {name: [(getattr(node.convolution_dimension_numbers, name),) for node in nodes]
            for name in _DIMENSION_NUMBERS}
  result = columns.node_features(lists, len(nodes))
  result[:, NODE["is_root"].start] = _is_root(module)
  types = [kind.number for kind in columns.ELEMENT_TYPES]
  element_type = np.array([node.shape.element_type for node in nodes], np.int64)
  result[:, NODE["element_type"]] = element_type[:, None] == types
  return result


def _is_root(module: proto.HloModuleProto) -> np.ndarray:
  """Whether each node is the root of its own computation, `[N]` bool."""
  return np.array(
      [instruction.id == computation.root_id for computation in module.computations
       for instruction in computation.instructions], bool)


@dataclasses.dataclass(frozen=True, eq=False)
class ExtraFeatures:
  """A second block of node features, with the names of its columns."""

  names: tuple[str, ...]  # [F]
  values: np.ndarray  # [N, F] float32


def extra_features(graph: Any) -> ExtraFeatures:
  """46 features that the protobuf has and the 140 columns leave out.

  These are dimension numbers of dot and gather, flags, and the shapes of the first two
  operands of convolution and dot. Lists are cut to the number of their columns, or padded
  with -1. -1 also stands for the index vector dimension where there is no gather, and for
  a missing operand; -2 stands for the operands of all other instructions. The original
  system takes logarithms of some columns, which is left to `data.feature_transform`.

  Args:
    graph: an `HloGraph`.

  Source: `add_features` of the third place, "Google - Fast or Slow?", 2023.
  """
  nodes = proto.instructions(graph.module)
  named = {
      "has_dynamic_computation": np.full(len(nodes), graph.module.is_dynamic),
      "is_computation_root": _is_root(graph.module),
  }
  for name, width, values in _EXTRA_LISTS:
    leading = columns.Ragged([values(node) for node in nodes]).leading(width, padding=_ABSENT)
    named |= {f"{name}_{k}": leading[:, k] for k in range(width)}
  named["gather_index_vector_dimension"] = np.array(
      [node.gather_dimension_numbers.index_vector_dim
       if node.HasField("gather_dimension_numbers") else _ABSENT for node in nodes], int)
  named["indices_are_sorted"] = np.array([node.indices_are_sorted for node in nodes], bool)
  named |= _operand_columns(graph)
  return ExtraFeatures(tuple(named), np.array(list(named.values()), np.float32).T.copy())


def _operand_columns(graph: Any) -> dict[str, np.ndarray]:
  """Dimensions, sum and product of the first two operands, in operand order."""
  shapes = graph.node_feat[:, NODE["shape"]]
  width = shapes.shape[1]
  result = np.full((graph.num_nodes, _OPERANDS, width), _OTHER_OPCODE, np.float32)
  position = proto.positions(graph.module)
  for node, instruction in enumerate(proto.instructions(graph.module)):
    if instruction.opcode in _OPERAND_OPCODES:
      result[node] = _ABSENT
      for slot, operand in enumerate(instruction.operand_ids[:_OPERANDS]):
        result[node, slot] = shapes[position[operand]]
  parts = [f"dimension_{k}" for k in range(width - 2)] + ["sum", "product"]
  return {f"operand_{slot}_{part}": result[:, slot, k]
          for slot in range(_OPERANDS) for k, part in enumerate(parts)}
