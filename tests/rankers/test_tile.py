"""Rankers with late join run once per kernel and give the scores of the plain form."""

import numpy as np
import pytest

from tests.support import families, parts, random_graphs
from tpugraphs_jax.data import batching
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers import base, scorer

MODELS = ("LateJoinSAGE", "LateJoinResGCN", "MLP")
# Nodes, edges and configurations: an isolated node, one configuration, and many.
SIZES = [(9, 20, 7), (1, 0, 1), (40, 60, 23), (5, 9, 12), (6, 0, 5)]


def halved(feat):
  return (feat / 2).astype(np.float32)


def family_of(name):
  options = {} if name == "MLP" else {"num_gnns": 2}
  network = base.create_network("tile", name, op_embed_dim=4, hidden_dim=8, **options)
  family = families.make(
    "tile", network, **{"eval.graphs": 2, "eval.configs": 4, "data.neighbour_slots": 2}
  )
  family.config_transform = halved
  return family


@pytest.fixture(scope="module")
def kernels():
  rng = np.random.default_rng(0)
  graphs = [random_graphs.tile_graph(rng, nodes=n, edges=e, configs=c) for n, e, c in SIZES]
  return [family_of("MLP").prepare(graph, graph.node_feat) for graph in graphs]


def made(name, kernels):
  """A family, parameters, and scores of all configurations in the plain way."""
  family = family_of(name)
  slates = [batching.Slate(kernels[0], np.arange(2), np.zeros(2, np.float32))]
  budget = random_graphs.common_budget([kernels[0].sizes])
  batch = family.assemble(slates, budget, graphs=1, configs=2)
  params = parts.params_of(family.network, batch)
  plain = scorer.Encoder(scorer.network_step(family.network), family.assemble, graphs=2, configs=4)
  return family, params, plain(params, kernels, every(kernels))


def every(kernels):
  return [np.arange(len(graph.configs)) for graph in kernels]


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_plain_form(name, kernels):
  family, params, expected = made(name, kernels)
  found = family.scores(params, kernels, every(kernels))
  family.chunk = 8  # chunks end inside kernels and the last is short
  in_chunks = family.scores(params, kernels, every(kernels))
  assert [len(scores) for scores in found] == [configs for _, _, configs in SIZES]
  for whole, chunked, plain in zip(found, in_chunks, expected, strict=True):
    scale = np.abs(plain).max()
    np.testing.assert_allclose(whole, plain, rtol=1e-5, atol=1e-5 * scale)
    np.testing.assert_allclose(chunked, plain, rtol=1e-5, atol=1e-5 * scale)


def test_chosen_configurations_get_their_own_scores(kernels):
  family, params, expected = made("LateJoinSAGE", kernels)
  ids = [np.array([6, 0, 6]), np.array([], int), np.array([22]), np.arange(12), np.array([4, 3])]
  found = family.scores(params, kernels, ids)
  for scores, plain, chosen in zip(found, expected, ids, strict=True):
    np.testing.assert_allclose(scores, plain[chosen], rtol=1e-5, atol=1e-5)
  (alone,) = family.scores(params, kernels[2:3], every(kernels)[2:3])
  np.testing.assert_allclose(alone, expected[2], rtol=1e-5, atol=1e-5)


def test_a_network_runs_once_per_kernel(kernels, monkeypatch):
  family, params, _ = made("LateJoinSAGE", kernels)
  batches, assemble = [], family.assemble
  monkeypatch.setattr(
    family, "assemble", lambda *args, **sizes: batches.append(sizes) or assemble(*args, **sizes)
  )
  family.scores(params, kernels, every(kernels))
  devices = parallel.local_device_count()
  assert batches == [{"graphs": 2, "configs": 1}] * (-(-3 // devices) * devices)
