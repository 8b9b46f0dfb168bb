"""Training steps of transformers, small: embeddings, adamw, scan, remat, dropout, experts."""

from __future__ import annotations

import functools

from _arrays import bf16, f32, i32, key, parameters, state, training
from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

WORDS, WIDTH, HEADS, LENGTH = 4_000, 128, 2, 128


class Block(nn.Module):
  width: int = WIDTH
  heads: int = HEADS
  dropout: float = 0.0
  causal: bool = True

  @nn.compact
  def __call__(self, x, _=None, deterministic=True):
    mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
    y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
    attention = nn.MultiHeadDotProductAttention(
      self.heads, dtype=jnp.bfloat16, dropout_rate=self.dropout, deterministic=deterministic
    )
    x = x + attention(y, mask=mask)
    y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
    y = nn.gelu(nn.Dense(4 * self.width, dtype=jnp.bfloat16)(y))
    y = nn.Dropout(self.dropout, deterministic=deterministic)(y)
    return x + nn.Dense(self.width, dtype=jnp.bfloat16)(y), None


class Transformer(nn.Module):
  layers: int = 2
  width: int = WIDTH
  heads: int = HEADS
  words: int = WORDS
  causal: bool = True
  dropout: float = 0.0
  remat: bool = False
  scan: bool = True

  @nn.compact
  def __call__(self, words, deterministic=True):
    table = nn.Embed(self.words, self.width, dtype=jnp.bfloat16)
    places = self.param("places", nn.initializers.normal(0.02), (words.shape[1], self.width))
    x = table(words) + places.astype(jnp.bfloat16)
    block = nn.remat(Block, static_argnums=(3,)) if self.remat else Block
    make = functools.partial(block, self.width, self.heads, self.dropout, self.causal)
    if self.scan:
      rest = (nn.broadcast, nn.broadcast)
      scanned = nn.scan(
        functools.partial(block, self.width, self.heads, self.dropout, self.causal).func,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=self.layers,
        in_axes=rest,
      )
      x, _ = scanned(self.width, self.heads, self.dropout, self.causal)(x, None, deterministic)
    else:
      for _ in range(self.layers):
        x, _ = make()(x, None, deterministic)
    return table.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x))


def cross_entropy(logits, words):
  loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), words)
  return loss.mean()


def language_model(optimizer=None, batch=4, length=LENGTH, **options):
  model = Transformer(**options)
  optimizer = optimizer or optax.adamw(1e-3)
  params = parameters(model, i32(batch, length))
  step = training(
    lambda params, words, next_: cross_entropy(model.apply(params, words), next_), optimizer
  )
  return step, (params, state(optimizer, params), *(i32(batch, length),) * 2)


def with_dropout():
  model, optimizer = Transformer(dropout=0.1), optax.adamw(1e-3)
  params = parameters(model, i32(4, LENGTH))

  def loss(params, words, next_, key):
    logits = model.apply(params, words, deterministic=False, rngs={"dropout": key})
    return cross_entropy(logits, next_)

  arrays = (i32(4, LENGTH), i32(4, LENGTH), key())
  return training(loss, optimizer), (params, state(optimizer, params), *arrays)


def with_accumulation():
  """Gradients of four parts of a batch, in a scan."""
  model, optimizer = Transformer(), optax.adamw(1e-3)
  params = parameters(model, i32(4, LENGTH))

  def step(params, opt_state, words, next_):
    def part(total, batch):
      words, next_ = batch
      loss = lambda params: cross_entropy(model.apply(params, words), next_)
      value, grads = jax.value_and_grad(loss)(params)
      return jax.tree.map(jnp.add, total, grads), value

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, values = jax.lax.scan(part, zeros, (words, next_))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, values.mean()

  arrays = (i32(4, 2, LENGTH),) * 2
  return jax.jit(step, donate_argnums=(0, 1)), (params, state(optimizer, params), *arrays)


def lora():
  """Low-rank updates of the kernels of frozen dense layers."""
  model, optimizer = Transformer(scan=False), optax.adamw(1e-4)
  frozen = parameters(model, i32(4, LENGTH))
  is_adapted = lambda leaf: leaf.ndim == 2 and min(leaf.shape) >= WIDTH and WORDS not in leaf.shape
  adapters = {
    jax.tree_util.keystr(path): (f32(leaf.shape[0], 8), f32(8, leaf.shape[1]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(frozen)
    if is_adapted(leaf)
  }

  def adapted(path, leaf, adapters):
    pair = adapters.get(jax.tree_util.keystr(path))
    return leaf if pair is None else leaf + pair[0] @ pair[1]

  def loss(adapters, frozen, words, next_):
    full = jax.tree_util.tree_map_with_path(lambda p, x: adapted(p, x, adapters), frozen)
    return cross_entropy(model.apply(full, words), next_)

  arrays = (frozen, i32(4, LENGTH), i32(4, LENGTH))
  return training(loss, optimizer), (adapters, state(optimizer, adapters), *arrays)


def preferences():
  """Direct preference optimisation with a frozen reference."""
  model, optimizer = Transformer(), optax.adamw(1e-5)
  params = parameters(model, i32(4, LENGTH))

  def likelihood(params, words):
    logits = jax.nn.log_softmax(model.apply(params, words[:, :-1]).astype(jnp.float32))
    return jnp.take_along_axis(logits, words[:, 1:, None], -1).sum((1, 2))

  def loss(params, reference, chosen, rejected):
    gain = lambda words: likelihood(params, words) - likelihood(reference, words)
    return -jax.nn.log_sigmoid(0.1 * (gain(chosen) - gain(rejected))).mean()

  reference = parameters(model, i32(4, LENGTH))
  arrays = (reference, i32(4, LENGTH + 1), i32(4, LENGTH + 1))
  params = reference = parameters(model, i32(4, LENGTH))
  return training(loss, optimizer), (params, state(optimizer, params), reference, *arrays[1:])


def masked_words():
  """BERT: words at given places are predicted."""
  model, optimizer = Transformer(causal=False), optax.lamb(1e-3)
  params = parameters(model, i32(4, LENGTH))

  def loss(params, words, places, answers):
    logits = model.apply(params, words)
    return cross_entropy(jnp.take_along_axis(logits, places[..., None], 1), answers)

  arrays = (i32(4, LENGTH), i32(4, 19), i32(4, 19))
  return training(loss, optimizer), (params, state(optimizer, params), *arrays)


class Experts(nn.Module):
  """Experts whose tokens are sorted by expert; `ragged_dot` multiplies them."""

  experts: int = 8
  chosen: int = 2

  @nn.compact
  def __call__(self, x):
    tokens, width = x.shape
    make = nn.initializers.lecun_normal()
    up = self.param("up", make, (self.experts, width, 4 * width)).astype(x.dtype)
    down = self.param("down", make, (self.experts, 4 * width, width)).astype(x.dtype)
    scores = nn.softmax(nn.Dense(self.experts)(x).astype(jnp.float32))
    weights, experts = jax.lax.top_k(scores, self.chosen)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=self.experts)
    rows = x[order // self.chosen]
    rows = jax.lax.ragged_dot(nn.gelu(jax.lax.ragged_dot(rows, up, sizes)), down, sizes)
    rows = rows[jnp.argsort(order)].reshape(tokens, self.chosen, width)
    return (rows * weights[..., None].astype(x.dtype)).sum(1)


class DenseExperts(nn.Module):
  """Experts with a capacity, by products with one-hot arrays (Switch, GShard)."""

  experts: int = 8

  @nn.compact
  def __call__(self, x):
    tokens, width = x.shape
    capacity = 2 * tokens // self.experts
    scores = nn.softmax(nn.Dense(self.experts)(x).astype(jnp.float32))
    expert = nn.one_hot(scores.argmax(-1), self.experts)
    place = jnp.cumsum(expert, 0) * expert - 1
    sent = nn.one_hot(place.astype(jnp.int32), capacity, dtype=x.dtype)
    make = nn.initializers.lecun_normal()
    up = self.param("up", make, (self.experts, width, 4 * width)).astype(x.dtype)
    down = self.param("down", make, (self.experts, 4 * width, width)).astype(x.dtype)
    rows = jnp.einsum("td,tec->ecd", x, sent)
    rows = jnp.einsum("ecf,efd->ecd", nn.gelu(jnp.einsum("ecd,edf->ecf", rows, up)), down)
    return jnp.einsum("ecd,tec->td", rows, sent * scores[..., None].astype(x.dtype))


def experts(layer):
  optimizer = optax.adamw(1e-3)
  params = parameters(layer, bf16(1_024, WIDTH))
  loss = lambda params, x, y: jnp.square(layer.apply(params, x) - y).mean()
  arrays = (bf16(1_024, WIDTH), bf16(1_024, WIDTH))
  return training(loss, optimizer), (params, state(optimizer, params), *arrays)


class Translation(nn.Module):
  """An encoder, and a decoder that attends to it."""

  @nn.compact
  def __call__(self, source, target):
    table = nn.Embed(WORDS, WIDTH, dtype=jnp.bfloat16)
    memory, x = table(source), table(target)
    for _ in range(2):
      memory, _ = Block(causal=False)(memory)
    for _ in range(2):
      x, _ = Block()(x)
      x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16)(nn.LayerNorm()(x), memory)
    return nn.Dense(WORDS, dtype=jnp.bfloat16)(x)


def translation():
  model, optimizer = Translation(), optax.adafactor(1e-3)
  words = (i32(4, LENGTH), i32(4, LENGTH))
  params = parameters(model, *words)
  loss = lambda params, a, b, next_: cross_entropy(model.apply(params, a, b), next_)
  return training(loss, optimizer), (params, state(optimizer, params), *words, i32(4, LENGTH))


def clipped(optimizer):
  return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


PROGRAMS = {
  "language_model": language_model(),
  "unrolled": language_model(scan=False),
  "remat": language_model(clipped(optax.adamw(1e-3)), remat=True),
  "lion": language_model(optax.lion(1e-4)),
  "muon": language_model(optax.contrib.muon(1e-3), scan=False),
  "dropout": with_dropout(),
  "accumulation": with_accumulation(),
  "lora": lora(),
  "preferences": preferences(),
  "masked_words": masked_words(),
  "experts": experts(Experts()),
  "dense_experts": experts(DenseExperts()),
  "translation": translation(),
}
