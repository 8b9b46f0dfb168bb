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

`own` is how much the compiler's own choice costs above the best labelled one. Two columns judge a
label by simulated time: how much longer than the fastest drawn choice the one takes that has the
least label of the first 5 and of the first 8 choices of the learned search.
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
_BY_TIME = [f"time of best of {k}" for k in KS]
_MODEL = "layout-v3-estimate"


def programs(data: Path, target: str) -> list[Program]:
  """The labelled programs of a target whose choices all have a time and both estimates."""
  paths = sorted(data.glob(f"npz/layout/own/*_{target}/test/*.npz"))
  found = [Program.read(path, LABELS) for path in paths]
  return [
    program
    for program in found
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


def judge(found: Sequence[Program], seeds: int) -> dict[str, Any]:
  """Figures of every way of search by each label, and of choosing by an estimate."""
  ranker, prior = load(_MODEL), tune.prior_of("tpu:v3")
  models = Models(dict.fromkeys((program.graph.name for program in found), ranker), ranker.about)
  times = [program.estimates["time"] for program in found]
  scores = models.scores([program.graph for program in found])
  rows: dict[str, Any] = {}
  for name in LABELS:
    values = [program.estimates[name] for program in found]
    by_time = [time_of_best(program, name, models, prior, seeds) for program in found]
    rows[name] = {
      **simulated.measure(found, name, models, lambda pool: prior, seeds),
      "tau-b with time": generations.mean_tau(values, times),
      "tau-b of the model": generations.mean_tau(scores, values),
      **{f"time of best of {k}": float(np.mean([row[k] for row in by_time])) for k in KS},
    }
  return rows


def table(results: Mapping[str, Any]) -> str:
  """The best of 5 and of 8 labels of every way of search, by each label; Markdown."""
  rows = []
  for target in results["targets"]:
    for name in LABELS:
      row = results[target][name]
      rows.append(
        [
          f"{target}, {name}",
          str(row["programs"]),
          *(f"{row[key]:.3f}" for key in ("tau-b with time", "tau-b of the model")),
          *(f"{row[key]:.4f}" for key in ("own", *_BY_TIME)),
          *(f"{way[f'best{k}']:.4f}" for k in KS for way in row["ways"].values()),
        ]
      )
  ways = ("learned", "model", "random", "coordinate")
  head = ["label", "programs", "tau-b with time", "tau-b of the model", "own", *_BY_TIME]
  return pages.table([*head, *(f"{way}, {k}" for k in KS for way in ways)], rows)


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
