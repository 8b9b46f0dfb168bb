"""Runs the commands of README.md and docs/ on tiny data: part of CI.

    python tests/readme_commands.py

Changed are only the size (variant `ci`, scale `tiny`), the data and where files go.
Commands for the network and for hours (benchmarks) are asked for `--help`. Notebooks run
in `test_notebooks.py` and, from the installed package, in `wheel.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
import re
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = Path(__file__).parents[1]
DATA = "~/data/tpugraphs/npz"  # as the README writes it
_ONLY_HELP = (
    "tpugraphs_jax.data.download", "tpugraphs_jax.collect", "tpugraphs_jax.sweep", "benchmarks/")
# What one page makes another one uses. `add_your_own.md` has a test of its own.
PAGES = ("docs/data.md", "README.md", "docs/index.md", "docs/training.md", "docs/segments.md",
         "docs/score_tables.md", "docs/systems.md", "docs/results.md", "docs/speed.md", "docs/own_programs.md",
         "docs/sweeps.md", "docs/operations.md", "docs/reliability.md")


def commands(page: str) -> list[str]:
  """The shell commands in the fenced blocks of a page, without comments."""
  blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
  lines = [line.split("  #")[0].strip() for language, block in blocks if not language
           for line in block.splitlines()]
  return [line for line in lines if line.startswith("python ")]


def small(command: str, out: Path) -> str:
  """The command on tiny data in `out`."""
  if any(name in command for name in _ONLY_HELP):
    return " ".join(command.split()[:3 if " -m " in command else 2]) + " --help"
  command = re.sub(r"(--config=\S+?\.py)(:\S+)?", lambda found: (
      found[1] + (f"{found[2]},ci" if found[2] else ":ci")), command)
  has_data = any(flag in command for flag in (DATA, "--data_root", "--synthetic"))
  if command.startswith("python run_") and not has_data and "--print_config" not in command:
    command += f" --data_root={DATA}"
  command = command.replace("--scale medium", "--scale tiny")
  command = re.sub(r"(?<=[ =])(?=submission.csv)", f"{out}/", command)
  return re.sub(r"(?<=[ =,])out/", f"{out}/", command).replace(DATA, f"{out}/synthetic/npz")


def run(title: str, command: str, out: Path) -> None:
  """Runs a command in the top folder; what it printed is shown if it fails."""
  print(f"$ {title}", flush=True)
  # Programs on tiny data compile for longer than they run: quickly, and once.
  quick = {"MPLBACKEND": "agg", "JAX_COMPILATION_CACHE_DIR": f"{out}/compilation_cache",
           "XLA_FLAGS": "--xla_backend_optimization_level=0 "
                        "--xla_llvm_disable_expensive_passes=true",
           "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  started = time.monotonic()
  ended = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True,
                         text=True, env=os.environ | quick)
  print(f"  {time.monotonic() - started:.0f} s", flush=True)
  if ended.returncode:
    sys.exit(f"{ended.stdout[-2000:]}{ended.stderr[-2000:]}\n"
             f"error: exit code {ended.returncode} of {title}")


def main() -> None:
  found = [line for page in PAGES for line in commands((ROOT / page).read_text())]
  with tempfile.TemporaryDirectory() as folder:
    for command in found:
      line = small(command, Path(folder))
      run(command, line.replace("python", shlex.quote(sys.executable), 1), Path(folder))
  print(f"{len(found)} commands of {len(PAGES)} pages ran")


if __name__ == "__main__":
  main()
