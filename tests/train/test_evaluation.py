"""Summary lines and files of a judged ranker."""

import csv
import math
import re

import numpy as np
import pytest

from tests.support import random_graphs
from tpugraphs_jax import metrics
from tpugraphs_jax.data import batching
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.train import evaluation


def test_a_random_order_stands_beside_the_ranker():
  random = evaluation.random_order([np.array([10, 30])], (1, 5, 10))
  assert random == {
    "opa": 0.5,
    "kendaltau": 0.0,
    "slowdown1": 1.0,
    "slowdown5": 0.0,
    "slowdown10": 0.0,
  }
  rows = [{"graph": "a_1", "configs": 2, "slowdown1": 0.25, "slowdown5": 0.0}]
  first, second, protocol, *_ = evaluation.summary(
    Collection("tile:xla"),
    rows,
    {"opa": 0.75, "slowdown1": 0.25},
    random=random,
    configurations="a seeded 2 of each graph",
  ).splitlines()
  assert first == "tile:xla: 1 graphs  opa_pooled 0.7500  slowdown1_mean 0.2500"
  assert second.split()[-4:] == ["opa_pooled", "0.5000", "slowdown1_mean", "1.0000"]
  assert second.index("opa") >= len("  a random order:  ")
  assert "configurations: a seeded 2 of each graph" in protocol


def test_kernels_are_judged_by_runtime_over_normalizer_and_programs_by_runtime():
  rng = np.random.default_rng(0)
  kernel = random_graphs.tile_graph(rng, nodes=3, edges=2, configs=3, name="a_1")
  times = np.array([300, 200, 100])
  kernel = random_graphs.with_configs(kernel, runtime_ns=times, normalizer_ns=np.array([10, 10, 2]))
  program = random_graphs.layout_graph(rng, nodes=3, edges=2, config_nodes=[1], configs=3)
  program = random_graphs.with_configs(program, labels=times)
  ids, scores = np.arange(3), np.float32([2, 1, 3])  # the order of 30, 20 and 50
  for graph, opa, slowdown in ((kernel, 1.0, 0.0), (program, 1 / 3, 1.0)):
    prepared = batching.prepare(graph, graph.node_feat)
    (judged,) = evaluation.with_labels([prepared], [ids], [scores])
    ((row,), means) = evaluation.evaluate([judged], (1,))
    assert row["opa"] == means["opa"] == pytest.approx(opa)
    assert row["slowdown1"] == pytest.approx(slowdown)
  ((row,)) = evaluation.program_rows(
    evaluation.with_labels([batching.prepare(kernel, kernel.node_feat)], [ids], [scores]), [times]
  )
  assert row["kendaltau"] == 1 and row["tile_size_ape"] == 100  # 200 ns chosen, 100 ns the best


def test_graphs_that_no_ranker_can_order_are_counted_apart_and_equal_scores_are_not():
  scores = lambda name, score, label, has_order=True: evaluation.GraphScores(
    name, 3, np.arange(4), np.float32(score), np.array(label), has_order
  )
  judged = [
    scores("right", [1, 2, 3, 4], [10, 20, 30, 40]),
    scores("collapsed", [5, 5, 5, 5], [10, 20, 30, 40]),
    scores("one time", [1, 2, 3, 4], [10, 10, 10, 10]),
    scores("one tile", [5, 5, 5, 5], [20, 10, 10, 10], has_order=False),
  ]
  rows, means = evaluation.evaluate(judged, (1,))
  taus = [row["kendaltau"] for row in rows]
  np.testing.assert_array_equal(taus, [1, 0, math.nan, math.nan])
  np.testing.assert_array_equal([row["opa"] for row in rows], taus)
  assert means == {"opa": 6 / 15, "kendaltau": 0.5, "slowdown1": 0.25}  # 3 pairs of one tile
  assert evaluation.without_order(rows) == ["one time", "one tile"]
  text = evaluation.summary(Collection("layout:xla:random"), rows, means, random=means)
  assert text.count("one tile have no order") == 1 and "mean of 2 of 4 graphs" in text


@pytest.mark.parametrize("kind", ["tile", "layout"])
def test_the_features_of_the_judged_configurations_say_whether_there_is_an_order(kind):
  make = getattr(random_graphs, f"{kind}_graph")
  more = {"config_nodes": [1]} if kind == "layout" else {}
  graph = make(np.random.default_rng(0), nodes=3, edges=2, configs=4, **more)
  field = "config_feat" if kind == "tile" else "group_row"
  choices = np.zeros_like(getattr(graph.configs, field))
  choices[3] = 1
  graph = random_graphs.with_configs(graph, **{field: choices})
  prepared = batching.prepare(graph, graph.node_feat)
  ids = [np.arange(3), np.arange(4)]
  found = evaluation.with_labels([prepared] * 2, ids, [np.zeros(3), np.zeros(4)])
  assert [graph_scores.has_order for graph_scores in found] == [False, True]


@pytest.mark.parametrize("configs, shown", [(8, (1,)), (48, (1, 10)), (101, (1, 10, 100))])
def test_no_slowdown_is_shown_for_more_configurations_than_there_are(configs, shown):
  collection = Collection("layout:xla:random")
  means = {f"slowdown{k}": 0.0 for k in collection.slowdown_ks}
  rows = [{"graph": "a", "configs": configs, **means}, {"graph": "b", "configs": 2, **means}]
  text = evaluation.summary(collection, rows, means, random=means)
  assert set(re.findall(r"slowdown\d+", text)) == {f"slowdown{k}" for k in shown}


def test_scores_are_saved_beside_labels(tmp_path):
  scores = lambda name, nodes, ids, score, label, has_order: evaluation.GraphScores(
    name, nodes, np.array(ids), np.float32(score), np.array(label), has_order
  )
  given = [
    scores("b", 3, [2, 0], [0.5, 0.25], [1.5, 0.1], True),
    scores("a", 4, [1], [1.5], [3.5], False),
  ]
  evaluation.write_scores(tmp_path / "s.npz", given)
  with np.load(tmp_path / "s.npz") as file:
    assert file["graphs"].tolist() == ["b", "a"] and file["sizes"].tolist() == [2, 1]
    assert file["config_ids"].tolist() == [2, 0, 1]
    assert file["labels"].tolist() == [1.5, 0.1, 3.5]
    assert file["scores"].tolist() == [0.5, 0.25, 1.5]
    assert file["has_order"].tolist() == [True, False]
  for read, written in zip(evaluation.read_scores(tmp_path / "s.npz"), given, strict=True):
    np.testing.assert_equal(vars(read), vars(written))


def test_csv_files_hold_six_digits_and_are_replaced_whole(tmp_path):
  path = tmp_path / "validation.csv"
  path.write_text("old")
  rows = [
    {"graph": "a,b", "nodes": 1234567, "opa": 2 / 3, "tau": math.nan},
    {"graph": "c", "nodes": 0, "opa": 1e-9, "tau": -1.0},
  ]
  evaluation.write_csv(path, rows)
  with path.open(newline="") as file:
    found = list(csv.reader(file))
  assert found == [
    ["graph", "nodes", "opa", "tau"],
    ["a,b", "1234567", "0.666667", "nan"],
    ["c", "0", "1e-09", "-1"],
  ]

  def failing():
    yield rows[0]
    raise OSError("disk full")

  before = path.read_bytes()
  with pytest.raises(OSError, match="disk full"):
    evaluation.write_csv(path, failing())
  with pytest.raises(ValueError, match="extra"):
    evaluation.write_csv(path, [rows[0], rows[1] | {"extra": 1}])
  assert path.read_bytes() == before


def test_means_leave_out_nan():
  rows = [
    {"graph": "a", "nodes": 2, "opa": 0.5, "tau": math.nan},
    {"graph": "b", "nodes": 4, "opa": 1.0, "tau": math.nan},
  ]
  means = evaluation.mean_row(rows)
  assert means.keys() == {"opa", "tau"} and means["opa"] == 0.75 and math.isnan(means["tau"])
  rows[0]["tau"] = -0.25
  assert evaluation.mean_row(rows)["tau"] == -0.25
  assert evaluation.mean_row([]) == {}


@pytest.mark.parametrize(
  "scores, expected",
  [
    ([0, 0, 0, 0, 0, 1], True),
    ([3, 0, 0, 0, 0, 1, 0], True),
    ([0, 0, 0, 0, 1, 1], False),
    ([0] * 5, False),
  ],
)
def test_a_ranking_is_tied_where_the_five_best_are_equal(scores, expected):
  assert metrics.is_tied(np.float32(scores)) == expected
