"""The 3rd place against numbers of its public code."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.support import parts, random_graphs, winners
from tpugraphs_jax.data import batching
from tpugraphs_jax.nn import attention
from tpugraphs_jax.rankers.systems import third

RECORDS = ("third/layout",)
OPERANDS = slice(140, 156)  # columns


class Case(winners.Case):
  """A record beside a run of the preset on its graph."""

  def __init__(self, name, root):
    self.record = winners.Record(name)
    w = self.weights = self.record.under("weights")
    layers = sum(key.startswith("combination_nets") and key.endswith(".0.bias") for key in w)
    graph = self.record.under("input")
    self.experiment = winners.run_of(
      "layout.py:xla-default,preset=third",
      {"train": {"graph": graph}},
      root,
      **{
        "model.op_embed_dim": w["embedding_layer.emb.weight"].shape[1],
        "model.first_width": len(w["embedding_layer.mlp.0.bias"]),
        "model.position_width": len(w["lpe_projection.0.bias"]),
        "model.keys": len(w["linformers.0.key_layer.bias"]),
        "model.messages": len(w["feature_sage_convs.0.agg_linear_in.bias"]),
        "model.widths": tuple(len(w[f"combination_nets.{i}.0.bias"]) for i in range(layers)),
        "batch.min_configs": 2,
      },
    )
    (graph,) = self.experiment.data.load("train")
    (self.prepared,) = self.experiment.prepare([graph])

  @functools.cached_property
  def batch(self):
    """With the record's shapes of operands, which the page says are in another order."""
    batch = winners.batch_of(
      self.experiment, [self.prepared], [np.arange(len(self.record["input/config_runtime"]))]
    )
    feat = np.array(batch.graph.nodes["feat"])
    feat[: len(self.prepared.feat), OPERANDS] = self.record["expected/node_feat_216"][:, OPERANDS]
    return batch._replace(graph=batch.graph._replace(nodes=batch.graph.nodes | {"feat": feat}))

  @functools.cached_property
  def params(self):
    w, layers = self.weights, len(self.experiment.config.model.widths)
    table = w["embedding_layer.emb.weight"]
    ours = {
      "opcodes/embedding/table": np.concatenate([table[127:], table[1:121]]),
      "last/kernel": w["projection_network.weight"].T,
    }
    linear = {
      "first/linear": "embedding_layer.mlp.0",
      "positions": "lpe_projection.0",
      "last_0/linear": "mlp.0",
      "last_1/linear": "mlp.3",
    }
    norms = {"first/norm": "embedding_layer.mlp.2", "last_0/norm": "mlp.2", "last_1/norm": "mlp.5"}
    for i in range(layers):
      here, sage = f"layer_{i}", f"feature_sage_convs.{i}"
      linear |= {
        f"{here}/{ours}": f"linformers.{i}.{ours}_layer" for ours in ("query", "key", "value")
      }
      linear |= {
        f"{here}/mixed/linear": f"{sage}.mlp_out.2",
        f"{here}/both/linear": f"combination_nets.{i}.0",
        f"{here}/positions": f"lpe_sage_convs.{i}.mlp_out.1",
      }
      for name, theirs in (("sage", sage), ("track", f"lpe_sage_convs.{i}")):
        linear |= {
          f"{here}/{name}/own": f"{theirs}.linear",
          f"{here}/{name}/users": f"{theirs}.agg_linear_in",
          f"{here}/{name}/operands": f"{theirs}.agg_linear_out",
        }
      norms |= {
        f"{here}/sage_norm": f"{sage}.mlp_out.1",
        f"{here}/mixed/norm": f"{sage}.mlp_out.4",
        f"{here}/both/norm": f"combination_nets.{i}.2",
      }
    ours |= winners.linear(w, linear)
    for name, theirs in norms.items():
      ours |= {f"{name}/scale": w[f"{theirs}.weight"], f"{name}/bias": w[f"{theirs}.bias"]}
    return winners.tree(ours)

  def gradient(self, theirs: str) -> np.ndarray:
    """Ours of a published kernel or table."""
    grads, (part, _, rest) = self.results[2], theirs.partition(".")
    number = rest.split(".")[0]
    if theirs == "embedding_layer.emb.weight":
      table = grads["opcodes/embedding/table"]
      unused = np.zeros((6, table.shape[1]), np.float32)
      return np.concatenate([unused[:1], table[1:], unused, table[:1]])
    name = {
      "linformers": f"layer_{number}/value",
      "mlp": "last_0/linear",
      "feature_sage_convs": f"layer_{number}/sage/users",
      "projection_network": "last",
      "lpe_sage_convs": f"layer_{number}/track/own",
    }[part]
    return grads[f"{name}/kernel"].T


case = winners.fixture(Case)
of_every_record = pytest.mark.parametrize("case", RECORDS, indirect=True)


@of_every_record
def test_the_graph_has_the_published_output_node(case):
  edges = sorted(map(tuple, case.prepared.edge_index[:, ::-1].tolist()))
  assert edges == sorted(map(tuple, case.record["expected/edge_index_with_output_node"].T.tolist()))
  opcode = case.record["expected/opcode_with_output_node"]
  np.testing.assert_array_equal(case.prepared.opcode, np.where(opcode == 127, 0, opcode))


@of_every_record
def test_features_from_the_raw_file_are_the_published_ones(case):
  feat, expected = case.prepared.feat, case.record["expected/node_feat_216"]
  asym, sym = np.split(feat[:, -third.WALKS :], [third.DIRECTED_STEPS], axis=1)
  left = lambda x: np.delete(x[:, :216], np.r_[OPERANDS], axis=1)
  winners.assert_near(left(feat), left(expected), 1e-6, "columns and places in registers")
  winners.assert_near(asym, case.record["expected/pe_asym"], 1e-6, "directed walks")
  shown = sym[case.record["expected/activation_nodes"]]
  winners.assert_near(shown, case.record["expected/pe_sym"], 1e-6, "undirected walks")


@of_every_record
def test_shapes_of_operands_are_the_published_ones_up_to_left_and_right(case):
  ours, theirs = (
    x[:, OPERANDS].reshape(-1, 2, 8)
    for x in (case.prepared.feat, case.record["expected/node_feat_216"])
  )
  same = np.isclose(ours, theirs, rtol=1e-6).all(axis=(1, 2))
  other_way = np.isclose(ours[:, ::-1], theirs, rtol=1e-6).all(axis=(1, 2))
  assert (same | other_way).all() and same.mean() > 0.9


@of_every_record
def test_layers_and_scores_are_the_published_ones(case):
  scores, _, _, layers = case.results
  # A score is a sum of hundreds of rows that cancel: with sums in float64 over our last layer,
  # which agrees to 1e-6, it is 2.2e-5 from the published float32 sum.
  winners.assert_near(scores[0], case.record["expected/scores"], 3e-5, "scores")
  nodes = case.record["expected/activation_nodes"]
  for key, value in case.record.under("expected/activation").items():
    part, _, number = key.partition(".")
    layer = f"layer_{number}"
    if part == "linformers":
      query = attention.positive(case.of_nodes(layers[f"{layer}/query"], nodes, len(value)))
      ours = np.einsum("cnd,cdf->cnf", query, layers[f"{layer}/value"][0, : len(value)])
    elif part == "lpe_projection":
      ours = np.tanh(case.of_nodes(layers["positions"], nodes, len(value)))
    else:
      ours = {
        "embedding_layer": lambda: layers["first"],
        "mlp": lambda: layers["last_1"],
        "feature_sage_convs": lambda: layers[f"{layer}/mixed"],
        "lpe_sage_convs": lambda: layers[layer][0],
        "combination_nets": lambda: layers[layer][1],
      }[part]()
      ours = case.of_nodes(ours, nodes, len(value))
    winners.assert_near(ours, value, 1e-5, key)


@of_every_record
def test_the_loss_and_its_gradients_are_the_published_ones(case):
  loss = winners.loss_of(case.experiment, case.batch)(case.record["expected/scores"][None])
  winners.assert_near(loss, case.record["expected/loss"], 1e-6, "loss")
  for key, value in case.record.under("expected/gradient").items():
    winners.assert_near(case.gradient(key), value, 1e-3, key)


@of_every_record
def test_parameters_begin_as_in_pytorch(case):
  network = case.experiment.ranker.family.network
  winners.assert_torch_parameters(network.clone(widths=network.widths[:1]), case.batch)


@of_every_record
def test_a_run_trains_as_published(case):
  published, ours = case.record.settings["optimizer"], case.experiment.config.optimizer
  given = [published[name] for name in ("lr", "eps", "weight_decay", "clip_total_norm")]
  assert [ours.learning_rate, ours.eps, ours.weight_decay, ours.clip_norm] == given
  assert tuple(published["betas"]) == (0.9, 0.999)  # those of `Optimizer`
  assert (ours.name, ours.schedule, ours.final_learning_rate) == ("adamw", "cosine", 1e-6)
  batch = case.experiment.config.batch
  assert (batch.graphs, batch.configs) == (
    case.record.settings["batch_graphs"],
    case.record.settings["list_size"],
  )


@of_every_record
def test_an_update_is_that_of_adam_in_pytorch(case):
  """The first one: gradients at length 1, then -lr g / (|g| + eps)."""
  grads = case.results[2]
  length = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads.values()))
  for path, update in case.update(grads).items():
    clipped = grads[path].astype(np.float64) / max(1, length)
    winners.assert_near(update, -1e-3 * clipped / (np.abs(clipped) + 1e-8), 1e-5, path)


def test_tiles_by_hand():
  """There is no record: four nodes, 0 feeds 1 and 2, which feed 3, and two tiles."""
  rng = np.random.default_rng(0)
  edges = np.array([[1, 0], [2, 0], [3, 1], [3, 2]])
  graph = random_graphs.tile_graph(rng, nodes=4, edges=0, configs=2)
  tiles = rng.integers(0, 9, (2, 24)).astype(np.float32)
  graph = random_graphs.with_configs(graph, config_feat=tiles)
  graph = dataclasses.replace(graph, edge_index=edges)
  prepared = batching.prepare(graph, graph.node_feat)
  slate = batching.Slate(prepared, np.arange(2), np.zeros(2), 0)
  budget = random_graphs.common_budget([prepared.sizes])
  batch = random_graphs.assemble([slate], budget, graphs=1, configs=2)
  network = third.KaggleThirdTile(op_embed_dim=3, first_width=4, widths=(4, 2))
  params = parts.params_of(network, batch, scale=1)
  layer = lambda x, p: x @ p["kernel"] + p.get("bias", 0)

  def block(y, norm):
    y = y / (1 + np.exp(-y))
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
    return y * norm["scale"] + norm["bias"]

  opcode = params["opcodes"]["embedding"]["table"][graph.node_opcode]
  expected = []
  for tile in graph.configs.config_feat / 5:
    x = np.concatenate([opcode, graph.node_feat, np.tile(tile, (4, 1))], axis=1)
    x = block(layer(x, params["first"]["linear"]), params["first"]["norm"])
    for i in range(2):
      heard = layer(x, params[f"sage_{i}_users"])
      users = np.stack([(heard[1] + heard[2]) / 2, heard[3], heard[3], 0 * heard[0]])
      x = block(layer(x, params[f"sage_{i}_own"]) + users, params[f"sage_{i}_norm"])
    expected.append(layer(x.sum(axis=0), params["last"])[0])
  scores = jax.jit(network.apply)({"params": params}, batch)
  np.testing.assert_allclose(scores[0], expected, rtol=1e-4)
