"""One `.npz` archive, whose arrays are checked before and while they are read.

Members of the released files are deflated, so that none can be memory-mapped;
the large ones are read here as a stream of blocks instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import math
import os
from pathlib import Path
from typing import IO, NoReturn
import zipfile

import numpy as np

from tpugraphs_jax import console, files

_SUFFIX = ".npy"
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class NpzError(ValueError):
  """A defect of an input file, in one line that names the file and the array.

  Args:
    message: what is wrong; names from the file in it may have any characters.
  """

  def __init__(self, message: str):
    super().__init__(console.one_line(message))


@dataclasses.dataclass(frozen=True)
class Member:
  """What the header of one array says."""

  shape: tuple[int, ...]
  dtype: np.dtype
  fortran_order: bool


class NpzArchive(contextlib.AbstractContextManager):
  """The arrays of one `.npz` file, each read whole or in blocks.

  Every defect of the file raises `NpzError`; a missing file raises
  `FileNotFoundError`.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = Path(path)
    if not self.path.is_file():
      raise FileNotFoundError(f"{self.path}: no such file")
    try:
      self._zip = zipfile.ZipFile(self.path)
    except Exception as error:  # zipfile raises half a dozen types on bad bytes
      raise NpzError(f"{self.path}: not a complete .npz archive "
                     f"({type(error).__name__}: {error}); {_REMEDY}") from error

  def __exit__(self, *exc_info) -> None:
    self._zip.close()

  @property
  def names(self) -> list[str]:
    """Names of the arrays, in file order."""
    return [name.removesuffix(_SUFFIX) for name in self._zip.namelist()]

  def fail(self, name: str, message: str) -> NoReturn:
    """Raises the one-line error for array `name`."""
    raise NpzError(f"{self.path}: {name} {message}")

  def member(self, name: str) -> Member:
    """Shape and dtype of an array, without reading it."""
    with self._open(name) as (_, member):
      return member

  def read(self, name: str) -> np.ndarray:
    """One array, C-contiguous and read-only."""
    with self._open(name) as (stream, member):
      needed = math.prod(member.shape) * member.dtype.itemsize
      if needed > _memory_bytes():
        self.fail(name, f"of shape {member.shape} takes {needed / 2**30:.0f} GiB, more than the "
                  "memory of this machine")
      flat = np.frombuffer(stream.read(), member.dtype)
      order = "F" if member.fortran_order else "C"
      return np.asarray(flat.reshape(member.shape, order=order), order="C")

  def blocks(self, name: str, *, block_bytes: int) -> Iterator[np.ndarray]:
    """Consecutive slices along the first axis, of about `block_bytes` each.

    An array in Fortran order has no such slices in the file and is read whole.
    """
    member = self.member(name)
    rows = member.shape[0]
    step = rows_per_block(member.shape, member.dtype, block_bytes)
    if member.fortran_order:
      array = self.read(name)
      yield from (array[start:start + step] for start in range(0, rows, step))
      return
    with self._open(name) as (stream, _):
      for start in range(0, rows, step):
        shape = (min(step, rows - start), *member.shape[1:])
        data = stream.read(math.prod(shape) * member.dtype.itemsize)
        yield np.frombuffer(data, member.dtype).reshape(shape)
      stream.read()  # up to the end, where the checksum is compared

  @contextlib.contextmanager
  def _open(self, name: str) -> Iterator[tuple[IO[bytes], Member]]:
    try:
      info = self._zip.getinfo(name + _SUFFIX)
      with self._zip.open(info) as stream:
        member = _read_header(stream)
        self._check_size(name, member, info.file_size - stream.tell())
        yield stream, member
    except NpzError:
      raise
    except Exception as error:  # zipfile, zlib and numpy raise a dozen types
      raise NpzError(f"{self.path}: {name} is damaged ({type(error).__name__}: {error}); "
                     f"{_REMEDY}") from error

  def _check_size(self, name: str, member: Member, stored: int) -> None:
    if member.dtype.hasobject:
      self.fail(name, "holds Python objects, expected plain numbers")
    needed = math.prod(member.shape) * member.dtype.itemsize
    if needed != stored:
      self.fail(name, f"of shape {member.shape} and dtype {member.dtype} needs "
                f"{needed} bytes, the file holds {stored}; {_REMEDY}")


@contextlib.contextmanager
def create_archive(
    path: str | os.PathLike[str], *, compress_level: int
) -> Iterator[zipfile.ZipFile]:
  """A new deflated archive, which takes its place when complete."""
  with (files.replacing(path, "wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=compress_level) as archive):
    yield archive


def add_array(
    archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: np.dtype,
    blocks: Iterable[np.ndarray],
) -> None:
  """Appends one array whose `blocks`, concatenated, have the given shape."""
  header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False, "shape": shape}
  with archive.open(name + _SUFFIX, "w", force_zip64=True) as stream:
    np.lib.format.write_array_header_1_0(stream, header)
    for block in blocks:
      stream.write(np.ascontiguousarray(block, dtype).data.cast("B"))


def rows_per_block(shape: tuple[int, ...], dtype: np.dtype, block_bytes: int) -> int:
  """Number of first-axis rows that fill `block_bytes`, at least one."""
  row_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
  return max(1, block_bytes // max(1, row_bytes))


def _memory_bytes() -> int:
  """All memory of this machine."""
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_REMEDY = "fetch or generate the file again"


def _read_header(stream: IO[bytes]) -> Member:
  version = np.lib.format.read_magic(stream)
  if version not in _HEADER_READERS:
    raise ValueError(f"npy format {version} is not supported")
  shape, fortran_order, dtype = _HEADER_READERS[version](stream)
  return Member(shape, dtype, fortran_order and len(shape) > 1)
