"""Recurrent networks, state space models, and losses over sequences."""

from __future__ import annotations

from _arrays import f32, i32, parameters, state, training
from flax import linen as nn
import jax
import jax.numpy as jnp
import optax


class Recurrent(nn.Module):
  cell: type[nn.Module]

  @nn.compact
  def __call__(self, x):
    return nn.Dense(32)(nn.RNN(self.cell(256))(x))


def regression(model, x, y, optimizer=None):
  optimizer = optimizer or optax.adam(1e-3)
  params = parameters(model, x)
  loss = lambda params, x, y: jnp.square(model.apply(params, x) - y).mean()
  return training(loss, optimizer), (params, state(optimizer, params), x, y)


class Bidirectional(nn.Module):
  @nn.compact
  def __call__(self, words):
    x = nn.Embed(5_000, 128)(words)
    x = nn.Bidirectional(nn.RNN(nn.GRUCell(128)), nn.RNN(nn.GRUCell(128)))(x)
    return nn.Dense(10)(x)


def tagger():
  model, optimizer = Bidirectional(), optax.adam(1e-3)
  params = parameters(model, i32(32, 64))

  def loss(params, words, tags):
    logits = model.apply(params, words)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tags).mean()

  return training(loss, optimizer), (params, state(optimizer, params), i32(32, 64), i32(32, 64))


def diagonal(decays, inputs):
  """A linear recurrence along axis 1."""
  combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
  return jax.lax.associative_scan(combine, (decays, inputs), axis=1)[1]


class Selective(nn.Module):
  """Mamba: a state space model whose step depends on its input."""

  width: int = 256
  states: int = 16
  is_parallel: bool = True

  @nn.compact
  def __call__(self, x):
    x, gate = jnp.split(nn.Dense(2 * self.width)(x), 2, -1)
    x = nn.silu(nn.Conv(self.width, (4,), padding="CAUSAL", feature_group_count=self.width)(x))
    rates = self.param("rates", nn.initializers.normal(), (self.width, self.states))
    reads, writes = jnp.split(nn.Dense(2 * self.states)(x), 2, -1)
    steps = nn.softplus(nn.Dense(self.width)(x))
    decays = jnp.exp(-steps[..., None] * jnp.exp(rates))
    inputs = (steps * x)[..., None] * writes[:, :, None]
    if self.is_parallel:
      states = diagonal(decays, inputs)
    else:
      one = lambda state, pair: (pair[0] * state + pair[1],) * 2
      pairs = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (decays, inputs))
      states = jnp.moveaxis(jax.lax.scan(one, jnp.zeros_like(inputs[:, 0]), pairs)[1], 0, 1)
    return (states * reads[:, :, None]).sum(-1) * nn.silu(gate)


class Chunked(nn.Module):
  """Mamba 2: products within chunks, a scan over them."""

  heads: int = 4
  head: int = 64
  chunk: int = 64

  @nn.compact
  def __call__(self, x):
    batch, length, width = x.shape
    q, k, v = (
      nn.Dense(self.heads * self.head)(x).reshape(batch, -1, self.chunk, self.heads, self.head)
      for _ in range(3)
    )
    decay = -nn.softplus(nn.Dense(self.heads)(x)).reshape(batch, -1, self.chunk, self.heads)
    total = jnp.cumsum(decay, 2)
    mask = jnp.tril(jnp.ones((self.chunk, self.chunk)))[..., None]
    by_decay = mask * jnp.exp(mask * (total[:, :, :, None] - total[:, :, None]))
    inside = jnp.einsum("bcqhd,bckhd,bcqkh,bckhe->bcqhe", q, k, by_decay, v)
    left = jnp.exp(total[:, :, -1:] - total)
    states = jnp.einsum("bckhd,bckh,bckhe->cbhde", k, left, v)
    ends = jnp.moveaxis(jnp.exp(total[:, :, -1]), 1, 0)[..., None, None]
    one = lambda state, pair: (pair[0] * state + pair[1], state)
    _, before = jax.lax.scan(one, jnp.zeros_like(states[0]), (ends, states))
    beside = jnp.einsum("bcqhd,bcqh,cbhde->bcqhe", q, jnp.exp(total), before)
    return nn.Dense(width)((inside + beside).reshape(batch, length, -1))


def alignment():
  """Connectionist temporal classification of speech."""
  model, optimizer = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(32)]), optax.adam(1e-3)
  params = parameters(model, f32(16, 128, 80))

  def loss(params, sound, labels):
    logits = model.apply(params, sound)
    padding = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
    return optax.ctc_loss(logits, padding[0], labels, padding[1]).mean()

  return training(loss, optimizer), (
    params,
    state(optimizer, params),
    f32(16, 128, 80),
    i32(16, 20),
  )


def viterbi(scores, moves):
  """The best path of a conditional random field."""

  def forward(best, score):
    total = best[:, :, None] + moves + score[:, None]
    return total.max(1), total.argmax(1)

  best, parents = jax.lax.scan(forward, scores[:, 0], jnp.moveaxis(scores[:, 1:], 1, 0))

  def back(tag, parents):
    tag = jnp.take_along_axis(parents, tag[:, None], 1)[:, 0]
    return tag, tag

  last = best.argmax(-1)
  return jax.lax.scan(back, last, parents, reverse=True)[1], last


def wavenet():
  return nn.Sequential(
    [
      layer
      for rate in (1, 2, 4, 8)
      for layer in (nn.Conv(64, (2,), kernel_dilation=rate, padding="CAUSAL"), nn.tanh)
    ]
  )


PROGRAMS = {
  "lstm": regression(Recurrent(nn.OptimizedLSTMCell), f32(32, 64, 128), f32(32, 64, 32)),
  "gru": regression(Recurrent(nn.GRUCell), f32(32, 64, 128), f32(32, 64, 32)),
  "tagger": tagger(),
  "selective": regression(Selective(), f32(4, 256, 128), f32(4, 256, 256)),
  "selective_scan": regression(Selective(is_parallel=False), f32(4, 256, 128), f32(4, 256, 256)),
  "chunked": regression(Chunked(), f32(4, 512, 256), f32(4, 512, 256)),
  "linear_recurrence": (diagonal, (f32(8, 2_048, 256), f32(8, 2_048, 256))),
  "alignment": alignment(),
  "viterbi": (viterbi, (f32(32, 128, 24), f32(24, 24))),
  "wavenet": regression(wavenet(), f32(8, 1_024, 16), f32(8, 1_024, 64)),
}
