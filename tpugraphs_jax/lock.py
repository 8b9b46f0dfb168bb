"""One process at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import os
from pathlib import Path
import socket
import time
from typing import IO

from absl import logging

from tpugraphs_jax.repeated import repeated

FILE = ".lock"
# The owner touches the file this often; unheard of for so long it is gone. Only needed where
# the file system keeps each host's locks to itself: the host alone cannot ask there.
_BEAT_SECONDS = 20.0
_GONE_SECONDS = 120.0
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def held(folder: Path, *, wait: bool = False) -> Iterator[None]:
  """Holds a folder, which is made where it is missing, until the block ends.

  The lock goes with the process that holds it, however that ends.

  Args:
    folder: to be held.
    wait: whether to wait for a process that holds it already.

  Raises:
    ValueError: another one holds it, and `wait` is False.
    OSError: the folder cannot be written.
  """
  folder.mkdir(parents=True, exist_ok=True)
  path, is_told = folder / FILE, False
  with open(path, "a+", encoding="utf-8") as stream:
    while (owner := _take(stream)) is not None:
      if not wait:
        raise ValueError(f"{folder} is in use by {owner}: let that one end first, or name another "
                         "folder")
      if not is_told:
        logging.info("waiting for %s, which writes in %s", owner, folder)
      is_told = True
      time.sleep(_POLL_SECONDS)
    with _beating(path):
      try:
        yield
      finally:
        stream.truncate(0)


def _take(stream: IO[str]) -> str | None:
  """Takes the lock; what is known of its owner where there is one."""
  stream.seek(0)
  host, _, process = stream.read().strip().partition(" ")
  owner = f"process {process} on {host}" if process else "another process"
  try:
    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return owner
  except OSError:  # a file system without locks
    if host == socket.gethostname() and _is_running(process):
      return owner
  # The lock was free: of this host the owner is gone, of another one its beat tells.
  silent = time.time() - os.fstat(stream.fileno()).st_mtime
  if host not in ("", socket.gethostname()) and silent < _GONE_SECONDS:
    fcntl.flock(stream, fcntl.LOCK_UN)
    return f"{owner} (heard of {silent:.0f} s ago, taken for gone after {_GONE_SECONDS:.0f} s)"
  stream.truncate(0)
  stream.write(f"{socket.gethostname()} {os.getpid()}\n")
  stream.flush()
  return None


def _is_running(process: str) -> bool:
  try:
    os.kill(int(process), 0)
  except (ValueError, ProcessLookupError):
    return False
  except PermissionError:  # another user's
    pass
  return True


def _beating(path: Path) -> contextlib.AbstractContextManager[None]:
  """Touches the file again and again."""

  def beat() -> None:
    with contextlib.suppress(OSError):
      os.utime(path)

  return repeated(beat, _BEAT_SECONDS, name="lock")
