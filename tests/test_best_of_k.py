"""The best of the first k of `benchmarks/best_of_k.py`, and its drawing."""

import itertools
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import best_of_k
from tools import figures


@pytest.mark.parametrize(
  "scores", [[0, 0, 0, 0, 0], [2, 1, 1, 1, 0], [0, 1, 2, 3, 4], [1, 1, 0, 0, 0]]
)
def test_equal_scores_count_as_the_mean_over_all_their_orders(scores):
  runtime = np.array([30, 10, 20, 20, 70])
  ks = range(1, 6)
  orders = [
    order
    for order in itertools.permutations(range(5))
    if sorted(scores) == [scores[i] for i in order]
  ]
  best = np.array([[runtime[list(order[:k])].min() for k in ks] for order in orders])
  found = best_of_k.slowdowns(np.array(scores), runtime, ks)
  np.testing.assert_allclose(found, best.mean(axis=0) / 10 - 1, atol=1e-12)


@pytest.mark.parametrize("theme", figures.THEMES)
def test_every_recorded_slowdown_is_drawn_at_its_height(theme):
  found = figures.recorded("best_of_k")
  root = ElementTree.fromstring(figures.curve(figures.THEMES[theme]))
  grid = {"0.01 %": None, "100 %": None}
  for text in root.findall(".//{*}text"):
    if text.text in grid:
      grid[text.text] = float(text.get("y")) - 5  # text stands below its line
  bottom, top = grid.values()
  heights = {round(float(dot.get("cy")), 1) for dot in root.findall(".//{*}circle")}
  for way in best_of_k.NAMES:
    share = np.log10(np.array(found[way]["slowdown"]) / 1e-4) / 4
    assert {round(bottom + (top - bottom) * part, 1) for part in share} <= heights
