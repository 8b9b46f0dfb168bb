"""Devices of a topology without libtpu, in the order in which libtpu lists them."""

import dataclasses
import itertools

from tpugraphs_jax.hlo import topology

# As `device.device_kind` of jax.
_KINDS = {
  "v2": "TPU v2",
  "v3": "TPU v3",
  "v4": "TPU v4",
  "v5e": "TPU v5 lite",
  "v5p": "TPU v5",
  "v6e": "TPU v6 lite",
  "7x": "TPU7x",
}


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device as jax describes it."""

  id: int
  coords: tuple
  device_kind: str
  core_on_chip: int = 0
  platform: str = "tpu"
  process_index: int = 0
  slice_index: int = 0


def devices(target):
  """The chips of a topology with one device a chip, x first."""
  described = topology.parse(target)
  x, y, z = (*described.shape, 1)[:3]
  places = ((i, j, k) for k, j, i in itertools.product(range(z), range(y), range(x)))
  kind = _KINDS[described.generation.removeprefix("tpu:")]
  return tuple(Chip(number, coords, kind) for number, coords in enumerate(places))
