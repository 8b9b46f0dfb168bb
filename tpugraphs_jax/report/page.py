"""The report page: the tables and figures of runs in the template `page.html`, in one file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import datetime
from importlib import resources
import math
from typing import Any

import jinja2
import numpy as np

from tpugraphs_jax import metrics
from tpugraphs_jax.report import figures
from tpugraphs_jax.report import runs as runs_lib
from tpugraphs_jax.report.runs import DEFAULT, Group, Judged, Run

_LISTED = 400  # graphs in the table of one run


def render(runs: Sequence[Run], *, graph: str = "") -> str:
  """The page of these runs.

  Args:
    runs: at least one.
    graph: whose ranks are shown; the median one by Kendall tau if not given.

  Raises:
    ValueError: the first run did not judge that graph.
  """
  environment = jinja2.Environment(
      autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
  environment.filters |= {"shown": _shown, "kind": figures.short_kind}
  environment.tests["numeric"] = lambda column: all(
      isinstance(cell, (int, float, tuple)) or cell == "" for cell in column)
  template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
  groups, chosen = runs_lib.groups_of(runs), choose(runs[0], graph)
  return environment.from_string(template).render(
      runs=runs, groups=groups, results=_results(runs, groups),
      figures={title: figures.svg(drawn)
               for title, drawn in figures.all_of(groups, chosen).items()},
      tables=_tables(runs, groups), now=f"{datetime.datetime.now():%Y-%m-%d %H:%M}")


def choose(run: Run, name: str) -> Judged | None:
  """The graph of that name, or the one in the middle by Kendall tau.

  Raises:
    ValueError: there is no graph of that name.
  """
  if not name:
    order = _by_tau(run)
    return order[len(order) // 2] if order else None
  for graph in run.judged:
    if graph.name == name:
      return graph
  known = ", ".join(graph.name for graph in run.judged[:5]) or "none: evaluate first"
  raise ValueError(f"{run.name} judged no graph {name!r}; it judged {known} ...")


def _by_tau(run: Run) -> list[Judged]:
  return sorted(run.judged, key=lambda graph: np.nan_to_num(graph.kendall_tau, nan=-2))


def _results(runs: Sequence[Run], groups: Sequence[Group]) -> dict[str, Any]:
  """Tables by title: a row for every run and every reference; groups, and tests between them."""
  names = list(dict.fromkeys(name for run in runs for name in run.means))
  row = lambda means: [means.get(name, math.nan) for name in names]
  tables = {"Results": _table(
      ["run", "seed", *names],
      [[run.name, run.seed, *row(run.means)] for run in runs if names] + [
          [of, "", *row(means)] for of, means in runs[0].references.items()
          if len({run.protocol for run in runs}) == 1])}
  if len(runs) > len(groups):
    tables["By config, mean and standard deviation over seeds"] = _table(
        ["config", "seeds", *names],
        [[group.name, ", ".join(str(run.seed) for run in group.runs),
          *(group.spread(name) for name in names)] for group in groups])
  if len(groups) > 1:
    tables["Paired by graph (Wilcoxon signed rank on Kendall tau)"] = _table(
        ["config", "against", "graphs", "mean difference", "p"], runs_lib.comparisons(groups))
  return tables


def _tables(runs: Sequence[Run], groups: Sequence[Group]) -> dict[str, Any]:
  """The tables below the figures, by title."""
  order, tables = _by_tau(runs[0]), {}
  if order and runs[0].config.get("task") == "tile":
    tables["Programs, means over kernels and seeds"] = _programs(groups)
  if order:
    more = f", the {_LISTED} lowest of {len(order)}" if len(order) > _LISTED else ""
    tables[f"Graphs ({runs[0].name}{more})"] = _table(
        ["graph", "nodes", "configurations", "Kendall tau", "slowdown1", f"slowdown of {DEFAULT}"],
        [[graph.name, graph.nodes, len(graph.scores), graph.kendall_tau, graph.slowdowns[1],
          graph.default_slowdown] for graph in order[:_LISTED]])
  if len(groups) > 1:
    tables["Where the configs differ"] = _table(
        ["field", *(group.name for group in groups)], runs_lib.differences(groups))
  return tables


def _programs(groups: Sequence[Group]) -> dict[str, Any]:
  """Means by program and config, over kernels and seeds."""
  columns = {}
  for group in groups:
    of = f", {group.name}" * (len(groups) > 1)
    for name, value in (("Kendall tau", lambda graph: graph.kendall_tau),
                        ("slowdown1", lambda graph: graph.slowdowns[1])):
      columns[name + of] = metrics.mean_by_program(group.by_graph(value))
  return _table(["program", *columns], [
      [program, *(column.get(program, math.nan) for column in columns.values())]
      for program in sorted(set().union(*columns.values()))])


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
  """A table without the columns in which no row has a number."""
  rows = list(rows)
  kept = [i for i in range(len(head)) if not rows or any(_shown(row[i]) != "–" for row in rows)]
  return {"head": [head[i] for i in kept], "rows": [[row[i] for i in kept] for row in rows]}


def _shown(value: Any) -> str:
  """A cell: an integer, a number to four places, a mean with its deviation, or words."""
  if isinstance(value, tuple):
    mean, deviation = value
    return _shown(mean) + ("" if math.isnan(deviation) else f" ± {deviation:.4f}")
  if isinstance(value, float):
    small = "< 0.0001" if 0 < value < 5e-5 else f"{value:.4f}"
    return "–" if math.isnan(value) else small
  return f"{value:,}" if isinstance(value, int) else str(value)
