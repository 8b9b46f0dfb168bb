"""The report page of one or several runs."""

from __future__ import annotations

import argparse
import csv
import re
import sys

from tpugraphs_jax import files, remote, report
from tpugraphs_jax.report import runs


def write_csv(found: list[runs.Run], path: str) -> None:
  """Writes one row per run and validation graph."""
  with files.replacing(path, newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["run", "seed", "graph", "nodes", "configs", "kendaltau", "slowdown1"])
    for run in found:
      for graph in run.judged:
        writer.writerow([run.name, run.seed, graph.name, graph.nodes, len(graph.scores),
                         f"{graph.kendall_tau:.6g}", f"{graph.slowdowns[1]:.6g}"])


def write_png(found: list[runs.Run], folder: str, graph: str) -> None:
  """Writes every figure into a folder."""
  from tpugraphs_jax.report import figures, page  # matplotlib is an extra

  for title, drawn in figures.all_of(found, page.choose(found[0], graph)).items():
    name = re.sub(r"\W+", "_", title.lower()).strip("_")
    with files.replacing(remote.join(folder, f"{name}.png"), "wb") as file:
      drawn.savefig(file, format="png", dpi=150)


def main(argv: list[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(
      prog="python -m tpugraphs_jax.report", description=__doc__.splitlines()[0])
  parser.add_argument("runs", nargs="+", metavar="RUN", help="working folder of a run")
  parser.add_argument("--out", default=report.FILE, help="the page, an HTML file")
  parser.add_argument("--graph", default="", help="graph whose ranks are shown")
  parser.add_argument("--csv", help="also a row per run and graph into this file")
  parser.add_argument("--png", help="also the figures into this folder")
  args = parser.parse_args(argv)
  try:
    found = runs.read_all(args.runs)
    if args.csv:
      write_csv(found, args.csv)
    if args.png:
      write_png(found, args.png, args.graph)
    report.write(args.runs, args.out, graph=args.graph)
  except (ValueError, OSError, ImportError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(f"wrote {args.out}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
