"""Compares simulated times of final schedules with times that others measured on TPUs.

    python -m venv ENV
    ENV/bin/pip install '.[tpu]' 'tokamax>=0.0.12'
    ENV/bin/python benchmarks/measured_programs.py --data DIR --work WORK --sample 12 \
        --out benchmarks/measured_programs.json

`DIR` has measured programs as `measured_sources.py` describes: JAXBench's workloads on v6e, products
on v5e and v6e, and tokamax' kernels on v5e, v5p, v6e and 7x. They are compiled for the TPU on which
they were measured, by the libtpu at hand; `WORK` keeps what it wrote, so that a command that was
stopped goes on. `--sample` is the number of products of each TPU, and of tokamax' programs of each
TPU and operation, drawn with `--seed`; all of JAXBench is compiled. `--fit` writes the constants of
each generation, with `--constants FILE`. Only the times are measured.

A program of another compiler is named: where the record says so, the measured kernels are not those
that were simulated.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import Any

from absl import flags
import compiled
import measured_sources
from measured_sources import JAXBENCH
import numpy as np
from scipy import stats
import timing

from tpugraphs_jax.tuning import costs, tpu_kernels
from tpugraphs_jax.tuning.schedule import program
from tpugraphs_jax.tuning.schedule.chips import Chip

# Workloads of JAXBench whose attention the compiler of the measurement made of other kernels:
# today's makes `online-softmax` of it, in fewer passes over the memory.
ATTENTION = ("1p_", "3p_", "5p_", "7p_")
_METHODS = {"simulated": "simulated time", "roofline": "roofline", "cycles": "estimated cycles"}
_ENDS = (0.05, 0.95)
# Values that the fit tries, one constant after the other, in this order and twice.
_GRID = {
  "share": (0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
  "start": (0, 25, 50, 100, 150, 200),
  "latency": (300, 500, 700, 900, 1200),
}
_ROUNDS = 2
_STARTS = ("share", "start", "latency")


@dataclasses.dataclass(frozen=True)
class Row:
  """A measured program beside its estimates, all in milliseconds; None where there is none."""

  program: measured_sources.Program
  simulated: float | None
  why: str
  roofline: float
  cycles: float | None  # of today's `estimate`, which makes milliseconds of the compiler's cycles
  stall: float  # share of waiting
  prepared: program.Program = dataclasses.field(repr=False, compare=False)

  @property
  def is_other_compiler(self) -> bool:
    """Whether the measured kernels were made by a compiler that makes others of attention."""
    return self.program.source == JAXBENCH and (
      self.program.variant == "baseline" and self.program.key.startswith(ATTENTION)
    )


def row(measured: measured_sources.Program, found: compiled.Compiled) -> Row:
  """The estimates of a compiled program."""
  module, target = found.parsed(), measured.target
  prepared = program.Program(module, found.schedules, target, operands=found.operands)
  time = prepared.time()
  cycles = tpu_kernels.estimated_cycles(module)
  device = costs.DEVICES[target]
  roofline = 1e3 * max(
    found.notes["flops"] / device.flops, found.notes["bytes_accessed"] / device.bandwidth
  )
  stall = sum(kernel.stall for kernel in time.kernels) + time.copy_stall
  return Row(
    measured,
    time.milliseconds,
    time.why,
    roofline,
    _today(target, cycles, found.notes),
    stall / max(time.cycles, 1),
    prepared,
  )


def _today(target: str, cycles: tpu_kernels.Cycles, notes: Mapping[str, Any]) -> float | None:
  """Milliseconds from the compiler's cycles, by factors of measured operations."""
  factors = costs.times().get(target)
  if factors is None or not cycles.cycles:
    return None
  if costs.unknown_work(cycles, notes["bytes_accessed"]):
    return None
  products = cycles.of_products
  made = factors.product_ms * products + factors.other_ms * (cycles.cycles - products)
  return float(max(made / 1e6, costs.least_ms(target, notes["flops"], notes["bytes_accessed"])))


def errors(rows: Sequence[Row], method: str) -> np.ndarray:
  """Estimated / measured time of the rows that have an estimate."""
  return np.array(
    [getattr(row, method) / row.program.milliseconds for row in rows if getattr(row, method)]
  )


def summary(rows: Sequence[Row], method: str, factor: float | None = 1.0) -> dict[str, Any]:
  """Errors and tau-b of a method.

  Args:
    rows: measured programs.
    method: a field of `Row`.
    factor: by which the estimate is multiplied; None: the median that fits these rows.
  """
  known = [row for row in rows if getattr(row, method)]
  ratios = errors(known, method)
  if not len(ratios):
    return {"programs": 0}
  fitted = 1 / float(np.median(ratios)) if factor is None else factor
  wrong = np.abs(fitted * ratios - 1)
  measured = [row.program.milliseconds for row in known]
  tau = stats.kendalltau([getattr(row, method) for row in known], measured).statistic
  return {
    "programs": len(ratios),
    "factor": round(fitted, 3),
    "mean": round(float(wrong.mean()), 4),
    "median": round(float(np.median(wrong)), 4),
    "tau_b": round(float(tau), 4),
    "measured_by_estimate": [round(float(x), 3) for x in np.quantile(1 / (fitted * ratios), _ENDS)],
  }


def fit(rows: Sequence[Row], chip: Chip) -> tuple[Chip, float]:
  """The constants with the smallest mean error, and this error; every group has the same weight.

  The clock follows from the other constants: it is the weighted median of simulated cycles by
  measured time, at constant bytes a second.
  """
  best, error = chip, _error(rows, chip)
  for _ in range(_ROUNDS):
    for name, values in _GRID.items():
      for value in values:
        tried = dataclasses.replace(best, **{name: value})
        tried = _with_clock(rows, tried)
        wrong = _error(rows, tried)
        if wrong < error - 1e-4:
          best, error = tried, wrong
  return best, error


def _with_clock(rows: Sequence[Row], chip: Chip) -> Chip:
  """The chip with the clock at which the median of all groups' median errors is 0."""
  for _ in range(2):  # bytes a cycle depend on the clock
    ratios = _ratios(rows, chip)
    middle = float(np.median([np.median(values) for values in ratios.values()]))
    chip = dataclasses.replace(chip, clock=chip.clock * middle)
  return chip


def _ratios(rows: Sequence[Row], chip: Chip) -> dict[str, list[float]]:
  """Simulated / measured time by group."""
  found = collections.defaultdict(list)
  for row in rows:
    time = row.prepared.time(chip).milliseconds
    if time:
      found[f"{row.program.source} {row.program.group}"].append(time / row.program.milliseconds)
  return found


def _error(rows: Sequence[Row], chip: Chip) -> float:
  ratios = _ratios(rows, chip).values()
  return float(np.mean([np.mean(np.abs(np.array(values) - 1)) for values in ratios]))


def usable(rows: Sequence[Row]) -> list[Row]:
  """Rows with a time whose kernels are those that were measured."""
  return [row for row in rows if row.simulated and not row.is_other_compiler]


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data", required=True, type=Path, help="folder of measured programs")
  parser.add_argument("--work", required=True, type=Path, help="folder of compiled programs")
  parser.add_argument("--sample", type=int, default=12, help="programs of each TPU and operation")
  parser.add_argument("--seed", type=int, default=0, help="of the sample")
  parser.add_argument("--timeout", type=int, default=900, help="seconds to compile a program")
  parser.add_argument("--only", default="", help="programs whose name contains this text")
  parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  programs = measured_sources.sample(measured_sources.read(args.data), args.sample, args.seed)
  programs = [each for each in programs if args.only in f"{each.name} {each.target}"]
  if not programs:
    parser.error(f"--data={args.data} has no measured programs")
  work = compiled.Folder(args.work)
  if args.worker:
    flags.FLAGS(["worker"])  # which tokamax would parse otherwise
    return work.work(((each.name, each.compile) for each in programs), args.timeout)
  work.compile([each.name for each in programs])


if __name__ == "__main__":
  main()
