"""Installs the package alone and uses it far from the repository: part of CI.

    python tests/wheel.py

Builds a wheel, which must hold every file of the package, installs it into an empty environment
as the notebooks do on Colab, and there runs both console commands, with a report page, and ranks
from Python. `tests/docs` runs the notebooks.
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
_RANK = """
import tpugraphs_jax
from pathlib import Path
assert "site-packages" in tpugraphs_jax.__file__, tpugraphs_jax.__file__
(path, *_) = sorted(Path("out/tile/synthetic/npz/tile/xla/test").glob("*.npz"))
order, scores = tpugraphs_jax.rank("out/tile", tpugraphs_jax.read_tile(path))
again, _ = tpugraphs_jax.rank("out/tile/model.npz", tpugraphs_jax.read_tile(path))
assert (order == again).all() and len(order) == len(scores)
"""


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


def installation() -> str:
  """The first cell of a notebook, which installs the wheel beside it."""
  cells = json.loads((ROOT / "notebooks" / "tutorial.ipynb").read_text())["cells"]
  return next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


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
    run(bin_ / "python", "-c", installation(), folder=here)
    run(bin_ / "tpugraphs-tile", "--config=recommended,ci", "--workdir=out/tile", "--synthetic",
        "--config.train.epochs=1", "--config.batch.slates_per_epoch=8", folder=here)
    run(bin_ / "tpugraphs-layout", "--config=xla-random,preset=second_xla", "--print_config",
        folder=here)
    run(bin_ / "python", "-c", _RANK, folder=here)
  print("the installed package ran both commands, and ranked from Python")


if __name__ == "__main__":
  main()
