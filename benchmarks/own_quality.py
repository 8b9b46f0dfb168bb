"""Ranking quality on programs of families that no model was trained on.

    python benchmarks/own_quality.py --workdir out/own_quality --out benchmarks/own_quality.json
    python benchmarks/own_quality.py --collection own-programs_cpu --workdir out/own_quality_cpu \\
        --out benchmarks/own_quality_cpu.json

Trains every variant with every seed on the collection that ships (`data/own`), in working
folders that are kept, and judges them on its validation families, by which the best
checkpoint is chosen, and on its test families, which nothing is chosen by. Beside them
stand a random order and the compiler's own choice, which is configuration 0. `--variants`
trains some, and leaves the rows of others in `--out` as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import subprocess
import sys
from typing import Any

import numpy as np

import quality
import timing
from tpugraphs_jax import metrics
from tpugraphs_jax.run import job as job_lib
from tpugraphs_jax.serve import judge
from tpugraphs_jax.serve.ranker import Ranker

ROOT = Path(__file__).parents[1]
VARIANTS = {"full": "`SAGE`", "tables": "`ScoreTables`", "preset=tenth": "`tenth`, the best preset",
            "official": "`ResModel`, official"}
COLUMNS = ("kendaltau", "slowdown1", "slowdown5")
SPLITS = ("valid", "test")
_KS = (1, 5)
# A few dozen programs are soon learnt by heart: the best step comes early.
_SHORT = ("--config.train.epochs=6", "--config.batch.slates_per_epoch=200")


def train(collection: str, variant: str, seed: int, data_root: str, workdir: Path) -> Path:
  """A run that is made unless it is there."""
  if not (workdir / "done").exists():
    config = ",".join(filter(None, (collection, variant)))
    subprocess.run(
        [sys.executable, "run_layout.py", f"--config=configs/layout.py:{config}",
         f"--data_root={data_root}", f"--workdir={workdir}", f"--config.seed={seed}", *_SHORT,
         f"--compilation_cache={workdir.parent / 'compilation_cache'}", "--mode=train",
         "--resume", "--noreport"], cwd=ROOT, check=True)
    (workdir / "done").touch()
  return workdir


def rows_of(ranker: Ranker, graphs: Sequence[Any]) -> list[dict[str, Any]]:
  """Figures of every program, all configurations."""
  scores = ranker.scores(graphs)
  return [judge.graph_row(graph, np.arange(len(graph.configs)), each, ks=_KS)
          for graph, each in zip(map(ranker.prepare, graphs), scores)]


def blind_rows(graphs: Sequence[Any]) -> dict[str, dict[str, float]]:
  """Means of a random order, and of the compiler's own choice alone."""
  random = [metrics.random_slowdown(graph.configs.runtime_ns[:], _KS) for graph in graphs]
  first = [graph.configs.runtime_ns[0] / np.min(graph.configs.runtime_ns) - 1
           for graph in graphs]
  default = {f"slowdown{k}": float(np.mean(first)) for k in _KS}  # it orders nothing
  return {
      "a random order": {"kendaltau": 0.0} | {
          f"slowdown{k}": float(np.mean([row[k] for row in random])) for k in _KS},
      "the compiler's own choice": default}


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  return {name: float(np.nanmean([row[name] for row in rows])) for name in COLUMNS}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
  """The figures of a split in Markdown, with the deviation over seeds where there are some."""
  lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
  for name, row in rows.items():
    cells = [f"{row[c]:.3f}" if c in row else "-" for c in COLUMNS]
    if "spread" in row:
      cells = [f"{cell} ± {row['spread'][c]:.3f}" for cell, c in zip(cells, COLUMNS)]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", default="data/own/npz", help="folder with layout/")
  parser.add_argument("--collection", default="own", help="variant of configs/layout.py")
  parser.add_argument("--workdir", required=True, type=Path, help="folder for the runs")
  parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  args = parser.parse_args()
  config = quality.importlib.import_module("configs.layout").get_config(args.collection)
  data = job_lib.Job.of(config).data
  graphs = {split: data.load(args.data_root, split) for split in ("train", *SPLITS)}
  results: dict[str, Any] = {
      "programs": {split: [graph.name for graph in found] for split, found in graphs.items()},
      **{split: blind_rows(graphs[split]) for split in SPLITS}}
  known = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
  for variant, name in VARIANTS.items():
    if variant not in args.variants:
      for split in SPLITS:
        results[split] |= {name: row for key, row in known.get(split, {}).items() if key == name}
      continue
    runs = {split: [] for split in SPLITS}
    for seed in args.seeds:
      folder = args.workdir.resolve() / variant / str(seed)
      ranker = Ranker.load(train(args.collection, variant, seed, args.data_root, folder))
      for split in SPLITS:
        runs[split].append(rows_of(ranker, graphs[split]))
    for split in SPLITS:
      results[split][name] = quality.summary([means(rows) for rows in runs[split]]) | {
          "programs": {row["graph"]: float(np.mean([run[place]["kendaltau"] for run in runs[split]]))
                       for place, row in enumerate(runs[split][0])}}
  for split in SPLITS:
    print(f"{split}\n\n{table(results[split])}\n", flush=True)
  timing.write({"machine": timing.machine(), **results}, args.out)


if __name__ == "__main__":
  main()
