"""The report page: the tables and figures of runs in the template `page.html`, in one file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import datetime
from importlib import resources
import math
import os
from pathlib import Path
import shlex
from typing import Any

import jinja2

from tpugraphs_jax import metrics
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.infra import files
from tpugraphs_jax.report import errors, figures
from tpugraphs_jax.report.runs import (
  Comparison,
  comparisons,
  DEFAULT,
  differences,
  Group,
  leads,
  Run,
  TAU,
  ValidationGraph,
)
from tpugraphs_jax.train import evaluation

_LISTED = 400  # graphs in a table
_BESIDE = 2  # groups with separate columns in a table of graphs
_FILES = (
  "results.csv",
  "validation.csv",
  "validation_programs.csv",
  "test.csv",
  "folds.json",
  "metrics.jsonl",
  "summary.json",
  "config.json",
  "log.txt",
  "tensorboard",
)


def render(runs: Sequence[Run], *, graph: str = "", folder: str = "") -> str:
  """The page of these runs.

  Args:
    runs: at least one.
    graph: whose ranks are shown; the median one by Kendall tau if not given.
    folder: of the page, from which links to files of the runs start; without it there are none.

  Raises:
    ValueError: no run judged that graph.
  """
  environment = jinja2.Environment(
    autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
  )
  environment.filters |= {"shown": _shown, "kind": figures.short_kind}
  environment.tests["numeric"] = lambda column: all(
    isinstance(cell, (int, float, tuple)) or cell == "" for cell in column
  )
  template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
  check_judged(runs, graph)
  compared = comparisons(runs)
  return environment.from_string(template).render(
    runs=runs,
    sections=[_section(each, graph) for each in compared],
    names=list(dict.fromkeys(name for each in compared for name in each.references)),
    about={run.name: _about(run) for run in runs},
    links={run.name: _links(run, folder) for run in runs},
    now=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
  )


def check_judged(runs: Sequence[Run], name: str) -> None:
  """Refuses (ValueError) the name of a graph that no run judged."""
  known = list(dict.fromkeys(graph.name for run in runs for graph in run.judged))
  if name and name not in known:
    some = f"expected one of {', '.join(known[:5])}" + ", ..." * (len(known) > 5)
    raise ValueError(
      f"no run judged a graph {name!r}: {some if known else 'evaluate the runs first'}"
    )


def graph_of(comparison: Comparison, name: str) -> ValidationGraph | None:
  """The first group's graph of that name, else the one in the middle by Kendall tau."""
  first = comparison.groups[0]
  named = [graph for graph in first.by_tau if graph.name == name]
  return next(iter(named + first.by_tau[len(first.taus) // 2 :]), None)


def _section(comparison: Comparison, graph: str) -> dict[str, Any]:
  """The part of the page about runs that compare."""
  first, groups = comparison.groups[0].runs[0], comparison.groups
  return {
    "comparison": comparison,
    "name": first.collection,
    "labels": first.labels,
    "most": figures.MOST,
    "judged": first.summary.get(evaluation.reported(first.config.get("data.folds", 0)), {}),
    "best": first.summary.get("training", {}).get("best", {}) if first.fold is None else {},
    "results": _results(comparison),
    "leads": _table(
      [
        "config",
        "graphs",
        "first better on",
        "Kendall tau below the first",
        "spread over seeds",
        "p",
      ],
      [
        [
          lead.other,
          lead.graphs,
          lead.better,
          lead.gain,
          lead.spread,
          "too few graphs" if math.isnan(lead.p_value) else lead.p_value,
        ]
        for lead in leads(groups)
      ],
    ),
    "differences": _differences(groups),
    "figures": {
      title: figures.svg(drawn)
      for title, drawn in figures.all_of(comparison, graph_of(comparison, graph)).items()
    },
    "graphs": _graphs(groups),
    "view": _view(groups[0]),
    "errors": _table(["graphs", "number", "Kendall tau", "slowdown1"], errors.rows(groups[0])),
    "together": _together(groups[0]),
    "programs": _programs(groups) if first.config.get("task") == "tile" else _table([], []),
    "ended": _ended(comparison.runs),
  }


def _differences(groups: Sequence[Group]) -> dict[str, Any]:
  """Fields in which configs differ: a row for each field, or for each config if those are more."""
  rows: list[Sequence[str]] = [["field", *(group.name for group in groups)], *differences(groups)]
  if len(rows) < len(groups):
    (_, *fields), *columns = zip(*rows)
    rows = [["config", *fields], *columns]
  return _table(rows[0], rows[1:] if len(groups) > 1 else [])


def _results(comparison: Comparison) -> dict[str, Any]:
  """A row for every config, means out of fold and deviations over runs, and every reference."""
  names, groups = list(comparison.groups[0].out_of_fold.means), comparison.groups
  cell = lambda group, name: (group.out_of_fold.spread(name)[0], group.spread(name)[1])
  seeds = lambda group: ", ".join(str(seed) for seed in sorted({r.seed for r in group.runs}))
  folds = lambda group: ", ".join(map(str, group.folds))
  return _table(
    ["config", "seeds", "test folds", *names],
    [
      [group.name, seeds(group), folds(group), *(cell(group, name) for name in names)]
      for group in groups
      if names
    ]
    + [
      [of, "", "", *(means.get(name, math.nan) for name in names)]
      for of, means in comparison.references.items()
    ],
  )


def _ended(runs: Sequence[Run]) -> dict[str, Any]:
  """A row for every run, with its figures and how its training ended."""
  rows = []
  for run in runs:
    training = run.summary.get("training", {})
    rows.append(
      [
        run.name,
        run.seed,
        "" if run.fold is None else run.fold,
        run.means.get(TAU, math.nan),
        run.means.get("slowdown1_mean", math.nan),
        training.get("ended", "not yet"),
        training.get("step") or "",
        training.get("best", {}).get("step") or "",
        round(training.get("seconds", 0)),
        round(training.get("peak_memory", {"bytes": 0})["bytes"] / 2**20),
      ]
    )
  return _table(
    [
      "run",
      "seed",
      "test fold",
      TAU,
      "slowdown1_mean",
      "training ended",
      "steps",
      "best step",
      "seconds",
      "peak MiB",
    ],
    rows,
  )


def _graphs(groups: Sequence[Group]) -> dict[str, Any]:
  """A row for every graph, the lowest Kendall tau of the first config first."""
  best, order = groups[:_BESIDE], groups[0].by_tau
  of = lambda group: f", {group.name}" * (len(groups) > 1)
  taus = [group.by_graph(lambda graph: graph.kendall_tau) for group in best]
  firsts = [group.by_graph(lambda graph: graph.slowdowns[1]) for group in best]
  return _table(
    [
      "graph",
      "nodes",
      "configurations",
      *(f"Kendall tau{of(group)}" for group in best),
      *(f"slowdown1{of(group)}" for group in best),
      f"slowdown of {DEFAULT}",
    ],
    [
      [
        graph.name,
        graph.nodes,
        len(graph.scores),
        *(column.get(graph.name, math.nan) for column in taus + firsts),
        graph.default_slowdown,
      ]
      for graph in order[:_LISTED]
    ],
  )


def _programs(groups: Sequence[Group]) -> dict[str, Any]:
  """Means by program and config, over kernels and seeds."""
  columns = {}
  for group in groups[:_BESIDE]:
    of = f", {group.name}" * (len(groups) > 1)
    for name, value in (
      ("Kendall tau", lambda graph: graph.kendall_tau),
      ("slowdown1", lambda graph: graph.slowdowns[1]),
    ):
      columns[name + of] = metrics.mean_by_program(group.by_graph(value))
  return _table(
    ["program", *columns],
    [
      [program, *(column.get(program, math.nan) for column in columns.values())]
      for program in sorted(set().union(*columns.values()))
    ],
  )


def _view(group: Group) -> str:
  """The command that shows the graph with the lowest Kendall tau; empty where its file is gone.

  For layouts it shows the first choice, beside the fastest configuration if they differ.
  """
  run = group.runs[0]
  if not group.judged or files.is_remote(run.data_root):
    return ""
  graph = group.by_tau[0]
  path = run.file_of(graph.name)
  if not path.exists():
    return ""
  first, fastest = map(int, graph.config_ids[[graph.scores.argmin(), graph.label.argmin()]])
  configs = f" --config {first}" + f" --against {fastest}" * (fastest != first)
  is_layout = Collection(run.collection).kind == "layout"
  return f"python -m tpugraphs_jax.view {shlex.quote(str(path))}" + configs * is_layout


def _together(group: Group) -> str:
  """The models of all folds, and a folder for their ranking of the test split, as arguments.

  Empty without folds, where a fold is missing, and for own collections, which have no such split.
  """
  first = group.out_of_fold.runs[0]
  folders = {run.fold: run.folder for run in group.runs if run.seed == first.seed}
  is_whole = group.judged and group.folds and len(folders) == first.config["data.folds"]
  if not is_whole or not Collection(first.collection).is_released:
    return ""
  places = [f'"{place}"' if "," in place else place for place in folders.values()]
  out = os.path.commonprefix(list(folders.values())).rpartition("/")[0] or "."
  return shlex.join([f"--ensemble={','.join(places)}", f"--workdir={files.join(out, 'together')}"])


def _about(run: Run) -> dict[str, str]:
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


def _links(run: Run, folder: str) -> dict[str, str]:
  """Places of a run's files, relative to the folder of the page, by name."""
  if not folder or files.is_remote(folder) or files.is_remote(run.folder):
    return {}
  own = Path(run.folder).expanduser()
  return {
    name: Path(os.path.relpath(own / name, Path(folder).expanduser())).as_posix()
    for name in _FILES
    if (own / name).exists()
  }


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
  """A table without the columns that are empty in every row."""
  rows = list(rows)
  kept = [
    i for i in range(len(head)) if not rows or any(_shown(row[i]) not in ("–", "") for row in rows)
  ]
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
