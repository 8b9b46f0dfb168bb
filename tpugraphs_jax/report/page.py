"""One HTML page: figures as SVG, tables, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import datetime
import html
import math
from typing import Any

import numpy as np

from tpugraphs_jax import metrics
from tpugraphs_jax.report import calibration, compare, figures
from tpugraphs_jax.report.runs import Judged, Run

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #e4e4e4; text-align: left;
         vertical-align: top; }
td.number, th.number { text-align: right; }
.short { white-space: nowrap; }
svg { max-width: 100%; height: auto; }
.note { color: #666; } .wide { overflow-x: auto; }
"""
_LISTED = 400  # graphs in the table of one run
_SHORT = 40  # letters of a cell that is never broken into lines
_Row = Sequence[Any]


def render(runs: Sequence[Run], *, graph: str = "") -> str:
  """The page of these runs.

  Args:
    runs: at least one.
    graph: whose ranks are shown; the median one by Kendall tau if not given.

  Raises:
    ValueError: the first run did not judge that graph.
  """
  groups, chosen = compare.groups_of(runs), choose(runs[0], graph)
  parts = [f"<h1>{_text(_title(runs))}</h1>", _about(runs)]
  parts += _results(runs, groups)
  for title, drawn in figures.all_of(runs, chosen).items():
    parts.append(f"<h2>{_text(title)}</h2>\n<figure>{figures.svg(drawn)}</figure>")
  parts += _programs(groups) + _graphs(runs[0]) + _configs(groups)
  return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
          f"<title>{_text(_title(runs))}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
          + "\n".join(parts) + "\n</body></html>\n")


def choose(run: Run, name: str) -> Judged | None:
  """The graph of that name, or the one in the middle by Kendall tau.

  Raises:
    ValueError: there is no graph of that name.
  """
  if name:
    for graph in run.judged:
      if graph.name == name:
        return graph
    known = ", ".join(graph.name for graph in run.judged[:5]) or "none: evaluate first"
    raise ValueError(f"{run.name} judged no graph {name!r}; it judged {known} ...")
  order = sorted(run.judged, key=lambda graph: np.nan_to_num(graph.kendall_tau, nan=-2))
  return order[len(order) // 2] if order else None


def _title(runs: Sequence[Run]) -> str:
  collection = runs[0].summary.get("collection", "")
  if len(runs) == 1:
    return f"{runs[0].name}: {runs[0].config.get('model.name', '')} on {collection}"
  return f"{len(runs)} runs on {collection}"


def _about(runs: Sequence[Run]) -> str:
  now = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
  kinds = "; ".join(dict.fromkeys(run.labels for run in runs))
  lines = [f"Written {now}.", f"<b>Labels: {_text(kinds)}.</b>"]
  if len({run.summary.get("collection") for run in runs}) > 1:
    lines.append("<b>The runs are of different collections: their figures do not compare.</b>")
  if len({_protocol(run) for run in runs}) > 1:
    lines.append("<b>The runs were judged on different configurations or graphs.</b>")
  return f'<p class="note">{" ".join(lines)}</p>'


def _protocol(run: Run) -> tuple[Any, ...]:
  validation = run.summary.get("validation", {})
  return tuple(validation.get(name) for name in ("split", "graphs", "configurations_judged"))


def _results(runs: Sequence[Run], groups: Sequence[compare.Group]) -> list[str]:
  names = list(dict.fromkeys(name for run in runs for name in run.means))
  parts = ["<h2>Results</h2>", _protocol_line(runs[0])]
  if len(runs) == 1:
    return parts + _result(runs[0], names)
  parts.append(_table(["run", "seed", *names, "ended", "steps", "seconds", "peak MiB"],
                      [_run_row(run, names) for run in runs]))
  parts += ["<h2>By config, over seeds</h2>", _table(
      ["config of", "seeds", *names],
      [[group.name, len(group.runs), *(_spread(*group.spread(name)) for name in names)]
       for group in groups])]
  if len(groups) > 1:
    parts += ["<h2>Paired by graph (Wilcoxon signed rank on Kendall tau)</h2>", _table(
        ["config of", "against", "graphs", "mean difference", "p"],
        [[pair.second, pair.first, pair.graphs, pair.difference, pair.p_value]
         for pair in compare.pairs(groups)])]
  return parts


def _result(run: Run, names: Sequence[str]) -> list[str]:
  """The metrics of one run beside a random order and the ceiling, and how it ended."""
  random = run.summary.get("validation", {}).get("random_order", {})
  ceiling = calibration.ceiling(run)
  _, seed, *_, ended, steps, seconds, peak = _run_row(run, ())
  return [
      _table(["metric", "this run", "a random order", *["order without noise"] * bool(ceiling)],
             [[name, run.means[name], random.get(name, math.nan),
               *[ceiling.get(name, math.nan)] * bool(ceiling)] for name in names]),
      f"<p>Ended: {_text(str(ended))}, after {_shown(steps)} steps and {_shown(seconds)} s; peak "
      f"memory {_shown(peak)} MiB; seed {seed}.</p>"]


def _protocol_line(run: Run) -> str:
  found = run.summary.get("validation")
  if not found:
    return '<p class="note">Not evaluated yet.</p>'
  return (f'<p class="note">{found["graphs"]} graphs of the split {_text(found["split"])}, '
          f'configurations: {_text(found["configurations"])}. opa_pooled is over the pairs of all '
          "graphs, names with _mean are means over graphs.</p>")


def _run_row(run: Run, names: Sequence[str]) -> _Row:
  training = run.summary.get("training", {})
  peak = training.get("peak_memory", {}).get("bytes")
  seconds = training.get("seconds")
  return [run.name, run.seed, *(run.means.get(name, math.nan) for name in names),
          training.get("ended", "not yet"), training.get("step", ""),
          round(seconds) if seconds is not None else "", round(peak / 2**20) if peak else ""]


def _spread(mean: float, deviation: float) -> str:
  return _shown(mean) + ("" if math.isnan(deviation) else f" ± {deviation:.4f}")


def _programs(groups: Sequence[compare.Group]) -> list[str]:
  """Means by program and config, over kernels and seeds."""
  judged = [group for group in groups if any(run.judged for run in group.runs)]
  if not judged or judged[0].runs[0].config.get("task") != "tile":
    return []
  columns, head = [], ["program"]
  for group in judged:
    of = f", {group.name}" * (len(groups) > 1)
    head += [f"Kendall tau{of}", f"slowdown of the first{of}"]
    columns += [metrics.mean_by_program(group.means_of(value)) for value in (
        lambda graph: graph.kendall_tau, lambda graph: graph.slowdowns[1])]
  programs = sorted(set().union(*columns))
  rows = [[program, *(column.get(program, math.nan) for column in columns)]
          for program in programs]
  return ["<h2>Programs, means over kernels and seeds</h2>", _table(head, rows)]


def _graphs(run: Run) -> list[str]:
  if not run.judged:
    return []
  order = sorted(run.judged, key=lambda graph: np.nan_to_num(graph.kendall_tau, nan=-2))
  rows = [[graph.name, graph.nodes, len(graph.scores), graph.kendall_tau, graph.slowdowns[1]]
          for graph in order[:_LISTED]]
  more = f", the {_LISTED} lowest of {len(order)}" if len(order) > _LISTED else ""
  return [f"<h2>Graphs ({_text(run.name)}{more})</h2>",
          _table(["graph", "nodes", "configurations", "Kendall tau", "slowdown of the first"],
                 rows)]


def _configs(groups: Sequence[compare.Group]) -> list[str]:
  if len(groups) > 1:
    return ["<h2>Where the configs differ</h2>", _table(
        ["field", *(group.name for group in groups)],
        [[name, *map(str, values)] for name, values in compare.differences(groups)])]
  rows = [[name, str(value)] for name, value in groups[0].runs[0].config.items()]
  return ["<h2>Config</h2>",
          f"<details><summary>{len(rows)} fields</summary>{_table(['field', 'value'], rows)}"
          "</details>"]


def _table(head: Sequence[str], rows: Iterable[_Row]) -> str:
  rows = list(rows)
  is_number = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows)
               for i in range(len(head))]
  kind = lambda i, text: (' class="number"' if is_number[i] else
                          ' class="short"' if len(text) <= _SHORT else "")
  lines = ["<tr>" + "".join(f"<th{kind(i, name)}>{_text(name)}</th>" for i, name in enumerate(head))
           + "</tr>"]
  for row in rows:
    shown = [_shown(value) for value in row]
    lines.append("<tr>" + "".join(
        f"<td{kind(i, text)}>{_text(text)}</td>" for i, text in enumerate(shown)) + "</tr>")
  return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def _shown(value: Any) -> str:
  if isinstance(value, float):
    return "–" if math.isnan(value) else f"{value:.4f}"
  return f"{value:,}" if isinstance(value, int) else str(value)


def _text(value: str) -> str:
  return html.escape(value)
