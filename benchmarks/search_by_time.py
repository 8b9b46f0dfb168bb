"""Searches layouts by the time of final schedules, on programs that nothing was learnt from.

    for T in v3 v6e; do
      for NAME in blocks kept_out outputs; do
        python -m tpugraphs_jax.collect --label tpu_estimate --target $T --out DIR \
            --collection layout:own:${NAME}_$T --programs ... --configs ...
      done
    done
    python benchmarks/search_by_time.py --data DIR --out benchmarks/search_by_time.json

The sources are the test programs of `data/own/README.md`. `collect` labels by simulated time and
keeps the compiler's two estimates beside it, so that each search is simulated by all three on the
same choices, as in `benchmarks/tune.py`: with the model and the prior of TPU v3 that ship, which
have learnt from estimates of other families. Nothing is measured.

A figure is how much longer, by simulated time, the choice takes that a search of 5 or 8 labels
would return than the fastest drawn choice: the mean over draws, then programs. Behind it stands the
difference to the learned search by time, with a 95 % bootstrap interval over programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import Any

import generations
import numpy as np
import pages
import search_prior
import timing
import tune as simulated
from tune import Models, Program

from tpugraphs_jax.rankers.ranker import load
from tpugraphs_jax.tuning import strategies, tune
from tpugraphs_jax.tuning.prior import Prior

LABELS = {"time": "milliseconds"} | simulated.LABELS
KS = (5, 8)
_MODEL = "layout-v3-estimate"


def programs(data: Path, target: str) -> list[Program]:
  """The labelled programs of a target whose choices all have a time and both estimates."""
  paths = sorted(data.glob(f"npz/layout/own/*_{target}/test/*.npz"))
  labelled = [Program.read(path, LABELS) for path in paths]
  return [
    program
    for program in labelled
    if all((value > 0).all() for value in program.estimates.values())
    and np.ptp(program.estimates["time"]) > 0
  ]


def time_of_best(
  program: Program, label: str, models: Models, prior: Prior, seeds: int
) -> dict[int, float]:
  """The extra simulated time of the best by a label of the first k choices, means over seeds."""
  extra: dict[int, list[float]] = {k: [] for k in KS}
  for seed in range(seeds):
    chosen = simulated.drawn(program.graph, seed)
    configs = program.graph.configs.subset(chosen)
    pool = search_prior.pool(dataclasses.replace(program.graph, configs=configs))
    value, time = (program.estimates[name][chosen] for name in (label, "time"))
    order = simulated.labelled(pool, strategies.learned(pool, models, prior), value)
    for k in KS:
      best = order[:k][value[order[:k]].argmin()]
      extra[k].append(float(time[best] / time.min() - 1))
  return {k: float(np.mean(values)) for k, values in extra.items()}


def judge(members: Sequence[Program], seeds: int) -> dict[str, Any]:
  """The learned search by each label and the other searches by time, judged by simulated time."""
  ranker, prior = load(_MODEL), tune.prior_of("tpu:v3")
  models = Models(dict.fromkeys((program.graph.name for program in members), ranker), ranker.about)
  by_time = simulated.measure(members, "time", models, lambda pool: prior, seeds)
  times = [program.estimates["time"] for program in members]
  rows = [
    [time_of_best(program, label, models, prior, seeds) for program in members] for label in LABELS
  ]
  extra = {
    label: {k: np.array([of_program[k] for of_program in row]) for k in KS}
    for label, row in zip(LABELS, rows)
  }
  return {
    "programs": len(members),
    "own": by_time["own"],
    "tau-b with time": {
      label: generations.mean_tau([program.estimates[label] for program in members], times)
      for label in LABELS
    },
    "searches": {
      f"learned, by {label}": {
        f"best{k}": {
          "mean": float(extra[label][k].mean()),
          "more": simulated.compared(extra[label][k], extra["time"][k]),
        }
        for k in KS
      }
      for label in LABELS
    }
    | {
      f"{name}, by time": {
        f"best{k}": {"mean": by_time["ways"][name][f"best{k}"], "more": more[f"best{k}"]}
        for k in KS
      }
      for name, more in by_time["differences"].items()
    },
  }


def table(results: Mapping[str, Any]) -> str:
  """The time of the best of 5 and of 8 labels of every search, Markdown."""
  cell = "{mean:.4f} ({more[mean]:+.4f}, {more[low]:+.4f} to {more[high]:+.4f})"
  rows = []
  for target in results["targets"]:
    programs_of = f"{target}, {results[target]['programs']} programs"
    for name, search in results[target]["searches"].items():
      rows.append([programs_of, name, *(cell.format(**search[f"best{k}"]) for k in KS)])
  return pages.table(["target", "search", *(f"time of the best of {k}" for k in KS)], rows)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data", type=Path, required=True, help="folder of `collect`")
  parser.add_argument("--seeds", type=int, default=5, help="draws of the choices")
  parser.add_argument("--targets", nargs="+", default=["v3", "v6e"])
  args = parser.parse_args()
  results: dict[str, Any] = {"seeds": args.seeds, "targets": args.targets}
  for target in args.targets:
    results[target] = judge(programs(args.data, target), args.seeds)
  print(table(results))
  timing.write(results, args.out)


if __name__ == "__main__":
  main()
