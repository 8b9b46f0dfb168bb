"""A convolution and a product, whose layouts tests choose."""

import jax
import jax.numpy as jnp

ARGS = (
  jax.ShapeDtypeStruct((3, 7, 6, 5), jnp.float32),
  jax.ShapeDtypeStruct((3, 3, 5, 4), jnp.float32),
  jax.ShapeDtypeStruct((168, 9), jnp.float32),
)


def network(x, kernel, dense):
  x = jax.nn.relu(
    jax.lax.conv_general_dilated(
      x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
  )
  return x.reshape(x.shape[0], -1) @ dense
