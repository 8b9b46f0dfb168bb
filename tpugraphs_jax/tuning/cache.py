"""Labels that `tune` keeps in a file, a line of JSON each: by program, choice, compiler and target.

Every line is on the disk before the next label is made. The file may hold labels of many programs.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import math
import os
from pathlib import Path
from typing import Any

from tpugraphs_jax.infra import files, trust
from tpugraphs_jax.tuning.draw import Numbers
from tpugraphs_jax.tuning.labels import Raw, reason
from tpugraphs_jax.tuning.problem import Problem


class Cache:
  """The labels of the choices of a problem, taken from a file where it has them.

  Args:
    path: of the file, which is made where it is missing; None keeps nothing.
    problem: whose labels.

  Attributes:
    problem: the argument.
    raw: the raw numbers of choices that have a label, the compiler's own choice first.
    errors: the reasons of choices that failed, a line each.
    label: of the program, once the compiler's own choice is labelled.

  Raises:
    ValueError: the file holds something else.
  """

  def __init__(self, path: str | os.PathLike[str] | None, problem: Problem):
    self._path = Path(path) if path else None
    self.problem = problem
    self._key: dict[str, str] = {}
    if self._path:
      self._key = {"program": problem.fingerprint(), "label": problem.label.name}
      self._key |= problem.label.versions()
    self._known: dict[Numbers, Raw | str] = {}
    self.raw: dict[Numbers, Raw] = {}
    self.errors: dict[Numbers, str] = {}
    self.label = problem.label
    for number, line in enumerate(files.lines(self._path) if self._path else (), 1):
      try:
        record = trust.parse(line)
        if all(record[name] == value for name, value in self._key.items()):
          if "raw" in record:
            value = problem.label.of(record["raw"]).value(record["raw"])
            trust.check(value, trust.NUMBER, "its label")
          outcome = record["raw"] if "raw" in record else str(record["error"])
          self._known[tuple(record["numbers"])] = outcome
      except (ValueError, KeyError, TypeError, OverflowError):
        start = line[:60].decode(errors="replace")
        raise ValueError(
          f"{path}, line {number}: {start!r} is no label of tune; give another file "
          "as cache=, or remove the line"
        ) from None

  def label_choices(self, candidates: Sequence[Numbers]) -> None:
    """Labels choices, the compiler's own before all others.

    Only the compiler's own choice makes times of the file and new times comparable. It is measured
    again with the new choices. Its time in the file, divided by its time now, is the factor of the
    new times.
    """
    own, label = self.problem.own, self.problem.label
    known = self._known.get(own)
    if isinstance(known, str):  # nothing to compare other choices with
      self._take(own, known)
      return
    new = [numbers for numbers in candidates if numbers not in self._known]
    again = [own] if label.made_together and known and new else []
    found = self.problem.raw_labels([*again, *new]) if new else {}
    factor = 1.0
    if again and known and isinstance(anew := found[own], dict):
      factor = label.value(known) / label.value(anew)
    for numbers in new:
      # Nothing is measured after an error of the compiler's own choice.
      outcome = found[numbers] if numbers in found else found[own]
      if isinstance(outcome, Exception):
        self._known[numbers] = text = reason(outcome)
        record: dict[str, Any] = {"numbers": numbers, "error": text}
      else:
        if again:
          outcome = outcome | {"seconds": [seconds * factor for seconds in outcome["seconds"]]}
        self._known[numbers] = outcome
        record = {"numbers": numbers, "raw": outcome}
      if self._path and numbers in found:
        files.append(self._path, json.dumps(self._key | record).encode())
    for numbers in candidates:
      self._take(numbers, self._known[numbers])

  def _take(self, numbers: Numbers, outcome: Raw | str) -> None:
    if isinstance(outcome, str):
      self.errors[numbers] = outcome
      return
    if numbers == self.problem.own:
      self.label = self.label.of(outcome)
    try:
      self.label.value(outcome)
      self.raw[numbers] = outcome
    except ValueError as error:
      self.errors[numbers] = str(error)

  def ratio(self, numbers: Numbers) -> float:
    """Label of a choice / label of the compiler's own choice; infinite unless both have one."""
    raw, own = self.raw.get(numbers), self.raw.get(self.problem.own)
    return self.label.value(raw) / self.label.value(own) if raw and own else math.inf
