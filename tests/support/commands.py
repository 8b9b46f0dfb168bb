"""Runs commands in forks of one process that has imported everything.

Each run is a fork, made before jax has started a thread, with its own flags, devices, home,
output and exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import gc
import itertools
import mmap
import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
import os
from pathlib import Path
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple
from unittest import mock

import jax

from tpugraphs_jax.infra import parallel
from tpugraphs_jax.train import log

ROOT = Path(__file__).parents[2]

# Folder of compiled programs, which all lanes of tests may share.
COMPILED = "TPUGRAPHS_TESTS_COMPILED"

_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")  # before each line off a terminal
_PAGE = "task data labels training validation model devices steps folder".split()

_LONGEST_SECONDS = 900  # of a run whose file operations are counted


class Run(NamedTuple):
  """A command to run."""

  arguments: Sequence[Any]  # a script, `-m` and a module, or `-c` and code, then its flags
  devices: int = 1
  page: bool = False  # draws the report page, which takes longer than most runs here
  stop_at_step: int = 0  # sends SIGTERM when this step is reported
  folder: str = ""  # working folder; the top folder of the repository without it
  shell_at_step: tuple[int, str] = (0, "")  # when this step is reported runs a shell command
  watched: str = ""  # folder whose file operations are counted
  kill_at: int = 0  # sends SIGKILL before the file operation of this number


class Ended(NamedTuple):
  """The end of a command."""

  code: int
  out: str
  err: str
  operations: int = 0  # on files of the watched folder

  @property
  def told(self) -> list[str]:
    """Lines of standard output, without their times."""
    lines = self.out.splitlines()
    assert all(_TIME.match(line) for line in lines), lines
    return [_TIME.sub("", line) for line in lines]

  @property
  def page(self) -> dict[str, str]:
    """The lines that describe a run at its start, by their first word."""
    return dict(line.split(maxsplit=1) for line in self.told if line[:11].rstrip() in _PAGE)

  @property
  def complaint(self) -> str:
    """The one error line, without `error: `."""
    (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def run_all(runs: Sequence[Run], *, home: Path) -> list[Ended]:
  """Runs commands, one after the other, with `home` as their home; without `page` no page."""
  return [
    run(
      each._replace(arguments=[*each.arguments, *([] if each.page else ["--noreport"])]), home=home
    )
    for each in runs
  ]


@functools.cache
def server() -> ForkServerContext:
  """A context whose processes are forks of one process, which has imported everything."""
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(
    [
      "__main__",
      "grain.experimental",
      "scipy.stats",
      "tpugraphs_jax.report.figures",
      "tpugraphs_jax.run.launch",
      "tpugraphs_jax.run.variants",
    ]
  )
  with mock.patch.dict(
    os.environ,
    {
      "JAX_PLATFORMS": "cpu",
      "JAX_NUMPY_RANK_PROMOTION": "raise",
      "NPROC": "16",
      "MPLBACKEND": "agg",
      "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1",
      "JAX_COMPILATION_CACHE_DIR": os.environ[COMPILED],
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    },
  ):
    forkserver.ensure_running()
  return context


def run(command: Run, *, home: Path) -> Ended:
  """Runs a command with `home` as its home."""
  arguments = [str(argument) for argument in command.arguments]
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    for file, size in (("out", 0), ("err", 0), ("operations", 8)):
      (folder / file).write_bytes(bytes(size))
    process = server().Process(
      target=_run_in_fork, args=(command._replace(arguments=arguments), str(home), folder)
    )
    process.start()
    process.join()
    return Ended(
      process.exitcode,
      *((folder / file).read_text() for file in ("out", "err")),
      int.from_bytes((folder / "operations").read_bytes(), "little"),
    )


def python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess:
  """Runs Python in a process of its own, with options of `subprocess.run`; output is text."""
  return subprocess.run(
    [sys.executable, *map(str, arguments)], capture_output=True, text=True, **options
  )


LONGEST_WAIT_SECONDS = 600.0  # until a test fails in place of waiting: no machine is that slow


def wait_until(is_so: Callable[[], object]) -> None:
  """Waits until `is_so()`."""
  deadline = time.monotonic() + LONGEST_WAIT_SECONDS
  while not is_so():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def redirect(out: Path, err: Path) -> None:
  """Sends the standard output and the standard error of this process to files."""
  for number, path in ((1, out), (2, err)):
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)


def _run_in_fork(command: Run, home: str, folder: Path) -> None:
  """Runs a command in this process, as the interpreter would."""
  redirect(folder / "out", folder / "err")
  os.environ["HOME"] = home
  os.chdir(command.folder or ROOT)
  skip_imports_in_collections()
  # Programs on tiny data compile for longer than they run.
  parallel.compile_quickly()
  jax.config.update("jax_num_cpu_devices", command.devices)
  if command.watched:
    signal.alarm(_LONGEST_SECONDS)  # a run that hangs ends with code -14
    with (folder / "operations").open("r+b") as file:
      count_operations(command.watched, mmap.mmap(file.fileno(), 8), kill_at=command.kill_at)
  if command.stop_at_step:
    _at(command.stop_at_step, lambda: os.kill(os.getpid(), signal.SIGTERM))
  step, line = command.shell_at_step
  if step:
    _at(step, lambda: subprocess.run(line, shell=True, check=True))
  if command.arguments[0] == "-c":
    sys.argv = ["-c", *command.arguments[2:]]
    exec(command.arguments[1], {"__name__": "__main__"})
    return
  is_module = command.arguments[0] == "-m"
  sys.argv = list(command.arguments[is_module:])
  sys.path.insert(0, str(ROOT if is_module else Path(sys.argv[0]).resolve().parent))
  (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")


def skip_imports_in_collections() -> None:
  """Spares the garbage collector what is imported; tracing makes very many small objects."""
  gc.freeze()
  gc.set_threshold(200_000, 20, 100)


def count_operations(watched: str, counted: mmap.mmap, *, kill_at: int = 0) -> None:
  """Counts all later file operations in a folder, such as opening, renaming and removing.

  Args:
    watched: the folder.
    counted: receives the count, 8 bytes.
    kill_at: the process is killed before the operation of this number.
  """
  numbers = itertools.count(1)

  def audit(event: str, arguments: tuple) -> None:
    if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
      if any(str(part).startswith(watched) for part in arguments[:2]):
        number = next(numbers)
        counted[:] = number.to_bytes(8, "little")
        if number == kill_at:
          os.kill(os.getpid(), signal.SIGKILL)

  sys.addaudithook(audit)


def _at(step: int, do: Callable[[], object]) -> None:
  """Calls `do` whenever this step has been reported."""
  say_progress = log.Log.say_progress

  def say_and_do(self, at, *args, **kwargs):
    say_progress(self, at, *args, **kwargs)
    if at == step:
      do()

  log.Log.say_progress = say_and_do
