"""Schedules for tests: texts as libtpu prints them, written by hand, and those of `tests/data`."""

from pathlib import Path

from tpugraphs_jax.hlo import proto
from tpugraphs_jax.tuning.schedule import bundles, kernel, linker
from tpugraphs_jax.tuning.schedule.chips import Chip

DATA = Path(__file__).parents[1] / "data" / "schedules"
# A granule a cycle from and to the HBM, two on the chip, ten cycles until a DMA arrives.
CHIP = Chip(
  clock=1e9,
  bandwidth=32e9,
  share=1.0,
  written=1.0,
  mixed=1.0,
  latency=10.0,
  start=0.0,
  vmem=64.0,
  granule=32,
  slots=4,
  rows=1.0,
  drains=False,
  nops_are_joined=False,
  low=None,
  high=None,
  source="a test",
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


def stored(name: str) -> tuple[proto.HloModuleProto, dict[str, str]]:
  """The module and the schedules of a program of `tests/data`."""
  texts = {path.stem: path.read_text() for path in (DATA / name).glob("*.txt")}
  return proto.parse_module((DATA / name / "module.hlo.pb").read_bytes(), where=name), texts
