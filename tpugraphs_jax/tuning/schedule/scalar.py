"""The scalar unit of a TPU core: executes what decides how often and when bundles run.

Vector operations are skipped. Of the scalar operations those run that a branch, a DMA, a wait or a
call depends on. A word that the schedule does not tell, such as a computed value, is an `Unknown`:
it may be added and compared, and only a branch or the size of a DMA that depends on it ends the
execution.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import inspect
import itertools
import math
import operator
from typing import Any, Protocol

import numpy as np

from tpugraphs_jax.tuning.schedule.bundles import (
  Allocation,
  Bundle,
  Operand,
  Operation,
  Unreadable,
  Value,
)
from tpugraphs_jax.tuning.schedule.chips import Chip

_MASK, _SIGN, _WORD_BITS = 0xFFFFFFFF, 0x80000000, 32
_ALLOCATION_BITS = 18  # words between two allocations
_MOST_ALLOCATIONS = 2 ** (32 - _ALLOCATION_BITS) - 1
MOST_WORDS = 2**20  # of scalar memory
MOST_BLOCKS = 4_000_000  # executed blocks of one kernel


class Unknown:
  """A word whose value the schedule does not tell.

  Args:
    why: a short clause, such as "operand 2 of the kernel has no value".
    guess: its value where the choice between two sizes depends on it; None: none is made.
  """

  __slots__ = ("guess", "why")

  def __init__(self, why: str, guess: Any = None):
    self.why, self.guess = why, guess

  def _same(self, *_: Any) -> Unknown:
    return self

  __add__ = __radd__ = __sub__ = __rsub__ = __or__ = __ror__ = __xor__ = __rxor__ = _same
  __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _same
  __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
  __lt__ = __le__ = __gt__ = __ge__ = _same
  __hash__ = object.__hash__

  def __eq__(self, other: object) -> Any:
    return self

  def __ne__(self, other: object) -> Any:
    return self

  def __and__(self, other: Any) -> Any:
    return 0 if other.__class__ is not Unknown and other == 0 else self

  __rand__ = __mul__ = __rmul__ = __and__

  def __bool__(self) -> bool:
    raise Unreadable(self.why)


class Memory(dict):
  """Words of scalar memory by address.

  Args:
    unwritten: a word that nothing has written.
  """

  def __init__(self, unwritten: Unknown):
    super().__init__()
    self._unwritten = unwritten

  def fill(self, start: int, count: int, words: Sequence[Any] = ()) -> None:
    """Writes words from an address on; words beyond the given ones are unwritten again.

    Raises:
      Unreadable: there are more words than scalar memory can have.
    """
    if count > MOST_WORDS:
      raise Unreadable(f"a DMA moves {count} words into scalar memory, at most {MOST_WORDS} fit")
    for place in range(count):
      if place < len(words):
        self[start + place] = words[place]
      else:
        self.pop(start + place, None)

  def __missing__(self, address: Any) -> Unknown:
    return address if address.__class__ is Unknown else self._unwritten


class Core(Protocol):
  """What a block does beside scalar arithmetic; times are in cycles since the kernel began."""

  memory: Memory

  def start_dma(self, code: str, now: float, arguments: Mapping[str, Any]) -> float:
    """Starts a DMA; returns cycles that the core waits."""

  def wait(self, code: str, now: float, flag: Any, count: Any) -> float:
    """Waits until a flag has a count; returns cycles that the core waits."""

  def sync(self, code: str, now: float, flag: Any, count: Any) -> None:
    """Sets a flag or adds to it."""

  def call(self, name: str, now: float, arguments: Mapping[str, Any]) -> float:
    """Executes a kernel with words in registers; returns its cycles."""

  def choose(self, unknown: Unknown, is_backward: bool) -> bool:
    """Whether a branch whose condition is unknown is taken."""


def _signed(word: Any) -> Any:
  return (word ^ _SIGN) - _SIGN


def _select(condition: Any, word: Any, otherwise: Any) -> Any:
  if condition.__class__ is Unknown:
    if condition.guess is None:
      return word if word is otherwise else condition
    condition = condition.guess
  return word if condition else otherwise


def _and(a: Any, b: Any, _: Any) -> Any:
  return a & b


def _or(a: Any, b: Any, _: Any) -> Any:
  if (a.__class__ is Unknown and b is True) or (b.__class__ is Unknown and a is True):
    return True
  return a | b


def _nor(a: Any, b: Any, _: Any) -> Any:
  return _or(a, b, _) ^ True


def _load(address: Any, memory: Any, _: Any) -> Any:
  return memory[address]


def _store(address: Any, word: Any, memory: Any) -> Any:
  if address.__class__ is Unknown:
    raise Unreadable(f"it writes scalar memory at an unknown address: {address.why}")
  memory[address] = word


def _extreme(choose: Callable, sign: int) -> Callable:
  def of(a: Any, b: Any, _: Any) -> Any:
    if a.__class__ is Unknown or b.__class__ is Unknown:
      return a if a.__class__ is Unknown else b
    return choose(a ^ sign, b ^ sign) ^ sign

  return of


def _compare(relation: Callable, sign: int) -> Callable:
  def of(a: Any, b: Any, _: Any) -> Any:
    if a.__class__ is Unknown and a.guess is not None and b.__class__ is int:
      return Unknown(a.why, relation(a.guess ^ sign, b ^ sign))
    return relation(a ^ sign, b ^ sign)

  return of


# Functions of three words by the code of an operation; `scmp` has a relation in its code.
_FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
  **dict.fromkeys(("smov", "pmov", "int_to_ptr", "reloc"), lambda a, _, __: a),
  "sadd": lambda a, b, _: (a + b) & _MASK,
  "ssub": lambda a, b, _: (a - b) & _MASK,
  "smul": lambda a, b, _: (a * b) & _MASK,
  "smul.u24": lambda a, b, _: ((a & 0xFFFFFF) * (b & 0xFFFFFF)) & _MASK,
  **dict.fromkeys(("sand", "pand"), _and),
  **dict.fromkeys(("sor", "por"), _or),
  **dict.fromkeys(("sxor", "pxor"), lambda a, b, _: a ^ b),
  "pnand": lambda a, b, _: (a & b) ^ True,
  "pnor": _nor,
  "pneg": lambda a, _, __: a ^ True,
  "sshll": lambda a, b, _: (a << (b & 63)) & _MASK,
  "sshllo": lambda a, b, _: (((a + 1) << (b & 63)) - 1) & _MASK,  # ones move in
  "sshrl": lambda a, b, _: a >> (b & 63),
  "sshra": lambda a, b, _: (_signed(a) >> (b & 63)) & _MASK,
  "sc": lambda a, b, _: (a + b) > _MASK,  # the carry of an addition
  "scalar_lea": lambda a, b, _: (a + b) & _MASK,
  "scalar_select": _select,
}


_BOTH = "kDivAndRem"


def _division(of: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
  return lambda a, b, _: of(a, b) if b.__class__ is Unknown or b else Unknown("a / 0")


_FUNCTIONS |= {
  "sdivrem.u32.kDiv": _division(lambda a, b: a // b),
  "sdivrem.u32.kRem": _division(lambda a, b: a % b),
  # Two words wait in the queue: the quotient, then the remainder.
  f"sdivrem.u32.{_BOTH}": _division(lambda a, b: a // b | a % b << _WORD_BITS),
  "spop.drf": lambda a, _, __: a & _MASK,
  "spop.drf.second": lambda a, _, __: a >> _WORD_BITS,
}
_SIGNS = {"s32": _SIGN, "u32": 0}
_RELATIONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_EXTREMES = {"smin": min, "smax": max}


def _float(word: Any) -> np.float32:
  return np.uint32(word).view(np.float32)


def float_word(number: Any) -> int:
  """The word of a number in float32; infinity where it is too large."""
  with np.errstate(over="ignore"):
    return int(np.float32(number).view(np.uint32))


def _of_floats(of: Callable[..., Any], make: Callable[[Any], Any] = float_word) -> Callable:
  """A function of the words of as many float32 numbers as `of` takes."""
  count = len(inspect.signature(of).parameters)

  def compute(*words: Any) -> Any:
    unknown = next((word for word in words[:count] if word.__class__ is Unknown), None)
    if unknown is not None:
      return unknown
    with np.errstate(all="ignore"):
      return make(of(*map(_float, words[:count])))

  return compute


def _integer(number: np.float32) -> Any:
  """The word of a whole number; how the core rounds others is not known."""
  if not np.isfinite(number) or number != np.trunc(number) or abs(number) >= _SIGN:
    return Unknown(f"how {number} becomes an integer is not known")
  return int(number) & _MASK


_FLOAT_FUNCTIONS = {
  "sadd.f32": _of_floats(lambda a, b: a + b),
  "ssub.f32": _of_floats(lambda a, b: a - b),
  "smul.f32": _of_floats(lambda a, b: a * b),
  "smin.f32": _of_floats(lambda a, b: np.minimum(a, b)),
  "smax.f32": _of_floats(lambda a, b: np.maximum(a, b)),
  "sfloor.f32": _of_floats(lambda a: np.floor(a)),
  "sceil.f32": _of_floats(lambda a: np.ceil(a)),
  "scvt.f32.s32": _of_floats(lambda a: a, _integer),
  "scvt.s32.f32": lambda a, _, __: a if a.__class__ is Unknown else float_word(_signed(a)),
}


def function(code: str) -> Callable[[Any, Any, Any], Any] | None:
  """What an operation computes; None where it is not known."""
  base, *types = code.split(".")
  if base == "scmp" and len(types) > 1:
    relation, sign = _RELATIONS.get(types[0]), _SIGNS.get(types[1])
    if relation and types[1] == "f32":
      return _of_floats(lambda a, b: relation(a, b), bool)
    return _compare(relation, sign) if relation and sign is not None else None
  if code in _FLOAT_FUNCTIONS:
    return _FLOAT_FUNCTIONS[code]
  if base in _EXTREMES and types and types[0] in _SIGNS:
    return _extreme(_EXTREMES[base], _SIGNS[types[0]])
  if types and types[0][:1] in ("f", "b"):
    return None  # floating-point arithmetic
  return _FUNCTIONS.get(code) or _FUNCTIONS.get(base)


Step = tuple[Callable[[Any, Any, Any], Any], int, int, int, int]  # function, result, three words
Effect = Callable[[list, Core, float], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
  """Bundles that run one after the other.

  Attributes:
    segments: scalar steps, then what happens after them, and the cycle at which it does.
    cycles: of its bundles, without waits.
    products: of each matrix unit that it uses: bundles before its first product, rows that it
      takes, and bundles after its last product.
    bundles: how many it has.
    units: vector operations of each unit.
    target: the block that follows if the branch of this one is taken; None without a branch.
    following: the block after this one; None after the last.
    is_backward: whether the target is this block or one before.
  """

  segments: tuple[tuple[tuple[Step, ...], Effect | None, int], ...]
  cycles: int
  products: tuple[tuple[int, int, int], ...]
  bundles: int
  units: tuple[int, ...]
  target: int | None
  following: int | None
  is_backward: bool

  def lasts(self, chip: Chip) -> int:
    """Cycles without waits: a block lasts until its products are done.

    Where a chip drains its matrix units, what follows the last product waits for its result.
    """
    ends = (
      math.ceil(taken / chip.rows) + chip.drains * (before + after)
      for before, taken, after in self.products
    )
    return max(self.cycles, max(ends, default=0))


# Slots of the register file that are no registers.
_NOTHING, _MEMORY, _TAKEN, _NOWHERE = range(4)
_DMA_WORDS = ("size_in_granules", "dst_syncflagno", "overrides")
_EFFECTS = ("sbr", "dma", "vwait", "vsync", "inlined_call")


class Schedule:
  """A schedule whose operands are resolved, ready to run.

  Args:
    bundles: of `bundles.parse`.
    slots: cycles after a branch whose bundles still run.
    nops_are_joined: whether one empty bundle stands for all empty ones at the end of these.
    first_allocation: number of allocations before those of this schedule.

  Attributes:
    blocks: by number, from 0.
    operands: register and description, such as `input 0`, of each operand of a kernel that matters.

  Raises:
    Unreadable: a branch without a target, or more of anything than this class can tell apart.
  """

  def __init__(
    self,
    bundles: list[Bundle],
    *,
    slots: int,
    nops_are_joined: bool = False,
    first_allocation: int = 0,
  ):
    self._bundles, self._slots, self._nops_are_joined = bundles, slots, nops_are_joined
    self._starts = {region: at for at, bundle in enumerate(bundles) for region in bundle.regions}
    self._first_allocation = first_allocation
    self._allocations: dict[str, int] = {}
    self._slot_of: dict[Any, int] = {}
    self._initial: list[Any] = [None, None, False, -1]
    self._needed, self._needs_memory = _needed(bundles)
    self._second_pops = _second_pops(bundles)
    self.operands = {
      operation.result.register: (operation.text, operation.code.partition(".")[2])
      for operation in bundles[0].operations
      if operation.code.startswith("inlined_call_operand") and operation.result
    }
    self.read_operands = {
      operation.result.register
      for operation in bundles[0].operations
      if operation.code.startswith("inlined_call_operand")
      and operation.result
      and operation.result.number in self._needed
    }
    self.blocks = self._link()

  @property
  def allocations(self) -> int:
    """Number of allocations up to those of this schedule."""
    return self._first_allocation + len(self._allocations)

  def registers(self, memory: Memory, values: Mapping[str, Any]) -> list[Any]:
    """A register file in which some registers have values."""
    words = list(self._initial)
    words[_MEMORY] = memory
    for register, word in values.items():
      if register in self._slot_of:
        words[self._slot_of[register]] = word
    return words

  def _link(self) -> list[Block]:
    branches = self._branches()
    ends = {at: self._end_of_slots(at, target) for at, target in branches.items()}
    leaders = sorted({0, *branches.values(), *ends.values()} - {len(self._bundles)})
    number = {at: place for place, at in enumerate(leaders)}
    blocks = []
    for place, start in enumerate(leaders):
      end = leaders[place + 1] if place + 1 < len(leaders) else len(self._bundles)
      own = [at for at in branches if start <= at < end]
      if len(own) > 1 or any(ends[at] != end for at in own):
        raise Unreadable(f"a branch or a region lies in the slots of the branch in bundle {own[0]}")
      target = number[branches[own[0]]] if own else None
      following = place + 1 if place + 1 < len(leaders) else None
      is_backward = target is not None and target <= place
      waits = self._slots - (end - own[0] - 1) if own and self._nops_are_joined else 0
      blocks.append(self._block(start, end, max(waits, 0), target, following, is_backward))
    return blocks

  def _end_of_slots(self, at: int, target: int) -> int:
    """The bundle after those that a branch still runs.

    Where empty bundles are joined, the first one ends them, unless an operation after it depends on
    the predicate of the branch, or a region ends after it that began before the branch: these are
    operations that must not run if the branch is taken, and the end of the block of the branch.
    """
    end = min(at + self._slots + 1, len(self._bundles))
    if not self._nops_are_joined:
      return end
    rest = range(at + 1, end)
    starts = (place for place in rest if self._bundles[place].regions or place == target)
    inside = range(at, next(starts, end))
    branch = next(jump for jump in self._bundles[at].operations if jump.code.startswith("sbr"))
    predicate = branch.predicate.number if branch.predicate is not None else None
    began = lambda region: self._starts.get(region, math.inf) <= at
    last = max(
      place
      for place in inside
      if place == at
      or predicate in self._bundles[place].predicates
      or any(map(began, self._bundles[place].ends))
    )
    return next(
      (place + 1 for place in inside if place > last and self._bundles[place].is_empty), end
    )

  def _branches(self) -> dict[int, int]:
    """The bundle to which each branch jumps, by the bundle of the branch."""
    exits = [at for at, bundle in enumerate(self._bundles) if bundle.is_exit]
    branches = {}
    for at, bundle in enumerate(self._bundles):
      for operation in bundle.operations:
        if operation.code.startswith("sbr"):
          targets = (
            [self._starts[int(operation.text)]]
            if int(operation.text or -1) in self._starts
            else exits
          )
          if len(targets) != 1 or at in branches:
            raise Unreadable(f"the branch in bundle {at} has no target in its schedule")
          branches[at] = targets[0]
    return branches

  def _block(
    self,
    start: int,
    end: int,
    waits: int,
    target: int | None,
    following: int | None,
    is_backward: bool,
  ) -> Block:
    segments: list[tuple[tuple[Step, ...], Effect | None, int]] = []
    steps: list[Step] = []
    cycles = 0
    for bundle in self._bundles[start:end]:
      for item in self._bundle(bundle):
        if isinstance(item, tuple):
          steps.append(item)
        else:
          segments.append((tuple(steps), item, cycles))
          steps = []
      cycles += 1 + bundle.delay
    if steps:
      segments.append((tuple(steps), None, cycles))
    units = tuple(map(sum, zip(*(bundle.units for bundle in self._bundles[start:end]))))
    bundles = end - start
    products = self._products(start, end)
    return Block(
      tuple(segments), cycles + waits, products, bundles, units, target, following, is_backward
    )

  def _products(self, start: int, end: int) -> tuple[tuple[int, int, int], ...]:
    """`Block.products` of some bundles."""
    taken: collections.Counter[int] = collections.Counter()
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at in range(start, end):
      for unit, rows in self._bundles[at].products:
        taken[unit] += rows
        first.setdefault(unit, at)
        last[unit] = at
    return tuple((first[unit] - start, taken[unit], end - 1 - last[unit]) for unit in taken)

  def _bundle(self, bundle: Bundle) -> Iterator[Step | Effect]:
    """The steps and effects of a bundle: every operand is read before the bundle writes.

    A value that the bundle itself defines is read after it is written: pointers of integers.
    """
    kept = [operation for operation in bundle.operations if self._is_kept(operation)]
    kept.sort(key=lambda operation: operation.code.startswith("int_to_ptr"))
    here = _Here({operation.result.number for operation in kept if operation.result})
    items: list[Step | Effect] = []
    for operation in kept:
      items += self._steps(operation, here)
      if operation.result is not None:
        here.written.add(operation.result.register)
    for register in here.saved:
      yield (_FUNCTIONS["smov"], self._slot(("saved", register)), self._slot(register), 0, 0)
    yield from items

  def _is_kept(self, operation: Operation) -> bool:
    if operation.code in ("sphi",) or operation.code.startswith("inlined_call_operand"):
      return False
    if operation.result is None:
      return operation.code != "sst" or self._needs_memory
    return operation.result.number in self._needed

  def _steps(self, operation: Operation, here: _Here) -> list[Step | Effect]:
    code = operation.code
    if code.startswith(_EFFECTS):
      return self._effect(operation, here)
    steps: list[Step | Effect] = []
    words = [self._word(operand, here, steps) for operand in operation.operands]
    if code == "sst":
      if len(words) != 2:
        raise Unreadable("a store has no address and value")
      if operation.predicate is not None:
        before = self._slot("before")
        steps.append((_load, before, words[0], _MEMORY, 0))
        words[1] = self._chosen(operation, words[1], before, here, steps)
      steps.append((_store, _NOTHING, words[0], words[1], _MEMORY))
      return steps
    if operation.result is None:
      raise Unreadable(f"the operation {code[:40]} is not known")
    result = self._slot(operation.result.register)
    if operation.predicate is None:
      steps.append(self._step(operation, result, words, here, steps))
      return steps
    temporary = self._slot(("temporary", operation.result.register))
    steps.append(self._step(operation, temporary, words, here, steps))
    otherwise = result
    if operation.otherwise is not None:
      otherwise = self._word(operation.otherwise, here, steps)
    chosen = self._chosen(operation, temporary, otherwise, here, steps)
    steps.append((_FUNCTIONS["smov"], result, chosen, 0, 0))
    return steps

  def _step(
    self, operation: Operation, result: int, words: list[int], here: _Here, steps: list
  ) -> Step:
    """The step that computes an operation."""
    code = operation.code
    if operation.result and operation.result.number in self._second_pops:
      code = "spop.drf.second"
    if code.startswith("sdivrem"):
      code = f"{code}.{operation.text}"
    if code == "sld":
      if operation.text:  # the id of the chip or of the core
        return (_FUNCTIONS["smov"], result, self._constant(0), 0, 0)
      return (_load, result, words[0] if words else _NOWHERE, _MEMORY, 0)
    if code.startswith("scalar_select"):
      words = [
        self._word(operation.named[name], here, steps)
        for name in ("predicate", "on_true", "on_false")
        if name in operation.named
      ]
    compute = function(code)
    if code == "scalar_parameter_address":
      unknown: Any = Unknown("the address of a parameter")
    elif code == "spop":
      unknown = Unknown("it depends on a value that vector operations compute")
    elif compute is None:
      unknown = Unknown(f"the operation {code[:40]} is not known")
    elif not 1 <= len(words) <= 3:
      unknown = Unknown(f"the operation {code[:40]} has {len(words)} operands")
    else:
      a, b, c = (*words, _NOTHING, _NOTHING)[:3]
      return (compute, result, a, b, c)
    return (_FUNCTIONS["smov"], result, self._constant(unknown), 0, 0)

  def _chosen(
    self, operation: Operation, word: int, otherwise: int, here: _Here, steps: list
  ) -> int:
    """The slot of a word that depends on the predicate of an operation."""
    assert operation.predicate is not None
    predicate = self._word((operation.predicate,), here, steps)
    chosen = self._slot(("chosen", operation.predicate.register, len(steps)))
    words = (otherwise, word) if operation.negated else (word, otherwise)
    steps.append((_select, chosen, predicate, *words))
    return chosen

  def _effect(self, operation: Operation, here: _Here) -> list[Step | Effect]:
    steps: list[Step | Effect] = []
    code = operation.code
    condition = self._constant(True)
    if code.startswith("sbr"):
      if operation.predicate is not None:
        condition = self._word((operation.predicate,), here, steps)
      negated = operation.predicate is not None and operation.negated
      steps.append((_FUNCTIONS["pneg" if negated else "smov"], _TAKEN, condition, 0, 0))
      return steps
    if operation.predicate is not None:
      false = self._constant(False)
      condition = self._chosen(operation, condition, false, here, steps)
    words = [self._word(operand, here, steps) for operand in operation.operands]
    if code.startswith("inlined_call"):
      names = [
        term.register
        for operand in operation.operands
        for term in operand
        if isinstance(term, Value) and len(operand) == 1
      ]
      if len(names) < len(words):
        raise Unreadable(f"a call of {operation.text[:60]} has an operand that is no register")
      steps.append(_call(operation.text, dict(zip(names, words))))
    elif code == "dma.done.wait" or code.startswith("vwait"):
      steps.append(_wait(code, condition, words))
    elif code.startswith("vsync"):
      steps.append(_sync(code, condition, words))
    else:
      names = [name for name in operation.named if name in _wanted(code)]
      named = {name: self._word(operation.named[name], here, steps) for name in names}
      named |= {"descriptor": words[0]} if code == "dma" and words else {}
      steps.append(_dma(code, condition, named))
    return steps

  def _word(self, operand: Operand, here: _Here, steps: list) -> int:
    """The slot of an operand; sums get steps."""
    slots = []
    for term in operand:
      if isinstance(term, Value):
        old = term.register in here.written and term.number not in here.defined
        if old:
          here.saved.add(term.register)
        slots.append(self._slot(("saved", term.register) if old else term.register))
      elif isinstance(term, Allocation):
        slots.append(self._constant(self._address(term)))
      elif isinstance(term, float):
        slots.append(self._constant(float_word(term)))
      else:
        slots.append(self._constant(term))
    total = slots[0]
    for slot in slots[1:]:
      result = self._slot(("sum", total, slot))
      steps.append((_FUNCTIONS["sadd"], result, total, slot, 0))
      total = result
    return total

  def _slot(self, key: Any) -> int:
    if key not in self._slot_of:
      self._slot_of[key] = len(self._initial)
      why = f"the register {key} has no value" if isinstance(key, str) else "a word has no value"
      self._initial.append(Unknown(why))
    return self._slot_of[key]

  def _constant(self, word: Any) -> int:
    key = ("constant", type(word), word.why if isinstance(word, Unknown) else word)
    slot = self._slot(key)
    self._initial[slot] = word
    return slot

  def _address(self, allocation: Allocation) -> int:
    if allocation.name not in self._allocations:
      if self.allocations >= _MOST_ALLOCATIONS:
        raise Unreadable(f"its schedule has more than {_MOST_ALLOCATIONS} allocations")
      self._allocations[allocation.name] = self.allocations + 1
    return self._allocations[allocation.name] << _ALLOCATION_BITS


@dataclasses.dataclass
class _Here:
  """What one bundle defines, and which registers it overwrites before it reads them."""

  defined: set[int]
  written: set[str] = dataclasses.field(default_factory=set)
  saved: set[str] = dataclasses.field(default_factory=set)


def _wanted(code: str) -> tuple[str, ...]:
  """The named operands of a DMA that decide its time, and the contents of scalar memory."""
  addresses = ("hbm", "vmem", "smem") if code.endswith("_to_smem") else ()
  return (*_DMA_WORDS, *addresses)


def _call(name: str, words: Mapping[str, int]) -> Effect:
  items = tuple(words.items())
  return lambda r, core, now: core.call(name, now, {key: r[word] for key, word in items})


def _wait(code: str, condition: int, words: list[int]) -> Effect:
  flag, count = (*words, _NOTHING, _NOTHING)[:2]
  return lambda r, core, now: core.wait(code, now, r[flag], r[count]) if r[condition] else 0


def _sync(code: str, condition: int, words: list[int]) -> Effect:
  flag, count = (*words, _NOTHING, _NOTHING)[:2]

  def sync(r: list, core: Core, now: float) -> float:
    if r[condition]:
      core.sync(code, now, r[flag], r[count])
    return 0

  return sync


def _dma(code: str, condition: int, named: Mapping[str, int]) -> Effect:
  def start(r: list, core: Core, now: float) -> float:
    if not r[condition]:
      return 0
    return core.start_dma(code, now, {name: r[word] for name, word in named.items()})

  return start


def _needed(bundles: list[Bundle]) -> tuple[set[int], bool]:
  """Numbers of the values on which branches, DMAs, waits and calls depend.

  Also whether they depend on scalar memory: then all that is stored there is among the values.
  """
  definitions: dict[int, list[Operation]] = {}
  stores: list[Operation] = []
  waiting: list[Value] = []
  descriptors = False
  for bundle in bundles:
    for operation in bundle.operations:
      if operation.result is not None:
        definitions.setdefault(operation.result.number, []).append(operation)
      if operation.code == "sst":
        stores.append(operation)
      elif operation.code.startswith("dma") and operation.code != "dma.done.wait":
        waiting += _values(operation, _wanted(operation.code))
        descriptors |= operation.code == "dma"
      elif operation.code.startswith(_EFFECTS) and operation.result is None:
        waiting += operation.reads()
  needed: set[int] = set()
  memory = descriptors
  if memory:
    waiting += (value for store in stores for value in store.reads())
  while waiting:
    number = waiting.pop().number
    if number in needed:
      continue
    needed.add(number)
    for operation in definitions.get(number, ()):
      waiting += operation.reads()
      if operation.code == "sld" and not memory and not operation.text:
        memory = True
        waiting += (value for store in stores for value in store.reads())
  return needed, memory


def _second_pops(bundles: list[Bundle]) -> set[int]:
  """Numbers of the values that take a remainder, after its quotient, from the queue of a division.

  Raises:
    Unreadable: more than two values are taken, as where branches take them in turn.
  """
  taken: dict[str, int] = {}
  second = set()
  for operation in itertools.chain.from_iterable(bundle.operations for bundle in bundles):
    if operation.result is None:
      continue
    if operation.text == _BOTH:
      taken[operation.result.register] = 0
    for queue in operation.reads() if operation.code == "spop.drf" else ():
      if queue.register in taken:
        taken[queue.register] += 1
        if taken[queue.register] == 2:
          second.add(operation.result.number)
  if any(count > 2 for count in taken.values()):
    raise Unreadable("a division has more than two results")
  return second


def _values(operation: Operation, names: tuple[str, ...]) -> Iterator[Value]:
  """The values of a DMA that decide its time."""
  if operation.predicate is not None:
    yield operation.predicate
  for name in names:
    yield from (term for term in operation.named.get(name, ()) if isinstance(term, Value))


def run(
  schedule: Schedule, core: Core, registers: list[Any], chip: Chip
) -> tuple[float, list[int]]:
  """Runs a schedule; its cycles, and how often each block ran.

  Args:
    schedule: of a kernel or of a program.
    core: what its blocks do beside scalar arithmetic.
    registers: of `Schedule.registers`.
    chip: constants of its generation.

  Raises:
    Unreadable: something unknown decides what happens next, or it does not end.
  """
  counts = [0] * len(schedule.blocks)
  lasts = [block.lasts(chip) for block in schedule.blocks]
  time, place, left = 0.0, 0, MOST_BLOCKS
  following: int | None = 0
  while following is not None:
    place = following
    block = schedule.blocks[place]
    for steps, effect, offset in block.segments:
      try:
        for compute, result, a, b, c in steps:
          registers[result] = compute(registers[a], registers[b], registers[c])
      except (TypeError, OverflowError):
        raise Unreadable("an operation has too few operands, or a word of another type") from None
      if effect is not None:
        time += effect(registers, core, time + offset)
    time += lasts[place]
    counts[place] += 1
    following = block.following
    if block.target is not None:
      taken = registers[_TAKEN]
      if taken.__class__ is Unknown:
        taken = core.choose(taken, block.is_backward)
      if taken:
        following = block.target
    left -= 1
    if not left:
      raise Unreadable(f"a loop does not end within {MOST_BLOCKS} blocks")
  return time, counts
