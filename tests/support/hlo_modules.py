"""Small HLO modules for tests."""

from tpugraphs_jax.hlo.proto import HloComputationProto, HloInstructionProto, HloModuleProto


def instruction(opcode="add", id=1, operands=(), shape=(), callees=(), **fields):
  proto = HloInstructionProto(
    name=f"{opcode}.{id}",
    opcode=opcode,
    id=id,
    operand_ids=operands,
    called_computation_ids=callees,
    **fields,
  )
  proto.shape.element_type = 11
  proto.shape.dimensions.extend(shape)
  return proto


def computation(*instructions, name="main", id=1, root_id=None):
  if root_id is None:
    root_id = instructions[-1].id if instructions else 0
  return HloComputationProto(name=name, id=id, root_id=root_id, instructions=instructions)


def module(*computations, name="module"):
  return HloModuleProto(name=name, computations=computations)
