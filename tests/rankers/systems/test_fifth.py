"""The 5th place against numbers of its public code."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from tests.support import parts, random_graphs, winners
from tpugraphs_jax.columns import opcode_ids
from tpugraphs_jax.data import batching
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems import fifth

RECORDS = ("fifth/layout", "fifth/tile")


class Case(winners.Case):
  """A record beside a run of the preset on its graphs."""

  def __init__(self, name, root):
    self.record = winners.Record(name)
    self.is_tile = "expected/tile_feat" in self.record
    self.weights = self.record.under("weights")
    self.layers = sum(
      key.startswith("convs.") and key.endswith("lin_l.bias") for key in self.weights
    )
    changes = {
      "model.op_embed_dim": self.weights["opcode_embed.weight"].shape[1],
      "model.width": len(self.weights["pre_linear.0.bias"]),
      "model.num_layers": self.layers,
    }
    if self.is_tile:
      changes |= {
        "model.token_width": len(self.weights["transformer.mlp.0.bias"]),
        "model.token_layers": sum(key.endswith("in_proj_bias") for key in self.weights),
      }
    self.graphs = sorted(self.record.names("input"))
    self.experiment = winners.run_of(
      "tile.py:preset=fifth" if self.is_tile else "layout.py:xla-default,preset=fifth",
      {"train": {name: self.record.under(f"input/{name}") for name in self.graphs}},
      root,
      **changes,
    )
    self.loaded = sorted(self.experiment.data.load("train"), key=lambda graph: graph.name)
    self.prepared = self.experiment.prepare(self.loaded)

  @functools.cached_property
  def ids(self) -> list[np.ndarray]:
    """Our numbers of the configurations in each slate."""
    if not self.is_tile:
      return [np.arange(len(slate)) for slate in self.record["expected/y"]]
    found = []
    for graph, y, tiles in zip(
      self.loaded, self.record["expected/y"], self.record["expected/tile_feat"]
    ):
      configs = graph.configs
      target = self.experiment.data.targets(configs, np.arange(len(configs)))
      bounds = np.log1p(configs.config_feat.reshape(len(configs), 3, 8)[:, :, :6])
      near = (np.abs(target[None] - y[:, None]) <= 1e-6 * y.max()) & (
        np.abs(bounds[None] - tiles[:, None]).max(axis=(2, 3)) < 1e-5
      )
      assert near.any(axis=1).all()
      found.append(near.argmax(axis=1))
    return found

  @functools.cached_property
  def batch(self):
    return winners.batch_of(self.experiment, self.prepared, self.ids)

  @functools.cached_property
  def params(self):
    return winners.tree(self.ours(self.weights))

  def ours(self, w) -> dict[str, np.ndarray]:
    """Arrays under public names in the form and under the paths of our parameters."""
    first = w["pre_linear.0.weight"].T
    columns, embedded = self.record["expected/x"].shape[1], w["opcode_embed.weight"].shape[1]
    column, opcode, rest = np.split(first, [columns, columns + embedded])
    tokens, layout, _ = np.split(rest, [6 * 23, 6 * 23 + 18])  # the last 18 are of tiles
    first = [column, opcode, rest] if self.is_tile else [column, tokens, opcode, layout]
    ours = {
      "opcodes/table": w["opcode_embed.weight"],
      "first/kernel": np.concatenate(first),
      "first/bias": w["pre_linear.0.bias"],
    } | winners.linear(w, {"last": "head"})
    for number in range(self.layers):
      for theirs, direction in (("convs", "users"), ("rev_convs", "operands")):
        ours |= winners.sage(w, f"{direction}_{number}", f"{theirs}.{number}", direction)
    return ours | (self.token_encoder(w) if self.is_tile else {})

  def token_encoder(self, w) -> dict[str, np.ndarray]:
    kernel = w["transformer.mlp.0.weight"].T  # token 23, own layouts 3, tile 3, number
    static, tile, number = np.split(kernel, [26, 29])
    ours = {
      "tokens/tokens/kernel": np.concatenate([static, number, tile]),
      "tokens/tokens/bias": w["transformer.mlp.0.bias"],
    }
    for layer in range(self.experiment.config.model.token_layers):
      theirs, name = f"transformer.transformer.layers.{layer}", f"tokens/layer_{layer}"
      for part, last in (("kernel", "weight"), ("bias", "bias")):
        packed = np.split(w[f"{theirs}.self_attn.in_proj_{last}"], 3)
        ours |= {
          f"{name}/heads/{kind}/{part}": value.T
          for kind, value in zip(("query", "key", "value"), packed)
        }
      layers = {"heads/out": "self_attn.out_proj", "hidden": "linear1", "out": "linear2"}
      ours |= winners.linear(
        w, {f"{name}/{ours}": f"{theirs}.{layer}" for ours, layer in layers.items()}
      )
      for norm in range(2):
        ours |= {
          f"{name}/norm_{norm}/scale": w[f"{theirs}.norm{norm + 1}.weight"],
          f"{name}/norm_{norm}/bias": w[f"{theirs}.norm{norm + 1}.bias"],
        }
    return ours

  def published(self, flat) -> dict[str, np.ndarray]:
    """The inverse of `ours`, with 0 for the weights of tiles that programs do not have."""
    places, total = {}, 0
    for key, value in self.weights.items():
      places[key] = total + np.arange(value.size).reshape(value.shape)
      total += value.size
    joined = np.zeros(total)
    for path, place in self.ours(places).items():
      joined[place] = flat[path]
    return {key: joined[place] for key, place in places.items()}


case = winners.fixture(Case)
of_every_record = pytest.mark.parametrize("case", RECORDS, indirect=True)


@of_every_record
def test_all_columns_from_the_raw_file_are_the_published_ones(case):
  record, feat = case.record, np.concatenate([graph.feat for graph in case.prepared])
  expected = [record["expected/x"], record["expected/dim_feat"].reshape(len(feat), -1)]
  if not case.is_tile:
    configurable = np.concatenate(
      [np.isin(np.arange(graph.num_nodes), graph.config_node) for graph in case.loaded]
    )
    own = record["expected/layout_feat"][:, 0]
    for slot in range(own.shape[1]):
      np.testing.assert_array_equal(feat[~configurable, -6:], own[~configurable, slot])
    feat = feat[:, :-6]
  scale = np.maximum(np.abs(np.concatenate(expected, axis=1)).max(axis=0), 1)
  winners.assert_near(feat / scale, np.concatenate(expected, axis=1) / scale, 1e-6)


@of_every_record
def test_edges_and_targets_are_the_published_ones(case):
  starts = np.cumsum([0] + [len(graph.feat) for graph in case.prepared])
  ours = np.concatenate([graph.edge_index + start for graph, start in zip(case.prepared, starts)])
  order = lambda edges: edges[np.lexsort(edges.T)]
  np.testing.assert_array_equal(order(ours), order(case.record["expected/edge_index"].T))
  winners.assert_near(np.asarray(case.batch.target), case.record["expected/y"], 1e-6)


@of_every_record
def test_layers_and_scores_are_the_published_ones(case):
  scores, _, _, layers = case.results
  act = case.record.under("act")
  count = len(act["pre_linear"])
  of = lambda name: case.of_nodes(layers[name], case.record["act_nodes"], count)
  first = np.maximum(of("first"), 0) if act["pre_linear"].min() >= 0 else of("first")
  winners.assert_near(first, act["pre_linear"], 1e-5, "pre_linear")
  for number in range(case.layers):
    for theirs, direction in (("convs", "users"), ("rev_convs", "operands")):
      name = f"{theirs}.{number}"
      winners.assert_near(of(f"{direction}_{number}"), act[name], 1e-5, name)
  winners.assert_near(scores, case.record["scores"], 1e-5, "scores")


@of_every_record
def test_the_loss_and_its_gradients_are_the_published_ones(case):
  _, _, grads, _ = case.results
  record, grads = case.record, case.published(grads)
  loss = winners.loss_of(case.experiment, case.batch)(record["scores"])
  winners.assert_near(loss, record["loss"], 1e-6, "loss")
  norm = np.linalg.norm(list(record.under("grad_norm").values()))
  for key, value in record.under("grad_norm").items():  # that of head.bias is 0 but for rounding
    assert abs(np.linalg.norm(grads[key]) - value) <= 1e-4 * value + 1e-7 * norm, key
  for key, value in record.under("grad_first_rows").items():
    winners.assert_near(grads[key][: len(value)], value, 1e-4, key)


@of_every_record
def test_the_rate_falls_as_in_the_published_run(case):
  expected = case.record["train_without_dropout/lrs"]
  rates = case.experiment.config.optimizer.rate_after(len(expected))
  winners.assert_near([rates(step) for step in range(len(expected))], expected, 1e-6)


@of_every_record
def test_an_update_is_that_of_adamw_with_a_clipped_gradient(case):
  grads = case.results[2]
  norm = np.sqrt(sum(np.square(grad).sum() for grad in grads.values()))
  winners.assert_near(norm, case.record["train_without_dropout/norms"][0], 1e-4)
  rate = case.record["train_without_dropout/lrs"][0]
  before = winners.flat(case.params)
  for path, update in case.update(grads, total_steps=10).items():
    grad = min(1, 1 / norm) * grads[path].astype(np.float64)
    expected = -rate * (grad / (np.abs(grad) + 1e-8) + 1e-2 * before[path])
    np.testing.assert_allclose(update, expected, rtol=1e-3, atol=1e-4 * rate, err_msg=path)


@of_every_record
def test_training_goes_as_published(case):
  expected = case.record.under("train_without_dropout")
  options = case.experiment.config.optimizer
  optimizer = options.create(len(expected["losses"]))

  @jax.jit
  def step(params, grads, moments):
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments

  params, moments, losses = case.params, jax.jit(optimizer.init)(case.params), []
  for _ in expected["losses"]:
    (loss, _), grads = case.run(params)
    params, moments = step(params, grads, moments)
    losses.append(float(loss))
  # The runs part slowly: the first losses agree to 5e-5, all to 0.8 %, last scores to 1.8 %.
  np.testing.assert_allclose(losses[:3], expected["losses"][:3], rtol=1e-3)
  np.testing.assert_allclose(losses, expected["losses"], rtol=3e-2)
  (_, (scores, _)), _ = case.run(params)
  winners.assert_near(scores, expected["scores"], 5e-2)


@of_every_record
def test_initial_parameters_are_those_of_pytorch_and_spread_as_in_the_published_run(case):
  layers = [
    f"tokens/layer_{layer}"
    for layer in range(case.experiment.config.model.token_layers if case.is_tile else 0)
  ]
  width = case.experiment.config.model.options.get("token_width", 0)
  # A bound of 1 / sqrt(K) in place of xavier's sqrt(6 / (inputs + outputs)).
  xavier = {"tokens/tokens/kernel": (30 + width) / 6}
  zeros = {}
  for layer in layers:
    xavier |= {f"{layer}/{name}/kernel": 2 * width / 6 for name in ("heads/out", "hidden", "out")}
    xavier |= {f"{layer}/heads/{name}/kernel": 4 * width / 6 for name in ("query", "key", "value")}
    zeros |= {f"{layer}/heads/{name}/bias": 0 for name in ("query", "key", "value", "out")}
    zeros |= {f"{layer}/norm_{number}/bias": 0 for number in range(2)}
  fan_in = {} if case.is_tile else {"first": case.weights["pre_linear.0.weight"].shape[1]}
  params = winners.assert_torch_parameters(
    case.experiment.ranker.family.network, case.batch, fan_in | xavier, scale=1, **zeros
  )
  for key, value in case.published(params).items():
    if value.size < 100:
      continue
    if key == "pre_linear.0.weight" and not case.is_tile:
      value = value[:, :-18]  # without the weights of tiles
    expected = case.record.settings["torch_init_std"][key]
    assert abs(value.std() - expected) <= 3 * expected / np.sqrt(value.size), key


# Beyond the records.


def random_graph(kind="layout", nodes=7, seed=0, **options):
  rng = np.random.default_rng(seed)
  make = getattr(random_graphs, f"{kind}_graph")
  graph = make(rng, nodes=nodes, edges=9, configs=5, **options)
  feat = rng.integers(-3, 6, (nodes, 140)).astype(np.float32)
  return dataclasses.replace(graph, node_feat=feat)


def test_tokens_are_lists_one_after_the_other_cut_into_six():
  graph = random_graph(config_nodes=[0])
  feat, found = graph.node_feat, fifth.tokens(graph).reshape(-1, 6, 23)
  starts = {31: (0, 5), 45: (0, 4), 61: (-1, 4), 69: (0, 4), 77: (0, 4), 85: (0, 1)}
  for node in range(len(feat)):
    numbers = [
      2 * (feat[node, start + place] - low) / (high - low) - 1
      for start, (low, high) in starts.items()
      for place in range(6)
    ]
    numbers += [
      np.log(max(feat[node, start + place], 0) + 1) for start in (21, 37, 53) for place in range(6)
    ]
    for token in range(6):
      named = [number == token and number > 0 for number in feat[node, 93:107]]
      np.testing.assert_allclose(
        found[node, token], numbers[9 * token : 9 * token + 9] + named, atol=1e-6
      )


def test_numbers_below_the_published_smallest_have_finite_logarithms():
  graph = random_graph(config_nodes=[0])
  graph = dataclasses.replace(graph, node_feat=np.full_like(graph.node_feat, -1e6))
  assert np.isfinite(fifth.columns(graph)).all() and np.isfinite(fifth.tokens(graph)).all()
  assert (fifth.columns(graph)[:, 18:] == 0).all()


def batch_of(kind, *, spare=0, slots=1):
  """Two random graphs in a batch with room for `spare` more of everything."""
  prepared = []
  for seed, nodes in ((1, 9), (2, 5)):
    if kind == "layout":
      graph = random_graph(nodes=nodes, seed=seed, config_nodes=[0, nodes - 2])
      blocks = fifth.columns(graph), fifth.tokens(graph), fifth.own_layout(graph)
      feat = np.concatenate(blocks, axis=1)
      prepared.append(batching.prepare_program(graph, feat, hops=2, slots=slots))
    else:
      graph = random_graph("tile", nodes=nodes, seed=seed)
      feat = np.concatenate([fifth.columns(graph), fifth.tokens(graph)], axis=1)
      feat[1, -138:] = feat[0, -138:]  # equal tokens
      feat[-1] = 0  # a virtual node
      prepared.append(batching.prepare(graph, feat, slots=slots, distinct=138))
  batch = random_graphs.batch_of(prepared, 3, spare=spare, graphs=2 + bool(spare))
  if kind == "layout":
    return batch
  tiles = 4 * np.random.default_rng(3).random((2, 3, 24)).astype(np.float32)
  return batch._replace(
    config_feat=np.concatenate([tiles, np.zeros((len(batch.target) - 2, 3, 24), np.float32)])
  )


def network_of(kind, batch, **options):
  small = dict(op_embed_dim=3, width=8, num_layers=2) | (
    dict(token_width=4, token_layers=1) if kind == "tile" else {}
  )
  network = base.create_network(kind, "Fifth", **small | options)
  return network, parts.params_of(network, batch)


@pytest.mark.parametrize("kind", ["layout", "tile"])
def test_padding_changes_no_score(kind):
  batch, padded = batch_of(kind), batch_of(kind, spare=5)
  network, params = network_of(kind, batch)
  score = jax.jit(lambda params, batch: network.apply({"params": params}, batch))
  np.testing.assert_allclose(score(params, padded)[:2], score(params, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["layout", "tile"])
def test_edges_are_left_out_in_training_alone(kind):
  batch = batch_of(kind)
  network, params = network_of(kind, batch, num_layers=1, drop_edge=0.9)
  keys = jax.random.split(jax.random.key(0), 8)

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def run(network, train):
    scores = lambda key: network.apply(
      {"params": params}, batch, train=train, rngs={"dropout": key}
    )
    one_device = jax.vmap(scores, axis_name=parallel.DEVICES)
    return jax.lax.map(lambda key: one_device(key[None])[0], keys)

  whole, trained = run(network, False), run(network, True)
  assert (whole == whole[:1]).all()
  assert len({scores.tobytes() for scores in np.asarray(trained)}) > 4
  without, _ = network_of(kind, batch, num_layers=1, drop_edge=0.0)
  np.testing.assert_allclose(run(without, True), whole, rtol=1e-6, atol=1e-6)


def test_operations_of_one_operand_share_an_opcode_vector():
  ids, batch = opcode_ids(), batch_of("layout")
  network, params = network_of("layout", batch)
  score = jax.jit(
    lambda opcode: network.apply(
      {"params": params},
      batch._replace(graph=batch.graph._replace(nodes=batch.graph.nodes | {"opcode": opcode})),
    )
  )
  of = lambda name: score(np.full(len(batch.graph.nodes["opcode"]), ids[name], np.int32))
  np.testing.assert_array_equal(of("abs"), of("tanh"))
  assert np.abs(of("abs") - of("add")).max() > 1e-4


def test_equal_tokens_are_encoded_as_if_each_node_had_its_own():
  batch = batch_of("tile")
  count = len(batch.graph.nodes["opcode"])
  every = np.arange(count, dtype=np.int32)
  alone = batch._replace(distinct=batching.DistinctNodes(every, every))
  network, params = network_of("tile", batch)
  assert len(batch.distinct.first) < count
  score = jax.jit(lambda batch: network.apply({"params": params}, batch))
  np.testing.assert_allclose(score(batch), score(alone), rtol=1e-5, atol=1e-6)
