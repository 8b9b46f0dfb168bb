"""The report page: the tables and figures of runs in the template `page.html`, in one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import datetime
import itertools
import math
import os
from pathlib import Path
import shlex
from typing import Any

from tpugraphs_jax import metrics
from tpugraphs_jax.infra import files
from tpugraphs_jax.report import errors, figures, templates
from tpugraphs_jax.report.runs import (
  BY_GRAPH,
  comparisons,
  DEFAULT,
  differences,
  leads,
  RunComparison,
  RunGroup,
  RunRecord,
  TAU,
)

_LISTED = 400  # graphs in a table
_BESIDE = 2  # groups with separate columns in a table of graphs
_ERRORS = ("graphs", "number", "Kendall tau", "slowdown1")  # columns of `errors.rows`
_FILES = (
  "results.csv validation.csv validation_programs.csv test.csv folds.json metrics.jsonl "
  "summary.json config.json log.txt tensorboard"
).split()


def render(runs: Sequence[RunRecord], folder: str = "") -> str:
  """The page of these runs.

  Args:
    runs: at least one.
    folder: of the page, from which links to files of the runs start; without it there are none.
  """
  compared = comparisons(runs)
  return templates.render(
    "page.html",
    runs=runs,
    sections=[_section(comparison) for comparison in compared],
    names=list(dict.fromkeys(name for comparison in compared for name in comparison.references)),
    about={run.name: _about(run) for run in runs},
    links={run.name: _links(run, folder) for run in runs},
    now=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
  )


def _section(comparison: RunComparison) -> dict[str, Any]:
  """The part of the page about runs that compare."""
  first, groups = comparison.groups[0].runs[0], comparison.groups
  drawn = figures.all_of(comparison)
  return {
    "comparison": comparison,
    "name": first.collection,
    "labels": first.labels,
    "most": figures.MOST,
    "judged": first.summary.get(first.section, {}),
    "best": first.summary.get("training", {}).get("best", {})
    if first.section == "validation"
    else {},
    "results": _results(comparison),
    "leads": _table(
      {
        "config": lead.config,
        "graphs": lead.graphs,
        "first better on": lead.better,
        "Kendall tau below the first": lead.gain,
        "spread over seeds": lead.spread,
        "p": "too few graphs" if math.isnan(lead.p_value) else lead.p_value,
      }
      for lead in leads(groups)
    ),
    "differences": _differences(groups),
    "figures": {title: figures.svg(figure) for title, figure in drawn.items()},
    "graphs": _graphs(groups),
    "errors": _table(dict(zip(_ERRORS, row)) for row in errors.rows(groups[0])),
    "programs": _programs(groups) if first.config.get("task") == "tile" else _table([]),
    "ended": _ended(comparison.runs),
  }


def _differences(groups: Sequence[RunGroup]) -> dict[str, Any]:
  """Fields in which configs differ, with the value of each config."""
  head = ["field", *(group.name for group in groups)]
  return {"head": head, "rows": differences(groups) if len(groups) > 1 else []}


def _results(comparison: RunComparison) -> dict[str, Any]:
  """A row for every config, means out of fold and deviations over runs, and every reference."""
  names, groups = list(comparison.groups[0].out_of_fold.means), comparison.groups
  cell = lambda group, name: (group.out_of_fold.spread(name)[0], group.spread(name)[1])
  rows: list[dict[str, Any]] = [
    {
      "config": group.name,
      "seeds": ", ".join(str(seed) for seed in sorted({run.seed for run in group.runs})),
      "test folds": ", ".join(map(str, group.folds)),
      **{name: cell(group, name) for name in names},
    }
    for group in groups
    if names
  ]
  rows += [
    {"config": order, **{name: means.get(name, math.nan) for name in names}}
    for order, means in comparison.references.items()
  ]
  return _table(rows)


def _ended(runs: Sequence[RunRecord]) -> dict[str, Any]:
  """A row for every run, with its figures and how its training ended."""
  trained = [run.summary.get("training", {}) for run in runs]
  return _table(
    {
      "run": run.name,
      "seed": run.seed,
      "test fold": "" if run.fold is None else run.fold,
      TAU: run.means.get(TAU, math.nan),
      "slowdown1_mean": run.means.get("slowdown1_mean", math.nan),
      "training ended": training.get("ended", "not yet"),
      "steps": training.get("step") or "",
      "best step": training.get("best", {}).get("step") or "",
      "seconds": round(training.get("seconds", 0)),
      "peak MiB": round(training.get("peak_memory", {"bytes": 0})["bytes"] / 2**20),
    }
    for run, training in zip(runs, trained)
  )


def _graphs(groups: Sequence[RunGroup]) -> dict[str, Any]:
  """A row for every graph, the lowest Kendall tau of the first config first."""
  columns = {}
  for name, value in BY_GRAPH.items():
    for group in groups[:_BESIDE]:
      columns[name + _of(group, groups)] = group.by_graph(value)
  return _table(
    {
      "graph": graph.name,
      "nodes": graph.nodes,
      "configurations": len(graph.scores),
      **{name: values.get(graph.name, math.nan) for name, values in columns.items()},
      f"slowdown of {DEFAULT}": graph.default_slowdown,
    }
    for graph in groups[0].by_tau[:_LISTED]
  )


def _programs(groups: Sequence[RunGroup]) -> dict[str, Any]:
  """Means by program and config, over kernels and seeds."""
  columns = {}
  for group in groups[:_BESIDE]:
    for name, value in BY_GRAPH.items():
      columns[name + _of(group, groups)] = metrics.mean_by_program(group.by_graph(value))
  return _table(
    {"program": program} | {name: means.get(program, math.nan) for name, means in columns.items()}
    for program in sorted(set().union(*columns.values()))
  )


def _of(group: RunGroup, groups: Sequence[RunGroup]) -> str:
  """The end of the name of a column of a group; empty where there is one group."""
  return f", {group.name}" * (len(groups) > 1)


def _about(run: RunRecord) -> dict[str, str]:
  """How a run was made: command, device, versions and date, as far as they are known."""
  about, devices = run.about, run.about.get("devices", {})
  versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
  rows = {
    "command": about.get("command", ""),
    "config": run.config["model.name"],
    "device": f"{devices.get('count')} x {devices.get('kind')}" if devices else "",
    "machine": about.get("machine", ""),
    "versions": versions,
    "date": about.get("date", ""),
    "folder": run.folder,
    "curves while it runs": f"tensorboard --logdir {shlex.quote(run.folder)}",
  }
  return {name: value for name, value in rows.items() if value}


def _links(run: RunRecord, folder: str) -> dict[str, str]:
  """Places of a run's files, relative to the folder of the page, by name."""
  if not folder or files.is_remote(folder) or files.is_remote(run.folder):
    return {}
  place, start = files.expanded(run.folder), files.expanded(folder)
  there = [name for name in _FILES if (place / name).exists()]
  return {name: Path(os.path.relpath(place / name, start)).as_posix() for name in there}


def _table(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """A table of rows with cells by column, without the columns that are empty in every row."""
  rows = list(rows)
  is_told = lambda name: any(templates.shown(row.get(name, "")) not in ("–", "") for row in rows)
  head = list(filter(is_told, dict.fromkeys(itertools.chain(*rows))))
  return {"head": head, "rows": [[row.get(name, "") for name in head] for row in rows]}
