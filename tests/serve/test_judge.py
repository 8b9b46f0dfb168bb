"""Names of means say how graphs were put together; a number of each graph stays one."""

import numpy as np
import pytest

from tpugraphs_jax import metrics
from tpugraphs_jax.serve import judge


@pytest.mark.parametrize("metric, name", [
    ("opa", "opa_pooled"), ("kendaltau", "kendaltau_mean"), ("slowdown5", "slowdown5_mean")])
def test_a_mean_is_named_after_what_it_is_over(metric, name):
  assert judge.mean_name(metric) == name


def test_numbers_of_graphs_stay_numbers_of_graphs():
  rows = [{"graph": "a", "nodes": 3, "opa": 0.5, "kendaltau": 0.25},
          {"graph": "b", "nodes": 4, "opa": 0.75, "kendaltau": float("nan")}]
  found = judge.by_graph(rows)
  assert list(found) == ["opa_by_graph", "kendaltau_by_graph"]
  np.testing.assert_array_equal(found["opa_by_graph"], [0.5, 0.75])
  np.testing.assert_array_equal(found["kendaltau_by_graph"], [0.25, np.nan])


def test_without_graphs_there_are_no_numbers():
  assert judge.by_graph([]) == {}


def test_pooled_and_mean_differ_where_graphs_differ_in_size():
  scores = [np.array([1.0, 2.0]), np.array([3.0, 2.0, 1.0])]
  runtimes = [np.array([1, 2]), np.array([1, 2, 3])]
  pairs = [metrics.ordered_pairs(s, r) for s, r in zip(scores, runtimes)]
  assert metrics.pooled_opa(pairs) == 1 / 4  # one of one, none of three
  assert np.mean([metrics.opa(s, r) for s, r in zip(scores, runtimes)]) == 1 / 2
