"""Attention between nodes, channels and configurations against NumPy."""

from __future__ import annotations

from flax import linen as nn
import numpy as np
import pytest
from system_cases import (
    BATCH, CONFIGS, EXACT, NODES, REAL, WIDTH, check, dense, each_graph, real_configs, run,
    split_and_full)

from tpugraphs_jax.rankers.composed import attention, nodes
from tpugraphs_jax.rankers.composed.options import Options


def elu_and_one(x):
  return np.where(x > 0, x + 1, np.exp(x))


def unit_and_one(x):
  unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
  return np.concatenate([np.ones_like(x[..., :1]), unit], axis=-1)


@pytest.mark.parametrize("kind, normalize, heads, keys", [
    ("linear", True, 2, 0), ("linear", False, 1, 6), ("difformer", False, 2, 0)])
def test_attention_by_kernels_equals_a_sum_over_pairs(kind, normalize, heads, keys):
  options = Options(global_attention=kind, heads=heads, attention_normalize=normalize,
                    attention_keys=keys)
  inputs = split_and_full()
  params, *found = run(attention.GlobalAttention(options, WIDTH, EXACT), inputs)
  split_heads = lambda x: x.reshape(NODES, CONFIGS, heads, -1)
  query, key, value = (split_heads(dense(inputs[1], params[name]))
                       for name in ("query", "key", "value"))
  kernel = elu_and_one if kind == "linear" else unit_and_one

  def of_graph(members):
    result = np.zeros((len(members), CONFIGS, heads, WIDTH // heads))
    for i, v in enumerate(members):
      for config in range(CONFIGS):
        for head in range(heads):
          weights = [kernel(query[v, config, head]) @ kernel(key[u, config, head]) for u in members]
          total = sum(w * value[u, config, head] for w, u in zip(weights, members))
          result[i, config, head] = total / (1 if kind == "linear" and not normalize
                                             else sum(weights))
    return result.reshape(len(members), CONFIGS, WIDTH)

  check(found, each_graph(of_graph), 1e-4)


def test_softmax_attention_stays_in_its_graph():
  inputs = split_and_full()
  options = Options(global_attention="softmax", heads=1)
  params, *found = run(attention.GlobalAttention(options, WIDTH, EXACT), inputs)
  heads = params["softmax"]["heads"]
  part = lambda name: np.einsum("ncf,fhd->nchd", inputs[1], heads[name]["kernel"])[:, :, 0] + heads[
      name]["bias"][0]
  query, key, value = part("query"), part("key"), part("value")

  def of_graph(members):
    result = np.zeros((len(members), CONFIGS, WIDTH))
    for config in range(CONFIGS):
      logits = query[members, config] @ key[members, config].T / np.sqrt(WIDTH)
      weights = np.exp(logits - logits.max(axis=1, keepdims=True))
      mixed = weights / weights.sum(axis=1, keepdims=True) @ value[members, config]
      result[:, config] = mixed @ heads["out"]["kernel"][0] + heads["out"]["bias"]
    return result

  check(found, each_graph(of_graph), 1e-4)


def test_the_gate_over_configurations_is_a_softmax_over_real_ones():
  inputs = split_and_full()
  params, *found = run(attention.ConfigGate(), inputs)
  x, gated = inputs[1], np.zeros_like(inputs[1])
  for node in np.flatnonzero(REAL):
    chosen = real_configs(node)
    logit = x[node, chosen] / params["temperature"]
    power = np.exp(logit - logit.max(axis=0))
    gated[node, chosen] = x[node, chosen] * power / power.sum(axis=0)
  there = np.asarray(nodes.Slates.of(BATCH).node_configs)[..., None]
  for result in found:
    assert result.shape[-1] == 2 * WIDTH
    np.testing.assert_allclose(np.where(there, result[..., :WIDTH], 0), np.where(there, x, 0))
    np.testing.assert_allclose(
        np.where(there, result[..., WIDTH:], 0), gated * there, rtol=2e-5, atol=1e-6)


class Channels(nn.Module):
  """The gate of channels, called with slates as the other modules are."""

  @nn.compact
  def __call__(self, x, slates):
    del slates
    return attention.ChannelGate(2, EXACT, name="gate")(x)


def test_the_gate_of_channels_is_a_bottleneck():
  inputs = split_and_full()
  params, *found = run(Channels(), inputs)
  gate = params["gate"]
  hidden = np.maximum(dense(inputs[1], gate["squeeze"]), 0)
  assert hidden.shape[-1] == WIDTH // 2
  check(found, inputs[1] / (1 + np.exp(-dense(hidden, gate["excite"]))))
