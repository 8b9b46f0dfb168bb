"""Layers, joins and heads of the composed ranker as a whole, against NumPy node by node."""

from __future__ import annotations

import functools

import jax
import numpy as np
import parts
import pytest
import system_cases
from test_systems_inputs import QUICK, slow_configs, slow_opcodes
from test_systems_modules import (
    BATCH, CONFIGS, EXACT, NODES, OF_GRAPH, REAL, WIDTH, dense, each_graph, neighbours,
    real_configs, run,
    slow_encoder, slow_normal, slow_sage, split_and_full)

from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.composed import blocks, edges, joins, nodes, readouts
from tpugraphs_jax.rankers.composed.encoder import Encoder
from tpugraphs_jax.rankers.composed.options import Options

TILES = system_cases.tile_batch()


def elu(x):
  return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def slow_norm(x, params):
  return slow_normal(x, -1, 1e-6) * params["layer"]["scale"] + params["layer"]["bias"]


class OneLayer(blocks.nn.Module):
  """A layer between its input and a first one that is 1 larger."""

  options: Options
  attends: bool = False

  @blocks.nn.compact
  def __call__(self, x, slates):
    first = jax.tree.map(lambda v: v + 1, x)
    return blocks.Layer(self.options, WIDTH, EXACT, self.attends, name="layer")(
        x, first, None, slates, train=False)


@pytest.mark.parametrize("norm_position", ["pre", "post", "after_activation"])
@pytest.mark.parametrize("residual, residual_position", [
    ("identity", "before_activation"), ("initial", "after_activation")])
def test_the_steps_of_a_layer_come_in_the_order_of_its_options(
    norm_position, residual, residual_position):
  options = Options(edge_direction="forward", activation="elu", norm="layer",
                    norm_position=norm_position, residual=residual,
                    residual_position=residual_position)
  inputs = split_and_full()
  params, *found = run(OneLayer(options), inputs)
  layer, x = params["layer"], inputs[1]
  other = x if residual == "identity" else x + 1
  norm = lambda v: slow_norm(v, layer["norm"])
  y = norm(x) if norm_position == "pre" else x
  y = slow_sage(y, layer["convolution"]["operands"], "operands", options)
  y = y + other if residual_position == "before_activation" else y
  y = norm(y) if norm_position == "post" else y
  y = elu(y)
  y = norm(y) if norm_position == "after_activation" else y
  y = y + other if residual_position == "after_activation" else y
  for result in found:
    np.testing.assert_allclose(result[REAL], y[REAL], rtol=1e-3, atol=2e-4)


def slow_linear_attention(x, params):
  """One head, kernel elu + 1, weights that add up to 1."""
  kernel = lambda v: np.where(v > 0, v + 1, np.exp(np.minimum(v, 0)))
  query, key = (kernel(dense(x, params[name])) for name in ("query", "key"))
  value, result = dense(x, params["value"]), np.zeros((NODES, CONFIGS, WIDTH))
  for node in np.flatnonzero(REAL):
    members = np.flatnonzero(OF_GRAPH == OF_GRAPH[node])
    for config in range(CONFIGS):
      weights = key[members, config] @ query[node, config]
      result[node, config] = weights @ value[members, config] / weights.sum()
  return result


@pytest.mark.parametrize("combine", ["sum", "concat", "serial"])
def test_attention_stands_beside_the_convolution_or_in_front_of_it(combine):
  options = Options(edge_direction="forward", activation="elu", global_attention="linear",
                    attention_combine=combine, residual="identity")
  inputs = split_and_full()
  params, *found = run(OneLayer(options, attends=True), inputs)
  layer, x = params["layer"], inputs[1].astype(np.float64)
  attend = lambda v: slow_linear_attention(v, layer["attention"])
  convolve = lambda v: slow_sage(v, layer["convolution"]["operands"], "operands", options)
  if combine == "sum":
    y = x + convolve(x) + attend(x)
  elif combine == "concat":
    y = x + dense(np.concatenate([elu(convolve(x)), attend(x)], axis=-1), layer["both"])
  else:
    x = np.where(REAL[:, None, None], x + attend(x), 0)
    y = x + convolve(x)
  for result in found:
    np.testing.assert_allclose(result[REAL], elu(y)[REAL], rtol=1e-3, atol=1e-3)


def test_positions_have_a_track_of_their_own():
  """Seen by every layer and at the end, never changed by what layers make of nodes."""
  options = Options(position_width=3, pre_widths=(WIDTH,), widths=(WIDTH, WIDTH),
                    edge_direction="forward", activation="elu")
  inputs, walks = split_and_full(), np.random.default_rng(4).random((NODES, 128), np.float32)
  params, *found = run(Encoder(options, EXACT), inputs, walks, train=False)
  x = elu(inputs[1])
  track = np.tanh(dense(walks, params["positions"]))
  beside = lambda v, p: np.concatenate([v, np.repeat(p[:, None], CONFIGS, axis=1)], axis=-1)
  for number in range(2):
    layer = params[f"layer_{number}"]["convolution"]["operands"]
    x = elu(slow_sage(beside(x, track), layer, "operands", options))
    own = params[f"positions_{number}"]
    moved = slow_sage(track[:, None], own["convolution"]["operands"], "operands", options)[:, 0]
    track = np.tanh(dense(np.tanh(moved), own["dense"]))
  expected = beside(x, track)
  for result in found:
    assert result.shape == (NODES, CONFIGS, WIDTH + 3)
    np.testing.assert_allclose(result[REAL], expected[REAL], rtol=1e-3, atol=1e-4)


def test_the_sum_of_all_layers_is_read_out():
  options = Options(readout_layers="all", pre_widths=(WIDTH,), widths=(WIDTH, WIDTH),
                    edge_direction="forward", activation="elu")
  inputs = split_and_full()
  params, *found = run(Encoder(options, EXACT), inputs, None, train=False)
  x, layers = elu(inputs[1]), []
  for number in range(2):
    side = params[f"layer_{number}"]["convolution"]["operands"]
    x = elu(slow_sage(x, side, "operands", options))
    layers.append(x)
  for result in found:
    np.testing.assert_allclose(result[REAL], sum(layers)[REAL], rtol=1e-3, atol=1e-4)


def test_the_mlp_of_gin_has_norm_and_activation_and_the_layer_none():
  """6th place: twice linear layer, instance norm and ELU, and nothing behind them."""
  options = Options(conv="gin", edge_direction="forward", norm="instance", activation="gelu",
                    conv_activation="elu")
  inputs = split_and_full()
  params, *found = run(OneLayer(options), inputs)
  mlp = params["layer"]["convolution"]["operands"]
  assert set(params["layer"]) == {"convolution"} and set(mlp) == {"dense_0", "dense_1"}
  x = inputs[1].astype(np.float64)
  x = np.stack([x[v] + sum((x[u] for u in heard), 0 * x[v])
                for v, heard in enumerate(neighbours("operands"))])
  for number in range(2):
    x = dense(x, mlp[f"dense_{number}"])
    x = elu(each_graph(lambda nodes, x=x: slow_normal(x[nodes], 0)).astype(np.float64))
  several = REAL & (np.bincount(OF_GRAPH)[OF_GRAPH] > 1)  # one node alone has no deviation
  for result in found:
    np.testing.assert_allclose(result[several], x[several], rtol=1e-3, atol=1e-3)


def test_the_6th_place_adds_the_means_of_all_layers_and_scores_them_once():
  """`sixth_gin` with narrow layers, from its inputs to its scores, as published."""
  options = parts.config_of("layout", "xla-default,preset=sixth_gin").model.to_dict() | dict(
      op_embed_dim=3, pre_widths=(WIDTH,), widths=(WIDTH, WIDTH), head_widths=(4, 3))
  model = base.create_network("layout", options.pop("name"), **options)
  params = system_cases.random_params(model, BATCH)
  found = QUICK(lambda p: model.apply({"params": p}, BATCH))(params)
  raw, configured = slow_configs(BATCH)
  raw[~configured] = 0
  inputs, encoder = params["inputs"], params["encoder"]
  static = np.concatenate([
      np.asarray(BATCH.graph.nodes["feat"]), slow_opcodes(BATCH, inputs["opcodes"], 1.0, 0)], 1)
  joined = np.concatenate([np.repeat(static[:, None], CONFIGS, axis=1), raw], axis=-1)
  gelu = lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
  for graph in np.flatnonzero(BATCH.graph.n_node[:-1] > 1):
    nodes, real = np.flatnonzero(OF_GRAPH == graph), np.flatnonzero(BATCH.config_mask[graph])
    x = dense(joined[nodes][:, real], inputs["join"]["JoinedDense_0"])
    x, total = gelu(slow_normal(x, 0)), 0
    for number in range(2):
      mlp = encoder[f"layer_{number}"]["convolution"]["users"]
      x = np.stack([x[i] + sum((x[u - nodes[0]] for u in neighbours("users")[v]), 0 * x[i])
                    for i, v in enumerate(nodes)])
      for linear in range(2):
        x = elu(slow_normal(dense(x, mlp[f"dense_{linear}"]), 0))
      total = total + x.mean(axis=0)
    for number in range(2):  # across the slate
      total = gelu(slow_normal(dense(total, params["hidden"][f"dense_{number}"]), 0))
    expected = dense(total, params["last"])[:, 0]
    np.testing.assert_allclose(found[graph, real], expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("places", [(), ("first",), ("linear",), ("layers",)])
def test_dropout_is_where_the_options_say(places):
  """With a rate near 1 nearly nothing is left behind a layer that drops."""
  options = Options(dropout=0.999999, dropout_in=places, pre_widths=(WIDTH, WIDTH), widths=(WIDTH,),
                    edge_direction="forward", activation="none")
  x, slates = split_and_full()[1], nodes.Slates.of(BATCH)
  module = Encoder(options, EXACT)
  params = jax.tree.map(  # biases too: what follows a layer that gives zeros is not zero
      lambda leaf: leaf + 0.1, module.init(jax.random.key(0), x, None, slates, train=False)["params"])
  def layers(train):
    _, kept = module.apply(
        {"params": params}, x, None, slates, train=train, rngs={"dropout": jax.random.key(0)},
        capture_intermediates=True, mutable="intermediates")
    found = kept["intermediates"]
    return [np.asarray(found[name]["__call__"][0]) for name in ("pre_0", "pre_1", "layer_0")]
  zero = [not np.any(value[REAL]) for value in layers(True)]
  first = "first" in places or "linear" in places
  assert zero[0] is first and zero[2] is ("layers" in places)
  assert not any(not np.any(value[REAL]) for value in layers(False))


def test_the_late_mlp_and_the_head_of_tiles_drop_too():
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


def draw(module, *arguments, seed=5):
  shapes = jax.eval_shape(lambda *a: module.init(jax.random.key(0), *a), *arguments)["params"]
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.normal(0, 0.4, leaf.shape).astype(np.float32), shapes)


@pytest.mark.parametrize("share", [True, False])
def test_configurable_nodes_meet_their_configurations_behind_the_encoder(share):
  options = Options(fusion="middle", fusion_widths=(5, 4), activation="elu", share=share)
  slates = nodes.Slates.of(BATCH)
  x = jax.numpy.asarray(np.random.default_rng(0).normal(
      size=(NODES, 1 if share else CONFIGS, WIDTH)), np.float32)
  module = joins.Middle(options, lambda a, b: jax.numpy.matmul(a, b, precision="highest"), EXACT)
  params = jax.tree.map(lambda leaf: 0.2 * leaf, draw_with(module, x, slates))
  found = QUICK(lambda p: module.apply({"params": p}, x, nodes.Slates.of(BATCH)).varying)(params)
  raw, configured = slow_configs(BATCH)
  for row, node in enumerate(BATCH.by_hop.nodes[0]):
    if node >= NODES or not configured[node]:
      continue
    for config in real_configs(node):
      own = x[node, 0 if share else config]
      mixed = elu(dense(np.concatenate([own, raw[node, config]]), params["join"]))
      mixed = elu(dense(mixed, params["dense_1"]))
      np.testing.assert_allclose(found[row, config], mixed, rtol=1e-4, atol=1e-5)
  # They alone are pooled, however the pooling is called.
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


def draw_with(module, x, slates):
  shapes = jax.eval_shape(lambda v: module.init(jax.random.key(0), v, slates), x)["params"]
  rng = np.random.default_rng(5)
  return jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)


@pytest.mark.parametrize("widths", [(), (3,), (5, 3)])
def test_tiles_join_the_pooled_kernel(widths):
  options = Options(fusion="late", fusion_widths=widths, activation="elu", encoding_scale=0.5)
  slates, graphs = nodes.Slates.of(TILES), len(TILES.target)
  pooled = np.random.default_rng(0).normal(size=(graphs, 1, 2)).astype(np.float32)
  module = joins.Late(options, EXACT)
  shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), pooled, slates))
  rng = np.random.default_rng(5)
  params = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32),
                        shapes.get("params", {}))
  found = QUICK(lambda p: module.apply({"params": p}, pooled, nodes.Slates.of(TILES)))(params)
  for graph in range(graphs):
    for config in range(CONFIGS):
      tile = 0.5 * TILES.config_feat[graph, config]
      for number in range(len(widths)):
        tile = dense(elu(tile) if number else tile, params[f"dense_{number}"])
      np.testing.assert_allclose(
          found[graph, config], np.concatenate([pooled[graph, 0], tile]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_tiles_ask_the_nodes_of_their_own_kernel(share):
  options = Options(fusion="cross", fusion_widths=(4,), decoder_layers=2, share=share)
  count, module = len(TILES.graph.nodes["opcode"]), joins.Cross(options)
  x = np.random.default_rng(0).normal(size=(count, 1 if share else CONFIGS, 3)).astype(np.float32)
  params = draw_with(module, x, nodes.Slates.of(TILES))
  found = QUICK(lambda p: module.apply({"params": p}, x, nodes.Slates.of(TILES)))(params)
  graph_of = np.repeat(np.arange(len(TILES.graph.n_node)), TILES.graph.n_node)
  for graph in range(3):
    for config in range(CONFIGS):
      query = dense(TILES.config_feat[graph, config], params["queries"]["Dense_0"])[None]
      to = x[graph_of == graph, 0 if share else config]
      for number in range(2):
        query = slow_encoder(query, to, params[f"layer_{number}"])
      np.testing.assert_allclose(found[graph, config], query[0], rtol=1e-3, atol=1e-4)


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
  found = QUICK(lambda p: model.apply({"params": p}, batch))(params)
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
      # The activation of the head is that of its module.
      score = dense(relu(head), params["head"]["Dense_1"])[0]
      np.testing.assert_allclose(found[graph, config], score, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("missing", ["edge_widths", "config_widths"])
def test_bilinear_pooling_needs_layers(missing):
  with pytest.raises(ValueError, match=f"model.{missing} is empty"):
    base.create_network("layout", "BilinearEdges", **{missing: ()})


@pytest.mark.parametrize("norm", ["none", "layer", "configuration"])
def test_a_head_normalises_rows_or_the_slate(norm):
  options = Options(head_widths=(4, 3), head_norm=norm, activation="elu")
  mask = np.array([[True, True, True], [True, True, False]])
  readout = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
  module = readouts.Hidden(options, EXACT)
  params = draw(module, readout, mask)
  found = QUICK(lambda p: module.apply({"params": p}, readout, mask))(params)
  for graph in range(2):
    real = np.flatnonzero(mask[graph])
    x = readout[graph, real]
    for number in range(2):
      x = dense(x, params[f"dense_{number}"])
      if norm == "layer":
        layer = params[f"norm_{number}"]
        x = slow_normal(x, -1, 1e-6) * layer["scale"] + layer["bias"]
      elif norm == "configuration":
        x = slow_normal(x, 0)
      x = elu(x)
    np.testing.assert_allclose(found[graph, real], x, rtol=1e-3, atol=1e-3)


def test_a_score_that_is_a_sum_has_its_scale_and_no_head():
  options = dict(op_embed_dim=2, pre_widths=(3,), widths=(), readout="node_scalar_sum")
  model = base.create_network("layout", "Composed", **options)
  scaled = base.create_network("layout", "Composed", **options, score_scale=0.1)
  params = system_cases.random_params(model, BATCH)
  assert set(params) == {"inputs", "encoder", "readout"} or set(params) == {"inputs", "readout"}
  both = QUICK(lambda p: [m.apply({"params": p}, BATCH) for m in (model, scaled)])(params)
  np.testing.assert_allclose(both[1], 0.1 * np.asarray(both[0]), rtol=1e-5)
  table = params["inputs"]["opcodes"]["embedding"]["table"]["embedding"]
  graph = BATCH.graph
  static = np.concatenate([np.asarray(graph.nodes["feat"]),
                           table[np.asarray(graph.nodes["opcode"])]], axis=1)
  raw, configured = slow_configs(BATCH)
  raw[~configured] = 0
  joined = np.concatenate([np.repeat(static[:, None], CONFIGS, axis=1), np.nan_to_num(raw)], -1)
  hidden = np.maximum(dense(joined, params["inputs"]["join"]["JoinedDense_0"]), 0)
  scalar = dense(hidden, params["readout"]["scalar"])[..., 0]
  for number in range(len(system_cases.raw_layouts())):
    real = np.flatnonzero(BATCH.config_mask[number])
    expected = scalar[OF_GRAPH == number].sum(axis=0)
    np.testing.assert_allclose(both[0][number, real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train, equal", [(True, False), (False, True)])
def test_chance_is_for_training_alone(train, equal):
  model = base.create_network("layout", "Composed", op_embed_dim=2, pre_widths=(6,), widths=(6,),
                           dropout=0.4, drop_edge=0.5)
  params = system_cases.random_params(model, BATCH)
  apply = QUICK(lambda p, key: model.apply({"params": p}, BATCH, train=train, rngs={
      "dropout": key}))
  scores = [np.asarray(apply(params, jax.random.key(number))) for number in (0, 0, 1)]
  np.testing.assert_array_equal(scores[0], scores[1])
  assert np.array_equal(scores[0], scores[2]) is equal


def test_bfloat16_is_near_float32():
  options = dict(op_embed_dim=3, pre_widths=(8,), widths=(8,), norm="layer", activation="gelu",
                 residual="identity", head_widths=(4,), pooling=("mean", "max"))
  models = [base.create_network("layout", "Composed", **options, dtype=dtype)
            for dtype in ("float32", "bfloat16")]
  params = system_cases.random_params(models[0], BATCH)
  exact, half = QUICK(lambda p: [m.apply({"params": p}, BATCH) for m in models])(params)
  exact, half = (np.asarray(s)[BATCH.config_mask] for s in (exact, half))
  assert half.dtype == np.float32 and not np.array_equal(exact, half)
  np.testing.assert_allclose(half, exact, atol=0.05 * np.abs(exact).max())


def test_neighbours_of_the_slow_forms_are_those_of_the_graph():
  both, operands, users = (neighbours(side) for side in ("both", "operands", "users"))
  count = functools.partial(map, len)
  assert sum(count(both)) == sum(count(operands)) + sum(count(users))
  assert all(sorted(b) == sorted(o + u) for b, o, u in zip(both, operands, users))
