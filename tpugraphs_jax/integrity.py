"""Whether files are as they were written: checksums.

Old files have none; they are read as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import contextlib
import hashlib
import json
import os
from pathlib import Path
import tempfile
import time
from typing import Any

import numpy as np

_SEAL = "checksum"
# A file that was changed so recently may change again without another time stamp.
_SETTLED_SECONDS = 1.0


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


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
  """A JSON object with a checksum of all its fields."""
  return {**values, _SEAL: _digest_of_values(values)}


def unsealed(values: Mapping[str, Any]) -> dict[str, Any]:
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
  """The first file whose SHA-256 is not the one expected; None when all are as expected.

  Once all are, this host looks again only after one of them has changed.

  Args:
    files: expected SHA-256 of each.
  """
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
  """The place of the note that these files are right, and when the last one changed."""
  digest, newest = hashlib.sha256(), 0.0
  for path, expected in files.items():
    stat = path.stat()
    known = (path.resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    digest.update(f"{known} {expected}\n".encode())
    newest = max(newest, stat.st_mtime, stat.st_ctime)
  folder = Path(tempfile.gettempdir()) / f"tpugraphs_jax_verified_{os.getuid()}"
  return folder / digest.hexdigest(), newest
