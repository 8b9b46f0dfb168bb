"""Programs that the kernel corpus of SJTU measured on one v6e, as far as jax alone builds them.

The file `sjtu/medians_v6e.csv` names their arguments. Some of its kernels are those of jax; others
are in repositories that jax does not have, and are left out.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import megablox
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
import jax.numpy as jnp
import numpy as np

XLA, PALLAS = "xla", "pallas"
_ROWS, _GROUPS, _INNER, _COLUMNS = 32_768, 128, 4_096, 1_536


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
  return _array(*shape, dtype=jnp.float32)


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Attention of arrays [batch, heads, length, head] in their type."""
  scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
  places = jnp.arange(q.shape[2])
  mixed = jax.nn.softmax(jnp.where(places <= places[:, None], scores, -jnp.inf))
  return jnp.einsum("bhqk,bhkd->bhqd", mixed, v)


def _dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  return jax.nn.softmax(q @ k.T / q.shape[-1] ** 0.5) @ v


def _blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Causal attention of [heads, length, head] in float32, 128 rows after the other."""
  wide, rows, length = functools.partial(jnp.asarray, dtype=jnp.float32), 128, q.shape[1]

  def block(number: Any, out: jax.Array) -> jax.Array:
    first = number * rows
    part = jax.lax.dynamic_slice_in_dim(q, first, rows, 1)
    scores = jnp.einsum("hqd,hkd->hqk", wide(part), wide(k))
    is_seen = jnp.arange(length) <= (first + jnp.arange(rows))[:, None]
    mixed = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf))
    found = jnp.einsum("hqk,hkd->hqd", mixed, wide(v)).astype(v.dtype)
    return jax.lax.dynamic_update_slice_in_dim(out, found, first, 1)

  out = jnp.zeros((*q.shape[:2], v.shape[-1]), v.dtype)
  return jax.lax.fori_loop(0, length // rows, block, out)


def _batched(x: jax.Array, w: jax.Array) -> jax.Array:
  """Equal groups of rows, each with its matrix, in float32."""
  x = x.reshape(_GROUPS, -1, _INNER).astype(jnp.float32)
  return jnp.einsum("gmk,gkn->gmn", x, w.astype(jnp.float32)).reshape(-1, _COLUMNS)


def _balanced() -> np.ndarray:
  return np.full(_GROUPS, _ROWS // _GROUPS, np.int32)


def _unbalanced() -> np.ndarray:
  """Sizes in proportion to uniform numbers above .1, drawn as the measurement drew them."""
  weights = jax.random.uniform(jax.random.split(jax.random.key(42), 3)[2], (_GROUPS,)) + 0.1
  sizes = np.array(jnp.floor(weights / weights.sum() * _ROWS).astype(jnp.int32))
  sizes[-1] += _ROWS - sizes.sum()
  return sizes


def _ragged(sizes: Callable[[], np.ndarray]) -> Callable[[], tuple[Callable, tuple]]:
  """`ragged_dot` with a result in float32."""
  product = functools.partial(jax.lax.ragged_dot, preferred_element_type=jnp.float32)
  return lambda: (product, (_array(_ROWS, _INNER), _array(_GROUPS, _INNER, _COLUMNS), sizes()))


def _megablox(*tiling: int) -> tuple[Callable, tuple]:
  product = functools.partial(megablox.gmm, preferred_element_type=jnp.float32, tiling=tiling)
  return product, (_array(_ROWS, _INNER), _array(_GROUPS, _INNER, _COLUMNS), _balanced())


def _int8(x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
  """Rows are rounded to 8 bits; the products of the rounded numbers are summed in float32."""
  scale = jnp.abs(x).max(-1, keepdims=True) / 127.0
  rounded = (x * jnp.nan_to_num(1.0 / scale, posinf=127.0)).astype(jnp.int8)
  dimensions = (((1,), (1,)), ((), ()))
  out = jax.lax.dot_general(rounded, w, dimensions, preferred_element_type=jnp.float32)
  return (out * scales * scale.astype(jnp.float32)).astype(x.dtype)


def _biased(logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
  _, experts = jax.lax.top_k(logits + bias, 8)
  return jnp.take_along_axis(logits, experts, -1), experts


def _grouped(logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Eight experts of the four best of eight groups."""
  biased, rows = logits + bias, jnp.arange(len(logits))[:, None]
  _, groups = jax.lax.top_k(jax.lax.top_k(biased.reshape(-1, 8, 32), 2)[0].sum(-1), 4)
  kept = jnp.zeros((len(logits), 8), bool).at[rows, groups].set(True)
  _, experts = jax.lax.top_k(jnp.where(jnp.repeat(kept, 32, 1), biased, -jnp.inf), 8)
  return jnp.take_along_axis(logits, experts, -1), experts


def _splash(sizes: splash.BlockSizes | None, *, backward: bool = False) -> tuple[Callable, tuple]:
  """Causal attention of 32 heads in 8 groups, 4,096 words."""
  mask = masks.MultiHeadMask([masks.CausalMask((4_096, 4_096)) for _ in range(4)])
  kernel = splash.make_splash_mqa_single_device(mask, block_sizes=sizes)

  def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    out = jax.vmap(kernel)(q.reshape(8, 4, 4_096, 128), k, v)
    return out.reshape(32, 4_096, 128)

  loss = lambda *arrays: forward(*arrays).astype(jnp.float32).sum()
  function = jax.value_and_grad(loss, (0, 1, 2)) if backward else forward
  return function, (_array(32, 4_096, 128), *(_array(8, 4_096, 128),) * 2)


def _forward_sizes() -> splash.BlockSizes:
  return splash.BlockSizes(block_q=2_048, block_kv=2_048, block_kv_compute=1_024)


def _both_sizes() -> splash.BlockSizes:
  small = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
  return splash.BlockSizes(2_048, 2_048, 1_024, **dict.fromkeys(small, 128))


def _pages() -> tuple[Any, ...]:
  """64 sequences with 64 words each, whose 4,096 keys and values lie in pages in their order."""
  lengths = np.full(64, 4_096, np.int32)
  pages = np.arange(64 * 256, dtype=np.int32).reshape(64, 256)
  starts = np.arange(65, dtype=np.int32) * 64
  arrays = (_array(4_096, 64, 128), _array(64 * 256, 16, 16, 128))
  return (*arrays, lengths, pages, starts, np.array([64], np.int32))


def _paged(q, pages, lengths, indices, starts, count):
  """One sequence after the other, as a sum over all of its pages."""
  outs = []
  for row in range(64):
    part = jax.lax.dynamic_slice(q, (starts[row], 0, 0), (64, 64, 128))
    k, v = (pages[indices[row], :, kind::2].reshape(-1, 8, 128) for kind in (0, 1))
    k, v = (jnp.repeat(each, 8, 1) for each in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", part, k, preferred_element_type=jnp.float32) / 128**0.5
    place = (lengths[row] - 64) + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    key = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    hidden = (place < key) | (key >= lengths[row])
    mixed = jax.nn.softmax(jnp.where(hidden, -2.4e38, scores)).astype(v.dtype)
    out = jnp.einsum("hqk,khd->qhd", mixed, v).astype(q.dtype)
    outs.append(jnp.where(row < count[0], out, 0.0))
  return jnp.concatenate(outs)


def _update(new: jax.Array, slices: jax.Array, cache: jax.Array, count: jax.Array) -> jax.Array:
  """Copies slices of at most 32 rows into a cache that stays as it is."""

  def one(number: Any, cache: jax.Array) -> jax.Array:
    to, start, length = slices[0, number], slices[1, number], slices[2, number]
    block = jax.lax.dynamic_slice_in_dim(new, start, 32, 0)
    before = jax.lax.dynamic_slice_in_dim(cache, to, 32, 0)
    kept = (jnp.arange(32) < length) & (number < count[0])
    block = jnp.where(kept[:, None, None], block, before)
    return jax.lax.dynamic_update_slice_in_dim(cache, block, to, 0)

  return jax.lax.fori_loop(0, slices.shape[1], one, cache)


def _slices() -> np.ndarray:
  places = np.arange(128, dtype=np.int32) * 32
  return np.stack([places, places, np.full(128, 32, np.int32)])


def _indices(rows: int, count: int) -> np.ndarray:
  return np.random.default_rng(0).integers(0, rows, count).astype(np.int32)


def _gather(rows: int, width: int, count: int) -> tuple[Callable, tuple]:
  return lambda x, indices: x[indices], (_floats(rows, width), _indices(rows, count))


def _gather_reduce(x: jax.Array, indices: jax.Array, weights: jax.Array, valid: jax.Array) -> Any:
  rows = jnp.where(valid[:, None], x[indices] * weights[:, None], 0)
  return rows.reshape(-1, 4, x.shape[-1]).sum(1)


_LOGITS, _BIAS = _floats(4_096, 256), _floats(256)
_BHSD, _SPLASH = (_array(4, 64, 4_096, 128),) * 3, (_array(8, 128, 4_096, 192),) * 2
# Kind, and what makes the function with its arguments, by the family and the program of the file.
PROGRAMS: dict[tuple[str, ...], tuple[str, Callable[[], tuple[Callable, tuple]]]] = {
  ("flash_attention", "baseline causal_bhsd"): (XLA, lambda: (_causal, _BHSD)),
  ("flash_attention", "baseline dense_2d"): (XLA, lambda: (_dense, (_array(512, 64),) * 3)),
  ("flash_attention", "baseline splash blockwise"): (
    XLA,
    lambda: (
      lambda *arrays: jax.lax.map(lambda each: _blocks(*each), arrays),
      (*_SPLASH, _array(8, 128, 4_096, 128)),
    ),
  ),
  ("grouped_matmul", "baseline batched_dense"): (
    XLA,
    lambda: (_batched, (_array(_ROWS, _INNER), _array(_GROUPS, _INNER, _COLUMNS))),
  ),
  ("grouped_matmul", "jax.lax.ragged_dot", "balanced"): (PALLAS, _ragged(_balanced)),
  ("grouped_matmul", "jax.lax.ragged_dot", "unbalanced"): (PALLAS, _ragged(_unbalanced)),
  ("grouped_matmul", "sglang_jax gmm v1"): (PALLAS, lambda: _megablox(512, 2_048, 1_536)),
  ("grouped_matmul", "jaxbench gmm v1"): (PALLAS, lambda: _megablox(256, 1_024, 1_024)),
  ("quantized_matmul", "baseline w8a8"): (
    XLA,
    lambda: (_int8, (_array(1_024, 4_096), _array(14_336, 4_096, dtype=jnp.int8), _floats(14_336))),
  ),
  ("topk_routing", "baseline plain"): (XLA, lambda: (lambda x: jax.lax.top_k(x, 8), (_LOGITS,))),
  ("topk_routing", "baseline biased"): (XLA, lambda: (_biased, (_LOGITS, _BIAS))),
  ("topk_routing", "baseline grouped"): (XLA, lambda: (_grouped, (_LOGITS, _BIAS))),
  ("splash_attention", "jaxbench forward"): (PALLAS, lambda: _splash(_forward_sizes())),
  ("splash_attention", "jaxbench forward+backward"): (
    PALLAS,
    lambda: _splash(_both_sizes(), backward=True),
  ),
  ("splash_attention", "jaxbench forward default blocks"): (PALLAS, lambda: _splash(None)),
  ("ragged_paged_attention", "baseline"): (XLA, lambda: (_paged, _pages())),
  ("ragged_paged_attention", "tpu_inference"): (
    PALLAS,
    lambda: (
      functools.partial(
        ragged_paged_attention,
        sm_scale=128**-0.5,
        num_kv_pages_per_block=64,
        num_queries_per_block=64,
        vmem_limit_bytes=32 << 20,
      ),
      _pages(),
    ),
  ),
  ("kv_cache_update", "baseline"): (
    XLA,
    lambda: (
      _update,
      (_array(4_096, 16, 128), _slices(), _array(32_768, 16, 128), np.array([128], np.int32)),
    ),
  ),
  ("sparsecore_ragged_gather", "baseline x[indices]"): (XLA, lambda: _gather(4_096, 1_024, 2_048)),
  ("sparsecore_ragged_gather", "baseline gather_reduce"): (
    XLA,
    lambda: (
      _gather_reduce,
      (_floats(8_192, 2_048), _indices(8_192, 2_048), _floats(2_048), _array(2_048, dtype=bool)),
    ),
  ),
  ("sparsecore_ragged_gather", "baseline gather 8192 rows"): (
    XLA,
    lambda: _gather(4_096, 1_024, 8_192),
  ),
  ("sparsecore_ragged_gather", "baseline gather 32768 rows"): (
    XLA,
    lambda: _gather(4_096, 1_024, 32_768),
  ),
  **{
    ("sparsecore_ragged_gather", f"matmul N{size}"): (
      XLA,
      functools.partial(lambda size: (jnp.matmul, (_array(size, size),) * 2), size),
    )
    for size in (2_048, 8_192)
  },
}


def find(
  family: str, program: str, shape: str
) -> tuple[str, Callable[[], tuple[Callable, tuple]]] | None:
  """The entry of a row of the file; None where jax alone does not build it."""
  keys = [(family, program), (family, program, shape.split()[-1])]
  return next((PROGRAMS[key] for key in keys if key in PROGRAMS), None)
