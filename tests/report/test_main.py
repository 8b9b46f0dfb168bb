"""The command writes pages; its mistakes take one line."""

import contextlib
import errno
import re

import pytest

from tests.support.run_folders import write_run
from tpugraphs_jax import report
from tpugraphs_jax.report.__main__ import _beside, main


def test_a_verdict_names_every_run_with_its_labels_and_page(tmp_path, capsys):
  kind = "ESTIMATE of a compiler (tpu_estimate, v3), no measurement"
  folders = [
    write_run(tmp_path / "tile"),
    write_run(tmp_path / "other", rate=0.1, quality=0.5),
    write_run(tmp_path / "own", kind=kind, collection="layout:own:mine"),
  ]
  assert main([*map(str, folders), "--verdict"]) == 0
  tile, layout = re.split("(?=^layout)", capsys.readouterr().out, flags=re.M)
  assert tile.startswith("tile:xla (SYNTHETIC") and kind in layout.splitlines()[0]
  assert "tile is ahead: Kendall tau 1.000" in tile and "above other and better on 6 of 6" in tile
  assert "Without several seeds" in tile
  assert "own: Kendall tau 1.000" in layout and "compiler's own choice" in layout
  for folder, text in zip(folders, (tile, tile, layout)):
    assert f"{folder.name}: MLP, trained in 00:02, {folder}/report.html" in text


@pytest.mark.parametrize(
  "names, place",
  [
    (["a"], "a"),
    (["a", "b/c"], "."),
    (["b/c/", "b/d"], "b"),
    (["s3://bucket/a"], "s3://bucket/a"),
    (["s3://bucket/a", "s3://bucket/b"], "s3://bucket"),
    (["/a", "/b"], ""),
  ],
)
def test_a_page_comes_beside_its_runs(names, place):
  assert _beside(names) == f"{place}/report.html"


def test_the_page_of_a_run_is_in_its_folder(tmp_path, capsys):
  run = write_run(tmp_path / "run")
  assert main([str(run)]) == 0
  assert f"wrote {run}/report.html" in capsys.readouterr().out
  assert 'href="metrics.jsonl"' in (run / "report.html").read_text()


def test_help_describes_the_command_by_an_example(capsys):
  with pytest.raises(SystemExit) as end:
    main(["--help"])
  assert end.value.code == 0 and "python -m tpugraphs_jax.report out/" in capsys.readouterr().out


def test_a_flag_that_was_withdrawn_says_what_to_do_instead(capsys):
  with pytest.raises(SystemExit) as end:
    main(["out/run", "--csv=out/all.csv"])
  *_, line = capsys.readouterr().err.splitlines()
  assert end.value.code == 2 and "--csv was withdrawn: validation.csv" in line


def test_mistakes_take_one_line(capsys):
  assert main(["nowhere"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and "config.json" in line


def test_a_page_that_a_full_disk_refuses_is_one_line_and_fails_no_run(
  tmp_path, capsys, monkeypatch
):
  run = write_run(tmp_path / "run")

  @contextlib.contextmanager
  def full(path, **options):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))
    yield

  monkeypatch.setattr(report.files, "replacing", full)
  report.try_write([run], tmp_path / "page.html")
  (said,) = capsys.readouterr().out.splitlines()
  assert "no report page: " in said and "page.html: No space left" in said
  assert main([str(run)]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and "No space left" in line


def test_a_page_that_cannot_be_drawn_fails_no_run(tmp_path, caplog):
  run = write_run(tmp_path / "run")
  (run / "validation_scores.npz").write_bytes(b"damaged")
  report.try_write([run], tmp_path / "page.html")
  assert "no report page" in caplog.text and not (tmp_path / "page.html").exists()
