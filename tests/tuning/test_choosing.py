import functools

import jax
from jax.experimental import pallas as pl
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax import collect
from tpugraphs_jax.tuning import choosing
from tpugraphs_jax.tuning.calls import Call


@jax.custom_jvp
def _tangent(x, w):
  return jnp.tanh(x @ w)


@_tangent.defjvp
def _tangent_jvp(primals, tangents):
  x, w = primals
  value = _tangent(x, w)
  return value, (1 - value**2) * (tangents[0] @ w + x @ tangents[1])


@jax.custom_vjp
def _sine(x, w):
  return jnp.sin(x @ w)


_sine.defvjp(
  lambda x, w: (_sine(x, w), (x, w)),
  lambda saved, ct: (
    (ct * jnp.cos(saved[0] @ saved[1])) @ saved[1].T,
    saved[0].T @ (ct * jnp.cos(saved[0] @ saved[1])),
  ),
)


def _program(params, images):
  x = jax.lax.conv_general_dilated(
    images, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  x = jax.nn.relu(x).reshape(x.shape[0], -1) @ params["dense"]
  x = _sine(_tangent(x, params["square"]), params["square"])
  x, sums = jax.lax.scan(
    lambda state, _: (jnp.tanh(state @ params["square"]), state.sum()), x, None, length=3
  )
  x = jax.checkpoint(lambda y: jnp.sin(y @ params["square"]))(x)
  x = jax.lax.cond(x.sum() > 0, lambda y: y @ params["square"], lambda y: y, x)
  x = jax.jit(lambda y: y @ params["square"].T)(x)
  x = jax.lax.fori_loop(0, 2, lambda _, y: y @ params["square"], x)
  return jnp.mean(x**2) + sums.sum()


def _arguments():
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)
  params = {"kernel": normal(3, 3, 5, 4), "dense": normal(168, 8), "square": normal(8, 8)}
  return params, normal(2, 7, 6, 5)


def _assert_equal(got, want):
  jax.tree.map(
    lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6), got, want
  )


@pytest.mark.parametrize(
  "function",
  [_program, jax.value_and_grad(_program), jax.jit(jax.grad(_program))],
  ids=["forward", "gradient", "jitted gradient"],
)
def test_outputs_stay_the_same_whatever_is_chosen(function):
  args = _arguments()
  found = collect.choices(function, *args)
  want = jax.jit(function)(*args)
  rng = np.random.default_rng(1)
  for numbers in [found.options - 1, rng.integers(0, found.options)]:
    chosen = jax.jit(collect.apply(function, found.choice(numbers)))
    assert "LayoutConstraint" in chosen.lower(*args).as_text()
    got = chosen(*args)
    _assert_equal(got, want)
    # An output that kept a chosen layout would be read wrongly by the next program.
    _assert_equal(
      jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))(got),
      jax.tree.map(lambda leaf: leaf + 1, want),
    )


def test_choices_inside_calls_loops_and_branches_are_applied():
  args = _arguments()
  found = collect.choices(_program, *args, operands=True)
  square = next(
    place for place, group in enumerate(found.groups) if group.shapes == ((2, 8), (2, 8), (8, 8))
  )
  numbers = [0] * len(found.groups)
  numbers[square] = 8
  text = jax.jit(collect.apply(_program, found.choice(numbers))).lower(*args).as_text()
  # Two custom derivatives, a scan, a checkpoint, a branch, a jit and a loop.
  assert text.count("LayoutConstraint") >= 7 * 3


def test_the_default_choice_leaves_the_program_as_it_is():
  args = _arguments()
  found = collect.choices(_program, *args)
  text = jax.jit(collect.apply(_program, found.default)).lower(*args).as_text()
  assert "LayoutConstraint" not in text
  assert "optimization_barrier" not in text


def test_the_derivative_of_an_applied_choice_is_that_of_the_function():
  args = _arguments()
  found = collect.choices(_program, *args)
  chosen = collect.apply(_program, found.choice(found.options - 1))
  _assert_equal(jax.jit(jax.grad(chosen))(*args), jax.jit(jax.grad(_program))(*args))


def test_vmap_and_donated_arguments_work():
  x, w = jnp.ones((3, 4, 8)), jnp.ones((8, 8))
  function = jax.vmap(lambda x, w: jnp.tanh(x @ w), in_axes=(0, None))
  found = collect.choices(function, x, w)
  chosen = collect.apply(function, found.choice(found.options - 1))
  want = jax.jit(function)(x, w)
  np.testing.assert_array_equal(jax.jit(chosen, donate_argnums=0)(x, w), want)
  assert x.is_deleted()


def test_equal_equations_are_one_group_and_others_are_not():
  def function(x, w, v):
    return (x @ w) @ w + x @ v.T

  square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  found = collect.choices(function, square, square, square)
  assert len(found.groups) == 1  # v.T is a transpose of its own
  found = collect.choices(lambda x, w: jnp.einsum("ij,kj->ik", x @ w, w), square, square)
  assert len(found.groups) == 2


def test_a_reshape_chooses_among_pairs_of_orders_that_move_nothing():
  x = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)
  (group,) = collect.choices(lambda x: x.reshape(2, 12), x).groups
  # The output has two parts, from the first dimension and from the two others: two orders.
  assert group.options == (((), ()), ((0, 1), ()), ((1, 0), ()))
  (group,) = collect.choices(lambda x: x.reshape(2, 12), x, operands=True).groups
  assert group.options == (((), ()), ((0, 1), (0, 2, 1)), ((1, 0), (2, 1, 0)))


def test_operands_are_left_to_the_compiler_unless_asked_for():
  x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
  (group,) = collect.choices(lambda x: x @ x, x).groups
  assert group.options == (((), (), ()), ((0, 1), (), ()), ((1, 0), (), ()))
  (group,) = collect.choices(lambda x: x @ x, x, operands=True).groups
  assert len(group.options) == 9


def test_numbers_that_do_not_fit_are_refused():
  found = collect.choices(lambda x: x @ x, jax.ShapeDtypeStruct((4, 4), jnp.float32))
  with pytest.raises(ValueError, match="numbers"):
    found.choice([0, 0])
  with pytest.raises(ValueError, match="option"):
    found.choice([9])


def test_layouts_inside_an_opaque_primitive_are_refused_by_its_name():
  mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("x")
  function = jax.shard_map(
    lambda x, w: x @ w, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec
  )
  with pytest.raises(ValueError, match="shard_map"):
    collect.choices(function, jnp.ones((4, 8)), jnp.ones((8, 8)))


def _opaque(x, w):
  """A solver and a Pallas kernel between two dots."""
  kernel = lambda rows, out: out.__setitem__(..., rows[...] @ rows[...])
  square = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 8), x.dtype), interpret=True)
  solved = jnp.linalg.solve(x.T @ x + jnp.eye(8), w)
  return jnp.tanh(square(w) @ solved), jnp.linalg.inv(w + 8 * jnp.eye(8))


def test_solvers_and_hand_written_kernels_are_left_to_the_compiler():
  rng = np.random.default_rng(0)
  args = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((9, 8), (8, 8)))
  found = collect.choices(_opaque, *args)
  outputs = [group.shapes[0] for group in found.groups if group.primitive == "dot_general"]
  assert (8, 8) in outputs and len(found.groups) >= 2
  assert found.left_out["pallas_call"] == 1 and found.left_out["custom_linear_solve"] > 0
  chosen = jax.jit(collect.apply(_opaque, found.choice(found.options - 1)))
  _assert_equal(chosen(*args), jax.jit(_opaque)(*args))


@pytest.mark.parametrize("solver", [jax.scipy.sparse.linalg.cg, jax.scipy.sparse.linalg.gmres])
def test_iterative_solvers_are_left_to_the_compiler(solver):
  function = lambda x, b: jnp.tanh(x @ solver(lambda v: x.T @ (x @ v) + v, b)[0])
  found = collect.choices(function, jnp.ones((4, 8)), jnp.ones(8))
  assert found.groups[-1].shapes == ((4,), (4, 8), (8,))
  assert sum(found.left_out.values()) >= 2


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
  choosing._say_unsharded.cache_clear()
  call, _ = (choosing.for_one_device(Call(function, args, {})) for _ in range(2))
  assert caplog.text.count("shardings of ") == 1
  text = jax.jit(call).lower(*args).as_text()
  assert "sharding" not in text and "sdy" not in text
  _assert_equal(jax.jit(call)(*args), function(*args))


def test_a_mesh_in_context_is_said_and_other_programs_stay_as_they_are(caplog):
  call = Call(lambda x: x @ x, (jnp.ones((4, 4)),), {})
  assert choosing.for_one_device(call) is call and not caplog.text
  choosing._say_unsharded.cache_clear()
  with jax.set_mesh(jax.make_mesh((1,), ("x",))):
    assert choosing.for_one_device(call) is call
  assert "the mesh" in caplog.text


def test_for_one_device_equations_of_an_explicit_mesh_lose_it():
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
  rows = jax.sharding.PartitionSpec("x")
  function = lambda key: jax.random.normal(key, (4, 4), out_sharding=rows) @ jnp.ones((4, 4))
  args = (jax.random.key(0),)
  with jax.set_mesh(mesh):
    call = choosing.for_one_device(Call(function, args, {}))
    expected = np.asarray(function(*args))
  np.testing.assert_allclose(jax.jit(call)(*args), expected, rtol=1e-5)


def test_a_gradient_in_bfloat16_has_no_sharding_to_leave_out(caplog):
  function = jax.grad(lambda w, x: (x @ w).astype(jnp.float32).sum())
  args = (jnp.ones((8, 8), jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16))
  call = Call(function, args, {})
  assert choosing.for_one_device(call) is call and not caplog.text


def test_a_function_over_devices_has_none_for_one_device():
  mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("x")
  function = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
  with pytest.raises(ValueError, match="shard_map.*one device"):
    choosing.for_one_device(Call(function, (jnp.ones(4),), {}))


def _lines(function, *args, with_details=True):
  return list(
    choosing.operations(Call(function, args, {}).trace.program, with_details=with_details)
  )


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


def _collectives(function, *args):
  text = function.lower(*args).compile().as_text()
  return {name: text.count(f" {name}(") for name in ("all-gather", "all-reduce", "all-to-all")}


def _placed(mesh, shapes):
  rng, spec = np.random.default_rng(0), jax.sharding.PartitionSpec
  return tuple(
    jax.device_put(rng.normal(size=shape), jax.sharding.NamedSharding(mesh, spec(*axes)))
    for shape, axes in shapes
  )


@pytest.mark.parametrize(
  "kind, axes", [("Auto", ("model", None)), ("Explicit", (None, None))], ids=["auto", "explicit"]
)
def test_layouts_on_a_mesh_add_no_collective(kind, axes):
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2
  )

  def step(x, w, v):
    y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ w @ v), None), x, None, length=2)
    return (y @ w).reshape(16, 2, 8)

  shapes = ((16, 8), ("data", None)), ((8, 16), axes[::-1]), ((16, 8), axes)
  args = _placed(mesh, shapes)
  with jax.set_mesh(mesh):
    found, plain = collect.choices(step, *args, operands=True), jax.jit(step)
    expected = plain(*args)
    for numbers in (found.options - 1, found.options // 2):
      chosen = jax.jit(collect.apply(step, found.choice(numbers)))
      assert "CustomSPMDPartitioning" in chosen.lower(*args).as_text()
      assert _collectives(chosen, *args) == _collectives(plain, *args)
      _assert_equal(chosen(*args), expected)
      assert chosen(*args).sharding.is_equivalent_to(expected.sharding, 3)


def test_an_applied_choice_can_be_mapped_and_sharded_by_hand():
  x, w = (jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)), jnp.float32) for _ in "xw")
  function = lambda x, w: jnp.tanh(x @ w) @ w
  found = collect.choices(function, x[0], w[0])
  chosen = collect.apply(function, found.choice(found.options - 1))
  mapped = jax.jit(jax.vmap(chosen, in_axes=(0, None)))
  assert "LayoutConstraint" in mapped.lower(x, w[0]).as_text()
  _assert_equal(mapped(x, w[0]), function(x, w[0]))
  _assert_equal(jax.jit(jax.vmap(chosen))(x, w), jax.vmap(function)(x, w))
  total = lambda function: lambda x: jax.vmap(function, in_axes=(0, None))(x, w[0]).sum()
  _assert_equal(jax.grad(total(chosen))(x), jax.grad(total(function))(x))


def test_operations_are_those_of_arrays_without_a_mesh():
  step = lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean(jax.nn.relu(x @ w) ** 2))(w)
  expected = _lines(step, jnp.ones((4, 6)), jnp.ones((8, 4)), with_details=False)
  for kind in ("Auto", "Explicit"):
    for devices in (1, 2):
      mesh = jax.make_mesh((devices,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
      args = _placed(mesh, (((4, 6), ()), ((8, 4), ("d",))))
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
