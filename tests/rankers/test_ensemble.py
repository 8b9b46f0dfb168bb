"""Combinations of the scores of several rankers."""

import numpy as np
import pytest

from tests.support import small_runs
import tpugraphs_jax
from tpugraphs_jax.data import npz
from tpugraphs_jax.rankers import ranker
from tpugraphs_jax.rankers.ranker import COMBINATIONS, Ensemble


@pytest.fixture(scope="module")
def runs():
  return small_runs.all_runs()


@pytest.mark.parametrize(
  "scores, expected",
  [
    ([3.0, 1.0, 2.0], [1.0, 0.0, 0.5]),
    ([5.0], [0.0]),
    ([2.0, 2.0], [0.0, 0.0]),
    ([-1e30, 0.0, 1e30], [0.0, 0.5, 1.0]),
  ],
)
def test_min_max_brings_scores_to_one_scale(scores, expected):
  np.testing.assert_allclose(ranker.min_max(np.array(scores)), expected)


@pytest.mark.parametrize(
  "scores, expected", [([3.0, 1.0, 2.0], [3, 1, 2]), ([5.0], [1]), ([2.0, 2.0, 1.0], [2.5, 2.5, 1])]
)
def test_equal_scores_share_their_mean_rank(scores, expected):
  np.testing.assert_array_equal(COMBINATIONS["rank"](np.array(scores)), expected)


@pytest.mark.parametrize("combine", ["mean", "min_max", "rank"])
def test_an_ensemble_averages_the_combined_scores_of_its_members(combine, runs):
  graph = npz.read_tile(npz.split_files(runs.data_root, "tile:xla", "test")[0])
  places = [runs.workdir("tile_whole"), runs.workdir("tile_two_devices")]
  by_model = [tpugraphs_jax.load(place).scores([graph])[0].astype(np.float64) for place in places]
  if combine == "min_max":
    by_model = [(s - min(s)) / (max(s) - min(s)) for s in by_model]
  elif combine == "rank":
    rank = lambda score, s: np.mean([sum(s < score) + 1, sum(s <= score)])
    by_model = [[rank(score, s) for score in s] for s in by_model]
  ensemble = Ensemble(places, combine=combine)
  (scores,) = ensemble.scores([graph])
  some = np.array([4, 0, 2])
  members = [ranker.scores([graph], [some])[0] for ranker in ensemble.rankers]
  combine_of = COMBINATIONS[combine]
  np.testing.assert_allclose(
    ensemble.scores([graph], [some])[0],
    np.mean([combine_of(m) for m in members], axis=0),
    rtol=1e-6,
  )
  np.testing.assert_allclose(scores, np.mean(by_model, axis=0), rtol=1e-12)
  np.testing.assert_array_equal(ensemble.rank(graph)[0], np.argsort(scores, kind="stable"))


def test_impossible_ensembles_are_refused(runs):
  with pytest.raises(ValueError, match="collection"):
    Ensemble([runs.workdir("tile_whole"), runs.workdir("layout_whole")])
  with pytest.raises(ValueError, match="median"):
    Ensemble([runs.workdir("tile_whole")], combine="median")
  with pytest.raises(ValueError, match="at least one"):
    Ensemble([])
