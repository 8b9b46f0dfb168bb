"""Rankers on plain node tensors: equal to NumPy, unmoved by padding, trained like any other."""

from __future__ import annotations

import comparing
import jax
import jax.numpy as jnp
import numpy as np
import plain_ranker  # registers PlainSAGE
import pytest
import random_graphs

from tpugraphs_jax.data import batching
from tpugraphs_jax.nn import plain
from tpugraphs_jax.rankers import base

CONFIGS, HIDDEN = 4, 6
AS_FLOAT = lambda rows: rows.astype(np.float32)


def graphs():
  rng = np.random.default_rng(0)
  make = lambda **options: random_graphs.layout_graph(rng, **options)
  return [make(nodes=9, edges=14, config_nodes=[2, 0], configs=7),
          make(nodes=1, edges=0, config_nodes=[0], configs=CONFIGS),
          make(nodes=16, edges=30, config_nodes=[3, 15, 5], configs=2)]


def layout_batch(*, slots=3, spare=0, configs=CONFIGS, reuse=True):
  model = base.create_network("layout", "PlainSAGE")
  prepared = [
      batching.prepare(graph, graph.node_feat, hops=model.hops, reuse=reuse)
      for graph in graphs()]
  budget = random_graphs.common_budget([batching.total_sizes(prepared)], spare=spare)
  return batching.assemble_layout(
      random_graphs.slots_of(prepared, CONFIGS), budget, graphs=slots, configs=configs,
      transform=AS_FLOAT)


def tile_batch():
  rng = np.random.default_rng(0)
  made = [random_graphs.tile_graph(rng, nodes=n, edges=e, configs=c)
          for n, e, c in ((5, 8, 4), (3, 2, 2))]
  prepared = [batching.prepare(graph, graph.node_feat) for graph in made]
  budget = random_graphs.common_budget([batching.total_sizes(prepared)], spare=2)
  slates = random_graphs.slots_of(prepared, CONFIGS)
  return slates, batching.assemble_tile(
      slates, budget, graphs=3, configs=CONFIGS, transform=lambda x: x)


def slates():
  prepared = [batching.prepare(graph, graph.node_feat, hops=0) for graph in graphs()]
  return random_graphs.slots_of(prepared, CONFIGS)


def slow_configs(graph, config_ids) -> np.ndarray:
  """`[N, n, 18]` rows of the configurable nodes, zeros elsewhere."""
  config = np.zeros((graph.num_nodes, len(config_ids), 18), np.float32)
  row_id = graph.configs.row_id(config_ids)
  for k, node in enumerate(graph.config_node):
    config[node] = graph.configs.rows[row_id[:, k]]
  return config


def gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def slow_scores(params, graph, config_ids) -> np.ndarray:
  """Scores `[n]` of one graph, node by node and edge by edge."""
  dense = lambda name, x: x @ params[name]["kernel"] + params[name]["bias"]
  embedded = params["op_embedding"]["table"]["embedding"][graph.node_opcode]
  config = slow_configs(graph, config_ids)
  static = np.concatenate([graph.node_feat, embedded], axis=-1)
  static = np.repeat(static[:, None], len(config_ids), axis=1)
  x = gelu(dense("join", np.concatenate([static, config], axis=-1)))
  for layer in range(2):
    mean = np.zeros_like(x)
    for node in range(graph.num_nodes):
      operands = [producer for consumer, producer in graph.edge_index if consumer == node]
      if operands:
        mean[node] = np.mean([x[operand] for operand in operands], axis=0)
    x = x + gelu(dense(f"sage_{layer}", np.concatenate([x, mean], axis=-1)))
  readout = np.concatenate([x.mean(axis=0), x[graph.config_node].max(axis=0)], axis=-1)
  return dense("head", readout)[:, 0]


def model_and_params():
  model = base.create_network("layout", "PlainSAGE", hidden_dim=HIDDEN)
  shapes = jax.eval_shape(model.init, jax.random.key(0), layout_batch())["params"]
  rng = np.random.default_rng(1)
  return model, jax.tree.map(
      lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


def test_the_example_is_a_ranker_of_at_most_forty_lines():
  with open(plain_ranker.__file__, encoding="utf-8") as file:
    assert len(file.readlines()) <= 40
  assert isinstance(base.create_network("layout", "PlainSAGE"), base.Network)


@pytest.mark.parametrize("reuse", [True, False])
def test_a_plain_ranker_gives_the_scores_of_a_slow_numpy_version(reuse):
  model, params = model_and_params()
  batch = layout_batch(reuse=reuse)
  scores = np.asarray(model.apply({"params": params}, batch))
  for i, (graph, slate) in enumerate(zip(graphs(), slates())):
    expected = slow_scores(params, graph, slate.config_ids)
    np.testing.assert_allclose(scores[i, : len(expected)], expected, rtol=1e-4, atol=1e-5)


def test_padding_changes_no_score_and_no_gradient_of_a_plain_ranker():
  model, params = model_and_params()

  def results(batch):
    def loss(params):
      scores = model.apply({"params": params}, batch)
      return jnp.sum(jnp.sin(scores), where=batch.config_mask), scores
    (total, scores), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return np.asarray(scores)[np.asarray(batch.config_mask)], total, grads

  padded = results(layout_batch(slots=5, spare=17, configs=CONFIGS + 3))
  comparing.assert_trees_close(padded, results(layout_batch()))


def test_gradients_reach_every_parameter_of_a_plain_ranker():
  model, params = model_and_params()
  batch = layout_batch()
  grads = jax.grad(lambda params: jnp.sum(jnp.sin(model.apply({"params": params}, batch))))(params)
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert np.abs(grad).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize("reuse", [True, False])
def test_layout_configurations_lie_on_their_nodes_and_zeros_elsewhere(reuse):
  batch = layout_batch(spare=4, configs=CONFIGS + 1, reuse=reuse)
  config, configurable = np.asarray(plain.node_configs(batch)), plain.is_configurable(batch)
  expected = np.zeros((len(batch.block_mask), CONFIGS + 1, 18), np.float32)
  is_expected, start = np.zeros(len(expected), bool), 0
  for graph, slate in zip(graphs(), slates()):
    rows = slow_configs(graph, slate.config_ids)
    expected[start : start + len(rows), : rows.shape[1]] = rows
    is_expected[start + graph.config_node] = True
    start += len(rows)
  np.testing.assert_array_equal(config, expected)
  np.testing.assert_array_equal(configurable, is_expected)


def test_every_node_of_a_kernel_has_its_tile_configuration():
  slates_, batch = tile_batch()
  config = np.asarray(plain.node_configs(batch))
  np.testing.assert_array_equal(config[:5], np.stack([batch.config_feat[0]] * 5))
  np.testing.assert_array_equal(config[5:8], np.stack([batch.config_feat[1]] * 3))
  assert not config[8:].any() and len(config) > 8
  np.testing.assert_array_equal(
      config[0], slates_[0].graph.configs.config_feat[slates_[0].config_ids])


def test_readouts_of_graphs_leave_padding_and_other_nodes_out():
  batch = layout_batch(slots=4, spare=3)
  x = np.random.default_rng(0).normal(size=(len(batch.block_mask), CONFIGS, 2)).astype(np.float32)
  keep = np.random.default_rng(1).random(len(x)) < 0.5
  keep[9] = False  # the only node of the second graph
  for where, chosen in ((None, np.ones(len(x), bool)), (jnp.asarray(keep), keep)):
    for function, slow in ((plain.graph_sum, np.sum), (plain.graph_mean, np.mean),
                           (plain.graph_max, np.max)):
      expected = np.zeros((4, CONFIGS, 2), np.float32)
      for graph, (start, stop) in enumerate(((0, 9), (9, 10), (10, 26))):
        nodes = x[start:stop][chosen[start:stop]]
        if len(nodes):
          expected[graph] = slow(nodes, axis=0)
      np.testing.assert_allclose(function(x, batch, where), expected, rtol=1e-5, atol=1e-6)
