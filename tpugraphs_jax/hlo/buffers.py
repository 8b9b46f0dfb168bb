"""The buffers of a TPU program in the large memory of the device, from its schedule.

The compiler plans a memory and tells its size alone. Here the live ranges of buffers follow from a
module after all optimisations: the order of its instructions, and which values share a buffer
(results of loops and their carries, updates in place, views). Values on the chip take no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
import math

from google.protobuf.message import DecodeError

from tpugraphs_jax import columns
from tpugraphs_jax.hlo import module_graph, names, proto

ARGUMENT, OUTPUT, TEMPORARY = "argument", "output", "temporary"
_BYTES = {kind.number: kind.bytes for kind in columns.ELEMENT_TYPES + columns.LATER_TYPES}
# The result is the first operand, in its place.
_SAME = frozenset(
  "add-dependency bitcast copy-done domain dynamic-update-slice opt-barrier scatter".split()
)
_CALLS = ("while", "conditional", "call")  # of computations whose instructions have a schedule
_MOST_STEPS = 5  # from an instruction of the compiler to one with a source line
_ALIASES = {"aliasing_operands": {"lists": [{"indices": [str]}]}}


@dataclasses.dataclass(frozen=True)
class Buffer:
  """A buffer in the large memory.

  Attributes:
    name: of the instruction that defines it.
    kind: `argument`, `output` or `temporary`.
    shape: such as `bf16[8,128]`.
    size: bytes, with the padding of its layout's tiles.
    padding: `size` divided by the bytes of its elements.
    operation, scope, where: as of `tuning.costs.KernelCost`; of an argument its name.
    start, end: positions in the schedule between which it is live.
  """

  name: str
  kind: str
  shape: str
  size: int
  padding: float
  operation: str
  scope: str
  where: str
  start: int
  end: int


@dataclasses.dataclass(frozen=True)
class LiveMemory:
  """The memory of a program over its schedule.

  Attributes:
    instructions: names in the order of the schedule, the bodies of loops once.
    sizes: bytes that are live at each.
    peak: the position with the most bytes.
    buffers: those that are live at the peak, the largest first.
  """

  instructions: tuple[str, ...] = ()
  sizes: tuple[int, ...] = ()
  peak: int = 0
  buffers: tuple[Buffer, ...] = ()

  @property
  def peak_bytes(self) -> int:
    """Bytes at the peak."""
    return self.sizes[self.peak] if self.sizes else 0


def live_memory(module: proto.HloModuleProto) -> LiveMemory:
  """The buffers of a module with a schedule; nothing of a module without one.

  Raises:
    ValueError: the module is damaged.
  """
  if not module.schedule.sequences:
    return LiveMemory()
  try:
    program = _Program(module)
  except (KeyError, IndexError) as error:
    raise ValueError(f"an instruction refers to {error}, which the module does not have") from None
  buffers = sorted(program.buffers(), key=lambda buffer: -buffer.size)
  changes = [0] * (len(program.order) + 1)
  for buffer in buffers:
    changes[buffer.start] += buffer.size
    changes[buffer.end + 1] -= buffer.size
  sizes = tuple(itertools.accumulate(changes[:-1]))
  peak = max(range(len(sizes)), key=sizes.__getitem__)
  at_peak = tuple(buffer for buffer in buffers if buffer.start <= peak <= buffer.end)
  return LiveMemory(tuple(node.name for node in program.order), sizes, peak, at_peak)


def planned_bytes(data: bytes) -> int:
  """Bytes of the large memory that the compiler has reserved in an `HloProto`; 0 without a plan.

  These are all arguments and results, and the area of temporaries with its gaps, but not the code
  with the constants.
  """
  try:
    plan = proto.HloProto.FromString(data).buffer_assignment
  except DecodeError:
    return 0
  parts = (part for part in plan.buffer_allocations if not (part.color or part.is_constant))
  return sum(part.size for part in parts)


def padded_size(array: proto.ShapeProto) -> int:
  """Bytes of an array with the padding of the tiles of its layout."""
  dimensions = [array.dimensions[place] for place in reversed(array.layout.minor_to_major)]
  dimensions = dimensions or list(array.dimensions)
  for tile in array.layout.tiles:
    dimensions = _tiled(dimensions, tile.dimensions)
  return math.ceil(math.prod(dimensions) * _element(array))


def _tiled(dimensions: Sequence[int], tile: Sequence[int]) -> list[int]:
  """Dimensions, the major one first, whose last ones are divided into tiles.

  A negative dimension of a tile joins the dimension with the next one (xla::Tile).
  """
  dimensions = [1] * (len(tile) - len(dimensions)) + list(dimensions)
  whole, last = dimensions[: len(dimensions) - len(tile)], dimensions[len(dimensions) - len(tile) :]
  joined, counts, sizes = 1, [], []
  for dimension, size in zip(last, tile):
    joined *= dimension
    if size > 0:
      counts.append(-(-joined // size))
      sizes.append(size)
      joined = 1
  return [*whole, *counts, *sizes]


def _element(array: proto.ShapeProto) -> float:
  return _BYTES.get(array.element_type) or 1


class _Program:
  """A module whose values are joined into buffers.

  A value is an array of the result of an instruction. It has a number: that of the first array of
  the instruction, plus the place in its tuple.

  Attributes:
    order: instructions in the order in which they run, the bodies of loops once.
  """

  def __init__(self, module: proto.HloModuleProto):
    self._module = module
    self._computations = {part.id: part for part in module.computations}
    self._nodes = {node.id: node for node in proto.instructions(module)}
    self.order: list[proto.HloInstructionProto] = []
    self._entry = self._computations[module.entry_computation_id]
    self._walk(self._entry, set())
    self._place = {node.id: place for place, node in enumerate(self.order)}
    self._arrays = {node.id: list(proto.arrays(node.shape)) for node in self.order}
    counts = (len(arrays) for arrays in self._arrays.values())
    self._first = dict(zip(self._arrays, itertools.accumulate(counts, initial=0)))
    self._parent = list(range(sum(map(len, self._arrays.values()))))
    for node in self.order:
      for one, other in self._shared(node):
        self._join(one, other)
    for alias in module.input_output_alias.entries:
      if len(alias.output_shape_index) <= 1 and not alias.parameter_shape_index:
        output = self._values(self._entry.root_id)[next(iter(alias.output_shape_index), 0)]
        self._join(self._values(self._parameter(alias.parameter_number).id)[0], output)

  def _parameter(self, number: int) -> proto.HloInstructionProto:
    parameters = (node for node in self._entry.instructions if node.opcode == "parameter")
    return next(node for node in parameters if node.parameter_number == number)

  def _join(self, one: int, other: int) -> None:
    self._parent[self._root(one)] = self._root(other)

  def _walk(self, computation: proto.HloComputationProto, seen: set[int]) -> None:
    seen.add(computation.id)
    for id in self._module.schedule.sequences[computation.id].instruction_ids:
      node = self._nodes[id]
      for callee in node.called_computation_ids if node.opcode in _CALLS else ():
        if callee not in seen:
          self._walk(self._computations[callee], seen)
      self.order.append(node)

  def _values(self, id: int) -> range:
    return range(self._first[id], self._first[id] + len(self._arrays[id]))

  def _root(self, value: int) -> int:
    while self._parent[value] != value:
      self._parent[value] = self._parent[self._parent[value]]
      value = self._parent[value]
    return value

  def _shared(self, node: proto.HloInstructionProto) -> Iterator[tuple[int, int]]:
    """Pairs of values that share a buffer because of an instruction."""
    result = self._values(node.id)
    operands = [self._values(id) for id in node.operand_ids]
    if node.opcode in _SAME or node.opcode.endswith(("-done", "-update")):
      yield from self._of_start(node, result, operands[0])
    elif node.opcode == "tuple":
      yield from zip(result, itertools.chain(*operands))
    elif node.opcode == "get-tuple-element":
      parts = self._nodes[node.operand_ids[0]].shape.tuple_shapes
      start = sum(len(list(proto.arrays(part))) for part in parts[: node.tuple_index])
      yield from zip(result, operands[0][start:])
    elif node.opcode == "copy-start":  # the copy, its source, and a flag
      yield result[1], operands[0][0]
    elif node.opcode.endswith("-start") and len(result) > sum(map(len, operands)):
      yield from zip(result, itertools.chain(*operands))
    elif node.opcode in _CALLS:
      yield from self._of_call(node, result, operands)
    for alias in node.output_operand_aliasing:
      if len(alias.output_shape_index) <= 1 and not alias.operand_shape_index:
        yield result[next(iter(alias.output_shape_index), 0)], operands[alias.operand_index][0]
    for group in proto.backend_config(node, _ALIASES).get("aliasing_operands", {}).get("lists", ()):
      arrays = [*itertools.chain(*operands), *result]  # as the compiler counts them
      shared = [arrays[int(index)] for index in group["indices"]]
      yield from zip(shared, shared[1:])

  def _of_start(
    self, node: proto.HloInstructionProto, result: range, start: range
  ) -> Iterator[tuple[int, int]]:
    """The results of an instruction that begins beside the computation, after its operands."""
    beginning = self._nodes[node.operand_ids[0]]
    is_after = node.opcode.endswith("-done") and node.opcode != "copy-done"
    skipped = sum(len(self._arrays[id]) for id in beginning.operand_ids) if is_after else 0
    yield from zip(result, start[skipped if len(start) >= skipped + len(result) else 0 :])

  def _of_call(
    self, node: proto.HloInstructionProto, result: range, operands: Sequence[range]
  ) -> Iterator[tuple[int, int]]:
    callees = [self._computations[id] for id in node.called_computation_ids]
    for place, callee in enumerate(callees):
      root = self._values(callee.root_id)
      if len(root) == len(result):  # of the condition of a loop it is one word
        yield from zip(root, result)
      for inner in callee.instructions:
        if inner.opcode == "parameter":
          number = place + 1 if node.opcode == "conditional" else inner.parameter_number
          yield from zip(self._values(inner.id), operands[number])
    if node.opcode == "while":
      yield from zip(result, operands[0])

  def buffers(self) -> Iterator[Buffer]:
    """All buffers in the large memory, without constants, which are part of the code."""
    last = len(self.order) - 1
    uses = [0] * len(self._parent)
    for place, node in enumerate(self.order):
      # Of a tuple, this instruction uses the part alone that is its result.
      operands = () if node.opcode == "get-tuple-element" else node.operand_ids
      for value in itertools.chain(*map(self._values, (node.id, *operands))):
        uses[self._root(value)] = place
    of_root: dict[int, list[tuple[proto.HloInstructionProto, proto.ShapeProto]]] = {}
    for node in self.order:
      for value, array in zip(self._values(node.id), self._arrays[node.id]):
        if array.layout.memory_space == 0 and array.element_type in _BYTES:
          of_root.setdefault(self._root(value), []).append((node, array))
    inputs = self._roots(node.id for node in self._entry.instructions if node.opcode == "parameter")
    outputs = self._roots([self._entry.root_id])
    for root, values in of_root.items():
      kind = ARGUMENT if root in inputs else OUTPUT if root in outputs else TEMPORARY
      if kind == TEMPORARY and all(node.opcode == "constant" for node, _ in values):
        continue
      start = 0 if kind == ARGUMENT else self._place[values[0][0].id]
      yield self._buffer(kind, values, start, uses[root] if kind == TEMPORARY else last)

  def _roots(self, ids: Iterable[int]) -> set[int]:
    return {self._root(value) for id in ids for value in self._values(id)}

  def _origins(self, node: proto.HloInstructionProto) -> Iterator[module_graph.Origin]:
    """The source of an instruction, and of those whose results it copies or slices."""
    for _ in range(_MOST_STEPS):
      yield module_graph.origin(node, self._module)
      if not node.operand_ids:
        return
      node = self._nodes[node.operand_ids[0]]

  def _buffer(
    self,
    kind: str,
    values: Sequence[tuple[proto.HloInstructionProto, proto.ShapeProto]],
    start: int,
    end: int,
  ) -> Buffer:
    node, array = max(values, key=lambda value: padded_size(value[1]))
    if kind == ARGUMENT:
      node = next(node for node, _ in values if node.opcode == "parameter")
    size = padded_size(array)
    of_elements = math.prod(array.dimensions) * _element(array)
    own = module_graph.origin(node, self._module)
    served = (found for node, _ in values for found in self._origins(node))
    origin = own if kind == ARGUMENT else next((found for found in served if found.where), own)
    operation = own.op_name if kind == ARGUMENT else names.operation(origin.op_name)
    return Buffer(
      node.name,
      kind,
      names.shape(array),
      size,
      size / of_elements if of_elements else 1.0,
      operation or node.name,
      names.scope(origin.op_name),
      origin.where,
      start,
      end,
    )
