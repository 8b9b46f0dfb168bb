"""Meshes of functions: found in a call, lowered for TPUs, and placed on the chips of a topology.

A lowered function names the axes of its mesh and no devices. It can therefore be compiled for
other devices than those of the mesh with which it was written: CPU devices, or none of an
`AbstractMesh`.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from typing import Any

import jax
from jax.extend import core

from tpugraphs_jax.hlo import calls, jaxprs, topology, tpu

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclasses.dataclass(frozen=True)
class Placement:
  """The devices of a topology that run the partitions of a program.

  Attributes:
    axes: of the mesh: size by name.
    ids: of the device of each partition, in the order of the mesh.
    coords: x, y, z and core of the device of each partition.
  """

  axes: dict[str, int]
  ids: tuple[int, ...]
  coords: tuple[tuple[int, int, int, int], ...]


def find(call: calls.Call) -> Mesh | None:
  """The mesh of a call, the largest where there are several; None where it has one device."""
  meshes: list[Mesh] = [jax.sharding.get_abstract_mesh()]
  meshes += _in([getattr(array, "sharding", None) for array in call.arrays])
  meshes += _of_program(call.trace.program.jaxpr)
  largest = max(meshes, key=lambda mesh: 0 if mesh.empty else mesh.size)
  return None if largest.empty or largest.size == 1 else largest


def _of_program(jaxpr: core.Jaxpr) -> Iterator[Mesh]:
  for equation in jaxpr.eqns:
    yield from _in(jax.tree.leaves(equation.params))
    for inner in jaxprs.programs_of(equation):
      yield from _of_program(inner)


def _in(values: list[Any]) -> Iterator[Mesh]:
  for value in values:
    value = getattr(value, "sharding", None) or value  # of a format
    value = value.mesh if isinstance(value, jax.sharding.NamedSharding) else value
    if isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
      yield value


def named(mesh: Mesh) -> str:
  """A mesh in a sentence: `a mesh of 8 devices (data 4, model 2)`."""
  axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
  return f"a mesh of {mesh.size} devices ({axes})"


def place(mesh: Mesh, target: str) -> Placement:
  """The devices of a mesh of the same axes, as `jax.make_mesh` places them on a topology.

  A mesh of TPU devices keeps its places.

  Raises:
    ValueError: the mesh does not fit the topology.
  """
  devices = topology.devices(target)
  short = tpu.short_name(target)
  if mesh.size != len(devices):
    raise ValueError(
      f"target {short} has {len(devices)} devices and the function has {named(mesh)}: give a "
      "topology with as many devices, or another mesh"
    )
  if isinstance(mesh, jax.sharding.Mesh) and mesh.devices.flat[0].platform == "tpu":
    by_id = {device.id: device for device in devices}
    if unknown := {device.id for device in mesh.devices.flat} - by_id.keys():
      raise ValueError(
        f"target {short} has no device {min(unknown)}, which the function's mesh of TPU devices "
        "has: make the mesh of the same topology"
      )
    placed = [by_id[device.id] for device in mesh.devices.flat]
  else:
    try:
      kinds = {"axis_types": mesh.axis_types} if mesh.axis_types else {}
      made = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, devices=devices, **kinds)
    except (ValueError, NotImplementedError) as error:
      said = str(error).splitlines()[0]
      raise ValueError(f"{named(mesh)} does not fit {short}: {said}") from None
    placed = list(made.devices.flat)
  return Placement(
    dict(mesh.shape),
    tuple(device.id for device in placed),
    tuple((*device.coords, device.core_on_chip) for device in placed),
  )


def lower(call: calls.Call) -> jax.stages.Lowered:
  """A call as jax lowers it for TPUs, with its meshes and shardings."""
  shapes = call.shapes()
  arrays = [
    jax.ShapeDtypeStruct(
      shape.shape,
      shape.dtype,
      weak_type=shape.weak_type,
      sharding=_kept(getattr(array, "sharding", None)),
    )
    for array, shape in zip(call.arrays, shapes)
  ]
  return call.lower(arrays, platform="tpu")


def _kept(sharding: Any) -> Any:
  """A sharding over a mesh; None of an array that lies on one device."""
  is_split = isinstance(sharding, jax.sharding.Sharding) and sharding.num_devices > 1
  return sharding if is_split else None
