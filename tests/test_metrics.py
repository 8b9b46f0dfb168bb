"""Metrics against brute force over all pairs, and their edge cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tpugraphs_jax import metrics


def _slow_ordered_pairs(scores, runtime):
  slower = runtime[:, None] > runtime[None, :]
  return int((slower & (scores[:, None] > scores[None, :])).sum()), int(slower.sum())


def _slow_tau_b(scores, runtime):
  signs = [np.sign(a[:, None] - a[None, :]) for a in (scores, runtime)]
  norm = math.sqrt((signs[0] ** 2).sum()) * math.sqrt((signs[1] ** 2).sum())
  return (signs[0] * signs[1]).sum() / norm


def _random_graphs(count=60):
  """Lists of many lengths, with few to no ties in scores and in runtimes."""
  rng = np.random.default_rng(0)
  for _ in range(count):
    configs = rng.integers(2, 40)
    scores = rng.integers(0, rng.choice([2, 5, 1000]), size=configs)
    runtime = rng.integers(1, rng.choice([3, 9, 10**6]), size=configs)
    yield scores.astype(np.float32), runtime


def test_ordered_pairs_and_opa_equal_brute_force_with_ties():
  for scores, runtime in _random_graphs():
    expected = _slow_ordered_pairs(scores, runtime)
    assert metrics.ordered_pairs(scores, runtime) == expected
    if expected[1]:
      assert metrics.opa(scores, runtime) == expected[0] / expected[1]


def test_kendall_tau_equals_brute_force_tau_b_with_ties():
  checked = 0
  for scores, runtime in _random_graphs():
    if len(set(scores)) > 1 and len(set(runtime)) > 1:
      actual = metrics.kendall_tau(scores, runtime)
      np.testing.assert_allclose(actual, _slow_tau_b(scores, runtime), rtol=1e-12)
      checked += 1
  assert checked > 30


@pytest.mark.parametrize("configs", [2, 3, 1000, 50_000])
def test_perfect_reversed_and_tied_scores_count_exactly(configs):
  runtime = np.random.default_rng(0).permutation(configs) + 1
  pairs = configs * (configs - 1) // 2
  assert metrics.ordered_pairs(runtime, runtime) == (pairs, pairs)
  assert metrics.ordered_pairs(-runtime, runtime) == (0, pairs)
  assert metrics.ordered_pairs(np.zeros(configs), runtime) == (0, pairs)
  assert metrics.kendall_tau(runtime, runtime) == 1.0
  assert metrics.kendall_tau(-runtime, runtime) == -1.0


def test_runtimes_that_only_int64_tells_apart_are_told_apart():
  runtime = 2**60 + np.arange(4)
  scores = np.array([3.0, 2.0, 1.0, 0.0])
  assert metrics.ordered_pairs(scores, runtime) == (0, 6)
  assert metrics.kendall_tau(scores, runtime) == -1.0


def test_pooled_opa_weighs_a_graph_by_its_pairs():
  graphs = list(_random_graphs())
  counts = [_slow_ordered_pairs(*graph) for graph in graphs]
  expected = sum(c for c, _ in counts) / sum(p for _, p in counts)
  pooled = metrics.pooled_opa(metrics.ordered_pairs(*graph) for graph in graphs)
  assert pooled == expected


def test_metrics_are_nan_where_there_is_no_order():
  constant, varied = np.full(3, 7), np.array([1, 2, 3])
  assert math.isnan(metrics.opa(varied, constant))
  assert math.isnan(metrics.opa(np.array([1.0]), np.array([5])))
  assert math.isnan(metrics.pooled_opa([]))
  assert math.isnan(metrics.kendall_tau(varied, constant))
  assert math.isnan(metrics.kendall_tau(np.array([1.0]), np.array([5])))


def test_equal_scores_are_as_good_as_a_random_order_for_tau_and_worse_for_opa():
  constant, varied = np.full(3, 7), np.array([1, 2, 2])
  assert metrics.kendall_tau(constant, varied) == 0.0 == metrics.opa(constant, varied)


def test_a_mean_says_of_how_many_graphs_it_is_and_names_the_others():
  assert metrics.mean_of(1, []) == "mean of 1 graph" and metrics.mean_of(3, []).endswith("3 graphs")
  assert metrics.mean_of(9, ["a", "b"]) == "mean of 7 of 9 graphs; a, b have no order"
  assert metrics.mean_of(9, list("abcdef")).endswith(
    "of 9 graphs; a, b, c, d, e, ... have no order"
  )
  assert metrics.mean([1.0, math.nan, 2.0]) == 1.5 and math.isnan(metrics.mean([math.nan]))


def test_top_k_slowdown_is_the_gap_to_the_best_among_the_k_lowest_scores():
  scores = np.array([0.3, 0.1, 0.2, 0.4])
  runtime_ns = np.array([30, 40, 25, 20])
  slowdown = metrics.top_k_slowdown(scores, runtime_ns, (1, 2, 3, 4, 100))
  assert slowdown == {1: 1.0, 2: 0.25, 3: 0.25, 4: 0.0, 100: 0.0}


def test_tied_scores_keep_file_order_in_top_k():
  assert metrics.best_of_top_k(np.zeros(3), np.array([30, 10, 20]), 1) == 30
  assert metrics.best_of_top_k(np.zeros(3), np.array([30, 10, 20]), 2) == 10


def test_tile_size_ape_weighs_kernels_by_their_best_runtime():
  chosen, best = np.array([110, 2000]), np.array([100, 1900])
  assert metrics.tile_size_ape(chosen, best) == 100 * (10 + 100) / (100 + 1900)


def test_mape_averages_relative_errors():
  predicted, runtime = np.array([90.0, 220.0]), np.array([100, 200])
  np.testing.assert_allclose(metrics.mape(predicted, runtime), 10.0)


def test_means_of_programs_are_over_names_up_to_the_last_underscore():
  means = metrics.mean_by_program({"b_c_-1": 1.0, "a_1": 5.0, "b_c_2": 2.0, "a_2": math.nan})
  assert list(means.items()) == [("a", 5.0), ("b_c", 1.5)]


ALL = [
  metrics.ordered_pairs,
  metrics.opa,
  metrics.kendall_tau,
  lambda scores, runtime: metrics.best_of_top_k(scores, runtime, 1),
  lambda scores, runtime: metrics.top_k_slowdown(scores, runtime, (1,)),
  metrics.tile_size_ape,
  metrics.mape,
]


@pytest.mark.parametrize(
  "scores, runtime, complaint",
  [
    ([1.0, 2.0], [0, 0], "labelled"),
    ([1.0, 2.0], [1], "shape"),
    ([[1.0, 2.0]], [[1, 2]], "shape"),
    ([], [], "shape"),
    ([1.0, math.nan], [1, 2], "NaN"),
    ([1.0, 2.0], [math.nan, 2.0], "NaN"),
  ],
)
@pytest.mark.parametrize("metric", ALL)
def test_input_that_no_metric_can_judge_is_refused(metric, scores, runtime, complaint):
  with pytest.raises(ValueError, match=complaint) as error:
    metric(np.array(scores), np.array(runtime))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("metric", ALL[4:])
def test_relative_metrics_need_positive_runtimes(metric):
  with pytest.raises(ValueError, match="positive"):
    metric(np.array([1.0, 2.0]), np.array([5, 0]))


def test_k_below_one_is_refused():
  with pytest.raises(ValueError, match="k is 0"):
    metrics.top_k_slowdown(np.array([1.0]), np.array([1]), (0,))


@pytest.mark.parametrize("runtime", [[7, 3, 3, 9, 4, 12], [5, 5], [2], [8, 1, 6]])
def test_random_slowdown_is_the_mean_over_all_draws(runtime):
  found = metrics.random_slowdown(np.array(runtime, np.int64), (1, 2, 5))
  for k in (1, 2, 5):
    draws = list(itertools.combinations(runtime, min(k, len(runtime))))
    assert found[k] == pytest.approx(np.mean([min(draw) for draw in draws]) / min(runtime) - 1)


def test_random_slowdown_of_many_configurations_stays_finite():
  found = metrics.random_slowdown(np.arange(1, 100_001), (1, 100))
  # The expected smallest of k out of 1..n is (n + 1) / (k + 1).
  assert found == pytest.approx({1: 100_001 / 2 - 1, 100: 100_001 / 101 - 1})
