"""Training steps of flax, nnx, modules as Equinox has them, scans, graphs and meshes.

Run as a script it trains each step with saved layouts and prints, as JSON, its losses.
"""

from collections.abc import Callable
import functools
import json
import pathlib
import re
import sys
from typing import Any, NamedTuple

from flax import nnx
import flax.linen as nn
from flax.training.train_state import TrainState
import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpugraphs_jax

STEPS = 10
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Example(NamedTuple):
  """A jitted step, its arguments, and the next arguments and the loss by arguments and outputs."""

  step: Callable[..., Any]
  args: tuple
  after: Callable[[tuple, Any], tuple[tuple, Any]]


def _first(args, outputs):
  """The first output replaces the first argument; the second is the loss."""
  return (outputs[0], *args[1:]), outputs[1]


def _normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


class _Convolutions(nn.Module):
  @nn.compact
  def __call__(self, images):
    x = nn.relu(nn.Conv(8, (3, 3))(images))
    return nn.Dense(5)(x.reshape(len(x), -1))


def flax_step():
  """Flax and optax, with a donated state that holds functions."""
  model, images = _Convolutions(), _normal(4, 6, 6, 3)
  labels = jnp.arange(4) % 5

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, images, labels):
    def loss_of(params):
      logits = state.apply_fn({"params": params}, images)
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss

  params = model.init(jax.random.key(0), images)["params"]
  state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
  return Example(step, (state, images, labels), _first)


class _Net(nnx.Module):
  def __init__(self, rngs):
    self.inner, self.outer = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    return self.outer(self.dropout(nnx.relu(self.inner(x))))


def nnx_step():
  """A model and an optimizer that are changed in place, with the random state of a dropout."""

  @nnx.jit
  def step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss

  model = _Net(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
  args = model, optimizer, _normal(32, 16), jnp.ones((32, 8))
  return Example(step, args, lambda args, loss: (args, loss))


@jax.tree_util.register_pytree_node_class
class Module:
  """Weights with an activation function and a setting among its leaves."""

  def __init__(self, inner, outer, activation, is_scaled):
    self.inner, self.outer, self.activation, self.is_scaled = inner, outer, activation, is_scaled

  def tree_flatten(self):
    return (self.inner, self.outer, self.activation, self.is_scaled), None

  @classmethod
  def tree_unflatten(cls, _, leaves):
    return cls(*leaves)

  def __call__(self, x):
    x = self.activation(x @ self.inner) @ self.outer
    return x / 2 if self.is_scaled else x


@jax.tree_util.register_static
class Static:
  """Leaves that are no arrays."""

  def __init__(self, tree, leaves):
    self.tree, self.leaves = tree, tuple(leaves)

  def __eq__(self, other):
    return (self.tree, self.leaves) == (other.tree, other.leaves)

  def __hash__(self):
    return hash((self.tree, self.leaves))

  def combine(self, arrays):
    values = iter(arrays)
    leaves = [next(values) if leaf is None else leaf for leaf in self.leaves]
    return jax.tree.unflatten(self.tree, leaves)

  @classmethod
  def partition(cls, tree):
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) for leaf in leaves]
    static = [None if has_array else leaf for leaf, has_array in zip(leaves, is_array)]
    return [leaf for leaf, has_array in zip(leaves, is_array) if has_array], cls(structure, static)


class FilterJit:
  """A wrapper as `eqx.filter_jit(donate="all-except-first")`: whatever is no array is static."""

  def __init__(self, function):
    self.__name__ = function.__name__

    @functools.partial(jax.jit, static_argnums=2, donate_argnums=1)
    def jitted(first, rest, static):
      outputs, of_outputs = Static.partition(function(*static.combine([*first, *rest])))
      return outputs, of_outputs

    self._jitted = jitted

  def _split(self, args):
    first = Static.partition(args[:1])[0]
    arrays, static = Static.partition(args)
    return first, arrays[len(first) :], static

  def __call__(self, *args):
    outputs, static = self._jitted(*self._split(args))
    return static.combine(outputs)

  def lower(self, *args):
    return self._jitted.lower(*self._split(args))


def module_step():
  """A module goes in and out, with a function and a setting among its leaves."""

  @FilterJit
  def step(batch, module):
    x, y = batch
    arrays, static = Static.partition(module)
    loss_of = lambda arrays: jnp.mean((static.combine(arrays)(x) - y) ** 2)
    loss, grads = jax.value_and_grad(loss_of)(arrays)
    return static.combine([array - 0.1 * grad for array, grad in zip(arrays, grads)]), loss

  module = Module(_normal(12, 24) / 4, _normal(24, 3, seed=1) / 4, jnp.tanh, True)
  batch = _normal(16, 12, seed=2), jnp.ones((16, 3))
  return Example(step, (batch, module), lambda args, outputs: ((args[0], outputs[0]), outputs[1]))


def equinox_step():
  """The same with Equinox."""
  import equinox as eqx

  optimizer = optax.adam(1e-2)

  @eqx.filter_jit(donate="all-except-first")
  def step(batch, model, state):
    x, y = batch
    loss_of = lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2)
    loss, grads = eqx.filter_value_and_grad(loss_of)(model)
    updates, state = optimizer.update(grads, state, model)
    return eqx.apply_updates(model, updates), state, loss

  model = eqx.nn.MLP(12, 3, 24, 1, key=jax.random.key(0))
  state = optimizer.init(eqx.filter(model, eqx.is_array))
  batch = _normal(16, 12, seed=2), jnp.ones((16, 3))
  after = lambda args, outputs: ((args[0], *outputs[:2]), outputs[2])
  return Example(step, (batch, model, state), after)


def scan_step():
  """A recurrent network over time, whose number of layers is static."""

  @functools.partial(jax.jit, donate_argnames="params", static_argnames="layers")
  def step(params, inputs, layers):
    def loss_of(params):
      x = inputs
      for _ in range(layers):
        cell = lambda state, x: (jnp.tanh(x @ params["x"] + state @ params["h"]),) * 2
        _, x = jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)
      return jnp.mean((x[-1] - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda w, grad: w - 0.1 * grad, params, grads), loss

  params = {"x": _normal(12, 12) / 4, "h": _normal(12, 12, seed=1) / 4}
  return Example(step, (params, _normal(7, 16, 12, seed=2), 2), _first)


def graph_step():
  """A graph network with gathers and segment sums."""

  @functools.partial(jax.jit, donate_argnums=(0,))
  def step(params, nodes, senders, receivers):
    def loss_of(params):
      messages = jax.nn.relu(nodes[senders] @ params["message"])
      sums = jax.ops.segment_sum(messages, receivers, len(nodes))
      return jnp.mean((jnp.concatenate([nodes, sums], axis=1) @ params["out"] - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda w, grad: w - 0.01 * grad, params, grads), loss

  rng = np.random.default_rng(0)
  ends = [jnp.asarray(rng.integers(0, 24, 60)) for _ in range(2)]
  params = {"message": _normal(12, 20) / 4, "out": _normal(32, 4, seed=1) / 4}
  return Example(step, (params, _normal(24, 12, seed=2), *ends), _first)


def sharded_step():
  """Two layers on all devices: their batch is sharded over rows, their weights over columns."""
  mesh = jax.make_mesh(
    (jax.device_count() // 2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  on = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
  shardings = {"inner": on(None, "model"), "outer": on("model", None)}

  @functools.partial(
    jax.jit,
    in_shardings=(shardings, on("data", None)),
    out_shardings=(shardings, None),
    donate_argnums=0,
  )
  def step(params, x):
    def loss_of(params):
      hidden = jax.lax.with_sharding_constraint(x @ params["inner"], on("data", "model"))
      return jnp.mean((jax.nn.gelu(hidden) @ params["outer"] - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda w, grad: w - 0.1 * grad, params, grads), loss

  params = {"inner": _normal(16, 32) / 4, "outer": _normal(32, 16, seed=1) / 4}
  return Example(step, (params, _normal(64, 16, seed=2)), _first)


EXAMPLES = {
  "equinox": equinox_step,
  "flax": flax_step,
  "nnx": nnx_step,
  "module": module_step,
  "scan": scan_step,
  "graph": graph_step,
  "sharded": sharded_step,
}


def trained(make, step_of):
  """Losses of ten steps of an example, by a function of its step, and the compiled step.

  Of a compiled step the aliased bytes and the number of collectives.
  """
  example = make()
  step, args, losses = step_of(example.step), example.args, []
  lowered = step.lower(*args)
  program = getattr(lowered, "lowered", lowered).compile()  # nnx and Equinox wrap it
  text, aliased = program.as_text(), program.memory_analysis().alias_size_in_bytes
  for _ in range(STEPS):
    args, loss = example.after(args, step(*args))
    losses.append(float(loss))
  return (
    losses,
    aliased,
    {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in _COLLECTIVES},
  )


def main(folder, *names):
  """Prints what `trained` gives of each step with saved layouts."""
  found = {}
  for name in names:
    path = pathlib.Path(folder) / f"{name}.json"
    found[name] = trained(EXAMPLES[name], lambda step: tpugraphs_jax.apply(step, path))
  print(json.dumps(found))


if __name__ == "__main__":
  main(*sys.argv[1:])
