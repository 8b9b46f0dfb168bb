"""The log of a run: metrics.jsonl, TensorBoard, progress lines, config.json, a profile.

Only the primary process writes and prints. An output that fails causes one warning; the run
continues at full speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import datetime
import importlib.metadata
import json
import math
from pathlib import Path
import platform
import resource
import shlex
import sys
import time
from typing import Any

from absl import logging
from flax import traverse_util
import jax
import numpy as np
from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from tpugraphs_jax.infra import console, files, machine, parallel, trust
from tpugraphs_jax.rankers import model_file

_PACKAGES = (
  "tpugraphs-jax jax jaxlib flax optax jraph rax grain orbax-checkpoint numpy scipy"
).split()
_PROGRESS_SECONDS = 10.0  # between two progress lines
_RATE_SECONDS = 1.0  # shortest time over which a rate is computed
_FLUSH_SECONDS = 10.0  # between two rows after which TensorBoard's file is flushed to the disk
_LINES_BYTES = 2**20  # lines of `metrics.jsonl` that can wait for room on the disk
_BINS = 30  # of a histogram


class Log:
  """The scalars of one run.

  Args:
    workdir: receives `metrics.jsonl` and `tensorboard/`.
    total_steps: steps of the whole run.
    first_step: steps taken already. The log removes rows of later steps, which an earlier run
      wrote, so that each step has one row.

  Attributes:
    events: TensorBoard.
  """

  def __init__(self, workdir: Path, *, total_steps: int, first_step: int = 0):
    self._total_steps = total_steps
    self._progress_time = time.monotonic()  # of the last progress line
    self.restart_clock(first_step)
    if machine.is_primary():
      path = workdir / "metrics.jsonl"
      _drop_later_steps(path, first_step)
      self._lines = files.open_plain(path, "ab", buffering=_LINES_BYTES)
      self._is_warned = False
    self.events = Events(workdir / "tensorboard", purge_step=first_step + 1)

  def restart_clock(self, step: int) -> None:
    """Restarts the clocks of the rates at this step, to leave out an evaluation."""
    self._pace = step, time.monotonic()  # at the last progress line
    self._restart_measuring(step)

  def _restart_measuring(self, step: int) -> None:
    self._clock, self._waited = (step, time.monotonic()), 0.0

  def steps_per_second(self, step: int) -> float:
    """The mean rate since the clock was restarted."""
    start, since = self._clock
    return (step - start) / max(time.monotonic() - since, 1e-9)

  @contextlib.contextmanager
  def waiting(self) -> Iterator[None]:
    """Counts the time inside as waiting for a batch."""
    since = time.monotonic()
    try:
      yield
    finally:
      self._waited += time.monotonic() - since

  def measure(self, step: int) -> None:
    """Writes to TensorBoard the seconds and the memory of the steps since the last call.

    `metrics.jsonl` lacks these figures, so that two equal runs write equal rows but for
    `steps_per_second`.
    """
    start, since = self._clock
    if step > start:
      seconds, (memory, peak) = time.monotonic() - since, peak_memory()
      values = {"step_seconds": seconds / (step - start)}
      values["data_wait_seconds"] = self._waited / (step - start)
      values[f"peak_memory_of_{memory}_mib"] = peak / 2**20
      self.events.write(step, {f"measured/{name}": value for name, value in values.items()})
    self._restart_measuring(step)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes scalars of a step, as a line of `metrics.jsonl` and to TensorBoard.

    Numbers that are not finite are null in `metrics.jsonl` and missing in TensorBoard.
    """
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    self._write_line(json.dumps({"step": step} | {name: finite.get(name) for name in values}))
    self.events.write(step, finite)

  @parallel.primary_only
  def _write_line(self, line: str) -> None:
    """Appends a line; it stays in the buffer until there is room on the disk."""
    try:
      self._lines.write(line.encode() + b"\n")
      self._lines.flush()
    except OSError as error:
      if not self._is_warned:
        logging.warning(
          f"{self._lines.name} cannot be written ({error.strerror}): the run goes on, and writes "
          "its lines as soon as possible"
        )
      self._is_warned = True

  def say_progress(self, step: int, text: Callable[[], str], *, is_due: bool = False) -> None:
    """Prints a line with the step, a text and the rate, at most every ten seconds unless due."""
    now, (first, since) = time.monotonic(), self._pace
    if not is_due and now - self._progress_time < _PROGRESS_SECONDS:
      return
    has_rate, seconds = now - since >= _RATE_SECONDS, max(now - since, _RATE_SECONDS)
    rate = [f"{(step - first) / seconds:.3g} steps/s"] * has_rate
    self._progress_time, self._pace = now, (step, now)
    console.say("  ".join([f"step {step}/{self._total_steps}", text(), *rate]))

  @parallel.primary_only
  def close(self) -> None:
    try:
      self._lines.close()
    except OSError as error:
      logging.warning(f"{self._lines.name} misses the last lines ({error.strerror})")
    self.events.close()


def _drop_later_steps(path: Path, last_step: int) -> None:
  """Removes lines after `last_step`, and a last line that a crash cut short."""
  if not path.exists():
    return
  lines = path.read_text(encoding="utf-8").splitlines()
  earlier = []
  for number, line in enumerate(lines, start=1):
    try:
      step = trust.parse(line)["step"]
    except (ValueError, TypeError, KeyError):
      if number == len(lines):
        break
      raise ValueError(
        f"{path}: line {number} is not a JSON object with a step; remove the line"
      ) from None
    if step <= last_step:
      earlier.append(line + "\n")
  with files.replacing(path, encoding="utf-8") as file:
    file.writelines(earlier)


class Events:
  """The event file of TensorBoard.

  An error stops only TensorBoard. (tensorboardX's writer with a queue and a thread hangs instead:
  its thread ends without a message, and the queue fills up.)

  Args:
    folder: of the event file.
    purge_step: TensorBoard hides scalars of earlier files from this step on.
  """

  def __init__(self, folder: Path, *, purge_step: int):
    self._folder, self._is_on = folder, True
    self._file: event_file_writer.EventsWriter | None = None
    self._flushed = time.monotonic()
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._put(lambda: event_pb2.Event(step=purge_step, session_log=start))

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes scalars of a step."""
    self._put_parts(step, lambda: [summary.scalar(name, value) for name, value in values.items()])

  def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
    """Writes histograms of the finite numbers of arrays `[n]`, such as a metric by graph."""
    finite = {name: array[np.isfinite(array)] for name, array in values.items()}
    histogram = lambda name, array: summary.histogram(name, array, bins=_edges(array))
    parts = lambda: [histogram(name, array) for name, array in finite.items() if array.size]
    self._put_parts(step, parts)

  def describe(self, config: Mapping[str, Any], *, metric: str, parameters: int) -> None:
    """Writes the config, as a text and as hyperparameters, and the number of parameters.

    Args:
      config: nested fields.
      metric: name of the scalar that compares runs.
      parameters: number of parameters of the model.
    """
    fields = {**traverse_util.flatten_dict(dict(config), sep="."), "parameters": parameters}
    table = "\n".join(["|field|value|", "|-|-|", *(f"|{k}|{v}|" for k, v in fields.items())])
    plain = lambda value: value if isinstance(value, (int, float, str)) else json.dumps(value)
    hparams = {name: plain(value) for name, value in fields.items()}

    def event() -> event_pb2.Event:
      parts = [summary.text("config", table), summary.scalar("parameters", parameters)]
      parts += summary.hparams(hparams, {metric: None})[:2]
      return event_pb2.Event(summary=_joined(parts))

    self._put(event)

  def _put_parts(self, step: int, parts: Callable[[], Iterable[summary.Summary]]) -> None:
    self._put(lambda: event_pb2.Event(step=step, wall_time=time.time(), summary=_joined(parts())))

  @parallel.primary_only
  def _put(self, row: Callable[[], event_pb2.Event]) -> None:
    if not self._is_on:
      return
    try:
      if self._file is None:
        files.make_folder(self._folder)
        self._file = event_file_writer.EventsWriter(str(self._folder / "events"))
      self._file.write_event(row())
      if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
        self._file.flush()
        self._flushed = time.monotonic()
    except Exception as error:  # a full disk, a missing folder, an error of TensorBoard
      self._give_up(error)

  def _give_up(self, error: Exception) -> None:
    self._is_on = False
    reason = " ".join(str(error).split())
    logging.warning(
      f"{self._folder} cannot be written ({reason}): the run goes on without TensorBoard"
    )
    if self._file is not None:
      with contextlib.suppress(Exception):  # closing fails for the same reason
        self._file.close()

  def close(self) -> None:
    if self._is_on and self._file is not None:
      try:
        self._file.close()
      except OSError as error:
        self._give_up(error)


def _edges(values: np.ndarray) -> np.ndarray:
  """Edges `[_BINS + 1]` of bins over the range of values `[n]`, wider if they are nearly equal."""
  low, high = values.min(), values.max()
  least = 1e-6 * max(1.0, abs(low), abs(high))
  if high - low < least:
    low, high = low - least, high + least
  return np.linspace(low, high, _BINS + 1)


def _joined(parts: Iterable[summary.Summary]) -> summary.Summary:
  """Joins several summaries."""
  return summary.Summary(value=[value for part in parts for value in part.value])


@parallel.primary_only
def write_manifest(workdir: Path, config: Mapping[str, Any]) -> None:
  """Writes `config.json`: the config, the command, the versions and the devices of a run."""
  devices = jax.devices()
  manifest = {
    "config": dict(config),
    "command": _command(),
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
  files.write_json(workdir / model_file.CONFIG_FILE, files.seal(manifest), indent=2)


def _command() -> str:
  """The command line of a run; empty outside of the project's commands."""
  name = Path(sys.argv[0]).name
  is_ours = name.startswith(("run_tile", "run_layout", "tpugraphs-"))
  return shlex.join([name, *sys.argv[1:]]) if is_ours else ""


def versions() -> dict[str, str]:
  """Versions of the packages that a result depends on, by name."""
  result = {}
  for package in _PACKAGES:
    try:
      result[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      result[package] = "not installed"  # a checkout has no metadata
  return result


def peak_memory() -> tuple[str, int]:
  """Name of the measured memory (`device` or `process`) and its peak in bytes.

  On CPU, which reports no device memory, it is the memory of the process.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  if peaks:
    return "device", max(peaks)
  return "process", _process_peak()


def _process_peak() -> int:
  """Peak resident memory of this program in bytes."""
  status = Path("/proc/self/status")
  # On Linux, getrusage also counts the process before it became this program.
  lines = status.read_text().splitlines() if status.exists() else []
  for line in lines:
    if line.startswith("VmHWM:"):  # missing in some sandboxes
      return int(line.split()[1]) * 1024
  unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) of each system
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Profile:
  """A trace of steps, for xprof or Perfetto; see `Config.profiled_steps`."""

  def __init__(self, steps: tuple[int, int], folder: Path):
    (self._first, self._last), self._folder, self._is_running = steps, folder, False

  def before(self, step: int, *, wait: Callable[[], None]) -> None:
    """Starts or stops the trace before its first or last step; `wait` waits for earlier steps."""
    if step == self._first < self._last:
      wait()
      self._is_running = self._attempt(self._start)
    elif self._is_running and step == self._last:
      wait()
      self.stop()

  def _start(self) -> None:
    files.make_folder(self._folder)
    jax.profiler.start_trace(str(self._folder))

  def stop(self) -> None:
    if self._is_running:
      self._attempt(jax.profiler.stop_trace)
      self._is_running = False

  def _attempt(self, act: Callable[[], None]) -> bool:
    """Calls the profiler; returns False, after a warning, where it fails."""
    try:
      act()
    except Exception as error:  # errors of the profiler, and a full disk
      reason = " ".join(str(error).split())
      logging.warning(f"{self._folder}: no profile ({reason}); the run goes on without")
      return False
    return True
