"""Bundles to blocks that the executor runs.

Vector operations are skipped. Of the scalar operations those are kept that a branch, a DMA, a wait
or a call depends on.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import itertools
import math
from typing import Any, Protocol

from tpugraphs_jax.tuning.schedule.arrays import Arrays
from tpugraphs_jax.tuning.schedule.bundles import (
  Allocation,
  Bundle,
  MESSAGE,
  Operand,
  Operation,
  Unreadable,
  Value,
)
from tpugraphs_jax.tuning.schedule.chips import Chip
from tpugraphs_jax.tuning.schedule.words import (
  ALLOCATION_BITS,
  BOTH,
  float_word,
  function,
  FUNCTIONS,
  load,
  Memory,
  MOST_ALLOCATIONS,
  select,
  store,
  Unknown,
)


class Core(Protocol):
  """What a block does beside scalar arithmetic; times are in cycles since the kernel began."""

  memory: Memory
  arrays: Arrays

  def start_dma(self, code: str, now: float, arguments: Mapping[str, Any]) -> float:
    """Starts a DMA; returns cycles that the core waits."""

  def wait(self, code: str, now: float, flag: Any, count: Any) -> float:
    """Waits until a flag has a count; returns cycles that the core waits."""

  def sync(self, code: str, now: float, flag: Any, count: Any) -> None:
    """Sets a flag or adds to it."""

  def call(self, name: str, now: float, arguments: Mapping[str, Any]) -> float:
    """Executes a kernel with words in registers; returns its cycles."""

  def choose(self, unknown: Unknown, branch: Branch) -> bool:
    """Whether a branch whose condition is unknown is taken."""


Step = tuple[Callable[[Any, Any, Any], Any], int, int, int, int]  # function, result, three words
Effect = Callable[[list, Core, float], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Branch:
  """A jump to another block.

  Attributes:
    taken: the word that says whether it is taken.
    target: the block that it jumps to.
    leaves: the block at whose end it jumps: the last one whose bundles still run.
    is_backward: whether the target is the block of the branch or one before.
  """

  taken: int
  target: int
  leaves: int
  is_backward: bool


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
    branches: those whose bundle the block has.
    following: the block after this one; None after the last.
    traces: events that it writes for a profiler.
  """

  segments: tuple[tuple[tuple[Step, ...], Effect | None, int], ...]
  cycles: int
  products: tuple[tuple[int, int, int], ...]
  bundles: int
  units: tuple[int, ...]
  branches: tuple[Branch, ...]
  following: int | None
  traces: int

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
_NOTHING, _MEMORY, _NOWHERE, _ARRAYS = range(4)
_DMA_WORDS = ("size_in_granules", "dst_syncflagno", "overrides")
_SOURCE_FLAG = "src_syncflagno"  # counts what has left, of a DMA to another chip
_ADDRESSES = ("hbm", "vmem", "smem")
_MESSAGE_WORDS = (*_DMA_WORDS, _SOURCE_FLAG, "src", "dst")
_CORE_ID = "core id"  # comment of a load; loads of the id of the chip have others
_EFFECTS = ("sbr", "dma", "vwait", "vsync", "inlined_call")


class Schedule:
  """A schedule whose operands are resolved, ready to run.

  Args:
    bundles: of `bundles.parse`.
    slots: cycles after a branch whose bundles still run.
    nops_are_joined: whether one empty bundle stands for all empty ones at the end of these.
    first_allocation: number of allocations before those of this schedule.
    keeps_addresses: whether all DMAs keep the addresses from and to which they move.

  Attributes:
    blocks: by number, from 0.
    operands: register and description, such as `input 0`, of each operand of a kernel that matters.
    has_messages: whether one core of a chip sends words to the other one.

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
    keeps_addresses: bool = False,
  ):
    self._bundles, self._slots, self._nops_are_joined = bundles, slots, nops_are_joined
    self._starts = {region: at for at, bundle in enumerate(bundles) for region in bundle.regions}
    self._first_allocation, self._keeps_addresses = first_allocation, keeps_addresses
    self._allocations: dict[str, int] = {}
    self._slot_of: dict[Any, int] = {}
    self._initial: list[Any] = [None, None, -1, None]
    self._needed, self._needs_memory = _needed(bundles, self._wanted)
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
    self.has_messages = any(
      operation.code == MESSAGE for bundle in bundles for operation in bundle.operations
    )
    self.blocks = self._link()

  @property
  def allocations(self) -> int:
    """Number of allocations up to those of this schedule."""
    return self._first_allocation + len(self._allocations)

  def registers(self, core: Core, values: Mapping[str, Any]) -> list[Any]:
    """A register file in which some registers have values."""
    words = list(self._initial)
    words[_MEMORY], words[_ARRAYS] = core.memory, core.arrays
    for register, word in values.items():
      if register in self._slot_of:
        words[self._slot_of[register]] = word
    return words

  def _link(self) -> list[Block]:
    branches = self._branches()
    ends = {at: self._end_of_slots(at, target) for at, target in branches.items()}
    leaders = sorted({0, *branches.values(), *ends.values()} - {len(self._bundles)})
    places = {at: place for place, at in enumerate(leaders)} | {len(self._bundles): len(leaders)}
    blocks, waiting = [], collections.deque(sorted(branches))
    for place, (start, end) in enumerate(zip(leaders, [*leaders[1:], len(self._bundles)])):
      inside, waits = [], 0
      while waiting and waiting[0] < end:
        at = waiting.popleft()
        target = places[branches[at]]
        inside.append(Branch(self._taken(at), target, places[ends[at]] - 1, target <= place))
        if self._nops_are_joined:
          waits += max(0, self._slots - (ends[at] - at - 1))
      following = place + 1 if place + 1 < len(leaders) else None
      blocks.append(self._block(start, end, waits, tuple(inside), following))
    return blocks

  def _taken(self, at: int) -> int:
    """The slot that says whether the branch of a bundle is taken."""
    return self._slot(("taken", at))

  def _end_of_slots(self, at: int, target: int) -> int:
    """The bundle after those that a branch still runs.

    Where empty bundles are joined, the first one ends them, unless an operation after it depends on
    the predicate of the branch, or a region ends after it that began before the branch: these are
    operations that must not run if the branch is taken, and the end of the block of the branch. A
    region that began before the loop of a branch goes on after the loop.
    """
    end = min(at + self._slots + 1, len(self._bundles))
    if not self._nops_are_joined:
      return end
    rest = range(at + 1, end)
    starts = (place for place in rest if self._bundles[place].regions or place == target)
    inside = range(at, next(starts, end))
    branch = next(jump for jump in self._bundles[at].operations if jump.code.startswith("sbr"))
    predicate = branch.predicate.number if branch.predicate is not None else None
    first = target if target <= at else 0
    began = lambda region: first <= self._starts.get(region, math.inf) <= at
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
    self, start: int, end: int, waits: int, branches: tuple[Branch, ...], following: int | None
  ) -> Block:
    segments: list[tuple[tuple[Step, ...], Effect | None, int]] = []
    steps: list[Step] = []
    cycles = 0
    for at, bundle in enumerate(self._bundles[start:end], start):
      for item in self._bundle(at, bundle):
        if isinstance(item, tuple):
          steps.append(item)
        else:
          segments.append((tuple(steps), item, cycles))
          steps = []
      cycles += 1 + bundle.delay
    if steps:
      segments.append((tuple(steps), None, cycles))
    units = tuple(map(sum, zip(*(bundle.units for bundle in self._bundles[start:end]))))
    traces = sum(bundle.traces for bundle in self._bundles[start:end])
    bundles = end - start
    products = self._products(start, end)
    return Block(
      tuple(segments), cycles + waits, products, bundles, units, branches, following, traces
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

  def _bundle(self, at: int, bundle: Bundle) -> Iterator[Step | Effect]:
    """The steps and effects of a bundle: every operand is read before the bundle writes.

    A value that the bundle itself defines is read after it is written: pointers of integers.
    """
    kept = [operation for operation in bundle.operations if self._is_kept(operation)]
    kept.sort(key=lambda operation: operation.code.startswith("int_to_ptr"))
    scope = BundleScope(at, {operation.result.number for operation in kept if operation.result})
    items: list[Step | Effect] = []
    for operation in kept:
      items += self._steps(operation, scope)
      if operation.result is not None:
        scope.written.add(operation.result.register)
    for register in scope.saved:
      yield (FUNCTIONS["smov"], self._slot(("saved", register)), self._slot(register), 0, 0)
    yield from items

  def _is_kept(self, operation: Operation) -> bool:
    if operation.code in ("sphi",) or operation.code.startswith("inlined_call_operand"):
      return False
    if operation.result is None:
      return operation.code != "sst" or self._needs_memory
    return operation.result.number in self._needed

  def _steps(self, operation: Operation, scope: BundleScope) -> list[Step | Effect]:
    code = operation.code
    if code.startswith(_EFFECTS):
      return self._effect(operation, scope)
    steps: list[Step | Effect] = []
    words = [self._word(operand, scope, steps) for operand in operation.operands]
    if code == "sst":
      if len(words) != 2:
        raise Unreadable("a store has no address and value")
      if operation.predicate is not None:
        before = self._slot("before")
        steps.append((load, before, words[0], _MEMORY, 0))
        words[1] = self._chosen(operation, words[1], before, scope, steps)
      steps.append((store, _NOTHING, words[0], words[1], _MEMORY))
      return steps
    if operation.result is None:
      raise Unreadable(f"the operation {code[:40]} is not known")
    result = self._slot(operation.result.register)
    if operation.predicate is None:
      steps.append(self._step(operation, result, words, scope, steps))
      return steps
    temporary = self._slot(("temporary", operation.result.register))
    steps.append(self._step(operation, temporary, words, scope, steps))
    otherwise = result
    if operation.otherwise is not None:
      otherwise = self._word(operation.otherwise, scope, steps)
    chosen = self._chosen(operation, temporary, otherwise, scope, steps)
    steps.append((FUNCTIONS["smov"], result, chosen, 0, 0))
    return steps

  def _step(
    self, operation: Operation, result: int, words: list[int], scope: BundleScope, steps: list
  ) -> Step:
    """The step that computes an operation."""
    code = operation.code
    if operation.result and operation.result.number in self._second_pops:
      code = "spop.drf.second"
    if code.startswith("sdivrem"):
      code = f"{code}.{operation.text}"
    if code == "sld":
      if operation.text == _CORE_ID:
        return (_load_core, result, _MEMORY, 0, 0)
      if operation.text:
        return (_load_chip, result, _MEMORY, 0, 0)
      return (load, result, words[0] if words else _NOWHERE, _MEMORY, 0)
    if code == "vld":
      return (_load_vector, result, words[0] if words else _NOWHERE, _ARRAYS, 0)
    if code.startswith("scalar_select"):
      words = [
        self._word(operation.named[name], scope, steps)
        for name in ("predicate", "on_true", "on_false")
        if name in operation.named
      ]
    compute = function(code)
    if compute is None:
      unknown: Any = Unknown(f"the operation {code[:40]} is not known")
    elif not 1 <= len(words) <= 3:
      unknown = Unknown(f"the operation {code[:40]} has {len(words)} operands")
    else:
      a, b, c = (*words, _NOTHING, _NOTHING)[:3]
      return (compute, result, a, b, c)
    return (FUNCTIONS["smov"], result, self._constant(unknown), 0, 0)

  def _chosen(
    self, operation: Operation, word: int, otherwise: int, scope: BundleScope, steps: list
  ) -> int:
    """The slot of a word that depends on the predicate of an operation."""
    assert operation.predicate is not None
    predicate = self._word((operation.predicate,), scope, steps)
    chosen = self._slot(("chosen", operation.predicate.register, len(steps)))
    words = (otherwise, word) if operation.negated else (word, otherwise)
    steps.append((select, chosen, predicate, *words))
    return chosen

  def _effect(self, operation: Operation, scope: BundleScope) -> list[Step | Effect]:
    steps: list[Step | Effect] = []
    code = operation.code
    condition = self._constant(True)
    if code.startswith("sbr"):
      if operation.predicate is not None:
        condition = self._word((operation.predicate,), scope, steps)
      negated = operation.predicate is not None and operation.negated
      steps.append(
        (FUNCTIONS["pneg" if negated else "smov"], self._taken(scope.at), condition, 0, 0)
      )
      return steps
    if operation.predicate is not None:
      false = self._constant(False)
      condition = self._chosen(operation, condition, false, scope, steps)
    words = [self._word(operand, scope, steps) for operand in operation.operands]
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
      names = [name for name in operation.named if name in self._wanted(code)]
      named = {name: self._word(operation.named[name], scope, steps) for name in names}
      named |= {"descriptor": words[0]} if code == "dma" and words else {}
      steps.append(_dma(code, condition, named))
    return steps

  def _wanted(self, code: str) -> tuple[str, ...]:
    """The named operands of a DMA that decide its time, and the contents of scalar memory."""
    if code == MESSAGE:
      return _MESSAGE_WORDS
    words = (*_DMA_WORDS, _SOURCE_FLAG) if code == "dma.general" else _DMA_WORDS
    return (*words, *_ADDRESSES) if self._keeps_addresses or "smem" in code else words

  def _word(self, operand: Operand, scope: BundleScope, steps: list) -> int:
    """The slot of an operand; sums get steps."""
    slots = []
    for term in operand:
      if isinstance(term, Value):
        old = term.register in scope.written and term.number not in scope.defined
        if old:
          scope.saved.add(term.register)
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
      steps.append((FUNCTIONS["sadd"], result, total, slot, 0))
      total = result
    return total

  def _slot(self, key: Any) -> int:
    if key not in self._slot_of:
      self._slot_of[key] = len(self._initial)
      self._initial.append(_unwritten(key))
    return self._slot_of[key]

  def _constant(self, word: Any) -> int:
    key = ("constant", type(word), word.why if isinstance(word, Unknown) else word)
    slot = self._slot(key)
    self._initial[slot] = word
    return slot

  def _address(self, allocation: Allocation) -> int:
    if allocation.name not in self._allocations:
      if self.allocations >= MOST_ALLOCATIONS:
        raise Unreadable(f"its schedule has more than {MOST_ALLOCATIONS} allocations")
      self._allocations[allocation.name] = self.allocations + 1
    return self._allocations[allocation.name] << ALLOCATION_BITS


@dataclasses.dataclass
class BundleScope:
  """What one bundle defines, and which registers it overwrites before it reads them."""

  at: int  # its number
  defined: set[int]
  written: set[str] = dataclasses.field(default_factory=set)
  saved: set[str] = dataclasses.field(default_factory=set)


def _load_core(memory: Any, _: Any, __: Any) -> Any:
  return memory.core


def _load_chip(memory: Any, _: Any, __: Any) -> Any:
  return memory.chip


def _load_vector(address: Any, arrays: Any, _: Any) -> Any:
  return arrays.first(address)


def _unwritten(key: Any) -> Unknown:
  """The word of a slot that nothing has written."""
  if not isinstance(key, str):
    return Unknown("a word has no value")
  if key.startswith(("queue", "v")):
    return Unknown("it depends on a value that vector operations compute", is_data=True)
  return Unknown(f"the register {key} has no value")


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


def _needed(
  bundles: list[Bundle], wanted: Callable[[str], tuple[str, ...]]
) -> tuple[set[int], bool]:
  """Numbers of the values on which branches, DMAs, waits and calls depend.

  Also whether they depend on scalar memory: then all that is stored there is among the values.

  Args:
    bundles: of a schedule.
    wanted: the named operands of a DMA that are kept, by its code.
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
        waiting += _values(operation, wanted(operation.code))
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
    if operation.text == BOTH:
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
