"""Configurations and readouts of batches as plain arrays."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import random_graphs

from tpugraphs_jax.data import batching
from tpugraphs_jax.nn import plain

CONFIGS = 4
AS_FLOAT = lambda rows: rows.astype(np.float32)


def graphs():
  rng = np.random.default_rng(0)
  make = lambda **options: random_graphs.layout_graph(rng, **options)
  return [make(nodes=9, edges=14, config_nodes=[2, 0], configs=7),
          make(nodes=1, edges=0, config_nodes=[0], configs=CONFIGS),
          make(nodes=16, edges=30, config_nodes=[3, 15, 5], configs=2)]


def layout_batch(*, slots=3, spare=0, configs=CONFIGS, reuse=True):
  prepared = [
      random_graphs.prepare(graph, hops=0, reuse=reuse)
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
