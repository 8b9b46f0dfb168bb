"""Schedules for tests: texts as libtpu prints them, written by hand, and those of `tests/data`."""

import gzip
import json
from pathlib import Path

import numpy as np

from tpugraphs_jax.hlo import collectives, proto, topology
from tpugraphs_jax.tuning.schedule import bundles, ici, kernel, linker, mesh
from tpugraphs_jax.tuning.schedule.chips import Chip, Link

DATA = Path(__file__).parents[1] / "data" / "schedules"
# A granule in four cycles over a link, in eight to or from the host.
# A granule a cycle from and to the HBM, two on the chip, ten cycles until a DMA arrives.
CHIP = Chip(
  clock=1e9,
  bandwidth=32e9,
  share=1.0,
  written=1.0,
  mixed=1.0,
  latency=10.0,
  latency_written=10.0,
  start=0.0,
  wait=0.0,
  vmem=64.0,
  trace=1.0,
  granule=32,
  slots=4,
  rows=1.0,
  drains=False,
  nops_are_joined=False,
  low=None,
  high=None,
  source="a test",
  link=Link(bandwidth=8e9, share=1.0, hop=1e-7, start=0.0, launch=1e-6, host=4e9, source="a test"),
)
EMPTY = ""


def text(*lines: str) -> str:
  """A schedule of bundles; `@7 a ;; b` is a bundle in which region 7 starts."""
  result = ["= control target key end", ""]
  for number, line in enumerate(lines):
    region, _, body = line.rpartition("@")[2].partition(" ") if "@" in line else ("", "", line)
    comment = f" /* Start region {region} */" if region else ""
    result.append(f" {number:#x}   :  {{ {body} }}{comment}")
  return "\n".join(result) + "\n"


def schedule(*lines: str, chip: Chip = CHIP) -> linker.Schedule:
  return linker.Schedule(
    bundles.parse(text(*lines)), slots=chip.slots, nops_are_joined=chip.nops_are_joined
  )


def cost(*lines: str, chip: Chip = CHIP, **options) -> kernel.Cost:
  """The cost of a schedule."""
  return kernel.simulate(schedule(*lines, chip=chip), chip, **options)


def stored_mesh(name: str) -> mesh.Simulation:
  """A program of a mesh of `tests/data`."""
  folder = DATA / name
  texts = {
    path.name.removesuffix(".txt.gz"): gzip.decompress(path.read_bytes()).decode()
    for path in folder.glob("*.txt.gz")
  }
  about = json.loads((folder / "devices.json").read_text())
  rings = [
    collectives.Ring(
      tuple(map(tuple, ring["groups"])), np.array(ring["table"], np.int32), ring["by_device"]
    )
    for ring in about["rings"]
  ]
  wrap = tuple(about["wrap"])
  coords = tuple(map(tuple, about["coords"]))
  devices = ici.Slice(about["axes"], tuple(about["ids"]), coords, wrap, tuple(rings))
  module = proto.parse_module((folder / "module.hlo.pb").read_bytes(), where=name)
  target = topology.generation_of(about["target"])
  return mesh.Simulation(module, texts, target, devices)


def stored(name: str) -> tuple[proto.HloModuleProto, dict[str, str]]:
  """The module and the schedules of a program of `tests/data`."""
  texts = {path.stem: path.read_text() for path in (DATA / name).glob("*.txt")}
  return proto.parse_module((DATA / name / "module.hlo.pb").read_bytes(), where=name), texts
