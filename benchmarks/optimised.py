"""The kernels that an optimised module starts, and the time that a GPU needs at least for them."""

from __future__ import annotations

import collections
from collections.abc import Iterator
import glob
import json
import math
from pathlib import Path
import re
from typing import Any, NamedTuple

from benchmarks.gpus import Gpu
from tpugraphs_jax.hlo import loops, proto

# Instructions that start no kernel.
_FREE = {
  "parameter",
  "constant",
  "tuple",
  "get-tuple-element",
  "bitcast",
  "after-all",
  "partition-id",
  "replica-id",
  "opt-barrier",
  "domain",
}
_CALLS = ("while", "conditional", "call")
# Bytes of an element, by XLA's number of the type.
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 16: 2}
_FLOAT32 = 11
_STRIDED = re.compile(r" scatter\(.*scatter_dims_to_operand_dims=\{[1-9]")
Instruction, Shape = proto.HloInstructionProto, proto.ShapeProto


class Kernel(NamedTuple):
  """An instruction that starts a kernel."""

  instruction: Instruction
  inputs: list[Shape]
  times: int  # how often it runs
  in_loop: bool


class Module:
  """An optimised module.

  Args:
    compiled: of `jax.stages.Lowered.compile`.
  """

  def __init__(self, compiled: Any):
    module = compiled.runtime_executable().hlo_modules()[0]
    self._text = module.to_string()
    self.proto = proto.parse_module(
      module.as_serialized_hlo_module_proto(), where="optimised module"
    )
    self._parts = {part.id: part for part in self.proto.computations}
    self._iterations = loops.iterations(self.proto)
    self.kernels = list(self._started(self._parts[self.proto.entry_computation_id], 1, False))

  def counts(self) -> dict[str, int]:
    """Numbers of kernels that a step starts, of all-reduces, and of slow forms of them."""
    opcodes = [
      instruction.opcode for part in self.proto.computations for instruction in part.instructions
    ]
    return {
      "kernels": sum(kernel.times for kernel in self.kernels),
      "kernels_in_loops": sum(kernel.times for kernel in self.kernels if kernel.in_loop),
      "all_reduces": sum(opcode in ("all-reduce", "all-reduce-start") for opcode in opcodes),
      "gathers": opcodes.count("gather"),
      "scatters": opcodes.count("scatter"),
      "strided_scatters": len(_STRIDED.findall(self._text)),
    }

  def times(self, gpu: Gpu, *, exact: bool) -> dict[str, float]:
    """Milliseconds of a step: `estimated_ms` and `roofline_ms`.

    The roofline of a kernel is the larger of its bytes by the bandwidth of the memory and its
    products by their peak. The estimate is that of XLA's cost models, and the roofline for kernels
    with products, which these models do not know.

    Args:
      gpu: to run on.
      exact: products of float32 are computed in float32 and not in TF32.
    """
    result = collections.Counter()
    for kernel in self.kernels:
      flops = self._flops(kernel)
      peaks = {kind: self._peak(gpu, kind, exact) for kind in flops}
      roofline_us = max(
        self._bytes(kernel) / gpu.gb_per_s / 1e3,
        sum(flops[kind] / peaks[kind] / 1e6 for kind in flops),
      )
      known = None if flops else _known_us(kernel.instruction)
      result["roofline_ms"] += kernel.times * roofline_us / 1e3
      result["estimated_ms"] += kernel.times * (roofline_us if known is None else known) / 1e3
    return dict(result)

  def _started(self, part: Any, times: int, in_loop: bool) -> Iterator[Kernel]:
    shapes = {instruction.id: instruction.shape for instruction in part.instructions}
    for instruction in part.instructions:
      callees = [self._parts[callee] for callee in instruction.called_computation_ids]
      if instruction.opcode == "while":
        body, _ = callees  # the condition starts nothing
        count = self._iterations[instruction.name]
        yield from self._started(body, times * (1 if count is None else round(count)), True)
      elif instruction.opcode in _CALLS:
        for callee in callees:
          yield from self._started(callee, times, in_loop)
      elif instruction.opcode not in _FREE and not instruction.opcode.endswith("-done"):
        yield Kernel(
          instruction, [shapes[operand] for operand in instruction.operand_ids], times, in_loop
        )

  def _flops(self, kernel: Kernel) -> dict[int, float]:
    """Operations of products by XLA's number of the type of their inputs."""
    result = collections.Counter()
    gemm = _config(kernel.instruction).get("gemm_backend_config")
    if gemm:
      axes = gemm["dot_dimension_numbers"].get("lhs_contracting_dimensions", ())
      _add_product(result, kernel.inputs[0], kernel.instruction.shape, map(int, axes))
    alone = kernel.instruction, dict(zip(kernel.instruction.operand_ids, kernel.inputs))
    for instruction, shapes in (alone, *self._inside(kernel.instruction)):
      if instruction.opcode == "dot":
        _add_product(
          result,
          shapes[instruction.operand_ids[0]],
          instruction.shape,
          instruction.dot_dimension_numbers.lhs_contracting_dimensions,
        )
    return result

  def _inside(self, fusion: Instruction) -> Iterator[tuple[Instruction, dict[int, Shape]]]:
    """Instructions of a fusion and of fusions in it, with the shapes around each."""
    for callee in fusion.called_computation_ids if fusion.opcode == "fusion" else ():
      body = self._parts[callee].instructions
      shapes = {instruction.id: instruction.shape for instruction in body}
      for instruction in body:
        yield instruction, shapes
        yield from self._inside(instruction)

  def _bytes(self, kernel: Kernel) -> int:
    """Bytes read and written; of an array that is gathered from or scattered into, the rows."""
    fusion = kernel.instruction
    if fusion.opcode != "fusion":
      return sum(map(_size, [*kernel.inputs, fusion.shape]))
    body = self._parts[fusion.called_computation_ids[0]].instructions
    shapes = {instruction.id: instruction.shape for instruction in body}
    users = collections.defaultdict(list)
    for instruction in body:
      for place, operand in enumerate(instruction.operand_ids):
        users[operand].append((place, instruction))
    total, in_place = 0, 0
    for instruction in body:
      if instruction.opcode != "parameter":
        continue
      whole, some = _size(instruction.shape), 0
      for place, user in users[instruction.id]:
        if user.opcode in ("gather", "dynamic-slice") and place == 0:
          some += _size(user.shape)
        elif user.opcode in ("scatter", "dynamic-update-slice") and place == 0:
          update = _size(shapes[user.operand_ids[2 if user.opcode == "scatter" else 1]])
          some, in_place = some + update, in_place + max(whole - update, 0)
        else:
          some = whole
      total += min(some, whole)
    return total + max(_size(fusion.shape) - in_place, 0)

  @staticmethod
  def _peak(gpu: Gpu, kind: int, exact: bool) -> float:
    if kind != _FLOAT32:
      return gpu.half_tflops if gpu.tf32_tflops else gpu.exact_tflops
    return gpu.exact_tflops if exact else gpu.tf32_tflops or gpu.exact_tflops


def launched(folder: str) -> dict[str, int]:
  """Counts kernels with a slow launch or slow code, from the files that XLA dumped to a folder.

  Returns:
    `one_block`: kernels on one multiprocessor; `atomic_loops`: kernels that add by comparing and
    swapping until nobody was faster.
  """
  read = lambda pattern: [Path(path).read_text() for path in glob.glob(f"{folder}/{pattern}")]
  grids = [
    grid
    for text in read("*thunk_sequence.txt")
    for grid in re.findall(r"grid: \[(\d+), (\d+), (\d+)\]", text)
  ]
  kernels = [part for text in read("*.ptx") for part in text.split(".visible .entry ")[1:]]
  return {
    "one_block": grids.count(("1", "1", "1")),
    "atomic_loops": sum(bool(re.search(r"\batom\.[a-z.]*cas", part)) for part in kernels),
  }


def _add_product(result: Any, left: Shape, output: Shape, axes: Any) -> None:
  while output.tuple_shapes:  # beside a workspace
    output = output.tuple_shapes[0]
  contracted = math.prod(left.dimensions[axis] for axis in axes)
  result[left.element_type] += 2 * math.prod(output.dimensions) * contracted


def _known_us(instruction: Instruction) -> float | None:
  """Microseconds by XLA's cost models; None where they know nothing."""
  costs = {
    cost.get("name", ""): float(cost.get("exec_time_us", 0))
    for cost in _config(instruction).get("reification_cost", ())
  }
  return costs.get("indexing-cost-model", costs.get(""))


def _size(shape: Shape) -> int:
  if shape.tuple_shapes:
    return sum(map(_size, shape.tuple_shapes))
  return _BYTES.get(shape.element_type, 0) * math.prod(shape.dimensions)


def _config(instruction: Instruction) -> dict:
  text = instruction.backend_config
  return json.loads(text) if text.startswith(b"{") else {}
