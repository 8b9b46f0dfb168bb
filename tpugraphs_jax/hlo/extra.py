"""Features that the protobuf has and the 140 columns leave out.

These are the columns that the third-place system of the Kaggle competition adds
to the data set's own: dimension numbers of dot and gather, flags, and the shapes
of the first two operands of convolution and dot.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tpugraphs_jax.columns import NODE
from tpugraphs_jax.hlo import module_graph, node_features
from tpugraphs_jax.hlo.ragged import Ragged

_ABSENT = -1
# Stands in the operand columns of instructions that are not convolution or dot.
_OTHER_OPCODE = -2
_OPERANDS = 2
_OPERAND_OPCODES = ("convolution", "dot")
# Name, width, the list of an instruction.
_LISTS = (
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


@dataclasses.dataclass(frozen=True, eq=False)
class ExtraFeatures:
  """A second block of node features, its columns named."""

  names: tuple[str, ...]  # [F]
  values: np.ndarray  # [N, F] float32

  def column(self, name: str) -> np.ndarray:
    """The values `[N]` of one column."""
    return self.values[:, self.names.index(name)]


def extra_features(graph: module_graph.HloGraph) -> ExtraFeatures:
  """The extra features of a graph's nodes, as they stand in the module.

  Lists are cut after, or padded with -1 to, the width of their columns; -1 also
  stands for the index vector dimension where there is no gather, and for an
  operand that is missing; -2 for the operands of other instructions than
  convolution and dot. The original system takes logarithms of some columns;
  these are left to the normalization of features.

  Source: `add_features` of the third place, "Google - Fast or Slow?", 2023.
  """
  nodes = node_features.instructions(graph.module)
  columns = {
      "has_dynamic_computation": np.full(len(nodes), graph.module.is_dynamic),
      "is_computation_root": node_features.is_root(graph.module),
  }
  for name, width, values in _LISTS:
    leading = Ragged([values(node) for node in nodes]).leading(width, padding=_ABSENT)
    columns |= {f"{name}_{k}": leading[:, k] for k in range(width)}
  columns["gather_index_vector_dimension"] = np.array(
      [node.gather_dimension_numbers.index_vector_dim
       if node.HasField("gather_dimension_numbers") else _ABSENT for node in nodes], int)
  columns["indices_are_sorted"] = np.array([node.indices_are_sorted for node in nodes], bool)
  columns |= _operand_columns(graph)
  values = np.zeros((len(nodes), len(columns)), np.float32)
  for k, column in enumerate(columns.values()):
    values[:, k] = column
  return ExtraFeatures(tuple(columns), values)


def _operand_columns(graph: module_graph.HloGraph) -> dict[str, np.ndarray]:
  """Dimensions, sum and product of the first two operands, in operand order."""
  shapes = graph.node_feat[:, NODE["shape"]]
  width = shapes.shape[1]
  result = np.full((graph.num_nodes, _OPERANDS, width), _OTHER_OPCODE, np.float32)
  position = module_graph.node_positions(graph.module)
  for node, instruction in enumerate(node_features.instructions(graph.module)):
    if instruction.opcode in _OPERAND_OPCODES:
      result[node] = _ABSENT
      for slot, operand in enumerate(instruction.operand_ids[:_OPERANDS]):
        result[node, slot] = shapes[position[operand]]
  parts = [f"dimension_{k}" for k in range(width - 2)] + ["sum", "product"]
  return {f"operand_{slot}_{part}": result[:, slot, k]
          for slot in range(_OPERANDS) for k, part in enumerate(parts)}
