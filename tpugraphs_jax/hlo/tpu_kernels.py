"""The kernels that the TPU compiler makes of a function: tiles, graphs and estimated cycles.

All numbers are read from a module after all optimisations. They are the compiler's own
estimates and no measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
import types
from typing import Any

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.graph import TileConfigs
from tpugraphs_jax.hlo import loops, module_graph, proto, tpu, work

# The compiler writes the largest int64, or sums of it, where it has no estimate. So many cycles
# would take months.
SATURATED = 2**53
_CALLERS = ("while", "conditional", "call")
# Instructions that take no time: names of values, containers of other instructions, and copies
# beside the computation.
_FREE = frozenset(
  "after-all add-dependency async-done async-start async-update bitcast call conditional constant "
  "copy-done copy-start domain get-tuple-element opt-barrier parameter partition-id replica-id "
  "tuple while".split()
)
PRODUCTS = ("convolution", "dot")
_BOUNDS = ("kernel_window_bounds", "output_window_bounds", "input_window_bounds")  # of a window
# What is read of an instruction's JSON; the compiler writes numbers as strings.
_SCHEMA = {
  "window_config": {"estimated_cycles": (str, int), **dict.fromkeys(_BOUNDS, [(str, int)])}
}
_REGISTER = 8 * 128  # elements of a vector register; smaller results cost nothing to speak of


@dataclasses.dataclass(frozen=True)
class Window:
  """How the compiler cuts a kernel into tiles; bounds in vector registers."""

  kernel_bounds: tuple[int, ...]
  output_bounds: tuple[int, ...]
  input_bounds: tuple[int, ...]
  estimated_cycles: int | None  # None where the compiler has no estimate


@dataclasses.dataclass(frozen=True)
class KernelCycles:
  """The estimate of one kernel, over all its calls."""

  cycles: int
  origin: module_graph.Origin | None = None
  has_product: bool = False  # whether it computes a convolution or a dot
  work: work.Work = work.Work(0.0, 0)  # of all its calls

  @property
  def name(self) -> str:
    """Of its HLO instruction."""
    return self.origin.name if self.origin else ""


@dataclasses.dataclass(frozen=True)
class Uncounted:
  """An instruction whose time the compiler does not estimate; it adds nothing to the cycles.

  Attributes:
    kind: its opcode; `loop` where the length is unknown (its body is counted once), `kernel` where
      it has tiles and no estimate.
    target: of a custom call.
    origin: of the instruction.
    size: bytes of the results of all its calls.
    bytes_accessed: of all its calls, as in `work`.
  """

  kind: str
  target: str
  origin: module_graph.Origin
  size: int
  bytes_accessed: int = 0


@dataclasses.dataclass(frozen=True)
class Cycles:
  """The estimates of a program's kernels, and what has none.

  Attributes:
    by_kernel: of all kernels that are cut into tiles, 0 without an estimate.
    uncounted: the instructions without an estimate.
    work: operations and bytes of all instructions, copies beside the computation among them.
  """

  by_kernel: tuple[KernelCycles, ...]
  uncounted: tuple[Uncounted, ...]
  work: work.Work = work.Work(0.0, 0)

  @property
  def cycles(self) -> int:
    """The sum of all estimates."""
    return sum(kernel.cycles for kernel in self.by_kernel)

  @property
  def without_estimate(self) -> int:
    """How many kernels have no estimate and add nothing to the sum."""
    return sum(lacking.kind != "loop" for lacking in self.uncounted)

  @property
  def of_products(self) -> int:
    """The cycles of the kernels that compute convolutions or dots."""
    return sum(kernel.cycles for kernel in self.by_kernel if kernel.has_product)


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
  """A fused kernel, or a single instruction that the compiler cuts into tiles."""

  graph: module_graph.HloGraph  # its one configuration is the compiler's own, not labelled
  window: Window
  origin: module_graph.Origin  # of the instruction that calls the kernel

  @property
  def estimated_cycles(self) -> int | None:
    """The compiler's estimate of one call, None where it has none; no measurement."""
    return self.window.estimated_cycles


def kernels(
  function: Callable[..., Any], /, *args: Any, target: str, **kwargs: Any
) -> list[Kernel]:
  """The kernels of a function, in the order of the optimised module.

  Args:
    function: a function that jax can trace.
    *args: its example arguments, arrays or `jax.ShapeDtypeStruct`.
    target: as of `featurize`.
    **kwargs: further keyword arguments of the function.

  Returns:
    One kernel per instruction that has a window. The `TileConfigs.config_feat` `[1, 24]` of its
    graph has the window's kernel, output and input bounds.

  Raises:
    ValueError: the target is unknown, or libtpu is missing.
  """
  program = tpu.compile_function(function, args, target, kwargs=kwargs)
  return module_kernels(proto.parse_module(program.module, where=f"program for {target}"))


def module_kernels(module: proto.HloModuleProto) -> list[Kernel]:
  """As `kernels`, of a module after all optimisations."""
  fusions = [node for node in proto.instructions(module) if node.opcode == "fusion"]
  fused = {callee for fusion in fusions for callee in fusion.called_computation_ids}
  result = []
  for instruction, computation in zip(proto.instructions(module), proto.owners(module)):
    if computation.id in fused:
      continue  # instructions inside a fusion belong to the fusion's kernel
    tiles = window(instruction)
    if tiles is not None:
      kernel = _graph(instruction, computation, module, tiles)
      result.append(Kernel(kernel, tiles, module_graph.origin(instruction, module)))
  return result


def window(instruction: proto.HloInstructionProto) -> Window | None:
  """The tiles that the compiler chose for an instruction; None where it is not tiled."""
  config = proto.backend_config(instruction, _SCHEMA).get("window_config", {})
  if "estimated_cycles" not in config:
    return None
  kernel, output, operand = (tuple(map(int, config.get(name, ()))) for name in _BOUNDS)
  cycles = int(config["estimated_cycles"])
  return Window(kernel, output, operand, cycles if 0 <= cycles < SATURATED else None)


def estimated_cycles(
  module: proto.HloModuleProto,
  arguments: Sequence[int | None] = (),
  calls: Mapping[str, int] = types.MappingProxyType({}),
) -> Cycles:
  """Sums `estimated_cycles` over all kernels of the entry computation and its callees.

  All branches of a conditional count, although one runs. What is in a loop counts as often as its
  kernels were called. Without `calls` it counts as often as the module says (`loops.iterations`),
  and once where the module does not say it.

  Args:
    module: after all optimisations.
    arguments: as of `loops.iterations`.
    calls: how often each kernel was called, by name, where the schedules were executed.
  """
  computations = {computation.id: computation for computation in module.computations}
  nodes = {part.id: {node.id: node for node in part.instructions} for part in module.computations}
  lengths = {} if calls else loops.iterations(module, arguments)
  kernels, uncounted = [], []
  total = work.Work(0.0, 0, 0.0)
  entry = computations[module.entry_computation_id]
  for instruction, computation, times in _executed(entry, computations, lengths, calls):
    cost = work.count(instruction, nodes[computation.id], computations)
    total = total.plus(cost, times)
    tiles = window(instruction)
    if tiles is not None:
      kernels.append(_kernel_cycles(instruction, tiles, module, computations, times, cost))
    is_endless = lengths.get(instruction.name, 1) is None
    kind = "loop" if is_endless else _uncounted_kind(instruction, tiles)
    if kind:
      target, origin = instruction.custom_call_target, module_graph.origin(instruction, module)
      written = round(times * work.size(instruction.shape))
      moved = round(times * cost.bytes_accessed)
      uncounted.append(Uncounted(kind, target, origin, written, moved))
  return Cycles(
    tuple(kernels), tuple(uncounted), total._replace(bytes_accessed=round(total.bytes_accessed))
  )


def _executed(
  computation: proto.HloComputationProto,
  computations: work.Computations,
  lengths: Mapping[str, float | None],
  calls: Mapping[str, int],
  times: float = 1,
) -> Iterator[tuple[proto.HloInstructionProto, proto.HloComputationProto, float]]:
  """Instructions that run, with their computation, and how often they run."""
  for instruction in computation.instructions:
    yield instruction, computation, times
    if instruction.opcode in _CALLERS:
      length = lengths.get(instruction.name)
      inner = times * (1 if length is None else length)
      inner = _called(instruction, computations, calls) or inner
      for callee in instruction.called_computation_ids:
        yield from _executed(computations[callee], computations, lengths, calls, inner)


def _called(
  instruction: proto.HloInstructionProto, computations: work.Computations, calls: Mapping[str, int]
) -> int:
  """How often the kernels of an instruction's callees were called; 0 where that is not known."""
  callees = [computations[callee] for callee in instruction.called_computation_ids]
  return max((calls.get(node.name, 0) for body in callees for node in body.instructions), default=0)


def _uncounted_kind(instruction: proto.HloInstructionProto, tiles: Window | None) -> str:
  """The kind of an instruction without an estimate; empty where it has one or is free."""
  if tiles is not None:
    return "" if tiles.estimated_cycles is not None else "kernel"
  if instruction.opcode == "custom-call":
    return "" if instruction.custom_call_target in work.FREE_CALLS else "custom-call"
  shapes = instruction.shape.tuple_shapes or [instruction.shape]
  is_small = all(math.prod(shape.dimensions) <= _REGISTER for shape in shapes)
  return "" if is_small or instruction.opcode in _FREE else instruction.opcode


def _kernel_cycles(
  instruction: proto.HloInstructionProto,
  tiles: Window,
  module: proto.HloModuleProto,
  computations: work.Computations,
  times: float,
  cost: work.Work,
) -> KernelCycles:
  """The estimate of a kernel that is called `times` times, at the cost of a call."""
  nodes = [instruction, *fused(instruction, computations)]
  has_product = any(node.opcode in PRODUCTS for node in nodes)
  cycles, origin = tiles.estimated_cycles or 0, module_graph.origin(instruction, module)
  done = work.Work(0.0, 0).plus(cost, times)
  return KernelCycles(round(times * cycles), origin, has_product, done)


def fused(
  instruction: proto.HloInstructionProto, computations: work.Computations
) -> Iterator[proto.HloInstructionProto]:
  """All instructions inside a fusion."""
  if instruction.opcode == "fusion":
    for callee in instruction.called_computation_ids:
      for node in computations[callee].instructions:
        yield node
        yield from fused(node, computations)


def _graph(
  instruction: proto.HloInstructionProto,
  computation: proto.HloComputationProto,
  module: proto.HloModuleProto,
  tiles: Window,
) -> module_graph.HloGraph:
  name = instruction.name
  kernel = proto.HloModuleProto(name=name, stack_frame_index=module.stack_frame_index)
  by_id = {part.id: part for part in module.computations}
  if instruction.opcode == "fusion":
    body = by_id[instruction.called_computation_ids[0]]
  else:
    body = _alone(instruction, computation)
  callees = [by_id[callee] for node in body.instructions for callee in node.called_computation_ids]
  kernel.computations.extend([*_with_callees(callees, by_id), body])
  kernel.entry_computation_id = body.id
  op_graph = module_graph.featurize_module(kernel, where=f"kernel {name}", name=name)
  feat = columns.released_tile_features(
    [tiles.kernel_bounds], [tiles.output_bounds], [tiles.input_bounds]
  )
  return op_graph.as_kernel(TileConfigs(feat, np.zeros(1, np.int64), np.ones(1, np.int64)))


def _with_callees(
  computations: list[proto.HloComputationProto], by_id: dict
) -> Iterator[proto.HloComputationProto]:
  """Computations and all their callees, each once, callees first."""
  order: dict[int, proto.HloComputationProto] = {}

  def visit(computation: proto.HloComputationProto) -> None:
    for node in computation.instructions:
      for callee in node.called_computation_ids:
        visit(by_id[callee])
    order.setdefault(computation.id, computation)

  for computation in computations:
    visit(computation)
  return iter(order.values())


def _alone(
  instruction: proto.HloInstructionProto, computation: proto.HloComputationProto
) -> proto.HloComputationProto:
  """A computation of one instruction, its operands as parameters."""
  nodes = {node.id: node for node in computation.instructions}
  body = proto.HloComputationProto(name=instruction.name, id=computation.id, root_id=instruction.id)
  for number, operand in enumerate(dict.fromkeys(instruction.operand_ids)):
    node = nodes[operand]
    body.instructions.add(
      name=node.name, opcode="parameter", id=operand, parameter_number=number, shape=node.shape
    )
  body.instructions.append(instruction)
  return body
