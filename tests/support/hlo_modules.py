"""Small HLO modules for tests."""

import jax
import jax.numpy as jnp

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


ARGS = (
  jax.ShapeDtypeStruct((3, 7, 6, 5), jnp.float32),
  jax.ShapeDtypeStruct((3, 3, 5, 4), jnp.float32),
  jax.ShapeDtypeStruct((168, 9), jnp.float32),
)


def network(x, kernel, dense):
  x = jax.nn.relu(
    jax.lax.conv_general_dilated(
      x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
  )
  return x.reshape(x.shape[0], -1) @ dense
