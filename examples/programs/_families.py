"""Families of small programs that are drawn by a seed: `programs("plain", "residual")`.

A family draws a model and its inputs. The seed determines depth, widths, batch, kernel
sizes, strides, activations and element type. Even seeds give forward passes, odd ones
training steps.
"""

import collections.abc
import math
import random

from _steps import array, indices
import jax
from jax import lax
import jax.numpy as jnp

SEEDS = 7
TRAINING = (
  "plain",
  "pooled",
  "residual",
  "bottleneck",
  "branches",
  "grouped",
  "squeezed",
  "encoder_decoder",
  "dilated",
  "volume",
  "waveform",
  "shuffled",
  "perceptron",
  "encoder",
  "patches",
  "gated",
  "recurrent_cell",
  "linear_attention",
  "factors",
  "autoencoder",
  "windows",
)
_FAMILIES = {}


class Programs(collections.abc.Mapping):
  """Programs by the name `FAMILY_SEED`, each made when it is looked up."""

  def __init__(self, families, seeds):
    self._names = [f"{family}_{seed}" for seed in seeds for family in families]

  def __getitem__(self, name):
    if name not in self._names:
      raise KeyError(name)
    family, seed = name.rsplit("_", 1)
    return _program(_FAMILIES[family], random.Random(name), is_training=int(seed) % 2 == 1)

  def __iter__(self):
    return iter(self._names)

  def __len__(self):
    return len(self._names)


def programs(*families, seeds=range(SEEDS)):
  return Programs(families, seeds)


def family(function):
  """Registers `function(draw) -> (model(new, *inputs), *inputs)`; `new(*shape)` is a parameter."""
  _FAMILIES[function.__name__] = function
  return function


def _program(function, draw, *, is_training):
  dtype = draw.choice([jnp.float32, jnp.float32, jnp.bfloat16])
  model, *inputs = function(draw)
  inputs = [
    array(*each.shape, dtype=dtype) if each.dtype == jnp.float32 else each for each in inputs
  ]
  shapes = []

  def record(*shape):
    shapes.append(array(*shape, dtype=dtype))
    return jnp.zeros(shape, dtype)

  jax.eval_shape(lambda *inputs: model(record, *inputs), *inputs)

  def outputs(params, *inputs):
    params = iter(params)
    return model(lambda *shape: next(params), *inputs)

  def step(params, momentum, *inputs):
    gradients = jax.grad(lambda params: jnp.mean(outputs(params, *inputs) ** 2))(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum

  return (step, (shapes, shapes, *inputs)) if is_training else (outputs, (shapes, *inputs))


# Building blocks.


def conv(new, x, features, kernel=3, stride=1, *, groups=1, dilation=1, padding="SAME"):
  """A convolution of `[batch, ...spatial, channels]`, one, two or three dimensional."""
  rank = x.ndim - 2
  kernel = (kernel,) * rank if isinstance(kernel, int) else kernel
  spatial = "DHW"[3 - rank :]
  return lax.conv_general_dilated(
    x,
    new(*kernel, x.shape[-1] // groups, features),
    (stride,) * rank,
    padding,
    rhs_dilation=(dilation,) * rank,
    feature_group_count=groups,
    dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
  )


def up(new, x, features):
  """A transposed convolution that doubles height and width."""
  return lax.conv_transpose(x, new(2, 2, x.shape[-1], features), (2, 2), "SAME")


def dense(new, x, features):
  return x @ new(x.shape[-1], features)


def norm(new, x, axes=(-1,)):
  scale = new(x.shape[-1])
  x = x - x.mean(axes, keepdims=True)
  return scale * x * lax.rsqrt((x * x).mean(axes, keepdims=True) + 1e-5)


def pool(x, size=2, stride=2):
  window, strides = (1, size, size, 1), (1, stride, stride, 1)
  return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")


def flat(x):
  return x.reshape(len(x), -1)


def heads(new, x, keys, count, *, is_causal=False):
  """Attention of `x` `[batch, length, features]` to `keys`, with `count` heads."""
  width = x.shape[-1] // count
  split = lambda y: y.reshape(*y.shape[:2], count, width)
  q, k, v = (split(dense(new, y, count * width)) for y in (x, keys, keys))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5
  if is_causal:
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e4)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
  return dense(new, mixed.reshape(x.shape), x.shape[-1])


def feed(new, x, act, times=4):
  return dense(new, act(dense(new, x, times * x.shape[-1])), x.shape[-1])


def activation(draw):
  return draw.choice([jax.nn.relu, jax.nn.swish, jnp.tanh, jax.nn.gelu])


def picture(draw, channels=(3, 8, 16, 24, 32, 48), sizes=(12, 14, 16, 20, 28, 32)):
  return array(draw.choice([1, 2, 4, 8, 16, 32]), *[draw.choice(sizes)] * 2, draw.choice(channels))


def sequence(draw, widths=(32, 48, 64, 96, 128)):
  return array(draw.choice([1, 2, 4, 8]), draw.choice([16, 24, 32, 50, 64]), draw.choice(widths))


def widths(draw, low, high, choices=(8, 16, 24, 32, 48, 64, 96)):
  return [draw.choice(choices) for _ in range(draw.randint(low, high))]


# Convolutional families.


@family
def plain(draw):
  layers = [(width, draw.choice([1, 3, 5]), draw.choice([1, 1, 2])) for width in widths(draw, 2, 4)]
  act, classes = activation(draw), draw.choice([10, 50, 100])

  def model(new, x):
    for width, kernel, stride in layers:
      x = act(conv(new, x, width, kernel, stride))
    return dense(new, flat(x), classes)

  return model, picture(draw)


@family
def pooled(draw):
  layers, act = widths(draw, 2, 3), activation(draw)
  size, hidden = draw.choice([2, 3]), draw.choice([32, 64, 120])

  def model(new, x):
    for width in layers:
      x = pool(act(conv(new, x, width, padding="VALID")), size)
    return dense(new, act(dense(new, flat(x), hidden)), 10)

  return model, picture(draw, sizes=(24, 28, 32))


@family
def residual(draw):
  blocks, act, kernel = draw.randint(1, 3), activation(draw), draw.choice([3, 5])
  axes = draw.choice([(-1,), (0, 1, 2), (1, 2)])

  def model(new, x):
    for _ in range(blocks):
      y = conv(new, act(norm(new, x, axes)), x.shape[-1], kernel)
      x = x + conv(new, act(norm(new, y, axes)), x.shape[-1], kernel)
    return x.mean((1, 2))

  return model, picture(draw, channels=(16, 24, 32, 48, 64))


@family
def bottleneck(draw):
  narrow, wide, stride = draw.choice([8, 16, 24]), draw.choice([64, 96, 128]), draw.choice([1, 2])
  act = activation(draw)

  def model(new, x):
    y = act(norm(new, conv(new, x, narrow, 1)))
    y = act(norm(new, conv(new, y, narrow, 3, stride)))
    return act(conv(new, y, wide, 1) + conv(new, x, wide, 1, stride))

  return model, picture(draw)


@family
def branches(draw):
  kernels = draw.sample([1, 3, 5, 7], draw.randint(2, 4))
  width, act = draw.choice([8, 16, 24]), activation(draw)

  def model(new, x):
    x = jnp.concatenate([act(conv(new, x, width, kernel)) for kernel in kernels], -1)
    return act(conv(new, x, width, 1))

  return model, picture(draw)


@family
def dense_blocks(draw):
  growth, depth, act = draw.choice([8, 12, 16]), draw.randint(2, 4), activation(draw)

  def model(new, x):
    for _ in range(depth):
      x = jnp.concatenate([x, conv(new, act(norm(new, x)), growth)], -1)
    return dense(new, x.mean((1, 2)), 10)

  return model, picture(draw)


@family
def grouped(draw):
  groups, act = draw.choice([2, 4, 8]), activation(draw)
  width = draw.choice([32, 64])

  def model(new, x):
    y = act(conv(new, act(conv(new, x, width, 1)), width, 3, groups=groups))
    return x + conv(new, y, x.shape[-1], 1)

  return model, picture(draw, channels=(16, 24, 32))


@family
def depthwise(draw):
  kernel, times, act = draw.choice([3, 5, 7]), draw.choice([2, 4]), activation(draw)

  def model(new, x):
    y = conv(new, x, x.shape[-1], kernel, groups=x.shape[-1])
    return x + feed(new, norm(new, y), act, times)

  return model, picture(draw, channels=(16, 24, 32, 48))


@family
def squeezed(draw):
  width, less, act = draw.choice([16, 32, 64]), draw.choice([2, 4, 8]), activation(draw)

  def model(new, x):
    x = act(conv(new, x, width))
    gate = dense(new, act(dense(new, x.mean((1, 2)), width // less)), width)
    return conv(new, x * jax.nn.sigmoid(gate)[:, None, None], width, 1)

  return model, picture(draw)


@family
def encoder_decoder(draw):
  width, act = draw.choice([8, 12, 16]), activation(draw)

  def model(new, x):
    skip = act(conv(new, x, width))
    low = act(conv(new, pool(skip), 2 * width))
    return conv(new, act(conv(new, jnp.concatenate([skip, up(new, low, width)], -1), width)), 4, 1)

  return model, picture(draw, sizes=(16, 24, 32))


@family
def generator(draw):
  size, width, act = draw.choice([4, 5, 7]), draw.choice([16, 32, 48]), activation(draw)
  depth = draw.randint(1, 2)

  def model(new, x):
    x = dense(new, x, size * size * width).reshape(len(x), size, size, width)
    for _ in range(depth):
      x = act(norm(new, up(new, x, x.shape[-1] // 2)))
    return jnp.tanh(conv(new, x, 3, 5))

  return model, array(draw.choice([2, 8, 16]), draw.choice([32, 64, 100]))


@family
def dilated(draw):
  rates, width, act = draw.sample([1, 2, 3, 4, 6], 3), draw.choice([8, 16, 32]), activation(draw)

  def model(new, x):
    return conv(new, sum(act(conv(new, x, width, dilation=rate)) for rate in rates), 8, 1)

  return model, picture(draw)


@family
def pyramid(draw):
  width, act, levels = draw.choice([16, 24, 32]), activation(draw), draw.randint(2, 3)

  def model(new, x):
    maps = []
    for _ in range(levels):
      x = act(conv(new, x, width, 3, 2))
      maps.append(conv(new, x, width, 1))
    outputs = [dense(new, flat(conv(new, each, 6)), 8) for each in maps]
    return jnp.stack(outputs)

  return model, picture(draw, sizes=(16, 24, 32))


@family
def volume(draw):
  layers, act, size = widths(draw, 1, 2, (4, 8, 16)), activation(draw), draw.choice([6, 8, 10])

  def model(new, x):
    for width in layers:
      x = act(conv(new, x, width))
    return dense(new, flat(x), 6)

  return model, array(draw.choice([1, 2, 4]), size, size, size, draw.choice([1, 4, 8]))


@family
def waveform(draw):
  layers, kernel, act = widths(draw, 2, 4), draw.choice([3, 5, 9]), activation(draw)
  stride = draw.choice([1, 2])

  def model(new, x):
    for width in layers:
      x = act(conv(new, x, width, kernel, stride))
    return dense(new, x, 20)

  return model, array(draw.choice([2, 8]), draw.choice([64, 100, 128]), draw.choice([1, 8, 16]))


@family
def factored(draw):
  width, length, act = draw.choice([16, 24, 32]), draw.choice([3, 5, 7]), activation(draw)

  def model(new, x):
    x = act(conv(new, act(conv(new, x, width, (1, length))), width, (length, 1)))
    return dense(new, flat(pool(x)), 12)

  return model, picture(draw)


@family
def shuffled(draw):
  factor, width, act = 2, draw.choice([8, 16, 24]), activation(draw)

  def model(new, x):
    b, h, w, c = x.shape
    x = x.reshape(b, h // factor, factor, w // factor, factor, c)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(b, h // factor, w // factor, -1)
    return conv(new, act(conv(new, x, width)), 4 * width, 1)

  return model, picture(draw)


@family
def siamese(draw):
  width, act, out = draw.choice([8, 16, 32]), activation(draw), draw.choice([16, 32])

  def model(new, x, y):
    both = act(conv(new, jnp.concatenate([x, y]), width, 3, 2))
    both = dense(new, flat(both), out)
    return both[: len(x)] @ both[len(x) :].T

  image = picture(draw)
  return model, image, image


# Families of matrix products.


@family
def perceptron(draw):
  layers, act = widths(draw, 2, 5, (32, 64, 100, 128, 200, 256)), activation(draw)

  def model(new, x):
    for width in layers:
      x = act(dense(new, x, width))
    return x

  return model, array(draw.choice([8, 32, 50, 128]), draw.choice([16, 64, 100, 256]))


@family
def encoder(draw):
  act, count, layers = activation(draw), draw.choice([2, 4]), draw.randint(1, 2)

  def model(new, x):
    for _ in range(layers):
      y = norm(new, x)
      x = x + heads(new, y, y, count)
      x = x + feed(new, norm(new, x), act)
    return x

  return model, sequence(draw, (32, 64, 96))


@family
def decoder(draw):
  act, count, words = activation(draw), draw.choice([2, 4, 8]), draw.choice([100, 250])

  def model(new, x):
    x = x + heads(new, x, x, count, is_causal=True)
    return dense(new, norm(new, x + feed(new, x, act, 2)), words)

  return model, sequence(draw, (32, 64, 128))


@family
def crossing(draw):
  count, act = draw.choice([2, 4]), activation(draw)

  def model(new, x, memory):
    return feed(new, norm(new, x + heads(new, x, memory, count)), act, 2)

  x = sequence(draw, (32, 64))
  return model, x, array(x.shape[0], draw.choice([8, 40, 77]), draw.choice([24, 64]))


@family
def patches(draw):
  side, width, count = draw.choice([4, 8]), draw.choice([32, 64, 96]), draw.choice([2, 4])
  act = activation(draw)

  def model(new, x):
    x = conv(new, x, width, side, side, padding="VALID")
    x = x.reshape(len(x), -1, width)
    x = x + heads(new, x, x, count)
    return dense(new, feed(new, x, act, 2).mean(1), 10)

  return model, picture(draw, channels=(3,), sizes=(16, 24, 32))


@family
def mixing(draw):
  act, times, layers = activation(draw), draw.choice([1, 2]), draw.randint(1, 2)

  def model(new, x):
    for _ in range(layers):
      x = x + feed(new, norm(new, x).swapaxes(1, 2), act, times).swapaxes(1, 2)
      x = x + feed(new, norm(new, x), act, times)
    return x

  return model, sequence(draw)


@family
def gated(draw):
  act, times, layers = activation(draw), draw.choice([1, 2, 3]), draw.randint(1, 3)

  def model(new, x):
    for _ in range(layers):
      wide = times * x.shape[-1]
      x = norm(new, x + dense(new, act(dense(new, x, wide)) * dense(new, x, wide), x.shape[-1]))
    return x

  return model, sequence(draw)


@family
def recurrent_cell(draw):
  state, is_gated = draw.choice([16, 32, 64]), draw.choice([True, False])

  def model(new, x):
    inputs, inner = dense(new, x, state), new(state, state)
    gate = dense(new, x, state)

    def turn(h, each):
      y, g = each
      y = jnp.tanh(y + h @ inner)
      h = jax.nn.sigmoid(g) * h + y if is_gated else y
      return h, h

    zero = jnp.zeros((len(x), state), x.dtype)
    _, states = lax.scan(turn, zero, (inputs.swapaxes(0, 1), gate.swapaxes(0, 1)))
    return dense(new, states, 12)

  return model, sequence(draw)


@family
def linear_attention(draw):
  count = draw.choice([2, 4])

  def model(new, x):
    b, length, width = x.shape
    q, k, v = (dense(new, x, width).reshape(b, length, count, -1) for _ in range(3))
    state = jnp.einsum("blhd,blhe->bhde", jax.nn.relu(k), v) / length
    return dense(new, jnp.einsum("blhd,bhde->blhe", jax.nn.relu(q), state).reshape(x.shape), width)

  return model, sequence(draw, (32, 64, 96))


@family
def experts_of_all(draw):
  count, act, inner = draw.choice([2, 4, 6]), activation(draw), draw.choice([32, 64])

  def model(new, x):
    share = jax.nn.softmax(dense(new, x, count))
    y = act(jnp.einsum("blf,efi->beli", x, new(count, x.shape[-1], inner)))
    return jnp.einsum("beli,eif,ble->blf", y, new(count, inner, x.shape[-1]), share)

  return model, sequence(draw, (32, 64))


@family
def factors(draw):
  rank, act, fields = draw.choice([8, 16, 24]), activation(draw), draw.choice([4, 8, 10])
  words = draw.choice([100, 500])

  def model(new, ids, x):
    vectors = new(words, rank)[ids]
    pairs = jnp.einsum("bfr,bgr->bfg", vectors, vectors)
    return dense(new, act(dense(new, jnp.concatenate([flat(pairs), x], -1), 64)), 1)

  batch = draw.choice([16, 64, 100])
  return model, indices(batch, fields), array(batch, draw.choice([13, 32]))


@family
def adjacency(draw):
  layers, act, nodes = widths(draw, 1, 3), activation(draw), draw.choice([20, 32, 50])

  def model(new, x, links):
    for width in layers:
      x = act(links @ dense(new, x, width) + dense(new, x, width))
    return x.mean(1)

  batch = draw.choice([2, 4, 8])
  return model, array(batch, nodes, draw.choice([16, 24, 32])), array(batch, nodes, nodes)


@family
def autoencoder(draw):
  layers, act = sorted(widths(draw, 2, 3, (16, 32, 64, 128)), reverse=True), activation(draw)

  def model(new, x):
    size = x.shape
    x = flat(x)
    for width in (*layers, *layers[-2::-1]):
      x = act(dense(new, x, width))
    return dense(new, x, math.prod(size[1:])).reshape(size)

  return model, picture(draw, channels=(1, 3), sizes=(8, 12, 16))


@family
def bilinear(draw):
  width, out = draw.choice([16, 24, 32]), draw.choice([8, 16])

  def model(new, x, y):
    x, y = dense(new, x, width), dense(new, y, width)
    product = jnp.einsum("bi,bj->bij", x, y).reshape(len(x), -1)
    return jnp.tanh(dense(new, product, out))

  batch = draw.choice([8, 32, 64])
  return model, array(batch, draw.choice([20, 64])), array(batch, draw.choice([30, 64]))


@family
def windows(draw):
  side, count, act = draw.choice([2, 4]), draw.choice([2, 4]), activation(draw)

  def model(new, x):
    b, h, w, c = x.shape
    y = x.reshape(b, h // side, side, w // side, side, c).transpose(0, 1, 3, 2, 4, 5)
    y = y.reshape(-1, side * side, c)
    y = y + heads(new, y, y, count)
    y = y.reshape(b, h // side, w // side, side, side, c).transpose(0, 1, 3, 2, 4, 5)
    return feed(new, x + y.reshape(x.shape), act, 2)

  return model, picture(draw, channels=(16, 32, 48), sizes=(8, 12, 16))
