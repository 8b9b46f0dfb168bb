r"""Tile rankers that learn the times of Pallas kernels: held-out shapes, and families held out.

    python -m benchmarks.own_tiles --workdir out/own_tiles --out benchmarks/own_tiles.json

Trains rankers of `configs/tile.py` on `tile:own:pallas_TARGET` with every seed, in working folders
that are kept. The validation kernels choose the checkpoint; the test kernels choose nothing. They
are other shapes of the families of train, and families of which train has no kernel. The labels are
estimates of the compiler's schedules and no measurements. The columns are means over kernels:

  close   whether the first five tiles hold one within 2 % of the best
  top1    time of the first tile / time of the best tile - 1
  top5    the same of the best of the first five tiles
  tau     tau-b between scores and times

Beside the rankers stand a random order (its expectation) and the orders by two numbers that need no
model: the bytes that a tile moves between the large memory and the chip, and the steps of its grid.
Tied tiles have a random order: their columns are means over 100 orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kept_runs, pages, timing
from tpugraphs_jax import datasets, metrics
from tpugraphs_jax.columns import MAX_RANK, TILE
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.tuning import label_file

GROUPS = ("valid", "other shapes", "other families")
RANKERS = ("recommended", "EarlyJoinSAGE")
COLUMNS = ("close", "top1", "top5", "tau")
_FIRST, _CLOSE = 5, 0.02
_ORDERS = 100  # of tied tiles


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A kernel of the collection.

  Attributes:
    family: the part of its name before its sizes.
    graph: with its tiles and their times.
    nbytes: `[C]` that each tile moves.
  """

  family: str
  graph: OpGraph
  nbytes: np.ndarray


def read(data_root: Path, target: str, split: str) -> list[Kernel]:
  """The kernels of a split."""
  found = []
  for path in npz.split_files(data_root, _collection(target), split):
    lines = label_file.records(path.with_suffix(label_file.SUFFIX))
    nbytes = [line["raw"]["bytes_accessed"] for line in lines if "raw" in line]
    family = path.stem.rstrip("0123456789_")
    found.append(Kernel(family, npz.read_tile(path), np.array(nbytes)))
  return found


def _collection(target: str) -> str:
  return datasets.find("tile", datasets.OWN, f"pallas_{target}").name


def groups(data_root: Path, target: str) -> dict[str, list[Kernel]]:
  """The validation kernels, and the test kernels of families with and without training kernels."""
  known = {kernel.family for kernel in read(data_root, target, "train")}
  test = read(data_root, target, "test")
  members = (
    read(data_root, target, "valid"),
    [kernel for kernel in test if kernel.family in known],
    [kernel for kernel in test if kernel.family not in known],
  )
  return dict(zip(GROUPS, members, strict=True))


def figures(scores: np.ndarray, runtime: np.ndarray) -> dict[str, float]:
  """The columns of a kernel, from the scores and times `[C]` of its tiles."""
  slowdown = metrics.top_k_slowdown(scores, runtime, (1, _FIRST))
  return {
    "close": float(slowdown[_FIRST] <= _CLOSE),
    "top1": slowdown[1],
    "top5": slowdown[_FIRST],
    "tau": metrics.kendall_tau(scores, runtime),
  }


def tied_figures(scores: np.ndarray, runtime: np.ndarray) -> dict[str, float]:
  """The columns of a kernel, the mean over random orders of its tiles."""
  random = np.random.default_rng(0)
  orders = (random.permutation(len(scores)) for _ in range(_ORDERS))
  return means([figures(scores[order], runtime[order]) for order in orders])


def random_figures(runtime: np.ndarray) -> dict[str, float]:
  """The expected columns of a random order."""
  slowdown = metrics.random_slowdown(runtime, (1, _FIRST))
  others = int((runtime > (1 + _CLOSE) * runtime.min()).sum())
  missed = math.comb(others, _FIRST) / math.comb(len(runtime), _FIRST)
  return {"close": 1 - missed, "top1": slowdown[1], "top5": slowdown[_FIRST], "tau": 0.0}


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Means of the columns over kernels."""
  return {column: float(np.mean([row[column] for row in rows])) for column in COLUMNS}


def blind_rows(kernels: Sequence[Kernel]) -> dict[str, dict[str, float]]:
  """The rows that no ranker makes."""
  steps = TILE["kernel_bounds"].start + MAX_RANK + 1  # the product of the grid
  orders = {
    "fewest bytes": lambda kernel: kernel.nbytes,
    "fewest steps of the grid": lambda kernel: kernel.graph.configs.config_feat[:, steps],
  }
  times = [kernel.graph.configs.runtime_ns for kernel in kernels]
  return {"random": means([random_figures(each) for each in times])} | {
    name: means([tied_figures(order(kernel), each) for kernel, each in zip(kernels, times)])
    for name, order in orders.items()
  }


def ranker_row(ranker: Ranker, kernels: Sequence[Kernel]) -> dict[str, float]:
  """The row of one seed of a ranker."""
  scores = ranker.scores([kernel.graph for kernel in kernels])
  return means(
    [figures(each, kernel.graph.configs.runtime_ns) for kernel, each in zip(kernels, scores)]
  )


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
  """The figures of a group as a Markdown table, with standard deviations over seeds."""
  cells = [[name, *(pages.figure(row, column) for column in COLUMNS)] for name, row in rows.items()]
  return pages.table(["", *COLUMNS], cells)


def train(name: str, seed: int, data_root: str, target: str, workdir: Path) -> Ranker:
  """Trains a ranker unless it is finished."""
  folder = workdir.resolve() / name / str(seed)
  variants = f"{datasets.OWN}-pallas_{target}", name
  kept_runs.train("tile", variants, data_root, folder, "--do=train", f"--config.seed={seed}")
  return Ranker.load(folder)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", type=Path, default=Path("data/own/npz"))
  parser.add_argument("--target", default="v6e", help="of the labels")
  parser.add_argument("--workdir", required=True, type=Path, help="folder for the runs")
  parser.add_argument("--rankers", nargs="*", default=list(RANKERS), help="of configs/tile.py")
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  args = parser.parse_args()
  kernels = groups(args.data_root, args.target)
  results: dict[str, Any] = {name: blind_rows(members) for name, members in kernels.items()}
  for name in args.rankers:
    rankers = [
      train(name, seed, str(args.data_root), args.target, args.workdir) for seed in args.seeds
    ]
    for group, members in kernels.items():
      results[group][f"`{name}`"] = pages.summary([ranker_row(each, members) for each in rankers])
  for group, rows in results.items():
    print(f"{group}: {len(kernels[group])} kernels\n\n{table(rows)}\n", flush=True)
  about = {"target": args.target, "seeds": args.seeds, "machine": timing.machine()}
  counts = {group: len(members) for group, members in kernels.items()}
  timing.write({**about, "kernels": counts, **results}, args.out)


if __name__ == "__main__":
  main()
