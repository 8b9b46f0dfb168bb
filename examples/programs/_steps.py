"""Programs made of a flax model: a forward pass or a training step.

No parameters are initialised: a program needs only their shapes.
"""

import jax
import jax.numpy as jnp


def image(batch, height, width, channels, dtype=jnp.float32):
  return jax.ShapeDtypeStruct((batch, height, width, channels), dtype)


def array(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def indices(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def _variables(model, inputs):
  return jax.eval_shape(model.init, jax.random.key(0), *inputs)


def forward(model, *inputs):
  """A program, `(function, arguments)`, that computes the model's outputs."""

  def outputs(variables, *inputs):
    return model.apply(variables, *inputs, mutable=["batch_stats"])[0]

  return outputs, (_variables(model, inputs), *inputs)


def train(model, *inputs, learning_rate=1e-3):
  """A program that takes a step of gradient descent on the mean square of the outputs."""
  variables = _variables(model, inputs)
  params = variables["params"]
  state = {name: value for name, value in variables.items() if name != "params"}

  def step(params, state, *inputs):
    def loss(params):
      outputs, new_state = model.apply(
        {"params": params, **state}, *inputs, mutable=["batch_stats"]
      )
      return sum(
        jnp.mean(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(outputs)
      ), new_state

    (value, new_state), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    params = jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients)
    return params, {**state, **new_state}, value

  return step, (params, state, *inputs)
