"""HLO modules as protobuf messages: read from bytes, and their instructions.

A message takes more memory than its bytes: modules of XLA 6.5 to 8.1 times as much (measured on
three modules of 250,000 to 330,000 instructions), and hostile bytes up to 125 times. Therefore a
separate process with a limit of memory reads large messages first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import subprocess
import sys
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from tpugraphs_jax import columns

# Other modules name the messages as `proto.ShapeProto`.
from tpugraphs_jax.hlo.hlo_pb2 import (
  ConfigProfile,
  HloComputationProto,
  HloInstructionProto,
  HloModuleProto,
  HloProto,
  MeshAxesReplicaGroupListProto,
  ModuleTuningData,
  ShapeProto,
  StackFrameIndexProto,
  TuningData,
  WindowDimension,
)
from tpugraphs_jax.hlo.xplane_pb2 import XSpace
from tpugraphs_jax.infra import console, machine, tasks, trust

_COST = 12  # bytes of memory that a byte of a message may take
_LEAST_BYTES = 1 << 20  # of a message that is read in another process first
_SECONDS = 600.0  # limit for one message

Message: TypeAlias = HloModuleProto | ModuleTuningData | TuningData
_TYPE_NAMES = {kind.number: kind.name for kind in columns.ELEMENT_TYPES + columns.LATER_TYPES}
_TUPLE = 13  # element type of XLA


def instructions(module: HloModuleProto) -> list[HloInstructionProto]:
  """All instructions in the order of the module: one per node of its graph."""
  return [node for computation in module.computations for node in computation.instructions]


def owners(module: HloModuleProto) -> list[HloComputationProto]:
  """The computation of each of the instructions."""
  return [computation for computation in module.computations for _ in computation.instructions]


def positions(module: HloModuleProto) -> dict[int, int]:
  """The node of each instruction id; the last one where several have the same id."""
  return {instruction.id: node for node, instruction in enumerate(instructions(module))}


def arrays(shape: ShapeProto) -> Iterator[ShapeProto]:
  """The shapes in a tuple, or the shape itself."""
  for part in shape.tuple_shapes:
    yield from arrays(part)
  if not shape.tuple_shapes:
    yield shape


def backend_config(instruction: HloInstructionProto, schema: Mapping[str, Any]) -> dict[str, Any]:
  """The JSON that a compiler wrote into an instruction; empty where it wrote none.

  An FFI call has MLIR there, such as `{uplo = 76 : ui8}`.

  Args:
    instruction: of a module after optimisations.
    schema: what is read of it, as `trust.check` takes it.

  Raises:
    ValueError: the JSON has another form than `schema`.
  """
  if not instruction.backend_config.startswith(b"{"):
    return {}
  try:
    config = trust.parse(instruction.backend_config)
  except ValueError:
    return {}
  trust.check(config, schema, f"backend_config of {instruction.name}")
  return config


def shape_text(shape: ShapeProto) -> str:
  """A shape as HLO text writes it, `f32[8,128]{1,0}`."""
  if shape.element_type == _TUPLE:
    return f"({', '.join(map(shape_text, shape.tuple_shapes))})"
  name = _TYPE_NAMES.get(shape.element_type, f"type{shape.element_type}")
  dimensions = ",".join(map(str, shape.dimensions))
  layout = ",".join(map(str, shape.layout.minor_to_major))
  return f"{name}[{dimensions}]" + (f"{{{layout}}}" if layout else "")


def parse_any(data: bytes, *, where: str) -> Message:
  """The HLO module or tuning data in `data`.

  Tries the three kinds of messages and takes the first one with an instruction. The result for
  XLA's `HloProto` is its module.

  Raises:
    ValueError: no kind has an instruction, or the message takes too much memory.
  """
  if len(data) >= _LEAST_BYTES and not _is_read_within_limit(data):
    raise ValueError(
      f"{where}: no instruction of an HLO module in {console.size(len(data))}, or one that takes "
      f"more than {_COST} times as much memory, expected a serialized HLO module or tuning data: "
      "write it again"
    )
  return _parse_any(data, where=where)


def parse_profile(data: bytes, *, where: str) -> XSpace:
  """The profile in the bytes of a file `.xplane.pb`.

  Raises:
    ValueError: the bytes are something else, or the message takes too much memory.
  """
  if len(data) >= _LEAST_BYTES and not _is_read_within_limit(data, "profile"):
    raise ValueError(
      f"{where}: no profile in {console.size(len(data))}, or one that takes more than {_COST} "
      "times as much memory, expected a file .xplane.pb of jax.profiler: write it again"
    )
  return _parse_profile(data, where=where)


def _parse_profile(data: bytes, *, where: str) -> XSpace:
  with contextlib.suppress(DecodeError):
    profile = XSpace.FromString(data)
    if any(plane.name for plane in profile.planes):
      return profile
  raise ValueError(
    f"{where}: no profile in {len(data)} bytes, expected a file .xplane.pb of jax.profiler: write "
    "it again"
  )


def _is_read_within_limit(data: bytes, kind: str = "module") -> bool:
  """Whether another process can read a message with `_COST` times the memory of its bytes."""
  limit = min(_COST * len(data), machine.available())
  command = tasks.python_command("-W", "ignore", __file__, str(limit), kind)
  try:
    ended = subprocess.run(
      command,
      input=data,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      timeout=_SECONDS,
      env=tasks.python_environment(),
    )
  except subprocess.TimeoutExpired:
    return False
  return ended.returncode == 0


def _parse_any(data: bytes, *, where: str) -> Message:
  for message_type, modules in (
    (HloModuleProto, lambda module: [module]),
    (TuningData, lambda tuning: [entry.module for entry in tuning.modules]),
    (ModuleTuningData, lambda tuning: [tuning.module]),
  ):
    try:
      message = message_type.FromString(data)
    except DecodeError:
      continue
    # Bytes that are read as the wrong kind give instructions without opcodes, if any.
    if any(map(_has_opcode, modules(message))):
      return _unwrapped(message)
  raise ValueError(
    f"{where}: no instruction of an HLO module in {len(data)} bytes, expected a serialized HLO "
    "module or tuning data: write it again"
  )


def _has_opcode(module: HloModuleProto) -> bool:
  return any(node.opcode for part in module.computations for node in part.instructions)


def parse_module(data: bytes, *, where: str) -> HloModuleProto:
  """The HLO module in `data`, an `HloModuleProto` or a whole `HloProto`.

  Raises:
    ValueError: the bytes are something else, or tuning data.
  """
  message = parse_any(data, where=where)
  if not isinstance(message, HloModuleProto):
    raise ValueError(
      f"{where}: found {message.DESCRIPTOR.name}, expected one HLO module; "
      "read it with tpugraphs_jax.hlo.read_tuning"
    )
  return message


def _unwrapped(message: Message) -> Message:
  """Takes the module out of an `HloProto` or an `HloSnapshot`.

  They parse as `ModuleTuningData`, and as `TuningData` with one of them. The buffer assignment of
  an `HloProto` then stands for a single run, and nothing else is set.
  """
  if isinstance(message, TuningData) and len(message.modules) == 1:
    inner = _unwrapped(message.modules[0])
    return inner if isinstance(inner, HloModuleProto) else message
  if isinstance(message, ModuleTuningData) and len(message.runs) <= 1:
    if not (message.fingerprint or message.config_index_to_node):
      return message.module
  return message


def main(limit: str, kind: str) -> int:
  """Reads a module or profile from standard input with `limit` bytes of memory; 0 if it can."""
  data = sys.stdin.buffer.read()
  machine.limit(int(limit))
  try:
    (_parse_profile if kind == "profile" else _parse_any)(data, where="")
  except (ValueError, MemoryError):
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:]))
