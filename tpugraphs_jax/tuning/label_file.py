"""Labels of choices in a file, a line of JSON each.

  {"label": "tpu_estimate", "target": "tpu:v3", ..., "numbers": [0, 1], "raw": {...}, ...}

A line has its key, which names the program, the label, the target or device and the versions; the
numbers of the choice; its raw numbers or the error with which it failed; and a checksum. A line
with neither says that labelling has begun. Every line is on the disk before the next label is made.
A file may hold labels of many programs, and several processes may add lines.

`tune` keeps such a file as `cache=`. `collect` writes one beside each npz file, and ends it with a
line `about`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
import math
import os
from pathlib import Path
from typing import Any

from tpugraphs_jax.infra import console, files, trust
from tpugraphs_jax.tuning.compiler import reason
from tpugraphs_jax.tuning.draw import OptionIndices
from tpugraphs_jax.tuning.labels import LabelRecord
from tpugraphs_jax.tuning.problem import Problem

Outcome = LabelRecord | str  # raw numbers, or why there are none
SUFFIX = ".jsonl"
_RECORD = trust.Record(label=str)


class LabelFile:
  """The labels of the choices of a problem, taken from a file where it has them.

  Args:
    path: of the file, which is made where it is missing; None keeps nothing.
    problem: whose labels.
    key: of its lines; the problem's program, label and versions unless given.

  Attributes:
    problem: the argument.
    raw: the raw numbers of choices that have a label, the compiler's own choice first.
    errors: the reasons of choices that failed, a line each.

  Raises:
    ValueError: the file holds something else, or a line is damaged.
  """

  def __init__(
    self,
    path: str | os.PathLike[str] | None,
    problem: Problem,
    key: Mapping[str, Any] | None = None,
  ):
    self._path = Path(path) if path else None
    self.problem = problem
    self.raw: dict[OptionIndices, LabelRecord] = {}
    self.errors: dict[OptionIndices, str] = {}
    self._known: dict[OptionIndices, Outcome] = {}
    self._begun: set[OptionIndices] = set()
    if self._path:
      program = {} if key else {"program": problem.fingerprint(), "label": problem.label.name}
      self._key = key or program | problem.label.versions()
      for record in records(self._path, self._check):
        if self._key.items() <= record.items() and "about" not in record:
          self._begun.add(tuple(record["numbers"]))
          if record.keys() & {"raw", "error"}:
            self._known[tuple(record["numbers"])] = _outcome(record)

  def _check(self, record: dict[str, Any]) -> None:
    """Refuses (an error of any kind) a line of this problem whose outcome is none."""
    if self._key.items() <= record.items() and "about" not in record:
      trust.check(record["numbers"], [trust.COUNT], "numbers")
      trust.check(record.get("error", ""), str, "error")
      if "raw" in record:
        trust.check(record["raw"], self.problem.label.schema, "its label")
        self.problem.label.value(record["raw"])

  def label_choices(self, candidates: Sequence[OptionIndices]) -> None:
    """Labels choices, the compiler's own before all others.

    Only the compiler's own choice makes times of the file and new times comparable. It is measured
    again with the new choices. Its time in the file, divided by its time now, is the factor of the
    new times.
    """
    default, label = self.problem.default, self.problem.label
    known = self._known.get(default)
    if isinstance(known, str):  # nothing to compare other choices with
      self._take(default, known)
      return
    new = [numbers for numbers in candidates if numbers not in self._known]
    again = [default] if label.made_together and known and new else []
    factor, why = 1.0, ""
    for numbers, outcome in self.problem.label_records([*again, *new], self._begin):
      if isinstance(outcome, Exception):
        why = reason(outcome)
        if numbers not in self._known:
          self.add(numbers, why)
      elif known and numbers == default:
        factor = label.value(known) / label.value(outcome)
      else:
        self.add(numbers, label.scaled(outcome, factor))
    for numbers in candidates:
      # Nothing is measured after an error of the compiler's own choice.
      self._take(numbers, self._known.get(numbers, why))

  def _begin(self, numbers: OptionIndices) -> None:
    if self._path and numbers not in self._begun:  # by a process that was killed
      self._begun.add(numbers)
      append(self._path, {**self._key, "numbers": numbers})

  def add(self, numbers: OptionIndices, outcome: Outcome) -> None:
    """Writes a choice's raw numbers, or why it failed, into the file."""
    self._known[numbers] = outcome
    if self._path:
      name = "error" if isinstance(outcome, str) else "raw"
      append(self._path, {**self._key, "numbers": numbers, name: outcome})

  def _take(self, numbers: OptionIndices, outcome: Outcome) -> None:
    if isinstance(outcome, str):
      self.errors[numbers] = outcome
    else:
      self.raw[numbers] = outcome

  def ratio(self, numbers: OptionIndices) -> float:
    """Label of a choice / label of the compiler's own choice; infinite unless both have one."""
    raw, default = self.raw.get(numbers), self.raw.get(self.problem.default)
    value = self.problem.label.value
    return value(raw) / value(default) if raw and default else math.inf


def append(path: Path, record: Mapping[str, Any]) -> None:
  """Adds a line with its checksum."""
  files.append(path, json.dumps(files.seal(record)).encode())


def records(path: Path, check: Callable[[dict[str, Any]], object] = dict) -> list[dict[str, Any]]:
  """The whole lines of a file, without their checksums; none where there is no file.

  Args:
    path: of the file.
    check: raises an error of any kind for a line that is wrong.

  Raises:
    ValueError: a line is damaged, or no label.
  """
  lines = []
  for number, line in enumerate(files.lines(path), 1):
    try:
      sealed = trust.parse(line)
      trust.check(sealed, _RECORD, "it")
      record = files.unseal(sealed)
      if len(record) == len(sealed):
        raise ValueError("it has no checksum, as lines of an earlier version")
      check(record)
      lines.append(record)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
      start = line[:60].decode(errors="replace")
      raise ValueError(
        f"{path}, line {number}: {start!r} is no label ({console.one_line(error)}); give another "
        "file, or remove the line"
      ) from None
  return lines


def collected(path: Path) -> dict[str, Any]:
  """What `collect` wrote beside an npz file.

  Returns:
    The key of the labels, facts about the program and, as `configs`, the raw numbers of each
    configuration with its `numbers`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError, KeyError, TypeError, IndexError: it is damaged, or the program is unfinished.
  """
  lines = records(path.with_suffix(SUFFIX))
  *_, last = (line for line in lines if "about" in line)
  about = last.pop("about")
  raw = {
    tuple(line["numbers"]): line["raw"]
    for line in lines
    if "raw" in line and last.items() <= line.items()
  }
  configs = [{"numbers": numbers, **raw[tuple(numbers)]} for numbers in about.pop("kept")]
  return last | about | {"configs": configs}


def _outcome(line: Mapping[str, Any]) -> Outcome:
  return line["raw"] if "raw" in line else str(line["error"])


def interrupted(path: Path) -> dict[str, Any] | None:
  """The last line, if it says that labelling has begun."""
  lines = records(path)
  return lines[-1] if lines and not lines[-1].keys() & {"raw", "error", "about"} else None


def count(path: Path) -> int:
  """How many choices have raw numbers or an error."""
  return sum(bool(line.keys() & {"raw", "error"}) for line in records(path))
