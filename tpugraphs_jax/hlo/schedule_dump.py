"""Texts of final schedules, which libtpu writes into a folder when it compiles.

libtpu reads its flags once, when it is loaded: a process that shall get schedules is started with
the environment that `environment` returns, and gets a `folder` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import os
from pathlib import Path
import re
import shutil
import tempfile

_ARGUMENTS = "LIBTPU_INIT_ARGS"
_FOLDER = re.compile(r"--xla_jf_dump_to=(\S+)")
_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_MEMORY = Path("/dev/shm")
_LEAST_FREE = 1 << 30  # bytes of a memory file system that is used
# Bytes for the stack of each thread that compiles, which are used as needed. With the usual 1 MB
# libtpu ends its process on kernels with long chains of operations, such as those of gradients of
# small networks with batch norm on v6e and 7x (0.0.42.1).
_STACK = 1 << 26
_ANALYSIS = "-schedule-analysis_final_bundles.txt"  # a summary beside each schedule


@contextlib.contextmanager
def folder() -> Iterator[Path]:
  """A new folder for schedules, in memory where that has room for it."""
  has_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _LEAST_FREE
  place = _MEMORY if has_memory else None
  with tempfile.TemporaryDirectory(
    prefix="tpugraphs-", dir=place, ignore_cleanup_errors=True
  ) as name:
    yield Path(name)


def environment(folder: Path) -> dict[str, str]:
  """Environment variables of a process in which libtpu writes schedules.

  The category leaves out a page of vector memory, for which libtpu before 0.0.37 needs templates
  that it does not bring: it ends its process.

  Args:
    folder: an empty folder of that process alone, on a fast file system, whose path has no space.

  Returns:
    The variable with libtpu's flags, those of this process among them.
  """
  flags = (
    f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=final_bundles --xla_jf_dump_category_filter=codegen "
    f"--fibers_default_thread_stack_size={_STACK}"
  )
  before = os.environ.get(_ARGUMENTS, "")
  return {_ARGUMENTS: f"{_FOLDER.sub('', before)} {flags}".strip()}


def clear() -> None:
  """Deletes what libtpu wrote in the folder of this process."""
  for path in _files():
    path.unlink(missing_ok=True)


def take() -> Mapping[str, str]:
  """The schedules that libtpu wrote since the last call, by kernel; `TLP` is the program.

  Deletes them. Empty in a process whose libtpu writes none.
  """
  schedules = {}
  for path in sorted(_files()):
    if kernel := _kernel(path):
      schedules[kernel] = path.read_text(errors="replace")
    path.unlink(missing_ok=True)
  return schedules


def kernels(folder: Path) -> list[str]:
  """The kernels whose schedules libtpu has written in a folder of another process, in order."""
  return [name for path in sorted(folder.glob("*")) if (name := _kernel(path))]


def _kernel(path: Path) -> str:
  """The kernel of a schedule; empty for other files."""
  name = _FILE.fullmatch(path.name)
  return name[1] if name is not None and not path.name.endswith(_ANALYSIS) else ""


def _files() -> list[Path]:
  folder = _FOLDER.search(os.environ.get(_ARGUMENTS, ""))
  return [path for path in Path(folder[1]).glob("*") if path.is_file()] if folder else []
