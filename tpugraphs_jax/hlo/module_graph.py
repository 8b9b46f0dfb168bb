"""HLO modules to graphs, bit for bit like the data set's own extractor.

One graph holds all computations of a module, one node per instruction, in the
order of the module. An edge `[u, v]` says that instruction u consumes v: v is
an operand of u, or the root of a computation that u calls.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from typing import Any

from absl import logging
import numpy as np

from tpugraphs_jax import graph
from tpugraphs_jax.columns import opcode_ids
from tpugraphs_jax.hlo import node_features, origins, proto, sources

# The opcodes for which the compiler's layout search chooses, in the data set.
CONFIGURABLE_OPCODES = ("convolution", "dot", "reshape")
# A computation whose name has one of these ends a stretch of `node_splits`.
_SPLIT_NAMES = ("cluster", "while", "cond")
_EDGE_ORDERS = ("sorted", "insertion")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HloGraph(graph.OpGraph):
  """A graph that still knows its module: operand order, shapes, names."""

  module: proto.HloModuleProto

  @functools.cached_property
  def origins(self) -> list[origins.Origin]:
    """Where each node comes from, `[N]`: its name, and the user's line."""
    return origins.origins(self.module)


def featurize(
    source: Any, *args: Any, optimized: bool = False, target: str | None = None,
    edge_order: str = "sorted",
) -> HloGraph:
  """The graph of an HLO module.

  Args:
    source: serialized `HloModuleProto` (or `HloProto`) as bytes, the path of a
      file with them or with HLO text, HLO text, a `jax.stages.Lowered` or
      `Compiled`, or a function.
    *args: the example arguments of a function, arrays or `jax.ShapeDtypeStruct`.
    optimized: whether a function or a `Lowered` is compiled first, so that the
      graph is the compiler's result for this machine's backend, or the target's.
    target: `tpu:v2`, `tpu:v3`, `tpu:v4`, `tpu:v5e`, `tpu:v5p` or `tpu:v6e`: a function
      goes through the TPU compiler (no TPU is needed, but libtpu), and the graph is
      the one before layout assignment, as in the data set's layout collections.
      None: the function as jax lowers it, before any compiler.
    edge_order: "sorted" by (consumer, producer), each pair once, or "insertion",
      where an instruction that calls a computation twice has two equal edges.

  Returns:
    A graph with `node_feat` [N, 140] float32, `node_opcode` [N] uint8 (0 for an
    opcode outside the table, reported once), `edge_index` [E, 2] int32,
    `node_splits` [S] int64, and as `config_node` [K] int32 all convolutions, dots
    and reshapes. It has no configurations yet.

  Raises:
    ValueError: the source is not understood, the module is inconsistent, or libtpu
      is missing.
    FileNotFoundError: there is no such file.
  """
  loaded = sources.load(source, *args, optimized=optimized, target=target)
  module = proto.parse_module(loaded.data, where=loaded.where)
  return featurize_module(
      module, where=loaded.where, name=loaded.name or module.name, edge_order=edge_order)


def featurize_module(
    module: proto.HloModuleProto, *, where: str, name: str, edge_order: str = "sorted",
) -> HloGraph:
  """As `featurize`, for a parsed module; `where` begins every error message."""
  if edge_order not in _EDGE_ORDERS:
    raise ValueError(f"edge_order is {edge_order!r}, expected one of {_EDGE_ORDERS}")
  edge_index = _edges(module, where=where)
  if edge_order == "sorted":
    edge_index = _sorted_edges(edge_index, module, where=where)
  node_opcode = _node_opcode(module, where=where)
  configurable = [opcode_ids()[opcode] for opcode in CONFIGURABLE_OPCODES]
  return HloGraph(
      name=name,
      node_feat=node_features.node_features(module),
      node_opcode=node_opcode,
      edge_index=edge_index.astype(np.int32),
      node_splits=_node_splits(module),
      config_node=np.flatnonzero(np.isin(node_opcode, configurable)).astype(np.int32),
      module=module)


def unknown_opcodes(module: proto.HloModuleProto) -> collections.Counter[str]:
  """How often each opcode outside the data set's table occurs."""
  known = opcode_ids()
  return collections.Counter(
      instruction.opcode for computation in module.computations
      for instruction in computation.instructions if instruction.opcode not in known)


def node_positions(module: proto.HloModuleProto) -> dict[int, int]:
  """Instruction id to node; where ids collide the last one counts."""
  return {instruction.id: node
          for node, instruction in enumerate(node_features.instructions(module))}


def _node_opcode(module: proto.HloModuleProto, *, where: str) -> np.ndarray:
  unknown = unknown_opcodes(module)
  if unknown:
    listed = ", ".join(f"{name!r} ({count})" for name, count in unknown.most_common())
    logging.warning("%s: %d instructions have an opcode outside the table and get id 0: "
                    "%s", where, unknown.total(), listed)
  known = opcode_ids()
  return np.array(
      [known.get(instruction.opcode, 0)
       for instruction in node_features.instructions(module)], np.uint8)


def _edges(module: proto.HloModuleProto, *, where: str) -> np.ndarray:
  """All edges `[E, 2]` int64 in insertion order, equal ones repeated.

  Per instruction: its distinct operands in ascending order of id, then the roots
  of the computations that it calls, in their order.
  """
  position = node_positions(module)
  root = {computation.id: computation.root_id for computation in module.computations}
  edges = []
  for computation in module.computations:
    for instruction in computation.instructions:
      try:
        producers = itertools.chain(
            sorted(set(instruction.operand_ids)),
            [root[callee] for callee in instruction.called_computation_ids])
        consumer = position[instruction.id]
        edges.extend([(consumer, position[producer]) for producer in producers])
      except KeyError:
        problem = _dangling_reference(instruction, position, root)
        raise ValueError(_message(where, computation, instruction, problem)) from None
  edge_index = np.array(edges, np.int64).reshape(-1, 2)
  self_edges = np.flatnonzero(edge_index[:, 0] == edge_index[:, 1])
  if self_edges.size:
    raise ValueError(_message(
        where, *_node(module, edge_index[self_edges[0], 0]), "consumes itself"))
  return edge_index


def _dangling_reference(
    instruction: proto.HloInstructionProto, position: dict[int, int],
    root: dict[int, int],
) -> str:
  for operand in instruction.operand_ids:
    if operand not in position:
      return f"its operand id {operand} is no instruction of the module"
  for callee in instruction.called_computation_ids:
    if callee not in root:
      return f"it calls computation id {callee}, which the module does not have"
    if root[callee] not in position:
      return (f"it calls computation id {callee}, whose root id {root[callee]} is no "
              "instruction of the module")
  raise AssertionError("every reference is known")


def _sorted_edges(
    edge_index: np.ndarray, module: proto.HloModuleProto, *, where: str
) -> np.ndarray:
  result = edge_index[np.lexsort((edge_index[:, 1], edge_index[:, 0]))]
  repeated = np.flatnonzero((result[1:] == result[:-1]).all(axis=1))
  if repeated.size:
    consumer, producer = result[repeated[0]]
    name = _node(module, producer)[1].name
    raise ValueError(_message(
        where, *_node(module, consumer), f"consumes {name!r} twice, which a sorted edge "
        "list does not allow; use edge_order='insertion'"))
  return result


def _node_splits(module: proto.HloModuleProto) -> np.ndarray:
  """Ends of the stretches that loops, branches and clusters cut, `[S]` int64."""
  splits = [0]
  nodes = 0
  for computation in module.computations:
    nodes += len(computation.instructions)
    if any(name in computation.name for name in _SPLIT_NAMES):
      splits.append(nodes)
  if splits[-1] < nodes:
    splits.append(nodes)
  return np.array(splits, np.int64)


def _node(
    module: proto.HloModuleProto, node: int
) -> tuple[proto.HloComputationProto, proto.HloInstructionProto]:
  for computation in module.computations:
    if node < len(computation.instructions):
      return computation, computation.instructions[int(node)]
    node -= len(computation.instructions)
  raise AssertionError("the module has this node")


def _message(
    where: str, computation: proto.HloComputationProto,
    instruction: proto.HloInstructionProto, problem: str,
) -> str:
  return (f"{where}: computation {computation.name!r}, instruction {instruction.name!r} "
          f"(id {instruction.id}): {problem}")
