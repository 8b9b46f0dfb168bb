"""Runs commands, many of them from one process that has imported everything.

Each run is a fork, made before jax has started a thread, with its own flags, devices,
output and exit code. As a script this file reads the runs from standard input and writes
their ends to standard output, both as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
import json
import mmap
import os
from pathlib import Path
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

# Programs on tiny data compile for longer than they run: they are compiled quickly rather than
# well, and once. All lanes of tests may share the folder of compiled programs.
COMPILED = "TPUGRAPHS_TESTS_COMPILED"
QUICK = {
    "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
                 "--xla_cpu_parallel_codegen_split_count=1"}

_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")  # before each line off a terminal
_PAGE = "task data labels training validation model devices steps folder".split()

_LONGEST_SECONDS = 900  # of a run whose file operations are counted


class Run(NamedTuple):
  """A command to run."""

  arguments: Sequence[Any]  # a script, or `-m` and a module, then its flags
  devices: int = 1
  page: bool = False  # draws the report page, which takes longer than most runs here
  stop_at_step: int = 0  # sends SIGTERM when this step is reported
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
  """Runs run_tile.py and run_layout.py, one run after the other, with `home` as their home."""
  environment = os.environ | QUICK | {
      "HOME": str(home), "JAX_NUMPY_RANK_PROMOTION": "raise", "NPROC": "16",
      "JAX_COMPILATION_CACHE_DIR": os.environ.get(COMPILED, str(home / "compilation_cache"))}
  order = [run._replace(arguments=[
      *map(str, run.arguments), *([] if run.page else ["--noreport"])]) for run in runs]
  ended = subprocess.run([sys.executable, __file__], input=json.dumps(order), cwd=ROOT,
                         capture_output=True, text=True, env=environment)
  assert ended.returncode == 0, ended.stderr
  return [Ended(*result) for result in json.loads(ended.stdout)]


def import_all() -> None:
  """Imports what forks have in common: most of their time, otherwise."""
  import jax  # noqa: F401

  from tpugraphs_jax.report import figures  # noqa: F401
  from tpugraphs_jax.run import launch  # noqa: F401


def run_forked(run: Run) -> Ended:
  """Runs a command in a fork of this process, which has not computed anything with jax."""
  with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
    operations = mmap.mmap(-1, 8)  # shared with the child
    child = os.fork()
    if not child:
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      if run.watched:
        signal.alarm(_LONGEST_SECONDS)  # a run that hangs ends with code -14
        count_operations(run.watched, operations, kill_at=run.kill_at)
      os._exit(_run_here(run))
    _, status = os.waitpid(child, 0)
    texts = [file.seek(0) or file.read() for file in (out, err)]
  return Ended(os.waitstatus_to_exitcode(status), *texts, int.from_bytes(operations[:], "little"))


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


def _run_here(run: Run) -> int:
  """Runs a command as the interpreter would; returns the exit code."""
  import jax

  jax.config.update("jax_num_cpu_devices", run.devices)
  if run.stop_at_step:
    _at(run.stop_at_step, lambda: os.kill(os.getpid(), signal.SIGTERM))
  step, line = run.shell_at_step
  if step:
    _at(step, lambda: subprocess.run(line, shell=True, check=True))
  is_module, code = run.arguments[0] == "-m", 0
  sys.argv = list(run.arguments[is_module:])
  sys.path.insert(0, str(ROOT if is_module else Path(sys.argv[0]).resolve().parent))
  try:
    (runpy.run_module if is_module else runpy.run_path)(sys.argv[0], run_name="__main__")
  except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.code, str):
      print(end.code, file=sys.stderr)
  except BaseException:  # pylint: disable=broad-exception-caught
    traceback.print_exc()
    code = 1
  sys.stdout.flush()
  sys.stderr.flush()
  return code


def _at(step: int, do: Callable[[], object]) -> None:
  """Calls `do` whenever this step has been reported."""
  from tpugraphs_jax.train import log

  progress = log.Log.progress

  def progress_and_more(self, at, *args, **kwargs):
    progress(self, at, *args, **kwargs)
    if at == step:
      do()

  log.Log.progress = progress_and_more


if __name__ == "__main__":
  import_all()
  print(json.dumps([run_forked(Run(*order)) for order in json.load(sys.stdin)]))
