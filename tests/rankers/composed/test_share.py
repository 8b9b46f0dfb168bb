"""What configurations have in common is computed once, and nothing changes by it."""

from __future__ import annotations

import comparing
import jax
import numpy as np
import pytest
import system_cases

from tpugraphs_jax.rankers import base

# Norms divide by a deviation. A graph of one node and a slate of one have none, and what is
# left of 1e-5 under the root makes rounding 300 times as large; so it does to gradients of
# biases in front of a norm over configurations, which are 0.
TOLERANCES = {"instance": 1e-4, "graph": 1e-4, "configuration": 5e-4}
# The gradient of a gate's temperature is one sum over all nodes and configurations. In case
# `early` it cancels to 2e-4, and the forms differ by 1.1e-6; with float64 enabled by 6e-8.
CANCELS = "temperature"

# Norms divide by deviations and enlarge rounding; the batches have less than 1,000 terms in
# any sum, and float64 leaves four orders of magnitude for what norms do to its rounding.
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
    "fifth": dict(missing="layout", node_layout=True, direction_merge="concat", drop_edge=0.3,
                  dimension_encoder="transformer", dimension_width=4, dimension_layers=1),
    "sixth": dict(norm="graph", residual="initial", conv="gcn", edge_direction="forward",
                  pooling=("mean", "max"), pooling_merge="sum", readout_norm="l2",
                  head_widths=(4,), head_norm="configuration"),
    "tenth": dict(fusion="middle", fusion_widths=(4, 4), conv="appnp", appnp_steps=2,
                  global_attention="difformer", attention_combine="serial", norm="layer",
                  norm_position="pre", residual="gated", heads=2, pooling=("mean", "attention")),
    "late attention": dict(
        widths=(4, 4), norm="layer", conv="gcn", global_attention="linear", heads=2,
        attention_from=1, pooling=("config_max", "attention"), head_widths=(3,), head_norm="layer"),
    "sixth_gin": dict(norm="layer", conv="gin", widths=(4, 4), readout_layers="all",
                      merge_unary=True),
    "attention on edges": dict(conv="gatv2", heads=2, activation="prelu", conv_activation="none",
                               encoding="gain", encoding_scale=3.0, global_attention="softmax",
                               op_max_norm=1.0, op_gain=2.0),
}
TILES = {
    "early": dict(pooling=("mean", "max", "sum"), conv="gcn", config_attention="softmax_gate",
                  dimension_encoder="transformer", dimension_width=4, dimension_layers=1,
                  node_layout=True, drop_edge=0.3),
    "late": dict(fusion="late", fusion_widths=(4, 3), norm="instance", conv="gatv2",
                 head_widths=(4,), head_norm="configuration", encoding="gain"),
    "cross": dict(fusion="cross", widths=(4, 4), fusion_widths=(4,), decoder_layers=2, heads=2,
                  global_attention="softmax", attention_from=1),
    "lstm": dict(readout="lstm"),
    "transformer": dict(readout="transformer", heads=2),
}


def reads(options):
  return base.create_network("layout", "Composed", **{
      k: options[k] for k in ("node_layout", "position_width", "dimension_encoder", "missing")
      if k in options}).reads


def check_shared_is_plain(kind, batch, **options):
  shared, plain = system_cases.scores_and_gradients(kind, batch, **options)
  assert np.abs(plain[0]).max() > 0.01
  norms = options.get("norm"), options.get("head_norm")
  comparing.assert_trees_close(
      shared, plain, max([1e-5, *(TOLERANCES.get(norm, 0) for norm in norms)]), sums=CANCELS)


@pytest.mark.parametrize("case", LAYOUTS)
def test_layout_options_give_the_scores_and_gradients_of_the_plain_form(case):
  options = SMALL | LAYOUTS[case]
  check_shared_is_plain("layout", system_cases.layout_batch(reads(options)), **options)


@pytest.mark.parametrize("case", TILES)
def test_tile_options_give_the_scores_and_gradients_of_the_plain_form(case):
  options = SMALL | TILES[case]
  check_shared_is_plain("tile", system_cases.tile_batch(reads(options)), **options)


def test_equal_tokens_of_a_kernel_pass_the_transformer_once():
  options = SMALL | TILES["early"]
  batch, shapes = system_cases.tile_batch(reads(options)), {}
  for share in (True, False):
    model = base.create_network("tile", "Composed", **options, share=share)
    _, kept = jax.eval_shape(lambda model=model: model.init_with_output(
        jax.random.key(0), batch, capture_intermediates=lambda module, _: module.name == "layer_0"))
    (found,) = jax.tree.leaves(kept["intermediates"]["inputs"]["dimensions"])
    shapes[share] = found.shape
  nodes, configs = len(batch.graph.nodes["opcode"]), batch.config_mask.shape[1]
  assert shapes == {False: (nodes, configs, 6, 4), True: (len(batch.distinct.first), configs, 6, 4)}
  assert 2 * shapes[True][0] < nodes


def test_edges_of_the_4th_place_give_those_of_the_plain_form():
  for slots in (0, 2):
    check_shared_is_plain(
        "layout", system_cases.layout_batch(slots=slots), name="BilinearEdges", op_embed_dim=3,
        edge_widths=(5, 4), config_widths=(6, 4), head_widths=(3,))


def test_a_slate_of_one_configuration():
  options = SMALL | dict(config_attention="softmax_gate", pooling=("mean", "config_max"))
  check_shared_is_plain("layout", system_cases.layout_batch(configs=1), **options)


EVERYTHING = SMALL | dict(
    config_attention="softmax_gate", norm="instance", global_attention="linear",
    pooling=("mean", "max", "attention", "config_mean"), head_widths=(4,),
    head_norm="configuration", residual="gated")


@pytest.mark.parametrize("kind", ["layout", "tile"])
def test_padding_does_not_change_scores(kind):
  make = getattr(system_cases, f"{kind}_batch")
  options = EVERYTHING | (dict(pooling=("mean", "max", "attention")) if kind == "tile" else {})
  model = base.create_network(kind, "Composed", **options)
  params = system_cases.random_params(model, make())
  score = jax.jit(model.apply, compiler_options=system_cases.QUICK)
  few, many = (comparing.in_float64(score, {"params": params}, make(spare=spare))
               for spare in (1, 7))
  mask = make().config_mask
  np.testing.assert_allclose(few[mask], many[mask], rtol=EXACT, atol=EXACT)


def test_contents_of_padding_configurations_reach_no_real_one():
  batch = system_cases.layout_batch()
  model = base.create_network("layout", "Composed", **EVERYTHING)
  params = system_cases.random_params(model, batch)
  score = jax.jit(model.apply, compiler_options=system_cases.QUICK)
  scores = score({"params": params}, batch)
  # Whatever stands where no configuration is: here row 0 of the dictionary.
  filled = batch._replace(row_id=np.where(
      (batch.row_id < len(batch.rows)).any(axis=1, keepdims=True),
      np.where(batch.row_id < len(batch.rows), batch.row_id, 0), batch.row_id).astype(np.int32))
  again = score({"params": params}, filled)
  mask = batch.config_mask
  assert (filled.row_id != batch.row_id).any()
  np.testing.assert_allclose(scores[mask], again[mask], rtol=1e-5, atol=1e-5)
