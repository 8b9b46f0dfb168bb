"""How often the loops of an HLO module iterate.

The TPU compiler writes the number into few of its modules. Elsewhere the scalars that a condition
reads are evaluated, iteration by iteration, as the module computes them: through tuples, copies,
fusions, branches and other loops, and through the two halves of the integers of `jax_enable_x64`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import math
import operator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tpugraphs_jax.hlo import proto

# An int, a bool, a np.float32, a tuple of values, or None where the value is not known.
Value: TypeAlias = Any
# By the name of a loop its runs, and its iterations in all of them; None where these are not known.
_Counts: TypeAlias = dict[str, tuple[int, int | None]]

_STEPS = 500_000  # instructions that are evaluated for an outermost loop: about a second
_EQUAL_MOVES = 10_000  # iterations after which a loop is taken to go on as before
_CALLERS = ("while", "call", "conditional")
_SCHEMA = {"known_trip_count": {"n": (str, int)}}  # the compiler writes numbers as strings
_PRED, _F32 = 1, 11  # XLA's numbers of types
# Bits of integers; a predicate is an integer of one bit.
_SIGNED, _UNSIGNED = {2: 8, 3: 16, 4: 32, 5: 64}, {_PRED: 1, 6: 8, 7: 16, 8: 32, 9: 64}
_BITS = _SIGNED | _UNSIGNED
_LITERALS = {
  **{_PRED: "preds", 2: "s8s", 3: "s16s", 4: "s32s", 5: "s64s"},
  **{6: "u8s", 7: "u16s", 8: "u32s", 9: "u64s", _F32: "f32s"},
}
_COMPARE = {
  "EQ": operator.eq,
  "NE": operator.ne,
  "LT": operator.lt,
  "LE": operator.le,
  "GT": operator.gt,
  "GE": operator.ge,
}
_SAME = ("add-dependency", "broadcast", "copy", "opt-barrier", "reshape", "transpose")
_GROWING = ("add", "multiply", "subtract")  # opcodes that overflow
# Opcodes whose results are equal on all devices, so that functions such as `exp` are missing.
_ARITHMETIC: dict[str, Callable[..., Value]] = {
  "abs": abs,
  "add": operator.add,
  "and": operator.and_,
  "clamp": lambda low, value, high: min(max(low, value), high),
  "maximum": max,
  "minimum": min,
  "multiply": operator.mul,
  "negate": operator.neg,
  "not": operator.invert,
  "or": operator.or_,
  "sign": lambda value: int(value > 0) - int(value < 0),
  "subtract": operator.sub,
  "xor": operator.xor,
}


def iterations(
  module: proto.HloModuleProto, arguments: Sequence[Value] = ()
) -> dict[str, float | None]:
  """How often each loop of a module iterates.

  Args:
    module: before or after the compiler's optimisations.
    arguments: scalars that the program is called with, by the number of the entry's parameter;
      None for other arguments, and for those that follow.

  Returns:
    By the name of each `while`, the mean number of iterations over the runs of the loop: an inner
    loop that ends at the counter of an outer one has another number in each run. 0 for a loop that
    never runs. None where the number depends on data, on a function such as `exp`, or takes more
    than `_STEPS` evaluated instructions. A loop that has moved its integers in equal steps
    `_EQUAL_MOVES` times goes on so until its condition fails.
  """
  scalars = _Scalars(module)
  entry = scalars.computations[module.entry_computation_id]
  with np.errstate(all="ignore"):
    counts = scalars.counts(entry, arguments, is_outermost=True)
  result: dict[str, float | None] = {}
  for loop in proto.instructions(module):
    if loop.opcode == "while":
      runs, total = counts.get(loop.name, (1, 0))
      result[loop.name] = None if total is None else total / runs
  return result


def trip_count(loop: proto.HloInstructionProto) -> int | None:
  """The iterations of a loop as the compiler wrote them; None where it did not.

  The compiler of jax 0.10.2 for CPUs writes -20 where a uint8 counts from 120 to 255 and overflows.
  """
  count = int(proto.backend_config(loop, _SCHEMA).get("known_trip_count", {}).get("n", -1))
  return count if count >= 0 else None


class _Step(NamedTuple):
  """The evaluation of an instruction: a function of the values of its operands.

  Without a function the value is the argument of that number.
  """

  id: int
  operands: tuple[int, ...]
  function: Callable[..., Value] | None
  number: int


class _Plan(NamedTuple):
  """The evaluation of instructions of a computation."""

  steps: tuple[_Step, ...]  # operands before their users
  outputs: tuple[int | None, ...]  # ids of the instructions, None for those not asked for


class _Scalars:
  """Evaluates the scalars of a module; a value that depends on anything else is None.

  Attributes:
    computations: of the module, by their ids.
  """

  def __init__(self, module: proto.HloModuleProto):
    self.computations = {computation.id: computation for computation in module.computations}
    self._steps_left = _STEPS
    self._may_overflow = True
    self._plans: dict[tuple[int, frozenset[int] | None], _Plan] = {}  # of results
    self._read_places: dict[str, frozenset[int]] = {}  # by loop
    self._results: dict[tuple[str, Value], tuple[int | None, Value]] = {}  # by loop and start

  def counts(
    self,
    computation: proto.HloComputationProto,
    arguments: Sequence[Value],
    is_outermost: bool = False,
  ) -> _Counts:
    """The runs and iterations of all loops that one call of a computation reaches."""
    callers = [node for node in computation.instructions if node.opcode in _CALLERS]
    inputs = tuple(dict.fromkeys(id for node in callers for id in node.operand_ids))
    values = self._values(self._plan(computation, inputs), arguments)
    result: _Counts = {}
    for node in callers:
      operands = [values[id] for id in node.operand_ids]
      if node.opcode == "while":
        self._steps_left = _STEPS if is_outermost else self._steps_left
        _add(result, self._counts_of_loop(node, operands[0]))
        continue
      # Any branch of a conditional may run; its first operand chooses the branch.
      inputs_of = [operands] if node.opcode == "call" else [[operand] for operand in operands[1:]]
      for callee, arguments_of in zip(self._callees(node), inputs_of):
        _add(result, self.counts(callee, arguments_of, is_outermost))
    return result

  def _counts_of_loop(self, loop: proto.HloInstructionProto, start: Value) -> _Counts:
    """The counts of a loop and of the loops inside, in one run of it."""
    count, _ = self._run(loop, start)
    result: _Counts = {loop.name: (1, count)}
    if count == 0:
      return result
    inside = self._counts_inside(loop, _masked(start, self._unchanged(loop)))
    if count and any(total is None for _, total in inside.values()):
      _add(result, self._counts_by_iteration(loop, start, count))
    else:
      _add(result, inside, count or 1)
    return result

  def _counts_inside(self, loop: proto.HloInstructionProto, state: Value) -> _Counts:
    """The counts of the loops inside a loop, in one iteration."""
    result: _Counts = {}
    for computation in self._callees(loop):
      _add(result, self.counts(computation, [state]))
    return result

  def _counts_by_iteration(
    self, loop: proto.HloInstructionProto, state: Value, count: int
  ) -> _Counts:
    """The counts of the loops inside a loop of `count` iterations that differ."""
    body, _ = self._callees(loop)
    result: _Counts = {}
    for number in range(count):
      inside = self._counts_inside(loop, state)
      _add(result, inside)
      is_known = any(total is not None for _, total in inside.values())
      if self._steps_left < 0 or number == 0 and not is_known:
        return dict.fromkeys(result, (1, None))
      state = self._result(body, [state])
    return result

  def _run(self, loop: proto.HloInstructionProto, start: Value) -> tuple[int | None, Value]:
    """The iterations of a loop, and its result as far as the condition reads it."""
    state = _masked(start, self._read(loop))
    key = loop.name, state
    if key not in self._results:
      self._results[key] = self._evaluate(loop, state)
    count, result = self._results[key]
    return trip_count(loop) if count is None else count, result

  def _evaluate(self, loop: proto.HloInstructionProto, state: Value) -> tuple[int | None, Value]:
    """As `_run`, by iterations."""
    _, condition = self._callees(loop)
    count = 0
    while goes_on := self._result(condition, [state]):
      before, state = state, self._next(loop, state)
      count += 1
      if state == before:  # without an end
        return None, None
      if count == _EQUAL_MOVES:
        more, state = self._jump(loop, before, state)
        count += more
    return (None, None) if goes_on is None else (count, state)

  def _jump(
    self, loop: proto.HloInstructionProto, before: Value, state: Value
  ) -> tuple[int, Value]:
    """Iterations that move all integers as the last one did, and the state after them.

    They end before the condition fails or overflows. There are none where the last of them would
    move the integers otherwise, or values are of floating point.
    """
    _, condition = self._callees(loop)
    if not isinstance(state, tuple) or any(isinstance(part, np.floating) for part in state):
      return 0, state

    def after(count: int) -> Value:
      pairs = zip(before, state)
      return tuple(None if new is None else new + count * (new - old) for old, new in pairs)

    self._may_overflow = False
    holds = lambda count: bool(self._result(condition, [after(count)]))
    last = _last(holds)
    self._may_overflow = True
    is_even = self._next(loop, after(last)) == after(last + 1)
    return (last, after(last)) if is_even else (0, state)

  def _next(self, loop: proto.HloInstructionProto, state: Value) -> Value:
    """What the condition reads of the state after an iteration."""
    body, _ = self._callees(loop)
    places = self._read(loop)
    return _masked(self._result(body, [state], places), places)

  def _read(self, loop: proto.HloInstructionProto) -> frozenset[int]:
    """The parts of a loop's state on which its condition depends, in any iteration."""
    if loop.name not in self._read_places:
      body, condition = self._callees(loop)
      places = self._places(condition, None)
      while (more := places | self._places(body, places)) != places:
        places = more
      self._read_places[loop.name] = places
    return self._read_places[loop.name]

  def _places(
    self, computation: proto.HloComputationProto, outputs: frozenset[int] | None
  ) -> frozenset[int]:
    """The parts of a computation's only argument on which parts of its result depend."""
    plan = self._plan_of_result(computation, outputs)
    (parameter,) = (node for node in computation.instructions if node.opcode == "parameter")
    ids = {step.id for step in plan.steps if parameter.id in step.operands}
    users = [node for node in computation.instructions if node.id in ids]
    is_whole = any(user.opcode != "get-tuple-element" for user in users)
    if is_whole or parameter.id in plan.outputs:
      return frozenset(range(len(parameter.shape.tuple_shapes) or 1))
    return frozenset(user.tuple_index for user in users)

  def _unchanged(self, loop: proto.HloInstructionProto) -> frozenset[int]:
    """The parts of a loop's state that no iteration changes."""
    body, _ = self._callees(loop)
    nodes = {node.id: node for node in body.instructions}
    result = set()
    for place, output in enumerate(nodes[body.root_id].operand_ids):
      node = nodes[output]
      while node.opcode == "copy":
        node = nodes[node.operand_ids[0]]
      if node.opcode == "get-tuple-element" and node.tuple_index == place:
        if nodes[node.operand_ids[0]].opcode == "parameter":
          result.add(place)
    return frozenset(result if nodes[body.root_id].opcode == "tuple" else ())

  def _callees(self, node: proto.HloInstructionProto) -> list[proto.HloComputationProto]:
    """The computations that an instruction calls; of a loop, body and condition."""
    return [self.computations[callee] for callee in node.called_computation_ids]

  def _result(
    self,
    computation: proto.HloComputationProto,
    arguments: Sequence[Value],
    places: frozenset[int] | None = None,
  ) -> Value:
    """The result of a computation; of a tuple only the parts in `places`, or all."""
    plan = self._plan_of_result(computation, places)
    values = self._values(plan, arguments)
    result = tuple(values.get(output) for output in plan.outputs)
    return values[computation.root_id] if plan.outputs == (computation.root_id,) else result

  def _values(self, plan: _Plan, arguments: Sequence[Value]) -> dict[int | None, Value]:
    """The values of all steps of a plan for the arguments of its computation."""
    self._steps_left -= len(plan.steps)
    if self._steps_left < 0:
      return dict.fromkeys(plan.outputs)
    values: dict[int | None, Value] = {}
    for id, operands, function, number in plan.steps:
      if function is not None:
        values[id] = function(*[values[operand] for operand in operands])
      else:
        values[id] = arguments[number] if number < len(arguments) else None
    return values

  def _plan_of_result(
    self, computation: proto.HloComputationProto, places: frozenset[int] | None
  ) -> _Plan:
    """The plan of a computation's result; of a tuple only of the parts in `places`, or of all."""
    key = computation.id, places
    if key not in self._plans:
      (root,) = (node for node in computation.instructions if node.id == computation.root_id)
      outputs: tuple[int | None, ...] = (root.id,)
      if root.opcode == "tuple":
        is_output = lambda place: places is None or place in places
        parts = enumerate(root.operand_ids)
        outputs = tuple(id if is_output(place) else None for place, id in parts)
      self._plans[key] = self._plan(computation, outputs)
    return self._plans[key]

  def _plan(self, computation: proto.HloComputationProto, outputs: tuple[int | None, ...]) -> _Plan:
    """The plan of the values of instructions."""
    nodes = {node.id: node for node in computation.instructions}
    needed, steps = set(outputs), []
    for node in reversed(computation.instructions):  # users before their operands
      if node.id in needed:
        function = self._function(node, [nodes[operand] for operand in node.operand_ids])
        operands = () if function is _unknown else tuple(node.operand_ids)
        steps.append(_Step(node.id, operands, function, node.parameter_number))
        needed.update(operands)
    return _Plan(tuple(reversed(steps)), outputs)

  def _function(
    self, node: proto.HloInstructionProto, operands: Sequence[proto.HloInstructionProto]
  ) -> Callable[..., Value] | None:
    """The function of an instruction, `_unknown` if it is not evaluated; None of a parameter."""
    match node.opcode:
      case "parameter":
        return None
      case "tuple":
        return lambda *parts: parts
      case "get-tuple-element":
        return lambda whole: None if whole is None else whole[node.tuple_index]
      case "copy-start":
        return lambda value: (value, value, None)
      case "copy-done":
        return lambda parts: parts and parts[0]
      case "while":
        return lambda start: self._run(node, start)[1]
      case "fusion" | "call":
        (callee,) = self._callees(node)
        return lambda *arguments: self._result(callee, arguments)
      case "conditional":
        return functools.partial(self._branch, node, operands[0].shape.element_type == _PRED)
    if node.shape.tuple_shapes:
      return _first if node.opcode in _SAME else _unknown
    return self._scalar(node, operands) if math.prod(node.shape.dimensions) == 1 else _unknown

  def _branch(
    self, node: proto.HloInstructionProto, is_predicate: bool, index: Value, *operands: Value
  ) -> Value:
    """The result of the branch that runs: the first of two where the predicate holds."""
    if index is None:
      return None
    index = 1 - index if is_predicate else index
    last = len(operands) - 1
    number = index if 0 <= index <= last else last
    return self._result(self._callees(node)[number], [operands[number]])

  def _scalar(
    self, node: proto.HloInstructionProto, operands: Sequence[proto.HloInstructionProto]
  ) -> Callable[..., Value]:
    """As `_function`, of an array of one element."""
    kinds = [operand.shape.element_type for operand in operands]
    kind = node.shape.element_type
    if not {kind, *kinds} <= {_F32, *_BITS}:
      return _unknown
    if node.opcode == "constant":
      value = _literal(node)
      return lambda: value
    if node.opcode in _SAME:
      return _first
    if node.opcode == "select":
      return _selected
    function = _operation(node, kinds)
    if function is None:
      return _unknown
    return functools.partial(self._evaluated, function, kind, node.opcode in _GROWING)

  def _evaluated(
    self, function: Callable[..., Value], kind: int, is_growing: bool, *operands: Value
  ) -> Value:
    """A function's result in the type of its instruction."""
    if None in operands:
      return None
    exact = function(*operands)
    result = None if exact is None else _wrapped(exact, kind)
    is_overflow = is_growing and not self._may_overflow and result != exact
    return None if is_overflow else result


def _unknown(*operands: Value) -> None:
  """The value of what is not evaluated."""


def _first(value: Value, *others: Value) -> Value:
  return value


def _selected(is_first: Value, first: Value, second: Value) -> Value:
  if is_first is None:
    return None
  return first if is_first else second


def _add(counts: _Counts, more: _Counts, times: int = 1) -> None:
  """Adds counts, `times` over."""
  for name, (runs, total) in more.items():
    old_runs, old_total = counts.get(name, (0, 0))
    both = None if total is None or old_total is None else old_total + times * total
    counts[name] = old_runs + times * runs, both


def _masked(value: Value, places: frozenset[int]) -> Value:
  """A state of which only some parts are known; a state without parts is part 0."""
  if isinstance(value, tuple):
    return tuple(part if place in places else None for place, part in enumerate(value))
  return value if 0 in places else None


def _last(holds: Callable[[int], bool]) -> int:
  """The largest number for which a condition holds, or 0; it fails for all that are larger."""
  low, high = 0, 1
  while high < 2**63 and holds(high):
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if holds(middle) else (low, middle)
  return low


def _literal(node: proto.HloInstructionProto) -> Value:
  """The value of a constant of one element."""
  kind = node.shape.element_type
  values = getattr(node.literal, _LITERALS[kind])
  if isinstance(values, bytes):
    values = [int.from_bytes(values, "little")] if len(values) == _BITS[kind] // 8 else []
  return _wrapped(values[0], kind) if len(values) == 1 else None


def _operation(
  node: proto.HloInstructionProto, kinds: Sequence[int]
) -> Callable[..., Value] | None:
  """The function of an opcode on numbers; None where it is not evaluated.

  Args:
    node: an instruction of scalars.
    kinds: the types of its operands.
  """
  bits = _BITS.get(kinds[0] if kinds else _F32, 0)
  match node.opcode:
    case "compare":
      return _COMPARE[node.comparison_direction]
    case "convert":
      return functools.partial(_convert, node.shape.element_type)
    case "bitcast" | "bitcast-convert":
      return functools.partial(_same_bits, kinds[0], node.shape.element_type)
    case "divide" | "remainder" if kinds[0] == _F32:
      return np.divide if node.opcode == "divide" else np.fmod
    case "divide":
      return _quotient
    case "remainder":
      return lambda value, by: value - by * _quotient(value, by) if by else None
    case "shift-left":
      return lambda value, by: value << by if 0 <= by < bits else 0
    case "shift-right-logical":
      return lambda value, by: value % 2**bits >> by if 0 <= by < bits else 0
    case "shift-right-arithmetic" if kinds[0] in _SIGNED:
      return lambda value, by: value >> (by if 0 <= by < bits else bits - 1)
  return _ARITHMETIC.get(node.opcode)


def _quotient(value: int, by: int) -> int | None:
  """Division that rounds to 0, as XLA's."""
  if not by:
    return None
  quotient = abs(value) // abs(by)
  return quotient if (value < 0) == (by < 0) else -quotient


def _convert(kind: int, value: Value) -> Value:
  """A number in another type, before it is cut to the bits of that type."""
  if kind == _PRED:
    return value != 0
  if kind == _F32 or not isinstance(value, np.floating):
    return value
  return int(value) if abs(value) < 2 ** (_BITS[kind] - 1) else None  # not of NaN either


def _same_bits(old: int, new: int, value: Value) -> Value:
  """A value whose bits are read in another type of the same size."""
  if old == _F32 and new != _F32:
    return int(np.float32(value).view(np.int32))
  if new == _F32 and old != _F32:
    return np.int64(value).astype(np.int32).view(np.float32)
  return value


def _wrapped(value: Value, kind: int) -> Value:
  """A number in a type; integers wrap around."""
  if kind == _F32:
    return np.float32(value)
  bits = _BITS[kind]
  value = int(value) % 2**bits
  return value - 2**bits if kind in _SIGNED and value >= 2 ** (bits - 1) else value
