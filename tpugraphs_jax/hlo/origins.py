"""Where an instruction comes from: its name, jax's name for it, the user's line."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from pathlib import Path

from tpugraphs_jax.hlo import proto

_INSTALLED = ("site-packages", "dist-packages")


@dataclasses.dataclass(frozen=True)
class Origin:
  """What a module says of an instruction; empty or 0 where it says nothing."""

  name: str  # of the instruction
  op_name: str  # of jax: jit(f)/.../dot_general
  file: str
  line: int

  @property
  def where(self) -> str:
    """`model.py:12`, the file without its folder."""
    return f"{Path(self.file).name}:{self.line}" if self.file else ""


def origins(module: proto.HloModuleProto) -> list[Origin]:
  """One per instruction, in the order of the module."""
  return [_origin(instruction, module.stack_frame_index)
          for computation in module.computations for instruction in computation.instructions]


def _origin(
    instruction: proto.HloInstructionProto, stack: proto.StackFrameIndexProto
) -> Origin:
  metadata = instruction.metadata
  lines = [(metadata.source_file, metadata.source_line)] if metadata.source_file else list(
      _callers(metadata.stack_frame_id, stack))
  # The line of the user's own that led into an installed library, where there is one.
  own = [line for line in lines if not any(part in line[0] for part in _INSTALLED)]
  return Origin(instruction.name, metadata.op_name, *(own or lines or [("", 0)])[0])


def _callers(frame_id: int, stack: proto.StackFrameIndexProto) -> Iterator[tuple[str, int]]:
  """Files and lines from the innermost frame outwards; ids are places from 1."""
  for _ in stack.stack_frames:  # no longer than this, however the frames refer to each other
    if not 0 < frame_id <= len(stack.stack_frames):
      return
    frame = stack.stack_frames[frame_id - 1]
    if 0 < frame.file_location_id <= len(stack.file_locations):
      location = stack.file_locations[frame.file_location_id - 1]
      if 0 < location.file_name_id <= len(stack.file_names):
        yield stack.file_names[location.file_name_id - 1], location.line
    frame_id = frame.parent_frame_id
