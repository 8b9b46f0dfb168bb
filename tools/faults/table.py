"""The table of a campaign of faults, with a row for each kind of fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass
class Row:
  """Counts of the outcomes of one kind of fault."""

  fault: str
  tried: int = 0
  refused: int = 0  # ended with one line that says what to do
  survived: int = 0  # gave the result of an undisturbed run
  failures: list[str] = dataclasses.field(default_factory=list)  # all other outcomes

  def count(self, outcome: str, *, of: str) -> None:
    """Counts one attempt.

    Args:
      outcome: `survived`, `refused`, or what went wrong instead.
      of: name of the attempt, for the list of failures.
    """
    self.tried += 1
    if outcome == "survived":
      self.survived += 1
    elif outcome == "refused":
      self.refused += 1
    else:
      self.failures.append(f"{of}: {outcome}")


def outcome(read: Callable[[], object], *, names: str = "") -> str:
  """`survived`, `refused` in one printable line, or what went wrong.

  Args:
    read: reads a file.
    names: what a line that refuses has to name; numbers that are not finite are excepted.
  """
  try:
    read()
  except (ValueError, OSError, FloatingPointError) as error:
    said = str(error)
    if not said.isprintable():
      return f"several lines: {said!r}"
    return "refused" if names in said or isinstance(error, FloatingPointError) else f"who? {said}"
  except Exception as error:  # what a user would see as a traceback
    return f"{type(error).__name__}: {error}"
  return "survived"


class Kept:
  """The rows of a campaign, kept in a file so that a stopped campaign can be continued.

  Args:
    path: file for the rows; None keeps them in memory alone.
  """

  def __init__(self, path: Path | None = None):
    self._path, self.rows, self._whole = path, [], []
    if path and path.exists():
      kept = json.loads(path.read_text())
      self.rows, self._whole = [Row(**row) for row in kept["rows"]], kept["whole"]

  def row(self, fault: str) -> Row:
    """The row of a fault; adds an empty row if the fault has not been tried."""
    rows = [row for row in self.rows if row.fault == fault]
    if not rows:
      self.rows.append(Row(fault))
    return (rows or self.rows[-1:])[0]

  def once(self, part: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yields the rows of a part that is tried as a whole; none if it was finished before."""
    if part not in self._whole:
      yield from rows()
      self._whole.append(part)
      self.save()

  def add(self, row: Row) -> None:
    self.rows = [earlier for earlier in self.rows if earlier.fault != row.fault] + [row]
    self.save()

  def save(self) -> None:
    if self._path:
      rows = [dataclasses.asdict(row) for row in self.rows]
      self._path.write_text(json.dumps({"rows": rows, "whole": self._whole}, indent=2) + "\n")


def markdown(rows: Sequence[Row]) -> str:
  """The rows as a Markdown table, followed by a list of the failures."""
  lines = [
    "| fault | tried | survived | refused in one line | lost, hung or silent |",
    "|---|---:|---:|---:|---:|",
  ]
  lines += [
    f"| {row.fault} | {row.tried:,} | {row.survived:,} | {row.refused:,} | {len(row.failures):,} |"
    for row in rows
  ]
  lines += [f"- {failure}" for row in rows for failure in row.failures]
  return "\n".join(lines) + "\n"
