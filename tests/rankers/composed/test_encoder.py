"""A layer and the stack of layers against NumPy, and where features are dropped."""

from __future__ import annotations

from flax import linen as nn
import jax
import numpy as np
import pytest
from system_cases import (
    BATCH, CONFIGS, EXACT, NODES, OF_GRAPH, REAL, WIDTH, check, dense, each_graph, elu, neighbours,
    run, slow_layer_norm, slow_normal, slow_sage, split_and_full)

from tpugraphs_jax.rankers.composed import encoder, nodes
from tpugraphs_jax.rankers.composed.encoder import Encoder
from tpugraphs_jax.rankers.composed.options import Options


class WithResidual(nn.Module):
  """The residual of a layer that doubles its input."""

  kind: str

  @nn.compact
  def __call__(self, x, slates):
    return encoder.Residual(self.kind, EXACT, name="residual")(
        x, jax.tree.map(lambda v: 2 * v, x), slates)


@pytest.mark.parametrize("kind", ["none", "identity", "gated"])
def test_residuals(kind):
  inputs = split_and_full()
  params, *found = run(WithResidual(kind), inputs)
  x = inputs[1]
  if kind == "gated":
    gate = 1 / (1 + np.exp(-dense(np.concatenate([x, 2 * x], -1), params["residual"]["gate"])))
  expected = {"none": lambda: 2 * x, "identity": lambda: 3 * x,
              "gated": lambda: gate * 2 * x + (1 - gate) * x}[kind]()
  check(found, expected)


class OneLayer(nn.Module):
  """A layer of the encoder without positions."""

  options: Options
  attends: bool = False

  @nn.compact
  def __call__(self, x, slates):
    return encoder.Layer(self.options, WIDTH, EXACT, self.attends, name="layer")(
        x, None, slates, train=False)


@pytest.mark.parametrize("norm_position", ["pre", "post", "after_activation"])
@pytest.mark.parametrize("residual_position", ["before_activation", "after_activation"])
def test_the_steps_of_a_layer_come_in_the_order_of_its_options(norm_position, residual_position):
  options = Options(edge_direction="forward", activation="elu", norm="layer",
                    norm_position=norm_position, residual="identity",
                    residual_position=residual_position)
  inputs = split_and_full()
  params, *found = run(OneLayer(options), inputs)
  layer, x = params["layer"], inputs[1]
  norm = lambda v: slow_layer_norm(v, layer["norm"]["layer"])
  y = norm(x) if norm_position == "pre" else x
  y = slow_sage(y, layer["convolution"]["operands"], "operands", options)
  y = y + x if residual_position == "before_activation" else y
  y = norm(y) if norm_position == "post" else y
  y = elu(y)
  y = norm(y) if norm_position == "after_activation" else y
  y = y + x if residual_position == "after_activation" else y
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


@pytest.mark.parametrize("places", [(), ("first",), ("linear",), ("layers",)])
def test_dropout_is_where_the_options_say(places):
  """With a rate near 1 nearly nothing is left behind a layer that drops."""
  options = Options(dropout=0.999999, dropout_in=places, pre_widths=(WIDTH, WIDTH), widths=(WIDTH,),
                    edge_direction="forward", activation="none")
  x, slates = split_and_full()[1], nodes.Slates.of(BATCH)
  module = Encoder(options, EXACT)
  params = jax.tree.map(  # biases too: what follows a layer that gives zeros is not zero
      lambda leaf: leaf + 0.1,
      module.init(jax.random.key(0), x, None, slates, train=False)["params"])
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
