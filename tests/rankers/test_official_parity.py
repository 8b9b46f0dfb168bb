"""Scores, losses, metrics, gradients and training steps against numbers of the official code."""

from __future__ import annotations

from collections.abc import Iterator
import functools
import json
import os
from pathlib import Path
import re
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import parts, random_graphs
from tpugraphs_jax import losses, metrics
from tpugraphs_jax.data import batching
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.losses import combine, loss_sums, LossOptions, parse_losses
from tpugraphs_jax.optimizer import Optimizer
from tpugraphs_jax.rankers import base, official_weights
from tpugraphs_jax.rankers.layout import res_model
from tpugraphs_jax.train.step import make_train_step, TrainState

FOLDER = Path(os.environ.get("TPUGRAPHS_PARITY_DIR", Path(__file__).parents[1] / "data/parity"))
TILE_FILES = sorted(FOLDER.glob("tile_*.npz"))
LAYOUT_FILES = sorted(FOLDER.glob("layout_*.npz"))
LOSS_FILES = sorted(FOLDER.glob("losses_metrics*.npz"))
# Of the largest number, by what is compared.
TOLERANCES = {"scores": 1e-5, "loss": 1e-5, "gradients": 2e-5, "steps": 5e-5}
Comparisons = Iterator[tuple[str, Any, np.ndarray]]  # what, ours, recorded


def test_there_are_recorded_cases():
  assert TILE_FILES, f"no tile_*.npz in {FOLDER}"
  assert LAYOUT_FILES, f"no layout_*.npz in {FOLDER}"
  assert LOSS_FILES, f"no losses_metrics*.npz in {FOLDER}"


class Recorded:
  """One recorded case: graphs, weights before and after, scores and losses."""

  def __init__(self, path: Path):
    self.arrays = dict(np.load(path))
    self.meta = json.loads(str(self.arrays["meta"]))

  def __getitem__(self, key):
    return self.arrays[key]

  def weights(self, kind: str) -> list[np.ndarray]:
    return [self.arrays[k] for k in sorted(self.arrays) if k.startswith(f"{kind}/")]

  def graphs(self) -> list[dict[str, np.ndarray]]:
    count = len({k.split("/")[0] for k in self.arrays if k.startswith("graph")})
    return [
      {k.split("/")[1]: v for k, v in self.arrays.items() if k.startswith(f"graph{i}/")}
      for i in range(count)
    ]


def assert_all_close(comparisons: Comparisons):
  for what, actual, expected in comparisons:
    scale = max(np.abs(expected).max(), 1e-30)
    tolerance = TOLERANCES[what]
    np.testing.assert_allclose(
      actual, expected, rtol=tolerance, atol=tolerance * scale, err_msg=what
    )


def op_graph(arrays, configs) -> OpGraph:
  own = (arrays[key] for key in ("node_feat", "node_opcode", "edge_index"))
  config_node = arrays.get("node_config_ids", np.zeros(0, np.int32))
  return random_graphs.of_arrays("recorded", *own, config_node, configs)


def tile_batch(case: Recorded, *, padding: int):
  slots = []
  for i, arrays in enumerate(case.graphs()):
    configs = TileConfigs(
      arrays["config_feat"], arrays["config_runtime"], arrays["config_runtime_normalizers"]
    )
    prepared = batching.prepare(op_graph(arrays, configs), arrays["node_feat"], slots=2)
    slots.append(batching.Slate(prepared, np.arange(len(configs)), case["labels"][i]))
  sizes = batching.total_sizes([slot.graph for slot in slots])
  budget = random_graphs.common_budget([sizes], spare=padding)
  return batching.assemble_tile(
    slots, budget, graphs=len(slots), configs=case.meta["num_configs"], transform=lambda x: x
  )


def loss_function(model, losses: str):
  """`(params, batch) -> (loss, scores)`, without penalties."""
  parsed = parse_losses(losses)

  def loss(params, batch):
    scores = model.apply({"params": params}, batch, train=True)
    sums = loss_sums(parsed, scores, jnp.asarray(batch.target), where=batch.config_mask)
    return combine(parsed, *sums), scores

  return loss


def three_steps(
  case: Recorded, model, batch, score, *, losses: str, temperature: float
) -> Comparisons:
  """Scores, losses and weights of three training steps from the recorded start."""
  optimizer = Optimizer(
    learning_rate=case.meta["adam"]["lr"], clip_norm_per_variable=case.meta["adam"]["clipnorm"]
  ).create(3)
  train_step = make_train_step(
    model,
    optimizer,
    LossOptions(losses=losses, temperature=temperature, kernel_l2=1e-4, activity_l2=1e-4),
    clip_lookups=True,
    devices=jax.local_devices()[:1],
  )
  params = official_weights.params_from_official(model, case.weights("init"))
  train_state = parts.replicate(TrainState.create(params, optimizer), 1)
  stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], batch)
  for i, expected in enumerate(case["total_loss_per_step"]):
    train_state, metrics = train_step(train_state, stacked)
    yield "steps", parallel.unreplicate(metrics)["loss"], expected
    params = parallel.unreplicate(train_state).params
    yield "steps", score(params), case[f"scores_after_step{i + 1}"]
  flat = flax.traverse_util.flatten_dict(params)
  for path, weight in zip(official_weights.weight_order(model), case.weights("final"), strict=True):
    yield "steps", flat[path], weight


def tile_comparisons(path: Path) -> Comparisons:
  """Scores and training steps of a recorded model of kernels."""
  case = Recorded(path)
  model = base.create_network("tile", case.meta["model"], **case.meta["kwargs"])
  params = official_weights.params_from_official(model, case.weights("init"))
  batch = tile_batch(case, padding=9)
  apply = jax.jit(functools.partial(model.apply, train=True))
  score = lambda params: apply({"params": params}, batch)
  yield "scores", score(params), case["scores"]
  yield from three_steps(case, model, batch, score, losses=case.meta["loss"], temperature=10.0)


@pytest.mark.parametrize("path", TILE_FILES, ids=lambda path: path.stem)
def test_tile_models_match(path):
  assert_all_close(tile_comparisons(path))


def factored(node_config_feat, runtime) -> LayoutConfigs:
  """Factored recorded rows, which are normalised already, so that the reader would refuse them."""
  configs, nodes, features = node_config_feat.shape
  rows, ids = np.unique(node_config_feat.reshape(-1, features), axis=0, return_inverse=True)
  return LayoutConfigs(
    rows, np.arange(nodes), ids.reshape(configs, nodes), runtime.astype(np.int64)
  )


def layout_batch(case: Recorded, *, hops: int, padding: int):
  slots = []
  for i, arrays in enumerate(case.graphs()):
    configs = factored(arrays["node_config_feat"], arrays["config_runtime"])
    prepared = batching.prepare_program(
      op_graph(arrays, configs), arrays["node_feat"], hops=hops, slots=2
    )
    slots.append(batching.Slate(prepared, np.arange(len(configs)), case["labels"][i]))
  sizes = batching.total_sizes([slot.graph for slot in slots])
  budget = random_graphs.common_budget([sizes], spare=padding)
  batch = batching.assemble_layout(
    slots, budget, graphs=len(slots), configs=case.meta["num_configs"], transform=lambda x: x
  )
  selected = np.concatenate([arrays["selected"] for arrays in case.graphs()])
  block_mask = np.zeros_like(batch.block_mask)
  block_mask[: len(selected)] = selected
  return batch._replace(block_mask=block_mask)


def layout_comparisons(path: Path) -> Comparisons:
  """Scores, loss, gradients and training steps of a recorded model of programs."""
  case = Recorded(path)
  model = res_model.ResModel(**case.meta["kwargs"])
  params = official_weights.params_from_official(model, case.weights("init"))
  batch = layout_batch(case, hops=model.hops, padding=7)
  loss_of = jax.jit(jax.value_and_grad(loss_function(model, "ListMLELoss:1"), has_aux=True))
  (loss, scores), grads = loss_of(params, batch)
  yield "scores", scores, case["scores"]
  yield "loss", loss, case["listmle_loss"]
  flat = flax.traverse_util.flatten_dict(grads)
  for weight_path, grad in zip(
    official_weights.weight_order(model), case.weights("grad"), strict=True
  ):
    yield "gradients", flat[weight_path], grad
  score = lambda params: loss_of(params, batch)[0][1]
  yield from three_steps(case, model, batch, score, losses="ListMLELoss:1", temperature=1.0)


@pytest.mark.parametrize("path", LAYOUT_FILES, ids=lambda path: path.stem)
def test_layout_models_match(path):
  assert_all_close(layout_comparisons(path))


# Losses and metrics. An entry `listmle_t10_ties_grad` is the gradient of ListMLE at temperature 10
# for `labels_ties`; `meta`, where there is one, may name the combined losses.

INPUTS = re.compile(r"(labels|logits)(_.+)?|runtimes|preds|meta")
LOSS = re.compile(
  r"(?P<loss>listmle|hinge|logistic|mse|combined)(_t(?P<temperature>\d+))?"
  r"(?P<suffix>_.+?)??(?P<grad>_grad)?"
)
OFFICIAL = {
  "listmle": "ListMLELoss:1",
  "hinge": "PairwiseHingeLoss:1",
  "logistic": "PairwiseLogisticLoss:1",
  "mse": "MSE:1",
  "combined": "ListMLELoss:1,MSE:0.02",
}
# The official tile trainer's temperature, where an entry's name states none.
TILE_TEMPERATURE = 10.0


def _slates(record, suffix):
  """Logits and labels that an entry with this suffix was computed from."""
  return record.get("logits" + suffix, record["logits"]), record["labels" + suffix]


@functools.cache
def _value_and_grad(weighted, temperature):
  def value(scores, labels):
    options = losses.LossOptions(temperature=temperature)
    sums = losses.loss_sums(weighted, scores, labels, options=options)
    return losses.combine(weighted, *sums)

  return jax.jit(jax.value_and_grad(value))


def _check_loss(record, key, match):
  meta = json.loads(str(record["meta"])) if "meta" in record else {}
  text = OFFICIAL[match["loss"]]
  if match["loss"] == "combined":
    text = meta.get("loss", text)
  weighted = losses.parse_losses(text)
  temperature = float(match["temperature"] or TILE_TEMPERATURE)
  logits, labels = _slates(record, match["suffix"] or "")
  value, grad = _value_and_grad(weighted, temperature)(logits, labels)
  actual = grad if match["grad"] else value
  scale = np.abs(record[key]).max()
  np.testing.assert_allclose(actual, record[key], rtol=1e-5, atol=1e-6 * scale, err_msg=key)


def _check_opa(record, key):
  logits, labels = _slates(record, key.removeprefix("opa"))
  counts = [metrics.ordered_pairs(s, y) for s, y in zip(logits, labels)]
  np.testing.assert_allclose(metrics.pooled_opa(counts), record[key], rtol=1e-6)


def _check_per_graph(record, key):
  graphs = list(zip(record["preds"], record["runtimes"], strict=True))
  if key == "kendalltau":
    actual = [metrics.kendall_tau(s, y) for s, y in graphs]
  else:
    k = int(key.removeprefix("slowdown_top"))
    actual = [metrics.top_k_slowdown(s, y, (k,))[k] for s, y in graphs]
  np.testing.assert_allclose(actual, record[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", LOSS_FILES, ids=lambda path: path.stem)
def test_losses_gradients_and_metrics_equal_the_recorded_ones(path):
  with np.load(path) as file:
    record = dict(file)
  outputs = [key for key in record if not INPUTS.fullmatch(key)]
  assert outputs
  for key in outputs:
    if match := LOSS.fullmatch(key):
      _check_loss(record, key, match)
    elif re.fullmatch(r"opa(_.+)?", key):
      _check_opa(record, key)
    elif re.fullmatch(r"kendalltau|slowdown_top\d+", key):
      _check_per_graph(record, key)
    else:
      pytest.fail(f"{path.name}: no check for entry {key!r}")
