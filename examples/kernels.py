"""Pallas kernels of many families, whose tiles `tpugraphs_jax.collect` labels.

    python -m tpugraphs_jax.collect --tiles examples/kernels.py --label tpu_estimate --target v6e \
        --configs 20 --out out/own --collection tile:own:pallas_v6e

Each is a function from a tile to the function with that tile. Flash attention, splash attention and
the ragged product are jax's; the others are ours. `TILES` has a kernel of each family for each of
its shapes, and `SPLIT` the split of each: the families of `_KEPT_OUT` are in test as a whole; of
any other family some shapes are in train, others in valid, others in test.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import math
import random
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention, megablox
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
import jax.numpy as jnp

_bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
_f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
_int8 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int8)


def _matrix_product(tile, x, y, *others, finish, out_type, sum_type=jnp.float32):
  """The product of two matrices in blocks of m, n and k, and what `finish` makes of its blocks.

  `others` are vectors `[1, N]`, whose blocks `finish` gets.
  """
  m, n, k = tile["m"], tile["n"], tile["k"]

  def kernel(x_ref, y_ref, *refs):
    *other_refs, out_ref, sum_ref = refs

    @pl.when(pl.program_id(2) == 0)
    def _():
      sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=sum_type)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
      out_ref[...] = finish(sum_ref[...], *(ref[...] for ref in other_refs)).astype(out_ref.dtype)

  return pl.pallas_call(
    kernel,
    grid=(x.shape[0] // m, y.shape[1] // n, x.shape[1] // k),
    in_specs=[
      pl.BlockSpec((m, k), lambda i, j, step: (i, step)),
      pl.BlockSpec((k, n), lambda i, j, step: (step, j)),
      *(pl.BlockSpec((1, n), lambda i, j, step: (0, j)) for _ in others),
    ],
    out_specs=pl.BlockSpec((m, n), lambda i, j, step: (i, j)),
    out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), out_type),
    scratch_shapes=[pltpu.VMEM((m, n), sum_type)],
  )(x, y, *others)


def product(tile):
  """The product of two matrices."""
  return functools.partial(_matrix_product, tile, finish=lambda total: total, out_type=jnp.bfloat16)


def dense(tile):
  """A layer: a product, a bias and GELU."""
  return functools.partial(
    _matrix_product,
    tile,
    finish=lambda total, bias: jax.nn.gelu(total + bias),
    out_type=jnp.float32,
  )


def quantised_product(tile):
  """The product of two int8 matrices, with a scale for each column."""
  return functools.partial(
    _matrix_product,
    tile,
    finish=lambda total, scale: total.astype(jnp.float32) * scale,
    out_type=jnp.bfloat16,
    sum_type=jnp.int32,
  )


def batched_product(tile):
  """Products of a batch of matrices, `b` at a time, each with a whole inner dimension."""
  b, m, n = tile["b"], tile["m"], tile["n"]

  def kernel(x_ref, y_ref, out_ref):
    out = jax.lax.dot_general(
      x_ref[...], y_ref[...], (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    out_ref[...] = out.astype(out_ref.dtype)

  def multiply(x, y):
    batch, rows, inner = x.shape
    columns = y.shape[2]
    return pl.pallas_call(
      kernel,
      grid=(batch // b, rows // m, columns // n),
      in_specs=[
        pl.BlockSpec((b, m, inner), lambda i, j, k: (i, j, 0)),
        pl.BlockSpec((b, inner, n), lambda i, j, k: (i, 0, k)),
      ],
      out_specs=pl.BlockSpec((b, m, n), lambda i, j, k: (i, j, k)),
      out_shape=jax.ShapeDtypeStruct((batch, rows, columns), x.dtype),
    )(x, y)

  return multiply


def matrix_vector(tile):
  """A few rows times a matrix, as a decode step has it."""
  n, k = tile["n"], tile["k"]
  return lambda x, y: product({"m": x.shape[0], "n": n, "k": k})(x, y)


def ragged_product(tile):
  """A product in which each group of rows has a matrix of its own."""
  tiling = tile["m"], tile["k"], tile["n"]
  return lambda x, y, sizes: megablox.gmm(x, y, sizes, jnp.bfloat16, tiling)


def flash(tile):
  """Causal flash attention with blocks of queries and of keys."""
  sizes = flash_attention.BlockSizes(
    block_b=1, block_q=tile["q"], block_k_major=tile["k_major"], block_k=tile["k"]
  )
  return lambda q, k, v: flash_attention.flash_attention(q, k, v, causal=True, block_sizes=sizes)


def splash_attention(tile):
  """Causal splash attention, which leaves out blocks that the mask hides."""
  sizes = splash.BlockSizes(tile["q"], tile["kv"], tile["kv_compute"])

  def attend(q, k, v):
    heads, length, _ = q.shape
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    return splash.make_splash_mha_single_device(mask, block_sizes=sizes)(q, k, v)

  return attend


def _by_rows(tile, compute, x, *others, out_type=None):
  """A function of whole rows: blocks of `rows`, of which `chunk` are computed at a time."""
  rows, chunk = tile["rows"], tile["chunk"]

  def kernel(x_ref, *refs):
    *other_refs, out_ref = refs
    others = [ref[...] for ref in other_refs]

    def body(step, _):
      part = pl.ds(step * chunk, chunk)
      out_ref[part, :] = compute(x_ref[part, :].astype(jnp.float32), *others).astype(out_ref.dtype)

    jax.lax.fori_loop(0, rows // chunk, body, None)

  width = x.shape[1]
  return pl.pallas_call(
    kernel,
    grid=(x.shape[0] // rows,),
    in_specs=[
      pl.BlockSpec((rows, width), lambda i: (i, 0)),
      *(pl.BlockSpec((1, width), lambda i: (0, 0)) for _ in others),
    ],
    out_specs=pl.BlockSpec((rows, width), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct(x.shape, out_type or x.dtype),
  )(x, *others)


def softmax(tile):
  """The softmax of rows."""
  return functools.partial(_by_rows, tile, lambda x: jax.nn.softmax(x, axis=-1))


def rms_norm(tile):
  """Rows over the root of their mean square, with a scale."""
  scaled = lambda x, scale: (
    x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale
  )
  return functools.partial(_by_rows, tile, scaled)


def layer_norm(tile):
  """Rows without their mean, over their deviation, with a scale and a shift."""

  def normalised(x, scale, shift):
    centred = x - jnp.mean(x, -1, keepdims=True)
    deviation = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-6)
    return centred * deviation * scale + shift

  return functools.partial(_by_rows, tile, normalised)


def _by_blocks(tile, compute, *arrays):
  """A function of each element: blocks of `rows` and `columns`."""
  rows, columns = tile["rows"], tile["columns"]
  spec = pl.BlockSpec((rows, columns), lambda i, j: (i, j))

  def kernel(*refs):
    *in_refs, out_ref = refs
    out_ref[...] = compute(*(ref[...].astype(jnp.float32) for ref in in_refs)).astype(out_ref.dtype)

  (height, width), dtype = arrays[0].shape, arrays[0].dtype
  return pl.pallas_call(
    kernel,
    grid=(height // rows, width // columns),
    in_specs=[spec] * len(arrays),
    out_specs=spec,
    out_shape=jax.ShapeDtypeStruct((height, width), dtype),
  )(*arrays)


def gate(tile):
  """SiLU of one array times another."""
  return functools.partial(_by_blocks, tile, lambda x, y: jax.nn.silu(x) * y)


def update(tile):
  """The new weights of Adam, from weights, gradients and both moments."""

  def moved(weights, gradients, first, second):
    first = 0.9 * first + 0.1 * gradients
    second = 0.99 * second + 0.01 * jnp.square(gradients)
    return weights - 1e-3 * first / (jnp.sqrt(second) + 1e-8)

  return functools.partial(_by_blocks, tile, moved)


def transpose(tile):
  """The transpose of a matrix."""
  rows, columns = tile["rows"], tile["columns"]

  def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...].T

  def transposed(x):
    return pl.pallas_call(
      kernel,
      grid=(x.shape[0] // rows, x.shape[1] // columns),
      in_specs=[pl.BlockSpec((rows, columns), lambda i, j: (i, j))],
      out_specs=pl.BlockSpec((columns, rows), lambda i, j: (j, i)),
      out_shape=jax.ShapeDtypeStruct(x.shape[::-1], x.dtype),
    )(x)

  return transposed


def sum_of_rows(tile):
  """The sum over all rows, in blocks that are added to one block of the result."""
  rows, columns = tile["rows"], tile["columns"]

  def kernel(x_ref, out_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
      out_ref[...] = jnp.zeros_like(out_ref)

    out_ref[...] += jnp.sum(x_ref[...].astype(jnp.float32), 0, keepdims=True)

  def total(x):
    return pl.pallas_call(
      kernel,
      grid=(x.shape[1] // columns, x.shape[0] // rows),
      in_specs=[pl.BlockSpec((rows, columns), lambda j, i: (i, j))],
      out_specs=pl.BlockSpec((1, columns), lambda j, i: (0, j)),
      out_shape=jax.ShapeDtypeStruct((1, x.shape[1]), jnp.float32),
    )(x)

  return total


def log_sum(tile):
  """The logarithm of the sum of exponentials of each row, in parts, as a loss over words has it."""
  rows, columns = tile["rows"], tile["columns"]

  def kernel(x_ref, out_ref, top_ref, sum_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
      top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
      sum_ref[...] = jnp.zeros_like(sum_ref)

    x = x_ref[...].astype(jnp.float32)
    top = jnp.maximum(top_ref[...], jnp.max(x, 1, keepdims=True))
    sum_ref[...] *= jnp.exp(top_ref[...] - top)
    sum_ref[...] += jnp.sum(jnp.exp(x - top[:, :1]), 1, keepdims=True)
    top_ref[...] = top

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
      out_ref[...] = top_ref[...] + jnp.log(sum_ref[...])

  def logarithm(x):
    lanes = pltpu.VMEM((rows, 128), jnp.float32)
    out = pl.pallas_call(
      kernel,
      grid=(x.shape[0] // rows, x.shape[1] // columns),
      in_specs=[pl.BlockSpec((rows, columns), lambda i, j: (i, j))],
      out_specs=pl.BlockSpec((rows, 128), lambda i, j: (i, 0)),
      out_shape=jax.ShapeDtypeStruct((x.shape[0], 128), jnp.float32),
      scratch_shapes=[lanes, lanes],
    )(x)
    return out[:, 0]

  return logarithm


@dataclasses.dataclass(frozen=True)
class _Family:
  """Kernels of one function.

  Attributes:
    kernel: from a tile to the function.
    arguments: from a shape to the arguments of the function.
    sizes: those that each dimension of a shape can have.
    tiles: from the arguments to all tiles that are tried.
    most: elements that the largest argument can have.
  """

  kernel: Callable[..., Any]
  arguments: Callable[..., tuple[Any, ...]]
  sizes: Sequence[Sequence[int]]
  tiles: Callable[..., list[dict[str, int]]]
  most: int = 1 << 24

  def shapes(self, count: int) -> list[tuple[int, ...]]:
    """Drawn shapes, the same in every run."""
    found = [
      shape
      for shape in itertools.product(*self.sizes)
      if max(math.prod(x.shape) for x in self.arguments(*shape)) <= self.most
    ]
    return random.Random(0).sample(found, count)


def _powers(least: int, most: int) -> list[int]:
  """The powers of two from `least` to `most`."""
  return [2**power for power in range(least.bit_length() - 1, most.bit_length())]


def _tiles(fits: Callable[..., bool] = lambda **tile: True, **sizes: Sequence[int]):
  """All combinations of sizes that fit."""
  combined = (dict(zip(sizes, values)) for values in itertools.product(*sizes.values()))
  return [tile for tile in combined if fits(**tile)]


def _divisors(least: int, most: int, size: int) -> list[int]:
  """Those powers of two, and three times them, that divide a size."""
  powers = _powers(least, most)
  found = {each for each in (*powers, *(3 * p for p in powers)) if least <= each <= most}
  return sorted(each for each in found if size % each == 0)


_VMEM = 12 << 20  # bytes of blocks, two buffers each, that leave room for the compiler


def _product_tiles(x, y, *_):
  size = x.dtype.itemsize
  return _tiles(
    lambda m, n, k: 2 * size * (m * k + k * n) + 8 * m * n <= _VMEM,
    m=_divisors(64, 2048, x.shape[0]),
    n=_divisors(128, 2048, y.shape[-1]),
    k=_divisors(128, 4096, x.shape[1]),
  )


def _batched_tiles(x, y):
  inner = x.shape[2]
  return _tiles(
    lambda b, m, n: 4 * b * (m * inner + inner * n) + 8 * b * m * n <= _VMEM,
    b=_divisors(1, 16, x.shape[0]),
    m=_divisors(64, 1024, x.shape[1]),
    n=_divisors(128, 1024, y.shape[2]),
  )


def _vector_tiles(x, y):
  return _tiles(
    lambda n, k: 4 * k * n <= _VMEM,
    n=_divisors(128, 4096, y.shape[1]),
    k=_divisors(128, 4096, x.shape[1]),
  )


def _attention_tiles(major: str, minor: str):
  """Blocks of queries, of keys, and of the keys that are computed at a time."""

  def tiles(q, *_):
    lengths = _powers(128, min(2048, q.shape[-2]))
    found = _tiles(q=lengths, **{major: lengths, minor: lengths})
    return [
      tile
      for tile in found
      if tile[minor] <= tile[major] and 4 * tile["q"] * tile[minor] <= 4 << 20
    ]

  return tiles


def _row_tiles(x, *_):
  row = 2 * 2 * x.dtype.itemsize * x.shape[1]
  return _tiles(
    lambda rows, chunk: chunk <= rows and rows * row <= _VMEM and chunk * x.shape[1] <= 1 << 18,
    rows=_powers(8, min(2048, x.shape[0])),
    chunk=_powers(8, 256),
  )


def _block_tiles(arrays: int, fewest_rows: int = 16):
  def tiles(x, *_):
    return _tiles(
      lambda rows, columns: 2 * arrays * x.dtype.itemsize * rows * columns <= _VMEM,
      rows=_divisors(fewest_rows, 2048, x.shape[0]),
      columns=_divisors(128, 8192, x.shape[1]),
    )

  return tiles


def _product(dtype):
  return lambda m, k, n: (dtype(m, k), dtype(k, n))


def _ragged(m, k, n, groups):
  """Groups of unequal sizes that sum to `m`."""
  shares = random.Random(m + k + n).choices(range(1, 8), k=groups)
  sizes = [m * share // sum(shares) for share in shares]
  sizes[0] += m - sum(sizes)
  return _bf16(m, k), _bf16(groups, k, n), jnp.array(sizes, jnp.int32)


_SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096)
_PRODUCT = (_SIZES,) * 3
_BATCHED = ((8, 16, 32, 64), (256, 512, 1024), (64, 128, 256, 512, 1024), (128, 256, 512, 1024))
_HEADS = ((1, 2, 4), (2, 4, 8, 16), (1024, 2048, 4096))
_ROWS = ((1024, 2048, 4096, 8192, 16384), (512, 768, 1024, 1536, 2048, 3072))
_BLOCKS = ((1024, 2048, 4096, 8192, 16384), (1024, 1536, 2048, 3072, 4096, 8192))
_FAMILIES = {
  "product": _Family(product, _product(_bf16), _PRODUCT, _product_tiles),
  "dense": _Family(
    dense, lambda m, k, n: (_bf16(m, k), _bf16(k, n), _f32(1, n)), _PRODUCT, _product_tiles
  ),
  "batched_product": _Family(
    batched_product, lambda b, m, k, n: (_bf16(b, m, k), _bf16(b, k, n)), _BATCHED, _batched_tiles
  ),
  "ragged_product": _Family(
    ragged_product, _ragged, ((1024, 2048, 4096), *(_SIZES[:5],) * 2, (4, 8)), _product_tiles
  ),
  "flash": _Family(
    flash,
    lambda b, heads, length: (_bf16(b, heads, length, 128),) * 3,
    _HEADS,
    _attention_tiles("k_major", "k"),
    1 << 22,
  ),
  "rms_norm": _Family(rms_norm, lambda m, n: (_bf16(m, n), _f32(1, n)), _ROWS, _row_tiles),
  "layer_norm": _Family(
    layer_norm, lambda m, n: (_bf16(m, n), _f32(1, n), _f32(1, n)), _ROWS, _row_tiles
  ),
  "gate": _Family(gate, lambda m, n: (_bf16(m, n),) * 2, _BLOCKS, _block_tiles(3)),
  "transpose": _Family(transpose, lambda m, n: (_bf16(m, n),), _BLOCKS, _block_tiles(2, 128)),
  "sum_of_rows": _Family(sum_of_rows, lambda m, n: (_f32(m, n),), _BLOCKS, _block_tiles(1)),
  "quantised_product": _Family(
    quantised_product,
    lambda m, k, n: (_int8(m, k), _int8(k, n), _f32(1, n)),
    _PRODUCT,
    _product_tiles,
  ),
  "matrix_vector": _Family(
    matrix_vector, _product(_bf16), ((16, 32, 64), *(_SIZES[2:] + (8192,),) * 2), _vector_tiles
  ),
  "splash": _Family(
    splash_attention,
    lambda heads, length: (_bf16(heads, length, 128),) * 3,
    _HEADS[1:],
    _attention_tiles("kv", "kv_compute"),
  ),
  "softmax": _Family(softmax, lambda m, n: (_f32(m, n),), _ROWS, _row_tiles),
  "update": _Family(update, lambda m, n: (_f32(m, n),) * 4, _BLOCKS, _block_tiles(5)),
  "log_sum": _Family(
    log_sum,
    lambda m, n: (_bf16(m, n),),
    ((1024, 2048, 4096, 8192), (4096, 8192, 16384, 32768)),
    _block_tiles(1),
    1 << 25,
  ),
}
_KEPT_OUT = ("quantised_product", "matrix_vector", "splash", "softmax", "update", "log_sum")
_SPLITS = ("test",) * 2 + ("valid",) * 2 + ("train",) * 8  # of the shapes of any other family
_SHAPES_KEPT_OUT = 4

TILES, SPLIT = {}, {}
for _name, _family in _FAMILIES.items():
  _is_kept_out = _name in _KEPT_OUT
  for _split, _shape in zip(
    ("test",) * _SHAPES_KEPT_OUT if _is_kept_out else _SPLITS,
    _family.shapes(_SHAPES_KEPT_OUT if _is_kept_out else len(_SPLITS)),
  ):
    _key = "_".join((_name, *map(str, _shape)))
    _arguments = _family.arguments(*_shape)
    TILES[_key] = (_family.kernel, _arguments, _family.tiles(*_arguments))
    SPLIT[_key] = _split
