"""The report page of one or several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import re
import sys

from tpugraphs_jax import report
from tpugraphs_jax.infra import console, files, remote
from tpugraphs_jax.report import runs as runs_lib
from tpugraphs_jax.report.runs import Run
from tpugraphs_jax.serve import judge


def write_csv(runs: Sequence[Run], path: str) -> None:
  """Writes one row per run and validation graph."""
  judge.write_csv(path, (
      {"run": run.name, "seed": run.seed, "graph": graph.name, "nodes": graph.nodes,
       "configs": len(graph.scores), "kendaltau": graph.kendall_tau,
       "slowdown1": graph.slowdowns[1]}
      for run in runs for graph in run.judged))


def write_png(runs: Sequence[Run], folder: str, graph: str) -> None:
  """Writes every figure into a folder."""
  from tpugraphs_jax.report import figures, page  # they need the extra `plots`

  groups = runs_lib.groups_of(runs)
  for title, drawn in figures.all_of(groups, page.choose(runs[0], graph)).items():
    name = re.sub(r"\W+", "_", title.lower()).strip("_")
    with files.replacing(remote.join(folder, f"{name}.png"), "wb") as file:
      drawn.savefig(file, format="png", dpi=150)


def verdict(folders: Sequence[str], runs: Sequence[Run]) -> str:
  """Three lines: the models and their training time, the slowdown of first choices, the pages."""
  trained = [f"{run.config.get('model.name')} on {run.collection} (labels: "
             f"{re.split(': |, no', run.labels)[0]}) in "
             f"{console.duration(run.summary.get('training', {}).get('seconds', 0))}"
             for run in runs]
  quality = [f"{run.collection}: {run.verdict}" for run in runs]
  pages = [remote.join(folder, report.FILE) for folder in folders]
  return "\n".join(f"{name:<9}{'; '.join(parts)}" for name, parts in (
      ("trained", trained), ("quality", quality), ("look at", pages)))


def main(argv: list[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(
      prog="python -m tpugraphs_jax.report", description=__doc__.splitlines()[0])
  parser.add_argument("runs", nargs="+", metavar="RUN", help="working folder of a run")
  parser.add_argument("--out", default=report.FILE, help="the page, an HTML file")
  parser.add_argument("--graph", default="", help="graph whose ranks are shown")
  parser.add_argument("--csv", help="also a row per run and graph into this file")
  parser.add_argument("--png", help="also the figures into this folder")
  parser.add_argument("--verdict", action="store_true",
                      help="instead: three lines, what was trained and how good it is")
  args = parser.parse_args(argv)
  try:
    runs = runs_lib.read_all(args.runs)
    if args.verdict:
      print(console.printable(verdict(args.runs, runs)))
      return 0
    report.require_plots()
    if args.csv:
      write_csv(runs, args.csv)
    if args.png:
      write_png(runs, args.png, args.graph)
    report.write(args.runs, args.out, graph=args.graph)
  except (ValueError, OSError, ImportError) as error:
    print(f"error: {console.one_line(error)}", file=sys.stderr)
    return 2
  print(f"wrote {args.out}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
