"""Scores, losses, gradients and training steps against numbers of the official code."""

from __future__ import annotations

from collections.abc import Iterator
import functools
import json
import os
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import parts, random_graphs
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
# Of the largest number, by what is compared.
TOLERANCES = {"scores": 1e-5, "loss": 1e-5, "gradients": 2e-5, "steps": 5e-5}
Comparisons = Iterator[tuple[str, Any, np.ndarray]]  # what, ours, recorded


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
