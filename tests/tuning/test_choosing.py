import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax import collect


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


_add_one = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))


@pytest.mark.parametrize(
  "function", [jax.jit(_program), jax.value_and_grad(_program)], ids=["jitted", "gradient"]
)
def test_outputs_stay_the_same_whatever_is_chosen(function):
  args = _arguments()
  found = collect.choices(function, *args)
  want = jax.jit(function)(*args)
  rng = np.random.default_rng(1)
  for numbers in [found.options - 1, rng.integers(0, found.options)]:
    lowered = jax.jit(collect.apply(function, found.choice(numbers))).lower(*args)
    assert "LayoutConstraint" in lowered.as_text()
    got = lowered.compile()(*args)
    _assert_equal(got, want)
    # An output that kept a chosen layout would be read wrongly by the next program.
    _assert_equal(_add_one(got), jax.tree.map(lambda leaf: np.asarray(leaf) + 1, want))


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


def _collectives(compiled):
  text = compiled.as_text()
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
    found = collect.choices(step, *args, operands=True)
    plain = jax.jit(step).lower(*args).compile()
    expected = plain(*args)
    for numbers in (found.options - 1, found.options // 2):
      lowered = jax.jit(collect.apply(step, found.choice(numbers))).lower(*args)
      assert "CustomSPMDPartitioning" in lowered.as_text()
      chosen = lowered.compile()
      assert _collectives(chosen) == _collectives(plain)
      got = chosen(*args)
      _assert_equal(got, expected)
      assert got.sharding.is_equivalent_to(expected.sharding, 3)


def test_an_applied_choice_can_be_mapped_and_sharded_by_hand():
  x, w = (jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)), jnp.float32) for _ in "xw")
  function = lambda x, w: jnp.tanh(x @ w) @ w
  found = collect.choices(function, x[0], w[0])
  chosen = collect.apply(function, found.choice(found.options - 1))
  mapped = jax.jit(jax.vmap(chosen, in_axes=(0, None)))
  assert "LayoutConstraint" in mapped.lower(x, w[0]).as_text()
  expected = jax.jit(jax.vmap(function))
  _assert_equal(mapped(x, w[0]), expected(x, jnp.stack([w[0]] * 3)))
  _assert_equal(jax.jit(jax.vmap(chosen))(x, w), expected(x, w))
  total = lambda function: lambda x: jax.vmap(function, in_axes=(0, None))(x, w[0]).sum()
  _assert_equal(jax.jit(jax.grad(total(chosen)))(x), jax.jit(jax.grad(total(function)))(x))
