"""The 1st place against numbers of its public code, and its blocks against NumPy."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
import winners

from tpugraphs_jax.data.features import Transform
from tpugraphs_jax.nn.nodes import Nodes
from tpugraphs_jax.train import state

BLOCKS = ("linear", "linear2", "convs_0", "convs_1")
LAYOUTS = winners.files("first_default", "first_random")
TILES = winners.files("first_tile")


class Case:
  """A record beside a run of the preset on its graph."""

  def __init__(self, path, root):
    self.record = winners.Record(path)
    self.settings = self.record.settings
    self.is_tile = "kernel" in self.settings
    across = self.settings["use_cross_attn"]
    collection = "layout.py:xla-" + ("default" if across else "random")
    variant = "tile.py:preset=first" if self.is_tile else f"{collection},preset=first"
    weights = self.record.under("weights")
    self.job = winners.run_of(variant, {"train": {"graph": self.record.under("input")}}, root, **{
        "model.width": weights["linear2.linear.weight"].shape[1],
        "model.op_embed_dim": weights["embedding_op.weight"].shape[1],
        "model.value_embed_dim": weights["embedding_layout_cfg.weight"].shape[1]})
    (self.graph,) = self.job.data.load(self.job.config.data_root, "train")
    # The published scales are of graphs that the record does not hold.
    scaler = lambda name: Transform(
        np.arange(len(self.record[f"input/{name}_mean"])),
        np.zeros(len(self.record[f"input/{name}_mean"]), bool),
        *(self.record[f"input/{name}_{part}"].astype(np.float32) for part in ("mean", "scale")))
    ranker = self.job.ranker
    ranker.features.transforms[ranker.features.names[0]] = scaler("scaler")
    if self.is_tile:
      ranker.family.config_transform = scaler("cfg_scaler")
    (self.prepared,) = self.job.prepare([self.graph])

  @functools.cached_property
  def batch(self):
    count = len(self.record["scores"])
    assert len(self.graph.configs) == count
    return winners.batch_of(self.job, [self.prepared], [np.arange(count)])

  @functools.cached_property
  def params(self):
    weights = self.record.under("weights")
    rows = weights["embedding_op.weight"]
    ours = {"layouts/table": weights["embedding_layout_cfg.weight"],
            "opcodes/embedding/table": np.pad(rows, ((0, 121 - len(rows)), (0, 0)))}
    for name, value in weights.items():
      if not name.startswith("embedding"):
        ours[path_of(name)] = value.T
    kernel = ours["linear/linear/kernel"]
    ours["linear/linear/kernel"] = kernel[self.columns]
    return winners.tree(ours)

  @property
  def columns(self):
    """The rows of our first kernel among the published ones."""
    weights = self.record.under("weights")
    inputs = weights["linear.linear.weight"].shape[1]
    opcode, value = (weights[f"embedding_{name}.weight"].shape[1] for name in ("op", "layout_cfg"))
    configuration = 0 if self.is_tile else 18 * value
    numbers = inputs - opcode - 6 * value - configuration
    # Published: numbers, configuration, own layout, opcode.
    own = np.arange(numbers + configuration, inputs)
    return np.concatenate([np.arange(numbers), own, numbers + np.arange(configuration)])

  @functools.cached_property
  def results(self):
    return winners.results(self.job, self.params, self.batch)


def path_of(name: str) -> str:
  """Our path of a public weight."""
  *layer, last = name.split(".")
  if last == "temperature":
    return f"{layer[0]}/gates/cross_attn/temperature" if len(layer) == 2 else (
        f"convs_{layer[1]}/gates/cross_attn/temperature")
  kind = "kernel" if last == "weight" else "bias"
  if layer[0] == "convs":
    part = {"lin_l": {"kernel": "conv/users", "bias": "conv/self"}[kind], "lin_r": "conv/self",
            "linear1": "gates/attn/linear1", "linear2": "gates/attn/linear2"}[layer[-1]]
    return f"convs_{layer[1]}/{part}/{kind}"
  if layer[0] in ("linear", "linear2"):
    part = "linear" if layer[1] == "linear" else f"gates/attn/{layer[2]}"
    return f"{layer[0]}/{part}/{kind}"
  place = {"classifier": "last", "dense_cfg.0": "dense_cfg_0", "dense_cfg.3": "dense_cfg_1",
           "dense.0": "dense_0", "dense.3": "dense_1", "dense.6": "last"}[".".join(layer)]
  return f"{place}/{kind}"


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
  return Case(request.param, tmp_path_factory.mktemp("first"))


of_layouts = pytest.mark.parametrize("case", LAYOUTS, indirect=True)
of_every_record = pytest.mark.parametrize("case", [*LAYOUTS, *TILES], indirect=True)


@of_layouts
def test_the_program_is_cut_as_published(case):
  record, edges = case.record, np.asarray(case.prepared.edge_index)
  theirs = record["expected/edge_index"].T
  order = lambda pairs: pairs[np.lexsort(pairs.T)]
  np.testing.assert_array_equal(order(edges), order(theirs))
  np.testing.assert_array_equal(case.prepared.opcode, record["expected/node_opcode"])
  configurable = np.flatnonzero(np.asarray(case.prepared.by_hop.hop) == 0)
  np.testing.assert_array_equal(
      case.prepared.configs.decode(np.arange(len(case.prepared.configs))),
      record["expected/node_config_feat"])
  del configurable


@of_every_record
def test_features_from_the_raw_file_are_the_published_ones(case):
  feat = case.prepared.feat
  winners.assert_near(feat[:, :134], case.record["expected/node_feat"], 1e-6, "numbers")
  np.testing.assert_array_equal(feat[:, 134:], case.record["expected/node_layout_feat"])
  if case.is_tile:
    winners.assert_near(
        case.batch.config_feat[0], case.record["expected/config_feat"], 1e-6, "tiles")


@of_every_record
def test_blocks_and_scores_are_the_published_ones(case):
  scores, _, _, layers = case.results
  winners.assert_near(scores[0], case.record["scores"], 1e-5, "scores")
  for name in BLOCKS:
    expected = case.record[f"act/{name.replace('_', '.')}"]
    found = np.swapaxes(layers[name].everywhere(), 0, 1)
    shown = np.arange(expected.shape[0]) if case.is_tile else case.record["act_nodes"]
    found = found[0, shown] if case.is_tile else found[: len(expected), shown]
    winners.assert_near(found, expected, 1e-5, name)
  if case.is_tile:
    winners.assert_near(layers["dense_cfg_1"][0], case.record["act/dense_cfg"], 1e-5, "tiles")


@of_every_record
def test_the_loss_and_its_gradients_are_the_published_ones(case):
  _, loss, grads, _ = case.results
  winners.assert_near(
      winners.loss_of(case.job, case.batch)(case.record["scores"][None]), case.record["loss"],
      1e-6, "loss")
  largest = max(case.record.under("grad_norm").values())
  for name, norm in case.record.under("grad_norm").items():
    ours = grads[path_of(name)]
    if norm < 1e-6 * largest:  # 0 but for rounding
      assert np.linalg.norm(ours) < 1e-5 * largest, name
    else:
      winners.assert_near(np.linalg.norm(ours), norm, 1e-4, name)
