r"""Trains every ranker on your data for some minutes each, and writes one page with the winner.

    python -m tpugraphs_jax.leaderboard --collection layout:own:outputs --data_root data/own/npz \
        --minutes 5 --page out/leaderboard.html

The rankers are the presets, the official settings, the default and the recommended one. Each trains
on one core for as many CPU minutes, once for every seed (`leaderboard.race`). The page has the
command of an ordinary run with the winner's settings and number of steps. The same call again makes
the runs that are missing, and a longer list of `--seeds` adds to it. `--folds 5` trains every
ranker once for each fold, and judges it on test folds instead of the validation split.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import copy
from pathlib import Path
import sys
from typing import Any

import jinja2
import numpy as np
from scipy import stats

from tpugraphs_jax import datasets
from tpugraphs_jax.infra import console
from tpugraphs_jax.leaderboard import race

_NAMES = {
  "kendaltau": "Kendall tau",
  "opa": "OPA, all pairs",
  "slowdown1": "slowdown of the first",
  "slowdown5": "slowdown of 5",
  "slowdown10": "slowdown of 10",
}
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Leaderboard of {{ collection }}</title><style>
:root { color-scheme: light dark; font: 16px/1.5 sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
.table { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #8886 }
td:first-child, th:first-child { text-align: left }
pre { padding: .7rem; overflow-x: auto; border: 1px solid #8886 }
</style></head><body>
<h1>Leaderboard of <code>{{ collection }}</code></h1>
<p><b><code>{{ rows[0].name }}</code> wins</b>: {{ columns[0] }} {{ rows[0].cells[0] }}
{%- if rows[1:] %}, before <code>{{ rows[1].name }}</code> with {{ rows[1].cells[0] }}{% endif %}.
{{ budget }} of training each, on one core. Labels: {{ labels }}.</p>
<p>This command trains it again, with as many steps:</p>
<pre>{{ command }}</pre>
<div class="table"><table><tr><th>ranker</th>{% for name in columns %}<th>{{ name }}</th>
{%- endfor %}<th>updates</th><th>ms a step</th><th>s to rank</th><th>peak MiB</th><th>runs</th>
</tr>
{% for row in rows %}
<tr><td><code>{{ row.name }}</code></td>{% for cell in row.cells %}<td>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}
</table></div>
{% for line in paired %}<p>{{ line }}</p>{% endfor %}
<p>Means over the graphs of {{ "a test fold, over folds" if folds else "the validation split" }} and
over seeds, ± the standard deviation over {{ "folds and " if folds }}seeds, after the last step.
Larger is better of Kendall tau and OPA, smaller of slowdowns. A ranker with fewer than 100 updates
has hardly begun to learn.</p>
{% for line in failed %}<p>Not counted: {{ line }}</p>{% endfor %}
<p>{{ machine }}</p>
</body></html>
"""


def repeat(collection: str, system: str, row: Mapping[str, Any], data_root: str) -> str:
  """The command of an ordinary run with the settings and the number of steps of a finished one."""
  config = race.config_of(collection, system, row["seed"], data_root)
  epochs, slates = race.epochs_of(row["planned_steps"], config.batch.graphs)
  flags = [
    f"--config=configs/{race.config_name(collection, system)}",
    *(f"--config.{change}" for change in system.split("+")[1:]),
    f"--config.train.epochs={epochs}",
    f"--config.batch.slates_per_epoch={slates}",
    f"--config.seed={row['seed']}",
    f"--data_root={data_root}",
    "--workdir=out/winner",
  ]
  return f"python run_{race.kind_of(collection)}.py " + " \\\n    ".join(flags)


def on_folds(system: str, folds: int) -> list[str]:
  """A system with every fold as its test fold; itself without folds."""
  return [f"{system}+data.folds={folds}+data.fold={k}" for k in range(folds)] or [system]


def finished(
  args: argparse.Namespace, collection: str
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
  """Figures of finished runs by system, all folds together, and a line for each other run.

  A system without a run of every fold is left out, because it has been judged on other graphs.
  """
  runs, failed = {}, []
  for system in args.systems or race.racing(collection):
    asked = copy.copy(args)
    asked.systems = on_folds(system, args.folds)
    rows, lines = race.finished(asked, collection)
    failed += lines
    if len(rows) == len(asked.systems):
      runs[system] = [row for some in rows.values() for row in some]
  return runs, failed


def paired(first: str, runs: Mapping[str, Sequence[Mapping[str, Any]]], headline: str) -> list[str]:
  """How far the first system is from each other one, graph by graph, in sentences."""

  def by_graph(system: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for run in runs[system]:
      for graph, row in run.get("by_graph", {}).items():
        values.setdefault(graph, []).append(row[headline])
    return {graph: float(np.mean(some)) for graph, some in values.items()}

  of_first, lines = by_graph(first), []
  for against in runs:
    of_system = by_graph(against)
    change = np.array(
      [of_first[graph] - of_system[graph] for graph in sorted(of_first.keys() & of_system.keys())]
    )
    change = change[~np.isnan(change)]
    if against != first and change.any():
      lines.append(
        f"{_NAMES[headline]} of {first} less that of {against}, graph by graph: "
        f"{change.mean():.3f} on average over {len(change)} graphs, "
        f"p = {stats.wilcoxon(change).pvalue:.2g} (Wilcoxon signed rank)."
      )
  return lines


def page(args: argparse.Namespace, collection: str) -> str:
  """The page of all finished runs.

  Raises:
    ValueError: no run is finished.
  """
  runs, failed = finished(args, collection)
  if not runs:
    raise ValueError(f"no run of {collection} is finished: {'; '.join(failed)}")
  columns = race.columns_of(collection)
  ranked = race.ranked(
    {name: race.summarised(rows, collection) for name, rows in runs.items()},
    race.kind_of(collection),
  )
  first = runs[ranked[0][0]][0]
  machine, winner = first["machine"], ranked[0][0]
  return (
    jinja2.Environment(autoescape=True)
    .from_string(_PAGE)
    .render(
      collection=collection,
      columns=[_NAMES[column] for column in columns],
      failed=failed,
      rows=[{"name": name, "cells": _cells(row, columns)} for name, row in ranked],
      budget=f"{args.steps} steps" if args.steps else f"{args.minutes:g} CPU minutes",
      labels=datasets.label_kind(str(args.data_root), datasets.Collection(collection)),
      command=repeat(collection, first["system"], first, str(args.data_root)),
      folds=args.folds,
      paired=paired(winner, runs, race.HEADLINES[race.kind_of(collection)]),
      machine=f"{machine['date']}, {machine['processor']}, {machine['device']}, "
      f"jax {machine['jax']}",
    )
  )


def _cells(row: Mapping[str, Any], columns: tuple[str, ...]) -> list[str]:
  return [
    *(race.figure(row, column) for column in columns),
    f"{row['updates']:,.0f}",
    f"{row['step_ms']:.1f}",
    f"{row['rank_cpu_s']:.1f}",
    f"{row['peak_mib']:,.0f}",
    str(row["seeds"]),
  ]


@console.command(keeps="finished runs are kept: run the same command again")
def main(argv: Sequence[str] | None = None) -> int:
  """Makes the missing runs and writes the page; returns the exit status."""
  parser = console.parser("leaderboard", __doc__)
  parser.add_argument("--collection", required=True, help="such as layout:own:outputs")
  parser.add_argument("--data_root", required=True, help="folder with tile/ and layout/")
  parser.add_argument("--minutes", type=float, default=5.0, help="CPU minutes of training each")
  parser.add_argument("--steps", type=int, default=0, help="training steps, instead of --minutes")
  parser.add_argument("--systems", nargs="+", help="names of presets, or variants; default: all")
  parser.add_argument("--seeds", nargs="+", type=int, default=[0])
  parser.add_argument("--folds", type=int, default=0, help="test folds; 0 = the validation split")
  parser.add_argument(
    "--workdir", type=Path, default=Path("out/leaderboard"), help="folder of finished runs"
  )
  parser.add_argument("--page", type=Path, default=Path("out/leaderboard.html"))
  parser.add_argument("--core", type=int, default=race.CORE, help="core to run on")
  args = parser.parse_args(argv)
  name = datasets.Collection(args.collection).name
  (args.workdir / "runs").mkdir(parents=True, exist_ok=True)
  systems = args.systems or race.racing(name)
  runs = [run for system in systems for run in on_folds(system, args.folds)]
  with console.working("training", total=len(runs) * len(args.seeds), unit="runs") as work:
    for run in runs:
      for seed in args.seeds:
        race.run_missing(args, name, run, seed)
        work.update()
  args.page.write_text(page(args, name))
  print(f"wrote {args.page}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
