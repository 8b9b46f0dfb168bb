"""Time and memory of a function on TPUs, estimated by their compiler before a run.

    python -m tpugraphs_jax.estimate FILE.py:NAME --targets v5e v6e

It needs libtpu and no TPU. The compiler estimates cycles. `times.json` has the times of cycles in
measured programs (`benchmarks/measured_ops.py`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpugraphs_jax.hlo import proto
from tpugraphs_jax.infra import console, keywords
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning import programs, tpu, tpu_kernels

TARGETS = ("v5e", "v5p", "v6e", "7x")  # unless others are asked for
TIMES = Path(__file__).with_name("times.json")
_DEAREST = _NAMED = 5
_GIB = 2**30
_FITS = {True: "yes, {:.4g} GiB", False: "no, {:.4g} GiB", None: ""}
# Kinds of `tpu_kernels.Uncounted` whose time does not follow from the size of their results.
_NEVER_SMALL = ("loop", "kernel", "custom-call")
_SORT_PASSES = 100  # over the results of a sort, about log2(n)^2 / 2 of a bitonic one
# Share of a program's bytes that the other instructions without an estimate may write.
_SMALL_SHARE = 0.1
# At least this share of a program's bytes comes from the memory of a device; the rest stays on the
# chip: one of 828 measured programs took less time than 0.7 of its bytes at the peak.
_MOVED_SHARE = 0.7


@dataclasses.dataclass(frozen=True)
class Device:
  """A TPU device as jax and its compiler see it.

  Attributes:
    flops: peak of bfloat16 operations a second.
    bandwidth: bytes a second between the memory and the chip.
    memory: bytes of memory that the compiler may plan, as its refusals say (libtpu 0.0.42.1).
  """

  flops: float
  bandwidth: float
  memory: int


def _device(teraflops: float, gigabytes: float, gib: float, *, cores: int = 1) -> Device:
  """A device of jax from the figures of a chip, each of whose `cores` is a device."""
  return Device(1e12 * teraflops / cores, 1e9 * gigabytes / cores, round(gib * _GIB))


# Peaks of a chip as in Google's pages on each generation (docs.cloud.google.com/tpu/docs), for v2
# as in Jouppi et al. 2020, "A Domain-Specific Supercomputer for Training Deep Neural Networks".
DEVICES = {
  "tpu:v2": _device(46, 700, 7.48, cores=2),
  "tpu:v3": _device(123, 900, 15.48, cores=2),
  "tpu:v4": _device(275, 1200, 15.25, cores=2),
  "tpu:v5e": _device(197, 819, 15.75),
  "tpu:v5p": _device(459, 2765, 95.74),
  "tpu:v6e": _device(918, 1600, 31.25),
  "tpu:7x": _device(2307, 7380, 94.75, cores=2),
}


@dataclasses.dataclass(frozen=True)
class Time:
  """How long estimated cycles take on a generation, from programs measured on it.

  Attributes:
    product_ms: milliseconds of a million cycles in kernels with a convolution or a dot.
    other_ms: milliseconds of a million cycles in other kernels.
    low, high: the range of time / estimated time that nine of ten measured programs had.
    programs: how many were measured, of `operations` operations.
  """

  product_ms: float
  other_ms: float
  low: float
  high: float
  programs: int
  operations: int


@functools.cache
def times() -> dict[str, Time]:
  """The generations on which programs were measured."""
  return {target: Time(**row) for target, row in json.loads(TIMES.read_text()).items()}


@dataclasses.dataclass(frozen=True)
class Row:
  """What a function costs on one generation; all but `memory` are estimates of the compiler.

  Attributes:
    target: such as `tpu:v6e`.
    milliseconds: estimated time; None where it cannot be told.
    interval: milliseconds between which nine of ten measured programs with such an estimate lay.
    cycles: of all kernels; None where the compiler refuses the function.
    bytes_accessed: bytes that the kernels read and write.
    flops: floating-point operations.
    memory: bytes that the compiler plans on the device.
    fits: whether this memory fits on the device; None if the compiler refuses the function for
      another reason.
    bound: `compute` or `memory`: which peak of the device takes longer.
    kernels: the dearest first, with the cycles of all their calls.
    uncounted: operations without an estimate of the compiler.
    why: why there is no time; empty where there is one.
  """

  target: str
  milliseconds: float | None = None
  interval: tuple[float, float] | None = None
  cycles: int | None = None
  bytes_accessed: int | None = None
  flops: float | None = None
  memory: tpu.Memory | None = None
  fits: bool | None = None
  bound: str = ""
  kernels: tuple[tpu_kernels.KernelCycles, ...] = ()
  uncounted: tuple[tpu_kernels.Uncounted, ...] = ()
  why: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate:
  """What a function costs, as text and as tables of a notebook.

  Attributes:
    name: of the function.
    rows: one for each generation.
  """

  name: str
  rows: tuple[Row, ...]

  def __repr__(self) -> str:
    return "\n\n".join([*map(str, self._tables()), *self._notes()])

  def _repr_html_(self) -> str:
    notes = Table(["notes"], [[note] for note in self._notes()])
    return "".join(table._repr_html_() for table in (*self._tables(), notes))

  def _tables(self) -> list[Table]:
    """A row for each generation, and the dearest kernels of each."""
    head = ["", "ms", "9 of 10", "M cycles", "GB", "arguments", "temporaries", "fits", "bound by"]
    title = f"{self.name}: estimates of the TPU compiler, for one device"
    kernels = [_kernels(row, row.cycles) for row in self.rows if row.cycles]
    return [Table(head, [_cells(row) for row in self.rows], title), *kernels]

  def _notes(self) -> Iterator[str]:
    """Notes on kernels that the cycles leave out, on missing times, and on measured programs."""
    for row in self.rows:
      if row.why:
        yield f"{_short(row.target)}: no time, because {row.why}"
      elif row.uncounted:
        yield f"{_short(row.target)}: without {listed(row.uncounted)}, which have no estimate"
    for row in self.rows:
      if row.milliseconds is not None:
        time = times()[row.target]
        yield (
          f"{_short(row.target)}: by {time.programs} programs of {time.operations} operations that "
          f"were measured on it, {time.low:.2f} to {time.high:.2f} of their estimate for 9 of 10"
        )


def _cells(row: Row) -> list[str]:
  number = lambda value, scale: "" if value is None else f"{value / scale:.3g}"
  memory = row.memory
  return [
    _short(row.target),
    number(row.milliseconds, 1),
    " to ".join(f"{end:.3g}" for end in row.interval or ()),
    number(row.cycles, 1e6),
    number(row.bytes_accessed, 1e9),
    f"{memory.arguments / _GIB:.3g} GiB" if memory else "",
    f"{memory.temporaries / _GIB:.3g} GiB" if memory else "",
    _FITS[row.fits].format(DEVICES[row.target].memory / _GIB),
    row.bound,
  ]


def _kernels(row: Row, cycles: int) -> Table:
  """The dearest kernels of a row, and their shares of its `cycles`."""
  cells = [
    [f"{each.cycles / cycles:.1%}", f"{each.cycles / 1e6:.3g}", *_place(each.origin)]
    for each in row.kernels[:_DEAREST]
  ]
  title = f"{_short(row.target)}: the {len(cells)} dearest of {len(row.kernels)} kernels"
  return Table(["share", "M cycles", "kernel", "line"], cells, title)


def _short(target: str) -> str:
  return target.removeprefix("tpu:")


def _place(origin: Any) -> list[str]:
  """The operation of an instruction as jax names it, and its source line."""
  return [origin.op_name.rpartition("/")[2] or origin.name, origin.where]


def listed(uncounted: Sequence[tpu_kernels.Uncounted]) -> str:
  """Instructions by kind, jax's name and line, the commonest first."""
  kinds = {"loop": "a loop of unknown length", "kernel": "a kernel"}
  names = collections.Counter(
    " ".join(filter(None, [kinds.get(each.kind, each.kind), each.target, *_place(each.origin)]))
    for each in uncounted
  )
  texts = [f"{count} x {name}" if count > 1 else name for name, count in names.most_common()]
  more = [f"{len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
  return ", ".join(texts[:_NAMED] + more)


def unknown_work(cycles: tpu_kernels.Cycles, bytes_accessed: float) -> list[tpu_kernels.Uncounted]:
  """The instructions without an estimate that leave the time of a program unknown.

  Loops of unknown length, custom calls and kernels without an estimate are never small. Gathers,
  scatters, sorts and the like are, together, where they write few of the program's bytes.

  Args:
    cycles: of a program.
    bytes_accessed: by the program.
  """
  written = sum(
    each.size * (_SORT_PASSES if each.kind == "sort" else 1)
    for each in cycles.uncounted
    if each.kind not in _NEVER_SMALL
  )
  is_small = written <= _SMALL_SHARE * bytes_accessed
  return [each for each in cycles.uncounted if each.kind in _NEVER_SMALL or not is_small]


def least_ms(target: str, flops: Any, bytes_accessed: Any) -> Any:
  """Milliseconds of floating-point operations and of bytes at the peaks of a device.

  Args:
    target: a key of `DEVICES`.
    flops: one number, or an array of programs.
    bytes_accessed: as `flops`; `_MOVED_SHARE` of them count.
  """
  device = DEVICES[target]
  return 1e3 * np.maximum(flops / device.flops, _MOVED_SHARE * bytes_accessed / device.bandwidth)


@keywords.checked
def estimate(
  function: Callable[..., Any], /, *args: Any, targets: Sequence[str] = TARGETS, **kwargs: Any
) -> Estimate:
  """What a function costs on TPUs, such as a training step; it is compiled and does not run.

  Compiling takes seconds to minutes a target, in this process. The estimate is of one device:
  sharding and communication between devices are not part of it.

  Args:
    function: a function, or one that `jax.jit` returned.
    *args: its example arguments, arrays or `jax.ShapeDtypeStruct`.
    targets: TPU generations: `v2`, `v3`, `v4`, `v5e`, `v5p`, `v6e`, `7x`.
    **kwargs: further keyword arguments of the function.

  Raises:
    ValueError: a target is unknown, or libtpu is missing.
  """
  return _estimate(function, args, kwargs, targets)


def _estimate(
  function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], targets: Sequence[str]
) -> Estimate:
  if isinstance(targets, str):
    targets = [targets]
  names = [tpu.full_name(target) for target in targets]
  name = getattr(function, "__name__", type(function).__name__)
  return Estimate(name, tuple(_row(function, args, kwargs, target) for target in names))


def _row(function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], target: str) -> Row:
  try:
    program = tpu.compile_function(function, args, target, kwargs=kwargs)
  except jax.errors.JaxRuntimeError as error:
    fits = False if "RESOURCE_EXHAUSTED" in str(error) else None
    return Row(target, fits=fits, why=f"the compiler says: {console.one_line(error)}")
  return cost(program, target)


def cost(compiled: tpu.TpuProgram, target: str) -> Row:
  """What a compiled program costs on a target."""
  module = proto.parse_module(compiled.module, where=f"program for {target}")
  cycles = tpu_kernels.estimated_cycles(module)
  device, why = DEVICES[target], ""
  flops, bytes_accessed = cycles.work
  least = float(least_ms(target, flops, bytes_accessed))
  if found := unknown_work(cycles, bytes_accessed):
    why = f"the compiler does not estimate {listed(found)}"
  elif not cycles.cycles:
    why = "the compiler estimates no cycles"
  elif target not in times():
    why = f"no program with estimates was measured on it; the peaks take {least:.3g} ms"
  compute, memory = flops / device.flops, bytes_accessed / device.bandwidth
  row = Row(
    target,
    cycles=cycles.cycles,
    bytes_accessed=bytes_accessed,
    flops=flops,
    memory=compiled.memory,
    fits=compiled.memory.total <= device.memory,
    bound="memory" if memory > compute else "compute",
    kernels=tuple(sorted(cycles.by_kernel, key=lambda each: -each.cycles)),
    uncounted=cycles.uncounted,
    why=why,
  )
  if why:
    return row
  time, products = times()[target], cycles.of_products
  ms = max((time.product_ms * products + time.other_ms * (cycles.cycles - products)) / 1e6, least)
  interval = max(time.low * ms, least), time.high * ms
  return dataclasses.replace(row, milliseconds=ms, interval=interval)


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Prints what each program of a source costs; 0, or 2 where the command was used wrongly."""
  parser = console.parser("estimate", "Estimates what functions cost on TPUs, without a TPU.")
  parser.add_argument(
    "source", help="FILE.py:KEY, FILE.py with a dictionary PROGRAMS, or a folder of such files"
  )
  parser.add_argument("--targets", nargs="+", default=TARGETS, help=f"default: {' '.join(TARGETS)}")
  args = parser.parse_args(argv)
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  for program in programs.load(args.source):
    found = _estimate(program.function, program.args, program.kwargs, args.targets)
    print(f"{dataclasses.replace(found, name=program.name)}\n", flush=True)
  return 0
