"""Blocks of node features that are computed from the released ones and the edges.

Source: 3rd place of the "Fast or Slow?" competition.
"""

from __future__ import annotations

import numpy as np

from tpugraphs_jax.graph import OpGraph

_SHAPE = slice(21, 29)  # dimensions, their sum and product
_OPERANDS = 2
_OPCODES = (26, 34)  # convolution, dot
_MISSING, _OTHER_OPCODE = -1, -2
# Dimensions of shapes, `dimensions`, windows, padding (low and high) and base dilation.
_DIMENSIONS = np.r_[21:27, 31:43, 53:59, 61:67]
_TILE = 128  # lanes of a register


def operand_shapes(graph: OpGraph) -> np.ndarray:
  """Shapes of the first two operands of convolutions and products, `[N, 16]` float32.

  Of each operand the 6 dimensions, their sum and product; -1 where there is no such
  operand, -2 for other instructions. Operands are in the order of `edge_index`. The 3rd
  place takes log(x + 3) of it (`log_offset(3)`).
  """
  width = _SHAPE.stop - _SHAPE.start
  found = np.full((graph.num_nodes, _OPERANDS, width), _OTHER_OPCODE, np.float32)
  found[np.isin(graph.node_opcode, _OPCODES)] = _MISSING
  order = np.argsort(graph.edge_index[:, 0], kind="stable")
  consumer, producer = graph.edge_index[order].T
  place = np.arange(len(consumer)) - np.searchsorted(consumer, consumer)
  chosen = np.isin(graph.node_opcode[consumer], _OPCODES) & (place < _OPERANDS)
  found[consumer[chosen], place[chosen]] = graph.node_feat[producer[chosen], _SHAPE]
  return found.reshape(graph.num_nodes, _OPERANDS * width)


def tile_modulo(graph: OpGraph) -> np.ndarray:
  """How dimensions fill registers of 128 lanes, `[N, 60]` float32.

  Of 30 columns x that count along a dimension first ((x + 127) mod 128) / 128, the place
  of the last number in its register, then floor(x / 128) / 10, the registers before.
  """
  x = graph.node_feat[:, _DIMENSIONS]
  filled = np.mod(x + (_TILE - 1), _TILE) / _TILE
  return np.concatenate([filled, np.floor(x / _TILE) / 10], axis=1).astype(np.float32)
