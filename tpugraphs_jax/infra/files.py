"""Files: written whole or not at all, one process at a time, with checksums.

filelock locks folders. `replacing` and `partial_path` write a file or folder beside its place and
rename it: transactions of fsspec cover neither folders nor files that NumPy and zipfile open.

A place may be in a bucket (`gs://`, `s3://`, or another protocol of fsspec). A bucket has no memory
maps (the store), renames of folders (Orbax) or appends (`metrics.jsonl`). Therefore files to read
are copied to this machine first. A working folder is local, and its changes are sent to the bucket.
fsspec transfers the files. Its caches and `rsync` compare only sizes, and do not mark which files
of a folder belong together. A place is a string: a `Path` would turn `gs://` into a folder `gs:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import json
import os
from pathlib import Path
import re
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
import types
from typing import Any, IO

from absl import logging
import filelock
import fsspec
from fsspec import callbacks
import numpy as np

from tpugraphs_jax.infra import console, machine, trust

LOCK = ".lock"  # in a folder that one process at a time may write
_OWNER = f"{LOCK}.owner"  # names the process that holds the lock
_PARTIAL = ".partial"
_PARTIAL_NAME = re.compile(rf"\..*\.(\d+)-[0-9a-f]{{8}}{re.escape(_PARTIAL)}", re.DOTALL)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # extras, by protocol
_POLL_SECONDS = 0.2
_OWNER_CHARACTERS = 200  # that a message shows
_SEAL = "checksum"  # field of a JSON object
# A file that was changed so recently may change again without another time stamp.
_SETTLED_SECONDS = 1.0


def run_python(path: Path, module: types.ModuleType) -> None:
  """Runs a Python file of the user in a module.

  It runs as it is now: bytecode beside it may be of a text of the same size and second.
  """
  exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))


def expanded(place: str | os.PathLike[str]) -> Path:
  """The path of a local place, with a home folder for `~`.

  Raises:
    ValueError: there is no such home folder.
  """
  try:
    return Path(place).expanduser()
  except RuntimeError:
    raise ValueError(
      f"{os.fspath(place)}: no home folder is known for its ~: give a path without ~, or set HOME"
    ) from None


def is_remote(place: str | os.PathLike[str]) -> bool:
  """Whether a place is in a bucket, not in a folder of this machine."""
  return "://" in os.fspath(place)


def bucket_of(place: str | os.PathLike[str]) -> tuple[fsspec.AbstractFileSystem, str]:
  """The fsspec file system of a remote place, and the path there.

  Raises:
    ValueError: a protocol that is not known, or whose package is missing.
  """
  protocol = os.fspath(place).partition("://")[0]
  try:
    return fsspec.core.url_to_fs(os.fspath(place))
  except (ImportError, ValueError) as error:
    extra = _EXTRAS.get(protocol)
    advice = f": {console.to_install(extra)}" if extra else ""
    reason = " ".join(str(error).split())
    raise ValueError(f"{place} cannot be reached ({reason}){advice}") from None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> Iterator[IO]:
  """Opens a file beside `path` that takes its place when the block ends without an error.

  Until then, and after an error, `path` does not change. Several processes may write to one path at
  the same time, each through its own partial file. A bucket (`s3://...`) has the whole file or no
  file, too.

  The first call for a folder removes the partial files that killed processes left there.

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
    with _reaching(path):
      system.pipe_file(remote_path, data.getvalue())
    return
  path = expanded(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  _tidy_once(path.parent.absolute())
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
    if error.filename == str(partial):  # which nobody knows
      raise OSError(error.errno, error.strerror, str(path)) from None
    raise
  finally:
    with contextlib.suppress(OSError):  # the error that ends the block says more
      partial.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], values: Any, *, indent: int | None = None) -> None:
  """Writes a JSON value by `replacing`."""
  with replacing(path, encoding="utf-8") as file:
    file.write(json.dumps(values, indent=indent) + "\n")


def visible(folder: Path, pattern: str) -> list[Path]:
  """The paths below a folder that match a pattern, sorted.

  A hidden path, in which a name begins with a dot, does not match: tools and file systems make such
  files, as macOS makes `._graph.npz`. One line per folder says that it has hidden files.

  Raises:
    PermissionError: the folder cannot be read.
  """
  with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder):
    pass  # `glob` finds nothing in a folder that it is not allowed to read, and says nothing
  paths = sorted(folder.glob(pattern))
  shown = [path for path in paths if not is_hidden(path.relative_to(folder).as_posix())]
  if len(shown) < len(paths):
    _tell_hidden(folder, pattern, len(paths) - len(shown))
  return shown


def is_hidden(name: str) -> bool:
  """Whether a part of a name, with `/` between its parts, begins with a dot."""
  return any(part.startswith(".") and part.strip(".") for part in name.split("/"))


@functools.cache
def _tell_hidden(folder: Path, pattern: str, count: int) -> None:
  logging.info(f"{folder}: {count} hidden files are left out of {pattern}")


def partial_path(path: Path) -> Path:
  """A file or folder to write before it is renamed to `path`.

  Every call returns another name: processes of two hosts or containers can have equal ids.
  """
  unique = f"{os.getpid()}-{secrets.token_hex(4)}"
  return path.with_name(f".{path.name}.{unique}{_PARTIAL}")


def tidy(folder: Path) -> None:
  """Removes the partial files and folders that ended processes left in `folder`.

  A file that a running process is writing stays. On file systems without locks all files stay.
  """
  for path in folder.glob(f".*{_PARTIAL}"):
    _remove_if_free(path)


@functools.cache  # once per process: a folder may get thousands of files
def _tidy_once(folder: Path) -> None:
  """Removes what killed processes left in a folder of the user, and no file of another program."""
  with contextlib.suppress(OSError):
    for path in folder.glob(f".*{_PARTIAL}"):
      match = _PARTIAL_NAME.fullmatch(path.name)
      if match and not _may_be_writing(int(match[1]), path):
        _remove_if_free(path)


def _may_be_writing(process: int, path: Path) -> bool:
  """Whether a process of that id runs here, or has made a file just now, perhaps elsewhere."""
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return False
  except (OSError, OverflowError):  # of another user
    pass
  return time.time() - path.stat().st_mtime < _SETTLED_SECONDS


def _remove_if_free(path: Path) -> None:
  """Removes a partial file or folder unless another process holds its lock."""
  with contextlib.suppress(OSError), lock(path) as is_free:
    if is_free and path.is_dir():
      shutil.rmtree(path, ignore_errors=True)
    elif is_free:
      path.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
  """Locks a file or folder while the block runs; yields False where another process holds it.

  `tidy` does not remove a locked file or folder. filelock would leave a lock file beside every
  partial file.
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
  """Locks a folder for this process while the block runs; makes the folder if it is missing.

  The system frees the lock when the process ends in any way. Processes on other hosts see the lock
  if the file system shares locks between hosts, as NFS does.

  Args:
    folder: the folder to hold.
    wait: whether to wait for a process that holds the folder already.

  Raises:
    ValueError: another process holds the folder, and `wait` is False; its lock is a link.
    OSError: the folder cannot be written.
  """
  folder.mkdir(parents=True, exist_ok=True)
  _check_entry(folder / LOCK)
  lock_file, note = filelock.FileLock(folder / LOCK), folder / _OWNER
  try:
    lock_file.acquire(timeout=0)
  except filelock.Timeout:
    owner = "another process"
    with contextlib.suppress(OSError, ValueError):  # it has not said yet, or no longer
      with open_plain(note, "r") as file:
        owner = file.read(_OWNER_CHARACTERS)
    if not wait:
      raise ValueError(
        f"{folder} is in use by {owner}: let that one end first, or name another folder"
      ) from None
    logging.info(f"waiting for {owner}, which writes in {folder}")
    lock_file.acquire(poll_interval=_POLL_SECONDS)
  try:
    with contextlib.suppress(OSError):  # the lock holds without the note
      with replacing(note, encoding="utf-8") as file:
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
    yield
  finally:
    with contextlib.suppress(OSError):
      note.unlink()
    lock_file.release()


def check_file(path: Path, expected: str) -> None:
  """Refuses (FileNotFoundError) a path that is no file; `expected` says what is read there."""
  if not path.is_file():
    kind = "a folder" if path.is_dir() else "no such file"
    raise FileNotFoundError(f"{path}: {kind}, expected {expected}")


def lines(path: Path) -> list[bytes]:
  """The lines of a file that `append` writes, without a last line that a kill cut short.

  Raises:
    ValueError: `path` is a link or a pipe, see `open_plain`.
  """
  with contextlib.suppress(FileNotFoundError), open_plain(path, "rb") as file:
    return file.read().split(b"\n")[:-1]
  return []


def append(path: Path, line: bytes) -> None:
  """Adds a line to a file, which other processes may do at the same time.

  On return the line is on the disk. See `appending`.
  """
  with appending(path) as file:
    add_line(file, line)


@contextlib.contextmanager
def appending(path: Path) -> Iterator[IO[bytes]]:
  """Opens a file for `add_line`; until the block ends no other process adds lines.

  The file and its folder are made where they are missing. A file system without locks does not
  keep other processes out.

  Raises:
    ValueError: `path` is a link, see `open_plain`.
    OSError: the file cannot be written.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with open_plain(path, "a+b") as file:
    with contextlib.suppress(OSError):  # a file system without locks
      fcntl.flock(file, fcntl.LOCK_EX)
    yield file


def add_line(file: IO[bytes], line: bytes) -> None:
  """Adds a line to a file of `appending`; removes a last line that a kill cut short."""
  end = file.seek(0, os.SEEK_END)
  file.seek(max(0, end - 1))
  if file.read(1) not in (b"", b"\n"):
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
  file.write(line + b"\n")
  file.flush()
  os.fsync(file.fileno())


# Folders that somebody else may have made: no write follows a link in them.


def open_plain(path: Path, mode: str, **options: Any) -> IO:
  """Opens a file as `open` does, but no link, pipe or device.

  Raises:
    ValueError: `path` is such a thing.
    OSError: as `open`.
  """

  def opener(name: str, flags: int) -> int:
    try:
      # Without O_NONBLOCK a pipe would wait for its other end.
      descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
      if error.errno in (errno.ELOOP, errno.ENXIO):
        _check_entry(path)
      raise
    if _is_plain(os.fstat(descriptor).st_mode):
      return descriptor
    os.close(descriptor)
    _check_entry(path)
    raise OSError(errno.EINVAL, "is no plain file", str(path))

  return open(path, mode, opener=opener, **options)


def _is_plain(mode: int) -> bool:
  return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def make_folder(path: Path) -> None:
  """Makes a folder to write in, unless it is there, and checks it by `check_plain`."""
  if path.is_symlink():
    _check_entry(path)
  path.mkdir(parents=True, exist_ok=True)
  check_plain(path)


def check_plain(folder: Path) -> None:
  """Refuses (ValueError) a folder with a link, pipe or device anywhere below it.

  Writes would follow a link. The folder itself may be a link: the user names it.
  """
  for parent, folders, names in os.walk(folder):
    for name in (*folders, *names):
      _check_entry(Path(parent, name))


def check_way(start: Path, end: Path) -> None:
  """Refuses (ValueError) a link among the folders below `start` on the way to `end`."""
  for folder in (end, *end.parents):
    if folder == start:
      return
    if folder.is_symlink():
      _check_entry(folder)


def _check_entry(path: Path) -> None:
  """Refuses (ValueError) a path that is neither a plain file nor a folder, if it exists."""
  try:
    mode = path.lstat().st_mode
  except FileNotFoundError:
    return
  if not _is_plain(mode):
    kind = f"a link to {os.readlink(path)}" if stat.S_ISLNK(mode) else "a pipe or a device"
    raise ValueError(
      f"{path} is {kind}, expected a plain file or folder, because files are written there: remove "
      "it, or name another folder"
    )


def state_of(path: Path) -> tuple[int, ...]:
  """Numbers of which one changes whenever a file does, also if another file takes its place.

  Size and time are not enough: `cp -p`, archives and images of disks keep times.
  """
  state = path.stat()
  return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def digest_of(path: Path) -> str:
  """SHA-256 of a file."""
  with open(path, "rb") as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of_arrays(arrays: Iterable[np.ndarray]) -> str:
  """SHA-256 of arrays in any order."""
  parts = []
  for array in map(np.asarray, arrays):
    part = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    part.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
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
  if _is_private(note.parent) and note.exists():
    return None
  damaged = next((path for path, digest in files.items() if digest_of(path) != digest), None)
  if damaged is None and time.time() - newest > _SETTLED_SECONDS:
    with contextlib.suppress(OSError):  # then they are compared again next time
      note.parent.mkdir(mode=0o700, exist_ok=True)
      if _is_private(note.parent):
        note.touch()
  return damaged


def _is_private(folder: Path) -> bool:
  """Whether a folder belongs to this user, and nobody else can write in it."""
  try:
    state = folder.lstat()
  except OSError:
    return False
  is_shared = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
  return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not is_shared


def _note_of(files: Mapping[Path, str]) -> tuple[Path, float]:
  """Where this host notes that these files are as expected, and the time of their last change."""
  digest, newest = hashlib.sha256(), 0.0
  for path, expected in files.items():
    state = path.stat()
    digest.update(f"{(path.resolve(), *state_of(path))} {expected}\n".encode())
    newest = max(newest, state.st_mtime, state.st_ctime)
  folder = Path(tempfile.gettempdir()) / f"tpugraphs_jax_verified_{os.getuid()}"
  return folder / digest.hexdigest(), newest


# Places in buckets, and their copies on this machine.

CACHE = "TPUGRAPHS_CACHE"  # environment variable that names the folder of copies
_DEFAULT_CACHE = "~/.cache/tpugraphs_jax"
_KNOWN = ".remote.json"  # in a copy: the marks of the remote files, by name
_INDEX = ".index.json"  # in a bucket: the files that belong together
_PUSH_SECONDS = 30.0
_WARN_SECONDS = 600
# Parts of names of files that are being written, or that only this machine can use.
_NOT_SENT = (".partial", ".orbax-checkpoint-tmp", "superseded")


def refuse(place: str | os.PathLike[str], name: str) -> None:
  """Refuses (ValueError) a bucket where a folder of this machine is needed."""
  if is_remote(place):
    raise ValueError(
      f"{name} is {place}, expected a folder of this machine: write there, then "
      "copy it to the bucket"
    )


def join(place: str | os.PathLike[str], *parts: str) -> str:
  """A place below another one."""
  return "/".join([os.fspath(place).rstrip("/"), *parts])


def exists(place: str) -> bool:
  """Whether there is a file at a place."""
  if not is_remote(place):
    return expanded(place).is_file()
  system, path = bucket_of(place)
  return system.isfile(path)


def cache() -> Path:
  """The user's folder of copies."""
  return expanded(os.environ.get(CACHE) or _DEFAULT_CACHE)


def local_of(place: str | os.PathLike[str]) -> Path:
  """The local path of a place: the place itself, or its copy, which need not exist yet."""
  if not is_remote(place):
    return expanded(place)
  name = os.fspath(place).rstrip("/")
  return cache() / f"{name.rpartition('/')[2]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def _reaching(place: str | os.PathLike[str]) -> Iterator[None]:
  """Turns any error of a bucket's client into an OSError of one line: they have no common type."""
  try:
    yield
  except (OSError, ValueError):
    raise
  except Exception as error:
    raise OSError(
      f"{os.fspath(place)} cannot be reached ({console.one_line(error)}): check the "
      "address, the network and your credentials"
    ) from error


def fetch(place: str | os.PathLike[str], into: Path | None = None) -> Path:
  """The local path of a file or folder; a remote one is copied first, or its copy is updated.

  Args:
    place: local or remote.
    into: where the copy belongs; `local_of(place)` unless given.

  Raises:
    FileNotFoundError: a remote place with nothing in it.
    ValueError: a protocol that is not known, or whose package is missing.

  Examples:
    >>> fetch("data/own/npz").name  # a local place stays as it is
    'npz'
  """
  if not is_remote(place):
    return expanded(place)
  into = into or local_of(place)
  with _reaching(place):
    system, root = bucket_of(place)
    if system.isfile(root):
      into = into.with_name(into.name + ".d")
      _copy(system, {Path(root).name: system.info(root)}, into, os.fspath(place))
      return into / Path(root).name
    _copy(system, _files(system, root), into, os.fspath(place))
    return into


def _copy(
  system: fsspec.AbstractFileSystem, files: Mapping[str, Mapping[str, Any]], into: Path, place: str
) -> None:
  """Brings a copy up to date: gets new and changed files, removes files that are gone remotely."""
  if not files:
    raise FileNotFoundError(f"{place}: there is nothing")
  paths = {name: trust.inside(into, name) for name in files}
  with hold(into, wait=True):
    known = trust.fields_in(into / _KNOWN)  # of the files that were copied before
    marks = {name: _mark(info) for name, info in files.items()}
    is_copied = lambda name: known.get(name) == marks[name] and paths[name].exists()
    todo = [name for name in marks if not is_copied(name)]
    if todo:
      total = sum(files[name]["size"] or 0 for name in todo)
      console.say(f"{place}: {len(todo)} files, {console.size(total)}, are copied to {into}")
    _get(system, {files[name]["name"]: paths[name] for name in todo})
    for name in known.keys() - marks.keys():
      trust.inside(into, name).unlink(missing_ok=True)
    if known != marks:
      write_json(into / _KNOWN, marks)


def _get(system: fsspec.AbstractFileSystem, targets: Mapping[str, Path]) -> None:
  """Copies remote files to local paths."""
  for path in targets.values():
    path.unlink(missing_ok=True)  # a process that has mapped the earlier file keeps it
  if targets:
    with console.working("copying", total=len(targets), unit="files") as work:
      system.get(list(targets), list(map(str, targets.values())), callback=_Counter(work))


class _Counter(callbacks.Callback):
  """Counts files that are copied."""

  def __init__(self, work: console.Work):
    super().__init__()
    self._work = work

  def relative_update(self, inc: int = 1) -> None:
    self._work.update(inc)


@contextlib.contextmanager
def working_folder(place: str) -> Iterator[Path]:
  """The local folder that stands for a working folder, which may be in a bucket.

  A remote folder is copied to this machine. Process 0 sends changed files to the bucket every half
  minute and when the block ends in any way. Changes that a killed process had not sent are lost.

  Args:
    place: local or remote.

  Raises:
    ValueError: a link in a local folder, see `check_plain`.
    OSError: at the end, if it cannot be sent; it stays on this machine then.
  """
  if not is_remote(place):
    folder = expanded(place)
    check_plain(folder)
    yield folder
    return
  system, root = bucket_of(place)  # errors show before a folder is made
  parent = local_of(place).with_name("working")
  parent.mkdir(parents=True, exist_ok=True)
  folder = Path(tempfile.mkdtemp(prefix=f"{Path(place).name}-", dir=parent))
  console.places[str(folder)] = place.rstrip("/")
  console.say(f"{place}: files are sent every {_PUSH_SECONDS:.0f} s and at the end")
  with contextlib.ExitStack() as stack:
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    with _reaching(place):
      remote = _files(system, root).items()
      _get(system, {info["name"]: trust.inside(folder, name) for name, info in remote})
    if machine.is_primary():
      stack.enter_context(_sending(folder, place))
    yield folder


@contextlib.contextmanager
def _sending(folder: Path, place: str) -> Iterator[None]:
  """Sends the changes in a folder every half minute, and when the block ends in any way."""
  sent, ended = _states(folder), threading.Event()

  def send_along() -> None:
    nonlocal sent
    while not ended.wait(_PUSH_SECONDS):
      try:
        sent = _send(folder, place, sent)
      except Exception as error:  # of whatever file system it is
        message = f"{place} cannot be written ({console.one_line(error)}): tried again"
        logging.log_every_n_seconds(logging.WARNING, message, _WARN_SECONDS)

  thread = threading.Thread(target=send_along, name="bucket", daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()  # a transfer that has begun ends first
    try:
      _send(folder, place, sent)
    except Exception as error:
      kept = folder.rename(folder.with_name(f"unsent-{folder.name}"))
      reason = f"{place} cannot be written ({console.one_line(error)})"
      raise OSError(f"{reason}: the files of the run stay in {kept}") from error


def _send(folder: Path, place: str, sent: Mapping[str, tuple]) -> dict[str, tuple]:
  """Sends the files of a folder that changed, and removes files in the bucket that are gone here.

  An index in the bucket names the files that belong together. It is written after them: an
  interrupted transfer never counts as whole.

  Args:
    folder: the folder on this machine.
    place: the bucket.
    sent: `_states` at the last call.

  Returns:
    `_states` now.

  Raises:
    FileNotFoundError: a file was gone before it was sent: the next call sends what is left.
  """
  system, root = bucket_of(place)
  here = _states(folder)
  changed, gone = [name for name in here if here[name] != sent.get(name)], sent.keys() - here.keys()
  if changed:
    system.put([str(folder / name) for name in changed], [f"{root}/{name}" for name in changed])
  if changed or gone:
    system.pipe_file(f"{root}/{_INDEX}", json.dumps(sorted(here)).encode())
  if gone:
    system.rm([f"{root}/{name}" for name in gone])
  return here


def _states(folder: Path) -> dict[str, tuple]:
  """The state of every file below a folder that is whole, by its name."""
  states = {}
  for parent, _, names in os.walk(folder):  # which lets folders go while it walks
    for path in (Path(parent, name) for name in names):
      name = path.relative_to(folder).as_posix()
      if not is_hidden(name) and not any(part in name for part in _NOT_SENT):
        with contextlib.suppress(FileNotFoundError):  # gone in the meantime
          states[name] = state_of(path)
  return states


def _files(system: fsspec.AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
  """The fsspec description of every file below a folder, by its name relative to the folder.

  Where the folder has an index, only the files that the index names.
  """
  system.invalidate_cache()
  start = len(root.rstrip("/")) + 1
  infos = {path[start:]: info for path, info in system.find(root, detail=True).items()}
  is_kept = lambda name: name == _INDEX or name and not is_hidden(name)
  files = {name: info for name, info in infos.items() if is_kept(name)}
  if _INDEX not in files:
    return files
  index = trust.parse(system.cat_file(files[_INDEX]["name"]))
  if not isinstance(index, list):
    raise ValueError(f"{root}/{_INDEX} is damaged: it is no list of names")
  return {name: info for name, info in files.items() if name in index}


def _mark(info: Mapping[str, Any]) -> str:
  """A text that changes whenever the file changes."""
  names = ("ETag", "etag", "md5Hash", "ino", "mtime", "LastModified", "updated", "created")
  return " ".join(str(info[name]) for name in ("size", *names) if info.get(name))
