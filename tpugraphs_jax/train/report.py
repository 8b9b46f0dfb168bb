"""What a run tells: metrics.jsonl, TensorBoard, a progress line, config.json.

Only the primary process writes and prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import datetime
import importlib.metadata
import json
import math
from pathlib import Path
import platform
import resource
import sys
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from tpugraphs_jax import console, files, parallel
from tpugraphs_jax.train import outlets

_PACKAGES = (
    "tpugraphs-jax jax jaxlib flax optax jraph rax grain orbax-checkpoint numpy scipy"
).split()


class Report:
  """The scalars of one run.

  Args:
    workdir: receives `metrics.jsonl` and `tensorboard/`.
    total_steps: steps of the whole run.
    first_step: steps taken already; what an earlier run wrote of later steps is
      dropped, so that each step is there once.
  """

  def __init__(self, workdir: Path, *, total_steps: int, first_step: int = 0):
    self._total_steps = total_steps
    self._is_writing = parallel.is_primary()
    self.restart_clock(first_step)
    if not self._is_writing:
      return
    path = workdir / "metrics.jsonl"
    _drop_later_steps(path, first_step)
    self._lines = outlets.Lines(path)
    self._events = outlets.Events(workdir / "tensorboard", purge_step=first_step + 1)

  def restart_clock(self, step: int) -> None:
    """Leaves what was done since the last call (evaluation, say) out of the rate."""
    self._clock, self._waited = (step, time.monotonic()), 0.0

  def steps_per_second(self, step: int) -> float:
    """The mean rate since the clock was restarted."""
    start, since = self._clock
    return (step - start) / max(time.monotonic() - since, 1e-9)

  @contextlib.contextmanager
  def waiting(self) -> Iterator[None]:
    """Inside, a step waits for its batch."""
    since = time.monotonic()
    try:
      yield
    finally:
      self._waited += time.monotonic() - since

  def measure(self, step: int) -> None:
    """Shows the seconds and bytes of the steps since the clock was restarted.

    TensorBoard alone has them: the lines of a run that was stopped equal those of a run
    that was not.
    """
    start, since = self._clock
    if self._is_writing and step > start:
      seconds, (what, peak) = time.monotonic() - since, peak_memory()
      self._events.write(step, {
          "measured/step_seconds": seconds / (step - start),
          "measured/data_wait_seconds": self._waited / (step - start),
          f"measured/peak_memory_of_{what}_mib": peak / 2**20}, wall_time=time.time())

  def describe(self, config: Mapping[str, Any], *, metric: str, parameters: int) -> None:
    """Shows what a run is: its config, and its number of parameters.

    Args:
      config: nested fields.
      metric: name of the scalar by which runs are compared.
      parameters: of the model.
    """
    if self._is_writing:
      self._events.describe(config, metric=metric, parameters=parameters)

  def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
    """Shows how numbers, one for each graph (`[graphs]`), are spread."""
    if self._is_writing:
      self._events.histograms(step, values, wall_time=time.time())

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds one line to `metrics.jsonl` and the same scalars to TensorBoard.

    Numbers that are not finite become null in the one and are left out in the other.
    """
    if not self._is_writing:
      return
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    self._lines.write(json.dumps({"step": step, **{name: finite.get(name) for name in values}}))
    self._events.write(step, finite, wall_time=time.time())

  def progress(self, step: int, text: str, *, left: str = "") -> None:
    """Tells in one line where the run is, `text`, the rate and the time that remains."""
    rate = self.steps_per_second(step)
    parts = [f"step {step}/{self._total_steps}", text, f"{rate:.3g} steps/s" * (rate > 0), left]
    self.say("  ".join(filter(None, parts)))

  def say(self, line: str) -> None:
    """Tells one line."""
    if self._is_writing:
      console.say(line)

  def close(self) -> None:
    if self._is_writing:
      self._lines.close()
      self._events.close()


def _drop_later_steps(path: Path, last_step: int) -> None:
  """Keeps the lines up to `last_step`; a crash can have cut the last line short."""
  if not path.exists():
    return
  lines = path.read_text(encoding="utf-8").splitlines()
  kept = []
  for number, line in enumerate(lines, start=1):
    try:
      step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
      if number == len(lines):
        break
      raise ValueError(
          f"{path}: line {number} is not a JSON object with a step; remove the line"
      ) from None
    if step <= last_step:
      kept.append(line + "\n")
  with files.replacing(path, encoding="utf-8") as file:
    file.writelines(kept)


def write_manifest(workdir: Path, config: Mapping[str, Any]) -> None:
  """Writes `config.json`: the config, the versions and the devices of a run."""
  if not parallel.is_primary():
    return
  devices = jax.devices()
  manifest = {
      "config": dict(config),
      "versions": {"python": platform.python_version(), **versions()},
      "devices": {
          "platform": devices[0].platform,
          "kind": devices[0].device_kind,
          "count": len(devices),
          "processes": parallel.process_count(),
      },
      "machine": platform.platform(),
      "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
  }
  with files.replacing(workdir / "config.json", encoding="utf-8") as file:
    file.write(json.dumps(files.sealed(manifest), indent=2) + "\n")


def versions() -> dict[str, str]:
  """Versions of the packages that a result depends on, by name."""
  found = {}
  for package in _PACKAGES:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"  # Runs from a checkout have no metadata.
  return found


def peak_memory() -> tuple[str, int]:
  """What was measured (`device` or `process`) and its peak in bytes.

  Devices that keep no account (CPU) share the memory of the process.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  if peaks:
    return "device", max(peaks)
  return "process", _process_peak()


def _process_peak() -> int:
  """Peak resident memory of this program in bytes."""
  status = Path("/proc/self/status")
  # Linux: getrusage would count what the process was before it became this program.
  lines = status.read_text().splitlines() if status.exists() else []
  for line in lines:
    if line.startswith("VmHWM:"):  # some sandboxes leave it out
      return int(line.split()[1]) * 1024
  unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of each system
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Profile:
  """A trace of the steps `first:last`, for xprof or Perfetto."""

  def __init__(self, steps: str, folder: Path):
    self._folder = folder
    self._is_running = False
    self._first = self._last = -1
    if steps:
      try:
        self._first, self._last = (int(part) for part in steps.split(":"))
      except ValueError:
        self._last = -2
      if not 0 <= self._first < self._last:
        raise ValueError(f"profile_steps is {steps!r}, expected first:last such as '10:20'")

  def before(self, step: int, *, wait: Callable[[], None]) -> None:
    """Starts or stops; `wait` lets the steps under way end first."""
    if step == self._first:
      wait()
      self._is_running = self._attempt(jax.profiler.start_trace, str(self._folder))
    elif step == self._last:
      wait()
      self.stop()

  def stop(self) -> None:
    if self._is_running:
      self._attempt(jax.profiler.stop_trace)
      self._is_running = False

  def _attempt(self, act: Callable[..., None], *arguments: str) -> bool:
    """Whether the profiler did it; the run goes on without a profile otherwise."""
    try:
      act(*arguments)
    except Exception as error:  # the profiler's own kinds, and a full disk
      reason = " ".join(str(error).split())
      logging.warning("%s: no profile (%s); the run goes on without", self._folder, reason)
      return False
    return True
