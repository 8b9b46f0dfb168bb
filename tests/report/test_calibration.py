"""Shares of pairs in the right order are counted rightly, beside the order without noise."""

import json

import numpy as np
import pytest
import test_pages

from tpugraphs_jax import metrics, report
from tpugraphs_jax.data import npz, synthetic
from tpugraphs_jax.report import calibration, runs


def slow_counts(scores, runtime):
  """The same by a loop over all pairs."""
  right, every = np.zeros((2, len(calibration.RATIOS) - 1))
  for i in range(len(runtime)):
    for j in range(len(runtime)):
      if runtime[i] <= runtime[j]:
        continue
      ratio = runtime[i] / runtime[j]
      (which,) = [k for k in range(len(every))
                  if calibration.RATIOS[k] <= ratio < calibration.RATIOS[k + 1]]
      every[which] += 1
      right[which] += 0.5 if scores[i] == scores[j] else scores[i] > scores[j]
  return right, every


@pytest.mark.parametrize("count, levels", [(1, 5), (2, 5), (30, 3), (40, 10_000)])
def test_pairs_are_counted_as_by_a_loop(count, levels):
  rng = np.random.default_rng(count)
  runtime = 1_000_000 + rng.integers(0, levels, count) * rng.choice([1, 1000], count)
  scores = rng.integers(0, 7, count).astype(np.float32)  # with ties
  for found, expected in zip(calibration.ordered_by_ratio(scores, runtime),
                             slow_counts(scores, runtime)):
    np.testing.assert_array_equal(found, expected)


def test_many_pairs_are_sampled_fairly():
  rng = np.random.default_rng(0)
  runtime = rng.integers(1000, 4000, 500)
  scores = runtime + rng.normal(0, 400, 500)
  right, every = calibration.ordered_by_ratio(scores, runtime, pairs=20_000)
  exact_right, exact = slow_counts(scores, runtime)
  assert 19_000 < every.sum() <= 20_000
  np.testing.assert_allclose(every / every.sum(), exact / exact.sum(), atol=0.02)
  assert right.sum() / every.sum() == pytest.approx(exact_right.sum() / exact.sum(), abs=0.02)


def graph(scores, runtime, ceiling=None):
  return runs.Judged("g", 5, np.asarray(scores, np.float32), np.asarray(runtime),
                     None if ceiling is None else np.asarray(ceiling))


def test_graphs_are_pooled_and_empty_bins_are_none():
  found = calibration.accuracy([graph([0, 1, 2], [100, 200, 400]), graph([1, 0], [10, 20])])
  # Ratios 2, 2, 4 and 2, all in the last bin; three of four are right.
  assert found[-1] == 0.75 and np.isnan(found[:-1]).all()


def test_the_ceiling_is_judged_like_a_model():
  judged = [graph([2, 1, 0], [100, 200, 400], ceiling=[110, 190, 400])]
  assert calibration.accuracy(judged)[-1] == 0
  assert calibration.accuracy(judged, of_ceiling=True)[-1] == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run whose validation graphs are synthetic kernels."""
  folder = tmp_path_factory.mktemp("run")
  data_root = synthetic.generate(folder / "data", collections=["tile:xla"], progress=False)
  kernels = [npz.read_tile(path) for path in npz.split_files(data_root, "tile:xla", "valid")]
  place = test_pages.write_run(folder / "run")
  config = json.loads((place / "config.json").read_text())
  config["config"]["data_root"] = str(data_root)
  (place / "config.json").write_text(json.dumps(config))
  sizes = [len(kernel.configs) for kernel in kernels]
  np.savez(place / "validation_scores.npz", graphs=np.array([kernel.name for kernel in kernels]),
           nodes=np.array([kernel.num_nodes for kernel in kernels]), sizes=sizes,
           config_ids=np.concatenate([np.arange(n) for n in sizes]),
           runtime_ns=np.concatenate([kernel.configs.runtime_ns for kernel in kernels]),
           scores=np.arange(sum(sizes), dtype=np.float32))
  return place


def test_the_ceiling_of_synthetic_data_is_found(run):
  found = runs.read(run)
  for one in found.judged:
    assert len(one.ceiling_ns) == len(one.runtime_ns)
    np.testing.assert_allclose(one.ceiling_ns, one.runtime_ns, rtol=0.05)
  means = calibration.ceiling(found)
  taus = [metrics.kendall_tau(one.ceiling_ns, one.runtime_ns) for one in found.judged]
  assert means["kendaltau_mean"] == pytest.approx(np.nanmean(taus)) and means["opa_pooled"] > 0.9


def test_the_page_shows_the_ceiling(run, tmp_path):
  report.write([run], tmp_path / "r.html")
  text = (tmp_path / "r.html").read_text()
  assert "<th class=\"number\">order without noise</th>" in text
  assert "Kendall tau of the order without noise" in text and "not known" not in text


@pytest.mark.parametrize("change", ["gone", "other"])
def test_without_the_same_data_there_is_no_ceiling(run, tmp_path, change):
  config = json.loads((run / "config.json").read_text())
  if change == "gone":
    config["config"]["data_root"] = str(tmp_path / "nowhere")
  else:
    config["config"]["data_root"] = str(synthetic.generate(
        tmp_path / "data", collections=["tile:xla"], seed=1, progress=False))
  place = tmp_path / "run"
  place.mkdir()
  for path in run.iterdir():
    (place / path.name).write_bytes(path.read_bytes())
  (place / "config.json").write_text(json.dumps(config))
  found = runs.read(place)
  assert all(one.ceiling_ns is None for one in found.judged) and calibration.ceiling(found) == {}
  report.write([place], tmp_path / "r.html")
  assert "not known" in (tmp_path / "r.html").read_text()


def test_the_table_of_programs_has_every_config(tmp_path):
  places = [test_pages.write_run(tmp_path / name / str(seed), seed=seed, quality=quality, rate=rate)
            for name, quality, rate in (("a", 0.2, 0.001), ("b", 0.9, 0.01)) for seed in range(2)]
  report.write(places, tmp_path / "r.html")
  table = (tmp_path / "r.html").read_text().split("<h2>Programs")[1].split("<h2>")[0]
  assert "Kendall tau, a/0" in table and "slowdown of the first, b/0" in table
  found = [runs.read(place) for place in places[:2]]
  taus = [one.kendall_tau for run in found for one in run.judged if one.name.startswith("bert_")]
  assert f">bert</td><td class=\"number\">{np.mean(taus):.4f}</td>" in table
