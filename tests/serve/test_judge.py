"""Names of means say how graphs were put together; a number of each graph stays one."""

import csv
import math

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


def test_csv_files_hold_six_digits_and_are_replaced_whole(tmp_path):
  path = tmp_path / "validation.csv"
  path.write_text("old")
  rows = [{"graph": "a,b", "nodes": 1234567, "opa": 2 / 3, "tau": math.nan},
          {"graph": "c", "nodes": 0, "opa": 1e-9, "tau": -1.0}]
  judge.write_csv(path, rows)
  with path.open(newline="") as file:
    found = list(csv.reader(file))
  assert found == [["graph", "nodes", "opa", "tau"], ["a,b", "1234567", "0.666667", "nan"],
                   ["c", "0", "1e-09", "-1"]]

  def failing():
    yield rows[0]
    raise OSError("disk full")

  before = path.read_bytes()
  with pytest.raises(OSError, match="disk full"):
    judge.write_csv(path, failing())
  with pytest.raises(ValueError, match="extra"):
    judge.write_csv(path, [rows[0], rows[1] | {"extra": 1}])
  assert path.read_bytes() == before


def test_means_leave_out_what_is_no_number():
  rows = [{"graph": "a", "nodes": 2, "opa": 0.5, "tau": math.nan},
          {"graph": "b", "nodes": 4, "opa": 1.0, "tau": math.nan}]
  means = judge.mean_row(rows)
  assert means.keys() == {"opa", "tau"} and means["opa"] == 0.75 and math.isnan(means["tau"])
  rows[0]["tau"] = -0.25
  assert judge.mean_row(rows)["tau"] == -0.25
  assert judge.mean_row([]) == {}
