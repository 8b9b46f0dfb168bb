"""HLO modules to graphs, bit for bit like the data set's own extractor.

One graph holds all computations of a module, one node per instruction, in the
order of the module. An edge `[u, v]` says that instruction u consumes v: v is
an operand of u, or the root of a computation that u calls.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any, NoReturn

from absl import logging
import numpy as np

from tpugraphs_jax import columns, graph
from tpugraphs_jax.columns import opcode_ids
from tpugraphs_jax.hlo import features, layout_options, names, proto, sources
from tpugraphs_jax.infra import console, machine

# Instructions whose layouts the search of the data set chooses.
CONFIGURABLE_OPCODES = ("convolution", "dot", "reshape")
# A computation whose name holds one of these words ends a stretch of `node_splits`.
_SPLIT_NAMES = ("cluster", "while", "cond")
_UNBOUNDED = -(2**63)  # XLA's size of a dimension `?`
_EDGE_ORDERS = ("sorted", "insertion")
_NODE_BYTES = 1500  # of memory that a node takes, with its features; 1,300 measured
_SHOWN_NAMES = 10  # of opcodes or types in a warning
# Folders of libraries, whose source lines are not the user's own, and modules of the interpreter.
_INSTALLED = ("site-packages", "dist-packages")
_INTERPRETER = "<frozen "


@dataclasses.dataclass(frozen=True)
class Origin:
  """The source of an instruction; fields are empty or 0 where the module does not say."""

  name: str  # of the instruction
  op_name: str  # of jax: jit(f)/.../dot_general
  file: str
  line: int

  @property
  def where(self) -> str:
    """`model.py:12`, the file without its folder."""
    return f"{Path(self.file).name}:{self.line}" if self.file else ""


# Of no type of configurations: `dataclasses.replace` cannot turn `HloGraph[None]` into another.
@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class HloGraph(graph.OpGraph):
  """A graph with its HLO module, which has the order of operands, all shapes, and names."""

  module: proto.HloModuleProto

  def with_layouts(self, n: int, seed: int = 0) -> HloGraph:
    """The graph with up to `n` distinct layout configurations, not labelled.

    The first one leaves every node to the compiler. Nodes with the same opcode, shapes and
    dimension numbers decide together, as equivalent nodes do in the data set. A graph with few
    choices has fewer than `n` configurations. `hlo.layout_options` lists the layouts of a node.

    Args:
      n: number of configurations.
      seed: of the sample, where there are more than `n`.

    Raises:
      ValueError: no node is configurable, or one of them is inconsistent.
    """
    configs = layout_options.layout_configs(
      self.module, self.config_node, n, seed=seed, where=self.name
    )
    return dataclasses.replace(self, configs=configs)

  def as_kernel(self, configs: graph.TileConfigs) -> HloGraph:
    """The graph as one kernel, in which no node is configurable, with these tiles."""
    return dataclasses.replace(
      self,
      node_splits=np.array([0, self.num_nodes], np.int64),
      config_node=np.zeros(0, np.int32),
      configs=configs,
    )

  def for_rankers(self) -> HloGraph:
    node_feat = features.with_later_types(self.node_feat, self.module)
    return self if node_feat is self.node_feat else dataclasses.replace(self, node_feat=node_feat)

  def node_name(self, node: int) -> str:
    return self.origins[node].name

  def node_place(self, node: int) -> tuple[str, str, str]:
    origin, shape = self.origins[node], proto.instructions(self.module)[node].shape
    return names.shape(shape), names.scope(origin.op_name), origin.where

  def summary(self) -> str:
    """Lines with size, computations, opcodes and configurable nodes of the module."""
    return "\n".join(_summary_lines(self))

  @functools.cached_property
  def origins(self) -> list[Origin]:
    """The source of each node, `[N]`."""
    return [origin(node, self.module) for node in proto.instructions(self.module)]


def _summary_lines(graph: HloGraph) -> Iterator[str]:
  module = graph.module
  yield (
    f"{graph.name}: {graph.num_nodes} nodes, {graph.num_edges} edges, "
    f"{len(module.computations)} computations"
  )
  yield f"node_splits: {graph.node_splits.tolist()}"
  yield "\ncomputations (id, instructions, root):"
  for computation in module.computations:
    names = {instruction.id: instruction.name for instruction in computation.instructions}
    root = names.get(computation.root_id, "none")
    yield f"  {computation.name}  {computation.id}  {len(computation.instructions)}  {root}"
  nodes = proto.instructions(module)
  yield "\nopcodes (id, nodes):"
  for opcode, count in collections.Counter(node.opcode for node in nodes).most_common():
    number = opcode_ids().get(opcode)
    yield f"  {opcode or '(none)'}  {number or '0, not in the table'}  {count}"
  position = proto.positions(module)
  yield f"\nconfigurable nodes: {len(graph.config_node)}"
  for index in graph.config_node:
    node = nodes[index]
    operands = ", ".join(
      proto.shape_text(nodes[position[operand]].shape) for operand in node.operand_ids
    )
    shape, origin = proto.shape_text(node.shape), graph.origins[index]
    where = f"  {origin.where}" if origin.where else ""
    yield f"  {index}  {node.opcode}  {shape} <- {operands}  {origin.name}{where}"


@console.working("reading a program")
def featurize(
  source: Any,
  /,
  *args: Any,
  optimized: bool = False,
  target: str | None = None,
  edge_order: str = "sorted",
  **kwargs: Any,
) -> HloGraph:
  """The graph of an HLO module.

  Args:
    source: a serialized `HloModuleProto`, `HloProto` or `HloSnapshot`, HLO text, StableHLO as text
      or bytecode, or an artifact of `jax.export`: its bytes, text, or the path of a file, also one
      that gzip compressed; a `jax.stages.Lowered` or `Compiled`, or a function.
    *args: the example arguments of a function, arrays or `jax.ShapeDtypeStruct`; whatever is no
      array is part of the program.
    optimized: whether a function or a `Lowered` is compiled first, so that the
      graph is the compiler's result for this machine's backend, or the target's.
    target: a TPU generation, `v2`, `v3`, `v4`, `v5e`, `v5p`, `v6e` or `7x`: a function
      goes through the TPU compiler (no TPU is needed, but libtpu), and the graph is
      the one before layout assignment, as in the data set's layout collections. Its arrays
      have the layouts that the compiler then assigns, where the data set has the default ones.
      None: the function as jax lowers it, before any compiler.
    edge_order: "sorted" by (consumer, producer), each pair once, or "insertion",
      where an instruction that calls a computation twice has two equal edges.
    **kwargs: further keyword arguments of the function.

  Returns:
    A graph with `node_feat` [N, 140] float32, `node_opcode` [N] uint8 (0 for an
    opcode outside the table, reported once), `edge_index` [E, 2] int32,
    `node_splits` [S] int64, and as `config_node` [K] int32 all convolutions, dots
    and reshapes. It has no configurations yet.

  Raises:
    ValueError: the source is not understood, the module is inconsistent, or libtpu
      is missing.
    FileNotFoundError: there is no such file.

  Examples:
    >>> import jax.numpy as jnp
    >>> from tpugraphs_jax import hlo
    >>> graph = hlo.featurize(lambda x, w: jnp.tanh(x @ w), jnp.ones((4, 8)), jnp.ones((8, 2)))
    >>> graph.node_feat.shape[1], len(graph.config_node)  # the dot can have layouts
    (140, 1)
  """
  loaded = sources.load(source, *args, optimized=optimized, target=target, kwargs=kwargs)
  module = proto.parse_module(loaded.data, where=loaded.where)
  name = loaded.name or module.name
  result = featurize_module(module, where=loaded.where, name=name, edge_order=edge_order)
  return dataclasses.replace(result, stage=loaded.stage)


def featurize_module(
  module: proto.HloModuleProto, *, where: str, name: str, edge_order: str = "sorted"
) -> HloGraph:
  """As `featurize`, for a parsed module; `where` begins every error message."""
  if edge_order not in _EDGE_ORDERS:
    raise ValueError(f"edge_order is {edge_order!r}, expected one of {_EDGE_ORDERS}")
  _check_memory(module, where=where)
  _check_shapes(module, where=where)
  edge_index = _edges(module, where=where)
  if edge_order == "sorted":
    edge_index = _sorted_edges(edge_index, module, where=where)
  node_opcode = _node_opcode(module, where=where)
  configurable = [opcode_ids()[opcode] for opcode in CONFIGURABLE_OPCODES]
  return HloGraph(
    name=name,
    node_feat=features.node_features(module),
    node_opcode=node_opcode,
    edge_index=edge_index.astype(np.int32),
    node_splits=_node_splits(module),
    config_node=np.flatnonzero(np.isin(node_opcode, configurable)).astype(np.int32),
    configs=None,
    module=module,
  )


def origin(instruction: proto.HloInstructionProto, module: proto.HloModuleProto) -> Origin:
  """The source of an instruction of a module.

  The line is the innermost one of the user's own files, or of any file where there is none.
  """
  metadata = instruction.metadata
  lines = [(metadata.source_file, metadata.source_line)]
  if not metadata.source_file:
    lines = list(_callers(metadata.stack_frame_id, module.stack_frame_index))
  lines = [line for line in lines if not line[0].startswith(_INTERPRETER)]
  of_user = [line for line in lines if not any(part in line[0] for part in _INSTALLED)]
  return Origin(instruction.name, metadata.op_name, *(of_user or lines or [("", 0)])[0])


def _callers(frame_id: int, stack: proto.StackFrameIndexProto) -> Iterator[tuple[str, int]]:
  """Files and lines from the innermost frame outwards; ids count from 1."""
  for _ in stack.stack_frames:  # bounds the walk where frames refer to each other in a circle
    if not 0 < frame_id <= len(stack.stack_frames):
      return
    frame = stack.stack_frames[frame_id - 1]
    if 0 < frame.file_location_id <= len(stack.file_locations):
      location = stack.file_locations[frame.file_location_id - 1]
      if 0 < location.file_name_id <= len(stack.file_names):
        yield stack.file_names[location.file_name_id - 1], location.line
    frame_id = frame.parent_frame_id


def _check_memory(module: proto.HloModuleProto, *, where: str) -> None:
  """Refuses (ValueError) a module whose graph takes more memory than there is."""
  nodes = sum(len(computation.instructions) for computation in module.computations)
  if (needed := nodes * _NODE_BYTES) > (available := machine.available()):
    raise ValueError(
      f"{where}: the graph of {nodes:,} instructions takes {console.size(needed)} of memory, and "
      f"{console.size(available)} are available"
    )


def _check_shapes(module: proto.HloModuleProto, *, where: str) -> None:
  """Refuses dimensions without a size; warns of element types that the data set does not know."""
  later = {kind.number: kind.name for kind in columns.LATER_TYPES}
  known = {kind.number for kind in columns.ELEMENT_TYPES}
  others: collections.Counter[str] = collections.Counter()
  for node, instruction in enumerate(proto.instructions(module)):
    for shape in proto.arrays(instruction.shape):
      if _UNBOUNDED in shape.dimensions:
        sizes = ",".join("?" if size == _UNBOUNDED else str(size) for size in shape.dimensions)
        problem = f"its shape [{sizes}] has a dimension without a size: give known shapes"
        _refuse(module, node, problem, where)
      if shape.element_type not in known:
        others[later.get(shape.element_type, f"type {shape.element_type}")] += 1
  if others:
    logging.warning(
      f"{where}: {others.total()} arrays have an element type that the data set does not know, and "
      f"rankers count its bytes: {_counts(others)}"
    )


def _counts(names: collections.Counter[str]) -> str:
  shown = [f"{name[:80]!r} ({count})" for name, count in names.most_common(_SHOWN_NAMES)]
  more = len(names) - len(shown)
  return ", ".join(shown) + f" and {more:,} more" * (more > 0)


def _node_opcode(module: proto.HloModuleProto, *, where: str) -> np.ndarray:
  ids = opcode_ids()
  opcodes = [instruction.opcode for instruction in proto.instructions(module)]
  unknown = collections.Counter(opcode for opcode in opcodes if opcode not in ids)
  if unknown:
    logging.warning(
      f"{where}: {unknown.total()} instructions have an opcode outside the table and get id 0: "
      f"{_counts(unknown)}"
    )
  return np.array([ids.get(opcode, 0) for opcode in opcodes], np.uint8)


def _edges(module: proto.HloModuleProto, *, where: str) -> np.ndarray:
  """All edges `[E, 2]` int64 in insertion order, equal ones repeated.

  Per instruction: its distinct operands in ascending order of id, then the roots
  of the computations that it calls, in their order.
  """
  position = proto.positions(module)
  root = {computation.id: computation.root_id for computation in module.computations}
  edges = []
  for instruction in proto.instructions(module):
    consumer, callees = position[instruction.id], instruction.called_computation_ids
    producers = [*sorted(set(instruction.operand_ids)), *map(root.get, callees)]
    try:
      edges.extend([(consumer, position[producer]) for producer in producers])
    except KeyError:
      missing = [f"operand id {id}" for id in instruction.operand_ids if id not in position]
      rootless = [callee for callee in callees if root.get(callee) not in position]
      missing += [f"the root of computation id {callee}" for callee in rootless]
      _refuse(module, consumer, f"{missing[0]} is no instruction of the module", where)
  edge_index = np.array(edges, np.int64).reshape(-1, 2)
  self_edges = np.flatnonzero(edge_index[:, 0] == edge_index[:, 1])
  if self_edges.size:
    _refuse(module, edge_index[self_edges[0], 0], "it consumes itself", where)
  return edge_index


def _sorted_edges(
  edge_index: np.ndarray, module: proto.HloModuleProto, *, where: str
) -> np.ndarray:
  result = edge_index[np.lexsort((edge_index[:, 1], edge_index[:, 0]))]
  repeated = np.flatnonzero((result[1:] == result[:-1]).all(axis=1))
  if repeated.size:
    consumer, producer = result[repeated[0]]
    name = proto.instructions(module)[producer].name
    problem = f"it consumes {name!r} twice, which needs edge_order='insertion'"
    _refuse(module, consumer, problem, where)
  return result


def _node_splits(module: proto.HloModuleProto) -> np.ndarray:
  """Ends of the stretches that loops, branches and clusters cut, `[S]` int64."""
  ends = np.cumsum([len(computation.instructions) for computation in module.computations])
  is_end = [any(name in part.name for name in _SPLIT_NAMES) for part in module.computations]
  splits = [0, *itertools.compress(ends, is_end)]
  if len(ends) and splits[-1] < ends[-1]:
    splits.append(ends[-1])
  return np.array(splits, np.int64)


def _refuse(module: proto.HloModuleProto, node: int, problem: str, where: str) -> NoReturn:
  """Raises ValueError for a node, with the names of its computation and instruction."""
  owner, instruction = proto.owners(module)[node], proto.instructions(module)[node]
  raise ValueError(
    f"{where}: computation {owner.name!r}, instruction {instruction.name!r} "
    f"(id {instruction.id}): {problem}"
  ) from None
