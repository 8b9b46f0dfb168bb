"""A summary of an HLO module as text."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from tpugraphs_jax import columns
from tpugraphs_jax.hlo import module_graph, proto

_TYPE_NAMES = {kind.number: kind.name for kind in columns.ELEMENT_TYPES + columns.LATER_TYPES}
_TUPLE = 13


def shape_text(shape: proto.ShapeProto) -> str:
  """A shape as HLO text writes it, `f32[8,128]{1,0}`."""
  if shape.element_type == _TUPLE:
    return f"({', '.join(map(shape_text, shape.tuple_shapes))})"
  name = _TYPE_NAMES.get(shape.element_type, f"type{shape.element_type}")
  dimensions = ",".join(map(str, shape.dimensions))
  layout = ",".join(map(str, shape.layout.minor_to_major))
  return f"{name}[{dimensions}]" + (f"{{{layout}}}" if layout else "")


def summary(graph: module_graph.HloGraph) -> str:
  """Size, computations, opcodes and configurable nodes of a graph, as lines."""
  return "\n".join(_summary_lines(graph))


def _summary_lines(graph: module_graph.HloGraph) -> Iterator[str]:
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
    number = columns.opcode_ids().get(opcode)
    yield f"  {opcode or '(none)'}  {number or '0, not in the table'}  {count}"
  position = proto.positions(module)
  yield f"\nconfigurable nodes: {len(graph.config_node)}"
  for index in graph.config_node:
    node = nodes[index]
    operands = ", ".join(shape_text(nodes[position[operand]].shape) for operand in node.operand_ids)
    shape, origin = shape_text(node.shape), graph.origins[index]
    where = f"  {origin.where}" if origin.where else ""
    yield f"  {index}  {node.opcode}  {shape} <- {operands}  {origin.name}{where}"
