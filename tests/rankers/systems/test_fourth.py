"""The 4th place: edges of configurable consumers, and their bilinear pooling."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.support import parts, system_cases, winners
from tests.support.system_cases import BATCH, dense, OF_GRAPH, slow_configs, slow_inputs
from tpugraphs_jax.nn.nodes import Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems import fourth

SMALL = dict(op_embed_dim=2, edge_widths=(5, 3), config_widths=(4, 2), head_widths=(4,))


def edges_of(batch):
  """Edges (consumer, producer) whose consumer is configurable."""
  _, configured = slow_configs(batch)
  real = int(batch.graph.n_edge[:-1].sum())
  return [
    (int(c), int(p))
    for c, p in zip(batch.graph.receivers[:real], batch.graph.senders[:real])
    if configured[c]
  ]


@pytest.mark.parametrize("slots", [0, 1, 4])
def test_edges_are_those_of_configurable_consumers(slots):
  batch = system_cases.layout_batch(slots=slots)
  found = fourth.configurable_edges(Slates.of(batch))
  nodes = len(batch.graph.nodes["opcode"])
  kept = np.asarray(found.consumer) < nodes
  ends = list(
    zip(np.asarray(found.consumer)[kept].tolist(), np.asarray(found.producer)[kept].tolist())
  )
  expected = sorted(edges_of(batch))
  assert sorted(ends) == expected and len(set(expected)) < len(expected)  # some occur twice
  rows = np.asarray(found.row)[kept]
  np.testing.assert_array_equal(batch.by_hop.nodes[0][rows], [consumer for consumer, _ in ends])
  assert (np.asarray(found.producer)[~kept] >= nodes).all()


def test_bilinear_pooling_equals_a_loop_over_edges():
  model = base.create_network("layout", "Fourth", **SMALL)
  params = parts.params_of(model, BATCH)
  found = jax.jit(lambda p: model.apply({"params": p}, BATCH))(params)
  raw, _ = slow_configs(BATCH)
  node = slow_inputs(BATCH, params["opcodes"]["embedding"]["table"])
  relu, without = lambda x: np.maximum(x, 0), 0
  for graph in range(len(BATCH.target)):
    pairs = [(c, p) for c, p in edges_of(BATCH) if OF_GRAPH[c] == graph]
    without += not pairs
    for config in np.flatnonzero(BATCH.config_mask[graph]):
      total, mean = np.zeros((3, 2)), np.zeros(2)
      for consumer, producer in pairs:
        e = np.concatenate([node[consumer], node[producer]])
        for number in range(2):
          e = relu(dense(e, params[f"edge_{number}"]))
        g = np.concatenate([e, raw[consumer, config]])
        for number in range(2):
          g = relu(dense(g, params[f"config_{number}"]))
        total += np.outer(e, g)
        mean += g / len(pairs)
      readout = np.concatenate([total.reshape(-1), mean])
      score = dense(relu(dense(readout, params["head_0"])), params["last"])[0]
      np.testing.assert_allclose(found[graph, config], score, rtol=1e-4, atol=1e-4)
  assert without >= 2  # a single node, a program without configurable nodes


def test_padding_and_shared_nodes_change_nothing():
  model = base.create_network("layout", "Fourth", **SMALL)
  system_cases.assert_alike(model, BATCH, system_cases.layout_batch(spare=7, reuse=False))


def test_it_begins_as_in_pytorch():
  experiment = parts.make("layout", "xla-random,preset=fourth,ci")
  winners.assert_torch_parameters(experiment.ranker.family.network, BATCH)
