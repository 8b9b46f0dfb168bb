"""Ranking quality on AlexNet, a released layout graph with run times measured on a TPU v3.

    python -m benchmarks.alexnet --data_root DIR --out benchmarks/alexnet.json

Trains `configs/layout.py:xla-default` and its `recommended` variant on AlexNet's 40,000
training configurations. Each model ranks the 3,856 validation configurations of AlexNet,
which it has not seen, and those of UNet3D, a program unlike AlexNet. The baseline is a
least-squares fit to the logarithm of the run time, with one coefficient for each choice of
each group of nodes. DIR is the folder of the released data, with `layout/` in it. Seconds
are CPU seconds of the whole training command, with loading and compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks import kept_runs, pages, timing
from tpugraphs_jax import metrics
from tpugraphs_jax.data import npz

# The models by the name of their row: variant and number of epochs.
MODELS = {"GraphSAGE, 2 epochs": ("", 2), "score tables, 2 epochs": ("recommended", 2)}
_HELD_OUT, _UNSEEN = "alexnet", "unet3d"
SLOWDOWN = "slowdown1"  # of the first of AlexNet's held-out configurations


def train(variant: str, epochs: int, seed: int, data_root: str, folder: Path) -> dict[str, float]:
  """Kendall tau of both validation graphs, AlexNet's first choice, and CPU seconds of training."""
  cpu_s = kept_runs.train(
    "layout",
    ("xla-default", variant),
    data_root,
    folder,
    "--do=train",
    f"--config.train.epochs={epochs}",
    f"--config.seed={seed}",
    f"--config.data.store_dir={folder.parent / 'store'}",
  )
  subprocess.run(
    [
      sys.executable,
      "run_layout.py",
      "--do=evaluate",
      "--noreport",
      f"--data_root={data_root}",
      f"--workdir={folder}",
      "--config.eval.max_configs=0",
    ],
    cwd=kept_runs.ROOT,
    check=True,
  )
  of = lambda name, column: next(
    value for graph, value in kept_runs.validation(folder, column).items() if name in graph
  )
  return {
    "cpu_s": cpu_s,
    **{name: of(name, "kendaltau") for name in (_HELD_OUT, _UNSEEN)},
    SLOWDOWN: of(_HELD_OUT, "slowdown1"),
  }


def one_hot_scores(data_root: str | Path, place: str = f"valid/{_HELD_OUT}") -> np.ndarray:
  """Predicted ln(run time) `[C]` of AlexNet's configurations, from a linear fit to choices.

  Args:
    data_root: the released data.
    place: of the predicted configurations, such as `valid/alexnet`; fitted are those of `train`.
  """
  train_, judged = (
    npz.read_layout(Path(data_root, "layout/xla/default", f"{name}.npz"))
    for name in (f"train/{_HELD_OUT}", place)
  )
  assert (train_.configs.node_group == judged.configs.node_group).all()
  choices = np.concatenate(
    [graph.configs.rows[graph.configs.group_row] for graph in (train_, judged)]
  )  # [configs, groups, 18]
  numbers = [
    np.unique(column, axis=0, return_inverse=True)[1].reshape(-1)
    for column in choices.swapaxes(0, 1)
  ]
  design = np.concatenate([np.eye(column.max() + 1)[column] for column in numbers], axis=1)
  known = len(train_.configs)
  weights, *_ = np.linalg.lstsq(
    design[:known], np.log(train_.configs.labels.astype(np.float64)), rcond=None
  )
  return design[known:] @ weights


def one_hot_fit(data_root: str) -> dict[str, float]:
  """The same of a linear fit of ln(run time) to choices, on held-out configurations."""
  valid = npz.read_layout(Path(data_root, f"layout/xla/default/valid/{_HELD_OUT}.npz"))
  scores, runtime = one_hot_scores(data_root), valid.configs.labels[:]
  return {
    _HELD_OUT: metrics.kendall_tau(scores, runtime),
    SLOWDOWN: metrics.top_k_slowdown(scores, runtime, (1,))[1],
  }


def table(results: Mapping[str, Any]) -> str:
  """Kendall tau on both graphs, and CPU seconds of training, as a Markdown table."""
  return pages.table(
    ["", "AlexNet, held-out configurations", "UNet3D, unseen program", "CPU seconds of training"],
    [
      [
        name,
        pages.figure(row, _HELD_OUT),
        pages.figure(row, _UNSEEN),
        f"{row['cpu_s']:.0f}" if "cpu_s" in row else "",
      ]
      for name, row in results.items()
      if name != "machine"
    ],
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", required=True, help="the released data")
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  args = parser.parse_args()
  results = {"machine": timing.machine(), "one-hot least squares": one_hot_fit(args.data_root)}
  with tempfile.TemporaryDirectory() as temporary:
    for name, (variant, epochs) in MODELS.items():
      rows = [
        train(variant, epochs, seed, args.data_root, Path(temporary, f"{name}{seed}"))
        for seed in args.seeds
      ]
      print(name, rows, flush=True)
      results[name] = pages.summary(rows)
      timing.write(results, args.out)
  print(table(results))


if __name__ == "__main__":
  main()
