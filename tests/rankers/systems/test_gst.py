"""Graph Segment Training against numbers of its public code."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support import parts, random_graphs, winners
from tpugraphs_jax.data import batching, transforms
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.rankers.segments import family, history
from tpugraphs_jax.rankers.segments.batches import SegmentSlate
from tpugraphs_jax.train.step import TrainState

RECORDS = ("gst/layout",)
SPLITS = ("train", "valid")
PRE, HEAD = "model.pre_mp.Layer_0", "model.post_mp.layer_post_mp.model"
PLACES = {
  "op_weights": "op_weights",
  "config_weights": "config_weights",
  "emb.weight": "opcodes/embedding/table",
  **{
    f"{public}.{last}": f"{ours}/{kind}"
    for public, ours in (
      ("linear_map", "linear_map"),
      (f"{PRE}.layer.model", "pre_mp"),
      (f"{HEAD}.0.Layer_0.layer.model", "hidden"),
      (f"{HEAD}.1.model", "last"),
    )
    for last, kind in (("weight", "kernel"), ("bias", "bias"))
  },
  f"{PRE}.post_layer.1.weight": "pre_mp_prelu/negative_slope",
  **{
    f"model.gnn_layers.{number}.model.{public}": f"gnn_layers_{number}/{ours}"
    for number in range(3)
    for public, ours in (
      ("lin_l.weight", "users/kernel"),
      ("lin_l.bias", "self/bias"),
      ("lin_r.weight", "self/kernel"),
    )
  },
}


class Case(winners.Case):
  """A record beside a run of the preset on its programs."""

  def __init__(self, name, root):
    self.record = winners.Record(name)
    settings, self.weights = self.record.settings, self.record.under("weight")
    stems = {split: Path(place).stem for split, place in settings["files"].items()}
    known = {stems[split]: self.record.under(f"input/{split}") for split in SPLITS}
    self.experiment = winners.run_of(
      "layout.py:xla-default,preset=gst",
      {split: {stem: known[stem]} for split, stem in stems.items()},
      root,
      **{
        "model.op_embed_dim": self.weights["emb.weight"].shape[1],
        "model.map_width": len(self.weights["linear_map.bias"]),
        "model.width": len(self.weights[f"{PRE}.layer.model.bias"]),
        "model.dropout": settings["dropout_here"],
        "segments.max_nodes": settings["thres"],
        "eval.configs": settings["configs_per_slate"],
      },
    )
    self.family = self.experiment.ranker.family
    self.graphs = {split: self.experiment.data.load(split)[0] for split in SPLITS}
    self.prepared = dict(zip(SPLITS, self.experiment.prepare(list(self.graphs.values()))))

  @functools.cached_property
  def params(self):
    transposed = {
      PLACES[name]: value.T if value.ndim == 2 and name != "emb.weight" else value
      for name, value in self.weights.items()
    }
    ours = transposed | {
      "op_weights": transposed["op_weights"].reshape(()),
      "config_weights": transposed["config_weights"].reshape(-1),
      "pre_mp_prelu/negative_slope": transposed["pre_mp_prelu/negative_slope"].reshape(()),
      "opcodes/embedding/table": transposed["opcodes/embedding/table"][:121],
    }
    return winners.tree(ours)

  def sample(self, split):
    return self.record[f"input/{split}/sample"].astype(np.int64)

  def target(self, split):
    ids = self.sample(split)
    return self.experiment.data.targets(self.graphs[split].configs, ids)

  @functools.cached_property
  def segments(self):
    """By split the scores `[J, C]` of segments and the outputs of layers on all of them."""
    results, network = {}, self.family.programs.network
    apply = jax.jit(
      lambda params, batch: network.apply(
        {"params": params}, batch, capture_intermediates=True, mutable=["intermediates"]
      )
    )
    for split, graph in self.prepared.items():
      pieces = [Slate(piece, self.sample(split), self.target(split)) for piece in graph.segments]
      budget = random_graphs.common_budget([batching.total_sizes(graph.segments)])
      batch = self.family.programs.assemble(
        pieces, budget, graphs=len(pieces), configs=len(self.sample(split))
      )
      scores, seen = apply(self.params, batch)
      layers = {
        name: value["__call__"][0]
        for name, value in seen["intermediates"].items()
        if "__call__" in value
      }
      results[split] = np.asarray(scores), layers
    return results

  @functools.cached_property
  def slate(self):
    """The slate of the recorded step."""
    fresh = np.array([int(self.record["input/train/segment"])])
    ids, target = self.sample("train"), self.target("train")
    return SegmentSlate(self.prepared["train"], ids, target, 0, fresh)

  @functools.cached_property
  def batch(self):
    fresh = [self.prepared["train"].segments[piece] for piece in self.slate.fresh]
    budget = random_graphs.common_budget([batching.total_sizes(fresh)])
    return self.family.assemble([self.slate], budget, graphs=1, configs=len(self.slate.target))

  @functools.cached_property
  def gradients(self):
    """Of the loss of the recorded step, with the public stale scores."""
    count, keep = len(self.prepared["train"].segments), self.record.settings["keep"]
    eta = keep + (1 - keep) * count
    stale = (
      self.record["expect/train/step_pred_published"] - eta * self.record["expect/train/step_fresh"]
    )
    loss_of = winners.loss_of(self.experiment, self.batch)

    def loss(params):
      fresh = self.family.network.apply(
        {"params": params}, self.batch.fresh, method="segment_readout"
      )
      return loss_of(eta * fresh[..., 0] + stale[None])

    return jax.jit(jax.grad(loss))(self.params)


case = winners.fixture(Case)
of_every_record = pytest.mark.parametrize("case", RECORDS, indirect=True)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


@of_every_record
def test_features_from_the_raw_files_are_the_published_ones(case):
  """Scaled by the nodes of training, validation and test."""
  for split in SPLITS:
    expected = case.record[f"expect/{split}/op_feats"]
    found = case.experiment.ranker.features(case.graphs[split])[: len(expected)]
    winners.assert_near(found, expected, 1e-6, split)


@of_every_record
def test_segments_have_the_published_borders(case):
  for split in SPLITS:
    ends = np.cumsum([0, *(len(piece.opcode) for piece in case.prepared[split].segments)])
    np.testing.assert_array_equal(ends, case.record[f"expect/{split}/partptr"])


@of_every_record
def test_layers_and_scores_of_segments_are_the_published_ones(case):
  for split in SPLITS:
    scores, layers = case.segments[split]
    shown = case.record[f"expect/{split}/shown_nodes"]
    rows = lambda name: np.swapaxes(np.asarray(parts.everywhere(layers[name]))[shown], 0, 1)[:2]
    pre = rows("pre_mp")
    slope = float(case.weights[f"{PRE}.post_layer.1.weight"][0])
    hidden = np.maximum(np.asarray(layers["hidden"]), 0)
    found = {
      "linear_map": rows("linear_map"),
      "pre_mp": unit(np.where(pre > 0, pre, slope * pre)),
      **{f"conv{number}": rows(f"gnn_layers_{number}") for number in range(3)},
      "head_hidden": unit(hidden)[:, :2],
    }
    for name, expected in case.record.under(f"expect/{split}/act").items():
      winners.assert_near(found[name], expected, 1e-5, f"{split} {name}")
    winners.assert_near(scores, case.record[f"expect/{split}/segment_scores"], 1e-5, split)


@of_every_record
def test_scores_and_losses_of_evaluation_slates_are_the_published_ones(case):
  """All segments count once, of configurations drawn with replacement."""
  ids = [case.sample(split) for split in SPLITS]
  for split, scores in zip(
    SPLITS, case.family.scores(case.params, list(case.prepared.values()), ids)
  ):
    expected = case.record[f"expect/{split}/eval_scores"]
    winners.assert_near(scores, expected, 1e-5, split)
    batch = case.batch._replace(target=case.target(split)[None])
    loss = winners.loss_of(case.experiment, batch)(expected[None])
    winners.assert_near(loss, case.record[f"expect/{split}/eval_loss"], 1e-6, "loss")


@of_every_record
def test_a_step_reads_its_own_entries_and_writes_the_fresh_ones(case, monkeypatch, tmp_path):
  """With the recorded draw of kept entries; eta is (J + 1) / 2."""
  record, graph, ids = case.record, case.prepared["train"], case.sample("train")
  keys, size = history.Keys.of([graph]), len(graph.configs) * len(graph.segments)
  before, after = record["input/train/table"], record["expect/train/table_after"]
  # The public table can begin with rows of other programs.
  first = np.flatnonzero(before != after)[0] - ids.min() * len(graph.segments) - case.slate.fresh[0]
  values, expected = before[first : first + size], after[first : first + size]
  table = history.HostHistory(keys.entries, 1, "float32", tmp_path)
  table.write(np.arange(size)[None], values[None, :, None])
  keep = np.zeros((1, len(ids), len(graph.segments)), bool)
  keep[0, :, case.slate.others] = record["input/train/keep"]
  monkeypatch.setattr(family.SegmentModel, "keep_mask", lambda self, graphs, shape: keep)
  found = {}

  apply = functools.partial(
    case.family.network.apply, {"params": case.params}, train=True, mutable=["readout"]
  )

  def step(train_state, batch):
    run = jax.vmap(lambda batch: apply(batch, rngs={"dropout": jax.random.key(0)}))
    scores, extra = jax.jit(run)(batch)
    found["scores"] = np.asarray(scores)[0, 0]
    return train_state.replace(extra=extra["readout"]), {}

  family.with_history(step, table, keys)(
    TrainState(0, case.params, ()), jax.tree.map(lambda leaf: np.asarray(leaf)[None], case.batch)
  )
  winners.assert_near(found["scores"], record["expect/train/step_pred_own_entries"], 1e-5, "scores")
  found["table"] = table.read(np.arange(size)[None]).value[0, :, 0]
  winners.assert_near(found["table"], expected, 1e-5, "table")


@of_every_record
def test_the_loss_and_the_gradients_of_a_step_are_the_published_ones(case):
  """Stale scores are those of the public code, which mixes them up for more than two segments."""
  grads = winners.flat(case.gradients)
  scores, expected = (
    case.record[f"expect/train/{name}"] for name in ("step_pred_published", "step_loss")
  )
  loss = winners.loss_of(case.experiment, case.batch)(scores[None])
  winners.assert_near(loss, expected, 1e-6, "loss")
  for name, expected in case.record.under("expect/train/grad").items():
    if name == "emb.weight_norms":
      found = np.linalg.norm(grads["opcodes/embedding/table"], axis=1)
      assert not np.any(expected[len(found) :])
      expected = expected[: len(found)]
    else:
      found = grads[PLACES[name]]
      found = found.T if found.ndim == 2 else found.reshape(expected.shape)
    winners.assert_near(found, expected, 1e-4, name)


@of_every_record
def test_the_rate_and_an_update_are_those_of_pytorch(case):
  """Adam with the decay in the gradient; opcode vectors are shortened before."""
  options = case.experiment.config.optimizer
  rates = options.rate_after(1000)
  np.testing.assert_allclose(
    [rates(step) for step in (0, 250, 500, 999)],
    [1e-4 * (1 + np.cos(np.pi * step / 1000)) / 2 for step in (0, 250, 500, 999)],
    atol=1e-11,
  )
  optimizer = case.family.constrain(options.create(1000))
  update, _ = jax.jit(optimizer.update)(case.gradients, optimizer.init(case.params), case.params)
  update, grads, params = map(winners.flat, (update, case.gradients, case.params))
  for path, old in params.items():
    short = old.astype(np.float64)
    if path == "opcodes/embedding/table":
      length = np.linalg.norm(short, axis=1, keepdims=True)
      short = np.where(length > 1, short / (length + 1e-7), short)
    grad = grads[path] + 5e-4 * short
    expected = short - 1e-4 * grad / (np.abs(grad) + 1e-8)
    np.testing.assert_allclose(old + update[path], expected, rtol=1e-6, atol=3e-7, err_msg=path)


@of_every_record
def test_initial_parameters_are_those_of_pytorch(case):
  constants = dict(op_weights=100, config_weights=100, negative_slope=0.25)
  network = case.experiment.ranker.family.network
  winners.assert_torch_parameters(network, case.batch, **constants)


def test_columns_have_the_unbiased_deviation_and_none_goes():
  x = np.random.default_rng(0).normal(5, 3, (9, 4))
  x[:, 1], x[:, 2] = 7, 7 + 1e-7 * x[:, 0]
  fitted = transforms.fit([x[:4], x[4:]], np.full(4, "gst", object))
  deviation = np.where([True, False, False, True], x.std(axis=0, ddof=1), 1)
  np.testing.assert_allclose(fitted(x), (x - x.mean(axis=0)) / deviation, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset, prelus", [("gst", 1), ("seventh", 3)])
def test_the_7th_place_has_an_activation_behind_each_round(preset, prelus, tmp_path):
  graph = random_graphs.layout_graph(
    np.random.default_rng(0), nodes=12, edges=20, config_nodes=[0, 5], configs=4, features=140
  )
  arrays = {
    "node_feat": graph.node_feat,
    "node_opcode": graph.node_opcode,
    "edge_index": graph.edge_index,
    "node_config_ids": graph.config_node,
    "node_config_feat": graph.configs.decode(np.arange(4)),
    "config_runtime": np.arange(1, 5),
  }
  splits = {split: {"graph": arrays} for split in ("train", "valid", "test")}
  experiment = winners.run_of(f"layout.py:preset={preset},ci", splits, tmp_path)
  (prepared,) = experiment.prepare(experiment.data.load("train"))
  slate = SegmentSlate(prepared, np.arange(4), np.ones(4, np.float32), 0, np.array([0]))
  budget = random_graphs.common_budget([prepared.sizes])
  batch = experiment.ranker.family.assemble([slate], budget, graphs=1, configs=4)
  params = jax.eval_shape(experiment.ranker.family.network.init, jax.random.key(0), batch)["params"]
  layers = [layer for layer in params.values() if isinstance(layer, dict)]
  assert sum("negative_slope" in layer for layer in layers) == prelus
