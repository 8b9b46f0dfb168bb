"""AlexNet's training step as in the released layout data: batch 32, images of 224 x 224."""

from _families import conv, flat
from _steps import array, image, indices
import jax
from jax import lax
import jax.numpy as jnp

SPLIT = "test"

_CONVOLUTIONS = ((11, 3, 64), (5, 64, 192), (3, 192, 384), (3, 384, 384), (3, 384, 256))
_DENSE = ((6400, 4096), (4096, 4096), (4096, 1000))


@jax.custom_vjp
def product(x, w):
  """A dot whose weight gradient is dot(x, g); jax's own gradient is dot(g, x), transposed."""
  return x @ w


product.defvjp(
  lambda x, w: (product(x, w), (x, w)),
  lambda saved, g: (
    lax.dot_general(g, saved[1], (((1,), (1,)), ((), ()))),
    lax.dot_general(saved[0], g, (((0,), (0,)), ((), ()))),
  ),
)


def _dropout(x):
  return jnp.where(lax.rng_uniform(0.0, 1.0, x.shape) < 0.5, 2 * x, 0)


def _pool(x):
  return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")


def _loss(params, images, classes):
  kernels, biases, products, offsets = params
  x = images
  for place, (kernel, bias) in enumerate(zip(kernels, biases)):
    given = lambda *shape, kernel=kernel: kernel
    stride, padding = (4, "VALID") if place == 0 else (1, "SAME")
    x = jax.nn.relu(
      conv(given, x, kernel.shape[-1], kernel.shape[0], stride, padding=padding) + bias
    )
    if place in (0, 1, 4):
      x = _pool(x)
  x = flat(x)
  for place, (weights, offset) in enumerate(zip(products, offsets)):
    x = product(x, weights) + offset
    if place < 2:
      x = _dropout(jax.nn.relu(x))
  picked = jnp.take_along_axis(jax.nn.log_softmax(x), classes[:, None], 1)
  return -picked.mean()


def step(params, momentum, images, classes):
  loss, gradients = jax.value_and_grad(_loss)(params, images, classes)
  momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
  return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, loss


_PARAMS = (
  [array(size, size, low, high) for size, low, high in _CONVOLUTIONS],
  [array(high) for *_, high in _CONVOLUTIONS],
  [array(*shape) for shape in _DENSE],
  [array(shape[1]) for shape in _DENSE],
)

PROGRAMS = {"step": (step, (_PARAMS, _PARAMS, image(32, 224, 224, 3), indices(32)))}
