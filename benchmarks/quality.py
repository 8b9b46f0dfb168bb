"""Ranking quality on synthetic data, between a random order and the ceiling.

    python -m tpugraphs_jax.synthetic --out DIR --scale medium
    python -m benchmarks.quality --data_root DIR/npz --workdir out/quality --out quality.json

Trains every variant with every seed by `run_tile.py` and `run_layout.py`, in working folders
that are kept: a second call continues where the first one stopped. `--variants` trains some
variants and leaves the rows of the others in `--out` as they are. The ceiling ranks by the
runtimes without noise, which are known for synthetic data alone.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import kept_runs, pages, timing
from tpugraphs_jax import metrics, synthetic
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import evaluation
from tpugraphs_jax.train.loading import data_of, evaluable, fit


class Case(NamedTuple):
  """A collection, the variants to train on it and the metrics to report."""

  config: str  # module under `configs`, and the command's kind
  collection: str  # variant that names the collection, or empty
  variants: tuple[str, ...]
  columns: tuple[str, ...]  # of validation.csv
  options: tuple[str, ...] = ()  # flags of the default and of `full`


_LAYOUT_COLUMNS = ("kendaltau", "opa", "slowdown10")
CASES = {
  "tile:xla": Case(
    "tile",
    "",
    ("MLP", "MLP,recommended", "", "preset=mlsys21_per_node", "recommended"),
    ("slowdown5", "slowdown1", "opa"),
  ),
  **{
    f"layout:{source}:{search}": Case(
      "layout",
      f"{source}-{search}",
      ("official", "full", "", "recommended"),
      _LAYOUT_COLUMNS,
      ("--config.train.epochs=3",),
    )
    for source in ("xla", "nlp")
    for search in ("random", "default")
  },
}
NAMES = {
  ("tile", "MLP"): "`MLP`, official settings",
  ("tile", "MLP,recommended"): "`MLP`, recommended settings",
  ("tile", ""): "`EarlyJoinSAGE`, official settings",
  ("tile", "preset=mlsys21_per_node"): "`mlsys21_per_node`, the best preset",
  ("tile", "recommended"): "`EarlyJoinSAGE`, recommended settings",
  ("layout", "official"): "`ResModel`, official settings",
  ("layout", "full"): "`SAGE`, 3 epochs of 10",
  ("layout", ""): "`SAGE` in segments (the default), 3 epochs of 10",
  ("layout", "recommended"): "`ScoreTables`, recommended settings",
}


def train(case: Case, variant: str, seed: int, data_root: str, workdir: Path) -> dict[str, float]:
  """Means over validation graphs of a run, which is trained unless it is finished."""
  kept_runs.train(
    case.config,
    (case.collection, variant),
    data_root,
    workdir,
    f"--config.seed={seed}",
    *(case.options if variant in ("", "full") else ()),
  )
  return {
    name: float(np.nanmean(list(kept_runs.validation(workdir, name).values())))
    for name in case.columns
  }


def bounds(case: Case, collection: str, data_root: str) -> dict[str, dict[str, float]]:
  """Expected figures of a random order, and on synthetic data of ranking by noise-free runtimes."""
  config = configs.load(f"{case.config}.py:{case.collection}").replace(data_root=data_root)
  ranker, (data,) = Ranker(config), data_of(config)
  graphs = evaluable(data.load("valid"))
  ks = data.collection.slowdown_ks
  fit(ranker, [data], graphs)
  random, ceiling, pairs = [], [], []
  for graph in graphs:
    ids = data.validation_ids(graph.name, graph.configs)
    random.append(_random_row(graph.configs.labels[ids], ks))
    try:
      truth = synthetic.read_ceiling(data_root, collection, "valid", graph.name).runtime_ns[ids]
    except FileNotFoundError:  # measured run times
      continue
    # Scores are ranks: runtimes that differ can be equal as float32.
    scores = np.unique(truth, return_inverse=True)[1].astype(np.float32)
    judged = evaluation.with_labels([ranker.prepare(graph)], [ids], [scores])
    ceiling += evaluation.evaluate(judged, ks)[0]
    pairs.append(metrics.ordered_pairs(scores, graph.configs.labels[ids]))
  means = {
    name: {column: float(np.nanmean([row[column] for row in rows])) for column in case.columns}
    for name, rows in (("random", random), ("ceiling", ceiling))
    if rows
  }
  means["random"]["opa_pooled"] = 0.5
  if ceiling:
    means["ceiling"]["opa_pooled"] = metrics.pooled_opa(pairs)
  return means


def _random_row(label: np.ndarray, ks: tuple[int, ...]) -> dict[str, float]:
  """Expected figures of one graph's configurations in random order."""
  slowdown = metrics.random_slowdown(label, ks)
  return {"kendaltau": 0.0, "opa": 0.5, **{f"slowdown{k}": v for k, v in slowdown.items()}}


def table(columns: tuple[str, ...], rows: Mapping[str, Mapping[str, Any]]) -> str:
  """Means and standard deviations as a Markdown table."""
  return pages.table(
    ["", *columns],
    [[name, *(pages.figure(row, column) for column in columns)] for name, row in rows.items()],
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", required=True, help="folder with tile/ and layout/")
  parser.add_argument("--workdir", required=True, type=Path, help="folder for the runs")
  parser.add_argument("--collections", nargs="+", choices=CASES, default=list(CASES))
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  parser.add_argument("--variants", nargs="+", help="variants to train; others stay as in --out")
  args = parser.parse_args()
  known = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
  results = {name: rows for name, rows in known.items() if name != "machine"}
  for collection in args.collections:
    case = CASES[collection]
    limits = bounds(case, collection, args.data_root)
    rows = {"random order": limits["random"]}
    for variant in case.variants:
      name = NAMES[case.config, variant]
      if args.variants and (variant or "default") not in args.variants:
        if name in known.get(collection, {}):
          rows[name] = known[collection][name]
        continue
      rows[name] = pages.summary(
        [
          train(
            case,
            variant,
            seed,
            args.data_root,
            args.workdir.resolve().joinpath(
              collection.replace(":", "_"), variant or "default", str(seed)
            ),
          )
          for seed in args.seeds
        ]
      )
    rows["ceiling (no noise)"] = limits["ceiling"]
    results[collection] = rows
    print(f"{collection}\n\n{table(case.columns, rows)}\n", flush=True)
  timing.write({"machine": timing.machine(), **results}, args.out)


if __name__ == "__main__":
  main()
