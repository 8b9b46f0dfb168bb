"""Runtime of a whole program as a function of its layout choices.

A choice gives the output of a configurable instruction one of two orders of its
dimensions. Everything elementwise takes over the order of its first operand
(a transpose that moves the last dimension turns it round), parameters and
broadcasts come in whatever order is wanted, and reductions read any order. So
each tensor's order is that of one configurable node, its owner, or the default.

The time is the sum of
* per tensor: the larger of arithmetic and memory time, both times the padding
  of its two minor dimensions to 8 x 128;
* per operand whose order differs from its consumer's: a copy, the padded tensor
  read once and written once.

As each node has two orders, that is a quadratic function of the groups' bits.
All costs are whole nanoseconds, so sums are exact whatever their order.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tpugraphs_jax.data.synthetic import accelerator
from tpugraphs_jax.data.synthetic.program import BYTES, Program

CONFIGURABLE = ("convolution", "dot", "reshape")
_ANY_ORDER = frozenset((
    "parameter", "constant", "broadcast", "iota", "rng", "tuple", "get-tuple-element",
    "gather", "call", "all-reduce"))
_READS_ANY_ORDER = frozenset(("reduce", "tuple", "gather", "all-reduce", "broadcast", "call"))


@dataclasses.dataclass(frozen=True)
class LayoutCost:
  """The time of a program as `base + linear . bits + bits . pairs . bits`, nanoseconds."""

  base: float
  linear: np.ndarray  # [groups] float64
  pairs: np.ndarray  # [groups, groups] float64, upper triangle

  def __call__(self, bits: np.ndarray) -> np.ndarray:
    """Noise-free runtimes `[...]` float64 ns of bits `[..., groups]`."""
    bits = bits.astype(np.float64)
    return self.base + bits @ self.linear + ((bits @ self.pairs) * bits).sum(-1)

  def flip_ns(self, bits: np.ndarray) -> np.ndarray:
    """What flipping each bit of `bits` `[groups]` would add, `[groups]` float64 ns."""
    slope = self.linear + (self.pairs + self.pairs.T) @ bits
    return np.where(bits, -slope, slope)


def minor_pair(program: Program, node: int) -> tuple[int, int]:
  """The two dimensions whose order is chosen: (default minor, default second)."""
  op = program.ops[node]
  if op.convolution:
    return op.convolution[13], op.convolution[12]
  if op.opcode == "reshape":
    return len(op.dims) - 1, 0
  return len(op.dims) - 1, len(op.dims) - 2


def layout_cost(program: Program, node_group: dict[int, int], *, steps: int) -> LayoutCost:
  """The cost function of a program.

  Args:
    program: the program.
    node_group: group number of each configurable instruction.
    steps: how often the program runs its body; scales every cost.
  """
  groups = max(node_group.values(), default=-1) + 1
  # The last row and column stand for the default order, a bit that is always 0.
  same, differ = np.zeros((2, groups + 1, groups + 1))
  orders = np.zeros((2, groups + 1))
  owner, flipped = _owners(program)
  group = [node_group.get(o, groups) for o in owner]
  for node, op in enumerate(program.ops):
    if len(op.dims) < 2 or op.opcode in _ANY_ORDER:
      continue
    for bit in (0, 1):
      order = bit ^ flipped[node]
      orders[bit, group[node]] += round(_node_ns(program, node, owner[node], order) * steps)
    if op.opcode in _READS_ANY_ORDER:
      continue
    for used in program.operands[node]:
      if len(program.dims(used)) < 2 or program.ops[used].opcode in _ANY_ORDER:
        continue
      table = same if flipped[node] ^ flipped[used] ^ _turns(program, node) else differ
      pair = tuple(sorted((group[node], group[used])))
      table[pair] += round(_copy_ns(program, used, owner[used]) * steps)
  # A copy where bits differ costs (a + b - 2ab), one where they agree the rest to 1.
  weight = np.triu(differ - same, 1)
  linear = orders[1] - orders[0] + weight.sum(0) + weight.sum(1)
  return LayoutCost(base=orders[0].sum() + same.sum(), linear=linear[:-1],
                    pairs=-2 * weight[:-1, :-1])


def _owners(program: Program) -> tuple[list[int], list[int]]:
  """Per instruction the node whose order it takes over (or -1), and if turned round."""
  owner, flipped = [], []
  for node, op in enumerate(program.ops):
    first = next((v for v in program.operands[node] if len(program.dims(v)) > 1 and
                  program.ops[v].opcode not in _ANY_ORDER), None)
    if op.opcode in CONFIGURABLE:
      owner.append(node)
      flipped.append(0)
    elif first is None or len(op.dims) < 2 or op.opcode in _READS_ANY_ORDER | _ANY_ORDER:
      owner.append(-1)
      flipped.append(0)
    else:
      owner.append(owner[first])
      flipped.append(flipped[first] ^ _turns(program, node))
  return owner, flipped


def _turns(program: Program, node: int) -> int:
  """1 for a transpose that moves the last dimension, else 0."""
  op = program.ops[node]
  return int(op.opcode == "transpose" and op.dimensions[-1] != len(op.dims) - 1)


def _node_ns(program: Program, node: int, owner: int, order: int) -> float:
  """Roofline time of one instruction whose output has the given order."""
  op = program.ops[node]
  elements = _elements(program, node, owner, order)
  matrix = 2 * elements * program.contraction.get(node, 0) / accelerator.FLOPS_PER_NS
  vector = (elements * accelerator.vector_cost(op.opcode) / accelerator.REGISTER_ELEMENTS /
            accelerator.REGISTER_OPS_PER_NS)
  return max(matrix + vector, 2 * elements * BYTES[op.dtype] / accelerator.BYTES_PER_NS)


def _copy_ns(program: Program, node: int, owner: int) -> float:
  """Reading a tensor in one order and writing it in the other."""
  elements = sum(_elements(program, node, owner, order) for order in (0, 1))
  return elements * BYTES[program.ops[node].dtype] / accelerator.BYTES_PER_NS


def _elements(program: Program, node: int, owner: int, order: int) -> int:
  dims = program.dims(node)
  same_rank = owner >= 0 and len(program.dims(owner)) == len(dims)
  pair = minor_pair(program, owner if same_rank else node)
  minor, second = pair if order == 0 else pair[::-1]
  return accelerator.padded_elements(dims, minor, second)
