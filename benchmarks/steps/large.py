"""Steps of real sizes: models that people train and serve."""

from _arrays import bf16, f32, i32, parameters, state
from flax import linen as nn
import graphs
import jax
import jax.numpy as jnp
import optax
import serving
import transformers
import vision

DEEP = (3, 4, 6, 3)


class Bottleneck(nn.Module):
  width: int
  stride: int

  @nn.compact
  def __call__(self, x):
    norm = lambda: nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)
    conv = lambda *a, **k: nn.Conv(*a, use_bias=False, dtype=jnp.bfloat16, **k)
    y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
    y = nn.relu(norm()(conv(self.width, (3, 3), strides=self.stride)(y)))
    y = norm()(conv(4 * self.width, (1, 1))(y))
    if x.shape != y.shape:
      x = norm()(conv(4 * self.width, (1, 1), strides=self.stride)(x))
    return nn.relu(x + y)


class ResNet50(nn.Module):
  @nn.compact
  def __call__(self, x, train=True):
    x = nn.Conv(64, (7, 7), strides=2, use_bias=False, dtype=jnp.bfloat16)(x)
    x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x))
    x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    for stage, blocks in enumerate(DEEP):
      for block in range(blocks):
        x = Bottleneck(64 << stage, 2 if stage and not block else 1)(x)
    return nn.Dense(1_000)(x.mean((1, 2)).astype(jnp.float32))


def resnet50():
  model, optimizer = ResNet50(), optax.sgd(0.1, momentum=0.9)
  images = bf16(64, 224, 224, 3)
  variables = parameters(model, images)

  def step(variables, opt_state, images, labels):
    def loss(params):
      given = {**variables, "params": params}
      logits, changed = model.apply(given, images, mutable="batch_stats")
      return vision.cross_entropy(logits, labels), changed

    (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    updates, opt_state = optimizer.update(grads, opt_state)
    return (
      {"params": optax.apply_updates(variables["params"], updates), **changed},
      opt_state,
      value,
    )

  arrays = (variables, state(optimizer, variables["params"]), images, i32(64))
  return jax.jit(step, donate_argnums=(0, 1)), arrays


def stacked(layers, width, hidden, heads, groups, head):
  return {
    "q": bf16(layers, width, heads * head),
    "k": bf16(layers, width, groups * head),
    "v": bf16(layers, width, groups * head),
    "o": bf16(layers, heads * head, width),
    "gate": bf16(layers, width, hidden),
    "up": bf16(layers, width, hidden),
    "down": bf16(layers, hidden, width),
  }


def mixture(x, router, gate, up, down):
  """The experts of a layer of Mixtral, two of eight for each word."""
  weights, experts = jax.lax.top_k(jax.nn.softmax((x @ router).astype(jnp.float32)), 2)
  order = jnp.argsort(experts.reshape(-1))
  sizes = jnp.bincount(experts.reshape(-1), length=8)
  rows = x[order // 2]
  inner = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
  rows = jax.lax.ragged_dot(inner, down, sizes)
  return (
    jnp.zeros_like(x).at[order // 2].add(rows * weights.reshape(-1)[order, None].astype(x.dtype))
  )


def llama_prefill():
  """One layer of a model of 8B, on 4,096 words."""
  layer = stacked(1, 4_096, 14_336, 32, 8, 128)

  def prefill(weights, x):
    w = jax.tree.map(lambda a: a[0], weights)
    batch, length, _ = x.shape
    y = serving.normal(x)
    q = (y @ w["q"]).reshape(batch, length, 8, 4, 128)
    k, v = ((y @ w[name]).reshape(batch, length, 8, 128) for name in "kv")
    scores = jnp.einsum("bqghd,bkgd->bghqk", q, k, preferred_element_type=jnp.float32)
    mask = jnp.tril(jnp.ones((length, length), bool))
    mixed = jax.nn.softmax(jnp.where(mask, scores / 128**0.5, -1e30)).astype(x.dtype)
    x = x + jnp.einsum("bghqk,bkgd->bqghd", mixed, v).reshape(x.shape) @ w["o"]
    return serving.feedforward(x, w)

  return prefill, (layer, bf16(1, 4_096, 4_096))


PROGRAMS = {
  "gpt": transformers.language_model(
    batch=8, layers=12, width=1_024, heads=16, words=32_000, length=1_024, remat=True
  ),
  "bert": transformers.language_model(
    optax.lamb(1e-3),
    batch=32,
    layers=12,
    width=768,
    heads=12,
    words=30_522,
    causal=False,
    length=512,
  ),
  "resnet50": resnet50(),
  "vit_base": vision.supervised(vision.ViT(768, 12), f32(64, 128, 128, 3), optax.adamw(1e-3)),
  "decode_1b": (
    jax.jit(serving.decode, donate_argnums=2),
    (
      stacked(16, serving.WIDTH, 5_632, serving.HEADS, serving.GROUPS, serving.HEAD),
      bf16(128_256, serving.WIDTH),
      (bf16(16, 32, serving.LENGTH, serving.GROUPS, serving.HEAD),) * 2,
      i32(32),
      i32(),
    ),
  ),
  "llama_prefill": llama_prefill(),
  "mixture": (
    mixture,
    (
      bf16(4_096, 4_096),
      bf16(4_096, 8),
      bf16(8, 4_096, 14_336),
      bf16(8, 4_096, 14_336),
      bf16(8, 14_336, 4_096),
    ),
  ),
  "recommender": graphs.clicks(graphs.Recommender(26, 100_000), f32(8_192, 13), i32(8_192, 26)),
  "unet": (
    vision.UNet(320).apply,
    (parameters(vision.UNet(320), f32(2, 64, 64, 4), f32(2)), f32(2, 64, 64, 4), f32(2)),
  ),
  "take_gradient": (
    jax.grad(lambda w, x: jnp.take(w, x, axis=0).astype(jnp.float32).sum()),
    (bf16(50_304, 768), i32(64, 512)),
  ),
}
