"""Figures of tile rankers on Pallas kernels."""

import itertools

import numpy as np
import pytest

from benchmarks import own_tiles


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


def test_tied_tiles_have_a_random_order():
  runtime = np.array([100, 103, 150, 130, 400, 102, 180])
  found = own_tiles.tied_figures(np.zeros(7), runtime)
  expected = own_tiles.random_figures(runtime)
  assert found["tau"] == 0.0
  assert found["top1"] == pytest.approx(expected["top1"], rel=0.2)
  assert found["close"] == pytest.approx(expected["close"], abs=0.1)
  exact = own_tiles.tied_figures(runtime, runtime)
  assert exact == {"close": 1.0, "top1": 0.0, "top5": 0.0, "tau": pytest.approx(1.0)}
