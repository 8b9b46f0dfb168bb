"""Report pages: everything of a run on one page that needs nothing else, with its kind of labels."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from run_folders import write_run, write_synthetic

from tpugraphs_jax import collections, report
from tpugraphs_jax.report import runs

KINDS = (collections.SYNTHETIC, collections.MEASURED, "ESTIMATE of a compiler (tpu_estimate, v3)",
         collections.UNKNOWN)


@pytest.fixture
def several(tmp_path):
  """Two configs with three seeds each, the second one better."""
  return [write_run(tmp_path / name / str(seed), seed=seed, quality=quality, rate=rate)
          for name, quality, rate in (("a", 0.2, 0.001), ("b", 0.9, 0.01)) for seed in range(3)]


def page_of(folders, tmp_path):
  report.write(folders, tmp_path / "r.html")
  return (tmp_path / "r.html").read_text()


def table_of(text, title):
  """Rows of cells, the head first, of the table below a title."""
  rows = text.split(f"<h2>{title}")[1].split("</table>")[0].split("<tr>")[1:]
  return [[re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)]
          for row in rows]


def test_a_page_needs_nothing_from_elsewhere(tmp_path):
  text = page_of([write_run(tmp_path / "run")], tmp_path)
  # Names of XML's vocabularies are addresses that nobody visits.
  addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
  assert not [a for a in addresses if "w3.org" not in a and "purl.org" not in a
              and "creativecommons" not in a and "matplotlib.org" not in a]
  assert not re.search(r"<(script|link|img|iframe)\b|@import|src=", text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2])
def test_no_page_is_without_its_kind_of_labels(kind, count, tmp_path):
  folders = [write_run(tmp_path / str(seed), seed=seed, kind=kind) for seed in range(count)]
  text = page_of(folders, tmp_path)
  head = text.split("<h2>")[0]
  assert f"<b>{kind}</b>" in head and kind.split()[0].strip(":") in head.split("</title>")[0] or (
      kind == collections.UNKNOWN and "unknown kind" in head.split("</title>")[0])


def test_names_from_data_are_text(tmp_path):
  text = page_of([write_run(tmp_path / "run")], tmp_path)
  assert "vgg &lt;b&gt;" in text and "vgg <b>" not in text and text.count("<svg") == 5


@pytest.mark.parametrize("is_synthetic", [True, False])
def test_a_run_stands_above_what_it_is_to_be_compared_with(is_synthetic, tmp_path):
  folder = write_synthetic(tmp_path) if is_synthetic else write_run(
      tmp_path / "run", kind=KINDS[2], collection="layout:own:mine", quality=0.4)
  run, text = runs.read(folder), page_of([folder], tmp_path)
  (_, _, *names), *rows = table_of(text, "Results")
  orders = {"run": run.means, **run.references}
  assert [row[0].replace("&#39;", "'") for row in rows] == list(orders)
  assert (runs.NOISELESS if is_synthetic else runs.DEFAULT) in orders
  for row, means in zip(rows, orders.values()):
    assert row[2:] == [f"{means[name]:.4f}" if name in means else "–" for name in names]
  for name in names:  # each is defined on the page
    assert re.search(f"<dt>{re.sub(r'[0-9]+', '<i>k</i>', name)}</dt>", text)


def test_that_the_best_step_was_chosen_on_the_same_graphs_is_said(tmp_path):
  assert "same validation graphs" in page_of([write_run(tmp_path / "run")], tmp_path)


def test_graphs_come_sorted_with_sizes(tmp_path):
  folder = write_run(tmp_path / "run", quality=0.6)
  _, *rows = table_of(page_of([folder], tmp_path), "Graphs")
  assert [float(row[3]) for row in rows] == sorted(float(row[3]) for row in rows)
  graphs = {graph.name.replace("<b>", "&lt;b&gt;"): graph for graph in runs.read(folder).judged}
  assert rows == [[name, f"{graphs[name].nodes:,}", str(len(graphs[name].scores)),
                   f"{graphs[name].kendall_tau:.4f}", f"{graphs[name].slowdowns[1]:.4f}"]
                  for name, *_ in rows] and len(rows) == 6


def test_programs_have_the_means_of_their_kernels_and_seeds(several, tmp_path):
  head, *rows = table_of(page_of(several, tmp_path), "Programs")
  assert head == ["program", "Kendall tau, a", "slowdown1, a", "Kendall tau, b", "slowdown1, b"]
  taus = [graph.kendall_tau for folder in several[:3] for graph in runs.read(folder).judged
          if graph.name.startswith("bert_")]
  assert {row[0]: row[1] for row in rows}["bert"] == f"{np.mean(taus):.4f}"


def test_a_run_that_has_not_been_evaluated_has_its_curves(tmp_path):
  run = write_run(tmp_path / "run")
  (run / "validation_scores.npz").unlink()
  (run / "summary.json").unlink()
  text = page_of([run], tmp_path)
  assert text.count("<svg") == 1 and "Not evaluated yet" in text


def test_the_page_of_several_runs_groups_and_tests_them(several, tmp_path):
  text = page_of(several, tmp_path)
  (head, first, second) = table_of(text, "By config")
  assert [first[0], second[0], first[1]] == ["a", "b", "0, 1, 2"] and "±" in first[2]
  assert table_of(text, "Paired by graph")[1][-1] == "0.0312"
  assert table_of(text, "Where the configs differ")[1:] == [
      ["optimizer.learning_rate", "0.001", "0.01"]]
  assert "judged on different" not in text and "different collections" not in text


def test_runs_that_do_not_compare_are_pointed_out(several, tmp_path):
  summary = json.loads((several[0] / "summary.json").read_text())
  summary["validation"]["configurations_judged"] = 5
  summary["labels"] = collections.MEASURED
  (several[0] / "summary.json").write_text(json.dumps(summary))
  text = page_of(several, tmp_path)
  assert "judged on different configurations" in text and "kinds of labels" in text
  assert runs.RANDOM not in [row[0] for row in table_of(text, "Results")]


def test_a_graph_without_an_order_is_shown_as_such(tmp_path):
  run = write_run(tmp_path / "run")
  with np.load(run / "validation_scores.npz") as file:
    arrays = dict(file)
  arrays["scores"][: arrays["sizes"][0]] = 1.0  # constant: no Kendall tau
  np.savez(run / "validation_scores.npz", **arrays)
  assert table_of(page_of([run], tmp_path), "Graphs")[1][3] == "–"


CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_the_page(several, tmp_path):
  written = page_of(several, tmp_path)
  ended = subprocess.run(
      [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/b",
       "--dump-dom", f"file://{tmp_path}/r.html"], capture_output=True, text=True, timeout=300)
  assert ended.returncode == 0, ended.stderr[-2000:]
  # What the browser makes of the page: nothing was dropped or moved out of its place.
  for part in ("<svg", "</table>"):
    assert ended.stdout.count(part) == written.count(part) > 4
