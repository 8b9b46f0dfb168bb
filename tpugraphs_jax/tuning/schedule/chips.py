"""What the time of a schedule depends on beside its bundles, for each TPU generation."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

VERSION = 6  # of the simulator; another one where programs get other times from the same constants
CONSTANTS = Path(__file__).with_name("constants.json")


@dataclasses.dataclass(frozen=True)
class Link:
  """The links of a core to other chips and to its host.

  Attributes:
    bandwidth: bytes a second in one direction.
    share: part of it that DMAs reach.
    hop: seconds between the last byte of a DMA that enters the link and its arrival.
    start: cycles that the core needs to start a DMA to another chip and to await one.
    launch: seconds until a SparseCore begins a collective.
    host: bytes a second to the memory of the host, and as many from it at the same time (PCIe).
    source: where the constants come from.
  """

  bandwidth: float
  share: float
  hop: float
  start: float
  launch: float
  host: float
  source: str

  @property
  def rate(self) -> float:
    """Bytes a second that DMAs reach in one direction."""
    return self.share * self.bandwidth


@dataclasses.dataclass(frozen=True)
class Chip:
  """A TPU core with its share of the memory.

  Attributes:
    clock: bundles a second.
    bandwidth: peak of the HBM of one core, bytes a second.
    share: of the peak that DMAs reach.
    written: part of that which DMAs to the HBM reach.
    mixed: part of that which a DMA reaches for as many bytes as are on their way in the other
      direction.
    latency: cycles between the last byte of a DMA from the HBM and its arrival.
    latency_written: the same for a DMA to the HBM.
    start: cycles between the starts of two DMAs, at least.
    wait: cycles that the core needs to await a DMA, also one that has arrived.
    vmem: bytes a cycle of DMAs that stay on the chip.
    trace: cycles in which an event for a profiler is written.
    granule: bytes of the unit in which DMAs count.
    slots: cycles after a branch whose bundles still run.
    rows: that a matrix unit takes in a cycle.
    drains: whether what follows the last product of a block waits for its result. The measured
      times of 7x show it.
    nops_are_joined: as of `linker.Schedule`.
    low, high: the range of measured / simulated time that nine of ten programs had which the fit
      left out; None where none was measured.
    source: where the constants come from.
    link: to other chips and to the host.
  """

  clock: float
  bandwidth: float
  share: float
  written: float
  mixed: float
  latency: float
  latency_written: float
  start: float
  wait: float
  vmem: float
  trace: float
  granule: int
  slots: int
  rows: float
  drains: bool
  nops_are_joined: bool
  low: float | None
  high: float | None
  source: str
  link: Link

  @property
  def bytes_per_cycle(self) -> float:
    """Bytes a cycle that DMAs move from the HBM."""
    return self.share * self.bandwidth / self.clock

  def rate(self, *, is_written: bool, is_mixed: bool) -> float:
    """Bytes a cycle of a DMA from or to the HBM."""
    written, mixed = self.written if is_written else 1.0, self.mixed if is_mixed else 1.0
    return self.bytes_per_cycle * written * mixed


@functools.cache
def chips() -> dict[str, Chip]:
  """All generations with constants, by target such as `tpu:v6e`."""
  rows = json.loads(CONSTANTS.read_text())
  return {target: Chip(**{**row, "link": Link(**row["link"])}) for target, row in rows.items()}


def version(target: str) -> str:
  """The version of the simulator with a digest of a target's constants, such as `1-5d41402a`.

  Programs of one device that move nothing to the host do not depend on the constants of links.
  """
  numbers = dataclasses.asdict(chips()[target])
  numbers.pop("link")
  constants = json.dumps(numbers, sort_keys=True)
  return f"{VERSION}-{hashlib.sha256(constants.encode()).hexdigest()[:8]}"
