"""Orders measured layouts of AlexNet by simulated time and by the compiler's cycles.

    pip install ".[tpu]"
    JAX_PLATFORMS=cpu python benchmarks/simulated_labels.py --data DIR --work WORK \
        --out benchmarks/simulated_labels.json

`DIR` holds the released layout data (default: $TPUGRAPHS_DATA), with AlexNet's training step,
measured on a TPU v3 with 40,000 configurations. As in `bridge.py`, every combination of output
orders among them is applied to the training step in `examples/programs/` and compiled for TPU v3;
`WORK` keeps what the compiler wrote. A combination has three labels: the sum of the compiler's
estimated cycles, its optimal seconds, and the simulated time of its final schedules. The record
has tau-b of all against the measured times of a sample of configurations and of all
configurations, and the tau-b that the median time of each combination has, which no label of
combinations can exceed by much. Only the run times are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import bridge
import compiled
import numpy as np
import pages
from scipy import stats
import timing

from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo import tpu_kernels
from tpugraphs_jax.infra import trust
from tpugraphs_jax.tuning import choosing, programs
from tpugraphs_jax.tuning.schedule import chips

TARGET = "tpu:v3"
_LABELS = {
  "cycles": "estimated cycles",
  "optimal_seconds": "optimal seconds",
  "milliseconds": "simulated time",
  "median": "median time",
}
_OTHERS = ("cycles", "optimal_seconds")  # labels without schedules
_RESAMPLES, _MOST_RESAMPLED = 100, 1000


def jobs(
  program: programs.Program, choices: choosing.Choices, distinct: np.ndarray
) -> Iterator[tuple[str, Callable[[], compiled.Compiled]]]:
  """The name of each combination, and a function that compiles it."""
  for place, numbers in enumerate(distinct.tolist()):
    function = choosing.apply(program.function, choices.choice(numbers))
    yield (
      _name(place),
      functools.partial(compiled.compile_function, function, program.args, TARGET),
    )


def _name(place: int) -> str:
  return f"alexnet/{place:02d}"


def row(work: compiled.Folder, place: int, runtime: np.ndarray) -> dict[str, Any]:
  """The labels of a combination, and its measured times in ns, `[configurations]`."""
  outcome = work.read(_name(place))
  if outcome is None:
    why = work.refusal(_name(place)) or "not compiled"
    return {"combination": place, "configs": len(runtime), "why": why}
  median = round(float(np.median(runtime)) / 1e6, 4)
  return {
    "combination": place,
    "configs": len(runtime),
    "median": median,
    **labels(outcome, work.path / f"{_name(place)}.json"),
  }


def labels(outcome: compiled.Compiled, kept: Path) -> dict[str, Any]:
  """The labels of a compiled combination; they are kept with the constants that made them."""
  constants = dataclasses.asdict(chips.chips()[TARGET])
  if kept.exists():
    before = trust.parse(kept.read_text())
    if before["constants"] == constants:
      return before["labels"]
  time = outcome.simulate(TARGET)
  made = {
    "milliseconds": time.milliseconds and round(time.milliseconds, 4),
    "why": time.why[:200],
    "cycles": tpu_kernels.estimated_cycles(outcome.parsed()).cycles,
    "optimal_seconds": outcome.notes["optimal_seconds"],
  }
  timing.write({"constants": constants, "labels": made}, kept)
  return made


def taus(rows: list[dict[str, Any]], which: np.ndarray, runtime: np.ndarray) -> dict[str, Any]:
  """tau-b of each label against measured times, over configurations whose labels all exist.

  Args:
    rows: of combinations.
    which: the combination of each configuration, `[C]`.
    runtime: ns, `[C]`.
  """
  known = {row["combination"]: row for row in rows if all(row.get(key) for key in _LABELS)}
  kept = np.isin(which, list(known))
  labels = {key: np.array([known[place][key] for place in which[kept].tolist()]) for key in _LABELS}
  tau = lambda key, part: float(stats.kendalltau(labels[key][part], runtime[kept][part]).statistic)
  rng = np.random.default_rng(0)
  size = min(int(kept.sum()), _MOST_RESAMPLED)
  draws = [rng.integers(kept.sum(), size=size) for _ in range(_RESAMPLES)]
  time = np.array([tau("milliseconds", draw) for draw in draws])
  more = {key: time - np.array([tau(key, draw) for draw in draws]) for key in _OTHERS}
  everything = np.arange(kept.sum())
  return {
    "configs": int(kept.sum()),
    "tau_b": {_LABELS[key]: round(tau(key, everything), 4) for key in _LABELS},
    "simulated_minus_95": {
      _LABELS[key]: [round(x, 4) for x in np.quantile(difference, (0.025, 0.975))]
      for key, difference in more.items()
    },
  }


def table(record: Mapping[str, Any]) -> str:
  """tau-b of the labels as a Markdown table."""
  rows = [
    [name, str(part["configs"]), *(f"{tau:.3f}" for tau in part["tau_b"].values())]
    for name, part in (("sample", record["sample"]), ("all", record["all"]))
  ]
  return pages.table(["configurations", "number", *_LABELS.values()], rows)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--data",
    default=os.environ.get("TPUGRAPHS_DATA"),
    help="folder of the released data (default: $TPUGRAPHS_DATA)",
  )
  parser.add_argument("--work", required=True, type=Path, help="folder of compiled programs")
  parser.add_argument("--out", type=Path, help="file of results")
  parser.add_argument("--sample", type=int, default=1000, help="configurations of the sample")
  parser.add_argument("--seed", type=int, default=0, help="of the sample")
  parser.add_argument("--timeout", type=int, default=3600, help="seconds to compile a program")
  parser.add_argument("--compiled", action="store_true", help="compiles nothing")
  parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.data is None:
    parser.error("--data is missing, expected the folder of the released data")
  graph = npz.read_layout(
    Path(args.data, "layout/xla/default", bridge.SPLITS["alexnet"], "alexnet.npz")
  )
  (program,) = programs.load(f"{bridge.EXAMPLES / 'alexnet'}.py:step")
  choices = choosing.choices(program.function, *program.args)
  distinct, which = bridge.combinations(graph, choices)
  work = compiled.Folder(args.work)
  if args.worker:
    return work.work(jobs(program, choices, distinct), args.timeout)
  if not args.compiled:
    work.compile([_name(place) for place in range(len(distinct))])
  runtime = graph.configs.labels[:]
  rows = [row(work, place, runtime[which == place]) for place in range(len(distinct))]
  rng = np.random.default_rng(args.seed)
  sample = np.sort(rng.choice(len(which), args.sample, replace=False))
  record = {
    "target": TARGET,
    "combinations": rows,
    "seed": args.seed,
    "sample": taus(rows, which[sample], runtime[sample]),
    "all": taus(rows, which, runtime),
  }
  timing.write(record, args.out)
  print(table(record))


if __name__ == "__main__":
  main()
