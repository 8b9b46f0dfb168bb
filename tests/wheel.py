"""Installs the package alone and uses it far from the repository: part of CI.

    python tests/wheel.py

Builds a wheel, which must hold every file of the package, installs it into an empty environment
as the notebooks do on Colab, and there runs both console commands, with a report page, and a
notebook, which trains and ranks. `tests/docs` runs all notebooks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = Path(__file__).parents[1]
_IS_INSTALLED = ("import tpugraphs_jax\n"
                 "assert 'site-packages' in tpugraphs_jax.__file__, tpugraphs_jax.__file__")


def run(*command: str | Path, folder: Path) -> None:
  """Runs a command in a folder; its output is shown if it fails."""
  print("$", " ".join(map(str, command))[:120].replace("\n", " "), flush=True)
  environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  ended = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True,
                         env=environment | {"MPLBACKEND": "agg"})
  if ended.returncode:
    sys.exit(f"{ended.stdout[-2000:]}{ended.stderr[-2000:]}\nerror: exit code {ended.returncode}")


def check_files(wheel: Path) -> None:
  """Raises SystemExit where a file of the package is not in the wheel."""
  kept = subprocess.run(["git", "ls-files", "tpugraphs_jax"], cwd=ROOT, capture_output=True,
                        text=True, check=True).stdout.split()
  missing = set(kept) - set(zipfile.ZipFile(wheel).namelist())
  if missing:
    sys.exit(f"error: {sorted(missing)} not in {wheel.name}: add them to setup.cfg")


def code_cells(notebook: Path) -> list[str]:
  """The code cells of a notebook."""
  cells = json.loads(notebook.read_text())["cells"]
  return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def main() -> None:
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    here, wheels, bin_ = folder / "elsewhere", folder / "wheels", folder / "env" / "bin"
    here.mkdir()
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT,
        folder=here)
    (wheel,) = wheels.glob("*.whl")
    check_files(wheel)
    run(sys.executable, "-m", "venv", folder / "env", folder=here)
    shutil.copy(wheel, here)
    # The first cell installs the wheel beside it.
    installation, *cells = code_cells(ROOT / "notebooks" / "tutorial.ipynb")
    run(bin_ / "python", "-c", installation, folder=here)
    run(bin_ / "python", "-c", "\n".join([_IS_INSTALLED, *cells]), folder=here)
    run(bin_ / "tpugraphs-tile", "--config=recommended,ci", "--workdir=out/tile", "--synthetic",
        "--config.train.epochs=1", "--config.batch.slates_per_epoch=8", folder=here)
    run(bin_ / "tpugraphs-layout", "--config=xla-random,preset=second_xla", "--print_config",
        folder=here)
  print("the installed package ran both commands and a notebook")


if __name__ == "__main__":
  main()
