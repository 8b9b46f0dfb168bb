"""Report pages: everything of a run on one page, with its kind of labels."""

import contextlib
import json
import re
from unittest import mock

import numpy as np
import pytest

from tests.support.run_folders import several_runs, write_fold, write_run, write_scores
from tpugraphs_jax import datasets, report
from tpugraphs_jax.report import figures, runs, templates

KINDS = (datasets.SYNTHETIC, datasets.MEASURED, datasets.UNKNOWN, "ESTIMATE of a compiler (v3)")


def page_of(folders, tmp_path, *, drawn=False):
  """The page, whose figures are empty unless `drawn`: drawing takes longer than all else."""
  empty = mock.patch.multiple(
    figures, all_of=lambda _: {"A figure": None}, svg=lambda _: "<svg></svg>"
  )
  with contextlib.nullcontext() if drawn else empty:
    report.write(folders, tmp_path / "r.html")
  return (tmp_path / "r.html").read_text()


def table_of(text, title):
  """Rows of cells, the head first, of the table below a title."""
  rows = re.split(f"<h[23][^>]*>{title}", text)[1].split("</table>")[0].split("<tr>")[1:]
  return [
    [re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)]
    for row in rows
  ]


def test_a_page_takes_nothing_from_elsewhere(tmp_path):
  text = page_of([write_run(tmp_path / "run")], tmp_path, drawn=True)
  # XML names its vocabularies by addresses, which no browser fetches.
  names = "w3.org", "purl.org", "creativecommons", "matplotlib.org"
  addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
  assert not [a for a in addresses if not any(name in a for name in names)]
  assert not re.search(r"<(link|img|iframe)\b|@import|src=", text)
  assert "vgg &lt;b&gt;" in text and "vgg <b>" not in text  # names from data are text


@pytest.mark.parametrize("kind, count", [*((kind, 1) for kind in KINDS), (KINDS[0], 2)])
def test_every_page_says_its_kind_of_labels_and_what_chose_the_best_step(kind, count, tmp_path):
  head = page_of(
    [write_run(tmp_path / str(seed), seed=seed, kind=kind) for seed in range(count)], tmp_path
  ).split("<figure>")[0]
  assert head.count(f"<b>{kind}</b>") == 1 and "same validation graphs" in head
  assert f"({templates.short_kind(kind)})</title>" in head


def test_a_run_stands_above_its_reference_orders(tmp_path):
  options = dict(kind=KINDS[-1], collection="layout:own:mine", quality=0.4)
  folder = write_run(tmp_path / "run", **options)
  text, (comparison,) = page_of([folder], tmp_path), runs.comparisons([runs.read(folder)])
  (_, _, *names), *rows = table_of(text, "Results")
  orders = {"run": comparison.runs[0].means, **comparison.references}
  assert [row[0].replace("&#39;", "'") for row in rows] == list(orders)
  assert runs.DEFAULT in orders
  for row, means in zip(rows, orders.values()):
    assert row[2:] == [f"{means[name]:.4f}" if name in means else "–" for name in names]
  for name in names:  # each is defined on the page
    assert re.search(f"<dt>{re.sub(r'[0-9]+', '<i>k</i>', name)}</dt>", text)


def test_graphs_come_sorted_with_sizes_and_those_without_an_order_last(tmp_path):
  run = write_run(tmp_path / "run")
  write_scores(
    run,
    ["d", "a", "b", "c"],
    [np.array([10, 12, 15])] * 4,
    [np.array(scores) for scores in ([3, 3, 3], [0, 1, 2], [1, 0, 2], [3, 3, 3])],
    has_order=[False, True, True, True],
  )
  assert table_of(page_of([run], tmp_path, drawn=True), "Graphs")[1:] == [
    ["c", "3,007", "3", "0.0000", "0.0000"],
    ["b", "2,007", "3", "0.3333", "0.2000"],
    ["a", "1,007", "3", "1.0000", "0.0000"],
    ["d", "7", "3", "–", "0.0000"],
  ]


def test_the_page_of_several_runs_begins_with_the_first_and_what_differs(tmp_path):
  text = page_of(several_runs(tmp_path), tmp_path, drawn=True)
  _, first, second, *_ = table_of(text, "Results")
  assert [first[0], second[0], first[1]] == ["b", "a", "0, 1, 2"] and "±" in first[2]
  assert table_of(text, "The others behind")[1][:3] == ["a", "6", "6"]
  assert table_of(text, "The others behind")[1][-1] == "0.0312"
  assert table_of(text, "Where the configs differ")[1:] == [
    ["optimizer.learning_rate", "0.01", "0.001"]
  ]
  parts = "b is first", "The others behind", "Where the configs", "<figure>"
  places = [text.index(part) for part in (*parts, 'id="runs"', 'id="terms"')]
  assert places == sorted(places) and "do not compare" not in text


def test_a_few_graphs_have_no_p_value(tmp_path):
  folders = [
    write_run(tmp_path / name, quality=quality, rate=quality, sizes=(8, 9, 10))
    for name, quality in (("a", 1.0), ("b", 0.2))
  ]
  text = page_of(folders, tmp_path)
  assert table_of(text, "The others behind")[1][-1] == "too few graphs" and "p = " not in text


def test_runs_that_do_not_compare_have_parts_of_their_own(tmp_path):
  other = dict(kind=datasets.MEASURED, collection="layout:xla:random", sizes=(5, 6))
  text = page_of([write_run(tmp_path / "a"), write_run(tmp_path / "b", **other)], tmp_path)
  assert "do not compare" in text.split("<h2")[0] and "is first" not in text
  for number, collection, kind, name in (
    (1, "tile:xla", datasets.SYNTHETIC, "a"),
    (2, "layout:xla:random", datasets.MEASURED, "b"),
  ):
    part = text.split(f'<h2 id="results{number}">')[1].split("<h2")[0]
    assert part.startswith(collection) and f"<b>{kind}</b>" in part
    rows = re.findall("<td[^>]*>(.*?)</td>", part)
    assert name in rows and runs.RANDOM in rows and ("a" if name == "b" else "b") not in rows


def test_the_page_of_folds_has_their_deviation_and_every_graph(tmp_path):
  taus = [(1, 1, 1), (1, 1, -1), (1, -1, -1)]
  folders = [write_fold(tmp_path / f"fold={k}", k, some) for k, some in enumerate(taus)]
  text = page_of(folders, tmp_path, drawn=True)
  head, first, *_ = table_of(text, "Results")
  found = dict(zip(head, first))
  assert (found["seeds"], found["test folds"]) == ("0", "0, 1, 2")
  means = [1, 1 / 3, -1 / 3]
  assert found["kendaltau_mean"] == f"{np.mean(means):.4f} ± {np.std(means, ddof=1):.4f}"
  assert len(table_of(text, "Graphs")) == 1 + 9
  assert "9 graphs of the split test (test folds 0, 1, 2 of 3;" in text
  assert "favours the figures" not in text  # test graphs chose no step


def test_the_page_is_of_the_test_split_where_it_alone_was_evaluated(tmp_path):
  run = write_run(tmp_path / "run")
  summary = json.loads((run / "summary.json").read_text())
  summary["test"] = summary["validation"] | {"split": "test"}
  (run / "summary.json").write_text(json.dumps(summary))
  assert "graphs of the split valid" in page_of([run], tmp_path)
  del summary["validation"]
  (run / "summary.json").write_text(json.dumps(summary))
  (run / "validation_scores.npz").rename(run / "test_scores.npz")
  text = page_of([run], tmp_path)
  assert "graphs of the split test" in text and "favours the figures" not in text


def test_a_run_has_its_command_versions_device_and_files(tmp_path):
  run = write_run(tmp_path / "my run")
  manifest = json.loads((run / "config.json").read_text()) | {
    "command": "run_tile.py --workdir='my run'",
    "versions": {"jax": "0.7.2"},
    "devices": {"kind": "TPU v5", "count": 4},
  }
  (run / "config.json").write_text(json.dumps(manifest))
  (run / "results.csv").write_text("")
  text = page_of([run], tmp_path).split('id="runs"')[1]
  for part in (
    "run_tile.py --workdir=&#39;my run&#39;",
    "jax 0.7.2",
    "4 x TPU v5",
    'href="my%20run/results.csv"',
    "tensorboard --logdir",
  ):
    assert part in text, part
  assert 'href="my%20run/tensorboard"' not in text  # there is none
