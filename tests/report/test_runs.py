"""Runs are read, grouped by config and compared; every figure has one definition."""

import dataclasses

import numpy as np
import pytest
from run_folders import move, NAMES, several_runs, write_run, write_synthetic
from scipy import stats

from tpugraphs_jax import metrics, synthetic
from tpugraphs_jax.collections import SYNTHETIC, UNKNOWN
from tpugraphs_jax.report import runs

MEASURED_HERE = "measured run times on cpu"


@pytest.fixture
def several(tmp_path):
  return [runs.read(folder) for folder in several_runs(tmp_path)]


def test_each_metric_has_one_name_and_one_definition(tmp_path):
  run = runs.read(write_run(tmp_path / "run", quality=0.6, sizes=(3, 8, 40)))
  pairs = [metrics.ordered_pairs(graph.scores, graph.runtime_ns) for graph in run.judged]
  right, every = np.array(pairs).T
  found = run.means
  assert found["opa_pooled"] == right.sum() / every.sum()
  assert found["opa_mean"] == pytest.approx(np.mean(right / every))
  assert found["opa_mean"] != pytest.approx(found["opa_pooled"])
  assert found["kendaltau_mean"] == pytest.approx(np.mean(
      [stats.kendalltau(graph.scores, graph.runtime_ns).statistic for graph in run.judged]))
  for k in (1, 5, 10):
    order = lambda graph: np.argsort(graph.scores, kind="stable")
    best = [graph.runtime_ns[order(graph)[:k]].min() for graph in run.judged]
    assert found[f"slowdown{k}_mean"] == pytest.approx(np.mean(np.array(best) / 5 - 1))
  assert set(run.references[runs.RANDOM]) == set(found)


@pytest.mark.parametrize("collection, kind, is_known", [
    ("layout:own:mine", MEASURED_HERE, True), ("layout:own:mine", SYNTHETIC, False),
    ("layout:xla:random", MEASURED_HERE, False), ("layout:own:mine", UNKNOWN, False)])
def test_the_compilers_own_choice_is_known_of_collected_programs(
    collection, kind, is_known, tmp_path):
  run = runs.read(write_run(tmp_path / "run", collection=collection, kind=kind))
  assert (runs.DEFAULT in run.references) == is_known
  if is_known:
    expected = np.mean([graph.runtime_ns[0] / graph.runtime_ns.min() - 1 for graph in run.judged])
    assert run.references[runs.DEFAULT]["slowdown1_mean"] == pytest.approx(expected)


def test_the_ceiling_is_judged_like_a_model(tmp_path):
  run = runs.read(write_synthetic(tmp_path))
  for graph in run.judged:
    np.testing.assert_allclose(graph.ceiling_ns, graph.runtime_ns, rtol=0.05)
  perfect = dataclasses.replace(run, judged=tuple(
      dataclasses.replace(graph, scores=graph.ceiling_ns) for graph in run.judged))
  assert run.references[runs.NOISELESS] == perfect.means
  assert 0.9 < perfect.means["opa_pooled"] < 1


@pytest.mark.parametrize("change", ["gone", "other"])
def test_without_the_same_data_there_is_no_ceiling(change, tmp_path):
  run = write_synthetic(tmp_path)
  move(run, tmp_path / "nowhere" if change == "gone" else synthetic.generate(
      tmp_path / "other", collections=["tile:xla"], seed=1, progress=False))
  found = runs.read(run)
  assert all(graph.ceiling_ns is None for graph in found.judged)
  assert runs.NOISELESS not in found.references


def test_runs_that_differ_in_their_seed_make_a_group(several):
  first, second = runs.groups_of(several)
  assert [run.seed for run in first.runs] == [0, 1, 2] == [run.seed for run in second.runs]
  values = [run.means["kendaltau_mean"] for run in first.runs]
  assert first.spread("kendaltau_mean") == pytest.approx((np.mean(values), np.std(values, ddof=1)))
  assert all(np.isnan(value) for value in first.spread("nope"))
  assert runs.differences([first, second]) == [["optimizer.learning_rate", "0.001", "0.01"]]


def test_groups_are_compared_graph_by_graph(several):
  first, second = runs.groups_of(several)
  ((*names, graphs, difference, p_value),) = runs.comparisons([first, second])
  one, two = (group.by_graph(lambda graph: graph.kendall_tau) for group in (first, second))
  change = [two[name] - one[name] for name in NAMES]
  assert names == [second.name, first.name]
  assert graphs == 6 and difference == pytest.approx(np.mean(change))
  assert all(c > 0 for c in change) and p_value == pytest.approx(2 / 2**6)
  ((*_, same, p_value),) = runs.comparisons([first, first])
  assert same == 0 and np.isnan(p_value)
  fewer = dataclasses.replace(first.runs[0], judged=first.runs[0].judged[:2])
  assert runs.comparisons([runs.Group("fewer", (fewer,)), second])[0][2] == 2


def test_configs_are_flat_without_seed_and_place_and_cut_lines_are_left_out(tmp_path):
  run = runs.read(write_run(tmp_path / "run", seed=4))
  assert run.seed == 4 and run.config == {
      "task": "tile", "model.name": "MLP", "train.best_metric": "opa",
      "optimizer.learning_rate": 0.001}
  assert [row["step"] for row in run.rows] == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": 3}'])
def test_a_damaged_config_is_named(tmp_path, text):
  run = write_run(tmp_path / "run")
  (run / "config.json").write_text(text)
  with pytest.raises(ValueError, match="config.json"):
    runs.read(run)
