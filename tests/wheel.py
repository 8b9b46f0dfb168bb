"""Installs the package alone and uses it far from the repository: part of CI.

    python tests/wheel.py

Builds a wheel, installs it into an empty environment as the notebooks do on Colab, and there runs
both console commands, configs by variant name, `rank` from Python, the official weights'
command as far as `--help`, the report page, and the notebook.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = Path(__file__).parents[1]
_SMALL = ("--config.train.epochs=1", "--config.batch.slates_per_epoch=8")
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


def code_cells(notebook: Path) -> list[str]:
  """The code cells of a notebook, without magic commands."""
  cells = json.loads(notebook.read_text())["cells"]
  return [re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)
          for cell in cells if cell["cell_type"] == "code"]


def main() -> None:
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    here, wheels, bin_ = folder / "elsewhere", folder / "wheels", folder / "env" / "bin"
    here.mkdir()
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT,
        folder=here)
    (wheel,) = wheels.glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "env", folder=here)
    # The first cell of a notebook installs the wheel beside it, as on Colab.
    shutil.copy(wheel, here)
    run(bin_ / "python", "-c", code_cells(ROOT / "notebooks" / "tutorial.ipynb")[0], folder=here)
    run(bin_ / "tpugraphs-tile", "--config=recommended,ci", "--workdir=out/tile", "--synthetic",
        *_SMALL, folder=here)
    run(bin_ / "tpugraphs-tile", "--mode=evaluate", "--workdir=out/tile", folder=here)
    run(bin_ / "tpugraphs-layout", "--config=xla-random,gst_ed,ci", "--workdir=out/layout",
        "--synthetic", *_SMALL, "--config.segments.max_nodes=40", folder=here)
    run(bin_ / "tpugraphs-tile", "--mode=predict", "--ensemble=out/tile,out/tile",
        "--workdir=out/both", folder=here)
    run(bin_ / "python", "-c", _RANK, folder=here)
    run(bin_ / "python", "-m", "tpugraphs_jax.run.official", "--help", folder=here)
    run(bin_ / "tpugraphs-tile", "--print_config", folder=here)
    run(bin_ / "tpugraphs-layout", "--config=xla-random,preset=second_xla", "--print_config",
        folder=here)
    run(bin_ / "python", "-m", "tpugraphs_jax.report", "out/tile", "out/layout", folder=here)
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
      run(bin_ / "python", "-c", "\n".join(code_cells(notebook)), folder=here)
  print("the installed package ran both commands and the notebooks")


if __name__ == "__main__":
  main()
