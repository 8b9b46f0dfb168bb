"""Unpacks the released archives; a damaged one leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path
import re
import shutil
import tarfile
import zipfile
import zlib

import tqdm

from tpugraphs_jax import console, graph

_BLOCK_BYTES = 1 << 20


class DownloadError(RuntimeError):
  """A transfer or an archive that failed, in one line that says what to do."""


def unpack(archive: Path, collection: str, folder: Path, *, is_checked: bool = True) -> None:
  """Unpacks a collection's `.npz` files beside the archive, then renames to `folder`.

  Args:
    archive: the `.tar`.
    collection: that it has.
    folder: of the collection.
    is_checked: whether the archive is known to be what the server has; otherwise every
      array is read once.

  Raises:
    DownloadError: the archive is damaged, cut short or of another collection.
  """
  staging = archive.with_name(archive.name + ".unpacking")
  shutil.rmtree(staging, ignore_errors=True)
  try:
    _extract(archive, collection, staging)
    _verify_files(staging, is_checked=is_checked)
  except (tarfile.TarError, EOFError, zlib.error, DownloadError) as error:
    shutil.rmtree(staging, ignore_errors=True)
    raise DownloadError(
        f"{archive}: damaged archive ({console.one_line(error)}); delete it and run again"
    ) from error
  folder.parent.mkdir(parents=True, exist_ok=True)
  os.replace(staging, folder)


def _extract(archive: Path, collection: str, staging: Path) -> None:
  """Writes `npz/<collection>/<split>/<graph>.npz` to `<staging>/<split>/`."""
  folder = re.escape(collection.replace(":", "/"))
  wanted = re.compile(rf"(?:\./)?npz/{folder}/({'|'.join(graph.SPLITS)})/([^/]+\.npz)")
  with (
      tarfile.open(archive) as tar,
      tqdm.tqdm(desc=f"unpack {archive.name}", unit=" files", disable=None) as progress,
  ):
    end = 0
    for member in tar:
      blocks = -(-member.size // tarfile.BLOCKSIZE)
      end = member.offset_data + blocks * tarfile.BLOCKSIZE
      match = wanted.fullmatch(member.name)
      if match and member.isfile():
        _write_member(tar, member, staging.joinpath(*match.groups()))
        progress.update()
      elif not member.isdir():
        print(f"{archive}: left out {member.name!r}, not a graph of {collection}")
    # An archive cut between two files reads like a shorter one, but for its end mark.
    tar.fileobj.seek(end)
    if tar.fileobj.read(2 * tarfile.BLOCKSIZE) != bytes(2 * tarfile.BLOCKSIZE):
      raise DownloadError("its end is missing")


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  with tar.extractfile(member) as source, open(path, "wb") as target:
    shutil.copyfileobj(source, target, _BLOCK_BYTES)


def _verify_files(staging: Path, *, is_checked: bool) -> None:
  """Every file is a whole zip archive, and every split is there; see `unpack`."""
  for split in graph.SPLITS:
    files = sorted(staging.glob(f"{split}/*.npz"))
    if not files:
      raise DownloadError(f"it has no .npz file for the split {split}")
    for path in files:
      if not _is_whole(path, is_checked=is_checked):
        raise DownloadError(f"{split}/{path.name} is not a complete .npz file")


def _is_whole(path: Path, *, is_checked: bool) -> bool:
  """Whether it ends as a zip archive does and, unless checked, fits its own checksums."""
  try:
    with zipfile.ZipFile(path) as file:
      return is_checked or file.testzip() is None
  except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
    return False
