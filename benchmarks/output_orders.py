"""Compares layout rankers on output orders alone with rankers on all integers of a node.

    python benchmarks/output_orders.py --data_root DIR --out benchmarks/output_orders.json

Trains each ranker on AlexNet's 40,000 measured configurations (TPU v3, `xla:default`), once
with `data.config_features` of `released` (all 18 integers of a node) and once with `outputs`
(the 6 of its output). Each then ranks configurations that it has not seen: 1,000 of AlexNet's
validation configurations, and the 112 of UNet3D, a program unlike AlexNet. DIR is the folder
of the released data. Two programs are little evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import itertools
from pathlib import Path
import tempfile
import time
from typing import Any

import numpy as np
import pages
from scipy import stats
import timing

from tpugraphs_jax.data import factoring, npz
from tpugraphs_jax.rankers import ranker
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import training

RANKERS = {"ResModel": "official", "GraphSAGE": "full", "score tables": "recommended"}
_FEATURES = ("released", "outputs")
_PROGRAMS = ("alexnet", "unet3d")
_JUDGED = 1000  # most configurations of a program that are ranked
_FOLDER = "layout/xla/default"


def config_of(variant: str, features: str, seed: int, epochs: int, slates: int) -> Any:
  """The config of a training run."""
  config = configs.load(f"layout.py:xla-default,{variant}")
  config.seed = seed
  config.data.config_features = (features,)
  config.batch.slates_per_epoch = slates
  config.train.update(epochs=epochs, valid_configs=100)
  config.eval.max_configs = 100
  return config


def judged(data_root: str, seed: int = 0) -> list[Any]:
  """The two programs, with configurations that no ranker was trained on."""
  graphs = []
  for name in _PROGRAMS:
    graph = npz.read_layout(Path(data_root, _FOLDER, "valid", f"{name}.npz"))
    count = min(_JUDGED, len(graph.configs))
    ids = np.random.default_rng(seed).choice(len(graph.configs), count, replace=False)
    graphs.append(dataclasses.replace(graph, configs=graph.configs.subset(np.sort(ids))))
  return graphs


def taus(scores: np.ndarray, runtime_ns: np.ndarray) -> tuple[float, float]:
  """Kendall's tau-b of scores `[C]`, and tau of the ranking, which breaks ties by position."""
  rank = np.empty(len(scores), int)
  rank[np.argsort(scores, kind="stable")] = np.arange(len(scores))
  return tuple(float(stats.kendalltau(each, runtime_ns).statistic) for each in (scores, rank))


def measure(config: Any, data_root: str, folder: Path) -> dict[str, float]:
  """Taus on both programs, and CPU seconds of training and of ranking."""
  config.data_root, config.data.store_dir = data_root, str(folder.parent / "store")
  started = time.process_time()
  training.run(config, folder, do=["train"])
  trained = time.process_time()
  graphs = judged(data_root)
  scores = ranker.Ranker.load(folder).scores(graphs)
  row = {"train_s": trained - started, "rank_s": time.process_time() - trained}
  for name, graph, each in zip(_PROGRAMS, graphs, scores):
    row[f"{name}_tau_b"], row[f"{name}_tau"] = taus(each, graph.configs.runtime_ns)
  return row


def sizes(data_root: str) -> dict[str, dict[str, int]]:
  """Bytes, rows, groups and distinct configurations of the training graph, by feature set."""
  graph = npz.read_layout(Path(data_root, _FOLDER, "train", f"{_PROGRAMS[0]}.npz"))
  return {
    name: {
      "bytes": configs.rows.nbytes + configs.group_row.nbytes,
      "rows": len(configs.rows),
      "groups": configs.group_row.shape[1],
      "distinct": len(np.unique(configs.group_row, axis=0)),
    }
    for name, configs in (
      ("released", graph.configs),
      ("outputs", factoring.output_orders(graph).configs),
    )
  }


def table(results: Mapping[str, Any]) -> str:
  """Means over seeds and standard deviations, as a Markdown table."""
  columns = {
    "alexnet_tau_b": "AlexNet, tau-b",
    "alexnet_tau": "AlexNet, tau of the ranking",
    "unet3d_tau_b": "UNet3D, tau-b",
    "unet3d_tau": "UNet3D, tau of the ranking",
  }
  return pages.table(
    ["ranker", "integers of a node", *columns.values(), "CPU seconds of training"],
    [
      [name, integers, *(pages.figure(row, column) for column in columns), f"{row['train_s']:.0f}"]
      for name in RANKERS
      for features, integers in zip(_FEATURES, ("18", "6"))
      if (row := results.get(f"{name}, {features}"))
    ],
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", required=True, help="the released data")
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  parser.add_argument("--epochs", type=int, default=4)
  parser.add_argument("--slates", type=int, default=128, help="per epoch")
  args = parser.parse_args()
  results = {
    "machine": timing.machine(),
    "epochs": args.epochs,
    "slates": args.slates,
    "sizes": sizes(args.data_root),
  }
  rows: dict[str, list[dict[str, float]]] = {}
  with tempfile.TemporaryDirectory() as temporary:
    for seed, (name, variant), features in itertools.product(
      args.seeds, RANKERS.items(), _FEATURES
    ):
      key = f"{name}, {features}"
      config = config_of(variant, features, seed, args.epochs, args.slates)
      rows.setdefault(key, []).append(
        measure(config, args.data_root, Path(temporary, f"{variant}-{features}-{seed}"))
      )
      results[key] = pages.summary(rows[key])
      print(key, seed, rows[key][-1], flush=True)
      timing.write(results, args.out)
  print(table(results))


if __name__ == "__main__":
  main()
