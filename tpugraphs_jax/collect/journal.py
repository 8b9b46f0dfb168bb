"""What is known of a program so far, line by line, so that a kill loses one line at most."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any


class Journal:
  """Results of candidates, each on the disk before the next one begins.

  One process holds a journal at a time. A line that was cut short is dropped.
  """

  def __init__(self, path: Path, header: dict[str, Any]):
    """Opens a journal, or begins one.

    Raises:
      ValueError: it belongs to another program, label, version or seed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    self.path = path
    self._file = open(path, "a+b")
    fcntl.flock(self._file, fcntl.LOCK_EX)
    records = read(path)
    if records and records[0] != header:
      self.close()
      name = next(key for key in header if records[0].get(key) != header[key])
      raise ValueError(f"{path} was begun with {name} {records[0].get(name)}, now it is "
                       f"{header[name]}; remove it, or choose another --collection")
    _cut_unended_line(path)
    if not records:
      self._write(header)
    self.raw: dict[int, dict[str, Any]] = {}  # candidate number to what was found
    self.errors: dict[int, str] = {}
    for record in records[1:]:
      self._learn(record)

  def start(self, candidate: int) -> None:
    self._write({"start": candidate})

  def result(self, candidate: int, raw: dict[str, Any]) -> None:
    self._write({"candidate": candidate, "raw": raw})

  def error(self, candidate: int, message: str) -> None:
    self._write({"candidate": candidate, "error": message})

  def close(self) -> None:
    self._file.close()

  def _learn(self, record: dict[str, Any]) -> None:
    if "raw" in record:
      self.raw[record["candidate"]] = record["raw"]
    elif "error" in record:
      self.errors[record["candidate"]] = record["error"]

  def _write(self, record: dict[str, Any]) -> None:
    self._file.write(json.dumps(record).encode() + b"\n")
    self._file.flush()
    os.fsync(self._file.fileno())
    if "start" not in record:
      self._learn(record)


def read(path: Path) -> list[dict[str, Any]]:
  """The complete lines of a journal; none where there is no file."""
  if not path.exists():
    return []
  lines = path.read_bytes().split(b"\n")[:-1]
  return [json.loads(line) for line in lines]


def done(path: Path) -> int:
  """How many candidates have a result or an error."""
  return sum("candidate" in record for record in read(path))


def interrupted(path: Path) -> int | None:
  """The candidate whose labelling was begun and not ended, if there is one."""
  records = read(path)
  return records[-1].get("start") if records else None


def add_error(path: Path, candidate: int, message: str) -> None:
  """Adds an error in the name of a process that could not do so itself."""
  _cut_unended_line(path)
  with open(path, "ab") as file:
    file.write(json.dumps({"candidate": candidate, "error": message}).encode() + b"\n")


def _cut_unended_line(path: Path) -> None:
  """Drops what follows the last end of a line, so that the next line begins anew."""
  data = path.read_bytes()
  if not data.endswith(b"\n"):
    os.truncate(path, data.rfind(b"\n") + 1)
