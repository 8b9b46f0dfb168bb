"""Layers of the ranker of many options against loops over nodes and edges in NumPy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import system_cases

from tpugraphs_jax.nn.layers import Dense
from tpugraphs_jax.nn.split_nodes import SplitNodes, nodes_within
from tpugraphs_jax.rankers.composed import attention, blocks, convolutions, drop_edge, nodes, norms
from tpugraphs_jax.rankers.composed import readouts
from tpugraphs_jax.rankers.composed.options import EDGE_DIRECTIONS, Options

CONFIGS, WIDTH = system_cases.CONFIGS, 4
BATCH = system_cases.layout_batch()
GRAPH = BATCH.graph
NODES = len(BATCH.block_mask)
OF_GRAPH = np.repeat(np.arange(len(GRAPH.n_node)), GRAPH.n_node)
REAL = OF_GRAPH < len(BATCH.target)
EDGES = int(GRAPH.n_edge[:-1].sum())
EXACT = functools.partial(Dense, precision="highest")


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def split_and_full(seed=0, width=WIDTH):
  """Features in both forms: random where configurations reach, alike elsewhere."""
  shared, hop = random(NODES, 1, width, seed=seed), 0
  rows = np.asarray(nodes_within(BATCH.by_hop, hop))
  varying = random(len(rows), CONFIGS, width, seed=seed + 1)
  full = np.repeat(shared, CONFIGS, axis=1)
  full[rows[rows < NODES]] = varying[rows < NODES]
  return SplitNodes(jnp.asarray(shared), jnp.asarray(varying), hop), full


def run(module, *inputs, **kwargs):
  """Parameters and the result of a module on both forms of its first input."""
  split, full = inputs[0]
  slates = nodes.Slates.of(BATCH)
  shapes = jax.eval_shape(
      lambda x: module.init(jax.random.key(0), x, *inputs[1:], slates, **kwargs), full)
  rng = np.random.default_rng(7)
  params = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32),
                        shapes.get("params", {}))

  @functools.partial(jax.jit, compiler_options=system_cases.QUICK)
  def both(params, split, full):
    results = (module.apply({"params": params}, x, *inputs[1:], slates, **kwargs)
               for x in (split, full))
    return [nodes.everywhere(x, slates) if isinstance(x, SplitNodes) else x for x in results]

  from_split, from_full = both(params, split, full)
  return params, from_split, from_full


def check(results, expected, tolerance=2e-5):
  """Both forms give the expected `[N, C, F]` on real nodes."""
  for found in results:
    np.testing.assert_allclose(found[REAL], expected[REAL], rtol=tolerance, atol=tolerance)


def neighbours(direction):
  """For every node the nodes that it receives from, as often as there are edges."""
  heard = [[] for _ in range(NODES)]
  for consumer, producer in zip(GRAPH.receivers[:EDGES], GRAPH.senders[:EDGES]):
    if direction in ("operands", "both"):
      heard[consumer].append(producer)
    if direction in ("users", "both"):
      heard[producer].append(consumer)
  return heard


def dense(x, params):
  return x @ params["kernel"] + params.get("bias", 0)


def slow_sage(x, params, direction, options):
  sent = dense(x, params["neighbours"])
  mean = np.stack([np.mean([sent[u] for u in heard], axis=0) if heard else np.zeros_like(sent[0])
                   for heard in neighbours(direction)])
  return mean + (dense(x, params["self"]) if "self" in params else 0)


def slow_propagate(x, direction):
  heard = neighbours(direction)
  root = [np.sqrt(1 + len(h)) for h in heard]
  return np.stack([sum((x[u] / root[u] for u in h), x[v] / root[v]) / root[v]
                   for v, h in enumerate(heard)])


def slow_gcn(x, params, direction, options):
  return slow_propagate(dense(x, params["dense"]), direction) + params["bias"][0]


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


SLOW = {"sage": slow_sage, "gcn": slow_gcn, "appnp": slow_appnp, "gin": slow_gin,
        "gatv2": slow_gatv2}


@pytest.mark.parametrize("conv, direction, merge", [
    ("sage", "bidirectional", "sum"), ("sage", "forward", "sum"),
    ("sage", "bidirectional", "concat"),
    ("gcn", "symmetric", "sum"), ("appnp", "backward", "sum"), ("gin", "forward", "sum"),
    ("gatv2", "backward", "sum"), ("gatv2", "symmetric", "sum"), ("none", "forward", "sum")])
def test_convolutions_equal_loops_over_edges(conv, direction, merge):
  options = Options(conv=conv, edge_direction=direction, direction_merge=merge, appnp_steps=2,
                    heads=2)
  inputs = split_and_full()
  params, *found = run(convolutions.Convolution(options, WIDTH, EXACT), inputs)
  if conv == "none":
    check(found, dense(inputs[1], params["dense"]))
    return
  parts = [SLOW[conv](inputs[1], params[side], side, options)
           for side in EDGE_DIRECTIONS[direction]]
  check(found, np.concatenate(parts, axis=-1) if merge == "concat" else sum(parts))


def each_graph(function):
  """A result `[N, C, F]` made graph by graph from the numbers of its nodes."""
  result = np.zeros((NODES, CONFIGS, WIDTH), np.float32)
  for graph in range(len(BATCH.target)):
    members = np.flatnonzero(OF_GRAPH == graph)
    if len(members):
      result[members] = function(members)
  return result


def slow_normal(x, axis, eps=1e-5):
  return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + eps)


def real_configs(node):
  return np.flatnonzero(BATCH.config_mask[OF_GRAPH[node]])


@pytest.mark.parametrize("kind", ["instance", "graph", "layer", "configuration", "none"])
def test_norms_equal_numpy(kind):
  inputs = split_and_full()
  params, *found = run(norms.Norm(kind), inputs)
  x = 1.0 * inputs[1]
  if kind == "instance":
    expected = each_graph(lambda members: slow_normal(x[members].astype(np.float64), 0))
  elif kind == "graph":
    def of_graph(members):
      part = x[members] - params["centre"][0] * x[members].mean(axis=0)
      return params["scale"] * part / np.sqrt((part**2).mean(axis=0) + 1e-5) + params["bias"]
    expected = each_graph(of_graph)
  elif kind == "layer":
    expected = slow_normal(x, -1, 1e-6) * params["layer"]["scale"] + params["layer"]["bias"]
  elif kind == "configuration":
    expected = np.zeros_like(x)
    for node in np.flatnonzero(REAL):
      expected[node, real_configs(node)] = slow_normal(x[node, real_configs(node)], 0)
    # What stands in configurations that are not there has no meaning.
    found = [np.where(np.asarray(expected) != 0, f, 0) for f in found]
  else:
    expected = x
  # Where there is no deviation rounding is divided by the root of 1e-5.
  check(found, expected, 5e-4 if kind in ("instance", "graph", "configuration") else 2e-5)


def test_an_instance_norm_far_from_zero_keeps_its_digits():
  split, full = split_and_full()
  moved = jax.tree.map(lambda x: x + 1000, split), full + 1000
  _, *found = run(norms.Norm("instance"), moved)
  several = np.isin(OF_GRAPH, [0, 2, 3])[:, None, None]
  expected = each_graph(lambda members: slow_normal(moved[1][members].astype(np.float64), 0))
  for result in found:
    np.testing.assert_allclose(
        np.where(several, result, 0), np.where(several, expected, 0), atol=2e-3)


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


class Channels(blocks.nn.Module):
  """The gate with the arguments of the others."""

  @blocks.nn.compact
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


class WithResidual(blocks.nn.Module):
  """The residual of a layer that doubles its input."""

  kind: str

  @blocks.nn.compact
  def __call__(self, x, slates):
    first = jax.tree.map(lambda v: v + 1, x)
    return blocks.Residual(self.kind, EXACT, name="residual")(
        x, jax.tree.map(lambda v: 2 * v, x), first, slates)


@pytest.mark.parametrize("kind", ["none", "identity", "initial", "gated"])
def test_residuals(kind):
  inputs = split_and_full()
  params, *found = run(WithResidual(kind), inputs)
  x = inputs[1]
  if kind == "gated":
    gate = 1 / (1 + np.exp(-dense(np.concatenate([x, 2 * x], -1), params["residual"]["gate"])))
  expected = {"none": lambda: 2 * x, "identity": lambda: 3 * x, "initial": lambda: 3 * x + 1,
              "gated": lambda: gate * 2 * x + (1 - gate) * x}[kind]()
  check(found, expected)


def pooled(found, expected, tolerance=2e-5):
  real = np.arange(len(BATCH.target)) < len(system_cases.raw_layouts())
  for result in found:
    np.testing.assert_allclose(
        np.asarray(result)[real], expected[real], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options, expected", [
    (dict(pooling=("mean", "max")), lambda x: np.concatenate([x.mean(0), x.max(0)], -1)),
    (dict(pooling=("mean", "max"), pooling_merge="sum"), lambda x: x.mean(0) + x.max(0)),
    (dict(pooling=("sum",), readout_norm="l2"), lambda x: x.sum(0) / np.linalg.norm(
        x.sum(0), axis=-1, keepdims=True)),
])
def test_poolings_equal_numpy(options, expected):
  inputs = split_and_full()
  _, *found = run_readout(Options(**options), inputs)
  pooled(found, np.stack([expected(inputs[1][OF_GRAPH == g]) if (OF_GRAPH == g).any()
                          else np.zeros_like(found[0][0]) for g in range(len(BATCH.target))]))


def run_readout(options, inputs):
  return run(readouts.Readout(options, EXACT), inputs)


def per_graph(function, width):
  result = np.zeros((len(BATCH.target), CONFIGS, width))
  for graph in range(len(BATCH.target)):
    members = np.flatnonzero(OF_GRAPH == graph)
    result[graph] = function(members) if len(members) else 0
  return result


def test_attention_pooling_is_a_softmax_over_the_nodes_of_a_graph():
  inputs = split_and_full()
  params, *found = run_readout(Options(pooling=("attention",)), inputs)
  logit = dense(inputs[1], params["attention"]["logit"])

  def of_graph(members):
    power = np.exp(logit[members])
    return (power / power.sum(axis=0) * inputs[1][members]).sum(axis=0)

  pooled(found, per_graph(of_graph, WIDTH))


def test_scalars_of_nodes_are_summed_as_they_are():
  inputs = split_and_full()
  params, *found = run_readout(Options(readout="node_scalar_sum"), inputs)
  scalar = dense(inputs[1], params["scalar"])
  pooled(found, per_graph(lambda members: scalar[members].sum(axis=0), 1))


def test_an_lstm_begins_anew_with_every_graph():
  inputs = split_and_full()
  params, *found = run_readout(Options(readout="lstm"), inputs)
  cell = params["lstm"]["cell"]["lstm"]
  sigmoid = lambda x: 1 / (1 + np.exp(-x))

  def of_graph(members):
    state = memory = np.zeros((CONFIGS, WIDTH))
    for node in members:
      gate = {name: inputs[1][node] @ cell[f"i{name}"]["kernel"] + dense(state, cell[f"h{name}"])
              for name in "ifgo"}
      memory = sigmoid(gate["f"]) * memory + sigmoid(gate["i"]) * np.tanh(gate["g"])
      state = sigmoid(gate["o"]) * np.tanh(memory)
    return state

  pooled(found, per_graph(of_graph, WIDTH))


def slow_layer_norm(x, params):
  return slow_normal(x, -1, 1e-6) * params["scale"] + params["bias"]


def slow_encoder(x, to, params):
  """A transformer layer with one head on tokens `x [L, F]` that attend to `to [M, F]`."""
  heads = params["heads"]
  part = lambda name, tokens: tokens @ heads[name]["kernel"][:, 0] + heads[name]["bias"][0]
  logits = part("query", x) @ part("key", to).T / np.sqrt(x.shape[1])
  weights = np.exp(logits - logits.max(axis=1, keepdims=True))
  mixed = weights / weights.sum(axis=1, keepdims=True) @ part("value", to)
  x = slow_layer_norm(x + mixed @ heads["out"]["kernel"][0] + heads["out"]["bias"],
                      params["norm_0"])
  hidden = np.maximum(dense(x, params["hidden"]), 0)
  return slow_layer_norm(x + dense(hidden, params["out"]), params["norm_1"])


def test_a_transformer_reads_each_graph_alone():
  inputs = split_and_full()
  params, *found = run_readout(Options(readout="transformer", pooling=("mean",)), inputs)

  def of_graph(members):
    return np.stack([slow_encoder(tokens, tokens, params["transformer_0"]).mean(axis=0)
                     for tokens in np.swapaxes(inputs[1][members], 0, 1)])

  pooled(found, per_graph(of_graph, WIDTH), 2e-4)


def test_dropout_leaves_out_the_same_features_of_every_configuration():
  split, full = split_and_full()
  slates, module = nodes.Slates.of(BATCH), blocks.Dropout(0.5)
  ones = jax.tree.map(np.ones_like, split)
  kept = [nodes.everywhere(module.apply({}, x, slates, train=True, rngs={
      "dropout": jax.random.key(0)}), slates) for x in (ones, np.ones_like(full))]
  np.testing.assert_array_equal(*kept)
  assert set(np.unique(kept[0])) == {0, 2} and (kept[0] == kept[0][:, :1]).all()
  assert 0.3 < np.mean(np.asarray(kept[0]) == 0) < 0.7
  assert module.apply({}, full, slates, train=False) is full


def table_edges(adjacency, node_of):
  """Edges (consumer, producer) of both halves of an adjacency, each sorted."""
  halves = []
  for table, consumers in ((adjacency.operands, True), (adjacency.users, False)):
    index, receivers = np.asarray(table.index), np.arange(len(table.index))
    more, which = np.asarray(table.overflow_index), np.asarray(table.overflow_receiver)
    pairs = [(r, s) for rows, lines in ((receivers, index), (which, more))
             for r, line in zip(rows, lines) for s in line if s < len(node_of)]
    ends = [(int(node_of[r]), int(node_of[s])) for r, s in pairs]
    halves.append(sorted(ends if consumers else [end[::-1] for end in ends]))
  return halves


def test_every_table_drops_the_same_edges():
  slates = nodes.Slates.of(BATCH)
  thin = drop_edge.drop_edges(slates, jax.random.key(3), 0.9)
  whole = sorted(zip(GRAPH.receivers[:EDGES].tolist(), GRAPH.senders[:EDGES].tolist()))
  listed = sorted((int(c), int(p)) for c, p, kept in zip(
      GRAPH.receivers, GRAPH.senders, np.asarray(thin.edge_mask)) if kept)
  first, second = table_edges(thin.adjacency, np.arange(NODES))
  assert first == second == listed and 0 < len(listed) < EDGES
  assert set(listed) <= set(whole)
  # All occurrences of an edge go together.
  assert all(listed.count(edge) in (0, whole.count(edge)) for edge in set(whole))
  node_of = np.concatenate(BATCH.by_hop.nodes)
  among, again = table_edges(thin.by_hop.adjacency, node_of)
  before, _ = table_edges(slates.by_hop.adjacency, node_of)
  assert among == again == [edge for edge in before if edge in set(listed)]


def test_edges_go_at_a_rate_that_is_drawn_from_zero_to_the_largest():
  consumers, producers = np.divmod(np.arange(10_000, dtype=np.int32), 100)
  rates = []
  for number in range(40):
    keep = drop_edge.keep_function(jax.random.key(number), 0.2, 100)
    rates.append(1 - np.mean(keep(consumers, producers)))
  assert max(rates) < 0.23 and min(rates) < 0.03 and 0.07 < np.mean(rates) < 0.13
  assert not np.array_equal(keep(consumers, producers), keep(producers, consumers))
  nothing = drop_edge.keep_function(jax.random.key(0), 0.0, 100)
  assert nothing(consumers, producers).all()


@pytest.mark.parametrize("kind, expected", [
    ("none", lambda x: x), ("relu", lambda x: np.maximum(x, 0)), ("tanh", np.tanh),
    ("leaky_relu", lambda x: np.where(x > 0, x, 0.01 * x)),
    ("silu", lambda x: x / (1 + np.exp(-x))), ("elu", lambda x: np.where(x > 0, x, np.expm1(x))),
    ("gelu", lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    ("prelu", lambda x: np.where(x > 0, x, 0.25 * x))])
def test_activations(kind, expected):
  x = random(3, 2, 4)
  module = blocks.Activation(kind)
  found = module.apply(module.init(jax.random.key(0), x), x)
  np.testing.assert_allclose(found, expected(x), rtol=1e-5, atol=1e-6)


def test_options_are_read_back_from_lists():
  options = Options(widths=[3, 4], pooling=["max"])
  assert options == dataclasses.replace(options, widths=(3, 4), pooling=("max",))
