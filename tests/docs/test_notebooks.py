"""The notebooks run from any folder, and hold the outputs of their last run."""

import json
import os
import re

import pytest

from tests.support import commands

NOTEBOOKS = sorted((commands.ROOT / "notebooks").glob("*.ipynb"))
_EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": "."}}).execute()
nbformat.write(notebook, "done.ipynb")
"""


def code_cells(path):
  return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def text_of(cell):
  return "".join(
    "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
    for output in cell["outputs"]
  )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_and_name_no_machine(path):
  cells = code_cells(path)
  assert all(cell["execution_count"] for cell in cells)
  assert not [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]
  assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) - 3
  assert not re.search(r"/(work|tmp|home|root)/", path.read_text())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_any_folder(path, tmp_path):
  pytest.importorskip("nbclient", reason="no nbclient: pip install nbclient ipykernel")
  pytest.importorskip("ipykernel", reason="no ipykernel: pip install nbclient ipykernel")
  places = filter(None, [str(commands.ROOT), os.environ.get("PYTHONPATH")])
  environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(places)}
  ended = commands.python(
    "-W", "ignore", "-c", _EXECUTE, path, cwd=tmp_path, env=os.environ | environment
  )
  assert ended.returncode == 0, ended.stderr[-3000:]
  found, stored = code_cells(tmp_path / "done.ipynb"), code_cells(path)
  for now, then in zip(found, stored, strict=True):
    # As many lines of output, up to 3: dates and seconds differ.
    lines = lambda cell: len(text_of(cell).splitlines())
    assert abs(lines(now) - lines(then)) <= 3
    qualities = lambda cell: list(map(float, re.findall(r"-?\d\.\d{4}\b", text_of(cell))))
    assert qualities(now) == pytest.approx(qualities(then), abs=0.02)
  assert {entry.name for entry in tmp_path.iterdir()} == {"out", "done.ipynb"}
