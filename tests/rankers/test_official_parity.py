"""Scores, losses, gradients and training steps against numbers of the official code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax import losses as losses_lib
from tpugraphs_jax.data import batching
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers import official_weights as official
from tpugraphs_jax.rankers.layout import res_model
from tpugraphs_jax.train import state as state_lib

FOLDER = Path(os.environ.get("TPUGRAPHS_PARITY_DIR", Path(__file__).parents[1] / "data/parity"))
TILE_FILES = sorted(FOLDER.glob("tile_*.npz"))
LAYOUT_FILES = sorted(FOLDER.glob("layout_*.npz"))
SCORE_TOLERANCE = 1e-5
STEPS_TOLERANCE = 5e-5


def test_there_are_recorded_cases():
  assert TILE_FILES, f"no tile_*.npz in {FOLDER}"
  assert LAYOUT_FILES, f"no layout_*.npz in {FOLDER}"


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


def assert_close(actual, expected, tolerance):
  expected = np.asarray(expected)
  scale = max(np.abs(expected).max(), 1e-30)
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)


def op_graph(arrays, configs) -> OpGraph:
  return OpGraph(
    name="recorded",
    node_feat=arrays["node_feat"],
    node_opcode=arrays["node_opcode"],
    edge_index=arrays["edge_index"],
    node_splits=np.array([0, len(arrays["node_opcode"])]),
    config_node=arrays.get("node_config_ids", np.zeros(0, np.int32)),
    configs=configs,
  )


def tile_batch(case: Recorded, *, padding: int):
  slots = []
  for i, arrays in enumerate(case.graphs()):
    configs = TileConfigs(
      arrays["config_feat"], arrays["config_runtime"], arrays["config_runtime_normalizers"]
    )
    prepared = batching.prepare(op_graph(arrays, configs), arrays["node_feat"], slots=2)
    slots.append(batching.Slate(prepared, np.arange(len(configs)), case["labels"][i]))
  sizes = batching.total_sizes([slot.graph for slot in slots])
  budget = {key: size + padding + (key == "nodes") for key, size in sizes.items()}
  return batching.assemble_tile(
    slots, budget, graphs=len(slots), configs=case.meta["num_configs"], transform=lambda x: x
  )


def loss_function(model, batch, losses: str):
  """`params -> (loss, scores)`, without penalties."""
  parsed = losses_lib.parse_losses(losses)

  def loss(params):
    scores = model.apply({"params": params}, batch, train=True)
    sums = losses_lib.loss_sums(parsed, scores, jnp.asarray(batch.target), where=batch.config_mask)
    return losses_lib.combine(parsed, *sums), scores

  return loss


def check_three_steps(case: Recorded, model, batch, score, *, losses: str, temperature: float):
  """Scores, losses and weights of three training steps from the recorded start."""
  optimizer = state_lib.create_optimizer(
    learning_rate=case.meta["adam"]["lr"],
    total_steps=3,
    clip_norm_per_variable=case.meta["adam"]["clipnorm"],
  )
  train_step = state_lib.make_train_step(
    model,
    optimizer,
    losses_lib.LossOptions(
      losses=losses, temperature=temperature, kernel_l2=1e-4, activity_l2=1e-4
    ),
    devices=jax.local_devices()[:1],
  )
  params = official.params_from_official(model, case.weights("init"))
  train_state, stacked = jax.tree.map(
    lambda leaf: np.asarray(leaf)[None], (state_lib.TrainState.create(params, optimizer), batch)
  )
  for i, expected in enumerate(case["total_loss_per_step"]):
    train_state, metrics = train_step(train_state, stacked)
    assert_close(parallel.unreplicate(metrics)["loss"], expected, STEPS_TOLERANCE)
    params = parallel.unreplicate(train_state).params
    assert_close(score(params), case[f"scores_after_step{i + 1}"], STEPS_TOLERANCE)
  assert_weights_match(model, params, case.weights("final"))


def assert_weights_match(model, params, expected):
  flat = flax.traverse_util.flatten_dict(params)
  for path, weight in zip(official.weight_order(model), expected):
    np.testing.assert_allclose(
      flat[path],
      weight,
      rtol=STEPS_TOLERANCE,
      atol=STEPS_TOLERANCE * np.abs(weight).max(),
      err_msg="/".join(path),
    )


@pytest.mark.parametrize("path", TILE_FILES, ids=lambda path: path.stem)
def test_tile_models_match(path):
  case = Recorded(path)
  model = base.create_network("tile", case.meta["model"], **case.meta["kwargs"])
  params = official.params_from_official(model, case.weights("init"))
  batch = tile_batch(case, padding=9)
  score = jax.jit(lambda params: model.apply({"params": params}, batch, train=True))
  assert_close(score(params), case["scores"], SCORE_TOLERANCE)
  check_three_steps(case, model, batch, score, losses=case.meta["loss"], temperature=10.0)


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
    prepared = batching.prepare(op_graph(arrays, configs), arrays["node_feat"], hops=hops, slots=2)
    slots.append(batching.Slate(prepared, np.arange(len(configs)), case["labels"][i]))
  sizes = batching.total_sizes([slot.graph for slot in slots])
  budget = {key: size + padding + (key == "nodes") for key, size in sizes.items()}
  batch = batching.assemble_layout(
    slots, budget, graphs=len(slots), configs=case.meta["num_configs"], transform=lambda x: x
  )
  selected = np.concatenate([arrays["selected"] for arrays in case.graphs()])
  block_mask = np.zeros_like(batch.block_mask)
  block_mask[: len(selected)] = selected
  return batch._replace(block_mask=block_mask)


@pytest.mark.parametrize("path", LAYOUT_FILES, ids=lambda path: path.stem)
def test_layout_models_match(path):
  case = Recorded(path)
  model = res_model.ResModel(**case.meta["kwargs"])
  params = official.params_from_official(model, case.weights("init"))
  batch = layout_batch(case, hops=model.hops, padding=7)
  loss_of = jax.jit(jax.value_and_grad(loss_function(model, batch, "ListMLELoss:1"), has_aux=True))
  (loss, scores), grads = loss_of(params)
  assert_close(scores, case["scores"], SCORE_TOLERANCE)
  assert_close(loss, case["listmle_loss"], SCORE_TOLERANCE)
  flat = flax.traverse_util.flatten_dict(grads)
  for weight_path, grad in zip(official.weight_order(model), case.weights("grad"), strict=True):
    assert_close(flat[weight_path], grad, 2 * SCORE_TOLERANCE)
  score = lambda params: loss_of(params)[0][1]
  check_three_steps(case, model, batch, score, losses="ListMLELoss:1", temperature=1.0)
