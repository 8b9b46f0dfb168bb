r"""Models that learn the times of programs and of their kernels, with and without those of kernels.

    python -m benchmarks.own_times --workdir out/own_times --out benchmarks/own_times.json

Trains each variant of `configs/layout.py` with every seed on the labels by time of a target, in
working folders that are kept, and judges it on the validation families, which choose its best
checkpoint, and on the test families, which choose nothing. The labels are estimates of the
compiler's schedules and no measurements. Beside the columns of `own_quality`:

  program   median over programs of the error of a predicted time, |predicted / label - 1|, the
            median over the configurations of a program
  kernel    the same over the kernels of programs, those of no node left out, from the nodes of each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kept_runs, own_quality, pages, timing
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers.ranker import load, Ranker

# The name of each variant, its variant of the config file and further flags.
WITHOUT = "--config.loss.kernels=0"
VARIANTS = {
  "times": ("`TimeTables`", "times", ()),
  "times_alone": ("`TimeTables`, without times of kernels", "times", (WITHOUT,)),
  "sage": ("`TimeSAGE`", "times_sage", ()),
  "sage_alone": ("`TimeSAGE`, without times of kernels", "times_sage", (WITHOUT,)),
  "traffic": ("`TrafficTables`", "traffic", ()),
}
OLD = "layout-v3-estimate"
ERRORS = ("program", "kernel")
COLUMNS = (*own_quality.COLUMNS, *ERRORS)


def graphs(data_root: Path, target: str, split: str) -> list[OpGraph]:
  """The programs of a split whose configurations have an order, of all collections of a target."""
  folder = data_root / "layout" / "own"
  found = map(npz.read_layout, sorted(folder.glob(f"*_{target}/{split}/*.npz")))
  return [graph for graph in found if graph.configs.has_order and not _is_kept_out(graph)]


def _is_kept_out(graph: OpGraph) -> bool:
  return graph.name.startswith(own_quality.KEPT_OUT)


def train(variant: str, seed: int, data_root: str, target: str, workdir: Path) -> Ranker:
  """Trains a run unless it is finished."""
  _, name, flags = VARIANTS[variant]
  folder = workdir.resolve() / variant / str(seed)
  kept_runs.train(
    "layout",
    (f"own-outputs_{target}", name),
    data_root,
    folder,
    "--do=train",
    f"--config.seed={seed}",
    f"--compilation_cache={workdir.resolve() / 'compilation_cache'}",
    *flags,
  )
  return Ranker.load(folder)


def errors(ranker: Ranker, members: Sequence[OpGraph]) -> dict[str, float]:
  """`program` and `kernel` of a model that predicts times; empty for any other."""
  if not ranker.family.network.predicts_kernels:
    return {}
  scores, kernels = ranker.scores(members), ranker.kernel_times(members)
  of_programs = [
    np.median(np.abs(1e6 * predicted / graph.configs.labels - 1))
    for graph, predicted in zip(members, scores)
  ]
  of_kernels = [
    error for graph, times in zip(members, kernels) for error in kernel_errors(graph, 1e6 * times)
  ]
  return {"program": float(np.median(of_programs)), "kernel": float(np.median(of_kernels))}


def kernel_errors(graph: OpGraph, predicted: np.ndarray) -> list[float]:
  """The error of each kernel that has nodes, the median over the configurations that have it.

  Args:
    graph: with the times of kernels.
    predicted: `[C, D]` times in the unit of the labels.
  """
  kernels = graph.configs.kernels
  return [
    float(np.median(np.abs(predicted[there, d] / kernels.runtime[there, d] - 1)))
    for d in np.unique(kernels.node[:, 0])
    if (there := kernels.runtime[:, d] > 0).any()
  ]


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
  """The figures of a split as a Markdown table, with standard deviations over seeds."""
  return pages.table(
    ["", *COLUMNS],
    [
      [name, *(pages.figure(row, column, empty="-") for column in COLUMNS)]
      for name, row in rows.items()
    ],
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", type=Path, default=Path("data/own/npz"))
  parser.add_argument("--target", default="v6e", help="of the labels")
  parser.add_argument("--workdir", required=True, type=Path, help="folder for the runs")
  parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  args = parser.parse_args()
  members = {split: graphs(args.data_root, args.target, split) for split in own_quality.SPLITS}
  results: dict[str, Any] = {
    "target": args.target,
    "seeds": args.seeds,
    "programs": {split: [graph.name for graph in of_split] for split, of_split in members.items()},
  }
  for split, of_split in members.items():
    old = own_quality.means(own_quality.rows_of(load(OLD), of_split))
    results[split] = own_quality.blind_rows(of_split) | own_quality.heuristic_rows(of_split)
    results[split][f"`{OLD}`"] = old
  for variant in args.variants:
    rankers = [
      train(variant, seed, str(args.data_root), args.target, args.workdir) for seed in args.seeds
    ]
    for split, of_split in members.items():
      results[split][VARIANTS[variant][0]] = pages.summary(
        [
          own_quality.means(own_quality.rows_of(ranker, of_split)) | errors(ranker, of_split)
          for ranker in rankers
        ]
      )
  for split in members:
    print(f"{split}: {len(members[split])} programs\n\n{table(results[split])}\n", flush=True)
  timing.write({"machine": timing.machine(), **results}, args.out)


if __name__ == "__main__":
  main()
