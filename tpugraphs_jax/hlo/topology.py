"""TPU slices: which chips a target such as `v6e:2x4` has, and how their links wrap around.

A target without a topology, such as `v6e`, is one device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
from typing import Any

from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.hlo.generations import GENERATIONS

_TARGET = re.compile(r"(?:tpu:)?(?:tpu)?(\w+?)(?::(\d+(?:x\d+){1,2})|-(\d+))")
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e"}
_CUBE = 4  # chips along the side of a cube; slices of whole cubes wrap around (v4, v5p and 7x)


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice of a generation.

  Attributes:
    generation: a key of `GENERATIONS`.
    shape: chips along each axis, as the target names them.
  """

  generation: str
  shape: tuple[int, ...]

  @property
  def name(self) -> str:
    """The target, such as `tpu:v6e:2x4`."""
    return f"{self.generation}:{'x'.join(map(str, self.shape))}"

  @property
  def wrap(self) -> tuple[bool, bool, bool]:
    """Which axes have links between their first and last chip."""
    most = GENERATIONS[self.generation].wraps
    sides = (*self.shape, 1)[:3]
    if most is None:
      return (all(side % _CUBE == 0 for side in sides),) * 3
    x, y, z = (side >= most for side in sides)
    return x, y, z


def parse(target: str) -> Topology | None:
  """The topology of a target; None where it names a generation alone.

  Args:
    target: such as `v6e:2x4`, `v5p:2x2x4`, or as clouds name slices, `v6e-8`, `v5p-32`, where the
      number is that of chips, of v2, v3, v4, v5p and 7x that of cores.

  Raises:
    ValueError: it has a topology that the generation cannot have, or as `tpu.full_name`.
  """
  match = _TARGET.fullmatch(str(target))
  if match is None:
    tpu.full_name(target)
    return None
  generation = tpu.full_name(_ALIASES.get(match[1], match[1]))
  short = tpu.short_name(generation)
  dimensions = GENERATIONS[generation].dimensions
  if match[2]:
    shape = tuple(map(int, match[2].split("x")))
    if dimensions == 2 and len(shape) == 3 and shape[2] == 1:
      shape = shape[:2]
    if len(shape) != dimensions or 0 in shape:
      example = "2x4" if dimensions == 2 else "2x2x4"
      raise ValueError(
        f"target is {target!r}, expected {dimensions} sizes of {short}, such as {short}:{example}"
      )
    return Topology(generation, shape)
  chips, rest = divmod(int(match[3]), GENERATIONS[generation].cores)
  if rest or chips == 0:
    raise ValueError(f"target is {target!r}, expected an even number, that of cores of {short}")
  return None if chips == 1 else Topology(generation, _compact(chips, dimensions, target))


def _compact(chips: int, dimensions: int, target: str) -> tuple[int, ...]:
  """The shape of so many chips with the shortest sides, as clouds allot them."""
  sides = [side for side in range(1, chips + 1) if chips % side == 0]
  sides = [side for side in sides if side <= 2 or side % 4 == 0]
  shapes = [
    shape
    for shape in itertools.combinations_with_replacement(sides, dimensions)
    if math.prod(shape) == chips
  ]
  if not shapes:
    raise ValueError(
      f"target is {target!r}, and no slice has {chips} chips: name the sizes, as in v6e:2x4"
    )
  shape = min(shapes, key=sum)
  return tuple(reversed(shape)) if shape == (1, 2, 2) else shape  # v5p-8 is 2x2x1


def full_name(target: str) -> str:
  """A target as rows name it: `tpu:v6e`, or `tpu:v6e:2x4`.

  Raises:
    ValueError: as `parse`.
  """
  topology = parse(target)
  return generation_of(target) if topology is None else topology.name


def example(target: str, devices: int) -> str:
  """A topology of the generation of a target that has so many devices, as people write it."""
  generation = generation_of(target)
  short = tpu.short_name(generation)
  dimensions = GENERATIONS[generation].dimensions
  chips = devices // GENERATIONS[generation].devices
  try:
    shape = _compact(chips, dimensions, target)
  except ValueError:
    return f"{short}:2x4" if dimensions == 2 else f"{short}:2x2x4"
  return f"{short}:{'x'.join(map(str, shape))}"


def generation_of(target: str) -> str:
  """The key of `GENERATIONS` of a target as `full_name` returns it, such as `tpu:v6e`."""
  match = _TARGET.fullmatch(target)
  name = _ALIASES.get(match[1], match[1]) if match else target.removeprefix("tpu:")
  return f"tpu:{name}"


@functools.cache
def devices(target: str) -> tuple[Any, ...]:
  """The devices of a topology, or those of the smallest one of a generation.

  Raises:
    ValueError: the compiler knows no such topology, or as `parse`.
  """
  topology = parse(target)
  if topology is None:
    return tpu.devices(target)
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  import jax
  from jax.experimental import topologies

  generation = GENERATIONS[topology.generation]
  prefix, _, _ = generation.topology.partition(":")
  name = f"{prefix}:{'x'.join(map(str, topology.shape))}"
  try:
    described = topologies.get_topology_desc(
      platform="tpu", topology_name=name, wrap=topology.wrap, **generation.options
    )
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    said = str(error).splitlines()[0]
    short = tpu.short_name(topology.name)
    raise ValueError(f"target {short}: the compiler knows no such topology ({said})") from None
  return tuple(described.devices)
