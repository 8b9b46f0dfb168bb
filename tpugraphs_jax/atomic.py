"""Files and folders that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import fcntl
import os
from pathlib import Path
import shutil
from typing import IO, Any

from tpugraphs_jax import remote

_PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> Iterator[IO]:
  """Opens a file beside `path` that takes its place when the block ends without an error.

  Until then, and after an error, whatever was at `path` stays. Several processes may write
  one file at the same time: each writes a file of its own. In a bucket (`s3://...`) too, the
  file is there whole or not at all.

  Args:
    path: the file to write; its folder is made where it is missing.
    mode: `w` or `wb`.
    **options: of `open`.

  Raises:
    OSError: it cannot be written.
  """
  if remote.is_remote(path):
    with remote.sending(path, mode, **options) as file:
      yield file
    return
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  beside = partial(path)
  try:
    with contextlib.ExitStack() as stack:
      with open(beside, mode, **options) as file:
        stack.enter_context(being_written(beside))
        yield file
      os.replace(beside, path)
  except OSError as error:
    if error.errno in _FULL and not error.filename:  # Python does not say where
      more = "free some, then give the command again (training: with --resume)"
      raise OSError(error.errno, f"{error.strerror}: {more}", str(path)) from None
    raise
  finally:
    beside.unlink(missing_ok=True)


def partial(path: Path, *, note: str = "") -> Path:
  """Where this process writes what is to be at `path`."""
  return path.with_name(f".{path.name}.{os.getpid()}{note}{_PARTIAL}")


@contextlib.contextmanager
def being_written(path: Path) -> Iterator[None]:
  """Keeps `tidy` of any process from a partial file or folder; ends with the process."""
  with _locked(path):
    yield


def tidy(folder: Path) -> None:
  """Removes the partial files and folders that ended processes left in `folder`.

  What a process is writing stays, and so does everything where the file system cannot tell.
  """
  for path in folder.glob(f".*{_PARTIAL}"):
    with contextlib.suppress(OSError), _locked(path) as is_free:
      if is_free and path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
      elif is_free:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
  """Whether nobody else has locked a file or folder, which is locked in the block then."""
  descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    is_free = True
  except OSError:  # locked, or a file system without locks
    is_free = False
  try:
    yield is_free
  finally:
    os.close(descriptor)
