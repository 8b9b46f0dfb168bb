"""The time of one kernel from its schedule."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any

from tpugraphs_jax.tuning.schedule import executor, linker
from tpugraphs_jax.tuning.schedule.arrays import Arrays, pointer_of, WORD
from tpugraphs_jax.tuning.schedule.bundles import MESSAGE, UNITS, Unreadable
from tpugraphs_jax.tuning.schedule.chips import Chip
from tpugraphs_jax.tuning.schedule.dma import Dmas, known
from tpugraphs_jax.tuning.schedule.words import Memory, MOST_WORDS, Unknown

# Of two cores of a chip that execute one program: each signals to the other, and waits for it.
SIGNAL, BARRIER = "vsyncadd.remote", "vwait.ge.trace"
# The sender of a message waits until the queue of the other core has room.
_QUEUED = "vwait.lt.trace"
PRODUCTS, VECTOR, MEMORY, OVERHEAD = "products", "vector work", "memory", "loop overhead"
_SLOTS = (2, 4, 3)  # operations of each unit that a bundle has at most, of today's generations
SCALAR = "<no memory space>"  # where operands are that a register itself holds
# Events for a profiler that wait until they are written, without a wait of the core: more than a
# kernel writes unless libtpu was asked for the regions of Pallas kernels. Not measured.
_MOST_TRACES = 1024
_STALLED = 1 / 3  # share of waiting from which a kernel is bound by memory
_BUSY = 0.2  # share of a unit's slots from which it bounds a kernel
_POINTERS = 0x30000000  # addresses of arrays that nothing else has given an address
_POINTER_BITS = 18
# In the flag of a DMA that one core of a v5p starts for both: it raises the flag of each of them.
# The number of the flag stands behind these bits once more.
_BOTH_CORES, _OF_BOTH = 0x6000 << 16, 16
_OF_OTHER_CORE = 0x24000  # bits of the flags of a message: of the receiver, and of what has left
_OFFSET = 3  # bits of a flag's place among those of its allocation
_IS_READ = 1 << 27  # in the overrides of a general DMA: it comes from the HBM
_WORD = 0xFFFFFFFF
_COMPUTED = Unknown("it depends on a word that was computed or read from an array")
# A kernel of XLA runs what a word decides for all data; Pallas kernels leave out tiles by words.
_COMPUTED_OF_XLA = Unknown(_COMPUTED.why, is_data=True)
# Words of a DMA's descriptor in scalar memory (v2 and v3) and the bits that are read of them.
_DESTINATION, _SOURCE, _SIZE, _FLAG = 1, 4, 6, 7
_SIZE_MASK, _FLAG_BITS, _HBM_BIT = 0xFFFFF, 0x1C00, 0x200


@dataclasses.dataclass(frozen=True)
class Cost:
  """What one call of a kernel takes.

  Attributes:
    cycles: from its first bundle to its last one.
    stall: cycles in which it waits for DMAs.
    hbm_bytes: moved between HBM and the chip.
    vmem_bytes: moved on the chip by DMAs.
    dmas: how many it starts.
    bundles: how many are executed.
    units: operations of the matrix, the vector and the load and store units that are executed.
    written: words that it copies from scalar memory into its outputs, by the number of the output.
    branches: how often it runs what data decides.
    has_open_loops: whether nothing but data ends one of its loops.
    limit: what bounds it, where something else than its operations and its memory does.
  """

  cycles: float
  stall: float
  hbm_bytes: int
  vmem_bytes: int
  dmas: int
  bundles: int
  units: tuple[int, ...]
  written: Mapping[int, Sequence[Any]] = dataclasses.field(default_factory=dict)
  branches: int = 0
  has_open_loops: bool = False
  limit: str = ""

  @property
  def bound(self) -> str:
    """What bounds the kernel: `products`, `vector work`, `memory` or `loop overhead`."""
    if self.limit:
      return self.limit
    if self.stall > _STALLED * self.cycles:
      return MEMORY
    shares = [count / slots / max(self.bundles, 1) for count, slots in zip(self.units, _SLOTS)]
    busiest = max(range(len(UNITS)), key=shares.__getitem__)
    if shares[busiest] < _BUSY:
      return OVERHEAD
    return PRODUCTS if busiest == 0 else VECTOR


@dataclasses.dataclass(frozen=True)
class Message:
  """Words that one core of a chip sends to the other one.

  Attributes:
    arrival: when it is there, in cycles since the kernel began.
    size: in granules.
    address: in scalar memory.
    words: from there on.
  """

  arrival: float
  size: int
  address: int
  words: Sequence[Any]


Messages = dict[int, collections.deque[Message]]  # by the flag to which they add


class KernelCore:
  """A core that executes one kernel; see `linker.Core`.

  Attributes:
    loops: those that data may end.
    received: messages of the other core, which has room for all of them: a sender never waits.
    sent: messages to the other core.
  """

  loops: executor.DataLoops

  def __init__(self, chip: Chip, arrays: Arrays, busy: float = 0.0):
    self.memory, self.arrays = Memory(_COMPUTED), arrays
    self.dmas = Dmas(chip, busy)
    self.stall, self.branches = 0.0, 0
    self._next_start = 0.0  # when a DMA can be started
    self.received: Messages = {}
    self.sent: Messages = collections.defaultdict(collections.deque)
    self._chip = chip

  def start_dma(self, code: str, now: float, arguments: Mapping[str, Any]) -> float:
    waited = max(0.0, self._next_start - now)
    self._next_start = now + waited + self._chip.start
    self._start_dma(code, now + waited, arguments)
    return waited

  def _start_dma(self, code: str, now: float, arguments: Mapping[str, Any]) -> None:
    if code == "dma":
      self._start_descriptor(now, arguments.get("descriptor"))
      return
    if code == MESSAGE:
      self._send(now, arguments)
      return
    source, _, destination = code.removeprefix("dma.").partition("_to_")
    spaces = source, destination
    if code == "dma.general":
      is_read = arguments.get("overrides", _IS_READ)
      is_written = isinstance(is_read, int) and not is_read & _IS_READ
      spaces = ("vmem", "hbm") if is_written else ("hbm", "vmem")
    size, flag = arguments.get("size_in_granules"), arguments.get("dst_syncflagno")
    flag = _own_flag(flag) if isinstance(flag, int) else flag
    moved = self.dmas.start(spaces, now, size, flag)
    if destination == "smem":
      start = known(arguments.get("smem"), "the address that a DMA writes in scalar memory")
      words = self.arrays.read(source, arguments.get(source)) or ()
      self.memory.fill(start, moved // WORD, words)
    elif source == "smem":
      self._write(arguments.get("smem"), destination, arguments.get(destination), moved)

  def _send(self, now: float, arguments: Mapping[str, Any]) -> None:
    """Sends words to the other core of the chip."""
    names = ("src", "dst", "size_in_granules", "dst_syncflagno", "src_syncflagno")
    source, address, size, flag, own = (known(arguments.get(name), name) for name in names)
    own &= ~_OF_OTHER_CORE
    moved = self.dmas.start(("smem", "smem"), now, size, own)
    arrival, _ = self.dmas.flags[own].arrivals[-1]
    count = min(moved // WORD, MOST_WORDS)
    words = [self.memory[source + place] for place in range(count)]
    message = Message(arrival, size, address, words)
    self.sent[flag & ~_OF_OTHER_CORE].append(message)

  def _receive(self, flag: Any, count: Any) -> None:
    """Keeps the words of the messages for which a wait lasts."""
    messages = self.received.get(flag, ()) if isinstance(flag, int) else ()
    missing = known(count, "the count of a wait")
    while messages and missing > 0:
      message = messages.popleft()
      missing -= message.size
      self.dmas.arrive(flag, message.arrival, message.size)
      self.memory.fill(message.address, len(message.words), message.words)

  def _start_descriptor(self, now: float, descriptor: Any) -> None:
    """Starts the DMA that scalar memory describes."""
    start = known(descriptor, "the descriptor of a DMA")
    word = lambda place: known(self.memory[start + place], "a word of a DMA's descriptor")
    space = lambda place: "hbm" if word(place) & _HBM_BIT else "vmem"
    spaces = space(_SOURCE), space(_DESTINATION)
    size, flag = word(_SIZE) & _SIZE_MASK, word(_FLAG) & ~_FLAG_BITS
    self.dmas.start(spaces, now, size, flag)

  def _write(self, source: Any, space: str, destination: Any, size: int) -> None:
    """Keeps the words that leave scalar memory for an array."""
    if isinstance(source, int):
      count = min(size // WORD, MOST_WORDS)
      words = [self.memory[source + place] for place in range(count)]
      self.arrays.copy(space, destination, words)

  def wait(self, code: str, now: float, flag: Any, count: Any) -> float:
    if code == BARRIER:
      self.dmas.add(now, flag, count)  # by the other core of the chip, which does the same
      return 0.0
    if code == _QUEUED:
      return 0.0
    if code not in ("dma.done.wait", "vwait.ge"):
      raise Unreadable(f"the operation {code[:40]} is not known")
    if self.received:
      self._receive(flag, count)
    waited = self.dmas.wait(now, flag, count)
    self.stall += waited
    return waited + self._cost_of_wait(flag)

  def _cost_of_wait(self, flag: Any) -> float:
    """Cycles that the core needs to await a DMA with this flag, also one that has arrived."""
    return self._chip.wait

  def sync(self, code: str, now: float, flag: Any, count: Any) -> None:
    if code == "vsyncadd":
      self.dmas.add(now, flag, count)
    elif code not in ("vsyncpa", SIGNAL):  # a reset, which the schedule pairs with its waits
      raise Unreadable(f"the operation {code[:40]} is not known")

  def call(self, name: str, now: float, arguments: Mapping[str, Any]) -> float:
    raise Unreadable("it calls another kernel")

  def choose(self, unknown: Unknown, branch: linker.Branch) -> bool:
    """Runs what vector operations decide; which tiles scalar operands choose has to be known."""
    if branch.is_backward:
      return self.loops.goes_on(unknown, branch)
    if not unknown.is_data:
      raise Unreadable(unknown.why)
    self.branches += 1
    return False


def _free_places(words: Iterable[Any]) -> Iterator[int]:
  """Addresses for arrays, which no word has as an address or as a pointer of a DMA."""
  both = lambda address: {address, pointer_of(address)}
  taken = set[int]().union(*(both(word) for word in words if isinstance(word, int)))
  places = (_POINTERS + (number << _POINTER_BITS) for number in itertools.count(1))
  return (place for place in places if taken.isdisjoint(both(place)))


def _own_flag(flag: int) -> int:
  """The flag of one core in that of a DMA for both cores."""
  if flag & _BOTH_CORES != _BOTH_CORES:
    return flag
  return flag & ~(_BOTH_CORES | (flag & _OFFSET) << _OF_BOTH)


def simulate(
  schedule: linker.Schedule,
  chip: Chip,
  *,
  registers: Mapping[str, Any] | None = None,
  operands: Mapping[int, Sequence[int]] | None = None,
  iterations: int = 10,
  is_of_xla: bool = False,
  busy: float = 0.0,
  core: Callable[[Chip, Arrays, float], KernelCore] = KernelCore,
) -> Cost:
  """The cost of one call of a kernel.

  Args:
    schedule: of the kernel.
    chip: constants of its generation.
    registers: words in registers where the call gives them.
    operands: words of inputs that scalar memory needs, such as scalar prefetch, by index.
    iterations: of a loop that nothing but data ends.
    is_of_xla: whether XLA made the kernel.
    busy: cycles for which the HBM still moves what was started before the call.
    core: makes the core that executes it.

  Raises:
    Unreadable: the kernel has no time; the message says why.
  """
  open_loops: set[int] = set()
  while True:
    loops = lambda: executor.DataLoops(iterations, open_loops)
    try:
      return _simulate(
        schedule, chip, registers or {}, operands or {}, loops, is_of_xla, busy, core
      )
    except executor.Open as loop:
      open_loops.add(loop.args[0])


def _simulate(
  schedule: linker.Schedule,
  chip: Chip,
  registers: Mapping[str, Any],
  operands: Mapping[int, Sequence[int]],
  loops: Callable[[], executor.DataLoops],
  is_of_xla: bool,
  busy: float,
  core: Callable[[Chip, Arrays, float], KernelCore],
) -> Cost:
  words = dict(registers)
  arrays, places = Arrays(chip.granule), _free_places(registers.values())
  outputs: dict[int, tuple[str, int]] = {}
  for register, (name, space) in schedule.operands.items():
    kind, _, index = name.partition(" ")
    is_read = kind in ("input", "const") and register in schedule.read_operands
    given = operands.get(int(index)) if is_read else None
    if space == SCALAR:
      if given is not None and len(given) == 1:
        words[register] = given[0] & _WORD if isinstance(given[0], int) else given[0]
      elif register not in words:
        words[register] = Unknown(
          f"the scalar operand {index} has no value: data decides it, or integers without values"
        )
      continue
    if not isinstance(words.get(register), int):
      words[register] = next(places)
    arrays.write(words[register], given)
    if kind == "output":
      outputs[int(index)] = space, words[register]
  last = 0.0
  messages: Messages = {}
  for number in (1, 0) if schedule.has_messages else (0,):  # the second core of a chip sends
    unit = core(chip, arrays, busy)
    unit.loops, unit.memory.core, unit.received = loops(), number, messages
    if is_of_xla:
      unit.memory.unwritten = _COMPUTED_OF_XLA
    cycles, counts = executor.run(schedule, unit, schedule.registers(unit, words), chip)
    last, messages = max(last, cycles), unit.sent
  executed = [(count, block) for count, block in zip(counts, schedule.blocks) if count]
  units = [
    sum(count * block.units[unit] for count, block in executed) for unit in range(len(UNITS))
  ]
  traces = sum(count * block.traces for count, block in executed)
  return Cost(
    max(last, (traces - _MOST_TRACES) * chip.trace),
    unit.stall,
    unit.dmas.hbm_bytes,
    unit.dmas.chip_bytes,
    unit.dmas.count,
    sum(count * block.bundles for count, block in executed),
    tuple(units),
    {n: found for n, place in outputs.items() if (found := arrays.written(*place))},
    unit.branches,
    unit.loops.has_open,
  )
