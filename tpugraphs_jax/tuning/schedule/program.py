"""The time of a whole program from the schedules of its kernels.

libtpu writes one more schedule, `TLP`: the code that calls the kernels. It is executed like a
kernel, so that calls have their order, loops the number of their iterations, scalars their values,
and copies that run beside the computation their time.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import copy
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tpugraphs_jax.hlo import integers, loops, proto, work
from tpugraphs_jax.hlo.integers import Meaning
from tpugraphs_jax.hlo.scalar_operands import ScalarOperands
from tpugraphs_jax.tuning.schedule import bundles, executor, ici, kernel, linker
from tpugraphs_jax.tuning.schedule.arrays import Arrays, WORD
from tpugraphs_jax.tuning.schedule.bundles import Unreadable
from tpugraphs_jax.tuning.schedule.chips import Chip, chips
from tpugraphs_jax.tuning.schedule.dma import Flag, HOST, HostLink, known
from tpugraphs_jax.tuning.schedule.kernel import Cost
from tpugraphs_jax.tuning.schedule.words import Memory, MOST_WORDS, parameter_number, Unknown

PROGRAM = "TLP"  # the name under which libtpu writes the program
_RUNTIME = "<late-"  # calls that begin and end a program; they are not part of its time
_SPARSE = b"sparse_core_config"
_NAMED = 3  # kernels in a sentence
# Iterations of a loop that nothing but data ends: assumed, and the ends between which they lie.
_ITERATIONS = {integers.LOWEST: 1, integers.ASSUMED: 10, integers.HIGHEST: 100}
_MOST_EVENTS = 200_000  # of a run that are kept
# A word that the runtime writes: whether the program before has loaded an array for this one, as it
# has where a program runs again and again.
_RUNTIME_WORD = Unknown("it depends on a word of the runtime", guess=1)
_DATA = Unknown("it depends on data", is_data=True)


CALL, DMA, LINK, WAIT = "call", "DMA", "link", "wait"  # units of events


class Event(NamedTuple):
  """What the core or a DMA does in a run.

  Attributes:
    start, end: cycles from the start of the program.
    unit: `call` of a kernel, `DMA` that the program starts, `link`: a DMA to another chip, or
      `wait` of the program for one of these.
    name: of the instruction of the kernel or the collective; of a DMA in the chip its memories,
      such as `hbm_to_vmem`; of a wait for it empty.
    size: bytes of a DMA.
  """

  start: float
  end: float
  unit: str
  name: str = ""
  size: int = 0


@dataclasses.dataclass(frozen=True)
class KernelTime:
  """All calls of a kernel in one run of a program.

  Attributes:
    name: of its HLO instruction.
    calls: how often it runs.
    cycles, stall, hbm_bytes, vmem_bytes, dmas, bundles: sums over all calls, as of `kernel.Cost`.
    units: executed operations of the matrix, vector, and load and store units, of all calls.
    bound: `products`, `vector work`, `memory` or `loop overhead`, of its longest call.
    twin: the kernel whose schedule it shares; empty if it has its own.
    why: why it has no time; empty if it has one.
    after: cycles from the ends of its calls to the next kernels; 0 in a program of a mesh.
  """

  name: str
  calls: int = 0
  cycles: float = 0.0
  stall: float = 0.0
  hbm_bytes: int = 0
  vmem_bytes: int = 0
  bundles: int = 0
  units: tuple[int, ...] = (0, 0, 0)
  dmas: int = 0
  bound: str = ""
  twin: str = ""
  why: str = ""
  after: float = 0.0


@dataclasses.dataclass(frozen=True)
class ProgramTime:
  """The simulated time of a program.

  Attributes:
    milliseconds: of one run; None if it cannot be told.
    why: why there is no time; empty if there is one.
    cycles: of one run, without the parts that have no time.
    between: cycles outside of kernels: calls, and waits for copies that run beside them.
    copy_stall: cycles of `between` that wait for such copies.
    kernels: the longest first.
    conditionals: how many branches depend on data; all their sides are counted.
    has_open_loops: whether nothing but data ends a loop; its iterations are assumed.
    assumed: what integers mean whose values are assumed, by the name of their array.
    extremes: cycles of one run with the lowest and the highest of these; empty where none is
      assumed.
    stopped: why its execution did not come to its end; empty if it did, also where kernels have no
      time.
    events: the first 200,000 of the run, by their starts.
    communication: the collectives of a program of a mesh.
    exposed: cycles in which the device waits for others.
    link_stall: those of `between` among them.
  """

  milliseconds: float | None
  why: str
  cycles: float
  between: float
  copy_stall: float
  kernels: tuple[KernelTime, ...]
  conditionals: int
  stopped: str = ""
  has_open_loops: bool = False
  assumed: Mapping[str, Meaning] = dataclasses.field(default_factory=dict)
  extremes: tuple[float, ...] = ()
  events: tuple[Event, ...] = ()
  communication: tuple[ici.Communication, ...] = ()
  exposed: float = 0.0
  link_stall: float = 0.0


def simulate(
  module: proto.HloModuleProto,
  schedules: Mapping[str, str],
  target: str,
  *,
  arguments: Mapping[int, np.ndarray] | None = None,
  operands: Callable[[str], ScalarOperands] = lambda how: ScalarOperands(),
  create: Callable[..., Simulation] | None = None,
) -> ProgramTime:
  """The time of a compiled program; it never raises for what the schedules contain.

      folder = tempfile.mkdtemp()            # of a child process that compiles
      environ |= schedule_dump.environment(folder)    # with this environment
      compiled = tpu.compile_function(...)   # in the child
      module = proto.parse_module(compiled.module, where="program")
      time = program.simulate(module, compiled.schedules, "tpu:v6e")
      time.milliseconds or time.why
      {instruction.name: instruction for instruction in proto.instructions(module)}  # of kernels

  Args:
    module: after all optimisations.
    schedules: texts by kernel, as `tpu.TpuProgram.schedules` has them.
    target: such as `tpu:v6e`.
    arguments: values of the program's parameters where they are known, by number: integers that
      kernels read as scalars, such as the group sizes of a ragged product.
    operands: gives the inputs of kernels that the program computes, with values that nothing tells
      as `how` of `integers.Meaning.draw`.
    create: makes the simulation; None: `Simulation`.
  """
  given = operands(integers.ASSUMED)
  simulation = (create or Simulation)(
    module, schedules, target, arguments=arguments, operands=given.values
  )
  time = simulation.time()
  assumed = {**given.assumed, **simulation.instructions.integers.assumed}
  if time.has_open_loops:
    limits = (_ITERATIONS[integers.ASSUMED],)
    assumed["loop"] = Meaning(integers.ITERATIONS, limits, "which nothing but data ends")
  if not assumed or time.stopped:
    return time
  ends = [
    simulation.at(how, operands(how).values).time().cycles
    for how in (integers.LOWEST, integers.HIGHEST)
  ]
  return dataclasses.replace(time, assumed=assumed, extremes=tuple(ends))


class Simulation:
  """A compiled program whose schedules are read once; arguments as of `simulate`."""

  def __init__(
    self,
    module: proto.HloModuleProto,
    schedules: Mapping[str, str],
    target: str,
    *,
    arguments: Mapping[int, np.ndarray] | None = None,
    operands: Mapping[str, Mapping[int, np.ndarray]] | None = None,
  ):
    self._module, self._arguments = module, arguments or {}
    self.instructions = _Instructions(module, self._arguments, operands or {}, integers.ASSUMED)
    self.schedules, self._chip = schedules, chips()[target]
    self.how = integers.ASSUMED
    self.open_loops = set[int]()  # the words of branches of loops that nothing but data ends
    self.costs: dict[tuple, Cost] = {}  # of calls of kernels, by all on which they depend
    self._linked: dict[str, linker.Schedule | Unreadable] = {}

  def time(self, chip: Chip | None = None) -> ProgramTime:
    """The time of one run, with the constants of the target or others of the same generation."""
    run = self.start(chip or self._chip)
    stopped = ""
    try:
      cycles = run.execute()
    except executor.Open as loop:
      self.open_loops.add(loop.args[0])
      return self.time(chip)
    except Unreadable as error:
      cycles, stopped = run.cycles_of_kernels, f"the program has no time: {error}"
    why = stopped
    rows = [dataclasses.replace(row, after=run.after[row.name]) for row in run.rows.values()]
    rows.sort(key=lambda row: -row.cycles)
    missing = [row for row in rows if row.why]
    if not why and missing:
      named = ", ".join(f"{row.name}: {row.why}" for row in missing[:_NAMED])
      more = f", and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
      why = f"{len(missing)} kernels have no time: {named}{more}"
    milliseconds = None if why else 1e3 * cycles / (chip or self._chip).clock
    between = cycles - run.cycles_of_kernels
    return ProgramTime(
      milliseconds,
      why,
      cycles,
      between,
      run.copy_stall,
      tuple(rows),
      run.conditionals,
      stopped,
      run.has_open_loops,
      events=tuple(sorted(run.events)),
      communication=tuple(run.communication.values()),
      exposed=run.exposed,
      link_stall=run.link_stall,
    )

  def start(self, chip: Chip) -> Run:
    """A run that has not begun."""
    return Run(self, chip)

  def at(self, how: str, operands: Mapping[str, Mapping[int, np.ndarray]]) -> Simulation:
    """The program with other values of the integers that nothing tells.

    Args:
      how: as of `integers.Meaning.draw`.
      operands: as of the class.
    """
    other = copy.copy(self)
    other.how = how
    other.instructions = _Instructions(self._module, self._arguments, operands, how)
    return other

  def linked(self, name: str) -> linker.Schedule:
    """The schedule of a kernel, or of the program itself.

    Raises:
      Unreadable: there is none, or it cannot be read.
    """
    if name not in self._linked:
      first = 0 if name == PROGRAM else self.linked(PROGRAM).allocations
      try:
        if name not in self.schedules:
          raise Unreadable("the compiler wrote no schedule of the program")
        self._linked[name] = linker.Schedule(
          bundles.parse(self.schedules[name]),
          slots=self._chip.slots,
          nops_are_joined=self._chip.nops_are_joined,
          first_allocation=first,
          keeps_addresses=name == PROGRAM,
        )
      except Unreadable as error:
        self._linked[name] = error
    found = self._linked[name]
    if isinstance(found, Unreadable):
      raise found
    return found

  def source(self, name: str) -> str:
    """The kernel whose schedule is that of a kernel.

    Raises:
      Unreadable: there is none.
    """
    return name if name in self.schedules else self.instructions.twin(name, self.schedules)


@dataclasses.dataclass(frozen=True)
class SparseCall:
  """A kernel that a SparseCore runs while the core goes on.

  Attributes:
    work: of a call.
    near: instructions of its computation.
    beside: of these, those that are scheduled between its start and the wait for it.
    iterations: of the loops around it.
  """

  work: work.Work
  near: tuple[str, ...]
  beside: tuple[str, ...]
  iterations: int


@dataclasses.dataclass
class _Copy:
  """A DMA that the program starts; its bytes move when no kernel uses the HBM."""

  flag: int
  size: int
  left: float  # bytes
  start: float
  code: str
  moved: int  # bytes


class Run:
  """One execution of a program; also the core of `linker.Core` that executes it."""

  def __init__(self, simulation: Simulation, chip: Chip):
    self.memory, self.arrays = Memory(_RUNTIME_WORD), Arrays(chip.granule)
    self.rows: dict[str, KernelTime] = {}
    self.after = collections.defaultdict[str, float](float)  # cycles until the next kernel, by name
    self._last = "", 0.0  # the last kernel and its end
    self.conditionals = 0
    self.has_open_loops = bool(simulation.open_loops)
    self.copy_stall = 0.0
    self.exposed = 0.0  # cycles in which it waits for other devices
    self.link_stall = 0.0  # of these outside of kernels
    self.communication: dict[str, ici.Communication] = {}
    self.events: list[Event] = []
    self._simulation, self._chip = simulation, chip
    self._flags: dict[int, Flag] = {}
    self._loops = executor.DataLoops(_ITERATIONS[simulation.how], simulation.open_loops)
    self._copies: list[_Copy] = []
    self._host = HostLink(chip)
    self._moved_until = 0.0

  @property
  def cycles_of_kernels(self) -> float:
    return sum(row.cycles for row in self.rows.values())

  def execute(self) -> float:
    """The cycles of the program."""
    chip, schedule = self._chip, self._simulation.linked(PROGRAM)
    cycles, _ = executor.run(schedule, self, schedule.registers(self, {}), chip)
    sparse = self._simulation.instructions.sparse
    if not self.rows and not sparse:
      raise Unreadable("its schedule calls no kernel")
    free = {name: row.cycles / row.calls for name, row in self.rows.items()}
    for name, started in sparse.items():
      near = (self.rows[other].calls for other in started.near if other in self.rows)
      calls = max(near, default=started.iterations)
      took = self._on_sparse_core(name, started)
      hidden = 0.0
      for other in started.beside:  # each hides as much as it takes
        part = min(free.get(other, 0.0), took - hidden)
        hidden += part
        free[other] = free.get(other, 0.0) - part
      exposed, moved = calls * (took - hidden), calls * started.work.bytes_accessed
      self.rows[name] = KernelTime(name, calls, exposed, exposed, moved, bound=kernel.MEMORY)
      self._after_sparse_core(name, calls, took, took - hidden)
      self._record(cycles, cycles + exposed, CALL, name)
      cycles += exposed
    return cycles

  def _on_sparse_core(self, name: str, started: SparseCall) -> float:
    """Cycles of a kernel of a SparseCore, which has no schedule: bytes at the memory's rate."""
    return started.work.bytes_accessed / self._chip.rate(is_written=False, is_mixed=True)

  def _after_sparse_core(self, name: str, calls: int, took: float, exposed: float) -> None:
    """Takes note of the calls of a kernel of a SparseCore, and of the cycles of one."""

  def _record(self, start: float, end: float, unit: str, name: str = "", size: int = 0) -> None:
    if len(self.events) < _MOST_EVENTS:
      self.events.append(Event(start, end, unit, name, size))

  def call(self, name: str, now: float, arguments: Mapping[str, Any]) -> float:
    if name.startswith(_RUNTIME):
      return 0.0
    row = self.rows.get(name) or KernelTime(name)
    try:
      twin, cost = self._cost(name, arguments)
    except Unreadable as error:
      self.rows[name] = dataclasses.replace(row, calls=row.calls + 1, why=str(error))
      return 0.0
    self.rows[name] = with_cost(row, cost, "" if twin == name else twin)
    self.after[self._last[0]] += now - self._last[1]
    self._last = name, now + cost.cycles
    self._record(now, now + cost.cycles, CALL, name)
    rate = self._chip.bytes_per_cycle
    self._move(now + cost.cycles, max(0.0, cost.cycles - cost.hbm_bytes / rate) * rate)
    return cost.cycles

  def _cost(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, Cost]:
    """The kernel whose schedule is executed, and what a call takes."""
    source = self._simulation.source(name)
    schedule = self._simulation.linked(source)
    words, inputs = self._inputs(schedule, name, arguments)
    contents = tuple((index, tuple(known)) for index, known in sorted(inputs.items()))
    costs = self._simulation.costs
    key: tuple = (source, self._chip, tuple(sorted(words.items())), contents)
    if key in costs and costs[key].has_open_loops:
      key = (*key, self._simulation.how)
    if key not in costs:
      iterations = _ITERATIONS[self._simulation.how]
      costs[key] = kernel.simulate(
        schedule,
        self._chip,
        registers=words,
        operands=inputs,
        iterations=iterations,
        is_of_xla=self._simulation.instructions.is_of_xla(source),
      )
    cost = costs[key]
    self.has_open_loops |= cost.has_open_loops
    for register, (description, _) in schedule.operands.items():
      kind, _, index = description.partition(" ")
      if kind == "output" and isinstance(arguments.get(register), int):
        self.arrays.write(arguments[register], cost.written.get(int(index)))
    return source, cost

  def _inputs(
    self, schedule: linker.Schedule, name: str, arguments: Mapping[str, Any]
  ) -> tuple[dict[str, int], dict[int, Sequence[Any]]]:
    """The words in the registers of a kernel, and those of its inputs by their numbers."""
    instructions = self._simulation.instructions
    words: dict[str, int] = {}
    inputs: dict[int, Sequence[Any]] = {}
    for register in schedule.read_operands:
      description, space = schedule.operands[register]
      kind, _, index = description.partition(" ")
      word = arguments.get(register)
      if isinstance(word, int):
        words[register] = word
      if kind == "input" and (space != kernel.SCALAR or not isinstance(word, int)):
        known = instructions.words(name, int(index))
        if known is None and isinstance(word, int):
          known = self.arrays.written(space, word) or self._parameter(word)
        if known is not None:
          inputs[int(index)] = known
        elif space == kernel.SCALAR and word is not None and instructions.is_of_xla(name):
          words[register] = 0
    return words, inputs

  def _parameter(self, address: Any) -> Sequence[Any] | None:
    """The words of the program's parameter at an address; None where they are not known."""
    number = parameter_number(address) if address.__class__ is int else None
    return None if number is None else self._simulation.instructions.parameter(number)

  def start_dma(self, code: str, now: float, arguments: Mapping[str, Any]) -> float:
    self._move(now)
    flag = known(arguments.get("dst_syncflagno"), "the flag of a copy")
    size = known(arguments.get("size_in_granules"), "the size of a copy")
    source, _, destination = code.removeprefix("dma.").partition("_to_")
    moved = size * self._chip.granule
    times = (source, destination).count("hbm")
    from_, to = arguments.get(source), arguments.get(destination)
    contents = self.arrays.read(source, from_) or self._parameter(from_)
    if destination == "smem":
      start = known(to, "the address that a copy writes in scalar memory")
      count = moved // WORD
      self.memory.fill(start, count, contents or [_DATA] * min(count, MOST_WORDS))
    else:
      self.arrays.copy(destination, to, contents)
    code = code.removeprefix("dma.")
    if times and HOST not in (source, destination):
      self._copies.append(_Copy(flag, size, times * moved, now, code, moved))
    else:
      # A copy to or from the host takes a fiftieth of what the HBM can move.
      on_chip = now + moved / self._chip.vmem
      arrival = self._host.move((source, destination), now, moved) if times else on_chip
      self._record(now, arrival, DMA, code, moved)
      self._flag(flag).arrivals.append((arrival, size))
    return 0.0  # a program starts few

  def _move(self, now: float, free: float | None = None) -> None:
    """Moves the bytes of copies until now.

    Args:
      now: cycle.
      free: bytes that the HBM can move beside kernels; None: all that its bandwidth allows.
    """
    before = min(self._moved_until, now)
    most = (now - before) * self._chip.bytes_per_cycle if free is None else free
    left = most
    self._moved_until = max(self._moved_until, now)
    while self._copies and left >= self._copies[0].left:
      copy = self._copies.pop(0)
      left -= copy.left
      moved = now - (now - before) * (left / most if most else 0.0)
      arrival = max(moved, copy.start) + self._chip.latency
      self._record(copy.start, arrival, DMA, copy.code, copy.moved)
      self._flag(copy.flag).arrivals.append((arrival, copy.size))
    if self._copies:
      self._copies[0].left -= left

  def wait(self, code: str, now: float, flag: Any, count: Any) -> float:
    self._move(now)
    waiting, count = self._flag(known(flag, "the flag of a wait")), known(count, "a count")
    if code == kernel.BARRIER:
      waiting.count += count
      return 0.0
    waited = 0.0
    while waiting.reaches(count) is None and self._copies:
      waited += self._copies[0].left / self._chip.bytes_per_cycle
      self._move(now + waited, self._copies[0].left)
    arrival = waiting.reaches(count)
    if arrival is None and self._simulation.instructions.sparse:
      waiting.count = count  # of a SparseCore, which has no schedule
      return 0.0
    if arrival is None:
      raise Unreadable("the program waits for a copy that nothing starts")
    waited = max(waited, arrival - now)
    self.copy_stall += waited
    if waited:
      self._record(now, now + waited, WAIT)
    return waited + self._chip.wait

  def sync(self, code: str, now: float, flag: Any, count: Any) -> None:
    if code == "vsyncadd":
      count = known(count, "what is added to a flag")
      changed = self._flag(known(flag, "a flag"))
      changed.settle(now)
      changed.count += count - (1 << 32) if count >= 1 << 31 else count

  def _flag(self, address: int) -> Flag:
    return self._flags.setdefault(address, Flag())

  def choose(self, unknown: Unknown, branch: linker.Branch) -> bool:
    """Runs all sides of what depends on data, one after the other.

    A loop that data may end goes on until its counter ends it; without a counter it has assumed
    iterations.
    """
    if branch.is_backward:
      return self._loops.goes_on(unknown, branch)
    if unknown is not _RUNTIME_WORD and unknown.guess is None:
      self.conditionals += 1
    return False


def with_cost(row: KernelTime, cost: Cost, twin: str) -> KernelTime:
  """A row with one more call."""
  return dataclasses.replace(
    row,
    calls=row.calls + 1,
    cycles=row.cycles + cost.cycles,
    stall=row.stall + cost.stall,
    hbm_bytes=row.hbm_bytes + cost.hbm_bytes,
    vmem_bytes=row.vmem_bytes + cost.vmem_bytes,
    bundles=row.bundles + cost.bundles,
    dmas=row.dmas + cost.dmas,
    units=tuple(map(sum, zip(row.units, cost.units))),
    bound=row.bound or cost.bound,
    twin=twin,
  )


class _Instructions:
  """The instructions of a module that kernels are made of, by name."""

  def __init__(
    self,
    module: proto.HloModuleProto,
    arguments: Mapping[int, np.ndarray],
    operands: Mapping[str, Mapping[int, np.ndarray]],
    how: str,
  ):
    self._by_name = {node.name: node for node in proto.instructions(module)}
    self._by_id = {node.id: node for node in proto.instructions(module)}
    self._callees = {computation.id: computation for computation in module.computations}
    entry = next(part for part in module.computations if part.id == module.entry_computation_id)
    self._parameters = {
      node.parameter_number: node.id for node in entry.instructions if node.opcode == "parameter"
    }
    self.integers = integers.Integers(module, arguments, how)
    self._operands = operands
    self._words: dict[int, Sequence[int] | None] = {}
    self.sparse = dict(_sparse_calls(module, self._callees))

  def inputs(self, node: proto.HloInstructionProto) -> list[proto.ShapeProto]:
    return [self._by_id[operand].shape for operand in node.operand_ids if operand in self._by_id]

  def is_of_xla(self, name: str) -> bool:
    """Whether XLA made a kernel: a scalar that data decides is then the offset of a slice.

    The offset moves the windows of the kernel and not their number; it is taken as 0.
    """
    node = self._by_name.get(name)
    return node is not None and node.opcode != "custom-call"

  def twin(self, name: str, schedules: Mapping[str, str]) -> str:
    """The kernel with a schedule that is equal to one without: libtpu writes it once.

    Raises:
      Unreadable: there is none.
    """
    node = self._by_name.get(name)
    if node is None:
      raise Unreadable("the compiler wrote no schedule of it")
    form = self._form(node)
    for other in schedules:
      if other in self._by_name and self._form(self._by_name[other]) == form:
        return other
    raise Unreadable(f"the compiler wrote no schedule of this {node.opcode}")

  def _form(self, node: proto.HloInstructionProto) -> tuple:
    """What two equal kernels have in common."""
    shapes = [
      shape.SerializeToString(deterministic=True) for shape in (node.shape, *self.inputs(node))
    ]
    inside = [
      inner.opcode
      for callee in node.called_computation_ids
      if callee in self._callees
      for inner in self._callees[callee].instructions
    ]
    return node.opcode, node.custom_call_target, *shapes, *inside

  def words(self, name: str, index: int) -> Sequence[int] | None:
    """The words of an integer input of a kernel; None where they are not known."""
    node = self._by_name.get(name)
    given = self._operands.get(name, {}).get(index)
    if given is not None:
      return np.asarray(given).reshape(-1).tolist()
    if node is None or index >= len(node.operand_ids):
      return None
    return self._integers(node.operand_ids[index])

  def parameter(self, number: int) -> Sequence[int] | None:
    """The words of a parameter of integers; None where they are not known."""
    return self._integers(self._parameters[number]) if number in self._parameters else None

  def _integers(self, id: int) -> Sequence[int] | None:
    if id not in self._words:
      words = self.integers.words(id)
      self._words[id] = None if words is None else tuple(words.tolist())
    return self._words[id]


def _sparse_calls(
  module: proto.HloModuleProto, computations: Mapping[int, proto.HloComputationProto]
) -> Iterator[tuple[str, SparseCall]]:
  """What SparseCores run, by the instruction that starts it."""
  lengths: dict[str, float | None] | None = None
  callers = {id: node for node in proto.instructions(module) for id in node.called_computation_ids}
  owners = {node.name: part for part in module.computations for node in part.instructions}
  for part in module.computations:
    nodes = {node.id: node for node in part.instructions}
    order = [id for id in module.schedule.sequences[part.id].instruction_ids if id in nodes]
    place = {id: number for number, id in enumerate(order or nodes)}
    for node in part.instructions:
      if node.opcode != "async-start" or _SPARSE not in node.backend_config:
        continue
      if lengths is None:
        lengths = loops.iterations(module)
      ends = [place[user.id] for user in part.instructions if node.id in user.operand_ids]
      last = min(ends, default=place[node.id])
      beside = [nodes[id].name for id in list(place)[place[node.id] : last]]
      iterations, inside = 1.0, part
      while (caller := callers.get(inside.id)) is not None:
        iterations *= lengths.get(caller.name) or 1
        inside = owners[caller.name]
      names = tuple(other.name for other in part.instructions)
      done = work.count(node, nodes, computations)
      yield node.name, SparseCall(done, names, tuple(beside), round(iterations))
