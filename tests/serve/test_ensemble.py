"""How scores of several rankers come together, on edges too."""

import numpy as np
import pytest

from tpugraphs_jax.serve import ensemble


@pytest.mark.parametrize("scores, expected", [
    ([3.0, 1.0, 2.0], [1.0, 0.0, 0.5]), ([5.0], [0.0]), ([2.0, 2.0], [0.0, 0.0]),
    ([-1e30, 0.0, 1e30], [0.0, 0.5, 1.0]),
])
def test_min_max_brings_scores_to_one_scale(scores, expected):
  np.testing.assert_allclose(ensemble.min_max(np.array(scores)), expected)


@pytest.mark.parametrize("scores, expected", [
    ([3.0, 1.0, 2.0], [3, 1, 2]), ([5.0], [1]), ([2.0, 2.0, 1.0], [2.5, 2.5, 1]),
])
def test_equal_scores_share_their_mean_rank(scores, expected):
  np.testing.assert_array_equal(ensemble.ranks(np.array(scores)), expected)


@pytest.mark.parametrize("name", ensemble.COMBINATIONS)
def test_no_combination_changes_the_order_of_a_single_ranker(name):
  scores = np.random.default_rng(0).normal(size=50)
  combined = ensemble.COMBINATIONS[name](scores)
  np.testing.assert_array_equal(np.argsort(combined), np.argsort(scores))


def test_ranks_and_min_max_do_not_depend_on_a_rankers_scale():
  scores = np.random.default_rng(1).normal(size=20)
  for name in ("min_max", "rank"):
    combine = ensemble.COMBINATIONS[name]
    np.testing.assert_allclose(combine(100 * scores - 7), combine(scores), atol=1e-12)
