"""Explanations of scores as tables."""

import numpy as np
import pytest

from tests.support import random_graphs
from tpugraphs_jax.rankers.explain import check_numbers, Exchange, Explanation


def test_the_largest_change_is_first_whatever_its_sign_and_no_cut_loses_it():
  graph = random_graphs.tile_graph(np.random.default_rng(0), nodes=3, edges=2, configs=2)
  changes = [0.5, 2.0, -15.9, -1.0, 0.0]
  rows = [Exchange((), (0, n), (0, 0), change) for n, change in enumerate(changes)]
  found = Explanation(rows, graph, 1, against=0)
  assert [row.change for row in found] == [-15.9, 2.0, -1.0, 0.5, 0.0]
  _, first, rest = [line.split() for line in str(found.table(top=1)).splitlines()][-3:]
  assert first[0] == "-15.9000" and rest[0] == "+1.5000" and rest[1:] == ["4", "more"]


@pytest.mark.parametrize("number", [1.0, "1", [1], np.float32(1), -1, 2])
def test_a_number_of_a_configuration_is_a_whole_number_of_the_graph(number):
  graph = random_graphs.tile_graph(np.random.default_rng(0), nodes=3, edges=2, configs=2)
  with pytest.raises((TypeError, ValueError), match="configuration|integer"):
    check_numbers(graph, number)
  check_numbers(graph, None, 0, 1, np.int64(1), np.uint8(0))
