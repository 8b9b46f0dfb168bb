"""The report page of one run, or of several compared.

python -m tpugraphs_jax.report out/tile
python -m tpugraphs_jax.report out/listmle out/mse --out=out/both.html
python -m tpugraphs_jax.report out/rates       (a sweep: all of its runs)
"""

from __future__ import annotations

from collections.abc import Sequence
import os
import sys

from tpugraphs_jax import report
from tpugraphs_jax.infra import console, files
from tpugraphs_jax.report.runs import comparisons, read_all, RunRecord

_WITHDRAWN = {
  "--csv": "validation.csv of a run has a row per graph",
  "--graph": "the page has a table of all graphs",
  "--png": "save the figures of the page",
}


def verdict(runs: Sequence[RunRecord]) -> str:
  """Every collection with its labels, the sentences about its runs, and the page of each run."""
  lines = []
  for comparison in comparisons(runs):
    first = comparison.runs[0]
    lines.append(f"{first.collection} ({first.labels})")
    lines += [f"  {sentence}" for sentence in comparison.verdict]
    for run in comparison.runs:
      trained = console.duration(run.summary.get("training", {}).get("seconds", 0))
      model, page = run.config["model.name"], files.join(run.folder, report.FILE)
      lines.append(f"  {run.name}: {model}, trained in {trained}, {page}")
  return "\n".join(lines)


def _beside(folders: Sequence[str]) -> str:
  """The place of the page: in the folder of a run, of several in the one that holds the first."""
  first = folders[0].rstrip("/")
  return files.join(first if len(folders) == 1 else os.path.dirname(first) or ".", report.FILE)


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = console.parser("report", __doc__, withdrawn=_WITHDRAWN)
  parser.add_argument(
    "runs", nargs="+", metavar="RUN", help="working folder of a run, or of a sweep"
  )
  parser.add_argument(
    "--out",
    help="the page (default: report.html in the folder of the run, of "
    "several in the folder that holds the first)",
  )
  parser.add_argument(
    "--verdict", action="store_true", help="print the sentences of the page instead of a page"
  )
  args = parser.parse_args(argv)
  if args.verdict:
    print(console.printable(verdict(read_all(args.runs))))
    return 0
  out = args.out or _beside(args.runs)
  report.write(args.runs, out)
  print(console.printable(f"wrote {out}"))
  return 0


if __name__ == "__main__":
  sys.exit(main())
