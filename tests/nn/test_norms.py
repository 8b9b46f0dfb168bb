"""Norms against NumPy, in every form of node features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.system_cases import (
  check,
  each_graph,
  features,
  FORMS,
  full_of,
  nodes_of,
  OF_GRAPH,
  random,
  REAL,
  slow_normal,
)
from tpugraphs_jax.nn.layers import instance_norm, slate_norm
from tpugraphs_jax.nn.nodes import EVERYWHERE, NONE


def normal(parts, hop):
  found = jax.jit(lambda parts: instance_norm(nodes_of(parts, hop)).everywhere())(parts)
  return np.broadcast_to(found, full_of(parts, hop).shape)


@pytest.mark.parametrize("hop", FORMS)
def test_an_instance_norm_is_over_the_nodes_of_each_graph(hop):
  parts = features(hop)
  full = full_of(parts, hop).astype(np.float64)
  # Without deviation, rounding is divided by the root of 1e-5.
  check(normal(parts, hop), each_graph(lambda nodes: slow_normal(full[nodes], 0)), 5e-4)
  form = instance_norm(nodes_of(parts, hop)).hop
  assert form == (NONE if hop == NONE else EVERYWHERE)


@pytest.mark.parametrize("hop", FORMS)
def test_an_instance_norm_far_from_zero_keeps_its_digits(hop):
  parts = tuple(None if part is None else part + 1000 for part in features(hop))
  full = full_of(parts, hop).astype(np.float64)
  expected = each_graph(lambda nodes: slow_normal(full[nodes], 0))
  several = REAL & (np.bincount(OF_GRAPH)[OF_GRAPH] > 1)
  np.testing.assert_allclose(normal(parts, hop)[several], expected[several], atol=2e-3)


def test_a_node_alone_in_its_graph_becomes_zero():
  alone = np.flatnonzero(np.bincount(OF_GRAPH)[OF_GRAPH] == 1)
  alone = alone[REAL[alone]]
  assert len(alone) == 1
  np.testing.assert_allclose(normal(features(0), 0)[alone], 0, atol=1e-4)


def test_a_norm_over_the_slate_leaves_padding_out():
  mask = np.array([[True] * 5, [True, True, False, True, False], [True] + [False] * 4, [False] * 5])
  x = random(len(mask), 5, 3) + 100
  found = np.asarray(slate_norm(jnp.asarray(x), mask))
  for row, real in enumerate(mask):
    if real.any():
      expected = slow_normal(x[row, real].astype(np.float64), 0)
      np.testing.assert_allclose(found[row, real], expected, atol=1e-3)
  assert np.isfinite(found).all()


def test_equal_configurations_are_zero_with_finite_gradients():
  x = np.full((2, 4, 3), 1e3, np.float32)
  mask = np.ones((2, 4), bool)
  np.testing.assert_array_equal(jax.jit(slate_norm)(x, mask), 0)
  grad = jax.jit(jax.grad(lambda x: jnp.sum(slate_norm(x, mask) * random(2, 4, 3))))(x)
  assert np.isfinite(grad).all()
