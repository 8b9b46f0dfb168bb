"""Figures have fonts for their width, and the figures of the tables."""

import re
from xml.etree import ElementTree

import pytest

from tests.support.run_folders import write_run
from tpugraphs_jax import report
from tpugraphs_jax.report import figures, runs

ESTIMATE = "ESTIMATE of a compiler (tpu_estimate, v3), no measurement"


def figures_of(folders):
  (comparison,) = runs.comparisons(runs.read_all(folders))
  return comparison, figures.all_of(comparison)


def test_figures_fit_a_page_of_700_pixels_without_a_smaller_font(tmp_path):
  comparison, found = figures_of([write_run(tmp_path / "run")])
  for drawn in found.values():
    root = ElementTree.fromstring(figures.svg(drawn))
    pixels = float(root.get("width").removesuffix("pt")) * 4 / 3
    assert pixels <= 700 - 2 * 15  # padding of the page
    texts = []
    for axes in drawn.axes:
      texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label]
      texts += [*axes.get_xticklabels(which="both"), *axes.get_yticklabels()]
    assert min(text.get_fontsize() for text in texts) >= 8


def test_a_figure_takes_its_ink_from_the_page(tmp_path):
  _, found = figures_of([write_run(tmp_path / "run")])
  for drawn in found.values():
    text = figures.svg(drawn)
    assert "currentColor" in text and "var(--line)" in text
    assert not re.search("#000000|#ffffff", text)  # neither black ink nor white paper


def test_one_config_has_a_band_of_its_graphs_and_several_have_none(tmp_path):
  folders = [write_run(tmp_path / str(n), rate=n + 1.0) for n in (0, 1)]
  bands = lambda folders: len(
    figures_of(folders)[1]["Slowdown of the best of the first k"].axes[0].collections
  )
  assert (bands(folders[:1]), bands(folders)) == (1, 0)


def lines_of(found, title):
  (drawn,) = [drawn for name, drawn in found.items() if title in name]
  return {line.get_label(): line for axes in drawn.axes for line in axes.lines}


def test_the_best_of_k_has_the_means_of_the_table(tmp_path):
  folder = write_run(
    tmp_path / "run", kind=ESTIMATE, collection="layout:own:mine", quality=0.3, sizes=(4, 20, 30)
  )
  comparison, found = figures_of([folder])
  lines = lines_of(found, "Slowdown of the best")
  references = dict(comparison.references)
  del references[runs.DEFAULT]
  for name, means in {"run": comparison.runs[0].means, **references}.items():
    values = dict(zip(*lines[name].get_data()))
    assert max(values) <= 20  # the configurations of the median graph
    assert values[1] == pytest.approx(means["slowdown1_mean"])
    assert values[10] == pytest.approx(means["slowdown10_mean"])


@pytest.mark.filterwarnings("ignore:Glyph")  # of the title that the test sets
@pytest.mark.parametrize("name", ["esc\x1b[31m\a line\nbytes\udce9\ufffe", "a formula$b_{c"])
def test_a_folder_of_any_name_is_drawn_and_named_in_printable_characters(tmp_path, name):
  kind = "estimate $x_{"  # as the names of graphs, no formula
  folders = [write_run(tmp_path / name / str(n), seed=n, kind=kind) for n in (0, 1)]
  comparison, found = figures_of(folders)
  for drawn in found.values():
    drawn.suptitle(name.replace("\udce9", ""))  # which Matplotlib does not draw
    ElementTree.fromstring(figures.svg(drawn))
  folder = tmp_path / name / "0"
  report.write([folder], folder / "report.html")
  text = (folder / "report.html").read_text(encoding="utf-8")
  assert not set(name) & set("\x1b\a\udce9\ufffe") & set(text)
  assert all(run.name.isprintable() for run in runs.read_all([tmp_path / name]))
