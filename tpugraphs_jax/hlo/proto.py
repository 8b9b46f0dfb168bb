"""Bytes to protobuf messages, with errors that name where the bytes came from."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from tpugraphs_jax.hlo.hlo_pb2 import ConfigProfile, HloComputationProto, HloInstructionProto
from tpugraphs_jax.hlo.hlo_pb2 import HloModuleProto, ModuleTuningData, ShapeProto
from tpugraphs_jax.hlo.hlo_pb2 import StackFrameIndexProto, TuningData

__all__ = [
    "ConfigProfile", "HloComputationProto", "HloInstructionProto", "HloModuleProto",
    "ModuleTuningData", "ShapeProto", "StackFrameIndexProto", "TuningData", "parse",
    "parse_any", "parse_module",
]

Message = HloModuleProto | ModuleTuningData | TuningData


def parse(message_type: type, data: bytes, *, where: str):
  """The message of a known type that `data` holds.

  Raises:
    ValueError: the bytes are damaged, cut off, or no message of this type.
  """
  name = message_type.DESCRIPTOR.name
  try:
    message = message_type.FromString(data)
  except DecodeError as error:
    raise ValueError(f"{where}: {len(data)} bytes that are no {name} ({error})") from error
  if data and not message.ListFields():
    raise ValueError(f"{where}: no field of {name} in {len(data)} bytes, expected a "
                     "serialized HLO module or tuning data")
  return message


def parse_any(data: bytes, *, where: str) -> Message:
  """The HLO module or tuning data in `data`, told apart by where modules are.

  XLA's `HloProto` dumps give the module in them. Bytes in which no kind has an
  instruction are read as an `HloModuleProto`.

  Raises:
    ValueError: the bytes are neither.
  """
  for message_type, modules in (
      (HloModuleProto, lambda module: [module]),
      (TuningData, lambda tuning: [entry.module for entry in tuning.modules]),
      (ModuleTuningData, lambda tuning: [tuning.module]),
  ):
    try:
      message = message_type.FromString(data)
    except DecodeError:
      continue
    if any(_has_instructions(module) for module in modules(message)):
      return _unwrapped(message)
  return parse(HloModuleProto, data, where=where)


def parse_module(data: bytes, *, where: str) -> HloModuleProto:
  """The HLO module in `data`, an `HloModuleProto` or a whole `HloProto`.

  Raises:
    ValueError: the bytes are something else, or tuning data.
  """
  message = parse_any(data, where=where)
  if not isinstance(message, HloModuleProto):
    raise ValueError(f"{where}: found {message.DESCRIPTOR.name}, expected one HLO module; "
                     "read it with tpugraphs_jax.hlo.read_tuning")
  return message


def _has_instructions(module: HloModuleProto) -> bool:
  """Whether an instruction has an opcode: bytes read as the wrong type have none."""
  return any(instruction.opcode for computation in module.computations
             for instruction in computation.instructions)


def _unwrapped(message: Message) -> Message:
  """Takes the module out of an `HloProto`, which parses as `ModuleTuningData`.

  Its buffer assignment then stands for a single run, and nothing else is set.
  """
  if isinstance(message, ModuleTuningData) and len(message.runs) <= 1 and not (
      message.fingerprint or message.config_index_to_node):
    return message.module
  return message
