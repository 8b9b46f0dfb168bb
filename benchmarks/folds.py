r"""Five folds of synthetic data: mean and spread over test folds, and rankers graph by graph.

    python -m tpugraphs_jax.synthetic --out DIR --scale medium
    python benchmarks/folds.py --data_root DIR/npz --workdir out/folds --out benchmarks/folds.json

Trains `recommended` and the official settings with every fold as the test split, by `run_tile.py`
and `run_layout.py`, in working folders that are kept: a second call continues where the first one
stopped. `--out` has the finished rankers after each of them.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import kept_runs
import numpy as np
import pages
from scipy import stats
import timing


class Case(NamedTuple):
  """A collection, its rankers and the metric by which they are compared graph by graph."""

  kind: str  # of the command
  collection: str  # variant that names the collection, or empty
  official: str  # variant of the official settings
  columns: tuple[str, ...]  # of test.csv, the first one compared


FOLDS = 5
CASES = {
  "layout:xla:random": Case(
    "layout", "xla-random", "official", ("kendaltau", "slowdown1", "slowdown10")
  ),
  "tile:xla": Case("tile", "", "", ("slowdown1", "slowdown5", "kendaltau")),
}
RANKERS = ("recommended", "official")


def test_fold(workdir: Path, columns: tuple[str, ...]) -> dict[str, dict[str, float]]:
  """Columns of `test.csv` by graph."""
  with (workdir / "test.csv").open() as file:
    return {
      row["graph"]: {name: float(row[name]) for name in columns} for row in csv.DictReader(file)
    }


def train(name: str, ranker: str, fold: int, data_root: str, workdir: Path) -> dict[str, Any]:
  """Figures of a run with this test fold: means over its graphs, steps, and each graph."""
  case = CASES[name]
  cpu_s = kept_runs.train(
    case.kind,
    (case.collection, case.official if ranker == "official" else ranker),
    data_root,
    workdir,
    f"--config.data.folds={FOLDS}",
    f"--config.data.fold={fold}",
  )
  graphs = test_fold(workdir, case.columns)
  means = {
    column: float(np.nanmean([row[column] for row in graphs.values()])) for column in case.columns
  }
  step = json.loads((workdir / "summary.json").read_text())["training"]["step"]
  return {"fold": fold, **means, "steps": step, "cpu_s": cpu_s, "graphs": graphs}


def summarised(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
  """Means over folds, standard deviations over folds, and the number of graphs."""
  numbers = (*CASES[name].columns, "steps", "cpu_s")
  row = pages.summary([{key: run[key] for key in numbers} for run in runs])
  row["folds"] = row.pop("seeds")
  return row | {"graphs": sum(len(run["graphs"]) for run in runs)}


def paired(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
  """`recommended` less official in the first column, over graphs that both were tested on."""
  column = CASES[name].columns[0]
  first, second = (
    {graph: row[column] for run in runs[ranker] for graph, row in run["graphs"].items()}
    for ranker in RANKERS
  )
  change = np.array(
    [first[graph] - second[graph] for graph in sorted(first.keys() & second.keys())]
  )
  change = change[~np.isnan(change)]
  return {
    "column": column,
    "graphs": len(change),
    "mean": float(change.mean()),
    "larger": int((change > 0).sum()),
    "smaller": int((change < 0).sum()),
    "p_value": float(stats.wilcoxon(change).pvalue),
  }


def table(results: dict[str, Any]) -> str:
  """Finished rankers of every collection as a Markdown table."""
  columns = ("kendaltau", "slowdown1", "slowdown5", "slowdown10")
  lines = [
    [
      f"`{name}`",
      f"`{ranker}`",
      *(pages.figure(row, column) for column in columns),
      str(row["folds"]),
      str(row["graphs"]),
      f"{row['steps']:,.0f}",
      f"{row['cpu_s'] / 60:.1f}",
    ]
    for name, result in results.items()
    for ranker, row in result["rankers"].items()
  ]
  head = ["collection", "ranker", *columns, "folds", "graphs", "steps", "CPU minutes"]
  return pages.table(head, lines)


def paired_table(results: dict[str, Any]) -> str:
  """The two rankers graph by graph as a Markdown table, of collections with all runs."""
  lines = [
    [
      f"`{name}`",
      row["column"],
      str(row["graphs"]),
      f"{row['mean']:+.3f}",
      str(row["larger"]),
      str(row["smaller"]),
      f"{row['p_value']:.1g}",
    ]
    for name, result in results.items()
    if (row := result.get("paired"))
  ]
  head = ["collection", "metric", "graphs", "mean difference", "larger", "smaller", "p"]
  return pages.table(head, lines)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", required=True, help="folder with tile/ and layout/")
  parser.add_argument("--workdir", required=True, type=Path, help="folder for the runs")
  args = parser.parse_args()
  results: dict[str, Any] = {}
  for name in CASES:
    runs: dict[str, list[dict[str, Any]]] = {ranker: [] for ranker in RANKERS}
    for fold in range(FOLDS):
      for ranker in RANKERS:
        folder = args.workdir.resolve() / name.replace(":", "_") / ranker / str(fold)
        runs[ranker].append(train(name, ranker, fold, args.data_root, folder))
        results[name] = {
          "rankers": {key: summarised(name, some) for key, some in runs.items() if some},
          "folds": {
            key: [{k: v for k, v in run.items() if k != "graphs"} for run in some]
            for key, some in runs.items()
          },
        }
        timing.write({"machine": timing.machine(), **results}, args.out)
    results[name]["paired"] = paired(name, runs)
    timing.write({"machine": timing.machine(), **results}, args.out)
  print(table(results))


if __name__ == "__main__":
  main()
