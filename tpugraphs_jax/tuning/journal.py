"""The labels of a program while it is collected, a line of JSON each, with a checksum.

Every line is on the disk before the next label is made, so that a kill loses one at most; of
measured times, which are made together, it loses all. The journal also has the checksum of the
module from which the program's graph is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from tpugraphs_jax.infra import files, trust


class Journal:
  """Results of candidates.

  One process holds a journal at a time; another process waits. A line that a kill cut short
  is dropped.

  Attributes:
    raw: raw numbers by number of the candidate.
    errors: messages of failed candidates, by number of the candidate.
  """

  def __init__(self, path: Path, header: dict[str, Any]):
    """Opens a journal, or begins one with `header` as its first line.

    Raises:
      ValueError: the journal is damaged, or belongs to another program, label, version or seed.
    """
    self._stack = contextlib.ExitStack()
    self._file = self._stack.enter_context(files.appending(path))
    try:
      records = read(path)
      _check_header(path, records, header)
    except ValueError:
      self.close()
      raise
    if not records:
      self._add(header)
    self.raw: dict[int, dict[str, Any]] = {
      record["candidate"]: record["raw"] for record in records if "raw" in record
    }
    self.errors: dict[int, str] = {
      record["candidate"]: record["error"] for record in records if "error" in record
    }
    modules = [record["module_sha256"] for record in records if "module_sha256" in record]
    self._module = modules[-1] if modules else ""

  def keep_module(self, path: Path, module: bytes) -> None:
    """Writes a module, whose checksum goes into the journal."""
    with files.replacing(path, "wb") as file:
      file.write(module)
    self._module = hashlib.sha256(module).hexdigest()
    self._add({"module_sha256": self._module})

  def kept_module(self, path: Path) -> bytes | None:
    """The module that was written last; None where it is missing or damaged."""
    data = path.read_bytes() if path.exists() else b""
    return data if hashlib.sha256(data).hexdigest() == self._module else None

  def start(self, candidate: int) -> None:
    self._add({"start": candidate})

  def result(self, candidate: int, raw: dict[str, Any]) -> None:
    self._add({"candidate": candidate, "raw": raw})
    self.raw[candidate] = raw

  def error(self, candidate: int, message: str) -> None:
    self._add(_error(candidate, message))
    self.errors[candidate] = message

  def _add(self, record: dict[str, Any]) -> None:
    files.add_line(self._file, _line(record))

  def close(self) -> None:
    self._stack.close()


def read(path: Path) -> list[dict[str, Any]]:
  """The complete lines of a journal; none where there is no file.

  Raises:
    ValueError: a line is damaged.
  """
  records = []
  for number, line in enumerate(files.lines(path), 1):
    try:
      record = trust.parse(line)
      trust.check(record, trust.Record(checksum=str), "it")
      records.append(files.unseal(record))
    except ValueError as error:
      raise ValueError(f"{path} is damaged in line {number} ({error}): remove it") from None
  return records


def _check_header(path: Path, records: list[dict[str, Any]], header: dict[str, Any]) -> None:
  if records and records[0] != header:
    name = next(key for key in (*header, *records[0]) if records[0].get(key) != header.get(key))
    raise ValueError(
      f"{path} was begun with {name} {records[0].get(name)}, now it is "
      f"{header.get(name)}; remove it, or choose another --collection"
    )


def done(path: Path) -> int:
  """How many candidates have a result or an error."""
  return sum("candidate" in record for record in read(path))


def interrupted(path: Path) -> int | None:
  """The candidate whose labelling was begun and has not ended, if there is one."""
  records = read(path)
  return records[-1].get("start") if records else None


def add_error(path: Path, candidate: int, message: str) -> None:
  """Adds an error for a worker that ended before it could do so itself."""
  files.append(path, _line(_error(candidate, message)))


def _error(candidate: int, message: str) -> dict[str, Any]:
  return {"candidate": candidate, "error": message}


def _line(record: dict[str, Any]) -> bytes:
  return json.dumps(files.seal(record)).encode()
