"""What a function costs on TPUs, as text, as tables of a notebook, and as a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax

from tpugraphs_jax.hlo import integers, names, topology, tpu
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.infra import console, files, trust
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning import costs, page
from tpugraphs_jax.tuning.costs import TargetEstimate
from tpugraphs_jax.tuning.schedule import chips
from tpugraphs_jax.version import __version__

_KIND, _VERSION = "estimates of tpugraphs_jax", 2  # of a file
_LARGEST = 1 << 26  # bytes of a file
_DEAREST = 10
_DEAR, _FAR = 0.1, 10.0  # share of the time, and times of the least time, that a note tells
_SHORT = 0.005  # milliseconds of a call, which its loop and its waits explain
# Where the arrays of a kernel are on the chip, operations that need less of its time say nothing.
_LEAST_PART = 1e-3
_SMALL, _SLOW = 1 << 14, 2.0  # bytes of a copy, and times of the least time, that a note tells
_NAMED = 3  # kernels, or assumptions, in a sentence
_LARGEST_BUFFERS = 5
_GIB = 2**30
_CAPTURED = 2**24  # bytes of code from which it has captured arrays
_FITS = {True: "yes, {}{:.4g} GiB", False: "no, {}{:.4g} GiB", None: ""}


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate(page.Page):
  """What a function costs, as text and as tables of a notebook.

  Attributes:
    name: of the function.
    rows: one for each generation.
    versions: of jax and libtpu.
    about: sentences about the function, such as what of it is left out.
    devices: of the mesh of the function; 1 without one.
  """

  name: str
  rows: tuple[TargetEstimate, ...]
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  about: tuple[str, ...] = ()
  devices: int = 1

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a file with which another estimate can be compared; `load` reads it."""
    save([self], path)

  def _tables(self) -> list[Table]:
    """A row for each generation; then the dearest kernels and the changes of layout of each."""
    head = (
      "|ms|9 of 10|bound by|waits|layouts|M cycles|GB|arguments|temporaries|captured|fits"
    ).split("|")
    where = (
      "for one device"
      if self.devices == 1
      else f"for one of the {self.devices} devices of its mesh"
    )
    title = f"{self.name}: estimates from what the TPU compiler makes of it, {where}"
    tables = [Table(head, [_cells(row) for row in self.rows], title)]
    for row in self.rows:
      tables += [_communication(row)] * bool(row.communication)
      tables += [_kernels(row)] if row.kernels else []
      tables += [_moves(row)] if row.moves_ms else []
      tables += [_buffers(row)] * bool(row.live.buffers)
    return tables

  def _page_tables(self) -> list[Table]:
    """Without tables of kernels and buffers: the page shows all of them."""
    communication = (_communication(row) for row in self.rows if row.communication)
    return [self._tables()[0], *communication]

  def _title(self) -> str:
    return f"{self.name}: what it costs on a TPU"

  def _steps(self) -> list[page.Step]:
    return [page.Step(row.target, row) for row in self.rows]

  def _verdict(self) -> Iterator[str]:
    return map(page.verdict, self._steps())

  def __str__(self) -> str:
    told = (step for step in self._steps() if step.row.milliseconds and step.row.kernels)
    return "\n\n".join([*map(page.verdict, told), super().__str__()])

  def _notes(self) -> Iterator[str]:
    """What the estimates leave out, what they come from, and why some are missing."""
    for row in self.rows:
      short = row.target
      if row.why:
        yield f"{short}: no time, because {row.why}"
      else:
        yield f"{short}: {_basis(row, self.versions)}"
      if row.bounded_ms and not row.why:
        yield f"{short}: {_bounded(row)}"
      for kernel, ratio in _far_from_work(row):
        yield (
          f"{short}: {' '.join(filter(None, _place(kernel)))} takes {ratio:,.0f} times what its "
          f"bytes and operations need at the peak of the device; {kernel.bound} bounds it"
        )
      for kernel, ratio in _in_small_copies(row):
        yield (
          f"{short}: {' '.join(filter(None, _place(kernel)))} starts {kernel.dmas:,} copies, each "
          f"with about {_of_copy(kernel):,.0f} bytes of traffic; it takes {ratio:.1f} times what "
          "its bytes and operations need at the peak of the device"
        )
      if formulas := [one.name for one in row.communication if one.why]:
        yield f"{short}: by a formula: {', '.join(formulas[:_NAMED])}"
      if row.communication and not row.why:
        links = chips.chips()[row.generation].link
        yield f"{short}: the links between chips: {links.source}; DCN between slices is left out"
      if row.milliseconds and row.loading_ms > costs.MATTERS * row.milliseconds:
        yield (
          f"{short}: {console.size(row.loaded)} of arguments are on the chip when it starts, where "
          f"the run before was of the same program; the first takes up to {row.loading_ms:.3g} ms "
          "longer"
        )
      if row.assumed:
        yield f"{short}: {_assumed(row)}"
      if row.branches:
        counted = (
          "1 conditional count, though one"
          if row.branches == 1
          else f"{row.branches} conditionals count, though one of each"
        )
        yield f"{short}: all branches of {counted} runs"
      for made_of, steps in row.loops:
        name = f"{names.operation(made_of.name)} {made_of.where}".strip()
        yield f"{short}: the compiler made a loop of {steps:,.0f} steps of {name}"
    yield from self.about


def _basis(row: TargetEstimate, versions: Mapping[str, str]) -> str:
  """What a time and its interval come from."""
  source = f"from the schedules of its kernels (constants: {chips.chips()[row.generation].source})"
  ends = costs.spread(row.generation)
  if ends is None:
    return f"{source}; no interval, because no other program was measured on it"
  return (
    f"{source}; measured programs took {ends[0]:.2f} to {ends[1]:.2f} of such estimates, 9 of "
    "10, most of them made by other versions of the compiler than that of these schedules, libtpu "
    f"{versions.get('libtpu', '')}"
  )


def _bounded(row: TargetEstimate) -> str:
  """Which kernels count with a bound."""
  assert row.milliseconds is not None
  bounded = [kernel for kernel in row.kernels if kernel.is_bound]
  named = [f"{' '.join(filter(None, _place(kernel)))} ({kernel.why})" for kernel in bounded]
  return (
    f"{len(bounded)} kernels count with their bytes and operations at the peak of the device, or "
    f"the cycles of the compiler: {row.bounded_ms:.3g} ms, "
    f"{row.bounded_ms / row.milliseconds:.1%}; the interval has up to ten times that: "
    f"{'; '.join(named[:_NAMED])}"
  )


def _dear(row: TargetEstimate) -> Iterator[tuple[costs.KernelCost, float]]:
  """Kernels of XLA that take much of the time, and how many times what their work needs.

  Custom calls do not tell their operations. Of kernels without operations whose arrays are on the
  chip nothing is counted.
  """
  for kernel in row.kernels:
    spent, calls = kernel.milliseconds or 0.0, kernel.calls or 1
    is_dear = row.milliseconds and spent > max(_DEAR * row.milliseconds, _SHORT * calls)
    least = costs.least_ms(row.generation, kernel.flops, kernel.bytes_accessed)
    is_counted = kernel.bytes_accessed or least > _LEAST_PART * spent
    if is_dear and is_counted and not (kernel.is_bound or kernel.is_custom):
      yield kernel, spent / least


def _far_from_work(row: TargetEstimate) -> list[tuple[costs.KernelCost, float]]:
  """Dear kernels that take many times what their bytes and operations need, and how many times."""
  return [(kernel, ratio) for kernel, ratio in _dear(row) if ratio > _FAR][:_NAMED]


def _in_small_copies(row: TargetEstimate) -> list[tuple[costs.KernelCost, float]]:
  """Dear kernels whose time is that of many small copies, such as a gather of rows."""
  is_small = lambda kernel: kernel.dmas and _of_copy(kernel) < _SMALL
  found = [(kernel, ratio) for kernel, ratio in _dear(row) if ratio > _SLOW and is_small(kernel)]
  return found[:_NAMED]


def _of_copy(kernel: costs.KernelCost) -> float:
  """Bytes of traffic of a copy of a kernel, in the mean; one from HBM to HBM counts twice."""
  return (kernel.bytes_accessed + kernel.vmem_bytes) / kernel.dmas


_MEANINGS = {
  integers.INDEX: "an index is uniform over {}",
  integers.POSITION: "a position is the middle of {}",
  integers.GROUPS: "groups share {} rows equally",
  integers.LENGTHS: "a length is half of {}",
  integers.STARTS: "sequences share {} rows equally",
  integers.COUNT: "a count is {}",
  integers.ITERATIONS: "a loop has {} iterations",
}


def _assumed(row: TargetEstimate) -> str:
  """Which integers are assumed, and what other values would change."""
  texts = {
    f"{_MEANINGS[meaning.kind].format(' x '.join(map(str, meaning.limits)))} ({meaning.reader})"
    for meaning in row.assumed.values()
  }
  named = sorted(texts)
  more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
  text = f"of integers without values {', '.join(named[:_NAMED])}{more} is assumed"
  if row.extremes:
    low, high = row.extremes
    return (
      f"{text}; with equal indices, first positions, all rows in one group and one iteration the "
      f"time is {low:.3g} ms, with different indices, last positions, unequal groups and 100 "
      f"iterations {high:.3g} ms"
    )
  return text


def _cells(row: TargetEstimate) -> list[str]:
  number = lambda value, scale: "" if value is None else f"{value / scale:.3g}"
  share = lambda value: "" if value is None else f"{value:.0%}"
  gib = lambda value: f"{value / _GIB:.3g} GiB"
  memory, ms = row.memory, row.milliseconds
  least = f"at least {row.least_ms:.3g}" if ms is None and row.least_ms else ""
  bound = row.bound
  if ms and row.groups:
    bound += f" {next(iter(row.groups.values())) / ms:.0%}"
  return [
    row.target,
    least or number(ms, 1),
    " to ".join(f"{end:.3g}" for end in row.interval or ()),
    bound,
    share(row.waits),
    share(row.moves_ms / ms) if ms and row.moves_ms else "",
    number(row.cycles, 1e6),
    number(row.bytes_accessed, 1e9),
    gib(memory.arguments) if memory else "",
    gib(memory.temporaries) if memory else "",
    gib(memory.code) if memory and memory.code > _CAPTURED else "",
    _fits(row),
  ]


def _fits(row: TargetEstimate) -> str:
  memory = GENERATIONS[row.generation].memory
  needed = f"{row.needed / _GIB:.4g} of " if row.needed and row.memory is None else ""
  return _FITS[row.fits].format(needed, memory / _GIB)


def _kernels(row: TargetEstimate) -> Table:
  """The dearest kernels of a row; those of one operation and line are one of the table."""
  total = row.milliseconds or row.least_ms or 0.0
  cycles = lambda kernel: "" if kernel.cycles is None else f"{kernel.cycles / 1e6:.3g}"
  by_time = bool(total)
  lines = sorted(map(_added_up, page.by_line(row.kernels)), key=_dearness, reverse=True)
  cells = []
  for kernel in lines[:_DEAREST]:
    part = kernel.milliseconds or 0.0 if by_time else kernel.cycles or 0
    cells.append(
      [
        f"{part / (total or row.cycles or 1):.1%}",
        "" if kernel.milliseconds is None else f"{kernel.milliseconds:.3g}",
        f"{kernel.calls:g}" if kernel.calls and kernel.calls != 1 else "",
        kernel.bound,
        "" if kernel.stall is None else f"{kernel.stall:.0%}",
        cycles(kernel),
        *_place(kernel),
        kernel.why and f"{'a bound' if kernel.is_bound else 'no time'}: {kernel.why}",
      ]
    )
  every = f"{sum(not kernel.is_loop for kernel in row.kernels)} kernels"
  of = every if len(lines) == len(row.kernels) else f"{len(lines)} lines with {every}"
  title = f"{row.target}: the {len(cells)} dearest of {of}"
  if by_time:  # shares sum to 100 %
    rest = max(0.0, total - sum(kernel.milliseconds or 0.0 for kernel in lines[:_DEAREST]))
    others = len(lines) - len(cells)
    kind = "kernels" if of == every else "lines"
    what = f"{others} other {kind}, " * (others > 0) + "loop control and waits"
    cells.append([f"{rest / total:.1%}", f"{rest:.3g}", "", "", "", "", what, "", "", "", ""])
  head = "share|ms|calls|bound by|waits|M cycles|kernel|shape|scope|line|".split("|")
  return Table(head, cells, title)


def _dearness(kernel: costs.KernelCost) -> tuple[float, int]:
  return kernel.milliseconds or 0.0, kernel.cycles or 0


def _added_up(group: Sequence[costs.KernelCost]) -> costs.KernelCost:
  """A kernel with the time of all, and what the dearest one says."""
  if len(group) == 1:
    return group[0]
  first = max(group, key=_dearness)
  add = lambda numbers: sum(number or 0 for number in numbers)
  spent = add(kernel.milliseconds for kernel in group)
  waited = add((kernel.stall or 0.0) * (kernel.milliseconds or 0.0) for kernel in group)
  return dataclasses.replace(
    first,
    shape=f"{first.shape}, {len(group)} kernels",
    milliseconds=None if first.milliseconds is None else spent,
    cycles=add(kernel.cycles for kernel in group) or None,
    stall=waited / spent if spent and first.stall is not None else first.stall,
  )


def _communication(row: TargetEstimate) -> Table:
  """The collectives of a row, the longest exposed first."""
  cells = []
  for one in row.communication[:_DEAREST]:
    cells.append(
      [
        one.kind,
        ", ".join(one.axes),
        f"{one.size / 1e6:.3g}",
        f"{one.calls}" if one.calls > 1 else "",
        f"{one.milliseconds:.3g}",
        f"{one.exposed_ms:.3g}",
        one.operation,
        one.where,
        one.by + ": the whole array on every device" * one.is_full_copy,
        one.why and f"by a formula: {one.why}",
      ]
    )
  title = (
    f"{row.target}: the device waits {row.exposed_ms:.3g} ms for others"
    f"{_by_axes(row)}; the {len(cells)} longest of {len(row.communication)} collectives"
  )
  head = "collective|along|MB|calls|ms|exposed|operation|line|asked for by|".split("|")
  return Table(head, cells, title)


def _by_axes(row: TargetEstimate) -> str:
  """Exposed and hidden milliseconds along the axes of the mesh."""
  exposed: dict[str, float] = {}
  hidden: dict[str, float] = {}
  for one in row.communication:
    axes = " and ".join(one.axes) or "no axis"
    exposed[axes] = exposed.get(axes, 0.0) + one.exposed_ms
    hidden[axes] = hidden.get(axes, 0.0) + max(0.0, one.milliseconds - one.exposed_ms)
  parts = [f"{axes} {ms:.3g} and {hidden[axes]:.3g} hidden" for axes, ms in exposed.items()]
  return f" ({'; '.join(parts)})" if parts else ""


def _moves(row: TargetEstimate) -> Table:
  """The kernels that only change a layout, the dearest first."""
  moving = [(kernel, kernel.move) for kernel in row.kernels if kernel.move]
  total = row.milliseconds or row.least_ms or row.moves_ms
  cells = []
  for kernel, move in moving[:_DEAREST]:
    ms = kernel.milliseconds or 0.0
    what = [kernel.shape, move.change, move.of, kernel.scope, kernel.where, move.remedy]
    cells.append([f"{ms / total:.1%}", f"{ms:.3g}", *what])
  title = (
    f"{row.target}: {row.moves_ms:.3g} ms change layouts, in {len(moving)} kernels "
    f"that copy or transpose; the {len(cells)} dearest"
  )
  return Table("share|ms|shape|change|of|scope|line|may be removed by".split("|"), cells, title)


def _buffers(row: TargetEstimate) -> Table:
  """The largest buffers at the peak of a program's memory."""
  live = row.live
  largest = live.buffers[:_LARGEST_BUFFERS]
  title = (
    f"{row.target}: {live.peak_bytes / _GIB:.3g} GiB are live at the peak; the "
    f"{len(largest)} largest of {len(live.buffers)} buffers"
  )
  return page.buffers_table(largest, title)


def _place(kernel: costs.KernelCost) -> list[str]:
  return [kernel.operation, kernel.shape, kernel.scope, kernel.where]


def versions() -> dict[str, str]:
  """The versions on which an estimate depends."""
  return {"tpugraphs_jax": __version__, "jax": jax.__version__, "libtpu": tpu.libtpu_version()}


# What a file has. Numbers may be missing: of programs without a time, of kernels without schedules.
_NUMBER = (int, float, type(None))
_KERNEL = trust.Record(
  {
    **dict.fromkeys(("name", "operation", "scope", "where", "shape", "bound", "why"), str),
    **dict.fromkeys(("calls", "milliseconds", "stall", "cycles", "bytes_accessed"), _NUMBER),
  }
)
_ROW = trust.Record(
  {
    **dict.fromkeys(("target", "why"), str),
    **dict.fromkeys(("milliseconds", "cycles", "bytes_accessed", "flops"), _NUMBER),
    "kernels": [_KERNEL],
  }
)
_COLLECTIVE = trust.Record(
  {
    **dict.fromkeys(("name", "kind", "operation", "where", "by", "why"), str),
    **dict.fromkeys(("size", "calls", "milliseconds", "exposed_ms"), (int, float)),
    "axes": [str],
    "is_full_copy": bool,
  }
)
_PROGRAM = trust.Record(name=str, versions={...: str}, rows=[_ROW])
_FILE = trust.Record(kind=str, version=int, programs=[_PROGRAM])


def save(estimates: Sequence[Estimate], path: str | os.PathLike[str]) -> None:
  """Writes estimates into a file of JSON, which `load` reads."""
  programs = [
    {
      "name": estimate.name,
      "versions": dict(estimate.versions),
      "rows": list(map(_of_row, estimate.rows)),
    }
    for estimate in estimates
  ]
  files.write_json(path, {"kind": _KIND, "version": _VERSION, "programs": programs}, indent=1)


def _of_row(row: TargetEstimate) -> dict[str, Any]:
  kernels = [{name: getattr(kernel, name) for name in _KERNEL} for kernel in row.kernels]
  values = {name: getattr(row, name) for name in _ROW} | {"kernels": kernels}
  if row.communication:
    values["communication"] = [dataclasses.asdict(one) for one in row.communication]
    values["exposed_ms"] = row.exposed_ms
  return values


def load(path: str | os.PathLike[str]) -> list[Estimate]:
  """The estimates of a file, with times and kernels and without memory.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is another file, or damaged.
  """
  path = Path(path)
  files.check_file(path, "a file that estimate(...).save wrote")
  with trust.reading(path, "write it again with estimate(...).save"):
    if (size := path.stat().st_size) > _LARGEST:
      raise ValueError(f"it has {console.size(size)}, expected at most {console.size(_LARGEST)}")
    values = trust.parse(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or values.get("kind") != _KIND:
      raise ValueError(f"expected {_KIND}")
    if values.get("version") != _VERSION:
      raise ValueError(f"its version is {values.get('version')!r}, expected {_VERSION}")
    trust.check(values, _FILE, "file")
    return [_estimate(_printable(program)) for program in values["programs"]]


def _estimate(values: Mapping[str, Any]) -> Estimate:
  rows = []
  for row in values["rows"]:
    if topology.generation_of(row["target"]) not in GENERATIONS:
      raise ValueError(f"target {row['target']!r}, expected one of {', '.join(GENERATIONS)}")
    if (row["milliseconds"] is None) != bool(row["why"]):
      raise ValueError(f"a time {row['milliseconds']} with the reason {row['why']!r} for none")
    kernels = tuple(
      costs.KernelCost(**{name: kernel[name] for name in _KERNEL}) for kernel in row["kernels"]
    )
    rows.append(
      TargetEstimate(**{name: row[name] for name in _ROW} | {"kernels": kernels} | _exposed(row))
    )
  return Estimate(values["name"], tuple(rows), values["versions"])


def _exposed(row: Mapping[str, Any]) -> dict[str, Any]:
  """The collectives of a row of a file; rows of one device have none."""
  found, exposed = row.get("communication", []), row.get("exposed_ms", 0.0)
  trust.check(found, [_COLLECTIVE], "communication")
  trust.check(exposed, (int, float), "exposed_ms")
  communication = tuple(
    costs.CollectiveCost(**{name: one[name] for name in _COLLECTIVE} | {"axes": tuple(one["axes"])})
    for one in found
  )
  return {"communication": communication, "exposed_ms": exposed}


def _printable(value: Any) -> Any:
  """A value of JSON whose texts are lines, and whose numbers are finite and not negative."""
  if isinstance(value, dict):
    return {_printable(key): _printable(part) for key, part in value.items()}
  if isinstance(value, list):
    return [_printable(part) for part in value]
  if isinstance(value, (int, float)) and not 0 <= value < math.inf:
    raise ValueError(f"a number is {value}, expected a finite one that is not negative")
  return console.one_line(value) if isinstance(value, str) and value else value
