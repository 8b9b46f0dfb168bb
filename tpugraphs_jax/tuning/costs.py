"""What a compiled program costs on a TPU: its time, where the time goes, and its memory.

The time comes from the final schedules of the program's kernels (`schedule`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from tpugraphs_jax.hlo import (
  buffers,
  integers,
  meshes,
  module_graph,
  names,
  proto,
  topology,
  tpu,
  tpu_kernels,
  work,
)
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.hlo.integers import Meaning
from tpugraphs_jax.hlo.scalar_operands import scalar_operands
from tpugraphs_jax.tuning import moves
from tpugraphs_jax.tuning.schedule import chips, ici, mesh, program
from tpugraphs_jax.tuning.schedule.kernel import MEMORY, OVERHEAD, PRODUCTS

BETWEEN = "between kernels"
# What the compiler says of a program whose memory does not fit: "Used 33.78G of 31.25G hbm", or
# "the total memory required for HLO temporaries (33.51G) exceeds", which has the arguments too.
_USED = re.compile(r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT]?)\b")
_PREFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MOST_NAMED = 5
# Kernels that have only a bound take at most this share of a program that has a time; their time is
# taken to be up to so many times the bound.
_MOST_BOUNDED, _UNSURE = 0.1, 10
_MOST_VISITED = (
  200  # instructions between a kernel of the compiler's own and the one that it serves
)
_LOOPS = ("while", "scan", "fori", "map", "body", "cond", "checkpoint", "remat")  # of the program
MATTERS = 0.05  # part of a time by which what is told of it changes it
_BUSY = 0.5  # part of a kernel's time that its operations take at the peak of a busy device
# At least this share of a program's bytes comes from the memory of a device; the rest stays on the
# chip: one of 828 measured programs took less time than 0.7 of its bytes at the peak.
_MOVED_SHARE = 0.7


class Operation(NamedTuple):
  """Where an instruction of a kernel comes from."""

  name: str  # of jax, `jit(step)/dot_general`
  where: str  # its source line, `model.py:12`
  shape: tuple[int, ...]  # of its result, sorted: a change of layout can turn its dimensions


@dataclasses.dataclass(frozen=True)
class KernelCost:
  """All calls of a kernel in one run of a program.

  Attributes:
    name: of its HLO instruction.
    operation: jax's name of it, such as `dot_general`.
    scope: the modules around it, such as `CNN/Conv_1`.
    where: its source line, `model.py:12`.
    shape: of its result, `bf16[8,128]`.
    calls: how often it runs; None where that is unknown.
    milliseconds: of all calls; None where it has no time.
    stall: the share of its time in which it waits for memory; None without a schedule.
    bound: `products` where its operations at the peak of the device take at least half of its time;
      else what its schedule says: `products`, `vector work`, `memory` or `loop overhead`; empty
      without a schedule.
    cycles: the compiler's estimate; None where it has none.
    bytes_accessed: between the chip and the large memory: of a schedule what it moves.
    vmem_bytes: moved by copies on the chip; 0 without a schedule.
    dmas: copies that all calls start; 0 without a schedule.
    flops: operations of all calls, those of 8 bits half; 0 of custom calls, which do not tell.
    is_custom: whether it is a custom call, such as a Pallas kernel.
    move: what it moves, if it only changes a layout.
    operations: of its own instruction, then of the convolutions and dots inside, then of all other
      instructions inside. Of a copy of the compiler's own, which has no name, those of its operand.
    is_bound: whether its time is a lower bound: its bytes and operations at the peak of the device,
      or the compiler's cycles.
    is_loop: whether it is no kernel but the control of a loop that the compiler made, and the waits
      in it.
    why: why it has no time of its own.
  """

  name: str
  operation: str = ""
  scope: str = ""
  where: str = ""
  shape: str = ""
  calls: float | None = None
  milliseconds: float | None = None
  stall: float | None = None
  bound: str = ""
  cycles: int | None = None
  bytes_accessed: int = 0
  vmem_bytes: int = 0
  dmas: int = 0
  flops: float = 0.0
  is_custom: bool = False
  move: moves.Move | None = None
  operations: tuple[Operation, ...] = ()
  is_bound: bool = False
  is_loop: bool = False
  why: str = ""


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
  """All calls of a collective, and of those of its line that are alike, in one run of a program.

  Attributes:
    name: of its HLO instruction, or of the first of them.
    kind: such as `all-gather`, one of `collectives.KINDS`.
    axes: of the mesh along which it exchanges data.
    size: bytes of the largest of its arrays on a device.
    calls: how often it runs; 0 of one that is a part of other kernels.
    milliseconds: in which its data is under way.
    exposed_ms: of these, in which the device waits for it.
    operation: jax's name of it, such as `all_gather`.
    where: its source line, `model.py:12`.
    by: who asked for it, `FUNCTION` or `PARTITIONER`.
    is_full_copy: whether the partitioner gives the whole array to every device.
    why: why its time is that of a formula; empty if its schedule was executed.
  """

  name: str
  kind: str
  axes: tuple[str, ...]
  size: int
  calls: int
  milliseconds: float
  exposed_ms: float
  operation: str = ""
  where: str = ""
  by: str = ""
  is_full_copy: bool = False
  why: str = ""


FUNCTION, PARTITIONER = "function", "partitioner"
# jax's primitives of collectives, by which a function asks for one.
_PRIMITIVES = re.compile(
  r"p(sum|max|min|permute|gather|broadcast)|all_(gather|to_all)|ragged_all|(reduce|psum)_scatter"
)


@dataclasses.dataclass(frozen=True)
class TargetEstimate:
  """What a function costs on one generation.

  Attributes:
    target: as people write it, such as `v6e` or `v6e:2x4`.
    milliseconds: estimated time; None where it cannot be told.
    least_ms: milliseconds of all that has a time or a bound; None where there is none.
    bounded_ms: milliseconds of kernels that have only a bound.
    interval: milliseconds between which nine of ten measured programs with such an estimate lay;
      None where none was measured.
    cycles: the compiler's estimate for all kernels that have one; None if it refuses the function.
    bytes_accessed: between the chip and the large memory of the device.
    loaded: bytes of arguments that the run before has copied to the chip at its end; the first run
      copies them itself.
    flops: floating-point operations.
    memory: bytes that the compiler plans on the device.
    live: the buffers of the program over its schedule.
    needed: bytes of the device's memory, also of a program that the compiler refuses; None if they
      are unknown.
    fits: whether this memory fits on the device; None if that is unknown.
    bound: what takes the largest part of the time, as of `KernelCost`.
    groups: milliseconds by what bounds kernels, and between kernels, the most first.
    waits: the share of the time in which the program waits for memory; None without schedules.
    kernels: the dearest first.
    events: what the device does in a run, in milliseconds from its start; empty without schedules.
    communication: the collectives of a program of a mesh, the longest exposed first.
    exposed_ms: milliseconds in which the device waits for others.
    branches: conditionals of the program whose branches all count, though one of them runs.
    loops: operations that the compiler made into loops, with their steps.
    assumed: what integers mean whose values are assumed, by the name of their array.
    extremes: milliseconds with the lowest and the highest of assumed integers; None where these
      change the time by less than 5 %, or where it cannot be told.
    why: why there is no time; empty where there is one.
  """

  target: str
  milliseconds: float | None = None
  least_ms: float | None = None
  bounded_ms: float = 0.0
  interval: tuple[float, float] | None = None
  cycles: int | None = None
  bytes_accessed: int | None = None
  loaded: int = 0
  flops: float | None = None
  memory: tpu.MemoryPlan | None = None
  live: buffers.LiveMemory = buffers.LiveMemory()
  needed: int | None = None
  fits: bool | None = None
  bound: str = ""
  groups: Mapping[str, float] = dataclasses.field(default_factory=dict)
  waits: float | None = None
  kernels: tuple[KernelCost, ...] = ()
  events: tuple[program.Event, ...] = ()
  communication: tuple[CollectiveCost, ...] = ()
  exposed_ms: float = 0.0
  branches: int = 0
  loops: tuple[tuple[Operation, float], ...] = ()
  assumed: Mapping[str, Meaning] = dataclasses.field(default_factory=dict)
  extremes: tuple[float, ...] | None = None
  why: str = ""

  def __post_init__(self):
    object.__setattr__(self, "target", tpu.short_name(self.target))

  @property
  def generation(self) -> str:
    """The key of `GENERATIONS` of the target."""
    return topology.generation_of(self.target)

  @property
  def loading_ms(self) -> float:
    """Milliseconds that the first run takes longer at the most, which copies `loaded` itself."""
    return 1e3 * self.loaded / GENERATIONS[self.generation].bandwidth

  @property
  def moves_ms(self) -> float:
    """Milliseconds of kernels that only change a layout."""
    return sum(kernel.milliseconds or 0.0 for kernel in self.kernels if kernel.move)


def cost(
  compiled: tpu.TpuProgram, target: str, call: Call, placement: meshes.Placement | None = None
) -> TargetEstimate:
  """What a compiled program costs on a target.

  Args:
    compiled: the program.
    target: such as `tpu:v6e`, or `tpu:v6e:2x4`.
    call: of the function that was compiled. Integers among its arrays, where they have values, can
      tell how often a loop iterates and which tiles a kernel computes.
    placement: of the mesh of the call.
  """
  generation = topology.generation_of(target)
  module = proto.parse_module(compiled.module, where=f"program for {target}")
  known = known_integers(call.arrays)
  # jax leaves out arrays that nothing uses: parameters then have other numbers.
  values = known if parameters(module) == len(call.arrays) else {}
  operands = lambda how: scalar_operands(call, known, module, how)
  create: Callable[..., program.Simulation] = program.Simulation
  if placement is not None:
    create = functools.partial(mesh.Simulation, devices=_slice(compiled, target, placement))
    values = {}  # a parameter is a part of an array
  simulated = program.simulate(
    module, compiled.schedules, generation, arguments=values, operands=operands, create=create
  )
  scalars = [_scalar(values.get(number)) for number in range(len(call.arrays))]
  executed = simulated.kernels if simulated.milliseconds is not None else ()
  calls = {kernel.name: kernel.calls for kernel in executed}
  cycles = tpu_kernels.estimated_cycles(module, scalars, calls)
  row = TargetEstimate(
    target,
    cycles=cycles.cycles,
    bytes_accessed=cycles.work.bytes_accessed,
    loaded=sum(
      work.size(next(proto.arrays(node.shape)))
      for node in proto.instructions(module)
      if work.is_loaded_before(node)
    ),
    flops=cycles.work.flops,
    memory=compiled.memory,
    live=buffers.live_memory(module),
    needed=compiled.memory.total,
    fits=compiled.memory.total <= GENERATIONS[generation].memory,
  )
  devices = len(placement.ids) if placement else 1
  row = _by_schedule(row, _Kernels(module, cycles), simulated, cycles.work, devices)
  loops = [lacking for lacking in cycles.uncounted if lacking.kind == "loop"]
  return dataclasses.replace(row, why=f"it has {listed(loops)}") if row.why and loops else row


def without_kernels(
  module: bytes, target: str, why: str, *, fits: bool | None = None
) -> TargetEstimate:
  """The row of a program for which the compiler has planned the memory and wrote no kernels.

  Args:
    module: serialized `HloProto`, as the compiler has scheduled it.
    target: as of `cost`.
    why: what the compiler says.
    fits: whether its memory fits; None: as the plan of the compiler says, or the buffers of a
      module without one.
  """
  live = buffers.live_memory(proto.parse_module(module, where=f"program for {target}"))
  used = _USED.search(why)
  needed = round(float(used[1]) * _PREFIXES[used[2]]) if used else buffers.planned_bytes(module)
  needed = needed or live.peak_bytes
  if fits is None:
    fits = needed <= GENERATIONS[topology.generation_of(target)].memory
  return TargetEstimate(target, live=live, needed=needed, fits=fits, why=why)


def _slice(compiled: tpu.TpuProgram, target: str, placement: meshes.Placement) -> ici.Slice:
  """The devices of a program of a mesh, and the rings that the compiler made."""
  described = topology.parse(target)
  assert described is not None  # of a placement
  return ici.Slice(placement.axes, placement.ids, placement.coords, described.wrap, compiled.rings)


def _collective(
  one: ici.Communication, named: _Kernels, devices: int, to_ms: Callable[[float], float]
) -> CollectiveCost:
  """A collective with the names of its instruction."""
  described, exchange = named.described(one.name), named.described(one.exchange)
  operation = exchange.operation if exchange.operation != one.exchange else described.operation
  reduction, line = named.reduction(one.exchange)
  operation = reduction if reduction and operation == one.name else operation
  by = FUNCTION if _PRIMITIVES.match(operation) else PARTITIONER
  return CollectiveCost(
    one.name,
    one.kind,
    one.axes,
    one.size,
    one.calls,
    to_ms(max(one.cycles, one.exposed)),  # with the barrier before it
    to_ms(one.exposed),
    operation,
    exchange.where or described.where or line,
    by,
    is_full_copy=by == PARTITIONER and one.kind == "all-gather" and one.devices == devices,
    why=one.why,
  )


def _joined(collectives: Iterable[CollectiveCost]) -> tuple[CollectiveCost, ...]:
  """Collectives with one row for those of a line that are alike, the longest exposed first.

  The steps of a windowed product are alike, and their schedule does not tell them apart.
  """
  rows: dict[tuple, CollectiveCost] = {}
  for one in collectives:
    key = one.kind, one.axes, one.size, one.operation, one.where
    row = rows.get(key)
    rows[key] = (
      one
      if row is None
      else dataclasses.replace(
        row,
        calls=row.calls + one.calls,
        milliseconds=row.milliseconds + one.milliseconds,
        exposed_ms=row.exposed_ms + one.exposed_ms,
        why=row.why or one.why,
      )
    )
  return tuple(sorted(rows.values(), key=lambda row: (-row.exposed_ms, -row.milliseconds)))


def parameters(module: proto.HloModuleProto) -> int:
  """How many parameters a program has; jax leaves out arrays that nothing uses."""
  entry = next(part for part in module.computations if part.id == module.entry_computation_id)
  return sum(node.opcode == "parameter" for node in entry.instructions)


def known_integers(arrays: Sequence[Any]) -> dict[int, np.ndarray]:
  """The values of arrays of integers, by the number of the array; without large ones."""
  kinds = (jax.Array, np.ndarray, np.generic, int)
  known = {number: array for number, array in enumerate(arrays) if isinstance(array, kinds)}
  return {
    number: np.asarray(array)
    for number, array in known.items()
    if np.size(array) <= integers.MOST and _is_integer(array)
  }


def _is_integer(array: Any) -> bool:
  dtype = jax.typeof(array).dtype  # of keys none of numpy
  return any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.integer, np.bool_))


def _scalar(array: np.ndarray | None) -> int | None:
  return int(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


class _Kernels:
  """The kernels of a module, with what the compiler says of them.

  Attributes:
    counted: those that the compiler tells of, by the name of the instruction.
  """

  def __init__(self, module: proto.HloModuleProto, cycles: tpu_kernels.Cycles):
    self._module = module
    self._computations = {part.id: part for part in module.computations}
    self._nodes = {node.name: node for node in proto.instructions(module)}
    self._by_id = {node.id: node for node in proto.instructions(module)}
    self._owner = {node.id: part for part in module.computations for node in part.instructions}
    self._users: dict[int, list[proto.HloInstructionProto]] = {}
    self._callers: dict[int, proto.HloInstructionProto] = {}
    for node in self._by_id.values():
      self._callers.update(dict.fromkeys(node.called_computation_ids, node))
      for id in node.operand_ids:
        self._users.setdefault(id, []).append(node)
    self._moves = moves.moves(module)
    self.counted: dict[str, KernelCost] = {}
    for kernel in cycles.by_kernel:
      name = kernel.name
      self.counted[name] = self.described(
        name,
        cycles=kernel.cycles,
        bytes_accessed=kernel.work.bytes_accessed,
        flops=kernel.work.wide_flops,
      )
    for uncounted in cycles.uncounted:  # also of kernels above that have tiles and no estimate
      if uncounted.kind != "loop":
        name = uncounted.origin.name
        self.counted[name] = self.described(name, bytes_accessed=uncounted.bytes_accessed)

  def described(self, name: str, **numbers: Any) -> KernelCost:
    """A kernel with the names of its instruction; with a product, scope and line of the product."""
    node = self._nodes.get(name)
    if node is None:  # an instruction of the compiler's own
      return KernelCost(name, name, **numbers)
    inside = (node, *tpu_kernels.fused(node, self._computations))
    main = next((inner for inner in inside if inner.opcode in tpu_kernels.PRODUCTS), node)
    if not main.metadata.op_name:
      main = next((inner for inner in inside if inner.metadata.op_name), None) or self._served(node)
    origin, of_node = (module_graph.origin(part, self._module) for part in (main, node))
    parts = [names.operation(place.op_name) for place in (origin, of_node)]
    operation = " + ".join(dict.fromkeys(filter(None, parts))) or node.name
    return KernelCost(
      name,
      operation,
      names.scope(origin.op_name),
      origin.where or of_node.where,
      names.shape(node.shape),
      is_custom=node.opcode == "custom-call",
      move=self._moves.get(name),
      operations=self._operations(node),
      **numbers,
    )

  def reduction(self, name: str) -> tuple[str, str]:
    """The operation and the line that the computation of a reduction has.

    The reduction has lost both where the compiler made it of a reduce-scatter.
    """
    node = self._nodes.get(name)
    called = () if node is None else node.called_computation_ids
    inside = [inner for id in called for inner in self._computations[id].instructions]
    origins = [module_graph.origin(inner, self._module) for inner in inside]
    operations = [names.operation(origin.op_name) for origin in origins if origin.op_name]
    lines = [origin.where for origin in origins if origin.where]
    return next(iter(operations), ""), next(iter(lines), "")

  def _served(self, node: proto.HloInstructionProto) -> proto.HloInstructionProto:
    """The nearest instruction of the program that a kernel of the compiler's own serves.

    It uses the result of the kernel or gives it an operand; inside of a loop that the compiler made
    it is the loop.
    """
    waiting, seen = collections.deque([node]), {node.id}
    while waiting and len(seen) < _MOST_VISITED:
      near = waiting.popleft()
      if near.metadata.op_name and near.opcode != "parameter":
        return near
      operands = [self._by_id[id] for id in near.operand_ids if id in self._by_id]
      for following in (*self._users.get(near.id, []), *operands):
        if following.id not in seen:
          seen.add(following.id)
          waiting.append(following)
    caller = self._callers.get(self._owner[node.id].id)
    return node if caller is None or caller.id in seen else self._served(caller)

  def loops(self, calls: Mapping[str, float]) -> tuple[tuple[Operation, float], ...]:
    """The loops that the compiler made of another operation, with their steps.

    Args:
      calls: of all kernels by name.
    """
    found = self._loops_of_compiler(calls)
    return tuple((operation(node, self._module), steps) for node, steps, _ in found)

  def controls(self, kernels: Sequence[program.KernelTime], clock: float) -> list[KernelCost]:
    """The control of the loops that the compiler made, and the waits in them.

    Args:
      kernels: of the program.
      clock: cycles a second.
    """
    calls = {timed.name: timed.calls for timed in kernels}
    after = {timed.name: timed.after for timed in kernels}
    found = []
    for node, steps, inside in self._loops_of_compiler(calls):
      kernel = self.described(node.name)
      milliseconds = 1e3 * sum(after.get(name, 0.0) for name in inside) / clock
      if not milliseconds:
        continue
      found.append(
        dataclasses.replace(
          kernel,
          operation=f"loop of {kernel.operation}",
          shape="",
          calls=steps,
          milliseconds=milliseconds,
          bound=OVERHEAD,
          is_loop=True,
        )
      )
    return found

  def _loops_of_compiler(
    self, calls: Mapping[str, float]
  ) -> Iterator[tuple[proto.HloInstructionProto, float, list[str]]]:
    """Loops that the compiler made: the instruction, the steps, and the instructions inside."""
    for node in self._nodes.values():
      made_of = names.operation(node.metadata.op_name)
      if node.opcode == "while" and made_of and not made_of.startswith(_LOOPS):
        bodies = [self._computations[id] for id in node.called_computation_ids]
        inside = [inner.name for body in bodies for inner in body.instructions]
        steps = max((calls.get(name, 0) for name in inside), default=0)
        if steps > 1:
          yield node, steps, inside

  def conditionals(self) -> int:
    """How many conditionals the program has; others are the compiler's own."""
    nodes = self._nodes.values()
    return sum(node.opcode == "conditional" and bool(node.metadata.op_name) for node in nodes)

  def _operations(self, node: proto.HloInstructionProto) -> tuple[Operation, ...]:
    """The operations of a kernel, its own first; where it has none, those of its operand."""
    inside = (node, *tpu_kernels.fused(node, self._computations))
    products = [inner for inner in inside if inner.opcode in tpu_kernels.PRODUCTS]
    found = [operation(inner, self._module) for inner in (node, *products, *inside)]
    named = tuple(dict.fromkeys(each for each in found if each.name))
    operand = self._by_id.get(node.operand_ids[0]) if node.operand_ids else None
    return named if named or operand is None else self._operations(operand)


def operation(node: proto.HloInstructionProto, module: proto.HloModuleProto) -> Operation:
  """Where an instruction of a module comes from."""
  origin = module_graph.origin(node, module)
  return Operation(origin.op_name, origin.where, tuple(sorted(node.shape.dimensions)))


def _by_schedule(
  row: TargetEstimate,
  named: _Kernels,
  simulated: program.ProgramTime,
  done: work.Work,
  devices: int,
) -> TargetEstimate:
  """A row with the simulated time of its program, or with the reason why there is none."""
  chip = chips.chips()[row.generation]
  to_ms = lambda cycles: 1e3 * cycles / chip.clock
  calls = {timed.name: timed.calls for timed in simulated.kernels}
  kernels, groups = [], collections.defaultdict[str, float](float)
  for timed in simulated.kernels:
    kernel = named.counted.get(timed.name) or named.described(timed.name)
    milliseconds = to_ms(timed.cycles) if not timed.why else _bound_ms(row.generation, kernel)
    is_busy = kernel.flops and least_ms(row.generation, kernel.flops, 0) >= _BUSY * milliseconds
    bound = PRODUCTS if is_busy else timed.bound or MEMORY
    kernels.append(
      dataclasses.replace(
        kernel,
        calls=timed.calls,
        milliseconds=milliseconds or None,
        is_bound=bool(timed.why and milliseconds),
        stall=timed.stall / timed.cycles if timed.cycles else None,
        bound=bound,
        bytes_accessed=kernel.bytes_accessed if timed.why else timed.hbm_bytes,
        vmem_bytes=timed.vmem_bytes,
        dmas=timed.dmas,
        why=timed.why,
      )
    )
    groups[bound] += milliseconds
  groups[BETWEEN] += to_ms(simulated.between - simulated.copy_stall - simulated.link_stall)
  groups[mesh.LINKS] += to_ms(simulated.link_stall)
  groups[MEMORY] += to_ms(simulated.copy_stall)
  kernels += named.controls(simulated.kernels, chip.clock)
  counted = sum(kernel.bytes_accessed for kernel in named.counted.values())
  beside = (row.bytes_accessed or 0) - counted
  row = dataclasses.replace(
    row,
    bytes_accessed=beside + sum(kernel.bytes_accessed for kernel in kernels),
    kernels=_dearest(kernels or named.counted.values()),
    events=tuple(
      event._replace(start=to_ms(event.start), end=to_ms(event.end)) for event in simulated.events
    ),
    communication=_joined(
      _collective(one, named, devices, to_ms) for one in simulated.communication
    ),
    exposed_ms=to_ms(simulated.exposed),
    branches=named.conditionals() if simulated.conditionals else 0,
    loops=named.loops(calls),
  )
  bounded = sum(kernel.milliseconds or 0.0 for kernel in kernels if kernel.is_bound)
  total: float = to_ms(simulated.cycles) + bounded
  row = dataclasses.replace(row, least_ms=total or None, bounded_ms=bounded)
  is_unknown = any(kernel.milliseconds is None and kernel.why for kernel in kernels)
  if simulated.stopped or is_unknown or bounded > _MOST_BOUNDED * total:
    return dataclasses.replace(row, why=simulated.why)
  ends = tuple(total + to_ms(cycles - simulated.cycles) for cycles in simulated.extremes)
  stall = sum(timed.stall for timed in simulated.kernels) + simulated.copy_stall
  by_size = {name: ms for name, ms in sorted(groups.items(), key=lambda group: -group[1]) if ms > 0}
  return dataclasses.replace(
    row,
    **_time(row, total, float(least_ms(row.generation, done.wide_flops, 0))),
    assumed=simulated.assumed,
    extremes=ends if any(abs(end - total) > MATTERS * total for end in ends) else None,
    groups=by_size,
    bound=next(iter(by_size), ""),
    waits=stall / simulated.cycles if simulated.cycles else None,
  )


def _bound_ms(target: str, kernel: KernelCost) -> float:
  """Milliseconds that a kernel takes at the least; 0 where the compiler estimates no cycles for it.

  Gathers, scatters, sorts and kernels of other compilers take many times their bytes.
  """
  if not kernel.cycles:
    return 0.0
  by_work = float(least_ms(target, kernel.flops, kernel.bytes_accessed))
  return max(by_work, 1e3 * kernel.cycles / chips.chips()[target].clock)


def spread(target: str) -> tuple[float, float] | None:
  """The range of time / estimated time of nine of ten programs that were measured on a target.

  Args:
    target: a key of `GENERATIONS`.

  Returns:
    Both ends; None where no program was measured.
  """
  chip = chips.chips()[target]
  return None if chip.low is None or chip.high is None else (chip.low, chip.high)


def _time(row: TargetEstimate, milliseconds: float, least: float) -> dict[str, Any]:
  """Time and interval of a row, which are not below the time `least` of its work."""
  milliseconds = max(milliseconds, least)
  ends = spread(row.generation)
  beside = (_UNSURE - 1) * row.bounded_ms
  interval = ends and (max(ends[0] * milliseconds, least), ends[1] * milliseconds + beside)
  return {"milliseconds": milliseconds, "interval": interval}


def _dearest(kernels: Iterable[KernelCost]) -> tuple[KernelCost, ...]:
  """Kernels by their time, then by their cycles, the dearest first."""
  cost = lambda kernel: (kernel.milliseconds or 0, kernel.cycles or 0)
  return tuple(sorted(kernels, key=cost, reverse=True))


def least_ms(target: str, flops: Any, bytes_accessed: Any) -> Any:
  """Milliseconds of floating-point operations and of bytes at the peaks of a device.

  Args:
    target: a key of `GENERATIONS`.
    flops: one number, or an array of programs.
    bytes_accessed: as `flops`; `_MOVED_SHARE` of them count.
  """
  device = GENERATIONS[target]
  return 1e3 * np.maximum(flops / device.flops, _MOVED_SHARE * bytes_accessed / device.bandwidth)


def listed(uncounted: Sequence[tpu_kernels.Uncounted]) -> str:
  """Instructions by kind, jax's name and line, the commonest first."""
  kinds = {"loop": "a loop of unknown length", "kernel": "a kernel"}
  counts = collections.Counter(
    " ".join(
      filter(
        None,
        (
          kinds.get(lacking.kind, lacking.kind),
          lacking.target,
          names.operation(lacking.origin.op_name) or lacking.origin.name,
          lacking.origin.where,
        ),
      )
    )
    for lacking in uncounted
  )
  texts = [f"{count} x {name}" if count > 1 else name for name, count in counts.most_common()]
  more = [f"{len(texts) - _MOST_NAMED} more"] if len(texts) > _MOST_NAMED else []
  return ", ".join(texts[:_MOST_NAMED] + more)
