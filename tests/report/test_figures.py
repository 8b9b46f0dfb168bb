"""Every figure states its kind of labels; counts of pairs equal a loop."""

import itertools

import numpy as np
import pytest
from run_folders import write_run

from tpugraphs_jax import collections
from tpugraphs_jax.report import figures, runs

ESTIMATE = "ESTIMATE of a compiler (tpu_estimate, v3), no measurement"


def slow_counts(scores, runtime):
  """Counts of right pairs and of all pairs, by difference, by a loop over all pairs."""
  right, every = np.zeros((2, len(figures.EDGES) - 1))
  for i, j in itertools.permutations(range(len(runtime)), 2):
    if runtime[i] > runtime[j]:
      difference = (runtime[i] - runtime[j]) / runtime[j]
      which = sum(edge <= difference for edge in figures.EDGES) - 1
      every[which] += 1
      right[which] += 0.5 if scores[i] == scores[j] else scores[i] > scores[j]
  return right, every


@pytest.mark.parametrize("count, levels", [(1, 5), (2, 5), (30, 3), (40, 10_000)])
def test_pairs_are_counted_as_by_a_loop(count, levels):
  rng = np.random.default_rng(count)
  runtime = 1_000_000 + rng.integers(0, levels, count) * rng.choice([1, 1000], count)
  scores = rng.integers(0, 7, count).astype(np.float32)  # with ties
  for found, expected in zip(figures.pairs_by_difference(scores, runtime),
                             slow_counts(scores, runtime)):
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("counts", [
    [5, 200, 3, 3, 150, 0, 99, 500], [0] * 7 + [3], [1000] * 8, [300] + [0] * 7, [60] * 8])
def test_no_bin_has_a_handful_of_pairs(counts):
  starts = figures.bins_of(np.array(counts))
  joined = np.add.reduceat(counts, starts)
  assert joined.sum() == sum(counts) and starts[0] == 0
  assert min(joined) >= min(figures.FEWEST, sum(counts))


@pytest.mark.parametrize("kind, collection", [
    (collections.SYNTHETIC, "tile:xla"), (collections.MEASURED, "layout:xla:random"),
    (ESTIMATE, "layout:own:mine"), (collections.UNKNOWN, "layout:own:mine")])
def test_every_figure_and_every_panel_says_what_its_labels_are(kind, collection, tmp_path):
  run = runs.read(write_run(tmp_path / "run", kind=kind, collection=collection))
  found = figures.all_of(runs.groups_of([run]), run.judged[0])
  assert len(found) == 5
  for drawn in found.values():
    assert drawn.get_suptitle() == f"labels: {kind}" and kind in figures.svg(drawn)
    for axes in drawn.axes:
      assert figures.short_kind(kind) in axes.get_xlabel() + axes.get_ylabel()


def lines_of(found, title):
  (drawn,) = [drawn for name, drawn in found.items() if title in name]
  return {line.get_label(): line for axes in drawn.axes for line in axes.lines}


def test_the_best_of_k_has_the_means_of_the_table(tmp_path):
  run = runs.read(write_run(tmp_path / "run", kind=ESTIMATE, collection="layout:own:mine",
                            quality=0.3, sizes=(4, 20, 30)))
  found = lines_of(figures.all_of(runs.groups_of([run]), None), "Slowdown of the best")
  for name, means in {"run": run.means, **run.references}.items():
    values = dict(zip(*found[name].get_data()))
    if name == runs.DEFAULT:
      assert set(found[name].get_ydata()) == {means["slowdown1_mean"]}
    else:
      assert max(values) <= 20  # the configurations of the median graph
      assert values[1] == pytest.approx(means["slowdown1_mean"])
      assert values[10] == pytest.approx(means["slowdown10_mean"])
