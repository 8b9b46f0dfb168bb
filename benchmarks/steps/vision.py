"""Images: networks with batch norm, pooling, patches, diffusion, augmentation."""

from __future__ import annotations

from _arrays import bf16, f32, i32, key, parameters, state, training
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import optax


def cross_entropy(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Residual(nn.Module):
  width: int
  stride: int = 1

  @nn.compact
  def __call__(self, x, train=True):
    norm = lambda: nn.BatchNorm(use_running_average=not train, dtype=x.dtype)
    conv = lambda *a, **k: nn.Conv(*a, use_bias=False, dtype=x.dtype, **k)
    y = nn.relu(norm()(conv(self.width, (3, 3), strides=self.stride)(x)))
    y = norm()(conv(self.width, (3, 3))(y))
    if x.shape != y.shape:
      x = norm()(conv(self.width, (1, 1), strides=self.stride)(x))
    return nn.relu(x + y)


class ResNet(nn.Module):
  widths: tuple[int, ...] = (32, 64)
  pool: bool = True

  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Conv(self.widths[0], (7, 7), strides=2, use_bias=False, dtype=x.dtype)(x)
    x = nn.relu(nn.BatchNorm(use_running_average=not train, dtype=x.dtype)(x))
    x = nn.max_pool(x, (3, 3), (2, 2), "SAME") if self.pool else x
    for stage, width in enumerate(self.widths):
      x = Residual(width, 1 + (stage > 0))(x, train)
    return nn.Dense(10)(x.mean((1, 2)).astype(jnp.float32))


def resnet(images, **options):
  model, optimizer = ResNet(**options), optax.sgd(0.1, momentum=0.9, nesterov=True)
  variables = parameters(model, images)

  def step(variables, opt_state, images, labels):
    def loss(params):
      given = {"params": params, "batch_stats": variables["batch_stats"]}
      logits, changed = model.apply(given, images, mutable="batch_stats")
      return cross_entropy(logits, labels), changed["batch_stats"]

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    updates, opt_state = optimizer.update(grads, opt_state)
    params = optax.apply_updates(variables["params"], updates)
    return {"params": params, "batch_stats": stats}, opt_state, value

  arrays = (variables, state(optimizer, variables["params"]), images, i32(len_(images)))
  return jax.jit(step, donate_argnums=(0, 1)), arrays


def len_(array):
  return array.shape[0]


class Convolutions(nnx.Module):
  """A small network of nnx with batch norm."""

  def __init__(self, rngs):
    self.first = nnx.Conv(3, 32, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(32, rngs=rngs)
    self.second = nnx.Conv(32, 64, (3, 3), rngs=rngs)
    self.last = nnx.Linear(64, 10, rngs=rngs)

  def __call__(self, x):
    x = nnx.avg_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
    return self.last(nnx.relu(self.second(x)).mean((1, 2)))


def nnx_convolutions():
  model = nnx.eval_shape(lambda: Convolutions(nnx.Rngs(0)))
  graph, params, rest = nnx.split(model, nnx.Param, ...)
  optimizer = optax.adam(1e-3)

  def step(params, rest, opt_state, images, labels):
    def loss(params):
      model = nnx.merge(graph, params, rest, copy=True)  # whose state changes in this trace
      value = cross_entropy(model(images), labels)
      return value, nnx.split(model, nnx.Param, ...)[2]

    (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), rest, opt_state, value

  arrays = (params, rest, state(optimizer, params), f32(64, 32, 32, 3), i32(64))
  return jax.jit(step, donate_argnums=(0, 1, 2)), arrays


def max_pool_gradient(images):
  return jax.grad(lambda x: jnp.square(nn.max_pool(x, (2, 2), (2, 2))).sum())(images)


class ViT(nn.Module):
  width: int = 192
  layers: int = 2

  @nn.compact
  def __call__(self, images):
    x = nn.Conv(self.width, (8, 8), strides=8)(images)
    x = x.reshape(len(x), -1, self.width)
    first = self.param("class", nn.initializers.zeros, (1, 1, self.width))
    x = jnp.concatenate((jnp.broadcast_to(first, (len(x), 1, self.width)), x), 1)
    x = x + self.param("places", nn.initializers.normal(0.02), x.shape[1:])
    for _ in range(self.layers):
      x = x + nn.MultiHeadDotProductAttention(3)(nn.LayerNorm()(x))
      x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
    return nn.Dense(100)(nn.LayerNorm()(x)[:, 0])


def supervised(model, images, optimizer):
  params = parameters(model, images)
  loss = lambda params, images, labels: cross_entropy(model.apply(params, images), labels)
  arrays = (params, state(optimizer, params), images, i32(len_(images)))
  return training(loss, optimizer), arrays


class ConvNeXt(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.LayerNorm()(nn.Conv(64, (4, 4), strides=4)(x))
    for _ in range(2):
      y = nn.LayerNorm()(nn.Conv(64, (7, 7), feature_group_count=64)(x))
      x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(y)))
    return nn.Dense(10)(x.mean((1, 2)))


class MobileNet(nn.Module):
  """Inverted bottlenecks with squeeze and excitation."""

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(16, (3, 3), strides=2)(x)
    for width, stride in ((16, 1), (32, 2)):
      y = nn.swish(nn.GroupNorm(8)(nn.Conv(4 * x.shape[-1], (1, 1))(x)))
      y = nn.Conv(y.shape[-1], (3, 3), strides=stride, feature_group_count=y.shape[-1])(y)
      y = nn.swish(nn.GroupNorm(8)(y))
      scale = nn.Dense(y.shape[-1])(nn.relu(nn.Dense(8)(y.mean((1, 2)))))
      y = nn.Conv(width, (1, 1))(y * nn.sigmoid(scale)[:, None, None])
      x = x + y if x.shape == y.shape else y
    return nn.Dense(10)(x.mean((1, 2)))


class UNet(nn.Module):
  """A network of diffusion: a time, two resolutions, attention at the lower one."""

  width: int = 64

  @nn.compact
  def __call__(self, x, times):
    angles = times[:, None] * jnp.exp(-jnp.arange(32) / 4.0)
    time = nn.Dense(self.width)(jnp.concatenate((jnp.sin(angles), jnp.cos(angles)), -1))
    block = lambda x, width: nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
    x = first = nn.Conv(self.width, (3, 3))(x)
    x = block(x, self.width) + time[:, None, None]
    x = block(nn.avg_pool(x, (2, 2), (2, 2)), 2 * self.width)
    flat = x.reshape(len(x), -1, x.shape[-1])
    x = x + nn.MultiHeadDotProductAttention(4)(nn.GroupNorm(8)(flat)).reshape(x.shape)
    x = jax.image.resize(x, (len(x), *first.shape[1:3], x.shape[-1]), "nearest")
    return nn.Conv(3, (3, 3))(block(jnp.concatenate((x, first), -1), self.width))


def diffusion():
  model, optimizer = UNet(), optax.adamw(1e-4)
  params = parameters(model, f32(16, 32, 32, 3), f32(16))

  def loss(params, images, key):
    first, second = jax.random.split(key)
    times = jax.random.uniform(first, (len(images),))
    noise = jax.random.normal(second, images.shape)
    signal = jnp.cos(times * jnp.pi / 2)[:, None, None, None]
    noisy = signal * images + jnp.sqrt(1 - signal**2) * noise
    return jnp.square(model.apply(params, noisy, times) - noise).mean()

  return training(loss, optimizer), (params, state(optimizer, params), f32(16, 32, 32, 3), key())


def denoise(params, x, key):
  """Ten steps of a sampler."""

  def one(x, scanned):
    time, key = scanned
    noise = UNet().apply(params, x, jnp.full(len(x), time))
    return x - 0.1 * noise + 0.05 * jax.random.normal(key, x.shape), None

  scanned = (jnp.linspace(1.0, 0.1, 10), jax.random.split(key, 10))
  return jax.lax.scan(one, x, scanned)[0]


class Autoencoder(nn.Module):
  """A variational autoencoder with transposed convolutions."""

  @nn.compact
  def __call__(self, x, key):
    y = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
    y = nn.relu(nn.Conv(64, (3, 3), strides=2)(y))
    mean, log_std = jnp.split(nn.Dense(32)(y.reshape(len(y), -1)), 2, -1)
    code = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
    y = nn.relu(nn.Dense(y[0].size)(code)).reshape(y.shape)
    y = nn.relu(nn.ConvTranspose(32, (3, 3), strides=(2, 2))(y))
    y = nn.ConvTranspose(x.shape[-1], (3, 3), strides=(2, 2))(y)
    kl = -0.5 * (1 + 2 * log_std - mean**2 - jnp.exp(2 * log_std)).sum(-1)
    return optax.sigmoid_binary_cross_entropy(y, x).sum((1, 2, 3)).mean() + kl.mean()


def autoencoder():
  model, optimizer = Autoencoder(), optax.adam(1e-3)
  params = parameters(model, f32(64, 28, 28, 1), key())
  step = training(model.apply, optimizer)
  return step, (params, state(optimizer, params), f32(64, 28, 28, 1), key())


def augment(images, key):
  """Flips, shifts and a mixture of pairs."""
  flip, shift, mix = jax.random.split(key, 3)
  flipped = jax.random.bernoulli(flip, 0.5, (len(images), 1, 1, 1))
  images = jnp.where(flipped, images[:, :, ::-1], images)
  padded = jnp.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
  places = jax.random.randint(shift, (len(images), 2), 0, 9)
  window = lambda image, at: jax.lax.dynamic_slice(image, (at[0], at[1], 0), images.shape[1:])
  images = jax.vmap(window)(padded, places)
  part = jax.random.beta(mix, 0.2, 0.2, (len(images), 1, 1, 1))
  return part * images + (1 - part) * images[::-1]


def suppress(boxes, scores):
  """Boxes without those that overlap a better one (non-maximum suppression)."""
  order = jnp.argsort(-scores)
  boxes = boxes[order]
  low = jnp.maximum(boxes[:, None, :2], boxes[None, :, :2])
  high = jnp.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
  inner = jnp.maximum(high - low, 0).prod(-1)
  area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
  overlap = inner / (area[:, None] + area - inner)

  def one(place, kept):
    dropped = (overlap[place] > 0.5) & (jnp.arange(len(boxes)) > place) & kept[place]
    return kept & ~dropped

  return jax.lax.fori_loop(0, len(boxes), one, jnp.ones(len(boxes), bool)), order


def sample_grid(images, grid):
  """Bilinear samples at given places, as spatial transformers and deformable layers take them."""
  sample = lambda channel, y, x: jax.scipy.ndimage.map_coordinates(channel, [y, x], order=1)
  each = jax.vmap(jax.vmap(sample, (2, None, None), 2))
  return each(images, grid[..., 0], grid[..., 1])


class Field(nn.Module):
  """A radiance field: sines of places, a deep network of small layers."""

  @nn.compact
  def __call__(self, places):
    waves = places[..., None] * 2.0 ** jnp.arange(10)
    x = jnp.concatenate((jnp.sin(waves), jnp.cos(waves)), -1).reshape(*places.shape[:-1], -1)
    for _ in range(4):
      x = nn.relu(nn.Dense(128)(x))
    return nn.Dense(4)(x)


def radiance():
  model, optimizer = Field(), optax.adam(1e-3)
  params = parameters(model, f32(1_024, 32, 3))

  def loss(params, places, colours):
    found = model.apply(params, places)
    opacity = 1 - jnp.exp(-nn.relu(found[..., 3]) / 32)
    passes = jnp.cumprod(1 - opacity + 1e-9, -1)
    seen = opacity * jnp.roll(passes, 1, -1).at[:, 0].set(1.0)
    return jnp.square((seen[..., None] * nn.sigmoid(found[..., :3])).sum(1) - colours).mean()

  arrays = (f32(1_024, 32, 3), f32(1_024, 3))
  return training(loss, optimizer), (params, state(optimizer, params), *arrays)


IMAGES = f32(32, 32, 32, 3)
PROGRAMS = {
  "resnet": resnet(f32(32, 64, 64, 3)),
  "resnet_bf16": resnet(bf16(32, 64, 64, 3), pool=False),
  "nnx_convolutions": nnx_convolutions(),
  "max_pool_gradient": (max_pool_gradient, (f32(64, 56, 56, 64),)),
  "average_pool": (lambda x: nn.avg_pool(x, (3, 3), (2, 2)), (bf16(64, 56, 56, 64),)),
  "vit": supervised(ViT(), f32(32, 64, 64, 3), optax.adamw(1e-3)),
  "convnext": supervised(ConvNeXt(), f32(16, 64, 64, 3), optax.adamw(1e-3)),
  "mobilenet": supervised(MobileNet(), f32(32, 64, 64, 3), optax.rmsprop(1e-3)),
  "diffusion": diffusion(),
  "denoise": (denoise, (parameters(UNet(), f32(4, 32, 32, 3), f32(4)), f32(4, 32, 32, 3), key())),
  "autoencoder": autoencoder(),
  "augment": (augment, (f32(64, 32, 32, 3), key())),
  "resize": (lambda x: jax.image.resize(x, (16, 224, 224, 3), "bilinear"), (f32(16, 256, 256, 3),)),
  "suppress": (suppress, (f32(512, 4), f32(512))),
  "sample_grid": (sample_grid, (f32(4, 64, 64, 8), f32(4, 32, 32, 2))),
  "radiance": radiance(),
}
