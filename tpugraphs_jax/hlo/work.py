"""Floating-point operations and bytes of the instructions of a TPU program.

They are counted in a module after all optimisations, as the compiler counts them, with two
differences. Bytes are those between the large memory of a device and the chip: an operand that
was copied to the chip before counts once, by the copy. And a caller can count an instruction as
often as it runs, where the compiler counts the body of a loop once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import math
from typing import NamedTuple

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.hlo import proto

Computations = Mapping[int, proto.HloComputationProto]
Nodes = Mapping[int, proto.HloInstructionProto]

# Instructions that move no bytes: names of values, containers of other instructions, and ends of
# copies beside the computation.
_STILL = frozenset(
  "add-dependency after-all async-done async-update bitcast call conditional constant copy-done "
  "domain get-tuple-element opt-barrier parameter partition-id replica-id tuple while".split()
)
# Custom calls that mark values, join or split the halves of 64-bit integers, or plan memory.
FREE_CALLS = frozenset(
  "AllocateBuffer AssumeGatherIndicesInBound ConcatBitcast PrepareAsyncCallDone "
  "PrepareAsyncCallStart Sharding X64Combine X64SplitHigh X64SplitLow".split()
)
_SLICES = ("dynamic-slice", "gather", "slice")  # read of their first operand what they return
# They write a part of their first operand in place; the number of the operand with that part.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_ELEMENTWISE = frozenset(
  "abs add and clamp compare divide maximum minimum multiply negate not or remainder select sign "
  "subtract xor".split()
)
_BYTES = {kind.number: kind.bytes for kind in columns.ELEMENT_TYPES + columns.LATER_TYPES}


class Work(NamedTuple):
  """What one run of an instruction costs.

  Attributes:
    flops: floating-point operations, two of a multiplication with addition; functions such as `exp`
      count 0, as in the compiler's numbers.
    bytes_accessed: bytes that it reads from the large memory of a device and writes to it.
    narrow_flops: those of products of 8 bits or fewer, which take half the time of others.
  """

  flops: float
  bytes_accessed: int
  narrow_flops: float = 0.0

  @property
  def wide_flops(self) -> float:
    """The operations in 16 bits that take as long."""
    return self.flops - self.narrow_flops / 2

  def plus(self, work: Work, times: float) -> Work:
    """The sum of this work and of `times` runs of other work."""
    return Work(
      self.flops + times * work.flops,
      self.bytes_accessed + round(times * work.bytes_accessed),
      self.narrow_flops + times * work.narrow_flops,
    )


def count(instruction: proto.HloInstructionProto, nodes: Nodes, computations: Computations) -> Work:
  """The work of an instruction, without that of computations that run as other kernels.

  Args:
    instruction: of a computation that is called, of no fusion.
    nodes: all instructions of this computation, by their ids.
    computations: all of the module, by their ids.
  """
  flops = _flops(instruction, nodes, computations)
  narrow_flops = _flops(instruction, nodes, computations, _is_narrow)
  return Work(flops, _bytes(instruction, nodes, computations), narrow_flops)


def is_loaded_before(instruction: proto.HloInstructionProto) -> bool:
  """Whether it copies an argument to the chip for which the run before has done so at its end."""
  return instruction.HasField("cross_program_prefetch_index")


def size(shape: proto.ShapeProto) -> int:
  """Bytes of an array, or of all arrays of a tuple; of a type without a size 1 byte an element."""
  return math.ceil(
    sum(
      math.prod(array.dimensions) * (_BYTES.get(array.element_type) or 1)
      for array in proto.arrays(shape)
    )
  )


def _bytes(instruction: proto.HloInstructionProto, nodes: Nodes, computations: Computations) -> int:
  if instruction.opcode in _STILL or instruction.custom_call_target in FREE_CALLS:
    return 0
  if is_loaded_before(instruction):
    return 0
  operands = dict.fromkeys(instruction.operand_ids)
  read = sum(
    min(_read(id, [instruction], computations), _off_chip(nodes[id].shape)) for id in operands
  )
  return int(read) + _written(instruction, nodes, computations)


def _off_chip(shape: proto.ShapeProto) -> int:
  """Bytes of the arrays of a shape that are in the large memory of a device."""
  return sum(size(array) for array in proto.arrays(shape) if array.layout.memory_space == 0)


def _read(id: int, users: list[proto.HloInstructionProto], computations: Computations) -> float:
  """Bytes of a value that its users read; infinite where one reads all of it."""
  total: float = 0
  for user in users:
    for place, operand in enumerate(user.operand_ids):
      if operand == id:
        total += _read_by(user, place, computations)
  return total


def _read_by(user: proto.HloInstructionProto, place: int, computations: Computations) -> float:
  """Bytes that an instruction reads of the operand of a number."""
  if user.opcode in _SLICES and place == 0:
    return size(user.shape)
  if user.opcode in _UPDATES and place == 0:
    return 0
  if user.opcode in ("fusion", "async-start"):
    body = computations[user.called_computation_ids[0]]
    (inner,) = (
      node
      for node in body.instructions
      if node.opcode == "parameter" and node.parameter_number == place
    )
    return _read_in(inner, body, computations)
  return math.inf


def _read_in(
  value: proto.HloInstructionProto,
  computation: proto.HloComputationProto,
  computations: Computations,
) -> float:
  """Bytes of a value that the other instructions of a fused computation read."""
  if value.id == computation.root_id:
    return math.inf
  users = [node for node in computation.instructions if value.id in node.operand_ids]
  names = [user for user in users if user.opcode == "bitcast"]
  others = [user for user in users if user.opcode != "bitcast"]
  read = _read(value.id, others, computations)
  return read + sum(_read_in(name, computation, computations) for name in names)


def _written(
  instruction: proto.HloInstructionProto, nodes: Nodes, computations: Computations
) -> int:
  """Bytes that an instruction writes to the large memory; of an update in place, the new part."""
  if instruction.opcode in ("fusion", "async-start"):
    body = computations[instruction.called_computation_ids[0]]
    inner = {node.id: node for node in body.instructions}
    return _written(inner[body.root_id], inner, computations)
  if instruction.opcode == "tuple":
    parts = [nodes[id] for id in instruction.operand_ids]
    return sum(_written(part, nodes, computations) for part in parts)
  if instruction.opcode == "copy-start":  # its results are the copy, the operand and a flag
    return _off_chip(next(proto.arrays(instruction.shape)))
  if instruction.opcode == "bitcast" and _off_chip(instruction.shape):
    return _written(nodes[instruction.operand_ids[0]], nodes, computations)
  whole = _off_chip(instruction.shape)
  if instruction.opcode in _UPDATES:
    update = nodes[instruction.operand_ids[_UPDATES[instruction.opcode]]]
    return min(size(update.shape), whole)
  return whole


def _flops(
  instruction: proto.HloInstructionProto,
  nodes: Nodes,
  computations: Computations,
  counts: Callable[[proto.HloInstructionProto, Nodes], bool] = lambda instruction, nodes: True,
) -> float:
  """The operations of an instruction, or of those inside a fusion for which `counts` holds."""
  if instruction.opcode == "fusion":
    body = computations[instruction.called_computation_ids[0]]
    inner = {node.id: node for node in body.instructions}
    return sum(_flops(node, inner, computations, counts) for node in body.instructions)
  if not counts(instruction, nodes):
    return 0.0
  operands = [nodes[id].shape for id in instruction.operand_ids]
  elements = math.prod(instruction.shape.dimensions)
  match instruction.opcode:
    case "dot":
      dims = instruction.dot_dimension_numbers.lhs_contracting_dimensions
      return 2.0 * elements * math.prod(operands[0].dimensions[dim] for dim in dims)
    case "convolution":
      return 2.0 * _products(instruction, *operands)
    case "reduce":
      arrays = operands[: len(operands) // 2]
      return float(sum(math.prod(array.dimensions) for array in arrays))
    case "reduce-window":
      window = instruction.window.dimensions
      return float(elements * (math.prod(dimension.size for dimension in window) - 1))
  return float(elements) if instruction.opcode in _ELEMENTWISE else 0.0


def _is_narrow(instruction: proto.HloInstructionProto, nodes: Nodes) -> bool:
  """Whether an instruction is a product of numbers of at most 8 bits."""
  kinds = [nodes[id].shape.element_type for id in instruction.operand_ids]
  is_product = instruction.opcode in ("convolution", "dot")
  return is_product and all(_BYTES.get(kind, 8) <= 1 for kind in kinds)


def _products(
  convolution: proto.HloInstructionProto, image: proto.ShapeProto, kernel: proto.ShapeProto
) -> int:
  """The multiplications of a convolution, without those with padding or between dilated elements.

  The TPU compiler makes dots to convolutions, whose batch dimensions are spatial ones.
  """
  numbers = convolution.convolution_dimension_numbers
  groups = max(1, convolution.batch_group_count)
  batch = image.dimensions[numbers.input_batch_dimension] // groups
  inputs = kernel.dimensions[numbers.kernel_input_feature_dimension]
  outputs = kernel.dimensions[numbers.kernel_output_feature_dimension]
  pairs = 1
  sizes = zip(
    numbers.input_spatial_dimensions,
    numbers.output_spatial_dimensions,
    convolution.window.dimensions,
  )
  for of_image, of_output, window in sizes:
    size_out = convolution.shape.dimensions[of_output]
    pairs *= _pairs(window, image.dimensions[of_image], size_out)
  return batch * inputs * outputs * pairs


def _pairs(window: proto.WindowDimension, size_in: int, size_out: int) -> int:
  """How many pairs of a window's element and an output meet an element of the input."""
  outputs = np.arange(size_out) * max(1, window.stride) - window.padding_low
  dilation, step = max(1, window.base_dilation), max(1, window.window_dilation)
  last, total = (size_in - 1) * dilation, 0
  for element in range(window.size):
    places = outputs + element * step
    total += int(np.sum((places >= 0) & (places <= last) & (places % dilation == 0)))
  return total
