"""Shared parts of the benchmarks: interleaved medians, compilations, flags and reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
import json
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax

from tpugraphs_jax.infra import files
from tpugraphs_jax.leaderboard.race import Compilations as Compilations
from tpugraphs_jax.leaderboard.race import machine as machine


def medians(functions: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, float]:
  """Median seconds of each function, after one warm-up call.

  The functions take turns, so that other load on the machine slows all of them alike.
  """
  seconds: dict[str, list[float]] = {name: [] for name in functions}
  for round_ in range(repeats + 1):
    for name, function in functions.items():
      start = time.perf_counter()
      jax.block_until_ready(function())
      if round_:
        seconds[name].append(time.perf_counter() - start)
  return {name: statistics.median(values) for name, values in seconds.items()}


def in_subprocess(module: str, *args: str) -> dict[str, Any]:
  """Runs `benchmarks.MODULE` in a fresh process and returns its figures."""
  with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--out", str(out), *args]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def commit() -> str:
  """The commit of the package, short."""
  command = ["git", "rev-parse", "--short", "HEAD"]
  return subprocess.run(
    command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True
  ).stdout.strip()


def parser(description: str, *, repeats: int = 0) -> argparse.ArgumentParser:
  """A parser with the flags that benchmarks share: `--out`, and `--repeats` if it has a default."""
  result = argparse.ArgumentParser(description=description.splitlines()[0])
  result.add_argument("--out", type=Path, help="also write the figures as JSON")
  if repeats:
    result.add_argument(
      "--repeats", type=int, default=repeats, help="timed calls, of which the median counts"
    )
  return result


def report(figures: Mapping[str, Any], out: Path | None) -> None:
  """Prints figures, one per line, and writes them as JSON if `out` is given."""
  for name, value in figures.items():
    print(f"{name:24} {value:,.4g}" if isinstance(value, float) else f"{name:24} {value}")
  write(figures, out)


def write(figures: Mapping[str, Any], out: Path | None) -> None:
  """Writes figures as JSON if `out` is given; a killed run leaves the former file."""
  if out is not None:
    with files.replacing(out) as file:
      file.write(json.dumps(figures, indent=2) + "\n")
