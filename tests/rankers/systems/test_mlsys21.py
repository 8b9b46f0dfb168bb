"""The model of MLSys 2021: reductions against loops, its features."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.support import parts, system_cases
from tests.support.random_graphs import made_of, NUMBERS
from tests.support.system_cases import (
  dense,
  sigmoid,
  slow_configs,
  slow_inputs,
  slow_mean,
  slow_transformer,
  TILES,
)
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems import mlsys21

VARIANTS = ("", "_per_node", "_lstm", "_transformer", "_gat")
SMALL = dict(op_embed_dim=2, width=4, rounds=2)
GRAPH_OF = np.repeat(np.arange(len(TILES.graph.n_node)), TILES.graph.n_node)


def slow_lstm(x, params):
  """The state after the last of `x [n, F]`."""
  state = memory = np.zeros(x.shape[1])
  for node in x:
    gates = dense(node, params["inputs"]) + state @ params["state"]
    i, f, new, o = np.split(gates, 4)
    memory = sigmoid(f) * memory + sigmoid(i) * np.tanh(new)
    state = sigmoid(o) * np.tanh(memory)
  return state


def slow_readout(x, params, reduction):
  """Nodes `x [n, F]` of a kernel reduced."""
  if reduction == "per_node":
    return dense(x, params["node"]).sum(axis=0)
  if reduction == "lstm":
    return slow_lstm(x, params["lstm"])
  if reduction == "transformer":
    return slow_transformer(x, x, params["transformer"], 4, epsilon=1e-6).sum(axis=0) / 100
  return np.concatenate([x.sum(axis=0) / 100, x.mean(axis=0), x.max(axis=0)])


@pytest.mark.parametrize("reduction", mlsys21.REDUCTIONS)
def test_nodes_with_tiles_hear_each_other_and_are_reduced(reduction):
  model = base.create_network("tile", "MLSys21", **SMALL, reduction=reduction)
  params = parts.params_of(model, TILES)
  found = jax.jit(lambda p: model.apply({"params": p}, TILES))(params)
  node = slow_inputs(TILES, params["opcodes"]["table"]["embedding"])
  tiles, _ = slow_configs(TILES)
  relu = lambda x: np.maximum(x, 0)
  joined = np.concatenate([np.repeat(node[:, None], tiles.shape[1], axis=1), tiles], axis=-1)
  x = relu(dense(joined, params["first"]))
  for number in range(2):
    sage = params[f"round_{number}"]
    x = relu(dense(x, sage["self"]) + slow_mean(x, "both", TILES) @ sage["both"]["kernel"])
  for graph in range(3):
    for config in np.flatnonzero(TILES.config_mask[graph]):
      readout = slow_readout(x[GRAPH_OF == graph, config], params, reduction)
      score = (
        readout
        if reduction == "per_node"
        else dense(relu(dense(readout, params["hidden"])), params["last"])
      )
      np.testing.assert_allclose(found[graph, config], score[0], rtol=2e-4, atol=2e-4)


def test_graph_attention_takes_the_place_of_graphsage():
  model = base.create_network("tile", "MLSys21", **SMALL, convolution="attention")
  params = parts.params_of(model, TILES)
  assert params["round_0"]["attention"].shape == (4, 1)
  score = jax.jit(lambda p: model.apply({"params": p}, TILES))
  scores = score(params)
  # Without a logit all neighbours have one weight: then the vector does not matter.
  flat = jax.tree_util.tree_map_with_path(
    lambda path, value: 0 * value if path[-1].key == "attention" else value, params
  )
  assert not np.allclose(scores, score(flat))


@pytest.mark.parametrize(
  "options", [dict(reduction="lstm"), dict(reduction="transformer"), dict(convolution="attention")]
)
def test_padding_changes_nothing(options):
  model = base.create_network("tile", "MLSys21", **SMALL | dict(rounds=1) | options)
  system_cases.assert_alike(model, TILES, system_cases.tile_batch(spare=9), roundings=2)


def test_every_kernel_has_a_state_of_its_own():
  """The LSTM gives a kernel in a batch what it gives the kernel alone."""
  model = base.create_network("tile", "MLSys21", **SMALL, reduction="lstm")
  params = parts.params_of(model, TILES)
  score = jax.jit(lambda batch: model.apply({"params": params}, batch))
  kernels = system_cases.raw_tiles()
  together = score(
    system_cases.tile_batch(graphs=kernels[::-1])._replace(
      config_feat=np.ones_like(TILES.config_feat)
    )
  )
  for number, kernel in enumerate(kernels[::-1]):
    batch = system_cases.tile_batch(graphs=[kernel])
    alone = score(batch._replace(config_feat=np.ones_like(batch.config_feat)))
    np.testing.assert_allclose(together[number], alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_begins_as_in_keras(variant):
  """Glorot's kernels, biases of 0 but 1 where an LSTM forgets, an orthogonal state."""
  network = parts.make("tile", f"preset=mlsys21{variant},ci").ranker.family.network
  params = jax.jit(network.init)(jax.random.key(0), TILES)["params"]
  for path, value in jax.tree_util.tree_leaves_with_path(params):
    name, value = jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(value)
    if name == "lstm/state":
      np.testing.assert_allclose(value @ value.T, np.eye(len(value)), atol=1e-5)
    elif name == "lstm/inputs/bias":
      np.testing.assert_array_equal(value, np.repeat([0, 1, 0, 0], len(value) // 4))
    elif name.endswith("bias"):
      assert not value.any(), name
    elif name.endswith("scale"):
      assert (value == 1).all(), name
    else:  # the embedding is uniform on +-0.05
      bound = 0.05 if name.startswith("opcodes") else np.sqrt(6 / sum(value.shape))
      assert np.abs(value).max() <= bound, name
      if value.size >= 32:
        assert abs(value.std() - bound / np.sqrt(3)) < 3 * bound / np.sqrt(value.size), name


def test_fusion_has_errors_of_log_runtimes():
  config = parts.config_of("tile", "preset=mlsys21_fusion_work")
  assert (config.batch.target, config.loss.losses) == ("absolute", "LogMSE:1")
  assert config.data.features == ("released", "kernel_work")
  assert (config.optimizer.name, config.optimizer.eps) == ("adam", 1e-7)


def test_the_work_of_a_kernel_by_hand():
  graph = made_of(
    [
      ("parameter", "f32", (3, 3, 4, 8), {}),
      ("parameter", "bf16", (2, 5, 5, 4), {}),
      ("convolution", "f32", (2, 5, 5, 8), NUMBERS),
      ("tanh", "f32", (2, 5, 5, 8), {}),
      ("add", "f32", (2, 5, 5, 8), {}),
      ("reduce", "f32", (8,), {}),
      ("dot", "f32", (8, 8), {}),
      ("tuple", "tuple", (), {0: 1}),
    ],
    [[2, 0], [2, 1], [3, 2], [4, 2], [4, 3], [5, 4], [6, 5], [6, 5], [7, 4], [7, 5]],
  )
  found = mlsys21.kernel_work(graph)
  operations = 2 * 400 * 9 * 4 + 400 + 400 + 400 + 2 * 64  # the last is an outer product
  expected = [operations, 288 * 4 + 200 * 2, 400 * 4 + 8 * 4, 400]
  np.testing.assert_array_equal(found, [expected] * 8)
