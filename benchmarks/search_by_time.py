"""Searches layouts by the time of final schedules, on programs that nothing was learnt from.

    for T in v3 v6e; do
      for NAME in blocks kept_out outputs; do
        python -m tpugraphs_jax.collect --label tpu_estimate --target $T --out DIR \
            --collection layout:own:${NAME}_$T --programs ... --configs ...
      done
    done
    python benchmarks/search_by_time.py --data DIR

The sources are the test programs of `data/own/README.md`. `collect` labels by simulated time and
keeps the compiler's two estimates beside it, so that each search is simulated by all three on the
same choices, as in `benchmarks/tune.py`: with the model and the prior of TPU v3 that ship, which
have learnt from estimates of other families. Nothing is measured.

`own` is how much longer the compiler's own choice takes than the best labelled one. `chosen by` is
how much longer the choice with the least estimate takes, by simulated time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import generations
import numpy as np
import pages
import run_all
import timing
import tune as simulated
from tune import Models, Program

from tpugraphs_jax.rankers.ranker import load
from tpugraphs_jax.tuning import tune

LABELS = {"time": "milliseconds"} | simulated.LABELS
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


def judge(found: Sequence[Program], seeds: int) -> dict[str, Any]:
  """Figures of every way of search by each label, and of choosing by an estimate."""
  ranker, prior = load(_MODEL), tune.prior_of("tpu:v3")
  models = Models(dict.fromkeys((program.graph.name for program in found), ranker), ranker.about)
  times = [program.estimates["time"] for program in found]
  scores = models.scores([program.graph for program in found])
  rows: dict[str, Any] = {}
  for name in LABELS:
    values = [program.estimates[name] for program in found]
    rows[name] = {
      **simulated.measure(found, name, models, lambda pool: prior, seeds),
      "tau-b with time": generations.mean_tau(values, times),
      "tau-b of the model": generations.mean_tau(scores, values),
      "chosen by": float(
        np.mean([time[value.argmin()] / time.min() - 1 for value, time in zip(values, times)])
      ),
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
          *(f"{row[key]:.4f}" for key in ("own", "chosen by")),
          *(f"{way[f'best{k}']:.4f}" for k in (5, 8) for way in row["ways"].values()),
        ]
      )
  ways = ("learned", "model", "random", "coordinate")
  head = ["label", "programs", "tau-b with time", "tau-b of the model", "own", "chosen by"]
  return pages.table([*head, *(f"{way}, {k}" for k in (5, 8) for way in ways)], rows)


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
  if args.out:
    timing.write(results, args.out)
  else:
    run_all.record("search_by_time", results)


if __name__ == "__main__":
  main()
