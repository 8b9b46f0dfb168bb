"""Runs a part of the tests with the oldest versions that setup.cfg allows: part of CI.

    python tests/floors.py

Makes an environment with exactly the floors of `install_requires`, and of pytest, and there runs
tests of options, losses and features, a small run of each command, and a model that ships.
"""

from __future__ import annotations

import configparser
import os
from pathlib import Path
import subprocess
import sys
import tempfile

ROOT = Path(__file__).parents[1]
_TESTS = ("tests/test_losses.py", "tests/run/test_schema.py", "tests/data/test_features.py",
          "tests/train/test_state.py",
          "tests/serve/test_ranker.py::test_shipped_models_give_their_recorded_scores")
_SMALL = ("--synthetic", "--config.train.epochs=1", "--config.batch.slates_per_epoch=8")
_RUNS = {"run_tile.py": "configs/tile.py:recommended,ci",
         "run_layout.py": "configs/layout.py:xla-random,gst_ed,ci"}


def floors(config: Path) -> list[str]:
  """The requirements of a setup.cfg, each at its oldest version; jaxlib has that of jax."""
  parser = configparser.ConfigParser()
  parser.read(config)
  packages = parser["options"]["install_requires"].split()
  wrong = [package for package in packages if package.count(">=") != 1 or "," in package]
  if wrong:
    sys.exit(f"error: {wrong[0]} in {config}, expected a requirement of the form NAME>=VERSION")
  oldest = [package.replace(">=", "==") for package in packages]
  return oldest + [each.replace("jax==", "jaxlib==") for each in oldest if each.startswith("jax==")]


def run(*command: str | Path) -> None:
  """Runs a command in the repository; its output is shown if it fails."""
  print("$", " ".join(map(str, command))[:100], flush=True)
  environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  ended = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True,
                         env=environment | {"JAX_PLATFORMS": "cpu"})
  if ended.returncode:
    sys.exit(f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}\nerror: exit code {ended.returncode}")


def main() -> None:
  packages = floors(ROOT / "setup.cfg")
  with tempfile.TemporaryDirectory() as folder:
    python = Path(folder, "env", "bin", "python")
    run(sys.executable, "-m", "venv", Path(folder, "env"))
    run(python, "-m", "pip", "install", "--quiet", "pytest>=8", *packages)
    for script, config in _RUNS.items():
      run(python, script, f"--config={config}", f"--workdir={folder}/{script}", *_SMALL)
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS)
  print(f"the tests pass with {', '.join(packages)}")


if __name__ == "__main__":
  main()
