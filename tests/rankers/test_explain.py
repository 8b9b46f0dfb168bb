"""Explanations of scores as tables."""

import numpy as np
import random_graphs

from tpugraphs_jax.rankers.explain import Exchange, Explanation


def test_the_largest_change_is_first_whatever_its_sign_and_no_cut_loses_it():
  graph = random_graphs.tile_graph(np.random.default_rng(0), nodes=3, edges=2, configs=2)
  changes = [0.5, 2.0, -15.9, -1.0, 0.0]
  rows = [Exchange((), (0, n), (0, 0), change) for n, change in enumerate(changes)]
  found = Explanation(rows, graph, 1, against=0)
  assert [row.change for row in found] == [-15.9, 2.0, -1.0, 0.5, 0.0]
  _, first, rest = [line.split() for line in str(found.table(top=1)).splitlines()][-3:]
  assert first[0] == "-15.9000" and rest[0] == "+1.5000" and rest[1:] == ["4", "more"]
