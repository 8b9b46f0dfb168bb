"""Steps of language models that are served: prefill, decoding with caches, sampling."""

import functools

from _arrays import bf16, f32, i8, i32, key
import jax
import jax.numpy as jnp

WORDS, LAYERS, WIDTH, HIDDEN, HEADS, GROUPS, HEAD, LENGTH = (
  32_000,
  4,
  1_024,
  2_816,
  8,
  2,
  128,
  1_024,
)
WEIGHTS = {
  "q": bf16(LAYERS, WIDTH, HEADS * HEAD),
  "k": bf16(LAYERS, WIDTH, GROUPS * HEAD),
  "v": bf16(LAYERS, WIDTH, GROUPS * HEAD),
  "o": bf16(LAYERS, HEADS * HEAD, WIDTH),
  "gate": bf16(LAYERS, WIDTH, HIDDEN),
  "up": bf16(LAYERS, WIDTH, HIDDEN),
  "down": bf16(LAYERS, HIDDEN, WIDTH),
}


def normal(x):
  scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)
  return (x * scale).astype(x.dtype)


def rotate(x, places):
  """Rotary embedding; `x` is [batch, length, heads, head]."""
  frequencies = 10_000.0 ** (-jnp.arange(0, HEAD, 2) / HEAD)
  angles = places[..., None, None] * frequencies
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  left, right = jnp.split(x.astype(jnp.float32), 2, -1)
  return jnp.concatenate((left * cos - right * sin, right * cos + left * sin), -1).astype(x.dtype)


def attention(q, keys, values, mask):
  batch, length = q.shape[:2]
  q = q.reshape(batch, length, GROUPS, HEADS // GROUPS, HEAD)
  scores = jnp.einsum("bqghd,bkgd->bghqk", q, keys, preferred_element_type=jnp.float32)
  scores = jnp.where(mask, scores / HEAD**0.5, -1e30)
  mixed = jnp.einsum("bghqk,bkgd->bqghd", jax.nn.softmax(scores).astype(q.dtype), values)
  return mixed.reshape(batch, length, HEADS * HEAD)


def feedforward(x, w):
  y = normal(x)
  return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def projections(x, w, places):
  batch, length, y = *x.shape[:2], normal(x)
  q = rotate((y @ w["q"]).reshape(batch, length, HEADS, HEAD), places)
  k = rotate((y @ w["k"]).reshape(batch, length, GROUPS, HEAD), places)
  return q, k, (y @ w["v"]).reshape(batch, length, GROUPS, HEAD)


def prefill(weights, table, words):
  places = jnp.broadcast_to(jnp.arange(words.shape[1]), words.shape)
  mask = places[0][:, None] >= places[0]

  def layer(x, w):
    q, k, v = projections(x, w, places)
    x = x + attention(q, k, v, mask) @ w["o"]
    return feedforward(x, w), (k, v)

  x, cache = jax.lax.scan(layer, table[words], weights)
  return normal(x[:, -1]) @ table.T, cache


def decode(weights, table, cache, words, place):
  """All sequences are equally long."""
  batch = len(words)
  mask = jnp.arange(LENGTH) <= place

  def layer(x, scanned):
    w, keys, values = scanned
    q, k, v = projections(x, w, jnp.full((batch, 1), place))
    keys = jax.lax.dynamic_update_slice(keys, k, (0, place, 0, 0))
    values = jax.lax.dynamic_update_slice(values, v, (0, place, 0, 0))
    x = x + attention(q, keys, values, mask) @ w["o"]
    return feedforward(x, w), (keys, values)

  x, cache = jax.lax.scan(layer, table[words][:, None], (weights, *cache))
  return normal(x[:, 0]) @ table.T, cache


def decode_ragged(weights, table, cache, words, places):
  """Each sequence has its own length."""
  batch = len(words)
  mask = (jnp.arange(LENGTH) <= places[:, None])[:, None, None, None]
  rows = jnp.arange(batch)

  def layer(x, scanned):
    w, keys, values = scanned
    q, k, v = projections(x, w, places[:, None])
    keys, values = keys.at[rows, places].set(k[:, 0]), values.at[rows, places].set(v[:, 0])
    x = x + attention(q, keys, values, mask) @ w["o"]
    return feedforward(x, w), (keys, values)

  x, cache = jax.lax.scan(layer, table[words][:, None], (weights, *cache))
  return jnp.argmax(normal(x[:, 0]) @ table.T, -1), cache


def decode_int8_cache(q, keys, key_scales, values, value_scales, places):
  k = keys.astype(jnp.bfloat16) * key_scales[..., None]
  v = values.astype(jnp.bfloat16) * value_scales[..., None]
  mask = (jnp.arange(keys.shape[1]) <= places[:, None])[:, None, None, None]
  return attention(q, k, v, mask)


def rolling_window(keys, values, k, v, q, place):
  """A cache of the last positions, which overwrites the oldest one."""
  at = place % keys.shape[1]
  keys = jax.lax.dynamic_update_slice(keys, k, (0, at, 0, 0))
  values = jax.lax.dynamic_update_slice(values, v, (0, at, 0, 0))
  return attention(q, keys, values, jnp.arange(keys.shape[1]) <= place), keys, values


def generate(weights, table, cache, words, place):
  """Eight greedy words in a loop."""

  def one(carry, _):
    cache, words, place = carry
    logits, cache = decode(weights, table, cache, words, place)
    words = jnp.argmax(logits, -1)
    return (cache, words, place + 1), words

  return jax.lax.scan(one, (cache, words, place), None, length=8)


def generate_until_end(weights, table, cache, words, place):
  """Greedy words until all sequences have ended, at most 32."""

  def ends(carry):
    *_, done, count = carry
    return ~done.all() & (count < 32)

  def one(carry):
    cache, words, done, count = carry
    logits, cache = decode(weights, table, cache, words, place + count)
    words = jnp.argmax(logits, -1)
    return cache, words, done | (words == 2), count + 1

  return jax.lax.while_loop(ends, one, (cache, words, words < 0, 0))[1]


def top_k_sample(logits, key):
  best, words = jax.lax.top_k(logits, 50)
  chosen = jax.random.categorical(key, best / 0.8)
  return jnp.take_along_axis(words, chosen[:, None], 1)[:, 0]


def top_p_sample(logits, key):
  order = jnp.argsort(-logits, -1)
  ranked = jnp.take_along_axis(logits, order, -1)
  below = jnp.cumsum(jax.nn.softmax(ranked), -1) - jax.nn.softmax(ranked)
  chosen = jax.random.categorical(key, jnp.where(below < 0.9, ranked, -jnp.inf))
  return jnp.take_along_axis(order, chosen[:, None], 1)[:, 0]


def min_p_sample(logits, key):
  kept = jax.nn.log_softmax(logits)
  kept = jnp.where(kept >= kept.max(-1, keepdims=True) + jnp.log(0.05), kept, -jnp.inf)
  return jax.random.categorical(key, kept)


def repetition_penalty(logits, words):
  seen = jnp.take_along_axis(logits, words, 1)
  seen = jnp.where(seen > 0, seen / 1.2, seen * 1.2)
  return logits.at[jnp.arange(len(logits))[:, None], words].set(seen).argmax(-1)


def verify_draft(draft, target, words, key):
  """Speculative decoding: how many words of a draft are kept, and the next one."""
  p, q = (jax.nn.softmax(x) for x in (target, draft))
  at = lambda x: jnp.take_along_axis(x[:, : words.shape[1]], words[..., None], -1)[..., 0]
  kept = jax.random.uniform(key, words.shape) < at(p) / jnp.maximum(at(q), 1e-9)
  count = jnp.cumprod(kept, 1).sum(1)
  row = lambda x: jnp.take_along_axis(x, count[:, None, None], 1)[:, 0]
  rest = jnp.maximum(row(p) - row(jnp.pad(q, ((0, 0), (0, 1), (0, 0)))), 0)
  return count, jax.random.categorical(key, jnp.log(rest + 1e-9))


def beam_search_step(scores, logits, cache):
  batch, beams, words = logits.shape
  total = (scores[..., None] + jax.nn.log_softmax(logits)).reshape(batch, beams * words)
  scores, flat = jax.lax.top_k(total, beams)
  parents = flat // words
  cache = jnp.take_along_axis(cache, parents[:, :, None, None], 1)
  return scores, flat % words, cache


CACHE = (bf16(LAYERS, 8, LENGTH, GROUPS, HEAD),) * 2
TABLE = bf16(WORDS, WIDTH)
_donating = functools.partial(jax.jit, donate_argnums=2)
PROGRAMS = {
  "prefill": (prefill, (WEIGHTS, TABLE, i32(4, 512))),
  "decode": (_donating(decode), (WEIGHTS, TABLE, CACHE, i32(8), i32())),
  "decode_ragged": (_donating(decode_ragged), (WEIGHTS, TABLE, CACHE, i32(8), i32(8))),
  "decode_int8_cache": (
    decode_int8_cache,
    (bf16(8, 1, HEADS, HEAD), *(i8(8, 2_048, GROUPS, HEAD), bf16(8, 2_048, GROUPS)) * 2, i32(8)),
  ),
  "rolling_window": (
    jax.jit(rolling_window, donate_argnums=(0, 1)),
    (
      *(bf16(8, LENGTH, GROUPS, HEAD),) * 2,
      *(bf16(8, 1, GROUPS, HEAD),) * 2,
      bf16(8, 1, HEADS, HEAD),
      i32(),
    ),
  ),
  "generate": (_donating(generate), (WEIGHTS, TABLE, CACHE, i32(8), i32())),
  "generate_until_end": (_donating(generate_until_end), (WEIGHTS, TABLE, CACHE, i32(8), i32())),
  "greedy": (lambda logits: jnp.argmax(logits, -1), (bf16(64, WORDS),)),
  "sample": (
    lambda logits, key: jax.random.categorical(key, logits / 0.7),
    (f32(64, WORDS), key()),
  ),
  "top_k_sample": (top_k_sample, (f32(32, WORDS), key())),
  "top_p_sample": (top_p_sample, (f32(16, WORDS), key())),
  "min_p_sample": (min_p_sample, (f32(64, WORDS), key())),
  "repetition_penalty": (repetition_penalty, (f32(32, WORDS), i32(32, 128))),
  "verify_draft": (verify_draft, (f32(8, 4, WORDS), f32(8, 5, WORDS), i32(8, 4), key())),
  "beam_search_step": (beam_search_step, (f32(8, 4), f32(8, 4, WORDS), bf16(8, 4, 256, 128))),
}
