"""Builds HLO programs one instruction at a time and encodes them as `OpGraph`.

The 140 node features follow the released layout: a list of sizes becomes its
first six (or two) entries padded with 0, then the sum and the product over all
of them, where the product of an empty list is 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from tpugraphs_jax import graph

# The opcodes that the generated programs use, with their numbers in the data set.
OPCODE_IDS = {
    "add": 2, "all-reduce": 5, "bitcast": 11, "bitcast-convert": 12, "broadcast": 13,
    "call": 14, "compare": 20, "constant": 24, "convert": 25, "convolution": 26, "copy": 27,
    "divide": 32, "dot": 34, "exponential": 37, "fusion": 41, "gather": 42,
    "get-tuple-element": 45, "iota": 48, "log": 50, "and": 52, "or": 54, "maximum": 57,
    "minimum": 58, "multiply": 59, "negate": 60, "pad": 62, "parameter": 63, "power": 66,
    "reduce": 70, "reduce-window": 72, "reshape": 75, "reverse": 76, "rng": 77, "rsqrt": 81,
    "select": 83, "shift-left": 87, "shift-right-logical": 89, "slice": 92, "sqrt": 94,
    "subtract": 95, "tanh": 96, "transpose": 98, "tuple": 100,
}
ELEMENT_TYPES = (
    "invalid", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32",
    "f64", "bf16", "c64", "c128", "tuple", "opaque", "token",
)
BYTES = {"pred": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "tuple": 0}
# First columns of the seven window blocks of 8, in the order of `Op.window` entries.
_WINDOW_COLUMNS = (37, 45, 53, 61, 69, 77)


@dataclasses.dataclass(frozen=True)
class Op:
  """What one instruction is, apart from its operands; hashable."""

  opcode: str
  dims: tuple[int, ...] = ()
  dtype: str = "f32"
  tuple_size: int = 0
  parameter_number: int = 0
  dimensions: tuple[int, ...] = ()
  # One (size, stride, padding low, padding high, window dilation, base dilation,
  # reversal) per window dimension.
  window: tuple[tuple[int, ...], ...] = ()
  # Columns 93..106: input batch, input feature, 4 input spatial, kernel input and
  # output feature, 4 kernel spatial, output batch, output feature dimensions.
  convolution: tuple[int, ...] = ()
  slices: tuple[tuple[int, ...], ...] = ()  # (starts, strides, limits)
  edge_padding: tuple[tuple[int, ...], ...] = ()  # (low, high)
  minor_to_major: tuple[int, ...] | None = None  # None: the last dimension is minor


@functools.lru_cache(maxsize=1 << 14)
def feature_row(op: Op) -> np.ndarray:
  """The 140 features of one instruction, float32; column 0 (root) is left 0."""
  row = np.zeros(graph.NODE_FEATURES, np.int64)
  row[2 + ELEMENT_TYPES.index(op.dtype)] = 1
  _fill(row, 21, op.dims, 6)
  row[29], row[30] = op.tuple_size, op.parameter_number
  row[31:31 + len(op.dimensions)] = op.dimensions
  window = np.array(op.window, np.int64).reshape(-1, 7).T.tolist()
  for column, values in zip(_WINDOW_COLUMNS, window):
    _fill(row, column, values, 6)
  row[85:85 + len(op.window)] = window[6]
  row[91], row[92] = sum(window[6]), len(op.window) - sum(window[6])
  if op.convolution:
    row[93:107] = op.convolution
    row[107:109] = 1
  for column, values in zip((109, 113, 117), op.slices or ((), (), ())):
    _fill(row, column, values, 2)
  _fill(row, 121, (), 2)
  for column, values in zip((125, 129), op.edge_padding or ((), ())):
    _fill(row, column, values, 2)
  layout = op.minor_to_major
  layout = tuple(range(len(op.dims)))[::-1] if layout is None else layout
  row[134:134 + len(layout)] = layout
  return row.astype(np.float32)


def _fill(row: np.ndarray, column: int, values, count: int) -> None:
  """Writes one block: the first `count` values, the sum and the product of all."""
  values = tuple(values)
  row[column:column + min(count, len(values))] = values[:count]
  row[column + count] = sum(values)
  row[column + count + 1] = math.prod(values)


class Program:
  """An HLO module under construction: instructions in topological order.

  `add` returns the number of the new instruction, which later instructions name
  as operand. Bodies of reductions are computations of three nodes of their own
  and come first in the finished graph, so every edge (u, v) has u > v.
  """

  def __init__(self):
    self.ops: list[Op] = []
    self.operands: list[tuple[int, ...]] = []
    self.contraction: dict[int, int] = {}  # multiply-adds per output element
    self.role: dict[int, str] = {}  # what a configurable node is for, e.g. "query"
    self._bodies: dict[int, str] = {}  # reduction -> opcode of its body
    self._roots: list[int] = []
    self._splits: list[int] = []

  def __len__(self) -> int:
    """The number of nodes of the finished graph so far."""
    return len(self.ops) + self.offset

  @property
  def offset(self) -> int:
    """The node number of instruction 0 in the finished graph."""
    return 3 * len(self._bodies)

  def dims(self, node: int) -> tuple[int, ...]:
    return self.ops[node].dims

  def add(
      self, opcode: str, dims: tuple[int, ...] = (), *operands: int,
      contraction: int = 0, role: str = "", **attributes,
  ) -> int:
    """Appends an instruction; `attributes` are fields of `Op`."""
    node = len(self.ops)
    self.ops.append(Op(opcode, tuple(dims), **attributes))
    self.operands.append(operands)
    if contraction:
      self.contraction[node] = contraction
    if role:
      self.role[node] = role
    return node

  def like(self, opcode: str, *operands: int, **attributes) -> int:
    """An instruction with the shape and type of its first operand."""
    first = self.ops[operands[0]]
    attributes.setdefault("dtype", first.dtype)
    return self.add(opcode, first.dims, *operands, **attributes)

  def scalar(self, dims: tuple[int, ...], dtype: str = "f32") -> int:
    """A constant spread over a shape: two nodes."""
    return self.add("broadcast", dims, self.add("constant", dtype=dtype), dtype=dtype)

  def spread(self, node: int, dims: tuple[int, ...], dimensions: tuple[int, ...]) -> int:
    """A broadcast of `node` to `dims`; its axes become the given dimensions."""
    return self.add("broadcast", dims, node, dimensions=dimensions,
                    dtype=self.ops[node].dtype)

  def reduce(self, node: int, dimensions: tuple[int, ...], body: str = "add") -> int:
    """A reduction over `dimensions`, with its initial value and its body."""
    op = self.ops[node]
    dims = tuple(d for i, d in enumerate(op.dims) if i not in dimensions)
    initial = self.add("constant", dtype=op.dtype)
    result = self.add("reduce", dims, node, initial, dimensions=dimensions, dtype=op.dtype)
    self._bodies[result] = body
    return result

  def end_computation(self, *, split: bool = False) -> int:
    """Marks the newest instruction as the root of its computation."""
    self._roots.append(len(self.ops) - 1)
    if split:
      self._splits.append(len(self.ops))
    return self._roots[-1]

  def graph(self, name: str, config_node: np.ndarray | None = None) -> graph.OpGraph:
    """The finished graph; `config_node` are instruction numbers."""
    ops, operands, roots = self._with_bodies()
    node_feat = np.stack([feature_row(op) for op in ops])
    node_feat[roots, 0] = 1
    edges = [(u, v) for u, used in enumerate(operands) for v in sorted(set(used))]
    splits = [0, *(split + self.offset for split in self._splits)]
    if splits[-1] != len(ops):
      splits.append(len(ops))
    config_node = np.zeros(0) if config_node is None else config_node + self.offset
    return graph.OpGraph(
        name=name, node_feat=node_feat,
        node_opcode=np.array([OPCODE_IDS[op.opcode] for op in ops], np.uint8),
        edge_index=np.array(edges, np.int32).reshape(-1, 2),
        node_splits=np.array(splits, np.int64), config_node=config_node.astype(np.int32))

  def _with_bodies(self):
    """Instructions, operands and roots with the reduction bodies put first."""
    ops, operands, roots, body_root = [], [], [], {}
    for node, opcode in self._bodies.items():
      dtype, first = self.ops[node].dtype, len(ops)
      ops += [Op("parameter", dtype=dtype), Op("parameter", dtype=dtype, parameter_number=1),
              Op(opcode, dtype=dtype)]
      operands += [(), (), (first, first + 1)]
      roots.append(first + 2)
      body_root[node] = first + 2
    for node, used in enumerate(self.operands):
      called = (body_root[node],) if node in body_root else ()
      operands.append(called + tuple(v + self.offset for v in used))
    roots += [node + self.offset for node in self._roots]
    return ops + self.ops, operands, roots
