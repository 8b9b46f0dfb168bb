"""The TPU generations: what a device of each can do, and which slices it comes in.

What the time of a kernel depends on beside these peaks, with its source and interval, stands in
`tuning/schedule/constants.json` by the same names: it is fitted to measured programs.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Generation:
  """A TPU generation.

  Attributes:
    topology: the smallest one that the compiler accepts.
    teraflops: peak of a chip, 1e12 bfloat16 operations a second.
    gigabytes: peak of a chip, 1e9 bytes a second between the memory and the chip.
    gibibytes: memory of a device that the compiler may plan, as its refusals say (libtpu
      0.0.42.1).
    devices: of jax on a chip.
    cores: of a chip where clouds count the cores of a slice (`v5p-8` has 4 chips), else 1.
    wraps: size from which an axis of a two-dimensional slice has links that wrap around; None for
      three-dimensional slices, which wrap where they consist of whole cubes.
    options: what the compiler is told beside the name of a topology.
  """

  topology: str
  teraflops: float
  gigabytes: float
  gibibytes: float
  _: dataclasses.KW_ONLY
  devices: int = 1
  cores: int = 1
  wraps: int | None = None
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def flops(self) -> float:
    """Peak of a device, bfloat16 operations a second."""
    return 1e12 * self.teraflops / self.devices

  @property
  def bandwidth(self) -> float:
    """Peak of a device, bytes a second between the memory and the chip."""
    return 1e9 * self.gigabytes / self.devices

  @property
  def memory(self) -> int:
    """Bytes of memory of a device that the compiler may plan."""
    return round(self.gibibytes * 2**30)

  @property
  def dimensions(self) -> int:
    """Of a slice."""
    return 3 if self.wraps is None else 2


# A device of a v4 is a chip of two cores, which the compiler treats as one.
_MEGACORE = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1), "num_slices": 1}

# Peaks of a chip, and sizes of whole pods, whose axes wrap, as in Google's pages on each generation
# (docs.cloud.google.com/tpu/docs), for v2 as in Jouppi et al. 2020, "A Domain-Specific
# Supercomputer for Training Deep Neural Networks".
GENERATIONS = {
  "tpu:v2": Generation("v2:2x2x1", 46, 700, 7.48, devices=2, cores=2, wraps=16),
  "tpu:v3": Generation("v3:2x2x1", 123, 900, 15.48, devices=2, cores=2, wraps=32),
  "tpu:v4": Generation("v4:2x2x1", 275, 1200, 30.75, cores=2, options=_MEGACORE),
  "tpu:v5e": Generation("v5e:2x2", 197, 819, 15.75, wraps=16),
  "tpu:v5p": Generation("v5p:2x2x1", 459, 2765, 95.74, cores=2),
  "tpu:v6e": Generation("v6e:2x2", 918, 1600, 31.25, wraps=16),
  "tpu:7x": Generation("tpu7x:2x2x1", 2307, 7380, 94.75, devices=2, cores=2),
}
