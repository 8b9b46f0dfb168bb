"""Shared parts of the benchmarks: interleaved medians, compilations, flags and reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
import datetime
import json
import os
from pathlib import Path
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import flax
import jax
import numpy as np

from tpugraphs_jax.infra import files


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


class Compilations:
  """Counts XLA's compilations from its construction on.

  Attributes:
    count: number of compilations.
    seconds: their total time.
  """

  def __init__(self):
    self.count, self.seconds = 0, 0.0
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def _hear(self, event: str, duration: float, **unused):
    if event.endswith("backend_compile_duration"):
      self.count += 1
      self.seconds += duration


def in_subprocess(module: str, *args: str) -> dict[str, Any]:
  """Runs `benchmarks.MODULE` in a fresh process and returns its figures."""
  with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--out", str(out), *args]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def machine() -> dict[str, Any]:
  """Date, processor, device and versions of a measurement."""
  device = jax.devices()[0]
  return {
    "date": datetime.date.today().isoformat(),
    "processor": _processor(),
    "cores": len(os.sched_getaffinity(0)),
    "device": f"{device.platform}: {device.device_kind}",
    "python": platform.python_version(),
    "jax": jax.__version__,
    "flax": flax.__version__,
    "numpy": np.__version__,
  }


def _processor() -> str:
  info = Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
  return names[0] if names else platform.processor()


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
