"""Runs on two hosts, of which one dies or is suspended, or whose network is cut.

A host is a network namespace with its own address; a virtual cable connects the two. Needs
Linux, root and the program `ip`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import os
from pathlib import Path
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np

from tests.support import commands, run_folders
from tools.faults import kills
from tools.faults.table import Row

FAULTS = ("dies", "stands still", "loses its network")
_SECONDS = 60.0  # within which a host has to end when the other one is gone
_LONGEST_SECONDS = 300.0  # for an undisturbed run of two hosts
_ADDRESSES = "192.0.2.1", "192.0.2.2"  # for documentation and tests (RFC 5737)
_PORT = 29_500
_RUN = (
  "run_tile.py",
  "--config=configs/tile.py:ci",
  "--noreport",
  "--config.train.epochs=100",
  "--config.train.eval_every_epochs=50",
  "--config.train.early_stop_epochs=0",
  "--config.train.log_every_steps=20",
  "--config.train.checkpoint_every_steps=50",
)


def are_possible() -> bool:
  """Whether this user can make network namespaces on this machine."""
  if shutil.which("ip") is None or os.geteuid():
    return False
  with contextlib.suppress(subprocess.CalledProcessError, OSError), Hosts():
    return True
  return False


def _ip(*words: str) -> None:
  subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts(contextlib.AbstractContextManager):
  """Two network namespaces and a cable between them."""

  def __enter__(self) -> Hosts:
    self._names = [f"faults{os.getpid()}{letter}" for letter in "ab"]
    try:
      for name, address in zip(self._names, _ADDRESSES):
        _ip("netns", "add", name)
        # The host's name must resolve to an address that the other host can reach.
        known = Path("/etc/netns", name, "hosts")
        known.parent.mkdir(parents=True)
        known.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
      first, second = self._names
      _ip(
        "link",
        "add",
        "cable",
        "netns",
        first,
        "type",
        "veth",
        "peer",
        "name",
        "cable",
        "netns",
        second,
      )
      for name, address in zip(self._names, _ADDRESSES):
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
        _ip("-n", name, "link", "set", "lo", "up")
      self.connect(True)
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_) -> None:
    for name in self._names:
      shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
      with contextlib.suppress(subprocess.CalledProcessError):
        _ip("netns", "delete", name)

  def connect(self, is_connected: bool) -> None:
    """Plugs the cable in if `is_connected`, else pulls it out."""
    for name in self._names:
      _ip("-n", name, "link", "set", "cable", "up" if is_connected else "down")

  def start(self, number: int, command: Sequence[str], out: Path) -> subprocess.Popen:
    """Starts a command on a host, with its output in a file."""
    with out.open("w") as file:
      return subprocess.Popen(
        ["ip", "netns", "exec", self._names[number], sys.executable, *command],
        cwd=commands.ROOT,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "16"},
      )


class HostRuns:
  """Runs on two hosts, with one undisturbed run to compare with.

  Args:
    hosts: the two hosts.
    folder: folder for the working folders.
    data_root: tiny synthetic data with a tile collection.
  """

  def __init__(self, hosts: Hosts, folder: Path, data_root: Path):
    self._hosts, self._folder, self._data_root = hosts, folder, data_root
    for name in ("compiles", "whole"):
      started = time.monotonic()
      ended, said = self._wait(self._start(name), seconds=_LONGEST_SECONDS)
      assert ended == [0, 0], said
    self._seconds = time.monotonic() - started
    self._results = self._read("whole")

  def _start(self, name: str, *flags: str) -> list[subprocess.Popen]:
    if "--resume" not in flags:
      shutil.rmtree(self._folder / name, ignore_errors=True)
    self._said = [self._folder / f"{name}_{number}.log" for number in (0, 1)]
    command = [
      *_RUN,
      f"--data_root={self._data_root}",
      f"--workdir={self._folder / name}",
      f"--coordinator_address={_ADDRESSES[0]}:{_PORT}",
      "--num_processes=2",
      f"--compilation_cache={self._folder / 'cache'}",
      *flags,
    ]
    return [
      self._hosts.start(number, [*command, f"--process_id={number}"], said)
      for number, said in enumerate(self._said)
    ]

  def _wait(
    self, processes: Sequence[subprocess.Popen], *, seconds: float
  ) -> tuple[list[int | None], list[str]]:
    """Exit codes of processes, None for one that had to be killed, and their output."""
    codes, deadline = [], time.monotonic() + seconds
    for process in processes:
      try:
        codes.append(process.wait(max(0.1, deadline - time.monotonic())))
      except subprocess.TimeoutExpired:
        _kill(process)
        codes.append(None)
    return codes, [said.read_text() for said in self._said]

  def _read(self, name: str) -> dict[str, object]:
    """Losses, model file and results of a run, which must not depend on interruptions."""
    folder = self._folder / name
    rows = run_folders.metrics(folder)
    return {"losses": [(row["step"], row.get("train/loss")) for row in rows]} | {
      file: (folder / file).read_bytes() for file in ("model.npz", "results.csv")
    }

  def outcome(self, fault: str, culprit: int, rng: np.random.Generator) -> str:
    """Outcome of a fault of host `culprit` at a random moment: `survived`, or what went wrong."""
    processes = self._start("broken")
    try:
      self._wait_for_steps(processes)
      time.sleep(float(rng.uniform(0, 0.2 * self._seconds)))
      if any(process.poll() is not None for process in processes):
        return "it was over before the fault"
      self._break(fault, processes[culprit])
      others = [number for number in (0, 1) if fault == FAULTS[2] or number != culprit]
      codes, said = self._wait([processes[number] for number in others], seconds=_SECONDS)
    finally:
      for process in processes:
        _kill(process)
      self._hosts.connect(True)
    for number, code in zip(others, codes):
      if complaint := complaint_of(code, said[number], gone=1 - number):
        return complaint
    codes, said = self._wait(self._start("broken", "--resume"), seconds=_LONGEST_SECONDS)
    if codes != [0, 0]:
      return f"resumed, it ended with {codes}: {said[0][-600:]}"
    return kills.different(self._read("broken"), self._results)

  def _wait_for_steps(self, processes: Sequence[subprocess.Popen]) -> None:
    """Waits until the run has logged its first steps or a process has ended."""
    deadline, path = time.monotonic() + _LONGEST_SECONDS, self._folder / "broken/metrics.jsonl"
    while not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
      if any(process.poll() is not None for process in processes):
        return
      time.sleep(0.05)

  def _break(self, fault: str, process: subprocess.Popen) -> None:
    if fault == FAULTS[0]:
      _kill(process)
    elif fault == FAULTS[1]:
      os.killpg(process.pid, signal.SIGSTOP)
    else:
      self._hosts.connect(False)


def _kill(process: subprocess.Popen) -> None:
  """Kills a process with all processes of its group."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def complaint_of(code: int | None, said: str, *, gone: int) -> str:
  """What is wrong with the end of the remaining host; empty if it failed and named the lost one.

  Args:
    code: exit code of the remaining host's process, None if it had to be killed.
    said: output of that process.
    gone: number of the lost host's process.
  """
  if code is None:
    return f"process {1 - gone} still waited after {_SECONDS:.0f} s"
  if code == 0 or f"process {gone} on " not in said:
    return f"process {1 - gone} ended with {code} and said {said[-600:]}"
  return ""


def rows(folder: Path, data_root: Path, *, times: int, rng: np.random.Generator) -> Iterator[Row]:
  """Tries each fault `times` times on each of the hosts; yields a row for each kind of fault."""
  folder.mkdir(parents=True)
  with Hosts() as hosts:
    runs = HostRuns(hosts, folder, data_root)
    for fault in FAULTS:
      row = Row(f"one of two hosts {fault}, resumed")
      for number in range(2 * times):
        row.count(runs.outcome(fault, number % 2, rng), of=f"{fault}, host {number % 2}")
      yield row
