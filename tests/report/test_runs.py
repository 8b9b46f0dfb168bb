"""Runs are read, grouped by config and compared; every figure has one definition."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from tests.support.run_folders import (
  MEASURED_HERE,
  NAMES,
  several_runs,
  write_fold,
  write_run,
  write_scores,
)
from tpugraphs_jax import metrics
from tpugraphs_jax.data import folds
from tpugraphs_jax.datasets import SYNTHETIC, UNKNOWN
from tpugraphs_jax.report import runs


@pytest.fixture
def several(tmp_path):
  return runs.read_all(several_runs(tmp_path))


def test_the_folder_of_a_sweep_stands_for_its_runs(tmp_path):
  several_runs(tmp_path)
  (tmp_path / "c" / "0").mkdir(parents=True)  # not begun
  found = runs.read_all([tmp_path])
  assert [run.name for run in found] == [f"{name}/{seed}" for name in "ab" for seed in range(3)]
  assert len(runs.read_all([tmp_path, tmp_path / "b" / "1"])) == 6
  assert [run.name for run in runs.read_all([tmp_path / "b"])] == ["0", "1", "2"]  # a point
  with pytest.raises(FileNotFoundError, match="config.json is missing"):
    runs.read_all([tmp_path / "c"])


def test_each_metric_has_one_name_and_one_definition(tmp_path):
  run = runs.read(write_run(tmp_path / "run", quality=0.6, sizes=(3, 8, 40)))
  pairs = [metrics.ordered_pairs(graph.scores, graph.labels) for graph in run.judged]
  right, every = np.array(pairs).T
  found = run.means
  assert found["opa_pooled"] == right.sum() / every.sum()
  assert found["opa_mean"] == pytest.approx(np.mean(right / every))
  assert found["opa_mean"] != pytest.approx(found["opa_pooled"])
  assert found["kendaltau_mean"] == pytest.approx(
    np.mean([stats.kendalltau(graph.scores, graph.labels).statistic for graph in run.judged])
  )
  for k in (1, 5, 10):
    order = lambda graph: np.argsort(graph.scores, kind="stable")
    best = [graph.labels[order(graph)[:k]].min() for graph in run.judged]
    assert found[f"slowdown{k}_mean"] == pytest.approx(np.mean(np.array(best) / 5 - 1))
  assert set(run.references[runs.RANDOM]) == set(found)


@pytest.mark.parametrize(
  "collection, kind, is_known",
  [
    ("layout:own:mine", MEASURED_HERE, True),
    ("layout:own:mine", SYNTHETIC, False),
    ("layout:xla:random", MEASURED_HERE, False),
    ("layout:own:mine", UNKNOWN, False),
  ],
)
def test_the_compilers_own_choice_is_known_of_collected_programs(
  collection, kind, is_known, tmp_path
):
  run = runs.read(write_run(tmp_path / "run", collection=collection, kind=kind))
  assert (runs.DEFAULT in run.references) == is_known
  if is_known:
    expected = np.mean([graph.labels[0] / graph.labels.min() - 1 for graph in run.judged])
    assert run.references[runs.DEFAULT]["slowdown1_mean"] == pytest.approx(expected)


def test_runs_that_differ_in_their_seed_make_a_group(several):
  first, second = runs.groups_of(several)
  assert [first.name, second.name] == ["b", "a"]  # the larger Kendall tau first
  assert [run.seed for run in first.runs] == [0, 1, 2] == [run.seed for run in second.runs]
  values = [run.means["kendaltau_mean"] for run in first.runs]
  assert first.spread("kendaltau_mean") == pytest.approx((np.mean(values), np.std(values, ddof=1)))
  assert all(np.isnan(value) for value in first.spread("nope"))
  assert runs.differences([first, second]) == [["optimizer.learning_rate", "0.01", "0.001"]]


def test_the_first_is_compared_with_the_others_graph_by_graph(several):
  first, second = runs.groups_of(several)
  (lead,) = runs.leads([first, second])
  ours, theirs = (group.by_graph(lambda graph: graph.kendall_tau) for group in (first, second))
  change = [ours[name] - theirs[name] for name in NAMES]
  assert (lead.config, lead.graphs) == (second.name, 6)
  assert lead.gain == pytest.approx(np.mean(change))
  gains = [
    ours.means["kendaltau_mean"] - theirs.means["kendaltau_mean"]
    for ours, theirs in zip(first.runs, second.runs)
  ]
  assert lead.spread == pytest.approx(np.std(gains, ddof=1))
  assert all(c > 0 for c in change) and lead.better == 6 and lead.p_value == pytest.approx(2 / 2**6)
  (same,) = runs.leads([first, first])
  assert (same.gain, same.better) == (0, 0) and np.isnan(same.p_value)
  run = first.runs[0]
  fewer = runs.RunGroup("fewer", (dataclasses.replace(run, judged=run.judged[:5]),))
  (lead,) = runs.leads([fewer, second])
  assert lead.graphs == 5 and np.isnan(lead.p_value)  # five graphs have no p below 0.0625


def test_runs_of_other_collections_labels_or_graphs_do_not_compare(tmp_path):
  folders = [
    write_run(tmp_path / "a"),
    write_run(tmp_path / "b", seed=1),
    write_run(tmp_path / "c", collection="layout:own:mine"),
    write_run(tmp_path / "d", kind=MEASURED_HERE),
    write_run(tmp_path / "e", sizes=(5, 6)),
  ]
  found = runs.comparisons(runs.read_all(folders))
  assert [[run.name for run in comparison.runs] for comparison in found] == [
    ["a", "b"],
    ["c"],
    ["d"],
    ["e"],
  ]


def test_a_verdict_says_who_is_first_and_the_lowest_graph(several):
  (comparison,) = runs.comparisons(several)
  text = " ".join(comparison.verdict)
  first = comparison.groups[0]
  taus = first.by_graph(lambda graph: graph.kendall_tau)
  name = min(taus, key=taus.get)
  assert text.startswith(f"b is first: Kendall tau {np.mean(list(taus.values())):.3f}, mean of 6")
  assert f"lowest Kendall tau is {taus[name]:.3f}, of {name}" in text and "p = 0.031" in text


@pytest.mark.parametrize("seeds, is_paired", [((0, 1, 2), True), ((5, 6, 7), False)])
def test_configs_within_the_spread_over_seeds_are_level(seeds, is_paired, tmp_path):
  order = {1.0: [0, 1, 2, 3, 4], 0.6: [1, 0, 2, 4, 3], 0.4: [2, 1, 0, 3, 4]}
  for name, taus, seeds_of in (("a", (1.0, 0.6, 1.0), (0, 1, 2)), ("b", (0.6, 1.0, 0.4), seeds)):
    for tau, seed in zip(taus, seeds_of):
      run = write_run(tmp_path / name / str(seed), seed=seed, rate=ord(name), sizes=(5,))
      write_scores(run, ["g"], [np.arange(10, 15)], [np.array(order[tau])])
  (comparison,) = runs.comparisons(runs.read_all([tmp_path]))
  (lead,) = runs.leads(comparison.groups)
  a, b = np.array([1.0, 0.6, 1.0]), np.array([0.6, 1.0, 0.4])
  spread = np.std(a - b, ddof=1) if is_paired else np.hypot(a.std(ddof=1), b.std(ddof=1))
  assert lead.gain == pytest.approx(0.2) and lead.spread == pytest.approx(spread)
  assert "are level: Kendall tau 0.867" in comparison.verdict[0]


def test_a_model_that_collapses_on_a_graph_is_not_first(tmp_path):
  up, down, flat = np.arange(8), np.arange(8)[[1, 0, 3, 2, 5, 4, 7, 6]], np.zeros(8)
  for name, scores in (("collapsed", [up, flat, flat]), ("fair", [down, down, flat])):
    run = write_run(tmp_path / name, rate=len(name), sizes=(8, 8, 8))
    write_scores(run, ["a", "b", "c"], [np.arange(10, 18)] * 3, scores, [True, True, False])
  found = runs.read_all([tmp_path / "collapsed", tmp_path / "fair"])
  (comparison,) = runs.comparisons(found)
  assert [group.name for group in comparison.groups] == ["fair", "collapsed"]
  assert comparison.verdict[0].startswith(
    "fair is ahead: Kendall tau 0.714, mean of 2 of 3 graphs; c has no order, 0.214 above collapsed"
  )
  (lead,) = runs.leads(comparison.groups)
  assert (lead.graphs, lead.better) == (2, 1)
  assert runs.groups_of(found[:1])[0].taus == pytest.approx({"a": 1, "b": 0})


@pytest.mark.parametrize("collection", ["tile:xla", "layout:xla:random"])
@pytest.mark.parametrize("scores, is_behind", [([5, 4, 3, 2, 1, 0], True), (range(6), False)])
def test_a_verdict_says_where_choices_are_behind_random_ones(
  scores, is_behind, collection, tmp_path
):
  folder = write_run(tmp_path / "run", sizes=(6,), collection=collection)
  write_scores(folder, ["a"], [np.arange(10, 16)], [np.array(scores)])
  (comparison,) = runs.comparisons([runs.read(folder)])
  expected = "the best of 5 is 10 % slower, of 5 random ones 1.7 %"  # 11 / 10, and 1 in 6 misses 10
  assert (expected in " ".join(comparison.verdict)) == is_behind


def test_configs_are_flat_without_seed_and_place_and_cut_lines_are_left_out(tmp_path):
  run = runs.read(write_run(tmp_path / "run", seed=4))
  assert run.seed == 4 and run.config == {
    "task": "tile",
    "model.name": "MLP",
    "train.best_metric": "opa",
    "optimizer.learning_rate": 0.001,
  }
  assert [row["step"] for row in run.rows] == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": 3}'])
def test_a_damaged_config_is_named(tmp_path, text):
  run = write_run(tmp_path / "run")
  (run / "config.json").write_text(text)
  with pytest.raises(ValueError, match="config.json"):
    runs.read(run)


def test_a_run_that_was_not_evaluated_says_so_beside_others(tmp_path):
  folders = [write_run(tmp_path / name) for name in ("a", "b")]
  (folders[0] / "validation_scores.npz").unlink()
  first, second = runs.comparisons(runs.read_all(folders))
  assert first.verdict == ["a: not evaluated yet."] and second.verdict[0].startswith("b: Kendall")


def test_runs_on_folds_are_one_config_and_compare_graph_by_graph(tmp_path):
  signs = {"good": [(1, 1, 1), (1, 1, -1), (1, 1, 1)], "bad": [(1, -1, -1), (1, 1, -1), (1, -1, 1)]}
  folders = [
    write_fold(tmp_path / name / f"fold={fold}", fold, taus, rate=len(name))
    for name, by_fold in signs.items()
    for fold, taus in enumerate(by_fold)
  ]
  (comparison,) = runs.comparisons(runs.read_all(folders))
  good, bad = comparison.groups
  assert (good.name, good.folds, len(good.graphs)) == ("good", [0, 1, 2], 9)
  means = [np.mean(taus) for taus in signs["good"]]
  expected = (pytest.approx(np.mean(means)), pytest.approx(np.std(means, ddof=1)))
  assert good.spread(runs.TAU) == expected
  (lead,) = runs.leads(comparison.groups)
  change = np.subtract(np.concatenate(signs["good"]), np.concatenate(signs["bad"]))
  assert (lead.graphs, lead.gain, lead.better) == (9, pytest.approx(change.mean()), 3)
  assert comparison.references[runs.RANDOM]["kendaltau_mean"] == 0
  assert "out of fold (test folds 0, 1, 2 of 3), mean of 9 graphs" in comparison.verdict[0]


OUT_OF_FOLD = {  # Kendall tau of the graphs of three folds, by config and seed
  ("a", 0): [(1,), (1, 1, -1), (-1, 1)],
  ("a", 1): [(1,), (1, 1, 1), (-1, 1)],
  ("b", 0): [(1,), (-1, 1, -1), (-1, -1)],
  ("b", 1): [(1,), (-1, -1, -1), (1, 1)],
}


def seeds_and_folds(folder, kept=lambda seed, fold: True):
  """The comparison of the runs of `OUT_OF_FOLD`, or of those that are kept."""
  folders = [
    write_fold(folder / f"{name},fold={k}/seed_{seed}", k, some, seed=seed, rate=ord(name))
    for (name, seed), by_fold in OUT_OF_FOLD.items()
    for k, some in enumerate(by_fold)
    if kept(seed, k)
  ]
  (comparison,) = runs.comparisons(runs.read_all(folders))
  return comparison


def test_figures_out_of_fold_weigh_graphs_alike_and_spread_over_seeds(tmp_path):
  comparison = seeds_and_folds(tmp_path)
  means = {of: np.mean(np.concatenate(by_fold)) for of, by_fold in OUT_OF_FOLD.items()}
  a, b = (np.array([means[name, seed] for seed in (0, 1)]) for name in "ab")
  first, (lead,) = comparison.groups[0], runs.leads(comparison.groups)
  assert first.name == "a"
  assert first.out_of_fold.spread(runs.TAU) == pytest.approx((a.mean(), a.std(ddof=1)))
  assert (lead.gain, lead.spread) == pytest.approx((np.mean(a - b), np.std(a - b, ddof=1)))
  assert f"Kendall tau {a.mean():.3f} out of fold" in comparison.verdict[0]


def test_a_seed_without_all_folds_is_in_no_spread(tmp_path):
  comparison = seeds_and_folds(tmp_path / "one", lambda seed, fold: (seed, fold) != (1, 2))
  first, (lead,) = comparison.groups[0].out_of_fold, runs.leads(comparison.groups)
  assert [(run.seed, len(run.judged)) for run in first.runs] == [(0, 6)] and np.isnan(lead.spread)
  # No seed has all three folds: their graphs make one run.
  comparison = seeds_and_folds(tmp_path / "none", lambda seed, fold: seed == (fold == 2))
  first = comparison.groups[0].out_of_fold
  (run,) = first.runs
  assert len(run.judged) == 6 and run.means[runs.TAU] == pytest.approx(
    np.mean([1, 1, 1, -1, -1, 1])
  )


def test_a_fold_that_was_not_judged_yet_stands_beside_the_others(tmp_path):
  folders = [
    write_fold(tmp_path / f"{name}{k}", k, (1, -1), rate=ord(name)) for name in "ab" for k in (0, 1)
  ]
  for folder in (folders[0], folders[2]):
    (folder / "test_scores.npz").unlink()
  verdicts = [comparison.verdict for comparison in runs.comparisons(runs.read_all(folders))]
  assert sum("not evaluated yet" in verdict[0] for verdict in verdicts) == 1 and len(verdicts) == 2
  assert any("test folds 1 of 3" in verdict[0] for verdict in verdicts)


def test_runs_on_other_folds_do_not_compare(tmp_path):
  first, second = (write_fold(tmp_path / name, 0, (1, 1, 1)) for name in "ab")
  path = second / folds.FILE
  path.write_text(path.read_text().replace('g8": 2', 'g8": 1'))
  released = write_run(tmp_path / "c")
  assert len(runs.comparisons(runs.read_all([first, second, released]))) == 3
