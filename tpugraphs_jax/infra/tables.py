"""A table that is text on a terminal and HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import html

_CELL = 'style="text-align: left; white-space: nowrap"'


@dataclasses.dataclass(frozen=True)
class Table:
  """Cells below a head; columns without any content are left out.

  Attributes:
    head: a name for each column.
    rows: each with one text per column.
    title: a line above the table.
  """

  head: Sequence[str]
  rows: Sequence[Sequence[str]]
  title: str = ""

  def _columns(self) -> list[int]:
    return [column for column in range(len(self.head)) if any(row[column] for row in self.rows)]

  def __str__(self) -> str:
    table = [self.head, *self.rows]
    widths = {column: max(len(row[column]) for row in table) for column in self._columns()}
    line = lambda row: "  ".join(row[column].ljust(width) for column, width in widths.items())
    lines = "\n".join(line(row).rstrip() for row in table)
    return "\n\n".join(filter(None, [self.title, lines if widths else ""]))

  def _repr_html_(self) -> str:
    head, *rows = (
      "".join(f"<{tag} {_CELL}>{html.escape(row[column])}</{tag}>" for column in self._columns())
      for tag, row in [("th", self.head), *(("td", row) for row in self.rows)]
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    title = f"<p>{html.escape(self.title)}</p>" if self.title else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    return title + table
