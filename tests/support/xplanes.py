"""Profiles of TPUs for tests."""

from tests.support import commands
from tpugraphs_jax.hlo import xplane_pb2

RECORDED = commands.ROOT / "tests/data/profiles/matmul_v6e.xplane.pb"


def space(events, *, modules=(("jit_step(7)", 0, 1000),), kind="TPU v6 Lite", hlo_of=None):
  """A profile of a TPU with events (name, start, duration) in microseconds."""
  made = xplane_pb2.XSpace()
  metadata, plane = made.planes.add(name="/host:metadata"), made.planes.add(name="/device:TPU:0")
  metadata.stat_metadata[1].name = "Hlo Proto"
  for name, module in (hlo_of or {}).items():
    metadata.event_metadata[1].name = name
    metadata.event_metadata[1].stats.add(metadata_id=1, bytes_value=module.SerializeToString())
  plane.stat_metadata[1].name = "device_type_string"
  plane.stats.add(metadata_id=1, str_value=kind)
  for line_name, rows in (("XLA Modules", modules), ("XLA Ops", events)):
    line = plane.lines.add(name=line_name)
    for name, start, duration in rows:
      number = len(plane.event_metadata) + 1
      plane.event_metadata[number].name = name
      line.events.add(metadata_id=number, offset_ps=10**6 * start, duration_ps=10**6 * duration)
  return made


def write(folder, profile, name="vm.xplane.pb"):
  path = folder / name
  path.write_bytes(profile.SerializeToString())
  return path
