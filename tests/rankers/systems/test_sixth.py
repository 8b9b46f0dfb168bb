"""The 6th place against numbers of its public code."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import scipy.special

from tests.support import parts, winners

RECORDS = ("sixth/sage", "sixth/gin", "sixth/tile")
PRESETS = {
  "GraphSAGE": ("layout.py:xla-default,preset=sixth", "layout:xla:default"),
  "GIN": ("layout.py:xla-default,preset=sixth_gin", "layout:xla:default"),
  "GATv2": ("tile.py:preset=sixth", "tile:xla"),
}


class Case(winners.Case):
  """A record beside a run of the preset.

  Graphs of layouts are recorded as they are cut, and graphs for statistics without edges.
  """

  def __init__(self, name, root):
    self.record = winners.Record(name)
    self.kind = next(kind for kind in PRESETS if kind in self.record.settings["system"])
    self.weights = self.record.under("weights")
    graph = self.record.under("input")
    graph["edge_index"] = graph["edge_index"].T
    statistics = {name: self.described(name) for name in self.record.names("train_graphs")}
    self.experiment = winners.run_of(
      PRESETS[self.kind][0],
      {"train": statistics, "valid": {"graph": graph}},
      root,
      **{
        "model.op_embed_dim": self.weights["node_opcode_embed.weight"].shape[1],
        "model.width": len(self.weights["early_mlp.0.weight"]),
        "batch.min_configs": 2,
      },
    )
    (self.graph,) = self.experiment.data.load("valid")
    (self.prepared,) = self.experiment.prepare([self.graph])

  def described(self, name):
    """A graph of the statistics, with whatever a file needs beside its features."""
    arrays = self.record.under(f"train_graphs/{name}")
    nodes = len(arrays["node_feat"])
    configs = len(arrays.get("config_feat", [0, 0]))
    made = {
      "node_opcode": np.ones(nodes),
      "edge_index": np.zeros((0, 2)),
      "config_runtime": np.arange(1, configs + 1),
    }
    if self.kind == "GATv2":
      return made | {"config_runtime_normalizers": np.ones(configs)} | arrays
    rows = np.arange(2).reshape(2, 1, 1) * np.ones((2, 1, 18))
    return made | {"node_config_ids": np.zeros(1), "node_config_feat": rows} | arrays

  @functools.cached_property
  def batch(self):
    configs = len(self.record["input/config_runtime"])
    return winners.batch_of(self.experiment, [self.prepared], [np.arange(configs)])

  @functools.cached_property
  def params(self):
    w = self.weights
    ours = {
      "opcodes/embedding/table": w["node_opcode_embed.weight"][:121],
      "last/kernel": w["predict.weight"].T,
      "last/bias": w["predict.bias"],
    }
    linear = {
      "early_0": "early_mlp.0",
      "early_1": "early_mlp.4",
      "late_0": "late_mlp.0",
      "late_1": "late_mlp.3",
    }
    for number in range(self.experiment.config.model.layers):
      here, there = f"conv_{number}", f"gconv.{number}"
      linear |= {
        "GraphSAGE": {f"{here}/users": f"{there}.lin_l", f"{here}/self": f"{there}.lin_r"},
        "GIN": {f"{here}/dense_0": f"{there}.nn.0", f"{here}/dense_1": f"{there}.nn.3"},
        "GATv2": {f"{here}/senders": f"{there}.lin_l", f"{here}/receivers": f"{there}.lin_r"},
      }[self.kind]
      if self.kind == "GATv2":
        ours |= {f"{here}/attention": w[f"{there}.att"][0], f"{here}/bias": w[f"{there}.bias"]}
    for name, theirs in linear.items():
      if f"{theirs}.weight" in w:
        ours[f"{name}/kernel"] = w[f"{theirs}.weight"].T
      if f"{theirs}.bias" in w:
        # The bias of published means is ours of the node itself.
        ours[f"{name.replace('users', 'self')}/bias"] = w[f"{theirs}.bias"]
    return winners.tree(ours)

  def gradient(self, theirs):
    grads = self.results[2]
    if theirs == "node_opcode_embed.weight":
      table = grads["opcodes/embedding/table"]
      return np.pad(table, ((0, 128 - len(table)), (0, 0)))
    conv = {"GraphSAGE": "users", "GIN": "dense_0", "GATv2": "senders"}[self.kind]
    name = {"early_mlp.0": "early_0", "late_mlp.0": "late_0", "predict": "last"}.get(
      theirs.removesuffix(".weight"), f"conv_1/{conv}"
    )
    return grads[f"{name}/kernel"].T


case = winners.fixture(Case)
of_every_record = pytest.mark.parametrize("case", RECORDS, indirect=True)


@of_every_record
def test_features_from_the_raw_file_are_the_published_ones(case):
  nodes = case.record["expected/activation_nodes"]
  # The published means and deviations are sums in float32, ours in float64: 3e-6 in two columns.
  winners.assert_near(case.prepared.feat[nodes], case.record["expected/node_feat_scaled"], 5e-6)
  if case.kind == "GATv2":
    tile = np.asarray(case.batch.config_feat[0])
    winners.assert_near(tile, case.record["expected/activation/late_mlp.input"][:, :24], 1e-6)


@of_every_record
def test_layers_and_scores_are_the_published_ones(case):
  scores, _, _, layers = case.results
  # The norm across the slate divides by how readouts differ, which enlarges rounding: to 1e-4
  # for GIN, whose readouts differ least, and to 1.5e-5 for GraphSAGE.
  behind_norm = {"GIN": 3e-4, "GraphSAGE": 3e-5, "GATv2": 1e-5}[case.kind]
  winners.assert_near(scores[0], case.record["expected/scores"], behind_norm, "scores")
  expected = case.record.under("expected/activation")
  for key, ours in activations(case, layers).items():
    if key in expected:
      tolerance = behind_norm if key == "late_mlp" else 1e-5
      winners.assert_near(ours[: len(expected[key])], expected[key], tolerance, key)


def activations(case: Case, layers: dict) -> dict:
  """`[C, nodes, F]` float64 by published names, from outputs of linear layers and convolutions."""
  nodes = case.record["expected/activation_nodes"]
  count = len(case.prepared.opcode)
  of = lambda name: np.asarray(parts.everywhere(layers[name]), np.float64)[:count]
  found = {
    "early_mlp.0": of("early_0"),
    "late_mlp": gelu(normal(np.asarray(layers["late_1"][0], np.float64))),
  }
  seen = []
  x = gelu(normal(of("early_1" if "early_1" in layers else "early_0")))
  found["early_mlp"] = x
  for number in range(case.experiment.config.model.layers):
    found[f"gconv.{number}"] = y = of(f"conv_{number}")
    seen.append(y.mean(axis=0))
    found[f"norm.{number}"] = normal(y if case.kind == "GATv2" else x + y)
    x = gelu(found[f"norm.{number}"])
  if case.kind == "GIN":
    found["late_mlp.input"] = sum(seen)
  elif case.kind == "GraphSAGE":
    readout = x.mean(axis=0) + x.max(axis=0)
    found["late_mlp.input"] = readout / np.linalg.norm(readout, axis=1, keepdims=True)
  return {
    key: value if key.startswith("late_mlp") else np.swapaxes(value[nodes], 0, 1)
    for key, value in found.items()
  }


def normal(x: np.ndarray) -> np.ndarray:
  return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5)


def gelu(x: np.ndarray) -> np.ndarray:
  return x * scipy.special.ndtr(x)


@of_every_record
def test_the_loss_and_its_gradients_are_the_published_ones(case):
  scores, _, grads, _ = case.results
  loss = winners.loss_of(case.experiment, case.batch)
  winners.assert_near(
    loss(case.record["expected/scores"][None]), case.record["expected/loss"], 1e-6, "loss"
  )
  for key, value in case.record.under("expected/gradient").items():
    largest = max(np.abs(gradient).max() for gradient in grads.values())
    if np.abs(value).max() < 1e-5 * largest:  # what tiles share, which the norm takes out
      assert np.abs(case.gradient(key)).max() < 1e-5 * largest, key
    else:
      winners.assert_near(case.gradient(key), value, 1e-3 if case.kind == "GIN" else 1e-4, key)


@of_every_record
def test_parameters_begin_as_in_pytorch(case):
  network = case.experiment.ranker.family.network.clone(layers=2)
  if case.kind != "GATv2":
    winners.assert_torch_parameters(
      network, case.batch, fan_in={f"conv_{i}/self": network.width for i in range(2)}
    )
    return
  params = winners.flat(jax.jit(network.init)(jax.random.key(0), case.batch)["params"])
  for path, value in params.items():
    if path.endswith(("senders/kernel", "receivers/kernel", "attention")):  # Glorot, as in PyG
      bound = np.sqrt(6 / sum(value.shape))
      assert 0.9 * bound < np.abs(value).max() <= bound, path
  np.testing.assert_array_equal(params["conv_0/bias"], 0)


@of_every_record
def test_a_run_trains_as_published(case):
  published, ours = case.record.settings["optimizer"], case.experiment.config.optimizer
  given = [published[name] for name in ("lr", "eps", "weight_decay")]
  assert [ours.learning_rate, ours.eps, ours.weight_decay] == given
  assert (ours.name, ours.schedule) == ("adamw", "constant")
  assert ours.clip_norm == ours.clip_norm_per_variable == 0
  batch = case.experiment.config.batch
  assert batch.graphs * ours.accumulation_steps == published["accumulated_slates"]
  slate = "tile" if case.kind == "GATv2" else "xla-default"
  assert batch.configs == case.record.settings["slate"][slate]
  judged = case.record.settings["slate_in_evaluation"]["layouts and tiles"]
  assert case.experiment.config.eval.configs == judged


@of_every_record
def test_an_update_is_that_of_adamw_on_shortened_rows(case):
  before, grads = winners.flat(case.params), case.results[2]
  updates = case.update(grads, accumulation_steps=1, average_window=())
  table = "opcodes/embedding/table"
  length = np.linalg.norm(before[table], axis=1, keepdims=True)
  start = before | {table: before[table] / np.maximum(length, 1)}
  for path, update in updates.items():
    g = grads[path].astype(np.float64)
    expected = start[path] * (1 - 5e-4 * 0.01) - 5e-4 * g / (np.abs(g) + 1e-8)
    winners.assert_near(before[path] + update, expected, 1e-5, path)
