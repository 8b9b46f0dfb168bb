"""Files: written whole or not at all, one process at a time, with checksums.

filelock locks folders. fsspec's transactions cover files that it opens itself, not what NumPy and
zipfile write to a path, nor whole folders: these are written beside their place and renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
from pathlib import Path
import shutil
import socket
import tempfile
import threading
import time
from typing import Any, IO

from absl import logging
import filelock
import fsspec
import numpy as np

LOCK = ".lock"  # in a folder that one process at a time may write
_OWNER = f"{LOCK}.owner"  # beside it, says who does
_PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of this package, by protocol
_POLL_SECONDS = 0.2
_SEAL = "checksum"  # field of a JSON object
# A file that was changed so recently may change again without another time stamp.
_SETTLED_SECONDS = 1.0


def is_remote(place: str | os.PathLike[str]) -> bool:
  """Whether a place is in a bucket, not in a folder of this machine."""
  return "://" in os.fspath(place)


def bucket_of(place: str | os.PathLike[str]) -> tuple[Any, str]:
  """The fsspec file system of a remote place, and the path there.

  Raises:
    ValueError: a protocol that is not known, or whose package is missing.
  """
  protocol = os.fspath(place).partition("://")[0]
  try:
    return fsspec.core.url_to_fs(os.fspath(place))
  except (ImportError, ValueError) as error:
    extra = _EXTRAS.get(protocol)
    advice = f": pip install 'tpugraphs-jax[{extra}]'" if extra else ""
    reason = " ".join(str(error).split())
    raise ValueError(f"{place} cannot be reached ({reason}){advice}") from None


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
    OSError: the file cannot be written.
  """
  if is_remote(path):
    system, remote_path = bucket_of(path)
    data = io.BytesIO()
    text = None if "b" in mode else io.TextIOWrapper(data, **options)
    yield text or data
    if text:
      text.flush()
    system.pipe_file(remote_path, data.getvalue())
    return
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = partial_path(path)
  try:
    with contextlib.ExitStack() as stack:
      with open(partial, mode, **options) as file:
        stack.enter_context(lock(partial))
        yield file
      os.replace(partial, path)
  except OSError as error:
    if error.errno in _FULL and not error.filename:  # Python does not say where
      more = "free some, then give the command again (training: with --resume)"
      raise OSError(error.errno, f"{error.strerror}: {more}", str(path)) from None
    raise
  finally:
    partial.unlink(missing_ok=True)


def partial_path(path: Path, *, note: str = "") -> Path:
  """The file or folder that this process writes before it is renamed to `path`."""
  return path.with_name(f".{path.name}.{os.getpid()}{note}{_PARTIAL}")


def tidy(folder: Path) -> None:
  """Removes the partial files and folders that ended processes left in `folder`.

  A file that a running process is writing stays. On file systems without locks all files stay.
  """
  for path in folder.glob(f".*{_PARTIAL}"):
    with contextlib.suppress(OSError), lock(path) as is_free:
      if is_free and path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
      elif is_free:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
  """Locks a file or folder while the block runs; yields False where another process holds it.

  No `tidy` removes a locked file or folder. filelock locks files of its own, which would stay
  beside every partial file.
  """
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


@contextlib.contextmanager
def hold(folder: Path, *, wait: bool = False) -> Iterator[None]:
  """Holds a folder, which is made where it is missing, until the block ends.

  The system frees the lock when the process ends, however it ends. Processes on other hosts
  see it where the file system shares locks between hosts, as NFS does.

  Args:
    folder: the folder to hold.
    wait: whether to wait for a process that holds the folder already.

  Raises:
    ValueError: another process holds the folder, and `wait` is False.
    OSError: the folder cannot be written.
  """
  folder.mkdir(parents=True, exist_ok=True)
  lock_file, note = filelock.FileLock(folder / LOCK), folder / _OWNER
  try:
    lock_file.acquire(timeout=0)
  except filelock.Timeout:
    owner = "another process"
    with contextlib.suppress(OSError):  # it has not said yet, or no longer
      owner = note.read_text(encoding="utf-8")
    if not wait:
      raise ValueError(f"{folder} is in use by {owner}: let that one end first, or name another "
                       "folder") from None
    logging.info("waiting for %s, which writes in %s", owner, folder)
    lock_file.acquire(poll_interval=_POLL_SECONDS)
  try:
    with contextlib.suppress(OSError):  # the lock holds without the note
      note.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    yield
  finally:
    with contextlib.suppress(OSError):
      note.unlink()
    lock_file.release()


@contextlib.contextmanager
def repeat(work: Callable[[], None], seconds: float, *, name: str) -> Iterator[None]:
  """Calls `work` in a thread, every `seconds`, while the block runs.

  The first call comes after the first wait. A call that has begun ends before the block does.
  """
  ended = threading.Event()

  def run() -> None:
    while not ended.wait(seconds):
      work()

  thread = threading.Thread(target=run, name=name, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


def digest_of(path: Path) -> str:
  """SHA-256 of a file."""
  with open(path, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of_arrays(arrays: Iterable[Any]) -> str:
  """SHA-256 of arrays in any order."""
  parts = []
  for array in map(np.asarray, arrays):
    part = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    part.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    parts.append(part.digest())
  return hashlib.sha256(b"".join(sorted(parts))).hexdigest()


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
  """A JSON object with a checksum of all its fields."""
  return {**values, _SEAL: _digest_of_values(values)}


def unseal(values: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of a JSON object without their checksum, if it has one.

  Raises:
    ValueError: the checksum does not fit.
  """
  fields = dict(values)
  expected = fields.pop(_SEAL, None)
  if expected is not None and expected != _digest_of_values(fields):
    raise ValueError("its checksum does not fit")
  return fields


def _digest_of_values(values: Mapping[str, Any]) -> str:
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def first_damaged(files: Mapping[Path, str]) -> Path | None:
  """The first file that is missing or has another SHA-256 than expected; None if there is none.

  This host notes that all files were as expected, and computes their checksums again only
  after one of the files has changed.

  Args:
    files: expected SHA-256 of each.
  """
  missing = next((path for path in files if not path.is_file()), None)
  if missing is not None:
    return missing
  note, newest = _note_of(files)
  if note.exists():
    return None
  damaged = next((path for path, digest in files.items() if digest_of(path) != digest), None)
  if damaged is None and time.time() - newest > _SETTLED_SECONDS:
    with contextlib.suppress(OSError):  # then they are compared again next time
      note.parent.mkdir(mode=0o700, exist_ok=True)
      note.touch()
  return damaged


def _note_of(files: Mapping[Path, str]) -> tuple[Path, float]:
  """Where this host notes that these files are as expected, and the time of their last change."""
  digest, newest = hashlib.sha256(), 0.0
  for path, expected in files.items():
    stat = path.stat()
    known = (path.resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    digest.update(f"{known} {expected}\n".encode())
    newest = max(newest, stat.st_mtime, stat.st_ctime)
  folder = Path(tempfile.gettempdir()) / f"tpugraphs_jax_verified_{os.getuid()}"
  return folder / digest.hexdigest(), newest
