"""Refuses a checkpoint that was saved with another config, or beside other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Fields that change no result: how many configurations pass the model at a time.
_FREE_FIELDS = ("batch.config_chunk",)


def check(where: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
  """Raises ValueError with the fields that differ between two configs, and their values.

  Args:
    where: the checkpoint, for the message.
    saved: nested fields (JSON types) that it was saved with.
    current: nested fields that it should have.
  """
  old, new = dict(_fields(saved)), dict(_fields(current))
  absent = "absent"
  differences = [
      f"{name} is {old.get(name, absent)} there and {new.get(name, absent)} here"
      for name in sorted(old.keys() | new.keys())
      if old.get(name, absent) != new.get(name, absent) and name not in _FREE_FIELDS
  ]
  if differences:
    raise ValueError(
        f"{where} is a checkpoint of another config: {'; '.join(differences)}. Give the"
        " same values, or another --workdir"
    )


def check_files(where: Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
  """Raises ValueError with the first file that is not the one a checkpoint was saved beside.

  Args:
    where: the checkpoint, for the message.
    saved: digests of the files that it was saved beside, by path within the working folder.
    current: digests of what is there now. Files that one side does not know are not compared.
  """
  for name in sorted(saved.keys() & current.keys()):
    if saved[name] != current[name]:
      raise ValueError(
          f"{name} is of another run: it is not the file that {where} was trained with. Put that "
          "file back, or train again in another --workdir")


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
  """The leaves of a nested dict with their dotted names."""
  for name, value in config.items():
    if isinstance(value, dict) and value:
      yield from _fields(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value
