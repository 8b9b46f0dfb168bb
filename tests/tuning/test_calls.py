"""Calls of functions whose arguments are not all arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax import collect, hlo
from tpugraphs_jax.tuning.calls import Call

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
