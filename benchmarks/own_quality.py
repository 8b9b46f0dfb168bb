r"""Ranking quality on programs of families that the models were not trained on.

    python -m benchmarks.own_quality --workdir out/own_quality --out benchmarks/own_quality.json
    python -m benchmarks.own_quality --collection own-programs_cpu --workdir out/own_quality_cpu \
        --out benchmarks/own_quality_cpu.json

Trains every variant with every seed on a collection, by default the one in `data/own`, in
working folders that are kept. Each model is judged on the validation families, which choose
its best checkpoint, and on the test families, which choose nothing. The baselines are a random
order, the compiler's own choice (configuration 0) and a heuristic that needs no model. With
`--collection own`, models are also judged on the three programs of the collection
`own:kept_out`. `--variants` trains some variants and leaves the rows of the others in `--out`
as they are.

A figure is the mean over programs. `kendaltau` is tau-b. `ordered` is the share of right pairs
minus the share of wrong pairs among the pairs whose labels differ; a tie in scores is wrong.
Programs whose labels are all equal are left out of both. `tuned5` and `found8` are of the first
labels in the model's order (`strategies.spread`), the compiler's own choice being the first.
`tuned5` is the slowdown of the best of 5. `found8` is over the programs with a choice more than 2 %
better than the compiler's own: the share with a better one among the first 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kept_runs, pages, timing
from tpugraphs_jax import columns, metrics
from tpugraphs_jax.data import features
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.rankers.tables import traffic
from tpugraphs_jax.run import configs
from tpugraphs_jax.train.loading import data_of
from tpugraphs_jax.tuning.strategies import spread

ROOT = Path(__file__).parents[1]
VARIANTS = {
  "recommended": "`TrafficTables`",
  "full": "`SAGE`",
  "tables": "`ScoreTables`",
  "preset=tenth": "`tenth`, the best preset",
  "official": "`ResModel`, official",
}
HEURISTIC = "groups changed plus padded elements"
HEURISTIC_OWN = "the same from the compiler's own orders"
COLUMNS = ("kendaltau", "ordered", "slowdown1", "slowdown5", "tuned5", "found8")
SPLITS = ("valid", "test")
KEPT_OUT = "kept_out"  # a collection of test programs for models of the collection `own`
_KS = (1, 5)
_FEW, _BETTER, _LABELS = 5, 0.02, 8
# Training is short: models overfit early on so few programs.
_SHORT = (
  "--config.train.epochs=6",
  "--config.batch.slates_per_epoch=400",
  "--config.batch.min_configs=2",
)


def train(
  collection: str,
  variant: str,
  seed: int,
  data_root: str,
  workdir: Path,
  leave_out: Sequence[str] = (),
) -> Path:
  """Trains a run unless it is finished; returns its working folder."""
  flags = () if variant == "recommended" else _SHORT
  flags += (f"--config.data.leave_out={tuple(leave_out)!r}",) if leave_out else ()
  kept_runs.train(
    "layout",
    (collection, variant),
    data_root,
    workdir,
    "--do=train",
    *flags,
    f"--config.seed={seed}",
    f"--compilation_cache={workdir.parent / 'compilation_cache'}",
  )
  return workdir


def load(collection: str, split: str, data_root: str) -> Sequence[Any]:
  """The programs of a split."""
  config = configs.load(f"layout.py:{collection}").replace(data_root=data_root)
  return data_of(config)[0].load(split)


def rows_of(ranker: Ranker, graphs: Sequence[Any]) -> list[dict[str, Any]]:
  """Figures of each program, over all its configurations."""
  return [figures(graph, scores) for graph, scores in zip(graphs, ranker.scores(graphs))]


def figures(graph: Any, scores: np.ndarray) -> dict[str, Any]:
  """Figures of one program from scores `[C]`; `found8` is NaN if no choice is 2 % better."""
  label = graph.configs.labels[:]
  changed = graph.configs.group_row[:] != graph.configs.group_row[0]
  tried = label[spread(np.argsort(scores, kind="stable"), scores, changed)]
  return {
    "graph": graph.name,
    "kendaltau": metrics.kendall_tau(scores, label),
    "ordered": 2 * metrics.opa(scores, label) - 1,
    **{f"slowdown{k}": value for k, value in metrics.top_k_slowdown(scores, label, _KS).items()},
    "tuned5": tried[:_FEW].min() / label.min() - 1,
    "found8": float(tried[:_LABELS].min() < label[0])
    if label[0] > (1 + _BETTER) * label.min()
    else np.nan,
  }


def heuristic(graph: Any, *, knows_own: bool = False) -> np.ndarray:
  """Groups changed, plus elements of outputs padded to 8 x 128 over their elements, `[C]`.

  Where a configuration leaves an order to the compiler, the last two dimensions count as the minor
  ones. With `knows_own` the compiler's own order is used there, and a group that takes this order
  does not count as changed.
  """
  given, feat = graph.configs, graph.node_feat[graph.config_node]
  dims = feat[:, features.DIMENSIONS]
  rank, elements = (dims > 0).sum(axis=1), np.maximum(dims, 1).prod(axis=1)
  row, changed = given.group_row[:][:, given.node_group], given.group_row[:] != given.group_row[0]
  order, default = given.rows[row, :2].astype(int), np.stack([rank - 1, rank - 2], axis=1)
  if knows_own:
    default = feat[:, columns.NODE["minor_to_major"]][:, :2].astype(int)
    node = np.broadcast_to(np.arange(len(feat)), row.shape)
    changes = ~traffic.changes_nothing(graph, node.ravel(), row.ravel()).reshape(row.shape)
    changed &= changes @ (given.node_group[:, None] == np.arange(changed.shape[1]))
  order = np.where(order[..., :1] < 0, default, order)
  sizes = np.where(
    order < 0,
    0,
    np.take_along_axis(
      np.broadcast_to(dims, (len(order), *dims.shape)), np.maximum(order, 0), axis=2
    ),
  )
  padding = sum(
    features.padding(sizes[..., place], tile)
    for place, tile in ((0, features.LANES), (1, features.SUBLANES))
  )
  return changed.sum(axis=1) + (elements * np.exp(padding)).sum(axis=1) / elements.sum()


def heuristic_rows(graphs: Sequence[Any]) -> dict[str, dict[str, float]]:
  """Means of the heuristic, without and with the compiler's own orders."""
  return {
    name: means([figures(graph, heuristic(graph, knows_own=knows)) for graph in graphs])
    for name, knows in ((HEURISTIC, False), (HEURISTIC_OWN, True))
  }


def blind_rows(graphs: Sequence[Any]) -> dict[str, dict[str, float]]:
  """Mean figures of a random order, and of the compiler's own choice alone."""
  random = [metrics.random_slowdown(graph.configs.labels[:], _KS) for graph in graphs]
  first = [graph.configs.labels[0] / np.min(graph.configs.labels) - 1 for graph in graphs]
  default = {f"slowdown{k}": float(np.mean(first)) for k in _KS}  # one choice is no order
  return {
    "a random order": {
      "kendaltau": 0.0,
      "ordered": 0.0,
      "tuned5": _tuned_at_random(graphs),
      **_found_at_random(graphs),
    }
    | {f"slowdown{k}": float(np.mean([row[k] for row in random])) for k in _KS},
    "the compiler's own choice": default,
  }


def _tuned_at_random(graphs: Sequence[Any]) -> float:
  """Expected `tuned5` of a random order."""
  labels = [graph.configs.labels[:] for graph in graphs]
  others = _FEW - 1
  return float(
    np.mean(
      [
        metrics.random_slowdown(np.minimum(label[1:], label[0]), [others])[others]
        for label in labels
      ]
    )
  )


def _found_at_random(graphs: Sequence[Any]) -> dict[str, float]:
  """Expected `found8` of a random order; empty where no program has a better choice."""
  shares = []
  for label in (graph.configs.labels[:] for graph in graphs):
    others, better = len(label) - 1, int((label < label[0]).sum())
    if label[0] > (1 + _BETTER) * label.min():
      shares.append(
        1 - math.comb(others - better, _LABELS - 1) / math.comb(others, min(_LABELS - 1, others))
      )
  return {"found8": float(np.mean(shares))} if shares else {}


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Means of the columns over the programs that have them; without columns that none has."""
  columns = {name: np.array([row[name] for row in rows]) for name in COLUMNS}
  return {
    name: float(np.nanmean(values))
    for name, values in columns.items()
    if not np.isnan(values).all()
  }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
  """The figures of a split as a Markdown table, with standard deviations over seeds."""
  shown = [column for column in COLUMNS if any(column in row for row in rows.values())]
  return pages.table(
    ["", *shown],
    [
      [name, *(pages.figure(row, column, empty="-") for column in shown)]
      for name, row in rows.items()
    ],
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", default="data/own/npz", help="folder with layout/")
  parser.add_argument("--collection", default="own", help="variant of configs/layout.py")
  parser.add_argument("--workdir", required=True, type=Path, help="folder for the runs")
  parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  args = parser.parse_args()
  graphs = {split: load(args.collection, split, args.data_root) for split in ("train", *SPLITS)}
  if args.collection == "own":
    graphs[KEPT_OUT] = load(f"own-{KEPT_OUT}", "test", args.data_root)
  judged = [split for split in graphs if split != "train"]
  results: dict[str, Any] = {
    "programs": {split: [graph.name for graph in members] for split, members in graphs.items()},
    "all equal": {
      split: [graph.name for graph in members if len(set(graph.configs.labels[:].tolist())) < 2]
      for split, members in graphs.items()
    },
    **{split: blind_rows(graphs[split]) | heuristic_rows(graphs[split]) for split in judged},
  }
  known = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
  for variant, name in VARIANTS.items():
    if variant not in args.variants:
      for split in judged:
        results[split] |= {key: row for key, row in known.get(split, {}).items() if key == name}
      continue
    runs = {split: [] for split in judged}
    for seed in args.seeds:
      folder = args.workdir.resolve() / variant / str(seed)
      ranker = Ranker.load(train(args.collection, variant, seed, args.data_root, folder))
      for split in judged:
        runs[split].append(rows_of(ranker, graphs[split]))
    for split in judged:
      results[split][name] = pages.summary([means(rows) for rows in runs[split]]) | {
        "programs": {
          row["graph"]: float(np.mean([run[place]["kendaltau"] for run in runs[split]]))
          for place, row in enumerate(runs[split][0])
        }
      }
  for split, equal in results["all equal"].items():
    print(f"{split}: {len(graphs[split])} programs, {len(equal)} of them with all labels equal")
  for split in judged:
    print(f"{split}\n\n{table(results[split])}\n", flush=True)
  timing.write({"machine": timing.machine(), **results}, args.out)


if __name__ == "__main__":
  main()
