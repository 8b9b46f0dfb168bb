"""Poolings of node features in every form against loops over the nodes of a graph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import system_cases
from tests.support.system_cases import (
  BATCH,
  CONFIGS,
  features,
  FORMS,
  full_of,
  GRAPHS,
  members,
  NODES,
  nodes_of,
  OF_GRAPH,
  REAL,
  slow_configs,
  WIDTH,
)
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.nodes import EVERYWHERE, NONE

SLOW = {
  "mean": lambda x: x.mean(axis=0),
  "max": lambda x: x.max(axis=0),
  "sum": lambda x: x.sum(axis=0) / 100,
}
_, CONFIGURED = slow_configs(BATCH)


@pytest.mark.parametrize("hop", FORMS)
@pytest.mark.parametrize("name", pooling.names())
def test_poolings_equal_loops_in_every_form(name, hop):
  parts = features(hop)
  if name.endswith("max"):  # values below 0 show that rows which do not count are not 0
    parts = tuple(None if part is None else part - 10 for part in parts)
  full = full_of(parts, hop)
  found = jax.jit(lambda parts: pooling.pool(nodes_of(parts, hop), name))(parts)
  only = name.startswith(pooling.CONFIGURABLE)
  without = []
  for graph, nodes in members():
    chosen = nodes[CONFIGURED[nodes]] if only else nodes
    expected = np.zeros((CONFIGS, WIDTH))
    if len(chosen):
      expected = SLOW[name.removeprefix(pooling.CONFIGURABLE)](full[chosen])
    else:
      without.append(graph)
    np.testing.assert_allclose(
      np.broadcast_to(found[graph], expected.shape), expected, rtol=1e-5, atol=1e-5
    )
  # An empty slate; and a program without configurable nodes.
  assert len(without) == 1 + only and found.dtype == jnp.float32


@pytest.mark.parametrize("configurable", [False, True])
def test_a_total_is_a_sum_that_is_not_scaled(configurable):
  parts = features(1)
  found = pooling.total(nodes_of(parts, 1), configurable=configurable)
  for graph, nodes in members():
    chosen = nodes[CONFIGURED[nodes]] if configurable else nodes
    np.testing.assert_allclose(
      found[graph], full_of(parts, 1)[chosen].sum(axis=0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("hop", FORMS)
@pytest.mark.parametrize("configurable", [False, True])
def test_every_node_that_counts_is_in_one_part(hop, configurable):
  x = nodes_of(features(hop), hop).map(lambda rows: jnp.ones_like(rows))
  found = sum(mask.sum(axis=1) for _, mask in pooling.parts(x, configurable=configurable))
  chosen = CONFIGURED if configurable else REAL
  np.testing.assert_array_equal(found, [chosen[OF_GRAPH == graph].sum() for graph in range(GRAPHS)])


def test_gradient_of_the_maximum_reaches_the_largest_node_only():
  parts = features(1)
  total = lambda parts: jnp.sum(pooling.largest(nodes_of(parts, 1)))
  grads = jax.tree.map(np.asarray, jax.jit(jax.grad(total))(parts))
  full, wins = full_of(parts, 1), np.zeros((NODES, CONFIGS, WIDTH))
  for _, nodes in members():
    if len(nodes):
      wins[nodes] = full[nodes] == full[nodes].max(axis=0)
  reached = np.concatenate(BATCH.by_hop.nodes[:2])
  unreached = np.setdiff1d(np.flatnonzero(REAL), reached)
  # The gradient of what all configurations share is the sum over them.
  np.testing.assert_allclose(grads[0][unreached, 0], wins[unreached].sum(axis=1))
  inside = reached < NODES
  np.testing.assert_allclose(grads[1][inside], wins[reached[inside]])
  assert not grads[0][np.setdiff1d(np.arange(NODES), unreached)].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_graph_sum_and_per_node_are_each_others_derivative(dtype):
  rng, graph_of, slots = np.random.default_rng(0), np.array([0, 0, 0, 2, 2, 3]), 3
  x = jnp.asarray(rng.normal(size=(6, 2, 3)), dtype)
  value = jnp.asarray(rng.normal(size=(slots, 2, 3)), dtype)
  slow = lambda full: np.stack([full[graph_of == graph].sum(axis=0) for graph in range(slots)])
  total, sum_vjp = jax.vjp(lambda x: pooling.graph_sum(x, graph_of, slots), x)
  spread, spread_vjp = jax.vjp(lambda v: pooling.per_node(v, graph_of), value)
  full = np.asarray(x, np.float32)
  np.testing.assert_allclose(total, slow(full), rtol=1e-5, atol=1e-6)
  padded = np.concatenate([np.asarray(value, np.float32), np.zeros((1, 2, 3))])
  np.testing.assert_array_equal(np.asarray(spread, np.float32), padded[graph_of])
  (from_sum,), (from_spread,) = sum_vjp(value.astype(jnp.float32)), spread_vjp(x)
  np.testing.assert_array_equal(np.asarray(from_sum, np.float32), padded[graph_of])
  np.testing.assert_allclose(
    np.asarray(from_spread, np.float32),
    slow(full),
    rtol=1e-5 if dtype == jnp.float32 else 1e-2,
    atol=1e-6,
  )
  assert total.dtype == jnp.float32 and spread.dtype == from_sum.dtype == from_spread.dtype == dtype


def test_sums_are_float32_for_half_precision_nodes():
  x = jnp.full((300, 1), 1, jnp.bfloat16)  # bfloat16 sums of ones stop at 256.
  total = pooling.pool_sum(x, jnp.ones((1, 300)))
  assert total.dtype == jnp.float32
  assert float(total[0, 0]) == 300


@pytest.mark.parametrize("hop", [NONE, EVERYWHERE])
def test_kernels_are_pooled_too(hop):
  batch = system_cases.TILES
  count, starts = len(batch.graph.nodes["opcode"]), np.cumsum(batch.graph.n_node)
  value = system_cases.random(count, 1 if hop == NONE else CONFIGS, WIDTH)
  x = nodes_of((value, None) if hop == NONE else (None, value), hop, batch)
  found = pooling.mean(x)
  for graph, nodes in enumerate(np.split(value, starts)[: len(batch.target)]):
    expected = nodes.mean(axis=0) if len(nodes) else np.zeros(value.shape[1:])
    np.testing.assert_allclose(found[graph], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["nope", "config_nope", "config_config_mean", ""])
def test_an_unknown_pooling_is_refused_with_all_names(name):
  with pytest.raises(ValueError, match="mean, sum, max"):
    pooling.pool(None, name)
