"""Gathers, scatters, sorts and segment sums: what looks up rows by integers."""

from _arrays import bf16, f32, i32, key, parameters
from flax import linen as nn
import jax
import jax.numpy as jnp

WORDS, WIDTH, TOKENS = 32_000, 512, 4_096


def take(table, words):
  return jnp.take(table, words, axis=0)


def take_gradient(table, words):
  return jax.grad(lambda table: jnp.square(take(table, words).astype(jnp.float32)).sum())(table)


EMBED = nn.Embed(WORDS, WIDTH)
EMBEDDED = parameters(EMBED, i32(8, 512))


def embed_gradient(params, words, target):
  loss = lambda params: jnp.square(EMBED.apply(params, words) - target).mean()
  return jax.grad(loss)(params)


def tied_logits(params, words):
  return EMBED.apply(params, EMBED.apply(params, words), method="attend")


def embedding_bag(table, words, bags):
  return jax.ops.segment_sum(table[words], bags, num_segments=512)


def one_hot(table, words):
  return jax.nn.one_hot(words, len(table), dtype=table.dtype) @ table


def segment_softmax(scores, segments):
  most = jax.ops.segment_max(scores, segments, num_segments=1024)
  scores = jnp.exp(scores - most[segments])
  return scores / jax.ops.segment_sum(scores, segments, num_segments=1024)[segments]


def unique_counts(words):
  return jnp.unique(words, size=256, fill_value=0, return_counts=True)


def sort_by_key(keys, values):
  order = jnp.argsort(keys)
  return keys[order], values[order]


def histogram(values):
  return jnp.histogram(values, bins=64, range=(0.0, 1.0))[0]


def crop(images, rows, columns):
  """A window of each image at a place of its own."""
  window = lambda image, row, column: jax.lax.dynamic_slice(image, (row, column, 0), (24, 24, 3))
  return jax.vmap(window)(images, rows, columns)


def write_rows(cache, rows, places):
  """A row of each cache at a place of its own."""
  write = lambda cache, row, place: jax.lax.dynamic_update_slice(cache, row[None], (place, 0))
  return jax.vmap(write)(cache, rows, places)


PROGRAMS = {
  "take": (take, (f32(WORDS, WIDTH), i32(TOKENS))),
  "take_bf16": (take, (bf16(WORDS, 1024), i32(8, 1024))),
  "take_gradient": (take_gradient, (f32(WORDS, WIDTH), i32(TOKENS))),
  "take_gradient_bf16": (take_gradient, (bf16(WORDS, WIDTH), i32(8, 512))),
  "embed": (EMBED.apply, (EMBEDDED, i32(8, 512))),
  "embed_gradient": (embed_gradient, (EMBEDDED, i32(8, 512), f32(8, 512, WIDTH))),
  "tied_logits": (tied_logits, (EMBEDDED, i32(8, 512))),
  "embedding_bag": (embedding_bag, (f32(100_000, 64), i32(8_192), i32(8_192))),
  "one_hot": (one_hot, (bf16(4_096, 512), i32(2_048))),
  "vmap_take": (jax.vmap(take, (None, 0)), (bf16(50_304, 768), i32(8, 512))),
  "scatter_add": (lambda x, i, v: x.at[i].add(v), (f32(65_536, 128), i32(8_192), f32(8_192, 128))),
  "scatter_set": (lambda x, i, v: x.at[i].set(v), (f32(65_536, 128), i32(2_048), f32(2_048, 128))),
  "scatter_max": (lambda x, i, v: x.at[i].max(v), (f32(16_384), i32(4_096), f32(4_096))),
  "segment_sum": (
    lambda x, s: jax.ops.segment_sum(x, s, num_segments=2_048),
    (f32(16_384, 128), i32(16_384)),
  ),
  "segment_sum_sorted": (
    lambda x, s: jax.ops.segment_sum(x, s, 2_048, indices_are_sorted=True),
    (f32(16_384, 128), i32(16_384)),
  ),
  "segment_softmax": (segment_softmax, (f32(16_384), i32(16_384))),
  "bincount": (lambda words: jnp.bincount(words, length=1_000), (i32(65_536),)),
  "unique": (unique_counts, (i32(8_192),)),
  "argsort": (jnp.argsort, (f32(65_536),)),
  "sort_rows": (jnp.sort, (f32(1_024, 1_024),)),
  "sort_by_key": (sort_by_key, (i32(16_384), f32(16_384, 64))),
  "top_k": (lambda x: jax.lax.top_k(x, 8), (f32(4_096, 256),)),
  "approx_max_k": (lambda x: jax.lax.approx_max_k(x, 10), (f32(128, 65_536),)),
  "take_along_axis": (
    lambda x, i: jnp.take_along_axis(x, i[:, None], 1),
    (f32(8_192, 1_024), i32(8_192)),
  ),
  "cumsum": (lambda x: jnp.cumsum(x, 1), (f32(512, 8_192),)),
  "searchsorted": (jnp.searchsorted, (f32(65_536), f32(8_192))),
  "histogram": (histogram, (f32(65_536),)),
  "nonzero": (lambda x: jnp.nonzero(x, size=1_024), (f32(16_384),)),
  "crop": (crop, (f32(256, 32, 32, 3), i32(256), i32(256))),
  "write_rows": (write_rows, (bf16(32, 2_048, 128), bf16(32, 128), i32(32))),
  "dynamic_slice": (
    lambda x, place: jax.lax.dynamic_slice_in_dim(x, place, 256),
    (f32(16_384, 512), i32()),
  ),
  "dynamic_update": (
    jax.jit(lambda x, y, place: jax.lax.dynamic_update_slice(x, y, (place, 0)), donate_argnums=0),
    (f32(16_384, 512), f32(256, 512), i32()),
  ),
  "permutation": (lambda x, key: jax.random.permutation(key, x), (f32(16_384, 32), key())),
}
