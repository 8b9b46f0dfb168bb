"""The kernels of `examples/kernels.py`: their values, and what is tried and kept apart."""

import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import commands
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.tuning import tile_collection


@pytest.fixture(scope="module")
def kernels():
  spec = importlib.util.spec_from_file_location("kernels", commands.ROOT / "examples/kernels.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _attention(q, k, v):
  scores = np.einsum("...qd,...kd->...qk", q, k)
  scores = np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum("...qk,...kd->...qd", weights / weights.sum(-1, keepdims=True), v)


def _normalised(x, scale, shift):
  return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6) * scale + shift


def _moved(weights, gradients, first, second):
  first, second = 0.9 * first + 0.1 * gradients, 0.99 * second + 0.01 * gradients**2
  return weights - 1e-3 * first / (np.sqrt(second) + 1e-8)


def _gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _of_groups(x, y, sizes):
  ends = np.cumsum(sizes)
  return np.concatenate([x[end - n : end] @ w for end, n, w in zip(ends, sizes, y)])


_MATRIX = {"m": 16, "n": 128, "k": 128}
_ROWS = {"rows": 16, "chunk": 8}
_BLOCK = {"rows": 16, "columns": 128}
_EXPECTED = {  # a tile, shapes, and the same in numpy
  "product": (_MATRIX, ((32, 256), (256, 128)), np.matmul),
  "dense": (_MATRIX, ((32, 256), (256, 128), (1, 128)), lambda x, y, b: _gelu(x @ y + b)),
  "quantised_product": (_MATRIX, ((32, 256), (256, 128), (1, 128)), lambda x, y, s: x @ y * s),
  "batched_product": ({"b": 2, "m": 8, "n": 128}, ((4, 16, 32), (4, 32, 128)), np.matmul),
  "matrix_vector": ({"n": 128, "k": 128}, ((16, 256), (256, 256)), np.matmul),
  "ragged_product": ({**_MATRIX, "m": 8}, ((32, 128), (3, 128, 128), (3,)), _of_groups),
  "flash": ({"q": 128, "k_major": 128, "k": 128}, ((1, 1, 256, 128),) * 3, _attention),
  "splash_attention": ({"q": 128, "kv": 128, "kv_compute": 128}, ((1, 256, 128),) * 3, _attention),
  "softmax": (_ROWS, ((32, 128),), lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True)),
  "rms_norm": (
    _ROWS,
    ((32, 128), (1, 128)),
    lambda x, scale: x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * scale,
  ),
  "layer_norm": (_ROWS, ((32, 128), (1, 128), (1, 128)), _normalised),
  "gate": (_BLOCK, ((32, 256),) * 2, lambda x, y: x / (1 + np.exp(-x)) * y),
  "update": (_BLOCK, ((32, 256),) * 4, _moved),
  "transpose": (_BLOCK, ((32, 256),), np.transpose),
  "sum_of_rows": (_BLOCK, ((32, 256),), lambda x: x.sum(0, keepdims=True)),
  "log_sum": (_BLOCK, ((32, 256),), lambda x: np.log(np.exp(x).sum(1))),
}


@pytest.mark.parametrize("name", _EXPECTED)
def test_a_kernel_computes_what_it_says(kernels, name):
  tile, shapes, expected = _EXPECTED[name]
  random = np.random.default_rng(0)
  arrays = [0.5 * random.standard_normal(shape).astype("f") for shape in shapes]
  if name == "update":
    arrays[3] **= 2
  if name == "ragged_product":
    arrays[2] = np.array([5, 20, 7], np.int32)
  if name == "quantised_product":
    arrays[:2] = (np.round(8 * x) for x in arrays[:2])
    given = [*(x.astype("int8") for x in arrays[:2]), arrays[2]]
  else:
    given = arrays
  (found,) = tile_collection.interpreted(Call(getattr(kernels, name)(tile), given))(*given)
  tolerance = 2e-2 if found.dtype == jnp.bfloat16 else 1e-5
  np.testing.assert_allclose(found.astype("f"), expected(*arrays), atol=tolerance, rtol=tolerance)


def test_every_family_is_there_and_names_are_of_shapes(kernels):
  assert len(kernels.TILES) == len(kernels.SPLIT) > 100
  for name, (_, arguments, tiles) in kernels.TILES.items():
    sizes = {size for array in arguments for size in array.shape}
    assert {int(part) for part in name.split("_") if part.isdigit()} <= sizes, name
    assert len(tiles) >= 15 and len({tuple(tile.items()) for tile in tiles}) == len(tiles), name


def test_families_that_are_kept_out_are_in_test_alone(kernels):
  splits = {}
  for name, split in kernels.SPLIT.items():
    splits.setdefault(name.rstrip("0123456789_"), set()).add(split)
  alone = {family for family, of_family in splits.items() if of_family == {"test"}}
  assert len(alone) == 6
  assert all(splits[family] == {"train", "valid", "test"} for family in set(splits) - alone)


def test_every_tile_cuts_its_arrays_into_whole_blocks(kernels):
  for name, (kernel, arguments, tiles) in itertools.islice(kernels.TILES.items(), 0, None, 12):
    for tile in tiles[:: len(tiles) // 3]:
      (out,) = jax.tree.leaves(jax.eval_shape(kernel(tile), *arguments))
      assert out.size, name
