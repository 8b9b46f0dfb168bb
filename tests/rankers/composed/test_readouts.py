"""Joins behind the encoder, readouts and heads against NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import system_cases
from system_cases import (
    BATCH, CONFIGS, EXACT, NODES, OF_GRAPH, WIDTH, check_pooled, dense, draw, elu, per_graph,
    quick_jit, random, real_configs, run, slow_configs, slow_encoder, slow_normal, split_and_full)

from tpugraphs_jax.rankers.composed import nodes, readouts
from tpugraphs_jax.rankers.composed.options import Options

TILES = system_cases.tile_batch()


@pytest.mark.parametrize("options, expected", [
    (dict(pooling=("mean", "max")), lambda x: np.concatenate([x.mean(0), x.max(0)], -1)),
    (dict(pooling=("mean", "max"), pooling_merge="sum"), lambda x: x.mean(0) + x.max(0)),
    (dict(pooling=("sum",), readout_norm="l2"), lambda x: x.sum(0) / np.linalg.norm(
        x.sum(0), axis=-1, keepdims=True)),
])
def test_poolings_equal_numpy(options, expected):
  inputs = split_and_full()
  _, *found = run_readout(Options(**options), inputs)
  check_pooled(found, np.stack([expected(inputs[1][OF_GRAPH == g]) if (OF_GRAPH == g).any()
                          else np.zeros_like(found[0][0]) for g in range(len(BATCH.target))]))


def run_readout(options, inputs):
  return run(readouts.Readout(options, EXACT), inputs)


def test_scalars_of_nodes_are_summed_as_they_are():
  inputs = split_and_full()
  params, *found = run_readout(Options(readout="node_scalar_sum"), inputs)
  scalar = dense(inputs[1], params["scalar"])
  check_pooled(found, per_graph(lambda members: scalar[members].sum(axis=0), 1))


def test_an_lstm_begins_anew_with_every_graph():
  inputs = split_and_full()
  params, *found = run_readout(Options(readout="lstm"), inputs)
  cell = params["lstm"]["cell"]["lstm"]
  sigmoid = lambda x: 1 / (1 + np.exp(-x))

  def of_graph(members):
    state = memory = np.zeros((CONFIGS, WIDTH))
    for node in members:
      gate = {name: inputs[1][node] @ cell[f"i{name}"]["kernel"] + dense(state, cell[f"h{name}"])
              for name in "ifgo"}
      memory = sigmoid(gate["f"]) * memory + sigmoid(gate["i"]) * np.tanh(gate["g"])
      state = sigmoid(gate["o"]) * np.tanh(memory)
    return state

  check_pooled(found, per_graph(of_graph, WIDTH))


def test_a_transformer_reads_each_graph_alone():
  inputs = split_and_full()
  params, *found = run_readout(Options(readout="transformer", pooling=("mean",)), inputs)

  def of_graph(members):
    return np.stack([slow_encoder(tokens, tokens, params["transformer_0"]).mean(axis=0)
                     for tokens in np.swapaxes(inputs[1][members], 0, 1)])

  check_pooled(found, per_graph(of_graph, WIDTH), 2e-4)


def test_configurable_nodes_meet_their_configurations_behind_the_encoder():
  options = Options(fusion="middle", fusion_widths=(5, 4), activation="elu")
  slates = nodes.Slates.of(BATCH)
  x = jax.numpy.asarray(random(NODES, 1, WIDTH))
  matmul = lambda a, b: jax.numpy.matmul(a, b, precision="highest")
  module = readouts.Middle(options, matmul, EXACT)
  params = jax.tree.map(lambda leaf: 0.2 * leaf, draw(module, x, slates=slates))
  rows_of = lambda p: module.apply({"params": p}, x, nodes.Slates.of(BATCH)).varying
  found = quick_jit(rows_of)(params)
  raw, configured = slow_configs(BATCH)
  for row, node in enumerate(BATCH.by_hop.nodes[0]):
    if node >= NODES or not configured[node]:
      continue
    for config in real_configs(node):
      own = x[node, 0]
      mixed = elu(dense(np.concatenate([own, raw[node, config]]), params["join"]))
      mixed = elu(dense(mixed, params["dense_1"]))
      np.testing.assert_allclose(found[row, config], mixed, rtol=1e-4, atol=1e-5)
  # Only they are pooled, also by poolings without `config_`.
  readout = readouts.Readout(Options(pooling=("mean", "max")), EXACT, configurable=True)
  full = module.apply({"params": params}, x, slates)
  pooled = np.asarray(readout.apply({}, full, slates))
  for graph in range(len(system_cases.raw_layouts())):
    members = [row for row, node in enumerate(BATCH.by_hop.nodes[0])
               if node < NODES and OF_GRAPH[node] == graph and configured[node]]
    rows = np.asarray(full.varying)[members]
    np.testing.assert_allclose(
        pooled[graph], np.concatenate([rows.mean(axis=0), rows.max(axis=0)], axis=-1),
        rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("widths", [(), (3,), (5, 3)])
def test_tiles_join_the_pooled_kernel(widths):
  options = Options(fusion="late", fusion_widths=widths, activation="elu", encoding_scale=0.5)
  slates, graphs = nodes.Slates.of(TILES), len(TILES.target)
  pooled = np.random.default_rng(0).normal(size=(graphs, 1, 2)).astype(np.float32)
  module = readouts.Late(options, EXACT)
  params = draw(module, pooled, slates=slates)
  found = quick_jit(lambda p: module.apply({"params": p}, pooled, nodes.Slates.of(TILES)))(params)
  for graph in range(graphs):
    for config in range(CONFIGS):
      tile = 0.5 * TILES.config_feat[graph, config]
      for number in range(len(widths)):
        tile = dense(elu(tile) if number else tile, params[f"dense_{number}"])
      np.testing.assert_allclose(
          found[graph, config], np.concatenate([pooled[graph, 0], tile]), rtol=1e-4, atol=1e-5)


def test_tiles_attend_to_the_nodes_of_their_own_kernel():
  options = Options(fusion="cross", fusion_widths=(4,), decoder_layers=2)
  count, module = len(TILES.graph.nodes["opcode"]), readouts.Cross(options)
  x = np.random.default_rng(0).normal(size=(count, 1, 3)).astype(np.float32)
  params = draw(module, x, slates=nodes.Slates.of(TILES))
  found = quick_jit(lambda p: module.apply({"params": p}, x, nodes.Slates.of(TILES)))(params)
  graph_of = np.repeat(np.arange(len(TILES.graph.n_node)), TILES.graph.n_node)
  for graph in range(3):
    for config in range(CONFIGS):
      query = dense(TILES.config_feat[graph, config], params["queries"]["Dense_0"])[None]
      to = x[graph_of == graph, 0]
      for number in range(2):
        query = slow_encoder(query, to, params[f"layer_{number}"])
      np.testing.assert_allclose(found[graph, config], query[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm", ["none", "configuration"])
def test_a_head_normalises_over_the_slate(norm):
  options = Options(head_widths=(4, 3), head_norm=norm, activation="elu")
  mask = np.array([[True, True, True], [True, True, False]])
  readout = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
  module = readouts.Hidden(options, EXACT)
  params = draw(module, readout, mask)
  found = quick_jit(lambda p: module.apply({"params": p}, readout, mask))(params)
  for graph in range(2):
    real = np.flatnonzero(mask[graph])
    x = readout[graph, real]
    for number in range(2):
      x = dense(x, params[f"dense_{number}"])
      if norm == "configuration":
        x = slow_normal(x, 0)
      x = elu(x)
    np.testing.assert_allclose(found[graph, real], x, rtol=1e-3, atol=1e-3)


def test_the_late_mlp_and_the_head_of_tiles_have_dropout_too():
  options = Options(fusion="late", fusion_widths=(4, 4), head_widths=(4,), dropout=0.5,
                    dropout_in=("fusion", "head"))
  assert options.head_in_embed and not Options(head_widths=(4,), dropout=0.5).head_in_embed
  x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
  head = readouts.Hidden(options, EXACT)
  params = draw(head, x)
  dropped = head.apply({"params": params}, x, train=True, rngs={"dropout": jax.random.key(1)})
  linear = np.maximum(dense(x, params["dense_0"]), 0)
  kept = np.asarray(dropped)[linear > 0]
  np.testing.assert_allclose(np.unique(np.round(kept / linear[linear > 0], 3)), [0, 2])
  late, pooled = readouts.Late(options, EXACT), np.zeros((len(TILES.target), 1, 2), np.float32)
  params = draw(late, pooled, slates=nodes.Slates.of(TILES))
  parts = [late.apply({"params": params}, pooled, nodes.Slates.of(TILES), train=True,
                      rngs={"dropout": jax.random.key(seed)}) for seed in range(2)]
  assert not np.allclose(*parts)
