"""Compiles small steps for a TPU v3 and an NVIDIA H100: part of CI.

    python -m tools.compilers

Makes an environment with the packages of this one and the compilers, or uses the environment of
`TPUGRAPHS_COMPILERS_PYTHON=.../bin/python` as it is. Where the compilers cannot be installed the
lane is skipped with the reason. No accelerator is needed, and nothing runs on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent import futures
import json
import os
from pathlib import Path
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHON = "TPUGRAPHS_COMPILERS_PYTHON"
_FAMILIES = ("tile, small", "SAGE, small", "tables, small", "ResModel, small", "gst_ed, small")
_TRAINED = [f"{case}/train" for case in _FAMILIES]
# The steps of tiles in scoring are lowered in `tests/rankers/test_lowering.py`.
_SCORED = ["SAGE, small/score", "tables, small/score"]
# Targets, devices (0: as usual) and steps, each in a process. Two share a processor of two cores.
# The eight cores of a TPU v3 add up gradients as eight GPUs do.
_COMPILED = (
  ("h100", 0, [*_TRAINED[1:], *_SCORED]),
  ("v3", 0, [*_TRAINED, *_SCORED]),
  ("h100", 8, _TRAINED[:1]),
)
# Kernels that a step may start in loops. No family loops over nodes or configurations.
_MOST_IN_LOOPS = 32
# What `pip` says where a machine is offline or a compiler has no wheel for it.
_NOT_TO_BE_HAD = (
  "libtpu",
  "jax-cuda12",
  "nvidia-cuda",
  "Could not find a version",
  "Temporary failure",
  "Network is unreachable",
  "Connection",
  "Read timed out",
)
_TESTS_OF_TPU = (
  "tests/hlo",
  "tests/tuning",
  "tests/nn/test_aggregation.py",
  "tests/test_step_times.py",
  "tests/docs/test_tune_page.py",
)


def run(*command: str | Path) -> subprocess.CompletedProcess:
  print("$", " ".join(map(str, command))[:100], flush=True)
  return subprocess.run(
    list(map(str, command)),
    cwd=ROOT,
    capture_output=True,
    text=True,
    # What is compiled for an absent accelerator cannot be read back from a cache.
    env=os.environ
    | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0", "PYTHONPATH": str(ROOT)},
  )


def skip_reason(message: str) -> str | None:
  """The line of `pip` that says why a compiler cannot be installed; None for other failures."""
  lines = [line for line in message.splitlines() if any(word in line for word in _NOT_TO_BE_HAD)]
  return lines[-1] if lines else None


def _packages_of(python: Path | str) -> str:
  """The folder of the packages of an environment."""
  return run(
    python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"
  ).stdout.strip()


def environment(folder: Path, *packages: str | Path, base: Path | str = "") -> Path | str:
  """The Python of a new environment with packages, or the reason why there is none.

  Args:
    folder: of the environment.
    *packages: arguments of `pip install`.
    base: Python of an environment whose packages it has, besides those of this one.
  """
  made = run(sys.executable, "-m", "venv", "--without-pip", folder)  # `pip` is that of this one
  if made.returncode:
    sys.exit(f"{made.stderr}\nerror: no environment")
  python = folder / "bin" / "python"
  places = [sysconfig.get_paths()["purelib"], *([_packages_of(base)] if base else [])]
  Path(_packages_of(python), "beside.pth").write_text("\n".join(places) + "\n")
  installed = run(python, "-m", "pip", "install", "--quiet", *packages)
  if not installed.returncode:
    return python
  reason = skip_reason(installed.stderr)
  if reason is None:
    sys.exit(f"{installed.stderr[-2000:]}\nerror: the compilers cannot be installed")
  return reason


def complaints(row: Mapping[str, Any], *, is_gpu: bool, all_reduce: bool) -> list[str]:
  """What is wrong with the figures of a compiled step; see `benchmarks/accelerators.py`.

  Args:
    row: of the step.
    is_gpu: scatters must go along rows, which are contiguous in the memory of a GPU.
    all_reduce: the devices must add up something.
  """
  wrong = []
  if set(row["products"]) != {row["precision"]}:
    wrong.append(f"products of precision {row['products']}, expected {row['precision']}")
  if row["kernels_in_loops"] > _MOST_IN_LOOPS:
    wrong.append(f"{row['kernels_in_loops']} kernels in loops, expected at most {_MOST_IN_LOOPS}")
  if is_gpu and row["strided_scatters"]:
    wrong.append(f"{row['strided_scatters']} scatters along columns, expected none")
  if bool(row["all_reduces"]) != all_reduce:
    wrong.append(f"{row['all_reduces']} all-reduces on {row['devices']} devices")
  return wrong


def compile_steps(python: Path | str, target: str, devices: int, names: Sequence[str]) -> list[str]:
  """Compiles steps in one process; returns what is wrong."""
  ended = run(python, "-m", "benchmarks.accelerators", "--only", target, str(devices), *names)
  if ended.returncode:
    return [f"{ended.stdout[-1000:]}{ended.stderr[-1000:]}"]
  rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
  return [
    f"{name}, {target}: {complaint}"
    for name, row in zip(names, rows, strict=True)
    for complaint in complaints(
      row, is_gpu=target == "h100", all_reduce=row["devices"] > 1 and name.endswith("/train")
    )
  ]


def check(python: Path | str) -> None:
  """Compiles all steps.

  Raises:
    SystemExit: something is wrong.
  """
  with futures.ThreadPoolExecutor(max_workers=2) as pool:
    compilations = [pool.submit(compile_steps, python, *part) for part in _COMPILED]
    wrong = [complaint for compilation in compilations for complaint in compilation.result()]
  if wrong:
    sys.exit("\n".join([*wrong, "error: steps compiled for accelerators are not as they must be"]))


def check_tpu(python: Path | str) -> None:
  """Runs the tests that need libtpu.

  Args:
    python: of an environment without jax's plugin for GPUs, which complains where there is none.

  Raises:
    SystemExit: a test fails.
  """
  # All tests that may be skipped: `recorded.needs_libtpu`.
  options = "-m pytest -q -p no:cacheprovider -m skipif".split()
  tests = run(python, *options, *_TESTS_OF_TPU)
  if tests.returncode:
    sys.exit(f"{tests.stdout[-3000:]}\nerror: tests with libtpu failed")
  print(tests.stdout.strip().splitlines()[-1])


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    given, compilers = os.environ.get(PYTHON), ROOT / "benchmarks" / "compilers.txt"
    alone = given or environment(Path(folder, "tpu"), "jax[tpu]")
    python = alone
    if isinstance(alone, Path):
      python = environment(Path(folder, "all"), "-r", compilers, base=alone)
    if isinstance(python, str) and python != given:
      print(f"skipped: the compilers are not to be had here: {python}")
      return
    check_tpu(alone)
    check(python)
  steps = sum(len(names) for _, _, names in _COMPILED)
  print(f"{steps} steps compile for a TPU v3 and an NVIDIA H100")


if __name__ == "__main__":
  main()
