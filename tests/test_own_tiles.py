"""Figures of tile rankers on Pallas kernels."""

import itertools

import numpy as np
import pytest

from benchmarks import own_tiles
from tpugraphs_jax import metrics


def test_a_random_order_has_the_mean_of_all_orders():
  runtime = np.array([100, 101, 150, 130, 400, 102, 180])
  found = own_tiles.random_figures(runtime)
  first_five = list(itertools.combinations(runtime.tolist(), 5))
  assert found["close"] == pytest.approx(np.mean([min(five) <= 102 for five in first_five]))
  assert found["top5"] == pytest.approx(np.mean([min(five) / 100 - 1 for five in first_five]))
  assert found["top1"] == pytest.approx(np.mean(runtime) / 100 - 1)


def test_the_columns_of_an_order():
  runtime = np.array([100, 103, 150, 130, 400, 102, 180])
  perfect = own_tiles.figures(runtime.astype(float), runtime)
  assert perfect == {"close": 1.0, "top1": 0.0, "top5": 0.0, "tau": 1.0}
  found = own_tiles.figures(-runtime.astype(float), runtime)
  assert found == {"close": 0.0, "top1": 3.0, "top5": pytest.approx(0.03), "tau": -1.0}


def test_a_tie_keeps_the_order_of_the_file():
  runtime = np.array([130, 100])
  assert own_tiles.figures(np.zeros(2), runtime)["top1"] == pytest.approx(0.3)
  assert metrics.kendall_tau(np.zeros(2), runtime) == own_tiles.figures(np.zeros(2), runtime)["tau"]
