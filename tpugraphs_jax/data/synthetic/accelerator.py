"""The machine that the synthetic runtimes come from: a vector unit, a matrix unit, a memory.

A tensor lies in registers of 8 x 128 elements: its minor dimension is padded to
a multiple of 128, the next one to a multiple of 8. The figures are of the order
of a TPU v3 core; only their ratios shape the data.
"""

from __future__ import annotations

import math

SUBLANES = 8
LANES = 128
REGISTER_ELEMENTS = SUBLANES * LANES
REGISTER_BYTES = 4 * REGISTER_ELEMENTS
BYTES_PER_NS = 600.0  # main memory
FLOPS_PER_NS = 45_000.0  # matrix unit
REGISTER_OPS_PER_NS = 1.0  # vector unit, for an opcode of cost 1
VMEM_REGISTERS = 4096  # on-chip memory: 16 MiB
TILE_NS = 3000.0  # starting one tile: loop and transfer latency
CUT_NS = 40.0  # starting one piece of a product's summed axis within a tile

# Vector-unit cost of an elementwise opcode; 1 where not listed.
FREE_OPCODES = frozenset((
    "parameter", "constant", "bitcast", "bitcast-convert", "broadcast", "get-tuple-element",
    "tuple", "iota", "fusion", "convolution", "dot"))
_SLOW_OPCODES = {
    "exponential": 48, "log": 48, "tanh": 48, "power": 48, "divide": 12, "sqrt": 12,
    "rsqrt": 12}


def vector_cost(opcode: str) -> int:
  """Vector-unit cycles that an opcode takes per register."""
  return 0 if opcode in FREE_OPCODES else _SLOW_OPCODES.get(opcode, 1)


def padded_elements(dims: tuple[int, ...], minor: int, second: int) -> int:
  """Elements that a tensor occupies when `minor` and `second` are its minor dimensions."""
  if len(dims) < 2:
    return math.ceil(math.prod(dims) / REGISTER_ELEMENTS) * REGISTER_ELEMENTS
  rest = math.prod(d for i, d in enumerate(dims) if i not in (minor, second))
  lanes = math.ceil(dims[minor] / LANES) * LANES
  return rest * lanes * math.ceil(dims[second] / SUBLANES) * SUBLANES


def register_shape(rank: int) -> tuple[int, ...]:
  """Elements of each dimension that one register holds in the default order."""
  if rank == 1:
    return (REGISTER_ELEMENTS,)
  return (*(1,) * (rank - 2), SUBLANES, LANES)[:rank]
