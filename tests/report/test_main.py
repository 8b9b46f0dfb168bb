"""The command writes pages, tables and pictures; its mistakes take one line."""

import csv
import subprocess
import sys

import pytest
from run_folders import write_run

from tpugraphs_jax import report
from tpugraphs_jax.report import __main__ as command


def test_the_command_also_writes_csv_and_png(tmp_path, capsys):
  out, several = tmp_path / "out", [write_run(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
  assert command.main([*map(str, several), "--out", str(out / "r.html"), "--csv",
                       str(out / "r.csv"), "--png", str(out / "png"), "--graph", "unet_1"]) == 0
  assert "Predicted rank and rank by label: unet_1" in (out / "r.html").read_text()
  with (out / "r.csv").open(newline="") as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 12 and rows[-1]["run"] == "1" and rows[-1]["graph"] == "alex$net_{1"
  assert len(list((out / "png").glob("*.png"))) == 5 and "wrote " in capsys.readouterr().out


def test_a_verdict_says_in_three_lines_labels_quality_and_pages(tmp_path, capsys):
  kind = "ESTIMATE of a compiler (tpu_estimate, v3), no measurement"
  folders = [write_run(tmp_path / "tile"),
             write_run(tmp_path / "own", kind=kind, collection="layout:own:mine")]
  assert command.main([*map(str, folders), "--verdict"]) == 0
  trained, quality, look = capsys.readouterr().out.splitlines()
  assert "SYNTHETIC" in trained and "(tpu_estimate, v3)" in trained and "layout:own:mine" in trained
  assert quality.count("a random order") == 2 and quality.count("compiler's own choice") == 1
  assert all(str(folder / "report.html") in look for folder in folders)


@pytest.mark.parametrize("arguments, complaint", [
    (["nowhere"], "config.json"), (["{run}", "--graph", "nope"], "'nope'")])
def test_mistakes_take_one_line(arguments, complaint, tmp_path, capsys):
  run = str(write_run(tmp_path / "run"))
  assert command.main([a.format(run=run) for a in arguments]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and complaint in line


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_a_package_one_line_says_what_to_install(package, tmp_path):
  run = write_run(tmp_path / "run")
  code = (f"import sys; sys.modules['{package}'] = None\n"
          "from tpugraphs_jax import report\nfrom tpugraphs_jax.report import __main__\n"
          f"report.try_write([{str(run)!r}], 'page.html')\n"
          f"sys.exit(__main__.main([{str(run)!r}]))")
  ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
  assert ended.returncode == 2 and "pip install 'tpugraphs-jax[plots]'" in ended.stderr
  assert package in ended.stderr and len(ended.stderr.splitlines()) == 1
  assert f"no report page: {package}" in ended.stdout  # a run goes on


def test_a_page_that_cannot_be_drawn_fails_no_run(tmp_path, caplog):
  run = write_run(tmp_path / "run")
  (run / "validation_scores.npz").write_bytes(b"damaged")
  report.try_write([run], tmp_path / "page.html")
  assert "no report page" in caplog.text and not (tmp_path / "page.html").exists()


def test_names_with_signs_of_formulas_are_drawn(tmp_path):
  run = write_run(tmp_path / "a$b_{c", kind="estimate $x_{")
  page, figures = tmp_path / "page.html", tmp_path / "figures"
  assert command.main([str(run), "--out", str(page), "--png", str(figures)]) == 0
  assert "alex$net_{1" in page.read_text() and list(figures.iterdir())
