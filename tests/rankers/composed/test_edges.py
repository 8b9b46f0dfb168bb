"""The 4th place's ranker: edges of configurable consumers, and their bilinear pooling."""

from __future__ import annotations

import numpy as np
import pytest
import system_cases
from system_cases import OF_GRAPH, dense, quick_jit, slow_configs

from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.composed import edges


@pytest.mark.parametrize("slots", [0, 1, 4])
def test_edges_of_the_4th_place_are_those_of_configurable_consumers(slots):
  batch = system_cases.layout_batch(slots=slots)
  found = edges.configurable_edges(batch)
  _, configured = slow_configs(batch)
  real = int(batch.graph.n_edge[:-1].sum())
  expected = sorted((int(c), int(p)) for c, p in zip(
      batch.graph.receivers[:real], batch.graph.senders[:real]) if configured[c])
  kept = np.asarray(found.consumer) < len(configured)
  ends = list(zip(np.asarray(found.consumer)[kept].tolist(),
                  np.asarray(found.producer)[kept].tolist()))
  assert sorted(ends) == expected and len(expected) > 5
  rows = np.asarray(found.row)[kept]
  np.testing.assert_array_equal(batch.by_hop.nodes[0][rows], [consumer for consumer, _ in ends])
  assert (np.asarray(found.producer)[~kept] >= len(configured)).all()


def test_bilinear_pooling_equals_a_loop_over_edges():
  model = base.create_network("layout", "BilinearEdges", op_embed_dim=2, edge_widths=(5, 3),
                           config_widths=(4, 3), head_widths=(4,), config_scale=0.5)
  batch = system_cases.layout_batch()
  params = system_cases.random_params(model, batch)
  found = quick_jit(lambda p: model.apply({"params": p}, batch))(params)
  raw, configured = slow_configs(batch)
  opcode = params["op_embedding"]["table"]["embedding"]
  feat = np.asarray(batch.graph.nodes["feat"])
  node = np.concatenate([feat, opcode[np.asarray(batch.graph.nodes["opcode"])]], axis=1)
  relu, graphs = lambda x: np.maximum(x, 0), len(batch.target)
  real = int(batch.graph.n_edge[:-1].sum())
  for graph in range(graphs):
    pairs = [(c, p) for c, p in zip(batch.graph.receivers[:real], batch.graph.senders[:real])
             if configured[c] and OF_GRAPH[c] == graph]
    for config in np.flatnonzero(batch.config_mask[graph]):
      total, mean = np.zeros((3, 3)), np.zeros(3)
      for consumer, producer in pairs:
        edge = np.concatenate([node[consumer], node[producer]])
        edge = relu(dense(edge, params["edge"]["Dense_0"]))
        edge = relu(dense(edge, params["edge"]["Dense_1"]))
        mixed = relu(dense(np.concatenate([edge, 0.5 * raw[consumer, config]]), params["first"]))
        mixed = relu(dense(mixed, params["rest"]["Dense_0"]))
        total += np.outer(edge, mixed)
        mean += mixed / len(pairs)
      head = np.concatenate([total.reshape(-1), mean])
      head = dense(head, params["head"]["Dense_0"])
      score = dense(relu(head), params["head"]["Dense_1"])[0]
      np.testing.assert_allclose(found[graph, config], score, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("missing", ["edge_widths", "config_widths"])
def test_bilinear_pooling_needs_layers(missing):
  with pytest.raises(ValueError, match=missing):
    base.create_network("layout", "BilinearEdges", **{missing: ()})
