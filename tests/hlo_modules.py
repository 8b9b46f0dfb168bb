"""Small HLO modules for tests."""

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.hlo.proto import HloComputationProto, HloInstructionProto, HloModuleProto

_OPCODES = (*columns.opcode_ids(), "erf", "Add", "")
# Sizes at which int64 wraps, and 2^54 + 2^30 + 1, which rounds to another float32
# when it passes through float64.
_NUMBERS = (0, 1, 2, 3, 7, -1, -5, 1 << 31, (1 << 54) + (1 << 30) + 1, 1 << 62, -(1 << 63))


def instruction(opcode="add", id=1, operands=(), shape=(), callees=(), **fields):
  proto = HloInstructionProto(
      name=f"{opcode}.{id}", opcode=opcode, id=id, operand_ids=operands,
      called_computation_ids=callees, **fields)
  proto.shape.element_type = 11
  proto.shape.dimensions.extend(shape)
  return proto


def computation(*instructions, name="main", id=1, root_id=None):
  if root_id is None:
    root_id = instructions[-1].id if instructions else 0
  return HloComputationProto(name=name, id=id, root_id=root_id, instructions=instructions)


def module(*computations, name="module"):
  return HloModuleProto(name=name, computations=computations)


def random_module(rng, *, nodes=40, computations=4):
  """A valid module in which every featurized field takes unlikely values."""
  result = HloModuleProto(name="random")
  ids = rng.permutation(10_000)[:nodes].tolist()
  parts = np.array_split(np.arange(nodes), computations)
  for number, part in enumerate(parts):
    name = rng.choice(["main", "while_body", "second", "fused", "Cluster", "cluster.1"])
    owner = result.computations.add(
        name=name, id=100 + number, root_id=ids[rng.choice(part)])
    for node in part:
      each = owner.instructions.add(
          name=f"i{node}", opcode=rng.choice(_OPCODES), id=ids[node])
      operands = rng.integers(0, node, rng.integers(0, 4)) if node else []
      each.operand_ids.extend(ids[operand] for operand in operands)
      if number and rng.random() < 0.5:
        callee = result.computations[int(rng.integers(number))]
        if callee.root_id not in each.operand_ids:
          each.called_computation_ids.append(callee.id)
      _fill(each, rng)
  return result


def _fill(each, rng):
  def numbers():
    return rng.choice(_NUMBERS, rng.integers(0, 9)).tolist()

  each.shape.element_type = int(rng.integers(0, 35))
  each.shape.dimensions.extend(numbers())
  each.shape.layout.minor_to_major.extend(numbers())
  each.dimensions.extend(numbers())
  each.dynamic_slice_sizes.extend(numbers())
  for values in (numbers() for _ in range(rng.integers(0, 8))):
    one, two, three, four, five, six = (values + [0] * 6)[:6]
    each.shape.tuple_shapes.add()
    each.window.dimensions.add(
        size=one, stride=two, padding_low=three, padding_high=four,
        window_dilation=five, base_dilation=six, window_reversal=bool(rng.integers(2)))
    each.slice_dimensions.add(start=one, limit=two, stride=three)
    each.padding_config.dimensions.add(edge_padding_low=four, edge_padding_high=five)
  numbers_of = each.convolution_dimension_numbers
  numbers_of.input_spatial_dimensions.extend(numbers())
  numbers_of.kernel_spatial_dimensions.extend(numbers())
  for field in ("input_batch", "input_feature", "kernel_input_feature",
                "kernel_output_feature", "output_batch", "output_feature"):
    setattr(numbers_of, f"{field}_dimension", int(rng.choice(_NUMBERS)))
  for field in ("parameter_number", "feature_group_count", "batch_group_count"):
    setattr(each, field, int(rng.choice(_NUMBERS)))
  each.is_stable = bool(rng.integers(2))
