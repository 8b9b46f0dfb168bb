"""Linear layers and embeddings: one matrix on all inputs, and where they begin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import system_cases
from tests.support.system_cases import (
  BATCH,
  CONFIGS,
  dense,
  features,
  FORMS,
  full_of,
  NODES,
  nodes_of,
  params_of,
  random,
  REAL,
  slow_configs,
  TILES,
  WIDTH,
)
from tpugraphs_jax.nn import embeddings
from tpugraphs_jax.nn.embeddings import Embedding, Opcodes
from tpugraphs_jax.nn.layers import Layouts, Linear, Tiles
from tpugraphs_jax.nn.nodes import NONE, Slates

LINEAR = Linear(5)


def apply(module, params, inputs):
  return jax.jit(lambda params: module.apply({"params": params}, *inputs()).everywhere())(params)


@pytest.mark.parametrize("hops", [(hop,) for hop in FORMS] + [(NONE, 1), (0, NONE), (1, 0)])
def test_a_layer_on_several_features_is_one_matrix_on_their_concatenation(hops):
  parts = [features(hop, width=3 + number, seed=number) for number, hop in enumerate(hops)]
  inputs = lambda: [nodes_of(part, hop) for part, hop in zip(parts, hops)]
  params = params_of(LINEAR, *inputs())
  assert params["kernel"].shape == (sum(3 + number for number in range(len(hops))), 5)
  found = apply(LINEAR, params, inputs)
  full = np.concatenate([full_of(part, hop) for part, hop in zip(parts, hops)], axis=-1)
  np.testing.assert_allclose(
    np.broadcast_to(found, (NODES, CONFIGS, 5)), dense(full, params), rtol=1e-4, atol=1e-4
  )


@pytest.mark.parametrize("elsewhere", [None, "one", "each"])
def test_layouts_meet_features_at_configurable_nodes(elsewhere):
  """Rows of the dictionary are multiplied before they are looked up."""
  other = {
    None: None,
    "one": np.full((1, 18), -2.0, np.float32),
    "each": random(NODES, 18, seed=2),
  }[elsewhere]
  parts = features(NONE)
  inputs = lambda: (
    nodes_of(parts, NONE),
    Layouts(Slates.of(BATCH), jnp.asarray(BATCH.rows), other),
  )
  params = params_of(LINEAR, *inputs())
  found = np.asarray(apply(LINEAR, params, inputs))
  config, configured = slow_configs(BATCH)
  assert 0 < configured.sum() < REAL.sum()
  if elsewhere:
    config[~configured] = np.broadcast_to(other, (NODES, 18))[~configured][:, None]
  joined = np.concatenate([full_of(parts, NONE), config], axis=-1)
  there = ~np.isnan(joined).any(axis=-1) & REAL[:, None]
  np.testing.assert_allclose(found[there], dense(joined, params)[there], rtol=1e-4, atol=1e-4)


def test_nodes_without_layouts_are_zero_whatever_the_function():
  found = Layouts(Slates.of(BATCH), jnp.asarray(BATCH.rows)).map(lambda rows: rows + 100)
  config, configured = slow_configs(BATCH)
  full = np.asarray(found.everywhere())
  assert found.hop == 0 and not full[~configured].any()
  there = ~np.isnan(config) & configured[:, None, None]
  np.testing.assert_allclose(full[there], config[there] + 100)


def test_a_batch_without_configurable_nodes_has_layouts_of_zeros():
  graphs = [g for g in system_cases.raw_layouts() if not len(g.config_node)]
  batch = system_cases.layout_batch(graphs=graphs, spare=0)
  found = Layouts(Slates.of(batch), jnp.asarray(batch.rows)).map(lambda rows: rows + 1)
  assert len(batch.by_hop.nodes[0]) == 0
  np.testing.assert_array_equal(found.everywhere(), 0)


def test_tiles_are_on_every_node_of_their_kernel():
  count = len(TILES.graph.nodes["opcode"])
  static, slates = random(count, WIDTH), lambda: Slates.of(TILES)
  inputs = lambda: (
    slates().nodes(jnp.asarray(static)),
    Tiles(slates(), jnp.asarray(TILES.config_feat)),
  )
  params = params_of(LINEAR, *inputs())
  found = np.asarray(apply(LINEAR, params, inputs))
  config, _ = slow_configs(TILES)
  joined = np.concatenate([np.repeat(static[:, None], CONFIGS, axis=1), config], axis=-1)
  real = int(TILES.graph.n_node[:-1].sum())
  np.testing.assert_allclose(found[:real], dense(joined, params)[:real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_layer_on_an_array_keeps_its_leading_axes(use_bias):
  x, module = random(2, 3, 4), Linear(5, use_bias=use_bias)
  params = params_of(module, x)
  assert set(params) == {"kernel", "bias"} if use_bias else {"kernel"}
  np.testing.assert_allclose(
    module.apply({"params": params}, x), dense(x, params), rtol=1e-5, atol=1e-5
  )


def test_a_layer_computes_in_its_dtype_from_float32_parameters():
  x = random(3, 4)
  module = Linear(5, dtype="bfloat16")
  params = jax.tree.map(np.asarray, module.init(jax.random.key(0), x)["params"])
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
  found = module.apply({"params": params}, x)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(found, np.float32), dense(x, params), atol=0.1)


@pytest.mark.parametrize("inputs", [1, 16, 400])
def test_kernels_and_biases_begin_as_in_pytorch(inputs):
  """Uniform on +-1 / sqrt(inputs)."""
  params = Linear(300).init(jax.random.key(inputs), np.zeros((2, inputs)))["params"]
  bound = inputs**-0.5
  for values in jax.tree.leaves(params):
    assert bound * 0.95 < np.abs(values).max() <= bound
    error = 4 * bound / np.sqrt(values.size)
    assert abs(np.mean(values)) < error and abs(np.std(values) - bound / np.sqrt(3)) < error


def test_several_inputs_begin_as_one_of_their_width():
  parts = features(NONE, width=6), features(0, width=10)
  inputs = nodes_of(parts[0], NONE), nodes_of(parts[1], 0)
  params = Linear(300).init(jax.random.key(0), *inputs)["params"]
  assert all(0.95 / 4 < np.abs(value).max() <= 1 / 4 for value in jax.tree.leaves(params))


# Embeddings.


def test_an_embedding_begins_with_normal_numbers():
  table = Embedding(120, 50).init(jax.random.key(0), np.zeros(2, int))["params"]["table"]
  assert table.shape == (120, 50)
  assert abs(np.mean(table)) < 0.05 and abs(np.std(table) - 1) < 0.05


@pytest.mark.parametrize("max_norm", [0.0, 0.4, 1.5])
def test_long_vectors_are_shortened_and_have_the_gradient_of_the_short_one(max_norm):
  index = np.array([[3, 1], [3, 0]])
  module = Embedding(5, 3, max_norm)
  params = params_of(module, index, scale=1.0)
  params["table"][3] *= 3
  length = np.linalg.norm(params["table"], axis=1, keepdims=True)
  factor = np.minimum(1, max_norm / length) if max_norm else np.ones_like(length)
  assert not max_norm or (factor < 1).any()
  found = module.apply({"params": params}, index)
  np.testing.assert_allclose(found, (params["table"] * factor)[index], rtol=1e-5)
  weight = random(*index.shape, 3)
  grad = jax.grad(lambda p: jnp.sum(module.apply({"params": p}, index) * weight))(params)["table"]
  expected = np.zeros((5, 3))
  np.add.at(expected, index, weight)
  np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)


def test_rows_stay_short_through_updates():
  """As in PyTorch, an update starts from the shortened row."""
  params = {
    "op": {"table": np.array([[3.0, 4.0], [0.3, 0.4]], np.float32)},
    "other": np.array([5.0], np.float32),
  }
  grads = jax.tree.map(np.ones_like, params)
  optimizer = embeddings.keep_rows_short(optax.sgd(0.1), {("op", "table"): 1.0})
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  after = optax.apply_updates(params, updates)
  np.testing.assert_allclose(after["op"]["table"], [[0.5, 0.7], [0.2, 0.3]], rtol=1e-5)
  np.testing.assert_allclose(after["other"], [4.9], rtol=1e-6)


def test_opcodes_are_looked_up_by_number():
  module = Opcodes(3)
  params = params_of(module, BATCH.graph)
  found = module.apply({"params": params}, BATCH.graph)
  np.testing.assert_array_equal(
    found, params["embedding"]["table"][np.asarray(BATCH.graph.nodes["opcode"])]
  )
