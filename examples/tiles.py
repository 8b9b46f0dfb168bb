"""Kernels with tiles, whose order `tpugraphs_jax.tune_tiles` finds.

    python -m tpugraphs_jax.tune_tiles examples/tiles.py:product --target v6e
    python -m tpugraphs_jax.tune_tiles examples/tiles.py:attention --target v6e

Each is a function from a tile to the function with that tile. Both are Pallas kernels for TPUs: the
product is ours, and the attention is jax's flash attention.
"""

import itertools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
import jax.numpy as jnp


def product(tile):
  """The product of two matrices in blocks of m, n and k."""
  m, n, k = tile["m"], tile["n"], tile["k"]

  def kernel(x_ref, y_ref, out_ref, sum_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
      sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
      out_ref[...] = sum_ref[...].astype(out_ref.dtype)

  def multiply(x, y):
    return pl.pallas_call(
      kernel,
      grid=(x.shape[0] // m, y.shape[1] // n, x.shape[1] // k),
      in_specs=[
        pl.BlockSpec((m, k), lambda i, j, step: (i, step)),
        pl.BlockSpec((k, n), lambda i, j, step: (step, j)),
      ],
      out_specs=pl.BlockSpec((m, n), lambda i, j, step: (i, j)),
      out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
      scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
    )(x, y)

  return multiply


def attention(tile):
  """Causal flash attention with blocks of queries and of keys."""
  sizes = BlockSizes(block_b=1, block_q=tile["q"], block_k_major=tile["k_major"], block_k=tile["k"])

  def attend(queries, keys, values):
    return flash_attention(queries, keys, values, causal=True, block_sizes=sizes)

  return attend


def _tiles(**sizes):
  """All combinations of sizes."""
  return [dict(zip(sizes, values)) for values in itertools.product(*sizes.values())]


_MATRIX = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
_HEADS = jax.ShapeDtypeStruct((4, 8, 2048, 128), jnp.bfloat16)  # batch, heads, length, width

TILES = {
  "product": (product, (_MATRIX, _MATRIX), _tiles(m=[256, 1024], n=[256, 1024], k=[512, 1024])),
  "attention": (
    attention,
    (_HEADS, _HEADS, _HEADS),
    _tiles(q=[256, 1024], k_major=[1024], k=[256, 1024]),
  ),
}
