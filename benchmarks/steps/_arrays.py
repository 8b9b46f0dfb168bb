"""Shapes of arguments, and of the parameters of a Flax model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def f32(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def i8(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.int8)


def key() -> Any:
  return jax.eval_shape(lambda: jax.random.key(0))


def parameters(model: Any, *inputs: Any, **kwargs: Any) -> Any:
  """Shapes of the variables of a linen model."""
  return jax.eval_shape(lambda *arrays: model.init(jax.random.key(0), *arrays, **kwargs), *inputs)


def state(optimizer: optax.GradientTransformation, params: Any) -> Any:
  return jax.eval_shape(optimizer.init, params)


def training(loss: Any, optimizer: optax.GradientTransformation, **options: Any) -> Any:
  """A jitted step of a loss of (parameters, *batch), which updates parameters and state in place.

  Args:
    loss: a scalar.
    optimizer: of the parameters.
    **options: of `jax.value_and_grad`.
  """

  def step(params: Any, opt_state: Any, *batch: Any) -> Any:
    value, grads = jax.value_and_grad(loss, **options)(params, *batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  return jax.jit(step, donate_argnums=(0, 1))
