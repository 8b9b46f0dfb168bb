"""Options of the composed ranker: which go together, and what they imply."""

from __future__ import annotations

import families
import pytest

from tpugraphs_jax.rankers import base


def refused(kind, complaint, **options):
  with pytest.raises(ValueError, match=complaint) as error:
    base.create_network(kind, "Composed", **options)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("word, options", [
    ("conv", dict(conv="cheb")), ("fusion", dict(fusion="late")), ("dropout", dict(dropout=1.0)),
    ("heads", dict(heads=0)), ("widths", dict(widths=(4, 0))), ("pre_widths", dict(pre_widths=())),
    ("fusion_widths", dict(fusion="middle", fusion_widths=())),
    ("even widths", dict(config_attention="softmax_gate", widths=(3,))),
    ("direction_merge", dict(direction_merge="concat", widths=(3,))),
    ("divisor of all model.widths", dict(heads=3, conv="gatv2", widths=(4,))),
    ("divisor of model.attention_keys", dict(heads=2, global_attention="linear", attention_keys=3)),
    ("pooling", dict(pooling=("median",))),
    ("config_attention", dict(fusion="middle", config_attention="softmax_gate")),
    ("is for tiles", dict(dimension_encoder="transformer")),
    ("pools itself", dict(fusion="middle", readout="node_scalar_sum")),
    ("lstm", dict(readout="lstm")),
    ("no head", dict(readout="node_scalar_sum", head_widths=(3,))),
    ("leave config_ out", dict(fusion="middle", pooling=("config_max",))),
    ("widths is empty", dict(readout_layers="all", widths=())),
    ("adds layers up", dict(readout_layers="all", widths=(4, 8))),
    ("post_widths", dict(readout_layers="all", post_widths=(4,))),
    ("dropout_in", dict(dropout_in=("tail",))),
    ("bidirectional", dict(edge_direction="forward", direction_merge="concat"))])
def test_options_that_exclude_each_other_are_refused(word, options):
  refused("layout", word, **options)


@pytest.mark.parametrize("word, options", [
    ("fusion", dict(fusion="middle")), ("encoding", dict(encoding="embedding")),
    ("missing", dict(missing="sentinel")), ("pooling", dict(pooling=("config_mean",))),
    ("dimension_encoder", dict(
        fusion="late", dimension_encoder="transformer", node_layout=True)),
    ("node_scalar_sum", dict(fusion="late", readout="node_scalar_sum"))])
def test_options_that_tiles_cannot_have_are_refused(word, options):
  refused("tile", word, **options)


@pytest.mark.parametrize("options", [
    dict(config_attention="softmax_gate"), dict(head_widths=(2,), head_norm="configuration")])
def test_a_slate_of_one_is_refused_where_configurations_are_compared(options):
  network = base.create_network("layout", "Composed", **options)
  with pytest.raises(ValueError, match="batch.configs is 1"):
    families.make("layout", network, "full,ci", **{"batch.configs": 1, "eval.configs": 1})


@pytest.mark.parametrize("options, whole", [
    (dict(global_attention="linear"), True), (dict(norm="instance"), True),
    (dict(readout="node_scalar_sum"), False), (dict(norm="layer"), False)])
def test_options_that_look_at_the_whole_graph_say_so(options, whole):
  assert base.create_network("layout", "Composed", **options).sees_whole_graph is whole


@pytest.mark.parametrize("options, hops", [
    (dict(), 3), (dict(norm="instance"), 0), (dict(fusion="middle"), 0),
    (dict(conv="appnp", appnp_steps=4), 12), (dict(widths=()), 0), (dict(conv="gatv2"), 0),
    (dict(global_attention="linear"), 1), (dict(global_attention="linear", attention_from=2), 3),
    (dict(global_attention="linear", attention_from=1, attention_combine="serial"), 1)])
def test_hops_are_the_rounds_until_every_node_differs(options, hops):
  assert base.create_network("layout", "Composed", **options).hops == hops
