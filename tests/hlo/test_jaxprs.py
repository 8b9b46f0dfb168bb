"""Programs on one device, and operations of programs."""

import functools

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax.hlo import jaxprs
from tpugraphs_jax.hlo.calls import Call


def _sharded(mesh):
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  inner = jax.jit(lambda x, w: x @ w, in_shardings=(spec, None))
  return {
    "constraint": lambda x, w: jax.lax.with_sharding_constraint(x @ w, spec),
    "jit": inner,
    "loop": lambda x, w: jax.lax.fori_loop(0, 2, lambda _, y: inner(y, w), x),
  }


@pytest.mark.parametrize("name", ["constraint", "jit", "loop"])
def test_for_one_device_shardings_are_left_out_and_said(name, caplog):
  mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  function, args = _sharded(mesh)[name], (jnp.ones((4, 8)), jnp.full((8, 8), 0.5))
  jaxprs._say_unsharded.cache_clear()
  call, _ = (jaxprs.for_one_device(Call(function, args, {})) for _ in range(2))
  assert caplog.text.count("shardings of ") == 1
  text = jax.jit(call).lower(*args).as_text()
  assert "sharding" not in text and "sdy" not in text
  np.testing.assert_allclose(jax.jit(call)(*args), function(*args), rtol=1e-5, atol=1e-6)


def test_a_mesh_in_context_is_said_and_other_programs_stay_as_they_are(caplog):
  call = Call(lambda x: x @ x, (jnp.ones((4, 4)),), {})
  assert jaxprs.for_one_device(call) is call and not caplog.text
  jaxprs._say_unsharded.cache_clear()
  with jax.set_mesh(jax.make_mesh((1,), ("x",))):
    assert jaxprs.for_one_device(call) is call
  assert "the mesh" in caplog.text


def test_for_one_device_equations_of_an_explicit_mesh_lose_it():
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
  rows = jax.sharding.PartitionSpec("x")
  function = lambda key: jax.random.normal(key, (4, 4), out_sharding=rows) @ jnp.ones((4, 4))
  args = (jax.random.key(0),)
  with jax.set_mesh(mesh):
    call = jaxprs.for_one_device(Call(function, args, {}))
    expected = np.asarray(function(*args))
  np.testing.assert_allclose(jax.jit(call)(*args), expected, rtol=1e-5)


def test_a_gradient_in_bfloat16_has_no_sharding_to_leave_out(caplog):
  function = jax.grad(lambda w, x: (x @ w).astype(jnp.float32).sum())
  args = (jnp.ones((8, 8), jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16))
  call = Call(function, args, {})
  assert jaxprs.for_one_device(call) is call and not caplog.text


def test_a_function_over_devices_has_none_for_one_device():
  mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("x")
  function = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
  with pytest.raises(ValueError, match="shard_map.*one device"):
    jaxprs.for_one_device(Call(function, (jnp.ones(4),), {}))


def _lines(function, *args, with_details=True):
  return list(jaxprs.operations(Call(function, args, {}).trace.program, with_details=with_details))


def test_weak_types_and_outer_jits_are_no_operations():
  function = lambda x, s: jnp.tanh(x @ x) * s
  x, strong = jnp.ones((4, 4)), jnp.float32(2)
  want = _lines(function, x, strong)
  assert _lines(function, x, 2.0) == _lines(jax.jit(function), x, strong) == want
  assert _lines(jax.jit(jax.jit(function)), x, strong) == want
  for with_details in (True, False):
    assert _lines(lambda x, s: jnp.sin(x @ x) * s, x, strong, with_details=with_details) != want


def test_details_tell_constants_parameters_and_operands_apart():
  table = np.arange(16, dtype=np.float32).reshape(4, 4)
  pairs = [
    (lambda x: x @ table, lambda x: x @ (table + 1)),
    (lambda x: x.sum(0), lambda x: x.sum(1)),
    (lambda x: (x + 1) - x, lambda x: x - (x + 1)),
    (lambda x: x * 2.0, lambda x: x * 3.0),
  ]
  x = jnp.ones((4, 4))
  for first, second in pairs:
    assert _lines(first, x) != _lines(second, x)
    assert _lines(first, x, with_details=False) == _lines(second, x, with_details=False)


def test_operations_are_those_of_arrays_without_a_mesh():
  spec = jax.sharding.PartitionSpec
  step = lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean(jax.nn.relu(x @ w) ** 2))(w)
  expected = _lines(step, jnp.ones((4, 6)), jnp.ones((8, 4)), with_details=False)
  for kind in ("Auto", "Explicit"):
    for devices in (1, 2):
      mesh = jax.make_mesh((devices,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
      whole, rows = (jax.sharding.NamedSharding(mesh, spec(*axes)) for axes in ((), ("d",)))
      args = (jnp.ones((4, 6), device=whole), jnp.ones((8, 4), device=rows))
      with jax.set_mesh(mesh):
        assert _lines(step, *args, with_details=False) == expected


def test_a_program_whose_inner_programs_have_constants_has_operations():
  scale = core.Primitive("scale")
  scale.def_abstract_eval(lambda x, program: x)

  def function(x, table):
    made = jax.make_jaxpr(jnp.multiply)(x, table).jaxpr
    inner = core.Jaxpr(
      made.invars[1:], made.invars[:1], made.outvars, made.eqns, debug_info=made.debug_info
    )
    return scale.bind(x @ x, program=core.ClosedJaxpr(inner, [table]))

  lines = lambda fill, **options: _lines(
    functools.partial(function, table=np.full((4, 4), fill)), jnp.ones((4, 4)), **options
  )
  names = [line.split()[0] for line in lines(2.0, with_details=False)]
  assert names == ["dot_general", "scale", "mul"]
  first, again, other = (lines(fill, with_details=True) for fill in (2.0, 2.0, 3.0))
  assert first == again != other
