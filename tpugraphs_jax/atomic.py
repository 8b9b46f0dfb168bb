"""Files that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> Iterator[IO]:
  """Opens a file beside `path` that takes its place when the block ends without an error.

  Until then, and after an error, whatever was at `path` stays. Several processes may write
  one file at the same time: each writes a file of its own.

  Args:
    path: the file to write; its folder is made where it is missing.
    mode: `w` or `wb`.
    **options: of `open`.

  Raises:
    OSError: it cannot be written.
  """
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
  try:
    with open(beside, mode, **options) as file:
      yield file
    os.replace(beside, path)
  finally:
    beside.unlink(missing_ok=True)
