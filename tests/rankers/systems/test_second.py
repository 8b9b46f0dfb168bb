"""The 2nd place against numbers of its public code."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.support import random_graphs, winners

RECORDS = ("second/xla", "second/nlp", "second/tile")
PRESETS = {
  "layout-xla-default": "layout.py:xla-default,preset=second_xla",
  "layout-nlp-default": "layout.py:nlp-default,preset=second_nlp",
  "tile-xla": "tile.py:preset=second_tile",
}
# Our names of linear layers.
LINEAR = {"node_feat_embedding": "features", "input_shaping": "first", "output_shaping": "node"}


class Case(winners.Case):
  """A record beside a run of the preset on its graphs."""

  def __init__(self, name, root):
    self.record = winners.Record(name)
    names = self.record.names("input")
    self.graphs = [name for name in names if f"input/{name}/node_feat" in self.record]
    weights = self.record.under("weight")
    widths = tuple(
      len(weights[f"convs.{number}.lin_l.bias"])
      for number in range(sum(key.endswith("lin_l.bias") for key in weights))
    )
    files = {name: self.record.under(f"input/{name}") for name in self.graphs}
    collection = self.record.settings["collection"]
    changes = {"model.widths": widths, "model.first_width": len(weights["input_shaping.bias"])}
    if "layout" in collection:
      changes |= {"data.leave_out": (), "batch.min_configs": 2}
    self.experiment = winners.run_of(PRESETS[collection], {"train": files}, root, **changes)
    self.loaded = {graph.name: graph for graph in self.experiment.data.load("train")}

  @functools.cached_property
  def batch(self):
    prepared = {name: self.experiment.prepare([self.loaded[name]])[0] for name in self.graphs}
    graphs = [prepared[str(name)] for name in self.record["input/slate_graphs"]]
    # The record counts configurations without duplicates by runtime, ours in file order.
    ids = [
      self.numbers(str(name))[slate]
      for name, slate in zip(self.record["input/slate_graphs"], self.record["input/slates"])
    ]
    batch = winners.batch_of(self.experiment, graphs, ids)
    if "expect/clean_slates" in self.record:  # the others are in no loss of the record
      counts = np.isin(np.arange(len(ids)), self.record["expect/clean_slates"])
      batch = batch._replace(config_mask=batch.config_mask & counts[:, None])
    return batch

  def numbers(self, name: str) -> np.ndarray:
    """Our number of every configuration of the record."""
    if "layout" not in self.record.settings["collection"]:
      theirs = self.record[f"expect/{name}/config_feat_deduplicated"]
      ours = self.loaded[name].configs.config_feat
    else:
      theirs = self.record[f"expect/{name}/node_config_feat_deduplicated"]
      configs = self.loaded[name].configs
      ours = configs.decode(np.arange(len(configs)))
    flat = lambda x: [np.asarray(row, np.float32).tobytes() for row in x]
    number = {row: place for place, row in enumerate(flat(ours))}
    return np.array([number[row] for row in flat(theirs)])

  @functools.cached_property
  def params(self):
    w = self.record.under("weight")
    table = w["node_opcode_embedding.weight"]
    ours = {"opcodes/embedding/table": np.pad(table, ((0, 121 - len(table)), (0, 0)))}
    ours |= winners.linear(w, {ours: theirs for theirs, ours in LINEAR.items()})
    for number in range(len(self.experiment.config.model.widths)):
      ours |= winners.sage(w, f"sage_{number}", f"convs.{number}", "users")
    return winners.tree(ours)

  @property
  def unit(self) -> float:
    """Our scores over the published ones."""
    return 100.0 if self.record.settings["unit"] == "seconds" and not self.is_nlp else 1.0

  @property
  def is_nlp(self) -> bool:
    return "nlp" in self.record.settings["collection"]


case = winners.fixture(Case)
of_every_record = pytest.mark.parametrize("case", RECORDS, indirect=True)


@of_every_record
def test_equal_configurations_count_once_with_the_published_runtime(case):
  for name in case.graphs:
    configs = case.loaded[name].configs
    np.testing.assert_array_equal(
      random_graphs.config_runtime(configs)[case.numbers(name)],
      case.record[f"expect/{name}/runtime_deduplicated"],
    )


@of_every_record
def test_features_from_the_raw_file_are_the_published_ones(case):
  first = case.loaded[case.graphs[0]]
  feat = case.experiment.ranker.features(first)
  winners.assert_near(feat, case.record["expect/act/features"], 1e-6)


@of_every_record
def test_layers_and_scores_are_the_published_ones(case):
  scores, _, _, layers = case.results
  expected = case.record["expect/scores"].reshape(scores.shape)
  winners.assert_near(scores / case.unit, expected, 1e-5, "scores")
  names = LINEAR | {"per_node": "node"}
  for key, value in case.record.under("expect/act").items():
    if key == "features":
      continue
    ours = layers[names.get(key, key.replace("conv", "sage_"))]
    found = case.of_nodes(ours, case.record["expect/shown_nodes"], len(value))
    winners.assert_near(found, value, 1e-5, key)


@of_every_record
def test_the_loss_and_its_gradients_are_the_published_ones(case):
  scores, _, grads, _ = case.results
  expected = case.record["expect/scores"].reshape(scores.shape) * case.unit
  loss = winners.loss_of(case.experiment, case.batch)(expected)
  winners.assert_near(loss, case.record["expect/loss"], 1e-6, "loss")
  for key, value in case.record.under("expect/grad").items():
    layer, last = key.rsplit(".", 1)
    if layer == "node_opcode_embedding":
      ours = grads["opcodes/embedding/table"]
    elif layer.startswith("convs"):
      _, number, side = layer.split(".")
      kind = "bias" if last == "bias" else "kernel"
      part = "users" if side == "lin_l" and kind == "kernel" else "self"
      ours = grads[f"sage_{number}/{part}/{kind}"].T
    else:
      ours = grads[f"{LINEAR[layer]}/{'kernel' if last == 'weight' else 'bias'}"].T
    if key == "output_shaping.bias" and not case.record.settings["loss"].startswith("MAPE"):
      assert np.abs(ours).max() < 1e-5 * case.record["expect/grad_norm"]  # 0 but for rounding
    else:
      # Sums over thousands of nodes in float32: their rounding is up to 9e-4 of a small gradient.
      bound = 1e-3 if "layout" in case.record.settings["collection"] else 1e-4
      winners.assert_near(ours[: len(value)], value, bound, key)


@of_every_record
def test_the_rate_and_an_update_are_those_of_pytorch(case):
  """The rate falls by the root of ten at 0.6, 0.7, 0.8 and 0.9 of a run."""
  options = case.experiment.config.optimizer
  rates = options.rate_after(1000)
  assert [rates(step) for step in (0, 599, 600, 899, 999)] == pytest.approx(
    [1e-3, 1e-3, 1e-3 * 10**-0.5, 1e-3 * 10**-1.5, 1e-5]
  )
  before = winners.flat(case.params)
  grads = {key: value * 1e3 for key, value in case.results[2].items()}
  norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in grads.values()))
  clip = min(1.0, 100 / norm) if case.is_nlp else 1.0
  epsilon = 1e-6 if case.is_nlp else 1e-8
  for key, update in case.update(grads).items():
    grad = clip * grads[key].astype(np.float64)
    decay = 1e-4 * before[key] if case.is_nlp and key.startswith("node/") else 0
    expected = -1e-3 * (grad / (np.abs(grad) + epsilon) + decay)
    np.testing.assert_allclose(update, expected, rtol=1e-4, atol=2e-8, err_msg=key)


@of_every_record
def test_initial_parameters_are_those_of_pytorch(case):
  network = case.experiment.ranker.family.network
  winners.assert_torch_parameters(network.clone(widths=network.widths[:2]), case.batch)
