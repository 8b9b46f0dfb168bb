"""What a campaign of faults found: a table with a row for each kind of fault."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses


@dataclasses.dataclass
class Row:
  """One kind of fault."""

  fault: str
  tried: int = 0
  refused: int = 0  # ended in one line that says what to do
  survived: int = 0  # gave the result of an undisturbed run
  failures: list[str] = dataclasses.field(default_factory=list)  # anything else

  def count(self, outcome: str | None, *, of: str) -> None:
    """Notes one attempt: `survived`, `refused`, or what went wrong instead."""
    self.tried += 1
    if outcome == "survived":
      self.survived += 1
    elif outcome == "refused":
      self.refused += 1
    else:
      self.failures.append(f"{of}: {outcome}")


def markdown(rows: Sequence[Row]) -> str:
  """The table as Markdown, then what went wrong."""
  lines = ["| fault | tried | survived | refused in one line | lost, hung or silent |",
           "|---|---:|---:|---:|---:|"]
  lines += [f"| {row.fault} | {row.tried:,} | {row.survived:,} | {row.refused:,} | "
            f"{len(row.failures):,} |" for row in rows]
  lines += [f"- {failure}" for row in rows for failure in row.failures]
  return "\n".join(lines) + "\n"
