"""Installs the extra `tpu` and compiles a training step of both tasks for a TPU v3: part of CI.

    python tests/tpu_install.py

Makes an environment with the packages of this one and libtpu, or uses the environment of
`TPUGRAPHS_TPU_PYTHON=.../bin/python` as it is. Where libtpu cannot be installed the step is
skipped with the reason.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys
import sysconfig
import tempfile

ROOT = Path(__file__).parents[1]
PYTHON = "TPUGRAPHS_TPU_PYTHON"
_CASES = ("tile, small", "SAGE, small")
# What `pip` says where a machine is offline or libtpu has no wheel for it.
_NOT_TO_BE_HAD = ("libtpu", "Could not find a version", "Temporary failure", "Network is unreachable",
                  "Connection", "Read timed out")


def run(*command: str | Path) -> subprocess.CompletedProcess:
  print("$", " ".join(map(str, command))[:100], flush=True)
  return subprocess.run(
      list(map(str, command)), cwd=ROOT, capture_output=True, text=True,
      # What is compiled for an absent TPU cannot be read back from a cache.
      env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"})


def skip_reason(message: str) -> str | None:
  """The line of `pip` that says why libtpu cannot be installed; None for any other failure."""
  lines = [line for line in message.splitlines() if any(word in line for word in _NOT_TO_BE_HAD)]
  return lines[-1] if lines else None


def environment(folder: Path) -> Path | str:
  """The Python of a new environment with libtpu, or the reason why there is none."""
  made = run(sys.executable, "-m", "venv", folder)
  if made.returncode:
    sys.exit(f"{made.stderr}\nerror: no environment")
  python = folder / "bin" / "python"
  found = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")
  here = sysconfig.get_paths()["purelib"]
  Path(found.stdout.strip(), "as_here.pth").write_text(here + "\n")
  installed = run(python, "-m", "pip", "install", "--quiet", f"{ROOT}[tpu]")
  if not installed.returncode:
    return python
  reason = skip_reason(installed.stderr)
  if reason is None:
    sys.exit(f"{installed.stderr[-2000:]}\nerror: the extra tpu cannot be installed")
  return reason


def check(python: Path | str, out: Path) -> None:
  """Compiles the steps and runs the tests that need libtpu.

  Raises:
    SystemExit: one of them failed.
  """
  ended = run(python, "benchmarks/tpu_compile.py", "--targets", "v3", "--steps", "train",
              "--cases", *_CASES, "--out", out)
  figures = json.loads(out.read_text()) if out.exists() else {}
  wrong = [name for name in _CASES if "error" in figures.get(f"{name}/train/v3", {"error": 1})]
  if ended.returncode or wrong:
    sys.exit(f"{ended.stdout[-1000:]}{ended.stderr[-1000:]}\nerror: not compiled: {wrong}")
  for name, row in figures.items():
    if not (row["devices"] == 8 and row["estimated_cycles"] > 0
            and row["memory_mib"] < 1024 * row["core_gib"]):
      sys.exit(f"error: {name}: {row}")
  tests = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/hlo/test_tpu.py",
              "tests/collect/test_tuning.py", "tests/collect/test_own_data.py", "tests/nn/test_aggregation.py",
              "tests/docs/test_own_programs_page.py", "-k", "tpu or target or estimates or compilers_graph")
  if tests.returncode:
    sys.exit(f"{tests.stdout[-3000:]}\nerror: tests with libtpu failed")
  print(tests.stdout.strip().splitlines()[-1])


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    python = os.environ.get(PYTHON) or environment(Path(folder, "env"))
    if isinstance(python, str) and not Path(python).exists():
      print(f"skipped: libtpu is not to be had here: {python}")
      return
    check(python, Path(folder, "figures.json"))
  print("training steps of both tasks compile for the 8 cores of a TPU v3")


if __name__ == "__main__":
  main()
