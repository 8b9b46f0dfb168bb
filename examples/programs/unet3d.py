"""UNet3D's training step as in the released layout data: batch 2, 96 x 96 x 96, bfloat16.

The random augmentation of the images and the sums over replicas are left out.
"""

from _steps import array, indices
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

SPLIT = "test"

_DIMENSIONS = ("NDHWC", "DHWIO", "NDHWC")
_LEVELS = ((4, 32, 64), (64, 64, 128), (128, 128, 256), (256, 256, 512))  # channels, downwards
_CLASSES = 4


def _conv(x, kernel, bias):
  y = lax.conv_general_dilated(
    x, kernel.astype(x.dtype), (1, 1, 1), "SAME", dimension_numbers=_DIMENSIONS
  )
  return y + bias.astype(x.dtype)


def _normalized(x, scale, offset):
  """Batch normalization in float32, then relu in the type of x."""
  y = x.astype(jnp.float32)
  mean, square = y.mean((0, 1, 2, 3)), (y * y).mean((0, 1, 2, 3))
  y = (y - mean) * lax.rsqrt(square - mean * mean + 1e-3) * scale + offset
  return jax.nn.relu(y.astype(x.dtype))


def _block(x, layers):
  for kernel, bias, scale, offset in layers:
    x = _normalized(_conv(x, kernel, bias), scale, offset)
  return x


def _halved(x):
  window = (1, 2, 2, 2, 1)
  lowest = np.asarray(-np.inf, x.dtype)
  return lax.reduce_window(x, lowest, lax.max, window, window, "VALID")


def _doubled(x, kernel, bias):
  y = lax.conv_transpose(
    x,
    kernel.astype(x.dtype),
    (2, 2, 2),
    "SAME",
    dimension_numbers=_DIMENSIONS,
    transpose_kernel=True,
  )
  return y + bias.astype(x.dtype)


def _loss(params, images, classes):
  down, up, (kernel, bias) = params
  x, skipped = images.astype(jnp.bfloat16), []
  for place, layers in enumerate(down):
    x = _block(_halved(x) if place else x, layers)
    skipped.append(x)
  skipped.pop()
  for doubling, layers in up:
    x = _block(jnp.concatenate([_doubled(x, *doubling), skipped.pop()], -1), layers)
  logits = jax.nn.log_softmax(_conv(x, kernel, bias).astype(jnp.float32))
  return -(jax.nn.one_hot(classes, _CLASSES) * logits).sum(-1).mean()


def step(params, first, second, images, classes):
  """One step of Adam."""
  loss, gradients = jax.value_and_grad(_loss)(params, images, classes)
  first = jax.tree.map(lambda m, g: m + 0.1 * (g - m), first, gradients)
  second = jax.tree.map(lambda v, g: v + 0.001 * (g * g - v), second, gradients)
  params = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-7), params, first, second)
  return params, first, second, loss


def _layer(low, high):
  return array(3, 3, 3, low, high), array(high), array(high), array(high)


def _upwards(channels, skipped):
  high = channels // 2
  doubling = array(2, 2, 2, channels, channels), array(channels)
  return doubling, [_layer(channels + skipped, high), _layer(high, high)]


_PARAMS = (
  [[_layer(low, middle), _layer(middle, high)] for low, middle, high in _LEVELS],
  [_upwards(512, 256), _upwards(256, 128), _upwards(128, 64)],
  (array(1, 1, 1, 64, _CLASSES), array(_CLASSES)),
)

PROGRAMS = {
  "step": (step, (_PARAMS, _PARAMS, _PARAMS, array(2, 96, 96, 96, 4), indices(2, 96, 96, 96)))
}
