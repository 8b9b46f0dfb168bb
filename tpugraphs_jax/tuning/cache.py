"""Labels that `tune` keeps in a file, a line of JSON each: by program, choice, compiler and target.

Every line is on the disk before the next label is made. The file may hold labels of many programs.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import math
import os
from pathlib import Path

from tpugraphs_jax.infra import files, trust
from tpugraphs_jax.tuning.draw import Numbers
from tpugraphs_jax.tuning.labels import Raw
from tpugraphs_jax.tuning.problem import Problem


class Cache:
  """The labels of the choices of a problem, taken from a file where it has them.

  Args:
    path: of the file, which is made where it is missing; None keeps nothing.
    problem: whose labels.

  Raises:
    ValueError: the file holds something else.
  """

  def __init__(self, path: str | os.PathLike[str] | None, problem: Problem):
    self._path = Path(path) if path else None
    self._problem = problem
    self._key = {
      "program": problem.fingerprint(),
      "label": problem.label.name,
      **problem.label.versions(),
    }
    self._known: dict[Numbers, Raw | None] = {}
    for number, line in enumerate(files.lines(self._path) if self._path else (), 1):
      try:
        record = trust.parse(line)
        if all(record[name] == value for name, value in self._key.items()):
          if record["raw"] is not None:
            problem.label.value(record["raw"])  # refuses what is no label
          self._known[tuple(record["numbers"])] = record["raw"]
      except (ValueError, KeyError, TypeError, OverflowError):
        start = line[:60].decode(errors="replace")
        raise ValueError(
          f"{path}, line {number}: {start!r} is no label of tune; give another file "
          "as cache=, or remove the line"
        ) from None

  def labels(self, candidates: Sequence[Numbers]) -> dict[Numbers, Raw | None]:
    """The raw numbers of choices, in their order; None for those that failed.

    Times from the file and new times compare only through the compiler's own choice. It is measured
    again with the new choices. Their times are multiplied by its time in the file and divided by
    its time now.
    """
    new = [numbers for numbers in candidates if numbers not in self._known]
    own = self._problem.own
    again = [own] if self._problem.label.is_comparative and self._known.get(own) and new else []
    found = self._problem.raw_labels([*again, *new]) if new else {}
    factor = 1.0
    if again and own in found:
      factor = self._problem.label.value(self._known[own]) / self._problem.label.value(found[own])
    for numbers in new:
      raw = found.get(numbers)
      if raw and again:
        raw = raw | {"seconds": [seconds * factor for seconds in raw["seconds"]]}
      self._known[numbers] = raw
      if self._path:
        files.append(self._path, json.dumps({**self._key, "numbers": numbers, "raw": raw}).encode())
    return {numbers: self._known[numbers] for numbers in candidates}

  def ratio(self, numbers: Numbers) -> float:
    """The label of a choice over that of the compiler's own; infinite unless both are labelled."""
    value, own = self._problem.label.value, self._known.get(self._problem.own)
    raw = self._known.get(numbers)
    return value(raw) / value(own) if raw and own else math.inf
