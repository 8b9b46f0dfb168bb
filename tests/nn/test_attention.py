"""Attention between nodes and between tokens against sums over pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.system_cases import (
  apply_to,
  check,
  each_graph,
  elu_and_one,
  features,
  FORMS,
  GRAPHS,
  nodes_of,
  OF_GRAPH,
  params_of,
  random,
  REAL,
  slow_attention,
  slow_kernel_attention,
  slow_transformer,
  unit_and_one,
  WIDTH,
)
from tpugraphs_jax.nn import attention
from tpugraphs_jax.nn.attention import (
  KernelAttention,
  NodeAttention,
  SoftmaxAttention,
  TransformerLayer,
)
from tpugraphs_jax.nn.nodes import EVERYWHERE, NONE

SLOW = {attention.positive: elu_and_one, attention.unit_and_one: unit_and_one}


@pytest.mark.parametrize(
  "kernel, heads, hop, block",
  [
    *((attention.positive, 2, hop, 3) for hop in FORMS),
    *((attention.unit_and_one, 2, hop, 3) for hop in (0, EVERYWHERE)),
    (attention.positive, 1, 0, 3),
    (attention.positive, 2, EVERYWHERE, 256),
  ],
)
def test_attention_by_kernels_equals_a_sum_over_pairs(kernel, heads, hop, block, monkeypatch):
  monkeypatch.setattr(attention, "_BLOCK", block)  # graphs end within blocks, and have several
  module = KernelAttention(WIDTH, kernel, heads)
  params, x, found = apply_to(module, hop)
  expected = slow_kernel_attention(x, params, SLOW[kernel], heads)
  check(found, expected, 2e-4)
  assert np.isfinite(found).all()  # in padding nodes, too


@pytest.mark.parametrize("hop", [NONE, 0, EVERYWHERE])
@pytest.mark.parametrize("heads", [1, 2])
def test_softmax_attention_between_nodes_stays_in_their_graph(heads, hop):
  params, x, found = apply_to(NodeAttention(WIDTH, heads), hop)

  def of_graph(nodes):
    tokens = np.swapaxes(x[nodes], 0, 1)
    heard = [slow_attention(of_config, of_config, params["heads"], heads) for of_config in tokens]
    return np.stack(heard, axis=1)

  check(found, each_graph(of_graph), 1e-4)


def test_pairs_of_nodes_are_of_one_graph_or_not():
  same = np.asarray(attention.same_graph(nodes_of(features(NONE), NONE).slates))
  np.testing.assert_array_equal(same[REAL][:, REAL], OF_GRAPH[REAL, None] == OF_GRAPH[None, REAL])
  assert not same[REAL][:, ~REAL].any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_tokens_attend_to_others_that_count(heads, masked):
  x, to = random(2, 5, 3), random(2, 6, 7, seed=1)
  mask = np.random.default_rng(0).random((2, 1, 5, 6)) < 0.5
  mask[..., 0] = True
  module = SoftmaxAttention(WIDTH, heads)
  params = params_of(module, x, to)
  found = jax.jit(lambda p: module.apply({"params": p}, x, to, mask if masked else None))(params)
  for batch in range(2):
    for token in range(5):
      own = to[batch, mask[batch, 0, token]] if masked else to[batch]
      expected = slow_attention(x[batch, token][None], own, params, heads)[0]
      np.testing.assert_allclose(found[batch, token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("heads, epsilon", [(1, 1e-5), (2, 1e-3)])
def test_a_transformer_layer_normalises_after_each_half(heads, epsilon, across):
  x, to = random(3, 5, WIDTH), random(3, 6, WIDTH, seed=1)
  module = TransformerLayer(WIDTH, heads, epsilon=epsilon)
  inputs = (x, to) if across else (x,)
  params = params_of(module, *inputs)
  found = jax.jit(lambda p: module.apply({"params": p}, *inputs))(params)
  for batch in range(3):
    expected = slow_transformer(x[batch], (to if across else x)[batch], params, heads, epsilon)
    np.testing.assert_allclose(found[batch], expected, rtol=2e-4, atol=2e-4)


def test_kernels_are_the_published_ones():
  x = random(5, 3)
  np.testing.assert_allclose(attention.positive(x), elu_and_one(x), rtol=1e-5)
  weights = np.asarray(attention.unit_and_one(x) @ attention.unit_and_one(x).T)
  cosine = x @ x.T / np.outer(*[np.linalg.norm(x, axis=1)] * 2)
  np.testing.assert_allclose(weights, 1 + cosine, rtol=1e-4, atol=1e-5)


def test_attention_of_half_precision_nodes_adds_in_float32():
  """Sums of a thousand equal values, which bfloat16 cannot hold."""
  constant = nodes_of(features(EVERYWHERE), EVERYWHERE).map(
    lambda rows: jnp.ones((*rows.shape[:2], 1), jnp.bfloat16)
  )
  seen = attention.graph_products(constant, constant.map(lambda rows: 300 * rows))
  assert seen.dtype == jnp.float32
  count = np.bincount(OF_GRAPH, minlength=GRAPHS + 1)[:GRAPHS]
  np.testing.assert_array_equal(seen[:, 0, 0, 0], 300 * count[: len(seen)])
