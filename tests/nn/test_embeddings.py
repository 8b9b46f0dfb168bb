"""Embeddings of few rows: their gradients, and how each platform computes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax.nn import embeddings

ROWS, FEATURES = 5, 3


def _gradient(index):
  """Gradient of a table of ones by `sum(weight * rows)`, and the weights."""
  weight = np.random.default_rng(0).normal(size=(*index.shape, FEATURES)).astype(np.float32)
  value = lambda table: jnp.sum(weight * embeddings.take_few_rows(table, index))
  return jax.jit(jax.grad(value)), weight


@pytest.mark.parametrize(
  "index",
  [[0, 3, 3, 1, 3], [[4, 4], [0, 4]], [2], np.zeros((0,), int)],
  ids=["repeated", "two axes", "one", "none"],
)
def test_rows_and_their_gradient_equal_a_loop_over_indices(index):
  index = np.asarray(index, np.int32)
  table = np.random.default_rng(1).normal(size=(ROWS, FEATURES)).astype(np.float32)
  np.testing.assert_array_equal(embeddings.take_few_rows(table, index), table[index])
  gradient, weight = _gradient(index)
  expected = np.zeros((ROWS, FEATURES))
  for place in np.ndindex(*index.shape):
    expected[index[place]] += weight[place]
  np.testing.assert_allclose(gradient(table), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  "platform, operation, other",
  [
    ("cpu", "scatter", "dot_general"),
    ("tpu", "scatter", "dot_general"),
    ("cuda", "dot_general", "scatter"),
  ],
)
def test_gpus_alone_compute_the_gradient_without_atomic_additions(platform, operation, other):
  gradient, _ = _gradient(np.zeros(7, np.int32))
  text = gradient.trace(jnp.ones((ROWS, FEATURES))).lower(lowering_platforms=(platform,)).as_text()
  assert f"stablehlo.{operation}" in text and f"stablehlo.{other}" not in text


def test_both_ways_give_the_same_gradient(monkeypatch):
  index = np.random.default_rng(2).integers(0, ROWS, 1000)
  by_addition = _gradient(index)[0](jnp.ones((ROWS, FEATURES)))
  monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
  by_product = _gradient(index)[0](jnp.ones((ROWS, FEATURES)))
  np.testing.assert_allclose(by_product, by_addition, rtol=1e-5, atol=1e-5)
