"""Writes matmul_v6e.xplane.pb, a small form of a public profile of a TPU v6e.

    python tests/data/profiles/record.py host0.xplane.pb

The times, the names and shapes of the operations and the planes are those of the profile. The code
of its Pallas kernel, its source lines and all host threads are left out.
"""

from pathlib import Path
import sys

from tpugraphs_jax.hlo import proto, xplane_pb2

_LINES = ("XLA Modules", "XLA Ops")


def main(source: str) -> None:
  space = xplane_pb2.XSpace.FromString(Path(source).read_bytes())
  small = xplane_pb2.XSpace()
  for plane in space.planes:
    if plane.name == "/host:metadata" or plane.name.startswith("/device:TPU"):
      small.planes.append(_plane(plane))
  Path(__file__).with_name("matmul_v6e.xplane.pb").write_bytes(small.SerializeToString())


def _plane(plane: xplane_pb2.XPlane) -> xplane_pb2.XPlane:
  stats = {number: stat.name for number, stat in plane.stat_metadata.items()}
  small = xplane_pb2.XPlane(name=plane.name)
  small.stats.extend(
    stat for stat in plane.stats if stats[stat.metadata_id] == "device_type_string"
  )
  small.lines.extend(line for line in plane.lines if line.name in _LINES)
  for line in small.lines:
    for event in line.events:
      event.ClearField("stats")
  kinds = {event.metadata_id for line in small.lines for event in line.events}
  for number, kind in plane.event_metadata.items():
    of_kind = {stats[stat.metadata_id]: stat for stat in kind.stats}
    if number in kinds or "Hlo Proto" in of_kind:
      kept = small.event_metadata[number]
      kept.id, kept.display_name = number, kind.display_name
      kept.name = kind.name.partition(" custom-call(")[0]
      kept.stats.extend(of_kind[name] for name in ("program_id", "Hlo Proto") if name in of_kind)
      for stat in kept.stats:
        if stats[stat.metadata_id] == "Hlo Proto":
          stat.bytes_value = _module(stat.bytes_value)
  for kind in (small, *small.event_metadata.values()):
    for stat in kind.stats:
      small.stat_metadata[stat.metadata_id].name = stats[stat.metadata_id]
  return small


def _module(data: bytes) -> bytes:
  """The module without the code of its kernel and without source lines, as an `HloProto`."""
  module = proto.parse_module(data, where="profile")
  module.ClearField("stack_frame_index")
  for node in proto.instructions(module):
    node.backend_config = b""
    node.metadata.stack_frame_id = 0
    node.metadata.source_file = ""
  return proto.ModuleTuningData(module=module).SerializeToString()


if __name__ == "__main__":
  main(*sys.argv[1:])
