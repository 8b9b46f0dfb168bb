"""The time of a program of a mesh: one of its devices, with the DMAs that go to others.

A collective is a kernel of its own, or a part of the program: DMAs that start there, arrive beside
other kernels, and are awaited. Both are executed at the time of the program, since links and flags
are shared. What a device waits for is exposed communication.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import math
from typing import Any

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.hlo import collectives, proto, tpu_kernels
from tpugraphs_jax.tuning.schedule import ici, kernel, program
from tpugraphs_jax.tuning.schedule.arrays import Arrays
from tpugraphs_jax.tuning.schedule.bundles import MESSAGE, Unreadable
from tpugraphs_jax.tuning.schedule.chips import Chip
from tpugraphs_jax.tuning.schedule.dma import Flag, known
from tpugraphs_jax.tuning.schedule.words import ALLOCATION_BITS, Memory, Unknown

LINKS = "links"  # what bounds a kernel that communicates
_BYTES = {kind.number: int(kind.bytes) for kind in columns.ELEMENT_TYPES}
# Marks of the trace around the barrier with which the program begins; it waits for all devices.
_LAUNCH = "vtrace 2952790016", "vtrace 3221225472"
_EXCHANGES = ("vsyncadd.remote", "shard-recv-wait", "shard-send-wait", "kind: const")
_COMPUTED_CHIP = "remote-chip-id */"  # comment of the id of a neighbour that no table has
# Bits of the flag of a DMA: it is another chip's, which core's, and whether the DMA counts as 1.
_REMOTE, _MODES, _COUNTS_ONCE = 0x4000, 0x3E000, 0x10000
_GENERAL = ("dma.general", MESSAGE)  # DMAs that may go to another device
_ID = 0x3FFF  # bits of the id of a chip
_CORE_OF_CHIP = 26  # bits below the number of its core
_MOST_PROBED = 32  # DMAs from whose destinations neighbours are learned
_HALF, _WHOLE = 1 << 31, 1 << 32


def _without_launch(text: str) -> str:
  """The schedule of a program without the barrier with which it begins."""
  start, end = (text.find(mark) for mark in _LAUNCH)
  if not 0 <= start < end:
    return text
  return text[: text.find("\n", start) + 1] + text[text.rfind("\n", 0, end) + 1 :]


def _awaits_signals(code: str, signal: float, flag: Flag | None, count: Any) -> bool:
  """Whether a wait is for the signals of neighbours.

  Args:
    code: of the wait. That of 7x is a wait for any flag.
    signal: when this device has sent its signals.
    flag: for which it waits.
    count: of the flag.
  """
  if code != "vwait.ge":
    return code == kernel.BARRIER
  is_reached = flag is not None and flag.reaches(known(count, "a count")) is not None
  return signal > -math.inf and not is_reached


def _shifted(event: program.Event, cycles: float) -> program.Event:
  return event._replace(start=event.start + cycles, end=event.end + cycles)


class Simulation(program.Simulation):
  """A program of a mesh whose schedules are read once.

  Args:
    module, schedules, target: as of `program.Simulation`.
    devices: of the program.
    options: further ones of `program.Simulation`.
  """

  def __init__(
    self,
    module: proto.HloModuleProto,
    schedules: Mapping[str, str],
    target: str,
    devices: ici.Slice,
    **options: Any,
  ):
    schedules = dict(schedules)
    if program.PROGRAM in schedules:
      schedules[program.PROGRAM] = _without_launch(schedules[program.PROGRAM])
    super().__init__(module, schedules, target, **options)
    self.devices = devices
    self.collectives = collectives.find(module, len(devices.ids))
    self.device = self._busiest()
    self._exchanges: dict[str, bool] = {}
    self._nodes = {node.name: node for node in proto.instructions(module)}
    self._computations = {part.id: part for part in module.computations}
    self.started = tuple(self._started(module, module.entry_computation_id))
    self.rings = tuple(
      name for name in self.started if any(one.groups for one in self.collectives[name])
    )

  def start(self, chip: Chip) -> program.Run:
    return MeshRun(self, chip)

  def _busiest(self) -> int:
    """The id of the device that sends and receives in most exchanges; the first of its chip."""
    several = (one for found in self.collectives.values() for one in found)
    ends = collections.Counter(end for one in several for pair in one.pairs for end in pair)
    ids = self.devices.ids
    first = [partition for partition, id in enumerate(ids) if id % self.devices.on_chip == 0]
    return ids[max(first, key=lambda partition: (ends[partition], -ids[partition]))]

  def exchanges(self, source: str) -> bool:
    """Whether the schedule of a kernel exchanges data with other devices."""
    if source not in self._exchanges:
      text = self.schedules.get(source, "")
      self._exchanges[source] = any(word in text for word in _EXCHANGES)
    return self._exchanges[source]

  def ring_of(self, name: str) -> collectives.Ring | None:
    """The table of neighbours of a kernel; that of any collective where it has none itself."""
    rings = {ring.groups: ring for ring in self.devices.rings}
    own = [rings[one.groups] for one in self.collectives.get(name, ()) if one.groups in rings]
    return next(iter(own or rings.values()), None)

  def _started(self, module: proto.HloModuleProto, computation: int) -> Iterator[str]:
    """Collectives that the program starts itself, in the order in which it does."""
    nodes = {node.id: node for node in self._computations[computation].instructions}
    order = module.schedule.sequences[computation].instruction_ids or nodes
    for node in (nodes[number] for number in order if number in nodes):
      if node.opcode in ("while", "call", "conditional"):
        for callee in node.called_computation_ids:
          yield from self._started(module, callee)
      elif node.name in self.collectives and node.name not in self.schedules:
        yield node.name

  def has_product(self, name: str) -> bool:
    """Whether a kernel computes a product beside what it exchanges."""
    node = self._nodes.get(name)
    inside = () if node is None else tpu_kernels.fused(node, self._computations)
    return any(inner.opcode in tpu_kernels.PRODUCTS for inner in inside)

  def communication(self, one: collectives.Collective) -> ici.Communication:
    """A collective without its time."""
    axes = self.devices.axes_of(one.groups or one.pairs)
    along = math.prod(self.devices.axes[axis] for axis in axes)
    devices = len(one.groups[0]) if one.groups else along
    return ici.Communication(one.owner, one.name, one.kind, axes, devices, self.size(one))

  def size(self, one: collectives.Collective) -> int:
    """Bytes of the largest array that a collective reads or writes."""
    shapes = [one.instruction.shape, *self.instructions.inputs(one.instruction)]
    return max(
      (
        math.prod(array.dimensions) * (_BYTES.get(array.element_type) or 1)
        for shape in shapes
        for array in proto.arrays(shape)
      ),
      default=0,
    )


@dataclasses.dataclass(frozen=True)
class _Exchange:
  """A call of a kernel that exchanges data, begun while no link was taken.

  Attributes:
    cost: of the kernel.
    exposed: cycles in which it waits for other devices.
    busy: cycles from its start until which each link is taken.
    sent: bytes.
    under_way: cycles from its start until its last data has arrived.
    events: from its start.
  """

  cost: kernel.Cost
  exposed: float
  busy: np.ndarray
  sent: int
  under_way: float
  events: tuple[program.Event, ...]


class _KernelMemory(Memory):
  """Scalar memory of a kernel, to which the program's allocations belong too.

  Words that nothing writes are ids of the device: 0.

  Attributes:
    is_of_program: whether the kernel used words of the program.
  """

  def __init__(self, of_program: Memory, allocations: int, chip: int):
    super().__init__(Unknown("it depends on a word that nothing writes"))
    self._of_program, self._allocations = of_program, allocations
    self.chip, self.is_of_program = chip, False

  def __getitem__(self, address: Any) -> Any:
    if self._is_shared(address):
      return self._of_program[address]
    return super().__getitem__(address)

  def __setitem__(self, address: Any, word: Any) -> None:
    if self._is_shared(address):
      self._of_program[address] = word
    else:
      super().__setitem__(address, word)

  def __missing__(self, address: Any) -> Any:
    return 0 if address.__class__ is int else super().__missing__(address)

  def _is_shared(self, address: Any) -> bool:
    found = address.__class__ is int and 0 < address >> ALLOCATION_BITS <= self._allocations
    self.is_of_program |= found
    return found


class MeshCore(kernel.KernelCore):
  """A core that executes a kernel at a time of the program.

  Attributes:
    exposed: cycles in which it waits for other devices.
    targets: of a probe: ids of the chips to which it sends before it waits for others.
    memory: scalar memory.
    uses_program: whether its time depends on flags or words of the program.
  """

  def __init__(self, run: MeshRun, chip: Chip, arrays: Arrays, start: float, device: int):
    super().__init__(chip, arrays)
    self._run, self._start, self._device = run, start, device
    chip_id = device // run.devices.on_chip
    self.memory: _KernelMemory = _KernelMemory(run.memory, run.allocations, chip_id)
    self._uses_flags = False
    self.exposed, self.targets = 0.0, list[int]()
    self._signal = -math.inf
    self._remote: set[int] = set()
    self.is_probe = False

  def start_dma(self, code: str, now: float, arguments: Mapping[str, Any]) -> float:
    flag = arguments.get("dst_syncflagno")
    if code in _GENERAL and isinstance(flag, int) and flag & _REMOTE:
      if self.is_probe:
        self.targets.append(self._run.device_of(arguments.get("overrides")))
        if len(self.targets) == _MOST_PROBED:
          raise Unreadable("the neighbours are known")
        return self._chip.link.start
      for address, arrival, size in self._run.send(self._start + now, arguments):
        if self._is_shared(address):
          self._run.flag(address).arrivals.append((arrival, size))
        else:
          arrived = arrival - self._start, size
          self.dmas.flags.setdefault(address, Flag()).arrivals.append(arrived)
        self._remote.add(address)
      return self._chip.link.start
    waited = super().start_dma(code, now, arguments)
    if code == "dma.hbm_to_smem" and self.arrays.read("hbm", arguments.get("hbm")) is None:
      self._run.assign(self.memory, arguments)
    return waited

  def wait(self, code: str, now: float, flag: Any, count: Any) -> float:
    if _awaits_signals(code, self._signal, self.dmas.flags.get(flag), count):
      if self.is_probe and self.targets:
        raise Unreadable("the neighbours are known")
      waited = max(0.0, self._signal + self._run.links.hop - now)
    elif self._is_shared(flag):
      arrival = self._run.flag(flag).reaches(known(count, "a count"))
      if arrival is None:
        raise Unreadable("it waits for a DMA of the program that nothing starts")
      waited = max(0.0, arrival - self._start - now)
    else:
      waited = super().wait(code, now, flag, count)
      self.exposed += waited if flag in self._remote else 0.0
      return waited
    self.stall += waited
    self.exposed += waited
    return waited

  @property
  def uses_program(self) -> bool:
    return self._uses_flags or self.memory.is_of_program

  def _is_shared(self, flag: Any) -> bool:
    """Whether a flag is one of the program."""
    found = isinstance(flag, int) and self._run.is_shared(flag)
    self._uses_flags |= found
    return found

  def _cost_of_wait(self, flag: Any) -> float:
    """None for DMAs of other devices: `Link.start` has it."""
    return 0.0 if flag in self._remote else super()._cost_of_wait(flag)

  def sync(self, code: str, now: float, flag: Any, count: Any) -> None:
    if code.startswith("vsyncadd.remote"):
      self._signal = now
    elif self._is_shared(flag):
      self._run.sync(code, self._start + now, flag, count)
    else:
      super().sync(code, now, flag, count)


class MeshRun(program.Run):
  """One execution of a program of a mesh.

  Attributes:
    communication: by the name of the instruction.
    links: between the chips.
    allocations: of the program.
    devices: of the program.
  """

  def __init__(self, simulation: Simulation, chip: Chip):
    super().__init__(simulation, chip)
    self._simulation: Simulation = simulation
    self.allocations = 0
    self.devices = simulation.devices
    self.links = ici.Links(self.devices, chip)
    self._device = simulation.device
    self.memory.chip = self._device // simulation.devices.on_chip
    self.communication: dict[str, ici.Communication] = {}
    self._owners: dict[frozenset, list[str]] = {}
    self._awaited: dict[int, str] = {}  # the collective of a flag
    self._under_way: dict[str, float] = {}  # until when
    self._probed: set[str] = set()
    self._made: dict[tuple, _Exchange] = {}  # by all on which a call depends
    self._signal = -math.inf
    self._current = ""
    self._sites: dict[Any, int] = {}  # where the program reads tables, in order, by their flags
    self._sends: dict[Any, int] = {}  # and where it starts equal exchanges
    self._barrier = 0.0  # cycles of a barrier, before the collective that it is for
    ids = simulation.devices.ids
    order = {name: place for place, name in enumerate(simulation.started)}
    for name in sorted(simulation.collectives, key=lambda name: order.get(name, len(order))):
      for one in simulation.collectives[name]:
        self.communication.setdefault(name, simulation.communication(one))
        transfers = {ids[source]: ids[target] for source, target in one.pairs}
        self.links.learn(transfers)
        self._own(name, transfers)
        for ring in simulation.devices.rings:
          if ring.groups == one.groups:
            successors = ring.successors(ids)
            self._own(name, successors)
            self._own(name, {after: before for before, after in successors.items()})

  def execute(self) -> float:
    self.allocations = self._simulation.linked(program.PROGRAM).allocations
    return super().execute()

  def _on_sparse_core(self, name: str, started: program.SparseCall) -> float:
    if name not in self.communication:
      return super()._on_sparse_core(name, started)
    cost = self._by_formula(name, "a SparseCore runs it, which has no schedule")
    return self._chip.link.launch * self._chip.clock + cost.cycles

  def _after_sparse_core(self, name: str, calls: int, took: float, exposed: float) -> None:
    if name in self.communication:
      found = self.communication[name]
      found.calls += calls
      found.cycles += calls * took
      found.exposed += calls * exposed
      self.exposed += calls * exposed
      self.rows[name] = dataclasses.replace(self.rows[name], bound=LINKS)

  def _own(self, name: str, transfers: Mapping[int, int]) -> None:
    self._owners.setdefault(frozenset(transfers.items()), []).append(name)

  def is_shared(self, address: int) -> bool:
    """Whether an address is one of the program and not of a kernel."""
    return 0 < address >> ALLOCATION_BITS <= self.allocations

  def flag(self, address: int) -> Flag:
    """The flag of the program at an address."""
    return self._flag(address)

  def assign(self, memory: Memory, arguments: Mapping[str, Any]) -> None:
    """Writes the runtime's table of the devices of partitions."""
    start, size = arguments.get("smem"), arguments.get("size_in_granules")
    if isinstance(start, int) and isinstance(size, int):
      words = size * self._chip.granule // kernel.WORD
      memory.fill(start, words, self._simulation.devices.ids[:words])

  def send(self, now: float, arguments: Mapping[str, Any]) -> list[tuple[int, float, int]]:
    """Starts a DMA to another chip.

    Args:
      now: cycle of the program.
      arguments: of the DMA.

    Returns:
      Flags of this device that count it, when, and how many granules: that of the DMA which the
      predecessor starts likewise, and that of the data that has left.
    """
    granules = known(arguments.get("size_in_granules"), "the size of a DMA")
    target = self._target(arguments.get("overrides"))
    size = granules * self._chip.granule
    sent, arrival = self.links.send(now, self._device, target, size)
    name = self._current or self._owner(target, arguments)
    self._record(now, arrival, program.LINK, name or "", size)
    if name:
      row, under_way = self.communication[name], self._under_way.get(name, 0.0)
      if not self._current:
        row.cycles += max(0.0, arrival - max(now, under_way))
        row.calls += row.kind == "collective-permute"
        row.exposed += self._barrier
        self._barrier = 0.0
      self._under_way[name] = max(arrival, under_way)
    source_flag = arguments.get("src_syncflagno")
    once = isinstance(source_flag, int) and source_flag & _COUNTS_ONCE
    counted = 1 if once else granules
    pairs = ((arguments.get("dst_syncflagno"), arrival), (source_flag, sent))
    found = [(flag & ~_MODES, time, counted) for flag, time in pairs if isinstance(flag, int)]
    self._awaited.update((flag, name) for flag, _, _ in found)
    return found

  def _target(self, word: Any) -> int:
    """The device to which a DMA goes; of an unknown one that of the first transfer."""
    if word.__class__ is not Unknown:
      return self.device_of(word)
    ids = self._simulation.devices.ids
    for several in self._simulation.collectives.values():
      for source, target in (pair for one in several for pair in one.pairs):
        if ids[source] == self._device:
          return ids[target]
    return self.device_of(word)

  def device_of(self, word: Any) -> int:
    """The device to which a DMA with this word goes."""
    place = known(word, "the destination of a DMA")
    core = place >> _CORE_OF_CHIP & 1
    return (place & _ID) * self.devices.on_chip + (core if self.devices.on_chip > 1 else 0)

  def _owner(self, target: int, arguments: Mapping[str, Any]) -> str:
    """The collective that sends to a device; equal ones are told apart by the flags of their DMA.

    They are started in the order of the program.
    """
    transfers = frozenset(self.links.transfers(self._device, target).items())
    names = self._owners.get(transfers)
    if not names:
      return ""
    flags = arguments.get("dst_syncflagno"), arguments.get("src_syncflagno")
    others = sum(found == transfers for found, *_ in self._sends)
    return names[self._sends.setdefault((transfers, *flags), others) % len(names)]

  def start_dma(self, code: str, now: float, arguments: Mapping[str, Any]) -> float:
    if code not in _GENERAL:
      waited = super().start_dma(code, now, arguments)
      if code == "dma.hbm_to_smem":
        self._fill(arguments)
      self._awaited.pop(known(arguments.get("dst_syncflagno"), "a flag"), None)
      return waited
    flag = arguments.get("dst_syncflagno")
    if not (isinstance(flag, int) and flag & _REMOTE):
      return super().start_dma("dma.hbm_to_vmem", now, arguments)
    self._move(now)
    if not flag >> ALLOCATION_BITS:  # of the runtime, before the program begins
      own = arguments.get("src_syncflagno")
      if isinstance(own, int):
        size = known(arguments.get("size_in_granules"), "the size of a DMA")
        self._flag(own & ~_MODES).arrivals.append((now, size))
      return self._chip.link.start
    for address, arrival, size in self.send(now, arguments):
      self._flag(address).arrivals.append((arrival, size))
    return self._chip.link.start

  def _fill(self, arguments: Mapping[str, Any]) -> None:
    """Words of the table of neighbours, or of the runtime's table, that a copy reads."""
    source = arguments.get("hbm")
    if self.arrays.read("hbm", source) is not None:
      return
    if not isinstance(source, int):
      self.assign(self.memory, arguments)
      return
    started = self._simulation.rings
    site = self._sites.setdefault(arguments.get("dst_syncflagno"), len(self._sites))
    ring = self._simulation.ring_of(started[site] if site < len(started) else "")
    if ring is not None:
      start = known(arguments.get("smem"), "an address in scalar memory")
      size = known(arguments.get("size_in_granules"), "the size of a DMA")
      words = size * self._chip.granule // kernel.WORD
      self.memory.fill(start, words, ring.table.reshape(-1).tolist()[:words])

  def wait(self, code: str, now: float, flag: Any, count: Any) -> float:
    if _awaits_signals(code, self._signal, self._flags.get(flag), count):
      self._move(now)
      waited = max(0.0, self._signal + self.links.hop - now)
      self._expose("", now, waited)
      self._barrier += waited
      return waited
    if not (isinstance(flag, int) and flag in self._awaited):
      return super().wait(code, now, flag, count)
    self._move(now)
    arrival = self._flag(flag).reaches(known(count, "a count"))
    if arrival is None:
      raise Unreadable("the program waits for a DMA of another device that nothing starts")
    waited = max(0.0, arrival - now)
    self._expose(self._awaited[flag], now, waited)
    return waited

  def _expose(self, name: str, now: float, waited: float) -> None:
    if name in self.communication:
      self.communication[name].exposed += waited
    self.exposed += waited
    self.link_stall += waited
    if waited:
      self._record(now, now + waited, program.WAIT, name)

  def sync(self, code: str, now: float, flag: Any, count: Any) -> None:
    if code.startswith("vsyncadd.remote"):
      self._signal = now
    else:
      super().sync(code, now, flag, count)

  def call(self, name: str, now: float, arguments: Mapping[str, Any]) -> float:
    try:
      source = self._simulation.source(name)
    except Unreadable:
      source = name
    if not self._simulation.exchanges(source) and name not in self.communication:
      return super().call(name, now, arguments)
    row = self.rows.get(name) or program.KernelTime(name)
    found = self.communication.get(name)
    self._current = name if found else ""
    try:
      if found is not None and found.kind == "ragged-all-to-all":
        raise Unreadable("data decides what it sends, and all of its array counts")
      cost, exposed = self._exchange(source, name, now, arguments)
    except Unreadable as error:
      if found is None:
        self.rows[name] = dataclasses.replace(row, calls=row.calls + 1, why=str(error))
        return 0.0
      cost, exposed = self._by_formula(name, str(error)), math.inf
    finally:
      self._current = ""
    self.rows[name] = program.with_cost(row, cost, "" if source == name else source)
    self._record(now, now + cost.cycles, program.CALL, name)
    if found is not None:
      if not self._simulation.has_product(name):
        exposed = cost.cycles
      found.calls += 1
      found.cycles += cost.cycles
      found.exposed += min(exposed, cost.cycles)
    self.exposed += min(exposed, cost.cycles)
    rate = self._chip.bytes_per_cycle
    self._move(now + cost.cycles, max(0.0, cost.cycles - cost.hbm_bytes / rate) * rate)
    return cost.cycles

  def _exchange(
    self, source: str, name: str, now: float, arguments: Mapping[str, Any]
  ) -> tuple[kernel.Cost, float]:
    """What a kernel with DMAs to other devices takes, and how long it waits for these.

    A call like one before it is not executed again, if no link is taken when they begin.
    """
    schedule = self._simulation.linked(source)
    words, inputs = self._inputs(schedule, name, arguments)
    ring = self._simulation.ring_of(name)
    for description, _ in schedule.operands.values():
      kind, _, index = description.partition(" ")
      if kind == "const" and ring is not None:
        inputs[int(index)] = ring.table.reshape(-1).tolist()
    contents = tuple((index, tuple(known)) for index, known in sorted(inputs.items()))
    key = name, tuple(sorted(words.items())), contents
    is_idle = not self.links.busy(now).any()
    if is_idle and key in self._made:
      return self._again(name, now, self._made[key])
    cores: list[MeshCore] = []

    def run(start: float, device: int, is_probe: bool = False) -> kernel.Cost:
      def core(chip: Chip, arrays: Arrays, _: float) -> MeshCore:
        cores.append(MeshCore(self, chip, arrays, start, device))
        cores[-1].is_probe = is_probe
        return cores[-1]

      return kernel.simulate(schedule, self._chip, registers=words, operands=inputs, core=core)

    computes = _COMPUTED_CHIP in self._simulation.schedules[source]
    if source not in self._probed and (ring is None or computes):
      self._probed.add(source)
      self._probe(run, cores)
    sent, first = self.links.bytes_sent, len(self.events)
    cost = dataclasses.replace(run(now, self._device), limit=LINKS)
    if is_idle and self._current and not cores[-1].uses_program:
      self._made[key] = _Exchange(
        cost,
        cores[-1].exposed,
        self.links.busy(now),
        self.links.bytes_sent - sent,
        self._under_way.get(name, now) - now,
        tuple(_shifted(event, -now) for event in self.events[first:]),
      )
    return cost, cores[-1].exposed

  def _again(self, name: str, now: float, made: _Exchange) -> tuple[kernel.Cost, float]:
    """One more call of a kernel, as `_exchange` returns it."""
    self.links.take(now, made.busy, made.sent)
    self._under_way[name] = max(now + made.under_way, self._under_way.get(name, 0.0))
    for event in made.events:
      self._record(*_shifted(event, now))
    return made.cost, made.exposed

  def _probe(self, run: Any, cores: list[MeshCore]) -> None:
    """Learns to whom each device sends, where a kernel computes it from the id of its chip."""
    targets = {}
    for device in self._simulation.devices.ids:
      try:
        run(0.0, device, is_probe=True)
      except Unreadable:
        pass
      targets[device] = cores[-1].targets
    for number in range(min(map(len, targets.values()))):
      transfers = {device: found[number] for device, found in targets.items()}
      if sorted(transfers.values()) == sorted(transfers):
        self.links.learn(transfers)

  def _by_formula(self, name: str, why: str) -> kernel.Cost:
    """A collective whose schedule cannot be executed."""
    row, simulation = self.communication[name], self._simulation
    row.why = row.why or why
    groups = next((one.groups for one in simulation.collectives[name] if one.groups), ())
    cycles = ici.formula_cycles(row.kind, row.size, groups, simulation.devices, self._chip)
    return kernel.Cost(cycles, cycles, 0, 0, 0, 0, (0, 0, 0), limit=LINKS)
