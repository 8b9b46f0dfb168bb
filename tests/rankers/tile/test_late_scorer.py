"""Rankers with late join run once per kernel; their scores are those of the plain form."""

import jax
import numpy as np
import pytest
import random_graphs

from tpugraphs_jax.data import batching
from tpugraphs_jax.rankers import base, scorer as scorer_lib
from tpugraphs_jax.rankers.tile import late_scorer
from tpugraphs_jax.rankers.tile.batcher import TileBatcher
from tpugraphs_jax.train import step as step_lib

MODELS = ("LateJoinSAGE", "LateJoinResGCN", "MLP")
# Nodes, edges and configurations: an isolated node, one configuration, and many.
SIZES = [(9, 20, 7), (1, 0, 1), (40, 60, 23), (5, 9, 12), (6, 0, 5)]


def halved(feat):
  return (feat / 2).astype(np.float32)


@pytest.fixture(scope="module")
def batcher():
  return TileBatcher(halved, neighbour_slots=2)


@pytest.fixture(scope="module")
def kernels(batcher):
  rng = np.random.default_rng(0)
  return [batcher.prepare(random_graphs.tile_graph(rng, nodes=n, edges=e, configs=c))
          for n, e, c in SIZES]


def made(name, batcher, kernels):
  """A model with parameters, and its scores on all configurations in the plain way."""
  options = {} if name == "MLP" else {"num_gnns": 2}
  model = base.create("tile", name, op_embed_dim=4, hidden_dim=8, **options)
  plain = scorer_lib.Scorer(step_lib.make_score_step(model), batcher.assemble,
                            graphs_per_batch=2, configs_per_batch=4)
  slates = [batching.Slate(kernels[0], np.arange(2), np.zeros(2, np.float32))]
  budget = random_graphs.common_budget([kernels[0].sizes])
  batch = batcher.assemble(slates, budget, graphs=1, configs=2)
  params = jax.jit(model.init)(jax.random.key(1), batch)["params"]
  return model, params, plain.scores(params, kernels)


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_plain_form(name, batcher, kernels, monkeypatch):
  model, params, expected = made(name, batcher, kernels)
  scorer = late_scorer.LateScorer(model, batcher, graphs_per_batch=2)
  found = scorer.scores(params, kernels)
  monkeypatch.setattr(late_scorer, "_CHUNK", 8)  # chunks end inside kernels and the last is short
  in_chunks = scorer.scores(params, kernels)
  assert [len(scores) for scores in found] == [configs for _, _, configs in SIZES]
  for one, other, plain in zip(found, in_chunks, expected, strict=True):
    scale = np.abs(plain).max()
    np.testing.assert_allclose(one, plain, rtol=1e-5, atol=1e-5 * scale)
    np.testing.assert_allclose(other, plain, rtol=1e-5, atol=1e-5 * scale)


def test_chosen_configurations_get_their_own_scores(batcher, kernels):
  model, params, expected = made("LateJoinSAGE", batcher, kernels)
  scorer = late_scorer.LateScorer(model, batcher, graphs_per_batch=3)
  ids = [np.array([6, 0, 6]), np.array([], int), np.array([22]), np.arange(12), np.array([4, 3])]
  found = scorer.scores(params, kernels, config_ids=ids)
  for scores, plain, chosen in zip(found, expected, ids, strict=True):
    np.testing.assert_allclose(scores, plain[chosen], rtol=1e-5, atol=1e-5)
  assert scorer.scores(params, []) == []
  (alone,) = scorer.scores(params, kernels[2:3])
  np.testing.assert_allclose(alone, expected[2], rtol=1e-5, atol=1e-5)


def test_a_network_runs_once_per_kernel(batcher, kernels, monkeypatch):
  model, params, _ = made("LateJoinSAGE", batcher, kernels)
  scorer, batches = late_scorer.LateScorer(model, batcher, graphs_per_batch=2), []
  run = scorer._pooled
  monkeypatch.setattr(
      scorer, "_pooled", lambda params, batch: batches.append(batch) or run(params, batch))
  scorer.scores(params, kernels)
  assert len(batches) == 3 and all(batch.config_feat.shape[:2] == (2, 1) for batch in batches)


