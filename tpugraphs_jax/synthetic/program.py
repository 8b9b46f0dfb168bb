"""HLO programs built one instruction at a time, and the machine that the runtimes come from.

`ProgramBuilder` encodes its instructions as an `OpGraph`; `columns` describes the node features.
The machine has a vector unit, a matrix unit and a memory. A tensor lies in registers of 8 x 128
elements: its minor dimension is padded to a multiple of 128, the next one to a multiple of 8. The
figures are of the order of a TPU v3 core; only their ratios shape the data.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from tpugraphs_jax import columns, graph
from tpugraphs_jax.columns import NODE
from tpugraphs_jax.data.features import LANES, SUBLANES

REGISTER_ELEMENTS = SUBLANES * LANES
REGISTER_BYTES = 4 * REGISTER_ELEMENTS
BYTES_PER_NS = 600.0  # main memory
FLOPS_PER_NS = 45_000.0  # matrix unit
REGISTER_OPS_PER_NS = 1.0  # vector unit, for an opcode of cost 1
VMEM_REGISTERS = 4096  # on-chip memory: 16 MiB
TILE_NS = 3000.0  # starting one tile: loop and transfer latency
CUT_NS = 40.0  # starting one piece of a product's summed axis within a tile

# Vector-unit cost of an opcode: 0 if it is free, else that of `_SLOW_OPCODES`, else 1.
FREE_OPCODES = frozenset(
  "parameter constant bitcast bitcast-convert broadcast get-tuple-element tuple iota fusion "
  "convolution dot".split()
)
_SLOW_OPCODES = dict.fromkeys(("exponential", "log", "tanh", "power"), 48)
_SLOW_OPCODES |= dict.fromkeys(("divide", "sqrt", "rsqrt"), 12)


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


BYTES = {kind.name: kind.bytes for kind in columns.ELEMENT_TYPES}
_TYPE_NAMES = tuple(BYTES)
# Blocks of columns in the order of the entries of `Op.window`.
_WINDOW = (
  "window_size window_stride window_padding_low window_padding_high window_dilation base_dilation "
  "window_reversal"
).split()
_CONVOLUTION = columns.span(NODE, "input_batch_dimension", "output_feature_dimension")


@dataclasses.dataclass(frozen=True)
class Op:
  """An instruction without its operands; hashable."""

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


def node_features(ops: Sequence[Op]) -> np.ndarray:
  """The features of instructions, `[N, 140]` float32; column 0 (root) is left 0."""
  lists: dict[str, Sequence[Sequence[int]]] = {
    "shape": [op.dims for op in ops],
    "dimensions": [op.dimensions for op in ops],
    "minor_to_major": [range(len(op.dims))[::-1] for op in ops],  # the last dimension is minor
    "tuple_size": [(op.tuple_size,) for op in ops],
    "parameter_number": [(op.parameter_number,) for op in ops],
  }
  for place, name in enumerate(_WINDOW):
    lists[name] = [[row[place] for row in op.window] for op in ops]
  feat = columns.node_features(lists, len(ops))
  for row, op in zip(feat, ops):
    row[NODE["element_type"].start + _TYPE_NAMES.index(op.dtype)] = 1
    if op.convolution:
      row[_CONVOLUTION] = op.convolution
      row[NODE["feature_group_count"]] = row[NODE["batch_group_count"]] = 1
  return feat


class ProgramBuilder:
  """An HLO module under construction: instructions in topological order.

  `add` returns the number of the new instruction, which later instructions name
  as operand. Bodies of reductions are computations of three nodes of their own
  and come first in the finished graph, so every edge (u, v) has u > v.
  """

  def __init__(self):
    self.ops: list[Op] = []
    self.operands: list[tuple[int, ...]] = []
    self.contraction: dict[int, int] = {}  # multiply-adds per output element
    self.role: dict[int, str] = {}  # purpose of a configurable node, e.g. "query"
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
    self,
    opcode: str,
    dims: tuple[int, ...] = (),
    *operands: int,
    contraction: int = 0,
    role: str = "",
    **attributes,
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
    return self.add("broadcast", dims, node, dimensions=dimensions, dtype=self.ops[node].dtype)

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

  def graph(
    self, name: str, configs: graph.Configs, config_node: np.ndarray | None = None
  ) -> graph.OpGraph[graph.Configs]:
    """The finished graph with its configurations; `config_node` are instruction numbers."""
    ops, operands, roots = self._with_bodies()
    row = {op: number for number, op in enumerate(dict.fromkeys(ops))}
    node_feat = node_features(list(row))[[row[op] for op in ops]]
    node_feat[roots, 0] = 1
    edges = [(u, v) for u, used in enumerate(operands) for v in sorted(set(used))]
    splits = [0, *(split + self.offset for split in self._splits)]
    if splits[-1] != len(ops):
      splits.append(len(ops))
    config_node = np.zeros(0) if config_node is None else config_node + self.offset
    return graph.OpGraph(
      name=name,
      node_feat=node_feat,
      node_opcode=np.array([columns.opcode_ids()[op.opcode] for op in ops], np.uint8),
      edge_index=np.array(edges, np.int32).reshape(-1, 2),
      node_splits=np.array(splits, np.int64),
      config_node=config_node.astype(np.int32),
      configs=configs,
    )

  def _with_bodies(self):
    """Instructions, operands and roots with the reduction bodies put first."""
    ops: list[Op] = []
    operands, roots, body_root = [], [], {}
    for node, opcode in self._bodies.items():
      dtype, first = self.ops[node].dtype, len(ops)
      left, right = Op("parameter", dtype=dtype), Op("parameter", dtype=dtype, parameter_number=1)
      ops += [left, right, Op(opcode, dtype=dtype)]
      operands += [(), (), (first, first + 1)]
      roots.append(first + 2)
      body_root[node] = first + 2
    for node, used in enumerate(self.operands):
      called = (body_root[node],) if node in body_root else ()
      operands.append(called + tuple(v + self.offset for v in used))
    roots += [node + self.offset for node in self._roots]
    return ops + self.ops, operands, roots
