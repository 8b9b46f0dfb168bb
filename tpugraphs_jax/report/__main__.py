"""The report page of one run, or of several compared.

python -m tpugraphs_jax.report out/tile
python -m tpugraphs_jax.report out/listmle out/mse --out=out/both.html
python -m tpugraphs_jax.report out/rates       (a sweep: all of its runs)
"""

from __future__ import annotations

from collections.abc import Sequence
import re
import sys

from tpugraphs_jax import report
from tpugraphs_jax.infra import console, files
from tpugraphs_jax.report.runs import comparisons, read_all, Run
from tpugraphs_jax.train import evaluation


def write_csv(runs: Sequence[Run], path: str) -> None:
  """Writes one row per run and validation graph."""
  rows = (
    {
      "run": run.name,
      "seed": run.seed,
      "graph": graph.name,
      "nodes": graph.nodes,
      "configs": len(graph.scores),
      "kendaltau": graph.kendall_tau,
      "slowdown1": graph.slowdowns[1],
    }
    for run in runs
    for graph in run.judged
  )
  evaluation.write_csv(path, rows)


def write_png(runs: Sequence[Run], folder: str, graph: str) -> None:
  """Writes every figure into a folder, each with the kind of its labels."""
  from tpugraphs_jax.report import figures, page  # they need the extra `plots`

  found = comparisons(runs)
  for number, each in enumerate(found, 1):
    # Runs of one collection with other labels or graphs do not compare: a number tells them apart.
    start = f"{each.runs[0].collection} {number} " * (len(found) > 1)
    for title, drawn in figures.all_of(each, page.graph_of(each, graph)).items():
      drawn.suptitle(f"labels: {each.runs[0].labels}", fontsize=8)
      name = re.sub(r"\W+", "_", (start + title).lower()).strip("_")
      with files.replacing(files.join(folder, f"{name}.png"), "wb") as file:
        drawn.savefig(file, format="png", dpi=150)


def verdict(runs: Sequence[Run]) -> str:
  """Every collection with its labels, the sentences about its runs, and the page of each run."""
  lines = []
  for each in comparisons(runs):
    lines.append(f"{each.runs[0].collection} ({each.runs[0].labels})")
    lines += [f"  {sentence}" for sentence in each.verdict]
    for run in each.runs:
      trained = console.duration(run.summary.get("training", {}).get("seconds", 0))
      model, page = run.config["model.name"], files.join(run.folder, report.FILE)
      lines.append(f"  {run.name}: {model}, trained in {trained}, {page}")
  return "\n".join(lines)


def _beside(folders: Sequence[str]) -> str:
  """The place of the page: in the folder of a run, of several in the one that holds the first."""
  if len(folders) == 1:
    return files.join(folders[0], report.FILE)
  first = folders[0].rstrip("/")
  return files.join(first.rpartition("/")[0] or ("." if "/" not in first else ""), report.FILE)


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = console.parser("report", __doc__)
  parser.add_argument(
    "runs", nargs="+", metavar="RUN", help="working folder of a run, or of a sweep"
  )
  parser.add_argument(
    "--out",
    help="the page (default: report.html in the folder of the run, of "
    "several in the folder that holds the first)",
  )
  parser.add_argument("--graph", default="", help="graph whose ranks are shown")
  parser.add_argument("--csv", help="also a row per run and graph into this file")
  parser.add_argument("--png", help="also the figures into this folder")
  parser.add_argument(
    "--verdict", action="store_true", help="print the sentences of the page instead of a page"
  )
  args = parser.parse_args(argv)
  if args.verdict:
    print(console.printable(verdict(read_all(args.runs))))
    return 0
  out = args.out or _beside(args.runs)
  report.write(args.runs, out, graph=args.graph)
  runs = read_all(args.runs) if args.csv or args.png else []
  if args.csv:
    write_csv(runs, args.csv)
  if args.png:
    write_png(runs, args.png, args.graph)
  print(console.printable(f"wrote {out}"))
  return 0


if __name__ == "__main__":
  sys.exit(main())
