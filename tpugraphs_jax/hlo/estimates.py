"""The TPU compiler's own estimates, read from a module after all optimisations."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import json

from tpugraphs_jax.hlo import proto

# What the compiler writes where it has no estimate: the largest int64.
_NO_ESTIMATE = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class KernelCycles:
  """The estimate of one kernel, of all its calls."""

  names: tuple[str, ...]  # jax's: of the kernel, of convolutions and dots in it, of the others
  cycles: int


@dataclasses.dataclass(frozen=True)
class Cycles:
  """The sum of the estimates of a program's kernels."""

  cycles: int
  kernels: int  # how many instructions the compiler cuts into tiles
  loops_counted_once: int  # loops whose number of turns is not known
  without_estimate: int = 0  # kernels that the compiler has no estimate of; they count nothing
  by_kernel: tuple[KernelCycles, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Window:
  """How the compiler cuts a kernel into tiles; bounds in vector registers."""

  kernel_bounds: tuple[int, ...]
  output_bounds: tuple[int, ...]
  input_bounds: tuple[int, ...]
  estimated_cycles: int | None  # None where the compiler has no estimate


def window(instruction: proto.HloInstructionProto) -> Window | None:
  """The window that the compiler chose for an instruction, if it has one."""
  config = _backend_config(instruction).get("window_config", {})
  if "estimated_cycles" not in config:
    return None
  bounds = (tuple(int(bound) for bound in config.get(f"{name}_window_bounds", ()))
            for name in ("kernel", "output", "input"))
  cycles = int(config["estimated_cycles"])
  return Window(*bounds, None if cycles >= _NO_ESTIMATE else cycles)


def estimated_cycles(module: proto.HloModuleProto) -> Cycles:
  """Sums `estimated_cycles` over what the entry computation does.

  The body of a loop counts as often as the loop turns: `known_trip_count` where
  the compiler left it, else the bound that the loop's condition compares its
  counter with (jax's scans count from 0 by 1); once where neither is found.
  Instructions without an estimate, such as a reshape that moves data, count
  nothing.
  """
  computations = {computation.id: computation for computation in module.computations}
  return _sum(computations, computations[module.entry_computation_id])


def _sum(computations: dict, computation: proto.HloComputationProto) -> Cycles:
  kernels = unknown = missing = 0
  by_kernel: list[KernelCycles] = []
  for instruction in computation.instructions:
    found = window(instruction)
    if found is not None:
      kernels += 1
      by_kernel.append(KernelCycles(
          _names(instruction, computations), found.estimated_cycles or 0))
      missing += found.estimated_cycles is None
    if instruction.opcode not in ("while", "conditional", "call"):
      continue
    callees = [computations[callee] for callee in instruction.called_computation_ids]
    turns = 1
    if instruction.opcode == "while":
      turns = _turns(instruction, callees[1])
      unknown, turns = unknown + (turns is None), 1 if turns is None else turns
    for callee in callees:
      inside = _sum(computations, callee)
      kernels += inside.kernels
      by_kernel += [KernelCycles(each.names, turns * each.cycles) for each in inside.by_kernel]
      unknown += inside.loops_counted_once
      missing += inside.without_estimate
  return Cycles(
      sum(each.cycles for each in by_kernel), kernels, unknown, missing, tuple(by_kernel))


def _names(instruction: proto.HloInstructionProto, computations: dict) -> tuple[str, ...]:
  """The names of a kernel and of what is fused into it, see `KernelCycles`."""
  fused = [node for node in _fused(instruction, computations) if node.metadata.op_name]
  fused.sort(key=lambda node: node.opcode not in ("convolution", "dot"))
  names = (instruction.metadata.op_name, *(node.metadata.op_name for node in fused))
  return tuple(dict.fromkeys(filter(None, names)))


def _fused(
    instruction: proto.HloInstructionProto, computations: dict
) -> Iterator[proto.HloInstructionProto]:
  if instruction.opcode == "fusion":
    for callee in instruction.called_computation_ids:
      for node in computations[callee].instructions:
        yield node
        yield from _fused(node, computations)


def _turns(
    loop: proto.HloInstructionProto, condition: proto.HloComputationProto
) -> int | None:
  known = _backend_config(loop).get("known_trip_count", {}).get("n")
  if known is not None:
    return int(known)
  nodes = {node.id: node for node in condition.instructions}
  root = nodes[condition.root_id]
  if root.opcode != "compare":
    return None
  bounds = [number for operand in root.operand_ids for number in nodes[operand].literal.s32s]
  return bounds[0] if len(bounds) == 1 and bounds[0] >= 0 else None


def _backend_config(instruction: proto.HloInstructionProto) -> dict:
  if not instruction.backend_config.startswith(b"{"):
    return {}
  return json.loads(instruction.backend_config)
