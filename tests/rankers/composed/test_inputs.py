"""Inputs of the encoder: encodings, the first layer, tokens of dimensions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_graphs
import composed_cases
from composed_cases import draw, quick_jit, slow_configs, slow_encoder, slow_opcodes

from tpugraphs_jax.columns import opcode_ids
from tpugraphs_jax.data import batching, feature_blocks
from tpugraphs_jax.nn import layers
from tpugraphs_jax.rankers.composed import inputs, nodes
from tpugraphs_jax.rankers.composed.options import Options

READS = ("dimension_tokens", "node_layout")
LAYOUTS, TILES = composed_cases.layout_batch(READS), composed_cases.tile_batch(READS)
EXACT = composed_cases.EXACT
MATMUL = functools.partial(layers.matmul, dtype=None, precision="highest")


def real_nodes(batch):
  return int(batch.graph.n_node[:-1].sum())


@pytest.mark.parametrize("max_norm, gain", [(0.0, 0.0), (0.4, 0.0), (1.0, 100.0)])
def test_opcodes_are_shortened_and_multiplied(max_norm, gain):
  module = inputs.Opcodes(3, max_norm, gain)
  params = draw(module, LAYOUTS.graph)
  found = quick_jit(module.apply)({"params": params}, LAYOUTS.graph)
  np.testing.assert_allclose(
      found, slow_opcodes(LAYOUTS, params, max_norm, gain), rtol=1e-5, atol=1e-6)
  if max_norm and not gain:
    assert np.linalg.norm(found, axis=-1).max() <= max_norm * (1 + 1e-5)
  start = module.init(jax.random.key(0), LAYOUTS.graph)["params"]
  assert not gain or start["gain"] == gain


def test_unary_operations_share_an_embedding():
  """The 21 of the 5th place, and no other opcode with them."""
  names = opcode_ids()
  found = np.asarray(inputs.merged(jnp.arange(121)))
  together = {name for name, number in names.items() if found[number] == names["abs"]}
  assert together == set(inputs.UNARY) and len(together) == 21
  others = [number for number in range(121) if number not in {names[n] for n in together}]
  np.testing.assert_array_equal(found[others], others)
  module = inputs.Opcodes(3, merge_unary=True)
  graph = LAYOUTS.graph._replace(nodes={
      "opcode": np.array([names[n] for n in ("tanh", "log", "add", "abs")])})
  rows = np.asarray(module.apply({"params": draw(module, graph)}, graph))
  np.testing.assert_array_equal(rows[[0, 1]], rows[[3, 3]])
  assert (rows[2] != rows[3]).all()


def test_a_shortened_opcode_has_the_gradient_of_its_short_vector():
  """As in PyTorch, no gradient goes through the factor that shortens a vector."""
  module = inputs.Opcodes(3, 0.4)
  params = draw(module, LAYOUTS.graph)
  grad = quick_jit(jax.grad(lambda p: module.apply({"params": p}, LAYOUTS.graph).sum()))(params)
  table, expected = params["embedding"]["table"]["embedding"], np.zeros((121, 3))
  for opcode in np.asarray(LAYOUTS.graph.nodes["opcode"]):
    expected[opcode] += min(1, 0.4 / np.linalg.norm(table[opcode]))
  np.testing.assert_allclose(grad["embedding"]["table"]["embedding"], expected, rtol=1e-5)


def slow_values(values, params, encoding, scale):
  """Encoded configurations, NaN where `values` are."""
  if encoding == "raw":
    return scale * values
  if encoding == "gain":
    return values * params["factors"]
  table = np.concatenate([params["table"]["embedding"], np.full((1, 2), np.nan)])
  index = np.where(np.isnan(values), -1, np.nan_to_num(values) + 2).astype(int)
  return table[index].reshape(*values.shape[:-1], -1)


@pytest.mark.parametrize("kind, encoding, missing", [
    ("layout", "raw", "zero"), ("layout", "gain", "zero"), ("layout", "embedding", "sentinel"),
    ("layout", "embedding", "zero"), ("layout", "raw", "layout"), ("tile", "raw", "zero"),
    ("tile", "gain", "zero")])
def test_the_first_layer_is_one_matrix_on_all_inputs_of_a_node(kind, encoding, missing):
  """Node features, opcode, own layout and configuration, concatenated node by node."""
  batch = LAYOUTS if kind == "layout" else TILES
  options = Options(
      op_embed_dim=3, encoding=encoding, encoding_scale=0.2, value_embed_dim=2, missing=missing,
      node_layout=True, feature_width=4, pre_widths=(5,))
  module = inputs.Inputs(options, MATMUL, EXACT)
  apply = lambda params: module.apply({"params": params}, nodes.Slates.of(batch))
  params = draw(module, slates=nodes.Slates.of(batch))
  x, walks = quick_jit(apply)(params)
  assert walks is None and isinstance(x, nodes.SplitNodes) == (kind == "layout")
  found = np.asarray(nodes.everywhere(x, nodes.Slates.of(batch)))
  feat = np.asarray(batch.graph.nodes["feat"])
  layout = feat[:, -6:]
  own = slow_values(layout, params.get("values", {}), encoding, 1) if (
      encoding == "embedding") else layout
  # No option reads the block before the layout here, so that it stays among the features.
  dense = params["features"]
  static = np.concatenate([
      feat[:, :-6] @ dense["kernel"] + dense["bias"],
      slow_opcodes(batch, params["opcodes"], 0, 0), own], axis=1)
  raw, configured = slow_configs(batch, missing)
  config = slow_values(raw, params.get("values", {}), encoding, 0.2)
  if kind == "layout" and missing == "zero":
    config[~configured] = 0
  config = np.nan_to_num(config)
  joined = np.concatenate([np.repeat(static[:, None], raw.shape[1], axis=1), config], axis=-1)
  kernel = params["join"]["JoinedDense_0"]
  expected = joined @ kernel["kernel"] + kernel["bias"]
  real = real_nodes(batch)
  np.testing.assert_allclose(found[:real], expected[:real], rtol=1e-4, atol=1e-4)


def slow_places(layout):
  """The place of each of the 6 dimensions in a layout, -1 for dimensions that it does not name."""
  return [max([k for k, named in enumerate(layout) if named == d], default=-1) for d in range(6)]


@pytest.mark.parametrize("has_layouts", [True, False])
def test_tokens_of_dimensions_pass_a_transformer_node_by_node(has_layouts):
  """Layouts are -1 for kernels without layouts (5th place)."""
  batch, width = TILES, 4
  slates = nodes.Slates.of(batch)
  blocks = inputs.split_blocks(np.asarray(batch.graph.nodes["feat"]), READS)
  module = inputs.DimensionEncoder(width, 1)
  layout = blocks["node_layout"] if has_layouts else None
  apply = lambda p: nodes.everywhere(module.apply(
      {"params": p}, blocks["dimension_tokens"], layout, nodes.Slates.of(batch)), slates)
  params = draw(module, blocks["dimension_tokens"], layout, slates=slates)
  found = np.asarray(quick_jit(apply)(params))
  raw, _ = slow_configs(batch, "layout")
  real = real_nodes(batch)
  for node in range(real):
    static = blocks["dimension_tokens"][node].reshape(6, 23)
    own = np.array([slow_places(blocks["node_layout"][node]) if has_layouts else [-1] * 6] * 3).T
    for config in range(raw.shape[1]):
      values, number = raw[node, config], np.arange(6)[:, None]
      bounds = np.log1p(np.maximum(values.reshape(3, 8)[:, :6].T, 0))
      token = np.concatenate([static, number, own, bounds], axis=1)
      linear = params["tokens"]
      token = np.maximum(token @ linear["kernel"] + linear["bias"], 0)
      expected = two_heads(token, params["layer_0"]).mean(axis=0)
      np.testing.assert_allclose(found[node, config], expected, rtol=2e-4, atol=2e-4)


def two_heads(tokens, params):
  """A transformer layer as `slow_encoder`, with two heads of half the width."""
  heads, width = params["heads"], tokens.shape[1]
  mixed = np.zeros_like(tokens)
  for head in range(2):
    part = lambda name, head=head: tokens @ heads[name]["kernel"][:, head] + heads[
        name]["bias"][head]
    logits = part("query") @ part("key").T / np.sqrt(width // 2)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    mixed += weights @ part("value") @ heads["out"]["kernel"][head]
  # The rest of the layer by `slow_encoder`, with a head that only adds its bias.
  none = {"query": {"kernel": np.zeros((width, 1, width)), "bias": np.zeros((1, width))}}
  none |= {"key": none["query"], "value": none["query"],
           "out": {"kernel": np.zeros((1, width, width)), "bias": heads["out"]["bias"]}}
  return slow_encoder(tokens + mixed, tokens, params | {"heads": none})


def test_equal_tokens_of_a_kernel_pass_the_encoder_once():
  count, rng = len(TILES.graph.nodes["opcode"]), np.random.default_rng(0)
  graph_of, kind = np.asarray(nodes.Slates.of(TILES).graph_of), rng.integers(2, size=count)
  _, first, which = np.unique(2 * graph_of + kind, return_index=True, return_inverse=True)
  columns, seen = rng.normal(size=(2, 3))[kind].astype(np.float32), []

  def encoder(columns, layout, slates):
    seen.append(len(columns))
    return (columns + slates.graph_of[:, None])[:, None]

  once, each = (inputs.once_each(encoder, columns, None, nodes.Slates.of(batch)) for batch in (
      TILES._replace(distinct=batching.DistinctNodes(first, which)), TILES._replace(distinct=None)))
  np.testing.assert_array_equal(once, each)
  assert seen == [len(first), count] and len(first) < count


def test_the_blocks_that_a_ranker_reads_have_the_widths_that_it_expects():
  graph = random_graphs.layout_graph(
      np.random.default_rng(0), nodes=5, edges=6, config_nodes=[1], configs=2)
  feat = np.random.default_rng(1).integers(0, 6, (5, 140)).astype(np.float32)
  graph = dataclasses.replace(graph, node_feat=feat)
  for name, width in inputs.READ_BLOCKS.items():
    assert feature_blocks.BLOCKS[name](graph).shape == (5, width)


@pytest.mark.parametrize("options, reads", [
    (dict(), ()), (dict(node_layout=True), ("node_layout",)),
    (dict(position_width=3), ("random_walk",)),
    (dict(dimension_encoder="transformer"), ("dimension_tokens",)),
    (dict(position_width=3, node_layout=True, dimension_encoder="transformer"),
     ("random_walk", "dimension_tokens", "node_layout"))])
def test_blocks_are_read_from_the_end(options, reads):
  assert inputs.read_blocks(Options(**options)) == reads
  width = 7 + sum(inputs.READ_BLOCKS[name] for name in reads)
  found = inputs.split_blocks(np.arange(width, dtype=np.float32)[None], reads)
  ends = np.concatenate([found[name][0] for name in ("", *reads)])
  np.testing.assert_array_equal(ends, np.arange(width))
  assert found[""].shape == (1, 7)
