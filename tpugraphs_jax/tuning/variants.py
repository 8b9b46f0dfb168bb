"""Which variant of a step to run: the programs of a file on one target, as one table.

Each variant is compiled in a process of its own, and its line is added to a file of results. A
second call estimates only those that have no line, or whose source or versions changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import math
import os
from pathlib import Path
import signal

import jax

from tpugraphs_jax.hlo import calls, tpu
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.infra import console, files, machine, tasks, trust
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning import estimate, programs, summary
from tpugraphs_jax.tuning.costs import TargetEstimate
from tpugraphs_jax.tuning.page import Page

_MEMORY = 4 << 30  # bytes that a process and its compiler take for a step of a large model
_GIB = 2**30
_LARGEST = 3  # buffers that are named


@dataclasses.dataclass(frozen=True)
class Variant:
  """A variant of a step on a target.

  Attributes:
    name: of the program.
    fits: whether its memory fits on a device; None if that is unknown.
    needed: bytes of a device's memory; None if they are unknown.
    milliseconds: of a step; None without a time.
    exposed_ms: of these, in which the device waits for others.
    count: of examples or tokens of a step; None if the file does not say.
    unit: `example` or `token`.
    largest: the largest buffers at the peak of the memory, where it does not fit.
    why: why there is no time.
  """

  name: str
  fits: bool | None = None
  needed: int | None = None
  milliseconds: float | None = None
  exposed_ms: float = 0.0
  count: float | None = None
  unit: str = ""
  largest: tuple[str, ...] = ()
  why: str = ""

  @property
  def cost(self) -> float:
    """Milliseconds of an example or a token, or of a step where the file does not say how many."""
    return math.inf if self.milliseconds is None else self.milliseconds / (self.count or 1.0)


_SCHEMA = trust.Record(
  {
    **dict.fromkeys(("name", "unit", "why"), str),
    "fits": (bool, type(None)),
    **dict.fromkeys(("needed", "milliseconds", "count"), (int, float, type(None))),
    "exposed_ms": (int, float),
    "largest": [str],
  }
)
_LINE = trust.Record(key={...: str}, variant=_SCHEMA)


@dataclasses.dataclass(frozen=True, repr=False)
class Variants(Page):
  """Variants of a step, the cheapest that fits first.

  Attributes:
    target: such as `tpu:v6e:2x4`.
    variants: in the order of the table.
  """

  target: str
  variants: tuple[Variant, ...]

  def _tables(self) -> list[Table]:
    short, capacity = tpu.short_name(self.target), _memory(self.target)
    units = sorted({variant.unit for variant in self.variants if variant.unit})
    unit = units[0] if len(units) == 1 else "unit"
    head = f"variant|fits|GiB|ms|ms per 1000 {unit}s|exposed ms|largest buffers|".split("|")
    title = (
      f"{len(self.variants)} variants on {short}, the cheapest that fits first; a device has "
      f"{capacity / _GIB:.4g} GiB"
    )
    return [Table(head, [_cells(variant) for variant in self.variants], title)]

  def _title(self) -> str:
    return f"Variants on {tpu.short_name(self.target)}"

  def _verdict(self) -> Iterator[str]:
    return self._notes()

  def _notes(self) -> Iterator[str]:
    best = next((v for v in self.variants if v.fits and v.milliseconds is not None), None)
    if best is not None:
      yield f"{best.name} is the cheapest that fits"
    elif self.variants:
      yield "no variant both fits and has a time"


def _memory(target: str) -> int:
  return GENERATIONS[TargetEstimate(target).generation].memory


def _cells(variant: Variant) -> list[str]:
  number = lambda value: "" if value is None else f"{value:.4g}"
  by_unit = 1e3 * variant.cost if variant.count and variant.milliseconds is not None else None
  return [
    variant.name,
    {True: "yes", False: "no", None: ""}[variant.fits],
    "" if variant.needed is None else f"{variant.needed / _GIB:.4g}",
    number(variant.milliseconds),
    number(by_unit),
    number(variant.exposed_ms or None),
    "; ".join(variant.largest),
    variant.why and f"no time: {variant.why}",
  ]


def order(variants: Sequence[Variant]) -> tuple[Variant, ...]:
  """Variants that fit first, by their cost; those of unknown cost last, by their memory."""
  by_cost = lambda each: (each.fits is not True, each.cost, each.needed or 0)
  return tuple(sorted(variants, key=by_cost))


def of_row(row: TargetEstimate, program: programs.Program) -> Variant:
  """The variant of a row of an estimate."""
  named = [
    " ".join(
      filter(None, (console.size(buffer.size), buffer.shape, buffer.operation, buffer.where))
    )
    for buffer in row.live.buffers[:_LARGEST]
  ]
  return Variant(
    program.name,
    row.fits,
    row.needed,
    row.milliseconds,
    row.exposed_ms,
    program.count,
    program.unit,
    tuple(named) if row.fits is False else (),
    row.why,
  )


@dataclasses.dataclass(frozen=True)
class _Request:
  """A variant to estimate, as a process gets it."""

  source: str
  target: str
  timeout: float
  memory_only: bool
  results: str
  key: Mapping[str, str]
  caller: int  # number of the process that runs the command


def _estimate(request: _Request) -> str:
  """Estimates a variant and adds its line; its name."""
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  (program,) = programs.load(request.source)
  try:
    call = calls.Call(program.function, program.args, program.kwargs)
    # Of several processes, the one that started them says how far they are.
    with console.working(program.name, is_on=request.caller == os.getpid()):
      (row,) = estimate.estimate_call(
        call, [request.target], timeout=request.timeout, memory_only=request.memory_only
      ).rows
    variant = of_row(row, program)
  except Exception as error:  # a function of the user may raise anything
    variant = Variant(program.name, why=console.one_line(error))
  line = {"key": dict(request.key), "variant": dataclasses.asdict(variant)}
  files.append(Path(request.results), json.dumps(line).encode())
  return variant.name


def compare(
  source: str,
  target: str,
  results: Path,
  *,
  timeout: float,
  memory_only: bool = False,
  processes: int | None = None,
  beam: Sequence[str] | None = None,
) -> Variants:
  """Estimates every program of a source on a target.

  Args:
    source: of `programs.load`.
    target: as `topology.full_name` returns it.
    results: a file of lines, which are kept; those that it has are not estimated again.
    timeout: seconds for one compilation.
    memory_only: as of `estimate.estimate_call`; such lines are not those of estimates with times.
    processes: variants at a time; None: as many as cores and memory allow.
    beam: flags of Apache Beam; None: on this machine.

  Raises:
    ValueError: the file has other lines, or as `programs.load`.
    KeyboardInterrupt: Ctrl-C; the lines of variants that have ended are kept.
  """
  loaded = programs.load(source)
  keys = {program.source: _key(program.source, target, memory_only) for program in loaded}
  found = _read(results)
  requests = [
    _Request(place, target, timeout, memory_only, str(results), key, os.getpid())
    for place, key in keys.items()
    if _name(key) not in found
  ]
  fitting = max(1, min(len(os.sched_getaffinity(0)), machine.available() // _MEMORY))
  name = f"variants of {Path(source).name}"
  with console.working(name, total=len(keys), unit="variants") as work:
    work.update(len(keys) - len(requests))
    try:
      with tasks.stopping(signal.SIGINT, signal.SIGTERM):
        tasks.run(
          _estimate,
          requests,
          processes=processes or fitting,
          beam=beam,
          finished=lambda _: work.update(),
        )
    except SystemExit as error:
      if error.code == 128 + signal.SIGINT:
        raise KeyboardInterrupt from None
      raise
  found = _read(results)
  made = [found[_name(key)] for key in keys.values() if _name(key) in found]
  return Variants(target, order(made))


def _key(source: str, target: str, memory_only: bool) -> dict[str, str]:
  """All on which the line of a variant depends."""
  place = Path(source.rpartition(":")[0])
  named = f"{place.name}:{source.rpartition(':')[2]}"
  of_memory = {"asked": "memory"} if memory_only else {}
  program = {"source": named, "digest": files.digest_of(place), "target": target}
  return {**program, **of_memory, **summary.versions()}


def _name(key: Mapping[str, str]) -> str:
  return json.dumps(dict(key), sort_keys=True)


def _read(path: Path) -> dict[str, Variant]:
  """The variants of a file of results, by their keys; of two with one key the later."""
  found = {}
  with trust.reading(path, "name another file of results"):
    for line in files.lines(path):
      values = trust.parse(line)
      trust.check(values, _LINE, "line")
      variant = values["variant"] | {"largest": tuple(values["variant"]["largest"])}
      found[_name(values["key"])] = Variant(**{name: variant[name] for name in _SCHEMA})
  return found
