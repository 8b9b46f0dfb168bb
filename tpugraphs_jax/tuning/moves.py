"""Instructions of a compiled program that only change the layout of an array.

They copy it into another order of its dimensions. An argument or a result can have the order that
the program wants, by an entry layout (`jax.experimental.layout.Format`). Inside a program, `tune`
chooses the orders of products and reshapes.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

from tpugraphs_jax.hlo import module_graph, proto, work

ENTRY, TUNE = "an entry layout", "tune"
_CHANGES = ("copy", "transpose", "reshape")
_NAMES = ("bitcast", "get-tuple-element", "parameter", "tuple")  # inside a fusion that only moves
_SAME = ("bitcast", "convert", "copy", "copy-start", "copy-done", "get-tuple-element")
_CHOSEN = ("convolution", "dot", "reshape")  # whose layouts `tune` chooses


@dataclasses.dataclass(frozen=True)
class Move:
  """A change of layout.

  Attributes:
    change: the orders before and after, minor dimension first, such as `{1,0} to {0,1}`.
    of: `argument NAME`, `result`, or jax's name of the operation whose output moves.
    remedy: `an entry layout` or `tune`, which may remove it; empty where neither does.
  """

  change: str
  of: str
  remedy: str


def moves(module: proto.HloModuleProto) -> dict[str, Move]:
  """The changes of layout in a module after all optimisations, by the name of the instruction."""
  computations = {part.id: part for part in module.computations}
  by_name: dict[str, Move] = {}
  for computation in module.computations:
    view = _View(computation, module, computations)
    for node in computation.instructions:
      change = view.change(node)
      if change:
        by_name[node.name] = view.move(node, change)
  return by_name


class _View:
  """A computation whose instructions have operands and users."""

  def __init__(
    self,
    computation: proto.HloComputationProto,
    module: proto.HloModuleProto,
    computations: work.Computations,
  ):
    self._computation, self._module, self._computations = computation, module, computations
    self._is_entry = computation.id == module.entry_computation_id
    self._nodes = {node.id: node for node in computation.instructions}
    self._users: dict[int, list[proto.HloInstructionProto]] = {}
    for node in computation.instructions:
      for operand in node.operand_ids:
        self._users.setdefault(operand, []).append(node)

  def change(self, node: proto.HloInstructionProto) -> str:
    """The orders before and after an instruction that only moves its operand; else empty."""
    if not node.operand_ids:
      return ""
    before, after = _order(self._nodes[node.operand_ids[0]].shape), _order(node.shape)
    opcodes = {inner.opcode for inner in self._inside(node)}
    if node.opcode == "fusion":
      is_move = opcodes & {"copy", "transpose"} and opcodes <= {*_CHANGES, *_NAMES}
    else:
      is_move = node.opcode in ("transpose", "reshape") or node.opcode == "copy" and before != after
    return f"{before} to {after}" if is_move else ""

  def move(self, node: proto.HloInstructionProto, change: str) -> Move:
    """What an instruction moves, and what may remove it."""
    source = self._source(node)
    if self._is_entry and source.opcode == "parameter":
      name = source.metadata.op_name or source.name
      return Move(change, f"argument {name}", ENTRY)
    if self._is_entry and self._is_result(node):
      return Move(change, "result", ENTRY)
    around = [source, *self._users.get(node.id, ())]
    opcodes = {inner.opcode for node in around for inner in (node, *self._inside(node))}
    origin = module_graph.origin(source, self._module)
    return Move(change, origin.op_name or source.name, TUNE if opcodes & {*_CHOSEN} else "")

  def _inside(self, node: proto.HloInstructionProto) -> Iterator[proto.HloInstructionProto]:
    if node.opcode == "fusion":
      for callee in node.called_computation_ids:
        for inner in self._computations[callee].instructions:
          yield inner
          yield from self._inside(inner)

  def _source(self, node: proto.HloInstructionProto) -> proto.HloInstructionProto:
    """The instruction that makes the values which an instruction moves."""
    node = self._nodes[node.operand_ids[0]]
    while node.opcode in _SAME and node.operand_ids:
      node = self._nodes[node.operand_ids[0]]
    return node

  def _is_result(self, node: proto.HloInstructionProto) -> bool:
    """Whether an instruction's values are a result of the program."""
    if node.id == self._computation.root_id:
      return True
    passing = (*_SAME, "tuple")
    return any(
      user.opcode in passing and self._is_result(user) for user in self._users.get(node.id, ())
    )


def _order(shape: proto.ShapeProto) -> str:
  """The dimensions of an array from the minor to the major one, as XLA prints them."""
  first = next(proto.arrays(shape))
  return "{" + ",".join(map(str, first.layout.minor_to_major)) + "}"
