"""Installs the package with the oldest packages that setup.cfg allows, and uses it: part of CI.

    python -m tools.wheel

Builds a wheel, which must hold every file of the package, and installs it as the notebooks do on
Colab, in an environment with exactly the floors of `install_requires`. Far from the repository run
a notebook, which trains and ranks tiles, the command of tiles on its model, and the command of
layouts, which trains. Then tests of features, optimizers, the training step and tuned steps run,
of a model that ships, and the Python of README. `tests/docs` runs all notebooks with the newest
packages.
"""

from __future__ import annotations

import configparser
import json
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = Path(__file__).parents[1]
_IS_INSTALLED = (
  "import tpugraphs_jax\nassert 'site-packages' in tpugraphs_jax.__file__, tpugraphs_jax.__file__"
)
_TESTS = (
  "tests/data/test_features.py",
  "tests/test_optimizer.py",
  "tests/train/test_step.py::test_step_follows_the_formulas_of_loss_penalties_and_clipping",
  "tests/rankers/test_ranker.py::test_shipped_models_give_their_recorded_scores",
  "tests/tuning/test_layouts.py",
  "tests/tuning/test_training_loop.py::test_a_tuned_step_trains_as_the_plain_step",
  # The schedules of the oldest compiler are read, too.
  "tests/docs/test_tune_page.py::test_the_front_page_ranks",
  "tests/docs/test_tune_page.py::test_the_front_page_tunes_for_a_tpu_target",
)
# Programs on tiny data compile for longer than they run.
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "MPLBACKEND": "agg",
  "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}
_RUNS = (
  ("tpugraphs-tile", "--do=evaluate,predict", "--workdir=out/tutorial/run"),  # of the notebook
  (
    "tpugraphs-layout --config=xla-random,gst_ed,ci --config.train.epochs=1 "
    "--config.batch.slates_per_epoch=8 --synthetic --workdir=out/layout"
  ).split(),
)


def run(*command: str | Path, folder: Path, **variables: str) -> None:
  """Runs a command in a folder; its output is shown if it fails."""
  print("$", " ".join(map(str, command))[:120].replace("\n", " "), flush=True)
  environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  ended = subprocess.run(
    list(map(str, command)),
    cwd=folder,
    capture_output=True,
    text=True,
    env=environment | _ENVIRONMENT | variables,
  )
  if ended.returncode:
    sys.exit(f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}\nerror: exit code {ended.returncode}")


def install(python: Path, *packages: str | Path, folder: Path) -> None:
  """Installs packages by uv, or by pip where uv fails, as in Makefile."""
  uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python]
  if subprocess.run([*map(str, uv), *map(str, packages)], capture_output=True).returncode:
    run(python, "-m", "pip", "install", "--quiet", *packages, folder=folder)


def floors(config: Path) -> list[str]:
  """The requirements of a setup.cfg, each at its oldest version; jaxlib has that of jax."""
  parser = configparser.ConfigParser()
  parser.read(config)
  packages = parser["options"]["install_requires"].split()
  wrong = [package for package in packages if package.count(">=") != 1 or "," in package]
  if wrong:
    sys.exit(f"error: {wrong[0]} in {config}, expected a requirement of the form NAME>=VERSION")
  oldest = [re.sub(r"(\[\w+\])?>=", "==", package) for package in packages]
  return oldest + [line.replace("jax==", "jaxlib==") for line in oldest if line.startswith("jax==")]


def check_files(wheel: Path) -> None:
  """Raises SystemExit where a file of the package is not in the wheel."""
  kept = subprocess.run(
    ["git", "ls-files", "tpugraphs_jax"], cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout.split()
  missing = set(kept) - set(zipfile.ZipFile(wheel).namelist())
  if missing:
    sys.exit(f"error: {sorted(missing)} not in {wheel.name}: add them to setup.cfg")


def code_cells(notebook: Path) -> list[str]:
  """The code cells of a notebook."""
  cells = json.loads(notebook.read_text())["cells"]
  return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def main() -> None:
  packages = floors(ROOT / "setup.cfg")
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    here, bin_ = folder / "elsewhere", folder / "env" / "bin"
    here.mkdir()
    make = "-m pip wheel --quiet --no-deps --wheel-dir".split()
    run(sys.executable, *make, here, ROOT, folder=here)
    (wheel,) = here.glob("*.whl")
    check_files(wheel)
    run(sys.executable, "-m", "venv", folder / "env", folder=here)
    oldest = folder / "oldest.txt"
    oldest.write_text("\n".join(packages) + "\n")
    install(bin_ / "python", "-r", oldest, folder=here)
    # The first cell installs the wheel beside it; the packages are there, as on Colab.
    installation, *cells = code_cells(ROOT / "notebooks" / "tutorial.ipynb")
    run(bin_ / "python", "-c", installation, folder=here, PIP_CONSTRAINT=str(oldest))
    run(bin_ / "python", "-c", "\n".join([_IS_INSTALLED, *cells]), folder=here)
    for command, *flags in _RUNS:
      run(bin_ / command, *flags, folder=here)
    oldest_jax = next(package for package in packages if package.startswith("jax=="))
    more = ["pytest>=8", oldest_jax.replace("jax", "jax[tpu]")]
    install(bin_ / "python", *more, folder=here)
    # README and the tutorial need nothing else than what is installed now.
    run(bin_ / "python", "-m", "tools.readme_commands", "docs/tutorial.md", folder=ROOT)
    run(bin_ / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS, folder=ROOT)
  print(f"the installed package and its tests ran with {', '.join(packages)}")


if __name__ == "__main__":
  main()
