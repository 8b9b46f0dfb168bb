"""Compares the TPU compiler's estimates with times measured on TPU v5e, v5p, v6e and 7x.

    python -m venv ENV
    ENV/bin/pip install '.[tpu]' 'tokamax>=0.0.12'
    ENV/bin/python -m benchmarks.measured_ops --data DIR --work DIR --out RECORD.json

The times are those of tokamax' autotuning caches: operations of real models that plain XLA
computes, five times each. `--data` is a folder of such caches, `DEVICE/OPERATION.json`; its default
is that of the installed tokamax. The operations are tokamax' own too. Each program is compiled for
the TPU it was measured on. Only the times are measured; all other numbers are estimates.

`--work` keeps what the compiler said, a program a line, and the optimised modules: a killed command
goes on where it was. A compiler that ends its process costs one program. Keys that differ in
`return_residuals` alone are one program. `--sample` compiles that many programs of each file,
drawn with a fixed seed; a larger sample contains the smaller one. The record is made of all
programs that were compiled so far. `--times` also writes the factors from which
`tpugraphs_jax.estimate` makes milliseconds.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any
import zlib

from absl import flags
import numpy as np
from scipy import optimize, stats

from benchmarks import cycle_times, pages, timing, tokamax_ops
from tpugraphs_jax.hlo import proto, tpu_kernels
from tpugraphs_jax.tuning import costs, label_file

# What a row of the record has; times and estimates of one program.
COLUMNS = (
  "measured_ms",
  "cycles",
  "product_cycles",
  "optimal_seconds",
  "bytes",
  "flops",
  "planned_memory",  # by the memory that the compiler of the measurement planned
)
_KINDS = "cycles of products and of the rest"
# A time is at least that of the operations and of 0.7 of the bytes at the peaks of the device.
_AT_LEAST = ", at least the peaks"
_MILLISECONDS = _KINDS + _AT_LEAST  # as `estimate` tells them
_SAME_PLAN = 0.05  # relative difference of planned memories
_CLOSE = 0.2  # a relative error that counts as close
_FEWEST = 3  # programs of an operation with an error of its own
_ENDS = (0.05, 0.95)
Rows = Mapping[str, np.ndarray]  # by column, an entry for each program


def whole(seconds: np.ndarray) -> np.ndarray:
  """Optimal seconds without the ones that the compiler subtracts, one for each custom call."""
  return seconds - np.minimum(np.floor(seconds), 0)


# What a time is made of, by the name of a method: one or two terms, each with a number to fit.
METHODS: dict[str, Callable[[Rows, str], list[np.ndarray]]] = {
  "cycles": lambda rows, target: [rows["cycles"]],
  f"cycles{_AT_LEAST}": lambda rows, target: [rows["cycles"]],
  "optimal seconds": lambda rows, target: [whole(rows["optimal_seconds"])],
  "geometric mean of both": lambda rows, target: [
    np.sqrt(rows["cycles"] * whole(rows["optimal_seconds"]))
  ],
  "roofline": lambda rows, target: [
    np.maximum(
      rows["flops"] / costs.DEVICES[target].flops, rows["bytes"] / costs.DEVICES[target].bandwidth
    )
  ],
  "cycles and optimal seconds": lambda rows, target: [
    rows["cycles"],
    whole(rows["optimal_seconds"]),
  ],
  **dict.fromkeys(
    (_KINDS, _MILLISECONDS),
    lambda rows, target: [rows["product_cycles"], rows["cycles"] - rows["product_cycles"]],
  ),
  "cycles and a constant": lambda rows, target: [rows["cycles"], np.ones(len(rows["cycles"]))],
}


def figures(program: tokamax_ops.Program, raw: Mapping[str, Any], module: bytes) -> dict[str, Any]:
  """Times and estimates of a compiled program, and why it has no estimate, if it has none."""
  cycles = tpu_kernels.estimated_cycles(proto.parse_module(module, where=program.name))
  missing = cycle_times.unknown_work(cycles, raw["bytes_accessed"])
  names = sorted({" ".join(filter(None, [program.kind, program.target])) for program in missing})
  ms = float(np.median(program.times_ms))
  peak = costs.DEVICES[tokamax_ops.DEVICES[program.device]].flops
  if not names and 1e3 * raw["flops"] / peak > ms:
    names = ["another program was measured: at the peak the operations of this one take longer"]
  return {
    "measured_ms": ms,
    "cycles": cycles.cycles,
    "product_cycles": cycles.of_products,
    "optimal_seconds": raw["optimal_seconds"],
    "bytes": raw["bytes_accessed"],
    "flops": raw["flops"],
    "planned_memory": round(sum(raw["memory"].values()) / (1e6 * program.peak_mb), 3),
    "without": ", ".join(names) if names or cycles.cycles else "all kernels",
  }


def record(
  programs: Sequence[tokamax_ops.Program], without: Sequence[str], work: tokamax_ops.Work
) -> dict[str, Any]:
  """All that was compiled so far, by device and operation."""
  outcomes = work.outcomes()
  operations: dict[str, dict[str, Any]] = {}
  for program in sorted(programs, key=lambda program: program.name):
    target = tokamax_ops.DEVICES[program.device]
    row = operations.setdefault(
      f"{target} {program.operation}",
      {"distinct": 0, "failed": {}, "without_estimate": {}, "programs": {}},
    )
    row["distinct"] += 1
    outcome = outcomes.get(program.name)
    if isinstance(outcome, str):
      reason = outcome.splitlines()[0][:200]
      row["failed"][reason] = row["failed"].get(reason, 0) + 1
    if not isinstance(outcome, dict):
      continue
    module = zlib.decompress(work.module(program.name).read_bytes())
    numbers = figures(program, outcome, module)
    if numbers["without"]:
      row["without_estimate"][numbers["without"]] = (
        row["without_estimate"].get(numbers["without"], 0) + 1
      )
    else:
      row["programs"][program.name.rpartition("/")[2]] = [numbers[column] for column in COLUMNS]
  return {
    **work.versions(),
    "columns": COLUMNS,
    "files_without_times": list(without),
    "operations": operations,
  }


def _rows(operation: Mapping[str, Any]) -> Rows:
  """The columns of an operation's programs."""
  values = np.array(list(operation["programs"].values()), np.float64).reshape(-1, len(COLUMNS))
  return dict(zip(COLUMNS, values.T))


@dataclasses.dataclass(frozen=True)
class Part:
  """Programs of an operation, as a method sees them; arrays have an entry for each program.

  Attributes:
    terms: what the time is made of.
    ms: measured milliseconds.
    least: milliseconds below which no time is estimated.
  """

  terms: Sequence[np.ndarray]
  ms: np.ndarray
  least: np.ndarray

  def ratios(self, fitted: np.ndarray) -> np.ndarray:
    """Measured by estimated time, with a number for each term."""
    return self.ms / np.maximum(np.stack(self.terms, 1) @ fitted, self.least)

  def errors(self, fitted: np.ndarray) -> np.ndarray:
    """Relative errors of estimated times."""
    return np.abs(1 / self.ratios(fitted) - 1)


def part(rows: Rows, target: str, method: str) -> Part:
  """The programs of an operation, as a method sees them."""
  least = costs.least_ms(target, rows["flops"], rows["bytes"]) * method.endswith(_AT_LEAST)
  return Part(METHODS[method](rows, target), rows["measured_ms"], least)


def fit(parts: Sequence[Part]) -> np.ndarray:
  """The numbers by which terms are multiplied, every operation of the same weight.

  One term gets the median of measured time by term, of several operations the median of their
  medians. Two terms get numbers of at least 0 with the least squares of relative errors.
  """
  shares = [np.stack(part.terms, 1) / part.ms[:, None] for part in parts]
  if shares[0].shape[1] == 1:
    return np.median([np.median(1 / share[:, 0]) for share in shares], keepdims=True)
  root = np.concatenate([np.full(len(part.ms), len(part.ms) ** -0.5) for part in parts])
  return optimize.nnls(np.concatenate(shares) * root[:, None], root)[0]


def quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
  """The smallest value up to which values have `share` of the weight."""
  order = np.argsort(values)
  mass = np.cumsum(weights[order])
  return float(values[order][np.searchsorted(mass, share * mass[-1])])


def by_generation(recorded: Mapping[str, Any]) -> dict[str, dict[str, Rows]]:
  """The programs with an estimate, by target and operation.

  An operation of which most programs have none was another one when it was measured.
  """
  result: dict[str, dict[str, Rows]] = collections.defaultdict(dict)
  for name, row in recorded["operations"].items():
    target, operation = name.split()
    if len(row["programs"]) >= max(_FEWEST, sum(row["without_estimate"].values())):
      result[target][operation] = _rows(row)
  return result


def left_out(
  operations: Mapping[str, Rows], target: str, method: str
) -> dict[str, tuple[Part, np.ndarray]]:
  """The programs of every operation, with numbers fitted to the other operations."""
  parts = {name: part(rows, target, method) for name, rows in operations.items()}
  return {
    name: (parts[name], fit([rest for operation, rest in parts.items() if operation != name]))
    for name in parts
    if len(parts) > 1
  }


def times(recorded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """The numbers of every generation, and the interval of measured times, for `estimate`.

  The interval is one of all generations: nine of ten measured programs, every operation of the
  same weight, each estimated by the other operations of its generation.
  """
  generations = by_generation(recorded)
  ratios = [
    operation.ratios(fitted)
    for target, operations in generations.items()
    for operation, fitted in left_out(operations, target, _MILLISECONDS).values()
  ]
  if not ratios:
    raise ValueError("no generation has two operations with estimates, expected one for --times")
  values = np.concatenate(ratios)
  weights = np.concatenate([np.full(len(ratio), 1 / len(ratio)) for ratio in ratios])
  low, high = (round(quantile(values, weights, end), 2) for end in _ENDS)
  numbers = lambda target: fit(
    [part(rows, target, _MILLISECONDS) for rows in generations[target].values()]
  )
  return {
    target: {
      **{
        name: round(1e6 * float(number), 3)
        for name, number in zip(("product_ms", "other_ms"), numbers(target))
      },
      "low": low,
      "high": high,
      "programs": sum(len(rows["cycles"]) for rows in operations.values()),
      "operations": len(operations),
    }
    for target, operations in generations.items()
  }


def table(recorded: Mapping[str, Any]) -> str:
  """Both estimates of every generation and operation, after one factor, as a Markdown table."""
  lines = []
  for target, operations in by_generation(recorded).items():
    for name, rows in operations.items():
      lines.append(
        [_short(target), _spoken(name), str(len(rows["cycles"])), *_judged(rows, target)]
      )
    if len(operations) > 1:
      every = {
        column: np.concatenate([rows[column] for rows in operations.values()]) for column in COLUMNS
      }
      lines.append([_short(target), "all", str(len(every["cycles"])), *_judged(every, target)])
  return pages.table(
    [
      "TPU",
      "operation",
      "programs",
      "ms of a million cycles",
      "tau-b",
      "mean error",
      "within 20 %",
      "measured / estimated, 5 to 95 %",
      "of these with the same plan of memory: programs, mean error",
      "negative optimal seconds",
      "ms of an optimal ms",
      "tau-b",
      "mean error",
      "within 20 %",
      "measured / estimated, 5 to 95 %",
    ],
    lines,
  )


def worth_table(recorded: Mapping[str, Any]) -> str:
  """What both estimates and the milliseconds of cycles are worth."""
  lines = []
  for target, operations in by_generation(recorded).items():
    time = cycle_times.times().get(target)
    for name, rows in operations.items():
      cells = [_short(target), _spoken(name), str(len(rows["cycles"]))]
      for method in ("cycles", "optimal seconds"):
        programs = part(rows, target, method)
        tau = stats.kendalltau(programs.terms[0], programs.ms).statistic
        cells.append(f"{tau:.2f}, {programs.errors(fit([programs])).mean():.0%}")
      if time is not None:
        programs = part(rows, target, _MILLISECONDS)
        numbers = np.array([time.product_ms, time.other_ms]) / 1e6
        ratios = programs.ratios(numbers)
        is_above = programs.ms >= programs.least  # below which no interval begins
        inside = is_above & (time.low <= ratios) & (ratios <= time.high)
        cells += [f"{programs.errors(numbers).mean():.0%}", f"{inside.mean():.0%}"]
      lines.append([*cells, *[""] * (7 - len(cells))])
  return pages.table(
    [
      "TPU",
      "operation",
      "programs",
      "cycles: tau-b, error",
      "optimal seconds: tau-b, error",
      "ms of cycles: error",
      "within its interval",
    ],
    lines,
  )


def _judged(rows: Rows, target: str) -> list[str]:
  cells = []
  for method, unit in (("cycles", 1e6), ("optimal seconds", 1e-3)):
    programs = part(rows, target, method)
    fitted = fit([programs])
    errors = programs.errors(fitted)
    cells += [
      f"{unit * fitted[0]:.3f}",
      f"{stats.kendalltau(programs.terms[0], programs.ms).statistic:.3f}",
      f"{errors.mean():.1%}",
      f"{(errors <= _CLOSE).mean():.0%}",
      " to ".join(f"{end:.2f}" for end in np.quantile(programs.ratios(fitted), _ENDS)),
    ]
    if method == "cycles":
      cells += [_same_plan(rows, target), str((rows["optimal_seconds"] < 0).sum())]
  return cells


def _same_plan(rows: Rows, target: str) -> str:
  """Number and mean error of the programs for which both compilers plan the same memory."""
  same = np.abs(rows["planned_memory"] - 1) <= _SAME_PLAN
  if not same.any():
    return "0"
  programs = part({column: values[same] for column, values in rows.items()}, target, "cycles")
  return f"{same.sum()}, {programs.errors(fit([programs])).mean():.1%}"


def tried_table(recorded: Mapping[str, Any]) -> str:
  """Mean errors of all methods, their numbers fitted to other operations or to the operation."""
  generations = {
    target: operations
    for target, operations in by_generation(recorded).items()
    if len(operations) > 1
  }
  lines = []
  for method in METHODS:
    cells = [method]
    for target, operations in generations.items():
      fits = left_out(operations, target, method).values()
      others = [operation.errors(fitted).mean() for operation, fitted in fits]
      itself = [operation.errors(fit([operation])).mean() for operation, _ in fits]
      cells.append(f"{np.mean(others):.0%}, {np.mean(itself):.1%}")
    lines.append(cells)
  return pages.table(["time is made of", *map(_short, generations)], lines)


def kinds_table(recorded: Mapping[str, Any]) -> str:
  """Kernels with and without products, and the peak of the memory, by operation."""
  lines = []
  for target, operations in by_generation(recorded).items():
    for name, rows in operations.items():
      programs = part(rows, target, _KINDS)
      fitted, terms = fit([programs]), programs.terms
      seconds = rows["bytes"] / costs.DEVICES[target].bandwidth
      lines.append(
        [
          _short(target),
          _spoken(name),
          f"{np.median(terms[0] / rows['cycles']):.0%}",
          *(f"{1e6 * number:.2f}" if term.any() else "-" for number, term in zip(fitted, terms)),
          f"{programs.errors(fitted).mean():.1%}",
          f"{np.median(1e3 * seconds / programs.ms):.0%}",
        ]
      )
  return pages.table(
    [
      "TPU",
      "operation",
      "cycles in kernels of products",
      "ms of a million of them",
      "ms of a million others",
      "mean error",
      "bytes at the peak / measured time",
    ],
    lines,
  )


def without_table(recorded: Mapping[str, Any]) -> str:
  """Programs that were not compiled or have no estimate, by operation and reason."""
  lines = []
  for name, row in recorded["operations"].items():
    target, operation = name.split()
    reasons = [
      *((count, reason) for reason, count in row["without_estimate"].items()),
      *((count, f"not compiled: {reason}") for reason, count in row["failed"].items()),
    ]
    compiled = len(row["programs"]) + sum(row["without_estimate"].values())
    lines.append(
      [
        _short(target),
        _spoken(operation),
        str(row["distinct"]),
        str(compiled),
        str(len(row["programs"])),
        "; ".join(f"{count} {reason}" for count, reason in sorted(reasons, reverse=True)),
      ]
    )
  return pages.table(
    [
      "TPU",
      "operation",
      "programs",
      "compiled",
      "with an estimate",
      "without: what the compiler does not estimate",
    ],
    lines,
  )


def _short(target: str) -> str:
  return target.removeprefix("tpu:")


def _spoken(operation: str) -> str:
  return operation.replace("_", " ")


def compile_all(work: tokamax_ops.Work) -> None:
  """Compiles the programs of this command in processes of their own, one after the other."""
  while status := subprocess.run(
    [sys.executable, "-m", "benchmarks.measured_ops", *sys.argv[1:], "--worker"],
    env=os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
  ).returncode:
    begun = label_file.interrupted(work.path) if status < 0 else None
    if begun is None:
      sys.exit(f"error: the compiling process ended with status {status}")
    error = f"the compiler ended its process with status {status}"
    label_file.append(work.path, begun | {"error": error})


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data", type=Path, help="folder of caches (default: tokamax' own)")
  parser.add_argument("--work", required=True, type=Path, help="folder of compiled programs")
  parser.add_argument("--sample", type=int, help="most programs of a file (default: all)")
  parser.add_argument("--timeout", type=int, default=300, help="seconds to compile a program")
  parser.add_argument("--times", type=Path, help="also write the factors, such as cycle_times.json")
  parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.data is None:
    args.data = Path(importlib.util.find_spec("tokamax").origin).parent / "data" / "autotuning"
  programs, without = tokamax_ops.read(args.data)
  if not programs:
    parser.error(f"--data={args.data} has no times of TPUs, expected DEVICE/OPERATION.json")
  work = tokamax_ops.Work(args.work)
  if args.worker:
    flags.FLAGS(sys.argv[:1])  # which tokamax would parse otherwise
    return work.compile(tokamax_ops.sample(programs, args.sample), args.timeout)
  if args.sample != 0:
    compile_all(work)
  results = record(programs, without, work)
  timing.write(results, args.out)
  if args.times:
    args.times.write_text(json.dumps(times(results), indent=2) + "\n")
  tables = worth_table, table, tried_table, kinds_table, without_table
  print("\n\n".join(table(results) for table in tables))


if __name__ == "__main__":
  main()
