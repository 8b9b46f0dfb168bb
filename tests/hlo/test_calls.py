"""Calls of functions whose arguments are not all arrays, and how the functions are jitted."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpugraphs_jax
from tpugraphs_jax import collect, hlo
from tpugraphs_jax.hlo import calls
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.tuning import choosing, labels, measure
from tpugraphs_jax.tuning.problem import Problem

_X, _W = jax.ShapeDtypeStruct((4, 6), jnp.float32), jax.ShapeDtypeStruct((6, 3), jnp.float32)


def _powers(x, w, n, *, name="tanh", scale=1.0):
  """Needs `n` and `name` while it is traced."""
  return sum(getattr(jnp, name)(x @ w) * scale**power for power in range(n)), name


class FilterJit:
  """A wrapper as `eqx.filter_jit` is: whatever is no array is static, and may be an output."""

  def __init__(self, function):
    self._function, self.__name__ = function, function.__name__

  def __call__(self, *args, **kwargs):
    return self._function(*args, **kwargs)

  def lower(self, *args, **kwargs):
    raise TypeError("no shapes are taken here")


_jitted = jax.jit(lambda x, w, n, *, scale=1.0: _powers(x, w, n, scale=scale)[0], static_argnums=2)
_CASES = {
  "text and scalar": (
    lambda x, w, name, s: getattr(jnp, name)(x @ w) * s,
    (_X, _W, "sin", 2.0),
    {},
  ),
  "static number": (_jitted, (_X, _W, 3), {"scale": 0.5}),
  "static by name": (_jitted, (_X, _W), {"n": 3, "scale": 0.5}),
  "keyword arrays": (lambda x, *, w: jnp.tanh(x @ w), (_X,), {"w": _W}),
  "function": (lambda x, w, act: act(x @ w), (_X, _W, jnp.tanh), {}),
  "filtered": (FilterJit(_powers), (_X, _W, 2), {"name": "cos"}),
  "tree with a function": (
    lambda net, x: net["act"](x @ net["w"]),
    ({"w": _W, "act": jnp.sin}, _X),
    {},
  ),
}


def _with_arrays(tree):
  rng = np.random.default_rng(0)
  is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
  return jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) if is_shape(leaf) else leaf,
    tree,
  )


@pytest.mark.parametrize("function, args, kwargs", _CASES.values(), ids=_CASES)
def test_a_function_takes_what_jit_takes(function, args, kwargs):
  found = collect.choices(function, *args, **kwargs)
  (group,) = found.groups
  assert group.shapes == ((4, 3), (4, 6), (6, 3))
  args, kwargs = _with_arrays((args, kwargs))
  chosen = collect.apply(function, found.choice(found.options - 1))

  def check(got, want):
    if isinstance(want, str):
      assert got == want
    else:
      np.testing.assert_allclose(got, want, rtol=1e-5)

  jax.tree.map(check, chosen(*args, **kwargs), function(*args, **kwargs))
  graph = hlo.featurize(function, *args, **kwargs)
  assert len(graph.config_node) >= 1 and graph.name.startswith("jit_")


def test_scalars_are_arrays_unless_a_wrapper_decides():
  function = lambda x, s: x * s
  assert Call(function, (_X, 2.0), {}).arrays == (_X, 2.0)
  assert Call(FilterJit(function), (_X, 2.0), {}).arrays == (_X,)
  (_, weak) = Call(function, (_X, 2.0), {}).shapes(
    jax.sharding.SingleDeviceSharding(jax.devices()[0])
  )
  assert weak.weak_type and weak.dtype == jnp.float32


def test_names_of_arguments_stay_in_the_graph():
  graph = hlo.featurize(lambda kernel, images: images @ kernel, _W, _X)
  assert {origin.op_name for origin in graph.origins} >= {"kernel", "images"}


def test_partial_functions_have_a_name():
  assert Call(functools.partial(jnp.dot, _X), (_W,), {}).__name__ == "partial"


def _twice(x, w):
  return jnp.tanh(x @ w) @ w.T, w * 2


_ARGS = _with_arrays((_X, _W))


def _chosen(function, *args, **kwargs):
  """The function with a layout chosen for each group."""
  found = collect.choices(function, *args, **kwargs)
  return collect.apply(function, found.choice(found.options - 1))


def _fresh(args):
  return jax.tree.map(lambda leaf: jnp.array(leaf) if isinstance(leaf, jax.Array) else leaf, args)


def _aliased(step, *args):
  return step.lower(*args).compile().memory_analysis().alias_size_in_bytes


@pytest.mark.parametrize("options", [{"donate_argnums": 1}, {"donate_argnames": ("x", "w")}])
def test_a_jitted_function_donates_the_same_arrays(options):
  step = jax.jit(_twice, **options)
  chosen = _chosen(step, *_ARGS)
  assert _aliased(chosen, *_ARGS) == _aliased(step, *_ARGS) > 0
  args = _fresh(_ARGS)
  jax.tree.map(np.testing.assert_array_equal, chosen(*args), _twice(*_ARGS))
  assert [array.is_deleted() for array in args] == ["donate_argnames" in options, True]


def test_what_a_function_donates_reaches_its_labels():
  step = jax.jit(_twice, donate_argnums=1)
  for compiled in (
    measure.compile_function(step, _ARGS, {}),
    measure.compile_function(
      Problem(Call(step, _ARGS), labels.BytesEstimate()).apply((1, 0)), _ARGS, {}
    ),
  ):
    assert compiled.memory_analysis().alias_size_in_bytes == _aliased(step, *_ARGS)
    assert measure.seconds_of_call(compiled, _ARGS, 3) > 0
    assert not any(array.is_deleted() for array in _ARGS)


def test_donation_that_another_jit_ignores_is_said(caplog):
  chosen = _chosen(jax.jit(_twice, donate_argnums=1), *_ARGS)
  assert not caplog.text
  jax.tree.map(np.testing.assert_array_equal, jax.jit(chosen)(*_ARGS), _twice(*_ARGS))
  assert "donates" in caplog.text


def test_a_jitted_function_keeps_its_shardings():
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  on = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
  step = jax.jit(
    _twice,
    in_shardings=(on("a", None), on(None, None)),
    out_shardings=(None, on("b", None)),
    donate_argnums=1,
  )
  chosen = _chosen(step, *_ARGS)
  plain, other = (function.lower(*_ARGS).compile() for function in (step, chosen))
  for leaf, expected in zip(
    jax.tree.leaves(other.input_shardings + (other.output_shardings,)),
    jax.tree.leaves(plain.input_shardings + (plain.output_shardings,)),
    strict=True,
  ):
    assert leaf.is_equivalent_to(expected, 2)
  _, doubled = chosen(*_fresh(_ARGS))
  assert doubled.sharding.is_equivalent_to(on("b", None), 2)


def test_compiler_options_of_a_jitted_function_stay_and_may_be_added():
  step = jax.jit(_twice, compiler_options={"xla_cpu_enable_fast_math": True})
  call = Call(step, _ARGS, {})
  assert call.compiler_options({"other": 1}) == {"xla_cpu_enable_fast_math": True, "other": 1}
  jax.tree.map(np.testing.assert_allclose, _chosen(step, *_ARGS)(*_ARGS), _twice(*_ARGS))
  with pytest.raises(jax.errors.JaxRuntimeError, match="no_such"):
    evaluate = functools.partial(choosing.evaluate, choice={})
    calls.RewrittenFunction(step, evaluate, {"xla_no_such": 1})(*_ARGS)


def test_static_arguments_stay_static_and_other_scalars_stay_arrays():
  traced = []

  @functools.partial(jax.jit, static_argnames=("layers", "shape"), donate_argnums=0)
  def step(x, scale, layers, *, shape=(2, 12)):
    traced.append(scale)
    for _ in range(layers):
      x = x @ jnp.ones((6, 6)) * scale
    return x.reshape(shape)

  chosen = _chosen(step, *_fresh((_ARGS[0], 1.0, 2)))
  before = len(traced)
  for scale in (1.0, 2.0, 3.0):
    for layers in (1, 2):
      got = chosen(*_fresh((_ARGS[0], scale, layers)), shape=(3, 8))
      want = step(*_fresh((_ARGS[0], scale, layers)), shape=(3, 8))
      np.testing.assert_allclose(got, want, rtol=1e-6)
  assert len(traced) - before == 2  # once for each number of layers, by both


def test_outputs_that_are_no_arrays_stay_as_they_are():
  function = lambda x, w: {"y": x @ w, "activation": jnp.sin, "name": "sine"}
  outputs = _chosen(function, *_ARGS)(*_ARGS)
  assert outputs["activation"] is jnp.sin and outputs["name"] == "sine"
  assert len(hlo.featurize(function, *_ARGS).config_node) == 1
  assert measure.compile_function(function, _ARGS, {}).cost_analysis()


def test_settings_among_the_leaves_are_refused_with_the_remedy():
  function = lambda tree, x: x @ tree["w"] if tree["is_on"] else x
  with pytest.raises(ValueError, match="partial.*filter_jit"):
    hlo.featurize(function, {"w": _W, "is_on": True}, _X)


class _Model(nnx.Module):
  def __init__(self):
    self.layer, self.steps = nnx.Linear(6, 3, rngs=nnx.Rngs(0)), nnx.Variable(jnp.array(0))


def _update(model, other, x):
  model.steps[...] += 1
  other[...] = other[...] + model.layer(x).sum()
  return model.layer(x)


def test_state_of_nnx_is_updated_also_where_arguments_share_it():
  def states(function):
    model, x = _Model(), _ARGS[0]
    outputs = [function(model, model.layer.bias, x) for _ in range(3)]
    return outputs, model.steps[...], model.layer.bias[...]

  step = nnx.jit(_update)
  model = _Model()
  chosen = _chosen(step, model, model.layer.bias, _X)
  expected = states(step)
  for function in (chosen, nnx.jit(chosen), nnx.jit(_chosen(_update, model, model.layer.bias, _X))):
    jax.tree.map(np.testing.assert_allclose, states(function), expected)
  assert model.steps[...] == 0


def test_state_that_would_be_lost_is_refused():
  model = _Model()
  args = model, model.layer.bias, _ARGS[0]
  chosen = _chosen(nnx.jit(_update), *args)
  with pytest.raises(ValueError, match="call it as it is"):
    jax.jit(chosen)(*args)
  with pytest.raises(ValueError, match=r"nnx.jit\(_update\)"):
    _chosen(_update, *args)(*args)
  with pytest.raises(ValueError, match=r"nnx.jit\(_update\)"):
    tpugraphs_jax.tune(_update, *args)


def test_an_object_with_methods_of_a_stage_is_a_function():
  class Operator:
    jaxpr, upper = None, 1.0

    def __call__(self, x, w):
      return x @ w

    def trace(self):
      return 0.0

    def lower(self):
      return self

    compiler_ir = runtime_executable = trace

  assert len(hlo.featurize(Operator(), _X, _W).config_node) == 1
  assert len(hlo.featurize(jax.jit(jnp.dot).lower(_X, _W)).config_node) == 1
  assert len(hlo.featurize(nnx.jit(jnp.dot).lower(_X, _W)).config_node) == 1


def test_source_lines_are_the_callers():
  graph = hlo.featurize(jax.scipy.linalg.expm, jax.ShapeDtypeStruct((8, 8), jnp.float32))
  assert {origin.where.partition(":")[0] for origin in graph.origins} <= {"", "test_calls.py"}


@pytest.mark.parametrize("function", [3, None, "step", jax.jit(lambda x: x).lower(1.0)])
def test_what_is_no_function_is_refused_in_a_line(function):
  for use in (
    lambda: calls.Call(function, (1.0,), {}),
    lambda: calls.RewrittenFunction(function, None),
  ):
    with pytest.raises(ValueError, match="expected a function") as caught:
      use()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [object, "U3", "S2", "datetime64[s]"])
def test_arrays_without_numbers_are_refused_by_their_dtype(dtype):
  with pytest.raises(ValueError, match="expected numbers"):
    calls.Call(lambda x: x, (np.zeros(2, dtype),), {})
  calls.Call(lambda x: x, (np.zeros(2, jnp.bfloat16),), {})
