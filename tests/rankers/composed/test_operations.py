"""Convolutions, norms, activations and dropout against loops in NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from system_cases import (
    BATCH, EXACT, OF_GRAPH, WIDTH, check, dense, each_graph, neighbours, random, run,
    slow_layer_norm, slow_normal, slow_sage, split_and_full)

from tpugraphs_jax.rankers.composed import nodes, operations
from tpugraphs_jax.rankers.composed.options import EDGE_DIRECTIONS, Options


def slow_propagate(x, direction):
  heard = neighbours(direction)
  root = [np.sqrt(1 + len(h)) for h in heard]
  return np.stack([sum((x[u] / root[u] for u in h), x[v] / root[v]) / root[v]
                   for v, h in enumerate(heard)])


def slow_appnp(x, params, direction, options):
  start = z = dense(x, params["dense"])
  for _ in range(options.appnp_steps):
    z = (1 - options.appnp_restart) * slow_propagate(z, direction) + options.appnp_restart * start
  return z


def slow_gin(x, params, direction, options):
  """Without a norm; every linear layer is followed by the activation, ReLU here."""
  total = np.stack([x[v] + sum((x[u] for u in h), 0 * x[v])
                    for v, h in enumerate(neighbours(direction))])
  for number in range(2):
    total = np.maximum(dense(total, params[f"dense_{number}"]), 0)
  return total


def slow_gatv2(x, params, direction, options):
  sent, own = dense(x, params["senders"]), dense(x, params["receivers"])
  result, size = np.zeros_like(sent), WIDTH // options.heads
  for v, heard in enumerate(neighbours(direction)):
    heard = [*heard, v]
    for config in range(x.shape[1]):
      for head in range(options.heads):
        part = slice(head * size, (head + 1) * size)
        hidden = [sent[u, config, part] + own[v, config, part] for u in heard]
        logit = [np.where(h > 0, h, 0.2 * h) @ params["attention"][head] for h in hidden]
        weight = np.exp(logit - np.max(logit)) / np.exp(logit - np.max(logit)).sum()
        result[v, config, part] = sum(w * sent[u, config, part] for w, u in zip(weight, heard))
  return result + params["bias"][0]


SLOW = {"sage": slow_sage, "appnp": slow_appnp, "gin": slow_gin, "gatv2": slow_gatv2}


@pytest.mark.parametrize("conv, direction, merge", [
    ("sage", "bidirectional", "sum"), ("sage", "forward", "sum"),
    ("sage", "bidirectional", "concat"),
    ("sage", "symmetric", "sum"), ("appnp", "backward", "sum"), ("gin", "forward", "sum"),
    ("gatv2", "backward", "sum"), ("gatv2", "symmetric", "sum")])
def test_convolutions_equal_loops_over_edges(conv, direction, merge):
  options = Options(conv=conv, edge_direction=direction, direction_merge=merge, appnp_steps=2,
                    heads=2)
  inputs = split_and_full()
  params, *found = run(operations.Convolution(options, WIDTH, EXACT), inputs)
  parts = [SLOW[conv](inputs[1], params[side], side, options)
           for side in EDGE_DIRECTIONS[direction]]
  check(found, np.concatenate(parts, axis=-1) if merge == "concat" else sum(parts))


@pytest.mark.parametrize("kind", ["instance", "layer", "none"])
def test_norms_equal_numpy(kind):
  inputs = split_and_full()
  params, *found = run(operations.Norm(kind), inputs)
  expected = x = 1.0 * inputs[1]
  if kind == "instance":
    expected = each_graph(lambda members: slow_normal(x[members].astype(np.float64), 0))
  elif kind == "layer":
    expected = slow_layer_norm(x, params["layer"])
  # Without deviation, rounding is divided by the root of 1e-5.
  check(found, expected, 5e-4 if kind == "instance" else 2e-5)


def test_an_instance_norm_far_from_zero_keeps_its_digits():
  split, full = split_and_full()
  moved = jax.tree.map(lambda x: x + 1000, split), full + 1000
  _, *found = run(operations.Norm("instance"), moved)
  several = np.isin(OF_GRAPH, [0, 2, 3])[:, None, None]
  expected = each_graph(lambda members: slow_normal(moved[1][members].astype(np.float64), 0))
  for result in found:
    np.testing.assert_allclose(
        np.where(several, result, 0), np.where(several, expected, 0), atol=2e-3)


def test_dropout_leaves_out_the_same_features_of_every_configuration():
  split, full = split_and_full()
  slates, module = nodes.Slates.of(BATCH), operations.Dropout(0.5)
  ones = jax.tree.map(np.ones_like, split)
  kept = [nodes.everywhere(module.apply({}, x, slates, train=True, rngs={
      "dropout": jax.random.key(0)}), slates) for x in (ones, np.ones_like(full))]
  np.testing.assert_array_equal(*kept)
  assert set(np.unique(kept[0])) == {0, 2} and (kept[0] == kept[0][:, :1]).all()
  assert 0.3 < np.mean(np.asarray(kept[0]) == 0) < 0.7
  assert module.apply({}, full, slates, train=False) is full


@pytest.mark.parametrize("kind, expected", [
    ("none", lambda x: x), ("relu", lambda x: np.maximum(x, 0)), ("tanh", np.tanh),
    ("leaky_relu", lambda x: np.where(x > 0, x, 0.01 * x)),
    ("silu", lambda x: x / (1 + np.exp(-x))), ("elu", lambda x: np.where(x > 0, x, np.expm1(x))),
    ("gelu", lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    ("prelu", lambda x: np.where(x > 0, x, 0.25 * x))])
def test_activations_equal_their_formulas(kind, expected):
  x = random(3, 2, 4)
  module = operations.Activation(kind)
  found = module.apply(module.init(jax.random.key(0), x), x)
  np.testing.assert_allclose(found, expected(x), rtol=1e-5, atol=1e-6)
