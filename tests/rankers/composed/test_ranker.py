"""The composed ranker as a whole: shared work, padding, randomness, precision."""

from __future__ import annotations

import comparing
import jax
import numpy as np
import parts
import pytest
import composed_cases
from composed_cases import (
    BATCH, CONFIGS, OF_GRAPH, WIDTH, dense, elu, neighbours, quick_jit, slow_configs, slow_normal,
    slow_opcodes)

from tpugraphs_jax.rankers import base

# The instance norm divides by a deviation. A graph of one node and a slate of one have none,
# and dividing by the root of 1e-5 makes rounding 300 times as large; the same happens to
# gradients of biases in front of a norm over configurations, which are 0.
TOLERANCES = {"instance": 1e-4, "configuration": 5e-4}
# The gradient of a gate's temperature is one sum over all nodes and configurations. In the
# case of tiles it cancels to 2e-4, and the forms differ by 1.1e-6; with float64 by 6e-8.
CANCELS = "temperature"

# The batches have less than 1,000 terms in any sum.
ROUNDING = comparing.rounding(1_000)
# Norms divide by deviations and enlarge rounding; float64 leaves room for a factor of 1e4.
EXACT = 1e4 * comparing.rounding(1_000, np.float64)

SMALL = dict(op_embed_dim=3, value_embed_dim=2, pre_widths=(4,), widths=(4,), activation="elu")
LAYOUTS = {
    "first": dict(
        encoding="embedding", missing="sentinel", node_layout=True, edge_direction="backward",
        norm="instance", norm_position="pre", residual="identity", channel_attention=2,
        config_attention="softmax_gate", dropout=0.3),
    "gate": dict(config_attention="softmax_gate", conv="gin", drop_edge=0.5, dropout=0.2),
    "second": dict(feature_width=3, readout="node_scalar_sum", score_scale=0.1,
                   edge_direction="symmetric", residual="identity", widths=(4, 4),
                   residual_position="after_activation"),
    "third": dict(
        position_width=4, global_attention="linear", attention_normalize=False, norm="layer",
        attention_combine="concat", norm_position="after_activation", post_widths=(4,),
        pooling=("sum",), encoding_scale=0.2),
    "fifth": dict(missing="layout", node_layout=True, direction_merge="concat", drop_edge=0.3),
    "sixth": dict(norm="instance", residual="identity", edge_direction="forward",
                  pooling=("mean", "max"), pooling_merge="sum", readout_norm="l2",
                  head_widths=(4,), head_norm="configuration"),
    "tenth": dict(fusion="middle", fusion_widths=(4, 4), conv="appnp", appnp_steps=2,
                  global_attention="difformer", attention_combine="serial", norm="layer",
                  norm_position="pre", residual="gated", heads=2, pooling=("mean", "max")),
    "late attention": dict(
        widths=(4, 4), norm="layer", global_attention="linear", heads=2,
        attention_from=1, pooling=("config_max", "mean"), head_widths=(3,)),
    "sixth_gin": dict(norm="layer", conv="gin", widths=(4, 4), readout_layers="all",
                      merge_unary=True),
    "attention on edges": dict(conv="gatv2", heads=2, activation="prelu", conv_activation="none",
                               encoding="gain", encoding_scale=3.0, global_attention="softmax",
                               op_max_norm=1.0, op_gain=2.0),
}
TILE = SMALL | dict(
    pooling=("mean", "max", "sum"), config_attention="softmax_gate", node_layout=True,
    dimension_encoder="transformer", dimension_width=4, dimension_layers=1, drop_edge=0.3)
TILES = {"alone": TILE}


def reads(kind, options):
  return base.create_network(kind, "Composed", **{
      k: options[k] for k in ("node_layout", "position_width", "dimension_encoder", "missing")
      if k in options}).reads


def check_shared_is_plain(kind, name="Composed", **options):
  """A batch without shared nodes gives the scores and gradients of the usual batch."""
  make, name_reads = getattr(composed_cases, f"{kind}_batch"), reads(kind, options)
  more = {"hops": len(options.get("widths", ())) + 2} if kind == "layout" else {}
  batches = [make(name_reads, reuse=reuse, **more) for reuse in (True, False)]
  shared, plain = composed_cases.scores_and_gradients(kind, name, batches, **options)
  assert np.abs(plain[0]).max() > 0.01
  norms = options.get("norm"), options.get("head_norm")
  comparing.assert_trees_close(
      shared, plain, max(ROUNDING, *(TOLERANCES.get(norm, 0) for norm in norms)), sums=CANCELS)


@pytest.mark.parametrize("case", LAYOUTS)
def test_shared_nodes_give_the_scores_and_gradients_of_nodes_that_share_nothing(case):
  check_shared_is_plain("layout", **SMALL | LAYOUTS[case])


@pytest.mark.parametrize("case", TILES)
def test_shared_tokens_give_the_scores_and_gradients_of_tokens_of_each_node(case):
  check_shared_is_plain("tile", **TILES[case])


EVERYTHING = SMALL | dict(
    config_attention="softmax_gate", norm="instance", global_attention="linear",
    pooling=("mean", "max", "config_mean"), head_widths=(4,),
    head_norm="configuration", residual="gated")


@pytest.mark.parametrize("kind", ["layout", "tile"])
def test_padding_does_not_change_scores(kind):
  make = getattr(composed_cases, f"{kind}_batch")
  options = EVERYTHING | (dict(pooling=("mean", "max")) if kind == "tile" else {})
  model = base.create_network(kind, "Composed", **options)
  params = composed_cases.random_params(model, make())
  score = jax.jit(model.apply, compiler_options=composed_cases.QUICK)
  few, many = (comparing.in_float64(score, {"params": params}, make(spare=spare))
               for spare in (1, 7))
  mask = make().config_mask
  np.testing.assert_allclose(few[mask], many[mask], rtol=EXACT, atol=EXACT)


def test_contents_of_padding_configurations_reach_no_real_one():
  batch = composed_cases.layout_batch()
  model = base.create_network("layout", "Composed", **EVERYTHING)
  params = composed_cases.random_params(model, batch)
  score = jax.jit(model.apply, compiler_options=composed_cases.QUICK)
  scores = score({"params": params}, batch)
  # Padding configurations get contents: row 0 of the dictionary.
  filled = batch._replace(row_id=np.where(
      (batch.row_id < len(batch.rows)).any(axis=1, keepdims=True),
      np.where(batch.row_id < len(batch.rows), batch.row_id, 0), batch.row_id).astype(np.int32))
  again = score({"params": params}, filled)
  mask = batch.config_mask
  assert (filled.row_id != batch.row_id).any()
  np.testing.assert_allclose(scores[mask], again[mask], rtol=1e-5, atol=1e-5)


def test_a_score_that_is_a_sum_has_its_scale_and_no_head():
  options = dict(op_embed_dim=2, pre_widths=(3,), widths=(), readout="node_scalar_sum")
  model = base.create_network("layout", "Composed", **options)
  scaled = base.create_network("layout", "Composed", **options, score_scale=0.1)
  params = composed_cases.random_params(model, BATCH)
  assert set(params) == {"inputs", "readout"}
  both = quick_jit(lambda p: [m.apply({"params": p}, BATCH) for m in (model, scaled)])(params)
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
  for number in range(len(composed_cases.raw_layouts())):
    real = np.flatnonzero(BATCH.config_mask[number])
    expected = scalar[OF_GRAPH == number].sum(axis=0)
    np.testing.assert_allclose(both[0][number, real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train, equal", [(True, False), (False, True)])
def test_dropout_and_dropped_edges_are_for_training_alone(train, equal):
  model = base.create_network("layout", "Composed", op_embed_dim=2, pre_widths=(6,), widths=(6,),
                           dropout=0.4, drop_edge=0.5)
  params = composed_cases.random_params(model, BATCH)
  apply = quick_jit(lambda p, key: model.apply({"params": p}, BATCH, train=train, rngs={
      "dropout": key}))
  scores = [np.asarray(apply(params, jax.random.key(number))) for number in (0, 0, 1)]
  np.testing.assert_array_equal(scores[0], scores[1])
  assert np.array_equal(scores[0], scores[2]) is equal


def test_bfloat16_is_near_float32():
  options = dict(op_embed_dim=3, pre_widths=(8,), widths=(8,), norm="layer", activation="gelu",
                 residual="identity", head_widths=(4,), pooling=("mean", "max"))
  models = [base.create_network("layout", "Composed", **options, dtype=dtype)
            for dtype in ("float32", "bfloat16")]
  params = composed_cases.random_params(models[0], BATCH)
  exact, half = quick_jit(lambda p: [m.apply({"params": p}, BATCH) for m in models])(params)
  exact, half = (np.asarray(s)[BATCH.config_mask] for s in (exact, half))
  assert half.dtype == np.float32 and not np.array_equal(exact, half)
  np.testing.assert_allclose(half, exact, atol=0.05 * np.abs(exact).max())


def test_the_6th_place_adds_the_means_of_all_layers_and_scores_them_once():
  """`sixth_gin` with narrow layers, from its inputs to its scores, as published."""
  options = parts.config_of("layout", "xla-default,preset=sixth_gin").model.to_dict() | dict(
      op_embed_dim=3, pre_widths=(WIDTH,), widths=(WIDTH, WIDTH), head_widths=(4, 3))
  model = base.create_network("layout", options.pop("name"), **options)
  params = composed_cases.random_params(model, BATCH)
  found = quick_jit(lambda p: model.apply({"params": p}, BATCH))(params)
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
