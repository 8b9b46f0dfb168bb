"""Figures over seeds, and their tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import re
from typing import Any

from tpugraphs_jax.leaderboard.race import figure as figure
from tpugraphs_jax.leaderboard.race import summary as summary


def percent(row: Mapping[str, Any], column: str, *, digits: int = 1) -> str:
  """As `figure`, of a slowdown, in percent."""
  if column not in row:
    return ""
  parts = [row[column], *([row["spread"][column]] if column in row.get("spread", {}) else [])]
  return " ± ".join(f"{100 * value:.{digits}f}" for value in parts) + " %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table in Markdown."""
  text = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
  lines = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{text}"
  return re.sub(r"\|  (?=\|)", "| ", lines)
