"""Compares simulated times of final schedules with times that others measured on TPUs.

    python -m venv ENV
    ENV/bin/pip install '.[tpu]' 'tokamax>=0.0.12'
    ENV/bin/python -m benchmarks.measured_programs --data DIR --work WORK --sample 12 \
        --out benchmarks/measured_programs.json

`DIR` has measured programs as `measured_sources.py` describes: JAXBench's workloads on v6e,
products on v5e and v6e, tokamax' kernels on v5e, v5p, v6e and 7x, and a corpus on v6e. They are
compiled for the TPU on which they were measured, by the libtpu at hand; `WORK` keeps what it wrote,
so that a command that was stopped goes on. `--sample` is the number of products of each TPU, and of
tokamax' programs of each TPU and operation, drawn with `--seed`; all others are compiled.
`--choices` is the number of arguments for which all ways to compute an operation are compiled.
`--keys` is the number of arguments, those that run shortest, for which candidates of block sizes
are compiled. `--only corpus/` is the record of the corpus, `measured_corpus.json`.

With `--tokamax`, a clone of tokamax' repository, its kernels are those of the version that was
measured. `--before 2026-04-01` takes only those that were measured before this day: a first run in
an environment with an earlier jax and libtpu compiles them. `--fit` writes the constants of
`tuning/schedule`. Only the times are measured.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import itertools
import json
import math
from pathlib import Path
import sys
from typing import Any

from absl import flags
import numpy as np
from scipy import stats

from benchmarks import compiled, cycle_times, measured_sources, pages, timing
from benchmarks.measured_sources import CORPUS, JAXBENCH, PRODUCTS, TOKAMAX
from benchmarks.tokamax_history import History
from tpugraphs_jax.hlo import tpu_kernels
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.tuning import costs
from tpugraphs_jax.tuning.schedule import program
from tpugraphs_jax.tuning.schedule.chips import Chip, chips, CONSTANTS

# Workloads of JAXBench whose attention the compiler of the measurement made of other kernels:
# today's makes `online-softmax` of it, in fewer passes over the memory.
ATTENTION = ("1p_", "3p_", "5p_", "7p_")
_METHODS = {"simulated": "simulated time", "roofline": "roofline", "cycles": "estimated cycles"}
_ENDS = (0.05, 0.95)
# Values of the constants that the fit tries, in all combinations; `rows` are parts of the published
# ones. The factor of all times changes the share, too: one above 1 stands for a smaller share at a
# lower clock.
_GRID = {
  "share": (0.85, 0.9, 0.95, 1.0, 1.05),
  "written": (0.8, 0.9, 1.0),
  "mixed": (0.75, 0.85, 1.0),
  "rows": (1.0,),
}
# On v6e fewer rows fit no better.
_GRID_7X = {
  "share": (0.65, 0.7, 0.75, 0.8),
  "written": (0.8, 1.0),
  "mixed": (0.85, 1.0),
  "rows": (0.7, 0.8, 0.9, 1.0),
}
# What leaving the published clock and rows, 90 % of the bandwidth, or one rate for all DMAs adds to
# the error of a fit: among constants that fit alike it chooses the nearest.
_PRIOR, _SHARE = 0.01, 0.9
# Clock in Hz, at which the fit begins, and rows that a matrix unit takes in a cycle. Both follow
# from the published peak of the core: it has four units of 128 x 128 on v5e and v5p, two of
# 256 x 256 on v6e and 7x.
_PUBLISHED = {
  "tpu:v5e": (1.5e9, 1.0),
  "tpu:v5p": (1.75e9, 1.0),
  "tpu:v6e": (1.75e9, 2.0),
  "tpu:7x": (2.2e9, 2.0),
}
_LONGEST = 20.0  # milliseconds of a program that a fit simulates many times
_FIRST = 5  # block sizes that a user would measure


@dataclasses.dataclass(frozen=True)
class Row:
  """A measured program beside its estimates, all in milliseconds; None where there is none."""

  program: measured_sources.Program
  simulated: float | None
  why: str
  roofline: float
  cycles: float | None  # of today's `estimate`, which makes milliseconds of the compiler's cycles
  stall: float  # share of waiting
  prepared: program.Simulation = dataclasses.field(repr=False, compare=False)

  @property
  def is_other_compiler(self) -> bool:
    """Whether the measured kernels were made by a compiler that makes others of attention."""
    return self.program.source == JAXBENCH and (
      self.program.variant == "baseline" and self.program.key.startswith(ATTENTION)
    )


def estimates(measured: measured_sources.Program, found: compiled.Compiled) -> Row:
  """The estimates of a compiled program."""
  module, target = found.parsed(), measured.target
  prepared = found.prepared(target)
  cycles = tpu_kernels.estimated_cycles(module)
  device = GENERATIONS[target]
  flops, moved = found.notes["flops"], found.notes["bytes_accessed"]
  roofline = 1e3 * max(flops / device.flops, moved / device.bandwidth)
  today = _today(target, cycles, found.notes)
  return timed(Row(measured, None, "", roofline, today, 0.0, prepared), chips()[target])


def timed(row: Row, chip: Chip) -> Row:
  """A row with the simulated time that some constants give."""
  time = row.prepared.time(chip)
  stall = sum(kernel.stall for kernel in time.kernels) + time.copy_stall
  return dataclasses.replace(
    row, simulated=time.milliseconds, why=time.why, stall=stall / max(time.cycles, 1)
  )


def _today(target: str, cycles: tpu_kernels.Cycles, notes: Mapping[str, Any]) -> float | None:
  """Milliseconds from the compiler's cycles, by factors of measured operations."""
  factors = cycle_times.times().get(target)
  if factors is None or not cycles.cycles:
    return None
  if cycle_times.unknown_work(cycles, notes["bytes_accessed"]):
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
  found = [getattr(row, method) for row in known]
  tau = float(stats.kendalltau(found, measured).statistic) if len(known) > 1 else None
  return {
    "programs": len(ratios),
    "factor": round(fitted, 3),
    "mean": round(float(wrong.mean()), 4),
    "median": round(float(np.median(wrong)), 4),
    "tau_b": None if tau is None else round(tau, 4),
    "measured_by_estimate": [round(float(x), 3) for x in np.quantile(1 / (fitted * ratios), _ENDS)],
  }


def points(target: str) -> list[Chip]:
  """The chips that the fit tries: all combinations of the grid."""
  clock, rows = _PUBLISHED[target]
  chip = dataclasses.replace(chips()[target], clock=clock)
  grid = _GRID | (_GRID_7X if target == "tpu:7x" else {})
  names, values = list(grid), itertools.product(*grid.values())
  tried = [dataclasses.replace(chip, **dict(zip(names, each))) for each in values]
  return [dataclasses.replace(each, rows=rows * each.rows) for each in tried]


@dataclasses.dataclass(frozen=True)
class Fit:
  """Constants that were fitted, and the factor by which they multiply times.

  Attributes:
    point: number of the chip among `points`.
    factor: of all simulated times: it changes the clock at constant bytes a cycle.
    error: the largest median error of a group.
  """

  point: int
  factor: float
  error: float

  def chip(self, tried: Sequence[Chip], source: str) -> Chip:
    """The constants with the factor in the clock and in the share of the bandwidth."""
    found = tried[self.point]
    clock, share = found.clock / self.factor, round(found.share / self.factor, 4)
    return dataclasses.replace(found, clock=round(clock, -6), share=share, source=source)


def fit(tried: Sequence[Chip], ratios: np.ndarray, groups: Sequence[str]) -> Fit:
  """The chip and the factor whose largest median error of a group is the smallest.

  The median, because some programs were measured with other kernels or with a longer launch.

  Args:
    tried: constants, at the published clock.
    ratios: simulated / measured time, `[chips, programs]`.
    groups: of the programs.
  """
  members = [np.array(groups) == name for name in sorted(set(groups))]
  best, least = Fit(0, 1.0, math.inf), math.inf
  published = max(chip.rows for chip in tried)
  for point, (chip, row) in enumerate(zip(tried, ratios)):
    factors = np.unique(1 / row)  # each makes the time of one program right
    factors = factors[factors >= chip.share]  # no share of the bandwidth is above 1
    if not len(factors):
      continue
    wrong = np.abs(factors[:, None] * row - 1)
    errors = np.max([np.median(wrong[:, inside], axis=1) for inside in members], axis=0)
    far = np.abs(np.log(factors)) + np.abs(chip.share / factors - _SHARE)
    far += (1 - chip.written) + (1 - chip.mixed) + (1 - chip.rows / published)
    judged = errors + _PRIOR * far
    place = int(judged.argmin())
    if judged[place] < least:
      least = judged[place]
      best = Fit(point, float(factors[place]), float(errors[place]))
  return best


def trial(rows: Sequence[Row], tried: Sequence[Chip]) -> np.ndarray:
  """Simulated / measured time of each program with each chip, `[chips, programs]`."""
  return np.array(
    [
      [row.prepared.time(chip).milliseconds / row.program.milliseconds for row in rows]
      for chip in tried
    ]
  )


def group(row: Row) -> str:
  """Programs that a fit leaves out together: a source, of tokamax an operation."""
  measured = row.program
  return f"{measured.source} {measured.group}" if measured.source == TOKAMAX else measured.source


def left_out(tried: Sequence[Chip], ratios: np.ndarray, groups: Sequence[str]) -> np.ndarray:
  """Simulated / measured time by constants fitted to the other groups; NaN where there are none."""
  result = np.full(ratios.shape[1], np.nan)
  for name in set(groups):
    inside = np.array(groups) == name
    if not inside.all():
      others = [other for other in groups if other != name]
      found = fit(tried, ratios[:, ~inside], others)
      result[inside] = found.factor * ratios[found.point, inside]
  return result


def interval(ratios: np.ndarray) -> tuple[float, float]:
  """The range of measured / simulated time of nine of ten programs, also of one more program.

  Args:
    ratios: simulated / measured time of programs that a fit left out.
  """
  low, high = np.quantile(1 / ratios, _ENDS, method="weibull")
  return round(float(low), 3), round(float(high), 3)


def inside(ratios: np.ndarray, groups: Sequence[str], names: Sequence[str]) -> dict[str, list[int]]:
  """How many programs of each group lie in the interval of the other half, and their number.

  Args:
    ratios: simulated / measured time of programs that a fit left out.
    groups: of the programs.
    names: of the programs; a checksum of the name tells the half.
  """
  half = np.array([hashlib.sha256(name.encode()).digest()[0] % 2 for name in names], bool)
  if len(set(groups)) < 2 or half.all() or not half.any():
    return {}
  is_inside = np.zeros(len(names), bool)
  for members in (half, ~half):
    low, high = interval(ratios[~members])
    is_inside[members] = (low <= 1 / ratios[members]) & (1 / ratios[members] <= high)
  return {
    name: [int(is_inside[np.array(groups) == name].sum()), groups.count(name)]
    for name in sorted(set(groups))
  }


def calibrate(rows: Sequence[Row]) -> tuple[Chip, dict[str, Any]]:
  """The constants of a generation, and what the record says of them."""
  rows = [row for row in rows if row.program.milliseconds <= _LONGEST]
  tried, groups = points(rows[0].program.target), [group(row) for row in rows]
  ratios = trial(rows, tried)
  found, without = fit(tried, ratios, groups), left_out(tried, ratios, groups)
  count = collections.Counter(groups)
  source = "fitted to " + ", ".join(f"{number} of {name}" for name, number in sorted(count.items()))
  ends = interval(without) if len(count) > 1 else (None, None)
  described = {
    "programs": dict(count),
    "error": round(found.error, 4),
    "left_out": {
      name: round(float(np.abs(without[np.array(groups) == name] - 1).mean()), 4)
      for name in sorted(count)
      if not np.isnan(without[np.array(groups) == name]).any()
    },
    "inside": inside(without, groups, [row.program.name for row in rows]),
  }
  chip = dataclasses.replace(found.chip(tried, source), low=ends[0], high=ends[1])
  return chip, {**described, **dataclasses.asdict(chip)}


def is_measured(row: Row) -> bool:
  """Whether the program has a measured time; candidates of block sizes have none."""
  return not math.isnan(row.program.milliseconds)


def block_sizes(rows: Sequence[Row], refused: Sequence[str]) -> list[dict[str, Any]]:
  """Where the block sizes that were measured as the best stand among candidates, by kernel.

  The place counts the best itself and every candidate whose simulated time is not larger.

  Args:
    rows: measured kernels and their candidates, the measured configuration among them.
    refused: names of programs that were not compiled.
  """
  found = []
  for measured in filter(is_measured, rows):
    tried = {
      row.program.variant: row.simulated
      for row in rows
      if row.program.base == measured.program.name and row.simulated
    }
    best = tried.pop(measured.program.variant, None)
    if best is None or not tried:
      continue
    times = list(tried.values())
    found.append(
      {
        "target": measured.program.target,
        "operation": measured.program.group,
        "measured": measured.program.milliseconds,
        "candidates": 1 + len(times),
        "refused": sum(name.startswith(f"{measured.program.name}/") for name in refused),
        "place": 1 + sum(time <= best for time in times),
        "by_first": round(best / min([best, *times]), 4),
        "spread": round(max(times) / min(times), 3),
      }
    )
  return found


def usable(rows: Sequence[Row]) -> list[Row]:
  """Rows with a time whose kernels and arguments are those that were measured.

  Of tokamax these are Pallas kernels: compilers make others of plain attention.
  """
  return [
    row
    for row in rows
    if row.simulated
    and is_measured(row)
    and row.program.is_exact
    and not row.is_other_compiler
    and not (row.program.source == TOKAMAX and not measured_sources.is_pallas(row.program.group))
  ]


def record(rows: Sequence[Row], refused: Mapping[str, str]) -> dict[str, Any]:
  """What the pages tell: JAXBench program by program, the others as errors of groups.

  Args:
    rows: of all compiled programs.
    refused: why others were not compiled, by name.
  """
  found = block_sizes(rows, list(refused))
  rows = [row for row in rows if is_measured(row)]
  products = [row for row in rows if row.program.source == PRODUCTS]
  kernels = [
    row
    for row in rows
    if row.program.source == TOKAMAX and not measured_sources.is_plain(row.program.group)
  ]
  groups: dict[str, list[Row]] = collections.defaultdict(list)
  for row in kernels:
    groups[f"{row.program.target} {row.program.group}"].append(row)
  return {
    "refused": dict(collections.Counter(refused.values())),
    "jaxbench": {
      row.program.name.partition("/")[2]: {
        "measured": row.program.milliseconds,
        **{method: getattr(row, method) and round(getattr(row, method), 4) for method in _METHODS},
        "stall": round(row.stall, 3),
        "why": row.why[:200],
        "other_compiler": row.is_other_compiler,
      }
      for row in rows
      if row.program.source == JAXBENCH
    },
    "jaxbench_summary": _methods(
      [row for row in rows if row.program.source == JAXBENCH and not row.is_other_compiler]
    ),
    "products": {
      target: _methods([row for row in products if row.program.target == target])
      for target in sorted({row.program.target for row in products})
    },
    "decisions": decisions(rows),
    "block_sizes": found,
    "tokamax": {name: _methods(members) for name, members in sorted(groups.items())},
    "corpus": {
      row.program.name.partition("/")[2]: {
        "program": row.program.variant,
        "kind": row.program.group,
        "arguments": row.program.key,
        "measured": row.program.milliseconds,
        "simulated": row.simulated and round(row.simulated, 4),
        "why": row.why[:200],
      }
      for row in rows
      if row.program.source == CORPUS
    },
  }


def decisions(rows: Sequence[Row]) -> list[dict[str, Any]]:
  """What simulated time would choose among ways to compute the same, and what that costs.

  The regret is the measured time of the choice by that of the fastest way, minus 1. Ways without a
  simulated time cannot be chosen; the regret counts them. `apart` is the mean error of simulated
  times by that of the fastest way with a time.
  """
  by_name = {row.program.name: row for row in rows}
  found = []
  for group in measured_sources.choices([row.program for row in rows]):
    ways = [by_name[program.name] for program in group]
    timed = [way for way in ways if way.simulated]
    if not timed:
      continue
    chosen = min(timed, key=lambda way: way.simulated or math.inf)
    fastest = min(way.program.milliseconds for way in ways)
    best = min(timed, key=lambda way: way.program.milliseconds)
    apart = [
      (way.simulated / best.simulated) / (way.program.milliseconds / best.program.milliseconds) - 1
      for way in timed
      if way is not best
    ]
    kinds = {_way(way) for way in ways}
    found.append(
      {
        "target": ways[0].program.target,
        "choice": " or ".join(sorted(kinds)) if len(kinds) > 1 else f"block sizes, {kinds.pop()}",
        "ways": len(ways),
        "timed": len(timed),
        "spread": round(max(way.program.milliseconds for way in ways) / fastest - 1, 4),
        "regret": round(chosen.program.milliseconds / fastest - 1, 4),
        "apart": round(float(np.abs(apart).mean()), 4) if apart else None,
      }
    )
  return found


def _way(row: Row) -> str:
  """How an operation is computed."""
  program = row.program
  if program.source == JAXBENCH:
    return f"JAXBench's {'plain' if program.variant == 'baseline' else 'Pallas'}"
  return program.group.replace("pallas_mosaic_tpu", "Pallas").replace("_", " ")


def decisions_table(found: Mapping[str, Any]) -> str:
  """Choices by kind: how often the fastest way is chosen, and the regret."""
  kinds = collections.defaultdict(list)
  for each in found["decisions"]:
    kinds[each["target"], each["choice"]].append(each)
  lines = []
  for (target, choice), rows in sorted(kinds.items()):
    regrets, spreads = ([each[name] for each in rows] for name in ("regret", "spread"))
    apart = [each["apart"] for each in rows if each["apart"] is not None]
    lines.append(
      [
        target.removeprefix("tpu:"),
        choice,
        str(len(rows)),
        f"{sum(each['timed'] for each in rows)} of {sum(each['ways'] for each in rows)}",
        f"{sum(regret == 0 for regret in regrets)} of {len(rows)}",
        f"{np.mean(regrets):.1%}, {max(regrets):.1%}",
        f"{np.mean(spreads):.1%}",
        f"{np.mean(apart):.1%}" if apart else "",
      ]
    )
  head = ["TPU", "choice", "arguments", "ways with a time", "fastest chosen"]
  head += ["measured regret: mean, largest", "slowest / fastest - 1"]
  return pages.table([*head, "error of times by that of the fastest"], lines)


def block_sizes_table(found: Mapping[str, Any]) -> str:
  """The place of the measured block sizes among candidates, kernel by kernel."""
  lines = [
    [
      row["target"].removeprefix("tpu:"),
      row["operation"].replace("_", " "),
      f"{row['measured']:.3f}",
      str(row["candidates"]),
      str(row["refused"]),
      str(row["place"]),
      f"{row['by_first'] - 1:.1%}",
      f"{row['spread']:.2f}",
    ]
    for row in found["block_sizes"]
  ]
  first = sum(row["place"] <= _FIRST for row in found["block_sizes"])
  head = ["TPU", "kernel", "measured, ms", "candidates with a time", "without"]
  head += [f"place ({first} of {len(lines)} among the first {_FIRST})"]
  return pages.table([*head, "simulated time above the first", "slowest / fastest"], lines)


def _methods(rows: Sequence[Row]) -> dict[str, Any]:
  """The summary of each method: simulated time as it is, the others with the factor that fits."""
  return {
    "asked": len(rows),
    **{
      method: summary(rows, method, 1.0 if method == "simulated" else None) for method in _METHODS
    },
  }


def _cells(methods: Mapping[str, Any]) -> list[str]:
  cells = []
  for method in _METHODS:
    found = methods[method]
    if not found["programs"]:
      cells += ["0", ""]
      continue
    cells.append(f"{found['programs']} of {methods['asked']}")
    tau = "-" if found["tau_b"] is None else f"{found['tau_b']:.3f}"
    cells.append(f"{found['mean']:.1%}, {found['median']:.1%}, {tau}")
  return cells


def summary_table(found: Mapping[str, Any]) -> str:
  """Errors of simulated times, of the roofline and of estimated cycles, by source."""
  rows = [
    ["v6e", "JAXBench, without other compilers' attention", *_cells(found["jaxbench_summary"])]
  ]
  for target, methods in found["products"].items():
    rows.append([target.removeprefix("tpu:"), "products", *_cells(methods)])
  for name, methods in found["tokamax"].items():
    target, _, operation = name.partition(" ")
    title = operation.replace("_", " ")
    rows.append([target.removeprefix("tpu:"), title, *_cells(methods)])
  head = ["TPU", "programs"]
  for method in _METHODS.values():
    head += [f"{method}: with a time", "mean, median error, tau-b"]
  return pages.table(head, rows)


def jaxbench_table(found: Mapping[str, Any]) -> str:
  """JAXBench program by program: measured milliseconds, and estimates by measured time."""
  lines = []
  for name, row in found["jaxbench"].items():
    by = lambda method: f"{row[method] / row['measured']:.2f}" if row[method] else "-"
    workload, _, variant = name.rpartition(".")
    note = "another compiler's attention" if row["other_compiler"] else row["why"]
    kind = "plain" if variant == "baseline" else "Pallas"
    cells = [workload.replace("_", " "), kind, f"{row['measured']:.3f}", *map(by, _METHODS)]
    lines.append([*cells, f"{row['stall']:.0%}", note])
  head = ["workload", "", "measured, ms", "simulated / measured", "roofline", "estimated cycles"]
  return pages.table([*head, "waits for memory", "note"], lines)


def constants_table(found: Mapping[str, Any]) -> str:
  """The constants of each generation, and errors of sources that their fit left out."""
  lines = [
    [
      target.removeprefix("tpu:"),
      f"{row['clock'] / 1e9:.3f}",
      f"{row['share']:.0%}",
      f"{row['written']:.0%}",
      f"{row['mixed']:.0%}",
      f"{row['rows']:.2f}",
      f"{row['latency']:.0f}, {row['latency_written']:.0f}",
      f"{row['start']:.0f}",
      f"{row['wait']:.0f}",
      f"{row['error']:.1%}",
      ", ".join(f"{name} {error:.1%}" for name, error in row["left_out"].items()),
      " to ".join(f"{row[end]:.2f}" for end in ("low", "high") if row[end]),
      ", ".join(f"{name} {inside} of {all_}" for name, (inside, all_) in row["inside"].items()),
    ]
    for target, row in found["constants"].items()
  ]
  head = ["TPU", "clock, GHz", "share of HBM", "written", "mixed", "rows a cycle"]
  head += [
    "latency from and to the HBM, cycles",
    "between starts, cycles",
    "wait, cycles",
    "largest median error of a source",
    "mean error of sources left out",
  ]
  head += ["measured / simulated, 9 of 10", "inside"]
  return pages.table(head, lines)


def corpus_table(found: Mapping[str, Any]) -> str:
  """The corpus program by program, and the errors of its two kinds."""
  lines = [
    [
      row["program"],
      row["arguments"],
      f"{row['measured']:.4g}",
      f"{row['simulated'] / row['measured']:.2f}" if row["simulated"] else "-",
      row["why"],
    ]
    for _, row in sorted(found["corpus"].items())
  ]
  for kind in sorted({row["kind"] for row in found["corpus"].values()}):
    rows = [row for row in found["corpus"].values() if row["kind"] == kind]
    wrong = [abs(row["simulated"] / row["measured"] - 1) for row in rows if row["simulated"]]
    said = f"mean error {np.mean(wrong):.1%}, largest {max(wrong):.1%}" if wrong else ""
    lines.append([f"all of {kind}", f"{len(wrong)} of {len(rows)} with a time", "", "", said])
  return pages.table(["program", "arguments", "measured, ms", "simulated / measured", ""], lines)


TABLES = (
  summary_table,
  jaxbench_table,
  decisions_table,
  block_sizes_table,
  constants_table,
  corpus_table,
)


def write_constants(found: Mapping[str, Any], path: Path) -> None:
  """Replaces the constants of the fitted generations in a file of all generations."""
  fields = [field.name for field in dataclasses.fields(Chip)]
  constants = json.loads(path.read_text())
  for target, row in found.items():
    constants[target] = {field: row[field] for field in fields}
  path.write_text(json.dumps(constants, indent=2) + "\n")


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data", required=True, type=Path, help="folder of measured programs")
  parser.add_argument("--work", required=True, type=Path, help="folder of compiled programs")
  parser.add_argument("--sample", type=int, default=12, help="programs of each TPU and operation")
  parser.add_argument("--choices", type=int, default=0, help="choices of each TPU and operation")
  parser.add_argument("--keys", type=int, default=0, help="of each TPU and kernel, of block sizes")
  parser.add_argument("--seed", type=int, default=0, help="of the sample")
  parser.add_argument("--timeout", type=int, default=900, help="seconds to compile a program")
  parser.add_argument("--only", default="", help="programs whose name contains this text")
  parser.add_argument("--compiled", action="store_true", help="compiles nothing")
  parser.add_argument("--fit", action="store_true", help="also fits the constants, and keeps them")
  parser.add_argument("--tokamax", type=Path, help="clone: kernels of the measured version")
  parser.add_argument("--before", default="", help="only kernels measured before this day")
  parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--commit", default="", help=argparse.SUPPRESS)
  parser.add_argument("--flags", default="", help=argparse.SUPPRESS)
  args = parser.parse_args()
  try:
    history = History(args.tokamax) if args.tokamax else None
  except FileNotFoundError as error:
    parser.error(str(error))
  measured = measured_sources.read(args.data, history)
  programs = measured_sources.sample(measured, args.sample, args.seed)
  programs += measured_sources.sample_choices(measured, args.choices, args.seed)
  tuned = measured_sources.shortest(measured, args.keys)
  programs += tuned
  if not args.commit:  # the installed version makes the candidates
    programs += [each for best in tuned for each in measured_sources.candidates(best, args.seed)]
  programs = list({each.name: each for each in programs}.values())
  programs = [each for each in programs if args.only in f"{each.name} {each.target}"]
  if args.before:
    programs = [each for each in programs if each.day and each.day < args.before]
  if not programs:
    parser.error(f"--data={args.data} has no measured programs, expected one of its folders")
  work = compiled.Folder(args.work)
  if args.worker:
    flags.FLAGS(["worker"])  # which tokamax would parse otherwise
    if history and args.commit:
      sys.path.insert(0, str(history.unpack(args.commit, args.work)))
    same = [each for each in programs if (each.commit, each.flags) == (args.commit, args.flags)]
    return work.work(((each.name, each.compile) for each in same), args.timeout)
  kinds = {(each.commit, each.flags) for each in programs}
  for commit, flags_ in () if args.compiled else sorted(kinds):
    names = [each.name for each in programs if (each.commit, each.flags) == (commit, flags_)]
    work.compile(names, [f"--commit={commit}", f"--flags={flags_}"], flags_)
  read = {each.name: (each, work.read(each.name)) for each in programs}
  rows = [estimates(measured, each) for measured, each in read.values() if each is not None]
  refused = {name: work.refusal(name) for name in read if work.refusal(name)}
  versions = [each.notes["libtpu"] for _, each in read.values() if each is not None]
  found: dict[str, Any] = {
    "libtpu": sorted(set(versions)),
    "sample": None if args.compiled else args.sample,
    "seed": args.seed,
  }
  before = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
  found["constants"] = before.get("constants", {})
  if args.fit:
    for target in sorted({each.program.target for each in usable(rows)}):
      chip, described = calibrate([each for each in usable(rows) if each.program.target == target])
      found["constants"][target] = described
      rows = [timed(each, chip) if each.program.target == target else each for each in rows]
      print(target, described, flush=True)
    write_constants(found["constants"], CONSTANTS)
  found |= record(rows, refused)
  timing.write(found, args.out)
  print("\n\n".join(each(found) for each in TABLES))


if __name__ == "__main__":
  main()
