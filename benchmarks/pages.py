"""Figures over seeds, and their tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import re
from typing import Any

import numpy as np


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
  """Mean of every figure over seeds, of several its standard deviation, and their number."""
  columns = {key: [run[key] for run in runs] for key in runs[0]}
  means = {key: float(np.mean(values)) for key, values in columns.items()} | {"seeds": len(runs)}
  if len(runs) == 1:
    return means
  return means | {"spread": {key: float(np.std(values, ddof=1)) for key, values in columns.items()}}


def figure(row: Mapping[str, Any], column: str, *, empty: str = "") -> str:
  """A cell: the mean of a column and, where it is known, its standard deviation over seeds."""
  if column not in row:
    return empty
  spread = row.get("spread", {})
  return f"{row[column]:.3f}" + (f" ± {spread[column]:.3f}" if column in spread else "")


def percent(row: Mapping[str, Any], column: str, *, digits: int = 1) -> str:
  """The same of a slowdown, in percent."""
  if column not in row:
    return ""
  parts = [row[column], *([row["spread"][column]] if column in row.get("spread", {}) else [])]
  return " ± ".join(f"{100 * value:.{digits}f}" for value in parts) + " %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table in Markdown."""
  text = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
  lines = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{text}"
  return re.sub(r"\|  (?=\|)", "| ", lines)
