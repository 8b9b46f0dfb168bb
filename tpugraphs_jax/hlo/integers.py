"""Integers that a compiled program reads, where the caller gives them, and assumed where not.

How long a scatter, a ragged product or a copy into a cache takes depends on integers: indices,
sizes of groups, positions. Where the arguments of the program tell them, they are computed as the
program does. Elsewhere the array in which they first appear gets values by the meaning of the
operation that reads it, the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any
import zlib

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.hlo import proto

MOST = 1 << 21  # integers of an array that is evaluated
_MOST_PADDED = 1 << 24  # places of such an array in memory
_WORD = 4  # bytes
_MOST_VISITED = 2_000  # instructions between an array and the operation that reads it
# Values for an index, a position or the sizes of groups, and the two ends between which they lie.
ASSUMED, LOWEST, HIGHEST = "assumed", "lowest", "highest"
# What assumed integers mean. Starts are those of equal parts, with the end of the last one.
INDEX, POSITION, GROUPS = "index", "position", "groups"
LENGTHS, STARTS, COUNT, ITERATIONS = "lengths", "starts", "count", "iterations"
_ROWS_OF_GROUPS = "ragged-dot"  # name of the kernels that XLA makes of a ragged product

_DTYPES = {
  kind.number: np.dtype(kind.name.replace("pred", "bool").replace("s", "int").replace("u", "uint"))
  for kind in columns.ELEMENT_TYPES
  if kind.name in ("pred", "s8", "s16", "s32", "u8", "u16", "u32")
}
_LITERALS = {"bool": "preds", "int32": "s32s", "uint32": "u32s", "int8": "s8s", "uint8": "u8s"}
_LITERALS |= {"int16": "s16s", "uint16": "u16s"}
_COMPARE = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal}
_COMPARE |= {"GT": np.greater, "GE": np.greater_equal}
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
  "abs": np.abs,
  "add": np.add,
  "and": np.bitwise_and,
  "clamp": lambda low, value, high: np.minimum(np.maximum(value, low), high),
  "maximum": np.maximum,
  "minimum": np.minimum,
  "multiply": np.multiply,
  "negate": np.negative,
  "not": np.invert,
  "or": np.bitwise_or,
  "remainder": np.fmod,
  "select": np.where,
  "shift-left": np.left_shift,
  "shift-right-arithmetic": np.right_shift,
  "shift-right-logical": np.right_shift,
  "sign": np.sign,
  "subtract": np.subtract,
  "xor": np.bitwise_xor,
}
_REDUCTIONS = {"add": np.add, "and": np.logical_and, "maximum": np.maximum}
_REDUCTIONS |= {"minimum": np.minimum, "multiply": np.multiply, "or": np.logical_or}
# Opcodes whose result has the value of their first operand.
_SAME = ("copy", "copy-done", "copy-start", "add-dependency", "opt-barrier", "optimization-barrier")
_TELLING = ("Assume", "IndicesBitpacked")  # in the targets of calls that return their operand
# Opcodes through which an index stays an index into the same dimension.
_PASSING = {"bitcast", "broadcast", "clamp", "concatenate", "convert", "maximum", "minimum"}
_PASSING |= {"pad", "reshape", "select", "slice", "sort", "transpose", "add", "subtract", "reverse"}
_PASSING |= {"get-tuple-element", "dynamic-slice", "gather", "async-start", "async-done"}
# The components of an index that is packed into a word, and taken out of it.
_PASSING |= {"and", "or", "shift-left", "shift-right-logical"}
_CALLS = ("call", "fusion")


@dataclasses.dataclass(frozen=True)
class Meaning:
  """What integers mean.

  Attributes:
    kind: `INDEX`, `POSITION`, `GROUPS`, `LENGTHS`, `STARTS`, `COUNT` or `ITERATIONS` (of a
      loop, which are no array).
    limits: of an index the sizes of the dimensions that its components select from; of a position,
      a length and a count the largest one; of groups and starts the number of rows.
    reader: the name of the instruction that reads them.
  """

  kind: str
  limits: tuple[int, ...]
  reader: str

  def draw(self, shape: Sequence[int], name: str, how: str) -> np.ndarray:
    """Integers of this meaning.

    Args:
      shape: of the array.
      name: of the array, from which the random numbers follow.
      how: `ASSUMED`: an index is uniform over its dimension, a position is the middle, a length
        half of the largest, and groups have equal sizes. `LOWEST`: all are 0 (a length 1), and the
        first group has all rows. `HIGHEST`: indices are spread evenly, a position or a length is
        the largest one, and each group is larger than the one before. Starts and counts have one
        value.
    """
    count = math.prod(shape)
    if not count or (self.kind == INDEX and min(self.limits, default=0) < 1):
      return np.zeros(shape, np.int64)  # nothing to select, or nothing to select from
    if self.kind == COUNT:
      return np.full(shape, self.limits[0])
    if self.kind == STARTS:
      return (np.arange(count) * self.limits[0] // max(count - 1, 1)).reshape(shape)
    if self.kind == LENGTHS:
      lengths = {LOWEST: 1, ASSUMED: max(1, self.limits[0] // 2), HIGHEST: self.limits[0]}
      return np.full(shape, lengths[how])
    if self.kind == GROUPS:
      sizes = np.zeros(count, np.int64)
      (rows,) = self.limits
      if how == ASSUMED:
        sizes[:] = rows // count
        sizes[: rows % count] += 1
      elif how == LOWEST:
        sizes[0] = rows
      else:  # the borders of groups that grow cut blocks
        steps = np.cumsum(np.arange(1, count + 1))
        sizes = np.diff(rows * steps // steps[-1], prepend=0)
      return sizes.reshape(shape)
    if how == LOWEST:
      return np.zeros(shape, np.int64)
    if self.kind == POSITION:
      return np.full(shape, self.limits[0] // (2 if how == ASSUMED else 1))
    limits = np.array(self.limits)
    if len(limits) > 1 and (not shape or shape[-1] != len(limits)):
      limits = limits.min(keepdims=True)
    if how == ASSUMED:
      random = np.random.default_rng(zlib.crc32(name.encode()))
      return random.integers(0, limits, size=(*shape[:-1], shape[-1]) if shape else ())
    spread = np.arange(count) * int(limits.max()) // max(count, 1)
    return np.minimum(spread.reshape(shape), limits - 1 if shape else limits.max() - 1)


class Integers:
  """The integers of a compiled program.

  Args:
    module: after all optimisations.
    arguments: values of the entry's parameters where they are known, by number.
    how: values of integers that nothing tells: `ASSUMED`, `LOWEST` or `HIGHEST`.

  Attributes:
    assumed: the meaning of the arrays whose values are assumed, by the name of the instruction.
  """

  def __init__(
    self, module: proto.HloModuleProto, arguments: Mapping[int, np.ndarray], how: str = ASSUMED
  ):
    self._computations = {part.id: part for part in module.computations}
    self._entry = module.entry_computation_id
    self._nodes = {node.id: node for node in proto.instructions(module)}
    self._owner = {node.id: part for part in module.computations for node in part.instructions}
    self._callers: dict[int, list[proto.HloInstructionProto]] = {}
    self._users: dict[int, list[tuple[proto.HloInstructionProto, int]]] = {}
    for node in self._nodes.values():
      for callee in node.called_computation_ids:
        self._callers.setdefault(callee, []).append(node)
      for place, operand in enumerate(node.operand_ids):
        self._users.setdefault(operand, []).append((node, place))
    self._arguments, self._how = arguments, how
    self._values: dict[int, Any] = {}
    self.assumed: dict[str, Meaning] = {}

  def of(self, id: int) -> Any:
    """The value of an instruction: an array, a tuple of values, or None where it is not known."""
    if id not in self._values:
      node = self._nodes.get(id)
      self._values[id] = None  # of a circle
      if node is not None:
        self._values[id] = self._evaluated(node)
    return self._values[id]

  def words(self, id: int) -> np.ndarray | None:
    """The 32-bit words of an integer array in the order in which it lies in memory."""
    node, value = self._nodes.get(id), self.of(id)
    if node is None or not isinstance(value, np.ndarray):
      return None
    try:
      data = to_memory(value, node.shape.layout).tobytes()
    except ValueError:  # tiles that are no tiles
      return None
    return np.frombuffer(data + bytes(-len(data) % _WORD), np.int32)

  def _evaluated(self, node: proto.HloInstructionProto) -> Any:
    if not node.shape.tuple_shapes and not _is_evaluated(node.shape):
      return None
    try:
      value = self._computed(node)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError):
      value = None
    if value is not None:
      return value
    return self._drawn(node, node.shape, None)

  def _drawn(
    self, node: proto.HloInstructionProto, shape: proto.ShapeProto, part: int | None
  ) -> Any:
    """Assumed values of an array that cannot be computed; None where no operation reads them."""
    if shape.tuple_shapes:
      parts = [self._drawn(node, inner, place) for place, inner in enumerate(shape.tuple_shapes)]
      return tuple(parts) if any(value is not None for value in parts) else None
    if not _is_evaluated(shape) or _DTYPES[shape.element_type].kind == "b":
      return None
    meaning = self.meaning(node, part)
    if meaning is None:
      return None
    name = node.name if part is None else f"{node.name}.{part}"
    self.assumed[name] = meaning
    drawn = meaning.draw(shape.dimensions, name, self._how)
    return drawn.astype(_DTYPES[shape.element_type])

  def _computed(self, node: proto.HloInstructionProto) -> Any:
    """The value of an instruction whose operands tell it; None where they do not."""
    opcode = node.opcode
    if opcode == "parameter":
      return self._parameter(node)
    if opcode in _CALLS:
      return self.of(self._computations[node.called_computation_ids[0]].root_id)
    if opcode == "while":
      return self._carried(node)
    operands = [self.of(operand) for operand in node.operand_ids]
    if opcode == "tuple":
      return tuple(operands) if any(part is not None for part in operands) else None
    if opcode == "get-tuple-element":
      return operands[0][node.tuple_index] if operands[0] is not None else None
    if _is_same(node):
      return operands[0]
    if any(operand is None or isinstance(operand, tuple) for operand in operands):
      return None
    return self._array(node, operands)

  def _parameter(self, node: proto.HloInstructionProto) -> Any:
    owner = self._owner[node.id]
    if owner.id == self._entry:
      given = self._arguments.get(node.parameter_number)
      if given is None or list(np.shape(given)) != list(node.shape.dimensions):
        return None
      return np.asarray(given).astype(_DTYPES[node.shape.element_type])
    callers = self._callers.get(owner.id, [])
    if len(callers) != 1:
      return None
    (caller,) = callers
    if caller.opcode in _CALLS:
      return self.of(caller.operand_ids[node.parameter_number])
    return self._carried(caller) if caller.opcode == "while" else None

  def _carried(self, loop: proto.HloInstructionProto) -> Any:
    """The state and the result of a loop: what every iteration passes on is that of its operand."""
    start = self.of(loop.operand_ids[0])
    if not isinstance(start, tuple):
      return None
    bodies = [self._computations[id] for id in loop.called_computation_ids]
    body = next(part for part in bodies if self._nodes[part.root_id].shape.tuple_shapes)
    unchanged = self._unchanged(body)
    kept = tuple(value if place in unchanged else None for place, value in enumerate(start))
    return kept if any(value is not None for value in kept) else None

  def _unchanged(self, body: proto.HloComputationProto) -> set[int]:
    root = self._nodes[body.root_id]
    if root.opcode != "tuple":
      return set()
    passed = (self._nodes.get(operand) for operand in root.operand_ids)
    return {
      place
      for place, node in enumerate(passed)
      if node is not None
      and node.opcode == "get-tuple-element"
      and node.tuple_index == place
      and self._nodes[node.operand_ids[0]].opcode == "parameter"
    }

  def _array(self, node: proto.HloInstructionProto, operands: list[np.ndarray]) -> Any:
    """The value of an instruction with arrays as operands."""
    opcode, shape = node.opcode, tuple(node.shape.dimensions)
    if opcode == "sort":
      return self._sorted(node, operands)
    dtype = _DTYPES[node.shape.element_type]
    if opcode == "constant":
      return _literal(node, dtype)
    if opcode == "iota":
      axis = node.dimensions[0]
      steps = np.arange(shape[axis]).reshape([-1 if at == axis else 1 for at in range(len(shape))])
      return np.broadcast_to(steps, shape).astype(dtype)
    if opcode == "bitcast":
      source = self._nodes[node.operand_ids[0]].shape.layout
      return from_memory(to_memory(operands[0], source), node.shape).astype(dtype)
    if opcode == "reduce":
      return self._reduced(node, operands[0]).astype(dtype)
    if opcode == "compare":
      return _COMPARE[node.comparison_direction](*operands)
    if opcode == "pad":
      return _padded(node, *operands)
    if opcode in _ELEMENTWISE:
      with np.errstate(all="ignore"):
        return np.asarray(_ELEMENTWISE[opcode](*operands)).astype(dtype)
    moved = _moved(node, operands)
    return None if moved is None else moved.reshape(shape).astype(dtype)

  def _sorted(self, node: proto.HloInstructionProto, operands: list[np.ndarray]) -> Any:
    """Arrays in the order of the first one; a comparison of others is not understood."""
    order = np.argsort(operands[0], axis=node.dimensions[0], kind="stable")
    parts = tuple(np.take_along_axis(operand, order, node.dimensions[0]) for operand in operands)
    return parts if node.shape.tuple_shapes else parts[0]

  def _reduced(self, node: proto.HloInstructionProto, operand: np.ndarray) -> np.ndarray:
    root = self._nodes[self._computations[node.called_computation_ids[0]].root_id]
    return _REDUCTIONS[root.opcode].reduce(operand, axis=tuple(node.dimensions))

  def meaning(self, node: proto.HloInstructionProto, part: int | None = None) -> Meaning | None:
    """What an array means: what the first operation does with it that tells.

    Args:
      node: the instruction of the array.
      part: the number of the array in the tuple of the instruction.
    """
    waiting: list[tuple[proto.HloInstructionProto, int | None]] = [(node, part)]
    seen = {(node.id, part)}
    while waiting and len(seen) < _MOST_VISITED:
      source, part = waiting.pop(0)
      for user, place in self._users.get(source.id, []):
        if (meaning := self._meaning_for(user, place)) is not None:
          return meaning
        for following in self._passed_to(user, place, part):
          if (following[0].id, following[1]) not in seen:
            seen.add((following[0].id, following[1]))
            waiting.append(following)
      if source.id == self._owner[source.id].root_id:
        for caller in self._callers.get(self._owner[source.id].id, []):
          if caller.opcode in _CALLS and (caller.id, part) not in seen:
            seen.add((caller.id, part))
            waiting.append((caller, part))
    return None

  def _meaning_for(self, user: proto.HloInstructionProto, place: int) -> Meaning | None:
    shapes = [self._nodes[id].shape for id in user.operand_ids if id in self._nodes]
    if user.opcode == "gather" and place == 1:
      dims = user.gather_dimension_numbers.start_index_map
      sizes = [shapes[0].dimensions[dim] - user.gather_slice_sizes[dim] + 1 for dim in dims]
      return Meaning(INDEX, tuple(sizes), user.name)
    if user.opcode == "scatter" and place == len(user.operand_ids) // 2:
      dims = user.scatter_dimension_numbers.scatter_dims_to_operand_dims
      return Meaning(INDEX, tuple(shapes[0].dimensions[dim] for dim in dims), user.name)
    first = {"dynamic-slice": 1, "dynamic-update-slice": 2}.get(user.opcode, place + 1)
    if place >= first:
      sizes = user.dynamic_slice_sizes if first == 1 else shapes[1].dimensions
      room = shapes[0].dimensions[place - first] - sizes[place - first]
      return Meaning(POSITION, (max(0, room),), user.name)
    if user.opcode == "custom-call" and user.name.startswith(_ROWS_OF_GROUPS):
      rows = self._rows(user)
      return Meaning(GROUPS, (rows,), user.name) if rows and place == 0 else None
    return None

  def _rows(self, node: proto.HloInstructionProto) -> int:
    """The rows of the ragged product whose groups a kernel of XLA prepares."""
    for user in self._nodes.values():
      if (
        user.opcode == "custom-call" and user.name.startswith(_ROWS_OF_GROUPS) and user is not node
      ):
        shapes = [self._nodes[id].shape for id in user.operand_ids if id in self._nodes]
        return max(
          (shape.dimensions[0] for shape in shapes if len(shape.dimensions) == 2), default=0
        )
    return 0

  def _passed_to(
    self, user: proto.HloInstructionProto, place: int, part: int | None
  ) -> Iterator[tuple[proto.HloInstructionProto, int | None]]:
    """The arrays that have the meaning of an operand."""
    if user.opcode == "tuple":
      yield user, place
    elif user.opcode in _CALLS or user.opcode == "while":
      for callee in user.called_computation_ids:
        for inner in self._computations[callee].instructions:
          if inner.opcode == "parameter" and (
            user.opcode == "while" or inner.parameter_number == place
          ):
            yield inner, part
    elif user.opcode == "get-tuple-element":
      if part is None or user.tuple_index == part:
        yield user, None
    elif user.opcode == "sort":
      yield user, place if user.shape.tuple_shapes else None
    elif _is_same(user):
      yield user, part
    elif user.opcode in _PASSING and (place == 0 or user.opcode not in ("gather", "dynamic-slice")):
      yield user, None


def _is_same(node: proto.HloInstructionProto) -> bool:
  """Whether a result is the first operand; some calls only tell the compiler about it."""
  tells = any(part in node.custom_call_target for part in _TELLING)
  return node.opcode in _SAME or (node.opcode == "custom-call" and tells)


def _is_evaluated(shape: proto.ShapeProto) -> bool:
  return shape.element_type in _DTYPES and math.prod(shape.dimensions) <= MOST


def _literal(node: proto.HloInstructionProto, dtype: np.dtype) -> np.ndarray | None:
  values = getattr(node.literal, _LITERALS[dtype.name])
  array = np.frombuffer(values, dtype) if isinstance(values, bytes) else np.array(values, dtype)
  return array.reshape(node.shape.dimensions) if array.size else None


def _padded(
  node: proto.HloInstructionProto, array: np.ndarray, value: np.ndarray
) -> np.ndarray | None:
  edges = [(d.edge_padding_low, d.edge_padding_high) for d in node.padding_config.dimensions]
  sizes = [size + low + high for size, (low, high) in zip(array.shape, edges)]
  if sizes != list(node.shape.dimensions) or any(low < 0 or high < 0 for low, high in edges):
    return None  # padding between elements, which the message does not keep
  return np.pad(array, edges, constant_values=value)


def _moved(node: proto.HloInstructionProto, operands: list[np.ndarray]) -> np.ndarray | None:
  """The result of an opcode that moves the elements of its operands."""
  opcode, dims = node.opcode, list(node.dimensions)
  array = operands[0] if operands else None
  if array is None:
    return None
  if opcode in ("reshape", "convert"):
    return array
  if opcode == "transpose":
    return array.transpose(dims)
  if opcode == "reverse":
    return np.flip(array, tuple(dims))
  if opcode == "concatenate":
    return np.concatenate(operands, dims[0])
  if opcode == "slice":
    return array[tuple(slice(d.start, d.limit, d.stride or 1) for d in node.slice_dimensions)]
  if opcode == "broadcast":
    places = [dims.index(at) if at in dims else None for at in range(len(node.shape.dimensions))]
    sizes = [1 if place is None else array.shape[place] for place in places]
    order = np.argsort(dims) if dims else ()
    return np.broadcast_to(array.transpose(order).reshape(sizes), tuple(node.shape.dimensions))
  if opcode == "dynamic-slice":
    sizes = node.dynamic_slice_sizes
    starts = [
      min(max(int(start), 0), of - size)
      for start, of, size in zip(operands[1:], array.shape, sizes)
    ]
    return array[tuple(slice(start, start + size) for start, size in zip(starts, sizes))]
  return None


@functools.lru_cache(maxsize=256)
def _places(
  dimensions: tuple[int, ...], minor_to_major: tuple[int, ...], tiles: tuple[tuple[int, ...], ...]
) -> tuple[np.ndarray, int]:
  """The place in memory of each element of an array in row-major order, and the places it takes.

  The dimensions are in the order of the layout, major to minor. A tile splits the last of them: the
  elements of a tile lie side by side. A further tile splits those of the tile before.
  """
  order = list(reversed(minor_to_major)) or list(range(len(dimensions)))
  sizes = [dimensions[dim] for dim in order]
  index = list(np.indices(tuple(sizes), sparse=True))
  for tile in tiles:
    count = min(len(tile), len(sizes))
    kept, parts = len(sizes) - count, tile[len(tile) - count :]
    split = list(zip(sizes[kept:], index[kept:], parts))
    sizes = [*sizes[:kept], *(-(-size // part) for size, _, part in split), *parts]
    index = [*index[:kept], *(at // part for _, at, part in split)]
    index += [at % part for _, at, part in split]
    if math.prod(sizes) > _MOST_PADDED:
      raise ValueError(f"its tiles take {math.prod(sizes)} places, at most {_MOST_PADDED} are read")
  places = np.zeros([dimensions[dim] for dim in order], np.int64)
  for size, at in zip(sizes, index, strict=True):
    places = places * size + at
  back = np.argsort(order) if order else ()
  return places.transpose(back).reshape(-1), math.prod(sizes)


def _of_layout(dimensions: Sequence[int], layout: Any) -> tuple[np.ndarray, int]:
  tiles = tuple(tuple(tile.dimensions) for tile in layout.tiles)
  return _places(tuple(dimensions), tuple(layout.minor_to_major), tiles)


def to_memory(array: np.ndarray, layout: Any) -> np.ndarray:
  """The elements of an array in the order of its layout, with zeros where tiles are padded.

  Args:
    array: any shape.
    layout: a `LayoutProto`.
  """
  places, size = _of_layout(array.shape, layout)
  memory = np.zeros(size, array.dtype)
  memory[places] = array.reshape(-1)
  return memory


def from_memory(memory: np.ndarray, shape: proto.ShapeProto) -> np.ndarray:
  """The array of a shape from its elements in memory, as `to_memory` returns them."""
  places, _ = _of_layout(tuple(shape.dimensions), shape.layout)
  return memory[places].reshape(tuple(shape.dimensions))
