"""A layer and the stack of layers against NumPy, and where features are dropped."""

from __future__ import annotations

from flax import linen as nn
import jax
import numpy as np
import pytest
from composed_cases import (
    BATCH, CONFIGS, EXACT, NODES, OF_GRAPH, REAL, WIDTH, dense, elu, run, slow_layer_norm,
    slow_sage, split_and_full)

from tpugraphs_jax.rankers.composed import encoder, nodes
from tpugraphs_jax.rankers.composed.encoder import Encoder
from tpugraphs_jax.rankers.composed.options import Options


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
@pytest.mark.parametrize("residual", ["identity", "gated"])
def test_the_steps_of_a_layer_come_in_the_order_of_its_options(
    norm_position, residual_position, residual):
  options = Options(edge_direction="forward", activation="elu", norm="layer",
                    norm_position=norm_position, residual=residual,
                    residual_position=residual_position)
  inputs = split_and_full()
  params, *found = run(OneLayer(options), inputs)
  layer, x = params["layer"], inputs[1]
  norm = lambda v: slow_layer_norm(v, layer["norm"]["layer"])

  def add(y):
    if residual == "identity":
      return x + y
    gate = dense(np.concatenate([x, y], axis=-1), layer["residual"]["gate"])
    return (y - x) / (1 + np.exp(-gate)) + x

  y = norm(x) if norm_position == "pre" else x
  y = slow_sage(y, layer["convolution"]["operands"], "operands", options)
  y = add(y) if residual_position == "before_activation" else y
  y = norm(y) if norm_position == "post" else y
  y = elu(y)
  y = norm(y) if norm_position == "after_activation" else y
  y = add(y) if residual_position == "after_activation" else y
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
  """Every layer and the readout see the positions; the states of nodes never change them."""
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


@pytest.mark.parametrize("places", [(), ("first",), ("linear",), ("layers",)])
def test_dropout_is_where_the_options_say(places):
  """With a rate near 1 a layer with dropout returns zeros."""
  options = Options(dropout=0.999999, dropout_in=places, pre_widths=(WIDTH, WIDTH), widths=(WIDTH,),
                    edge_direction="forward", activation="none")
  x, slates = split_and_full()[1], nodes.Slates.of(BATCH)
  module = Encoder(options, EXACT)
  params = jax.tree.map(  # biases are nonzero, so that layers after a dropped one are not zero
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
  assert zero == [first, "linear" in places, "layers" in places]
  assert not any(not np.any(value[REAL]) for value in layers(False))
