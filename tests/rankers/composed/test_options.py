"""Which options of the composed ranker go together, and what follows from them."""

from __future__ import annotations

import dataclasses

import families
import pytest

from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.composed.options import Options


def refused(kind, complaint, **options):
  with pytest.raises(ValueError, match=complaint) as error:
    base.create_network(kind, "Composed", **options)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("complaint, options", [
    ("model.conv is 'cheb', expected one of sage, gatv2", dict(conv="cheb")),
    ("model.fusion is 'late', expected one of early, middle", dict(fusion="late")),
    ("model.dropout is 1.0, expected a share below 1", dict(dropout=1.0)),
    ("model.heads is 0, expected at least 1", dict(heads=0)),
    ("model.widths is .*, expected widths of at least 1", dict(widths=(4, 0))),
    ("model.pre_widths is empty", dict(pre_widths=())),
    ("model.fusion_widths is empty", dict(fusion="middle", fusion_widths=())),
    ("config_attention puts two halves side by side: take even widths",
     dict(config_attention="softmax_gate", widths=(3,))),
    ("direction_merge is 'concat', which puts two halves", dict(
        direction_merge="concat", widths=(3,))),
    ("model.heads is 3, expected a divisor of all model.widths",
     dict(heads=3, conv="gatv2", widths=(4,))),
    ("model.heads is 2, expected a divisor of model.attention_keys",
     dict(heads=2, global_attention="linear", attention_keys=3)),
    ("model.pooling is .*, expected some of mean", dict(pooling=("median",))),
    ("config_attention looks across configurations where all configurations are alike",
     dict(fusion="middle", config_attention="softmax_gate")),
    ("model.dimension_encoder is for tiles", dict(dimension_encoder="transformer")),
    ("model.readout is 'node_scalar_sum', but model.fusion=middle pools itself",
     dict(fusion="middle", readout="node_scalar_sum")),
    ("model.readout is 'lstm', which is for kernels of few nodes", dict(readout="lstm")),
    ("model.readout is 'node_scalar_sum', which has no head",
     dict(readout="node_scalar_sum", head_widths=(3,))),
    ("leave config_ out of model.pooling", dict(fusion="middle", pooling=("config_max",))),
    ("model.readout_layers is 'all', but model.widths is empty",
     dict(readout_layers="all", widths=())),
    ("model.readout_layers is 'all', which adds layers up",
     dict(readout_layers="all", widths=(4, 8))),
    ("model.dropout_in has 'tail', expected some of first", dict(dropout_in=("tail",))),
    ("model.readout_layers is 'all', which reads out what model.post_widths",
     dict(readout_layers="all", post_widths=(4,))),
    ("model.direction_merge is 'concat', which needs model.edge_direction=bidirectional",
     dict(edge_direction="forward", direction_merge="concat")),
])
def test_options_that_exclude_each_other_are_refused(complaint, options):
  refused("layout", complaint, **options)


@pytest.mark.parametrize("complaint, options", [
    ("model.fusion is 'middle', expected one of early, late, cross", dict(fusion="middle")),
    ("model.encoding is 'embedding', but tile configurations", dict(encoding="embedding")),
    ("model.missing is 'sentinel', but every node of a kernel", dict(missing="sentinel")),
    ("model.pooling is .*, expected some of", dict(pooling=("config_mean",))),
    ("model.dimension_encoder joins tiles to nodes", dict(
        fusion="late", dimension_encoder="transformer", node_layout=True)),
    ("model.readout is 'node_scalar_sum', which sums scores of nodes that know",
     dict(fusion="late", readout="node_scalar_sum")),
])
def test_options_that_tiles_cannot_have_are_refused(complaint, options):
  refused("tile", complaint, **options)


@pytest.mark.parametrize("options", [
    dict(config_attention="softmax_gate"), dict(head_widths=(2,), head_norm="configuration")])
def test_a_slate_of_one_is_refused_where_configurations_are_compared(options):
  network = base.create_network("layout", "Composed", **options)
  with pytest.raises(ValueError, match="batch.configs is 1"):
    families.make("layout", network, "full,ci", **{"batch.configs": 1, "eval.configs": 1})


@pytest.mark.parametrize("options, whole", [
    (dict(global_attention="linear"), True), (dict(norm="instance"), True),
    (dict(readout="node_scalar_sum"), False), (dict(norm="layer"), False)])
def test_what_looks_at_the_whole_graph_goes_with_segments_but_with_no_history(options, whole):
  network = base.create_network("layout", "Composed", **options)
  assert network.sees_whole_graph is whole
  families.make("layout", network, "gst,ci")
  if whole:
    with pytest.raises(ValueError, match="history"):
      families.make("layout", network, "gst_ed,ci")
  else:
    families.make("layout", network, "gst_ed,ci")


@pytest.mark.parametrize("options, hops", [
    (dict(), 3), (dict(norm="instance"), 0), (dict(fusion="middle"), 0),
    (dict(conv="appnp", appnp_steps=4), 12), (dict(widths=()), 0), (dict(conv="gatv2"), 0),
    (dict(global_attention="linear"), 1), (dict(global_attention="linear", attention_from=2), 3),
    (dict(global_attention="linear", attention_from=1, attention_combine="serial"), 1)])
def test_hops_are_the_rounds_until_every_node_differs(options, hops):
  assert base.create_network("layout", "Composed", **options).hops == hops


def test_options_are_read_back_from_lists():
  options = Options(widths=[3, 4], pooling=["max"])
  assert options == dataclasses.replace(options, widths=(3, 4), pooling=("max",))
