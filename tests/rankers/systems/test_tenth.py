"""The 10th place: each part of both networks against loops."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.support import parts, system_cases, winners
from tests.support.system_cases import (
  BATCH,
  dense,
  elu_and_one,
  members,
  sigmoid,
  slow_appnp,
  slow_attention,
  slow_configs,
  slow_inputs,
  slow_kernel_attention,
  slow_layer_norm,
  slow_mean,
  slow_transformer,
  TILES,
  unit_and_one,
)
from tests.support.table_cases import gelu
from tpugraphs_jax.rankers import base

SMALL = dict(op_embed_dim=2, width=8, blocks=2, steps=2, mlp_widths=(5, 3))
SMALL_TILES = dict(
  op_embed_dim=2, width=4, blocks=2, attention_blocks=1, mlp_widths=(3, 4), cross_blocks=2
)
FORMS = {"xla": {}, "nlp": dict(attention="difformer", gated=True)}
KERNELS = {"linear": elu_and_one, "difformer": unit_and_one}


def slow_join(x, y, gate):
  if gate is None:
    return x + y
  g = sigmoid(dense(np.concatenate([x, y], axis=-1), gate))
  return g * y + (1 - g) * x


@pytest.mark.parametrize("form", FORMS)
def test_layouts_meet_nodes_behind_the_blocks(form):
  model = base.create_network("layout", "Tenth", **SMALL, **FORMS[form])
  params = parts.params_of(model, BATCH)
  found = jax.jit(lambda p: model.apply({"params": p}, BATCH))(params)
  node = slow_inputs(BATCH, params["opcodes"]["embedding"]["table"])
  x = gelu(slow_layer_norm(dense(node, params["first"]), params["first_norm"]))
  for number in range(2):
    part = lambda name, number=number: params.get(f"{name}_{number}")
    normal = slow_layer_norm(x, part("attention_norm"))
    attended = slow_kernel_attention(normal, part("attention"), KERNELS[model.attention], 4)
    x = slow_join(x, attended, part("attention_gate"))
    normal = slow_layer_norm(x, part("messages_norm"))
    moved = sum(
      slow_appnp(normal, part(direction), direction) for direction in ("operands", "users")
    )
    x = slow_join(x, gelu(moved), part("messages_gate"))
  config, configured = slow_configs(BATCH)
  for graph, nodes in members():
    nodes, real = nodes[configured[nodes]], np.flatnonzero(BATCH.config_mask[graph])
    mean = np.zeros((len(real), 3))
    if len(nodes):
      joined = np.concatenate(
        [np.repeat(x[nodes][:, None], len(real), axis=1), config[nodes][:, real]], axis=-1
      )
      mean = gelu(dense(gelu(dense(joined, params["mlp_0"])), params["mlp_1"])).mean(axis=0)
    np.testing.assert_allclose(
      found[graph, real], dense(mean, params["last"])[:, 0], rtol=1e-3, atol=1e-3
    )


def test_tiles_attend_to_the_nodes_of_their_kernel():
  model = base.create_network("tile", "Tenth", **SMALL_TILES)
  params = parts.params_of(model, TILES)
  found = jax.jit(lambda p: model.apply({"params": p}, TILES))(params)
  node = slow_inputs(TILES, params["opcodes"]["embedding"]["table"])
  x = gelu(slow_layer_norm(dense(node, params["first"]), params["first_norm"]))
  graph_of = np.repeat(np.arange(len(TILES.graph.n_node)), TILES.graph.n_node)
  leaky_relu = lambda x: np.where(x > 0, x, 0.2 * x)
  for number in range(2):
    if number == 1:  # the last block alone
      normal, heads = slow_layer_norm(x, params["attention_norm_1"]), params["attention_1"]["heads"]
      for graph in range(4):
        inside = graph_of == graph
        if inside.any():
          x[inside] += slow_attention(normal[inside], normal[inside], heads, 4)
    normal = slow_layer_norm(x, params[f"messages_norm_{number}"])
    sage = params[f"messages_{number}"]
    means = [
      slow_mean(normal, direction, TILES) @ sage[direction]["kernel"]
      for direction in ("operands", "users")
    ]
    x = x + gelu(sum(means) + dense(normal, sage["self"]))
  assert "attention_0" not in params
  for graph in range(3):
    for config in np.flatnonzero(TILES.config_mask[graph]):
      query = dense(TILES.config_feat[graph, config], params["mlp_0"])
      query = dense(leaky_relu(query), params["mlp_1"])[None]
      for number in range(2):
        query = slow_transformer(
          query, x[graph_of == graph], params[f"cross_{number}"], 4, epsilon=1e-6
        )
      score = dense(query, params["last"])[0, 0]
      np.testing.assert_allclose(found[graph, config], score, rtol=1e-3, atol=1e-3)


def test_padding_and_shared_nodes_change_no_layout():
  model = base.create_network("layout", "Tenth", **SMALL | FORMS["nlp"] | dict(blocks=1))
  padded = system_cases.layout_batch(spare=7, reuse=False)
  system_cases.assert_alike(model, BATCH, padded, roundings=2)


def test_padding_changes_no_tile():
  model = base.create_network("tile", "Tenth", **SMALL_TILES | dict(blocks=1, cross_blocks=1))
  system_cases.assert_alike(model, TILES, system_cases.tile_batch(spare=9), roundings=2)


@pytest.mark.parametrize(
  "kind, variant", [("layout", "xla-random"), ("layout", "nlp-random"), ("tile", "")]
)
def test_it_begins_as_in_pytorch(kind, variant):
  # Nodes are as wide as tiles, so that the kernels of both attentions are square.
  experiment = parts.make(kind, f"{variant},preset=tenth,ci".strip(","), model__width=8)
  # The kernels of attention with a softmax are Xavier's of [K, 3 K], within the root of 1.5 / K.
  width, packed = experiment.config.model.width, ("query", "key", "value")
  attentions = ("cross_0/heads", "attention_0/heads") if kind == "tile" else ()
  xavier = {f"{path}/{name}": width / 1.5 for path in attentions for name in packed}
  zeros = {f"heads/{name}/bias": 0.0 for name in (*packed, "out")}
  winners.assert_torch_parameters(
    experiment.ranker.family.network, BATCH if kind == "layout" else TILES, xavier, **zeros
  )


def test_nlp_has_members_of_difformer():
  xla, nlp = (
    parts.make("layout", f"{collection},preset=tenth").ranker.family.network
    for collection in ("xla-random", "nlp-default")
  )
  assert (xla.attention, xla.blocks, xla.gated) == ("linear", 12, False)
  assert (nlp.attention, nlp.blocks, nlp.gated) == ("difformer", 5, True)
