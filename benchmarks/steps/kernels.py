"""Pallas kernels: those that jax has, and some as its pages and others teach them."""

import functools

from _arrays import bf16, f32, i32
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention, megablox
from jax.experimental.pallas.ops.tpu import matmul as jax_matmul
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.random import threefry
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
import jax.numpy as jnp

HEADS, GROUPS, LENGTH, HEAD = 8, 2, 1_024, 128


def splash_attention(q, k, v, *, make_mask=masks.CausalMask):
  mask = masks.MultiHeadMask([make_mask((LENGTH, LENGTH)) for _ in range(HEADS)])
  sizes = splash.BlockSizes(
    *(512, 512, 512),
    block_q_dkv=512,
    block_kv_dkv=512,
    block_kv_dkv_compute=512,
    block_q_dq=512,
    block_kv_dq=512,
  )
  kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes)
  return jax.vmap(kernel)(q * HEAD**-0.5, k, v)


def gradient(attention):
  def of(q, k, v):
    loss = lambda *arrays: attention(*arrays).astype(jnp.float32).sum()
    return jax.grad(loss, (0, 1, 2))(q, k, v)

  return of


def window(shape):
  return masks.LocalMask(shape, (256, 0), 0)


def quantised_pages(q, pages, scales, lengths, indices):
  from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils

  k = v = quantization_utils.QuantizedTensor(pages, scales)
  return paged_attention(q, k, v, lengths, indices, pages_per_compute_block=4)


def product(x, y, *, rows=256, columns=256, inner=512):
  """A product in blocks that Pallas pipelines, with an accumulator on the chip."""

  def kernel(x_ref, y_ref, out_ref, sum_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
      sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
      out_ref[...] = sum_ref[...].astype(out_ref.dtype)

  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
    grid=(x.shape[0] // rows, y.shape[1] // columns, x.shape[1] // inner),
    in_specs=[
      pl.BlockSpec((rows, inner), lambda i, j, k: (i, k)),
      pl.BlockSpec((inner, columns), lambda i, j, k: (k, j)),
    ],
    out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
    scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
  )(x, y)


def sparse_product(places, x, y, *, size=256):
  """Products with blocks of `x` at places that scalar prefetch gives."""

  def kernel(places_ref, x_ref, y_ref, out_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
      out_ref[...] = jnp.zeros_like(out_ref)

    out_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

  blocks = len(places)
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((size, y.shape[1]), jnp.float32),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(y.shape[1] // size, blocks),
      in_specs=[
        pl.BlockSpec((size, size), lambda j, k, places: (0, places[k])),
        pl.BlockSpec((size, size), lambda j, k, places: (places[k], j)),
      ],
      out_specs=pl.BlockSpec((size, size), lambda j, k, places: (0, j)),
    ),
  )(places, x, y)


def rms_norm(x, scale):
  def kernel(x_ref, scale_ref, out_ref):
    x = x_ref[...].astype(jnp.float32)
    y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
    out_ref[...] = (y * scale_ref[...]).astype(out_ref.dtype)

  rows, width = 256, x.shape[1]
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid=(x.shape[0] // rows,),
    in_specs=[
      pl.BlockSpec((rows, width), lambda i: (i, 0)),
      pl.BlockSpec((1, width), lambda i: (0, 0)),
    ],
    out_specs=pl.BlockSpec((rows, width), lambda i: (i, 0)),
  )(x, scale)


def gather_rows(places, table):
  """Rows that the kernel fetches itself, one copy a row."""

  def kernel(places_ref, table_ref, out_ref, semaphore):
    first = pl.program_id(0) * 8
    copies = [
      pltpu.make_async_copy(
        table_ref.at[pl.ds(places_ref[first + row], 1)], out_ref.at[pl.ds(row, 1)], semaphore
      )
      for row in range(8)
    ]
    for copy in copies:
      copy.start()
    for copy in copies:
      copy.wait()

  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((len(places), table.shape[1]), table.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(len(places) // 8,),
      in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
      out_specs=pl.BlockSpec((8, table.shape[1]), lambda i, places: (i, 0)),
      scratch_shapes=[pltpu.SemaphoreType.DMA],
    ),
  )(places, table)


def fused_feedforward(x, gate, up):
  """A gated product, both of whose parts share a block of `x`."""

  def kernel(x_ref, gate_ref, up_ref, out_ref):
    dot = lambda w_ref: jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    out_ref[...] = (jax.nn.silu(dot(gate_ref)) * dot(up_ref)).astype(out_ref.dtype)

  rows, columns, inner = 256, 256, x.shape[1]
  weight = pl.BlockSpec((inner, columns), lambda i, j: (0, j))
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((x.shape[0], gate.shape[1]), x.dtype),
    grid=(x.shape[0] // rows, gate.shape[1] // columns),
    in_specs=[pl.BlockSpec((rows, inner), lambda i, j: (i, 0)), weight, weight],
    out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
  )(x, gate, up)


def pipelined_sum(x, y):
  """Sums of arrays in the large memory by a pipeline inside a kernel."""

  def kernel(x_ref, y_ref, out_ref):
    def add(x_ref, y_ref, out_ref):
      out_ref[...] = x_ref[...] + y_ref[...]

    block = pl.BlockSpec((256, 512), lambda i: (i, 0))
    pltpu.emit_pipeline(add, grid=(x.shape[0] // 256,), in_specs=[block, block], out_specs=[block])(
      x_ref, y_ref, out_ref
    )

  any_ = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), in_specs=[any_, any_], out_specs=any_
  )(x, y)


QKV = (bf16(2, HEADS, LENGTH, HEAD),) * 3
FLASH = functools.partial(flash_attention.flash_attention, causal=True, sm_scale=HEAD**-0.5)
PAGES = bf16(GROUPS, 256, 16, HEAD)
_gmm = functools.partial(megablox.gmm, preferred_element_type=jnp.bfloat16, tiling=(128, 512, 512))
PROGRAMS = {
  "flash_attention": (FLASH, QKV),
  "flash_attention_gradient": (gradient(FLASH), QKV),
  "splash_attention": (splash_attention, QKV),
  "splash_attention_gradient": (gradient(splash_attention), QKV),
  "splash_attention_window": (functools.partial(splash_attention, make_mask=window), QKV),
  "paged_attention": (
    functools.partial(paged_attention, pages_per_compute_block=4),
    (bf16(8, HEADS, HEAD), PAGES, PAGES, i32(8), i32(8, 32)),
  ),
  "paged_attention_one_loop": (
    functools.partial(paged_attention, pages_per_compute_block=4, inline_seq_dim=False),
    (bf16(8, HEADS, HEAD), PAGES, PAGES, i32(8), i32(8, 32)),
  ),
  "ragged_paged_attention": (
    functools.partial(
      ragged_paged_attention,
      num_kv_pages_per_block=8,
      num_queries_per_block=32,
      vmem_limit_bytes=32 << 20,
    ),
    (bf16(256, HEADS, HEAD), bf16(256, 16, 2 * GROUPS, HEAD), i32(8), i32(8, 32), i32(9), i32(1)),
  ),
  "gmm": (_gmm, (bf16(2_048, 1_024), bf16(8, 1_024, 1_024), i32(8))),
  "gmm_gradient": (
    lambda x, w, sizes: jax.grad(lambda x, w: _gmm(x, w, sizes).sum(), (0, 1))(x, w),
    (bf16(2_048, 1_024), bf16(8, 1_024, 1_024), i32(8)),
  ),
  "ragged_dot": (jax.lax.ragged_dot, (bf16(2_048, 1_024), bf16(8, 1_024, 1_024), i32(8))),
  "jax_matmul": (
    functools.partial(jax_matmul.matmul, block_shape=(512, 512)),
    (bf16(2_048, 2_048), bf16(2_048, 2_048)),
  ),
  "threefry": (
    lambda key: threefry.plthreefry_random_bits(key, 32, (1_024, 1_024)),
    (jax.ShapeDtypeStruct((2,), jnp.uint32),),
  ),
  "product": (product, (bf16(2_048, 2_048), bf16(2_048, 2_048))),
  "sparse_product": (sparse_product, (i32(4), bf16(256, 4_096), bf16(4_096, 1_024))),
  "rms_norm": (rms_norm, (bf16(4_096, 2_048), f32(1, 2_048))),
  "gather_rows": (gather_rows, (i32(512), f32(16_384, 256))),
  "fused_feedforward": (
    fused_feedforward,
    (bf16(1_024, 1_024), bf16(1_024, 2_816), bf16(1_024, 2_816)),
  ),
  "pipelined_sum": (pipelined_sum, (f32(4_096, 512), f32(4_096, 512))),
}
