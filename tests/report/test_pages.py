"""Report pages: everything of a run on one page that needs nothing else."""

import csv
import dataclasses
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tpugraphs_jax import report
from tpugraphs_jax.report import __main__ as command, compare, figures, page, runs

NAMES = ("bert_1", "bert_2", "resnet_1", "vgg <b>", "unet_1", "alexnet_1")


def write_run(folder, *, seed=0, quality=1.0, rate=0.001, task="tile"):
  """A working folder whose scores follow the runtimes more or less well."""
  rng = np.random.default_rng(seed)
  folder.mkdir(parents=True)
  config = {"seed": seed, "task": task, "model": {"name": "MLP"}, "train": {"best_metric": "opa"},
            "optimizer": {"learning_rate": rate}, "data_root": str(folder)}
  (folder / "config.json").write_text(json.dumps({"config": config}))
  rows = [{"step": s, "train/loss": 1 / s, "valid_sample/opa_pooled": 1 - 0.5 / s} for s in (1, 2, 3)]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"st')
  sizes = [12 + i for i in range(len(NAMES))]
  runtime = [rng.permutation(n) + 5 for n in sizes]
  scores = [quality * r + (1 - quality) * rng.permutation(len(r)) for r in runtime]
  np.savez(folder / "validation_scores.npz", graphs=np.array(NAMES), nodes=np.arange(6) * 1000 + 7,
           sizes=sizes, config_ids=np.concatenate([np.arange(n) for n in sizes]),
           runtime_ns=np.concatenate(runtime), scores=np.concatenate(scores).astype(np.float32))
  taus = [graph.kendall_tau for graph in runs.read(folder).judged]
  (folder / "summary.json").write_text(json.dumps({
      "collection": "tile:xla",
      "training": {"ended": "last epoch (3)", "step": 3, "seconds": 2.5,
                   "best": {"step": 3, "value": 0.8}, "peak_memory": {"bytes": 2**21}},
      "validation": {"split": "valid", "graphs": 6, "configurations": "all",
                     "configurations_judged": sum(sizes),
                     "metrics": {"kendaltau_mean": float(np.mean(taus)), "slowdown1_mean": None}}}))
  return folder


@pytest.fixture
def several(tmp_path):
  """Two configs with three seeds each, the second one better."""
  return [write_run(tmp_path / name / str(seed), seed=seed, quality=quality, rate=rate)
          for name, quality, rate in (("a", 0.2, 0.001), ("b", 0.9, 0.01)) for seed in range(3)]


def test_a_page_needs_nothing_from_elsewhere(tmp_path):
  report.write([write_run(tmp_path / "run")], tmp_path / "r.html")
  text = (tmp_path / "r.html").read_text()
  # Names of XML's vocabularies are addresses that nobody visits.
  addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
  assert not [a for a in addresses if "w3.org" not in a and "purl.org" not in a
              and "creativecommons" not in a and "matplotlib.org" not in a]
  assert not re.search(r"<(script|link|img|iframe)\b|@import|src=", text)


def test_the_page_of_a_run_shows_curves_graphs_ranks_programs_and_config(tmp_path):
  report.write([write_run(tmp_path / "run")], tmp_path / "r.html")
  text = (tmp_path / "r.html").read_text()
  titles = re.findall(r"<h2>(.*?)</h2>", text)
  assert titles == [
      "Results", "Training and validation", "Kendall tau and slowdown of each validation graph",
      "Slowdown of the best of the first k", "Pairs in the right order", titles[5],
      "Programs, means over kernels and seeds", "Graphs (run)", "Config"]
  assert titles[5].startswith("Predicted rank and rank by label: ") and text.count("<svg") == 5
  assert "vgg &lt;b&gt;" in text and "vgg <b>" not in text
  assert "6 graphs of the split valid, configurations: all." in text
  assert "last epoch (3)" in text and "peak memory 2 MiB" in text


def test_graphs_come_sorted_with_sizes(tmp_path):
  run = write_run(tmp_path / "run", quality=0.6)
  report.write([run], tmp_path / "r.html")
  table = (tmp_path / "r.html").read_text().split("<h2>Graphs")[1].split("<h2>")[0]
  rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
  taus = [float(row[3]) for row in rows]
  assert taus == sorted(taus) and len(rows) == 6
  expected = {graph.name.replace("<b>", "&lt;b&gt;"): graph for graph in runs.read(run).judged}
  for name, nodes, configs, tau, slowdown in rows:
    graph = expected[name]
    assert int(nodes.replace(",", "")) == graph.nodes and int(configs) == len(graph.scores)
    assert float(tau) == pytest.approx(graph.kendall_tau, abs=1e-4)
    assert float(slowdown) == pytest.approx(graph.slowdowns[1], abs=1e-4)


def test_a_run_that_has_not_been_evaluated_has_its_curves(tmp_path):
  run = write_run(tmp_path / "run")
  (run / "validation_scores.npz").unlink()
  (run / "summary.json").unlink()
  report.write([run], tmp_path / "r.html")
  text = (tmp_path / "r.html").read_text()
  assert text.count("<svg") == 1 and "Not evaluated yet" in text


def test_runs_that_differ_in_their_seed_make_a_group(several):
  groups = compare.groups_of(runs.read_all(several))
  assert [(group.name, len(group.runs)) for group in groups] == [("a/0", 3), ("b/0", 3)]
  values = [run.means["kendaltau_mean"] for run in groups[0].runs]
  expected = np.mean(values), np.std(values, ddof=1)
  assert groups[0].spread("kendaltau_mean") == pytest.approx(expected)
  assert compare.differences(groups) == [("optimizer.learning_rate", [0.001, 0.01])]


def test_groups_are_compared_graph_by_graph(several):
  (pair,) = compare.pairs(compare.groups_of(runs.read_all(several)))
  first, second = compare.groups_of(runs.read_all(several))
  change = [second.taus()[name] - first.taus()[name] for name in NAMES]
  assert pair.graphs == 6 and pair.difference == pytest.approx(np.mean(change))
  assert all(c > 0 for c in change) and pair.p_value == pytest.approx(2 / 2**6)


def test_equal_groups_have_no_test(several):
  (group, _) = compare.groups_of(runs.read_all(several))
  pair = compare.compare(group, group)
  assert pair.difference == 0 and np.isnan(pair.p_value)


def test_the_page_of_several_runs_groups_and_tests_them(several, tmp_path):
  report.write(several, tmp_path / "r.html")
  text = (tmp_path / "r.html").read_text()
  for title in ("By config, over seeds", "Paired by graph", "Where the configs differ"):
    assert title in text
  assert "±" in text and "0.0312" in text and "judged on different" not in text


def test_runs_judged_differently_are_pointed_out(several, tmp_path):
  summary = json.loads((several[0] / "summary.json").read_text())
  summary["validation"]["configurations_judged"] = 5
  (several[0] / "summary.json").write_text(json.dumps(summary))
  report.write(several, tmp_path / "r.html")
  assert "judged on different configurations" in (tmp_path / "r.html").read_text()


def test_the_command_also_writes_csv_and_png(several, tmp_path, capsys):
  out = tmp_path / "out"
  assert command.main([*map(str, several), "--out", str(out / "r.html"), "--csv",
                       str(out / "r.csv"), "--png", str(out / "png"), "--graph", "unet_1"]) == 0
  assert "Predicted rank and rank by label: unet_1" in (out / "r.html").read_text()
  with (out / "r.csv").open(newline="") as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 36 and rows[-1]["run"] == "b/2" and rows[-1]["graph"] == "alexnet_1"
  assert len(list((out / "png").glob("*.png"))) == 5 and "wrote " in capsys.readouterr().out


@pytest.mark.parametrize("arguments, complaint", [
    (["nowhere"], "config.json is missing: name a folder that a model was trained in"),
    (["{run}", "--graph", "nope"], "judged no graph 'nope'; it judged bert_1, ")])
def test_mistakes_take_one_line(arguments, complaint, tmp_path, capsys):
  run = str(write_run(tmp_path / "run"))
  assert command.main([a.format(run=run) for a in arguments]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and complaint in line


def test_without_matplotlib_one_line_says_what_to_install(tmp_path):
  run = write_run(tmp_path / "run")
  code = ("import sys; sys.modules['matplotlib'] = None\n"
          "from tpugraphs_jax.report import __main__\n"
          f"sys.exit(__main__.main([{str(run)!r}]))")
  ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
  assert ended.returncode == 2 and "pip install 'tpugraphs-jax[plots]'" in ended.stderr
  assert len(ended.stderr.splitlines()) == 1


CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_the_page(several, tmp_path):
  page = tmp_path / "r.html"
  report.write(several, page)
  ended = subprocess.run(
      [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{page}"],
      capture_output=True, text=True, timeout=300)
  assert ended.returncode == 0, ended.stderr[-2000:]
  # What the browser makes of the page: nothing was dropped or moved out of its place.
  written = page.read_text()
  for part, expected in (("<svg", 5), ("</table>", 6)):
    assert ended.stdout.count(part) == written.count(part) == expected


def test_runs_are_named_as_shortly_as_tells_them_apart(tmp_path):
  folders = [write_run(tmp_path / name) for name in ("a/x/run", "b/x/run")]
  assert [run.name for run in runs.read_all(folders)] == ["a/x/run", "b/x/run"]
  assert [run.name for run in runs.read_all(folders[:1])] == ["run"]
  assert [run.name for run in runs.read_all(folders[:1] * 2)] == ["run", "run"]


def test_a_line_cut_short_is_left_out(tmp_path):
  assert [row["step"] for row in runs.read(write_run(tmp_path / "run")).rows] == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": 3}'])
def test_a_damaged_config_is_named(tmp_path, text):
  run = write_run(tmp_path / "run")
  (run / "config.json").write_text(text)
  with pytest.raises(ValueError, match="config.json is damaged"):
    runs.read(run)


def test_configs_are_flat_without_seed_and_place(tmp_path):
  run = runs.read(write_run(tmp_path / "run", seed=4))
  assert run.seed == 4 and run.config == {
      "task": "tile", "model.name": "MLP", "train.best_metric": "opa",
      "optimizer.learning_rate": 0.001}


def judged(scores, runtime):
  return runs.Judged("g", 5, np.asarray(scores, np.float32), np.asarray(runtime, np.int64))


def test_ranks_count_from_the_fastest():
  predicted, measured = judged([0.5, 0.1, 0.9], [30, 20, 10]).ranks
  assert predicted.tolist() == [1, 0, 2] and measured.tolist() == [2, 1, 0]


@pytest.mark.parametrize("count, ks", [(1, [1]), (2, [1, 2]), (7, [1, 2, 5]), (150, [
    1, 2, 5, 10, 20, 50, 100])])
def test_slowdowns_are_for_as_many_as_there_are(count, ks):
  graph = judged(-np.arange(count), 10 + np.arange(count))
  assert list(graph.slowdowns) == ks
  assert graph.slowdowns[1] == pytest.approx((count - 1) / 10)


def test_a_graph_without_an_order_is_shown_as_such(tmp_path):
  run = write_run(tmp_path / "run")
  with np.load(run / "validation_scores.npz") as file:
    arrays = dict(file)
  arrays["scores"][: arrays["sizes"][0]] = 1.0  # constant: no Kendall tau
  np.savez(run / "validation_scores.npz", **arrays)
  report.write([run], tmp_path / "r.html")
  table = (tmp_path / "r.html").read_text().split("<h2>Graphs")[1]
  assert "–" in table and "nan" not in table


def test_graphs_of_one_group_alone_are_not_compared(several):
  first, second = compare.groups_of(runs.read_all(several))
  fewer = compare.Group("fewer", tuple(
      dataclasses.replace(run, judged=run.judged[:2]) for run in second.runs))
  assert compare.compare(first, fewer).graphs == 2
  nothing = compare.Group("nothing", tuple(
      dataclasses.replace(run, judged=()) for run in second.runs))
  pair = compare.compare(first, nothing)
  assert pair.graphs == 0 and np.isnan(pair.difference) and np.isnan(pair.p_value)


def test_a_single_run_has_no_spread(several):
  (group,) = compare.groups_of(runs.read_all(several[:1]))
  mean, deviation = group.spread("kendaltau_mean")
  assert mean == group.runs[0].means["kendaltau_mean"] and np.isnan(deviation)
  assert all(np.isnan(value) for value in group.spread("nope"))
  assert "slowdown1_mean" not in group.runs[0].means  # null: no number


def test_a_metric_that_a_config_has_not_is_shown_as_such(several):
  (group,) = compare.groups_of(runs.read_all(several[:1]))
  assert page._spread(*group.spread("nope")) == "–"


def test_that_the_ceiling_is_not_known_stands_where_the_ceiling_would(tmp_path):
  drawn = figures._calibration([runs.read(write_run(tmp_path / "run"))])
  drawn.draw_without_rendering()
  (text,) = drawn.axes[1].texts
  left, right = drawn.axes[0].get_window_extent(), text.get_window_extent()
  assert "not known" in text.get_text()
  assert right.x0 > left.x1 and drawn.bbox.contains(right.x1, right.y1)
