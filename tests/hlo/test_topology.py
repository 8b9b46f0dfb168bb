"""Targets with a topology, and meshes that are placed on its chips."""

import jax
import jax.numpy as jnp
import pytest

from tests.support import slices
from tpugraphs_jax.hlo import calls, meshes, topology, tpu
from tpugraphs_jax.hlo.generations import GENERATIONS

P = jax.sharding.PartitionSpec


@pytest.fixture(autouse=True)
def chips(monkeypatch):
  monkeypatch.setattr(topology, "devices", slices.devices)
  monkeypatch.setattr(tpu, "full_name", _full_name)


def _full_name(target):
  name = f"tpu:{target.removeprefix('tpu:')}"
  if name not in GENERATIONS:
    raise ValueError(f"target is {target!r}")
  return name


@pytest.mark.parametrize(
  ("target", "name"),
  [
    ("v6e:2x4", "tpu:v6e:2x4"),
    ("v6e-8", "tpu:v6e:2x4"),  # chips
    ("v5litepod-256", "tpu:v5e:16x16"),
    ("v5p-8", "tpu:v5p:2x2x1"),  # cores
    ("v5p-32", "tpu:v5p:2x2x4"),
    ("v5p-1536", "tpu:v5p:8x8x12"),
    ("tpu7x-8", "tpu:7x:2x2x1"),
    ("v6e-1", "tpu:v6e"),
    ("tpu:v5e:4x4", "tpu:v5e:4x4"),
    ("v5e", "tpu:v5e"),
  ],
)
def test_a_target_has_one_name(target, name):
  assert topology.full_name(target) == name == topology.full_name(name)
  assert topology.generation_of(name) in GENERATIONS


@pytest.mark.parametrize("target", ["v6e:2x2x2", "v5p:4x4", "v6e:0x4", "v6e-7", "v5p-7", "v9:2x2"])
def test_a_target_that_no_slice_has_is_refused_with_its_name(target):
  with pytest.raises(ValueError, match=target.partition(":")[0]):
    topology.full_name(target)


def test_axes_wrap_around_as_those_of_the_hardware():
  wrap = lambda target: topology.parse(target).wrap
  assert wrap("v6e:8x8") == (False,) * 3
  assert wrap("v6e:8x16") == (False, True, False) and wrap("v5e:16x16") == (True, True, False)
  assert wrap("v5p:4x4x8") == (True,) * 3 and wrap("v5p:2x4x4") == (False,) * 3


@pytest.mark.parametrize("axes", [{"data": 4, "model": 2}, {"all": 8}, {"a": 2, "b": 2, "c": 2}])
def test_a_mesh_is_placed_as_jax_places_it(axes):
  mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
  placed = meshes.place(mesh, "tpu:v6e:2x4")
  made = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, devices=slices.devices("tpu:v6e:2x4"))
  assert placed.axes == axes and list(placed.ids) == [chip.id for chip in made.devices.flat]
  assert placed.coords == tuple((*chip.coords, 0) for chip in made.devices.flat)


def test_a_mesh_of_tpus_keeps_its_places():
  chips = slices.devices("tpu:v6e:2x2")
  mesh = jax.sharding.Mesh([chips[3], chips[0], chips[2], chips[1]], ("x",))
  assert meshes.place(mesh, "tpu:v6e:2x2").ids == (3, 0, 2, 1)
  other = jax.sharding.Mesh([*slices.devices("tpu:v6e:2x4")[4:]], ("x",))
  with pytest.raises(ValueError, match="no device 4"):
    meshes.place(other, "tpu:v6e:2x2")


def test_a_mesh_of_another_size_is_refused_with_both():
  mesh = jax.sharding.AbstractMesh((4, 4), ("data", "model"))
  with pytest.raises(ValueError, match="v6e:2x4 has 8 devices .* 16 devices"):
    meshes.place(mesh, "tpu:v6e:2x4")


def _calls():
  mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
  split = jax.sharding.NamedSharding(mesh, P("data"))
  plain, shard = jnp.ones((8, 8)), jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)
  mapped = jax.shard_map(
    lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=split.spec, out_specs=P()
  )
  constraint = lambda x: jax.lax.with_sharding_constraint(x * 2, split)
  yield "argument", jnp.tanh, shard
  yield "jit", jax.jit(jnp.tanh, in_shardings=split), plain
  yield "constraint", jax.jit(constraint), plain
  yield "shard_map", mapped, plain
  yield (
    "inner",
    jax.jit(lambda x: jax.lax.scan(lambda c, _: (mapped(x) + c, None), x[:2], None, 3)),
    plain,
  )


@pytest.mark.parametrize(("function", "x"), [p[1:] for p in _calls()], ids=[p[0] for p in _calls()])
def test_the_mesh_of_a_call_is_found_and_lowered_for_tpus(function, x):
  call = calls.Call(function, (x,), {})
  found = meshes.find(call)
  assert dict(found.shape) == {"data": 4, "model": 2}
  assert '"data"=4, "model"=2' in meshes.lower(call).as_text()


def test_a_call_without_a_mesh_has_none():
  assert meshes.find(calls.Call(jnp.tanh, (1.0,), {})) is None
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("x",))):
    assert meshes.find(calls.Call(jnp.tanh, (1.0,), {})).size == 2
