"""Time and memory of a function on TPUs, from their compiler, before a run.

    python -m tpugraphs_jax.estimate FILE.py:NAME --targets v5e v6e

It needs libtpu and no TPU. The compiler runs in a process of its own (`compiler`), `costs` reads
what it wrote, and `comparison` compares two estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
import tqdm

import tpugraphs_jax
from tpugraphs_jax.infra import console, keywords
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning import calls, choosing, compiler, costs, programs, tpu
from tpugraphs_jax.tuning.costs import DEVICES, Row
from tpugraphs_jax.tuning.schedule import chips

TARGETS = ("v5e", "v5p", "v6e", "7x")  # unless others are asked for
_DEAREST = 10
_GIB = 2**30
_CAPTURED = 2**24  # bytes of code from which it has captured arrays
_FITS = {True: "yes, {:.4g} GiB", False: "no, {:.4g} GiB", None: ""}


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate:
  """What a function costs, as text and as tables of a notebook.

  Attributes:
    name: of the function.
    rows: one for each generation.
    versions: of jax and libtpu.
    about: sentences about the function, such as what of it is left out.
    devices: of the mesh of the function; 1 without one.
  """

  name: str
  rows: tuple[Row, ...]
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  about: tuple[str, ...] = ()
  devices: int = 1

  def __repr__(self) -> str:
    return "\n\n".join([*map(str, self._tables()), *self._notes()])

  def _repr_html_(self) -> str:
    notes = Table(["notes"], [[note] for note in self._notes()])
    return "".join(table._repr_html_() for table in (*self._tables(), notes))

  def _tables(self) -> list[Table]:
    """A row for each generation; then the dearest kernels and the changes of layout of each."""
    head = (
      "|ms|9 of 10|bound by|waits|layouts|M cycles|GB|arguments|temporaries|captured|fits"
    ).split("|")
    where = (
      "for one device"
      if self.devices == 1
      else f"the whole program on one device, without its mesh of {self.devices}"
    )
    title = f"{self.name}: estimates from what the TPU compiler makes of it, {where}"
    tables = [Table(head, [_cells(row) for row in self.rows], title)]
    for row in self.rows:
      tables += [_kernels(row)] * bool(row.kernels) + [_moves(row)] * (row.moves_ms > 0)
    return tables

  def _notes(self) -> Iterator[str]:
    """What the estimates leave out, what they come from, and why some are missing."""
    for row in self.rows:
      short = _short(row.target)
      if row.why:
        yield f"{short}: no time, because {row.why}"
      else:
        yield f"{short}: {_basis(row, self.versions)}"
      if row.basis == costs.CYCLES and row.uncounted:
        yield f"{short}: without {costs.listed(row.uncounted)}, which have no estimate"
      if row.branches:
        yield f"{short}: all branches of {row.branches} conditionals count, though one of each runs"
    yield from self.about


def _basis(row: Row, versions: Mapping[str, str]) -> str:
  """What a time and its interval come from."""
  if row.basis == costs.CYCLES:
    time = costs.times()[row.target]
    because = f", because {row.without_schedule}" if row.without_schedule else ""
    return (
      f"from estimated cycles{because}; {time.programs} programs of {time.operations} operations "
      f"that were measured on it took {time.low:.2f} to {time.high:.2f} of such estimates, 9 of 10"
    )
  source = f"from the schedules of its kernels (constants: {chips.chips()[row.target].source})"
  measured = costs.intervals().get(row.target)
  if measured is None:
    return f"{source}; no interval, because no program was measured on it"
  compilers = " and ".join(sorted(measured.libtpu.values()))
  here = versions.get("libtpu", "")
  other = f", this is {here}" if here and {here} != set(measured.libtpu.values()) else ""
  return (
    f"{source}; {measured.programs} programs of {', '.join(measured.sources)} took "
    f"{measured.low:.2f} to {measured.high:.2f} of such estimates, 9 of 10 (libtpu {compilers}"
    f"{other})"
  )


def _cells(row: Row) -> list[str]:
  number = lambda value, scale: "" if value is None else f"{value / scale:.3g}"
  share = lambda value: "" if value is None else f"{value:.0%}"
  gib = lambda value: f"{value / _GIB:.3g} GiB"
  memory, ms = row.memory, row.milliseconds
  bound = row.bound
  if ms and row.groups:
    bound += f" {next(iter(row.groups.values())) / ms:.0%}"
  return [
    _short(row.target),
    number(ms, 1),
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


def _fits(row: Row) -> str:
  memory = DEVICES[row.target].memory
  if row.least_memory is not None:
    return f"{'no, ' * (row.fits is False)}at least {row.least_memory / _GIB:.3g} GiB a device"
  return _FITS[row.fits].format(memory / _GIB)


def _kernels(row: Row) -> Table:
  """The dearest kernels of a row."""
  total = row.milliseconds or sum(kernel.milliseconds or 0.0 for kernel in row.kernels)
  cycles = lambda kernel: "" if kernel.cycles is None else f"{kernel.cycles / 1e6:.3g}"
  by_time = bool(total)
  cells = []
  for kernel in row.kernels[:_DEAREST]:
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
        kernel.why and "no time: " + kernel.why,
      ]
    )
  title = f"{_short(row.target)}: the {len(cells)} dearest of {len(row.kernels)} kernels"
  head = "share|ms|calls|bound by|waits|M cycles|kernel|shape|scope|line|".split("|")
  return Table(head, cells, title)


def _moves(row: Row) -> Table:
  """The kernels that only change a layout, the dearest first."""
  moving = [(kernel, kernel.move) for kernel in row.kernels if kernel.move]
  total = row.milliseconds or 1.0
  cells = []
  for kernel, move in moving[:_DEAREST]:
    ms = kernel.milliseconds or 0.0
    what = [kernel.shape, move.change, move.of, kernel.where, move.remedy]
    cells.append([f"{ms / total:.1%}", f"{ms:.3g}", *what])
  title = (
    f"{_short(row.target)}: {row.moves_ms:.3g} ms change layouts, in {len(moving)} kernels "
    f"that copy or transpose; the {len(cells)} dearest"
  )
  return Table("share|ms|shape|change|of|line|may be removed by".split("|"), cells, title)


def _place(kernel: costs.Kernel) -> list[str]:
  return [kernel.operation, kernel.shape, kernel.scope, kernel.where]


def _short(target: str) -> str:
  return target.removeprefix("tpu:")


@keywords.checked
def estimate(
  function: Callable[..., Any], /, *args: Any, targets: Sequence[str] = TARGETS, **kwargs: Any
) -> Estimate:
  """What a function costs on TPUs, such as a training step; it is compiled and does not run.

  Compiling takes seconds to minutes a target, in a process of its own. The estimate is of one
  device: sharding and communication between devices are not part of it.

  Args:
    function: a function, or one that `jax.jit` returned.
    *args: its example arguments, arrays or `jax.ShapeDtypeStruct`.
    targets: TPU generations: `v2`, `v3`, `v4`, `v5e`, `v5p`, `v6e`, `7x`.
    **kwargs: further keyword arguments of the function.

  Raises:
    ValueError: a target is unknown, or libtpu is missing.
  """
  return estimate_call(calls.Call(function, args, kwargs), targets)


def estimate_call(
  call: calls.Call, targets: Sequence[str], *, timeout: float = compiler.TIMEOUT
) -> Estimate:
  """As `estimate`; a compilation ends after `timeout` seconds."""
  targets = [tpu.full_name(each) for each in ([targets] if isinstance(targets, str) else targets)]
  single = choosing.for_one_device(call)
  devices = _devices(call)
  with (
    tqdm.tqdm(total=len(targets), unit="target", disable=console.bar(True), leave=False) as bar,
    compiler.Compiler(timeout=timeout, waiting=bar.refresh) as tpu_compiler,
  ):
    rows = []
    for target in targets:
      bar.set_description(f"{_short(target)}: compiling")
      row = _row(single, target, tpu_compiler, bar)
      rows.append(row if devices == 1 else _of_mesh(row, call, devices))
      bar.update()
  return Estimate(call.__name__, tuple(rows), versions(), tuple(_about(call)), devices)


def versions() -> dict[str, str]:
  """The versions on which an estimate depends."""
  return {
    "tpugraphs_jax": tpugraphs_jax.__version__,
    "jax": jax.__version__,
    "libtpu": tpu.libtpu_version(),
  }


def _row(call: calls.Call, target: str, tpu_compiler: compiler.Compiler, bar: tqdm.tqdm) -> Row:
  try:
    compiled = tpu_compiler.compile(call, target)
  except jax.errors.JaxRuntimeError as error:
    fits = False if "RESOURCE_EXHAUSTED" in str(error) else None
    return Row(target, fits=fits, why=f"the compiler says: {console.one_line(error)}")
  except compiler.Ended as error:
    return Row(target, why=f"the compiler failed: {error}")
  bar.set_description(f"{_short(target)}: executing its schedules")
  return costs.cost(compiled, target)


def _devices(call: calls.Call) -> int:
  """How many devices the mesh of a function has; 1 without a mesh."""
  found = [*_shardings(call.trace.program.jaxpr)]
  found += [getattr(array, "sharding", None) for array in call.arrays]
  sizes = [each.num_devices for each in found if isinstance(each, jax.sharding.NamedSharding)]
  mesh = jax.sharding.get_abstract_mesh()
  return max([1, *sizes, 1 if mesh.empty else mesh.size])


def _shardings(jaxpr: Any) -> Iterator[Any]:
  """The shardings in the parameters of a program's equations."""
  for equation in jaxpr.eqns:
    yield from jax.tree.leaves(equation.params)
    for inner in choosing.programs_of(equation):
      yield from _shardings(inner)


def _of_mesh(row: Row, call: calls.Call, devices: int) -> Row:
  """The row of a program whose memory is that of a mesh.

  A device holds its part of each argument. Of the rest it holds an equal part at the least.
  """
  if row.memory is None:
    return row
  jit = call.trace.jit
  given = jit.in_shardings if jit and jit.has_shardings else (None,) * len(call.arrays)
  arguments = 0
  shapes = jax.eval_shape(lambda *arrays: arrays, *call.arrays)
  for array, shape, sharding in zip(call.arrays, shapes, given):
    sharding = sharding or getattr(array, "sharding", None)
    part = shape.shape if sharding is None else sharding.shard_shape(shape.shape)
    arguments += math.prod(part) * shape.dtype.itemsize
  rest = row.memory.total - row.memory.arguments
  least = arguments + rest // devices
  fits = None if least <= DEVICES[row.target].memory else False
  return dataclasses.replace(row, fits=fits, least_memory=least)


def _about(call: calls.Call) -> Iterator[str]:
  """What a reader has to know of the function."""
  wide = {str(getattr(array, "dtype", "")) for array in call.arrays} & {"float64", "complex128"}
  if wide and jax.dtypes.canonicalize_dtype("float64") != "float64":
    yield (
      f"{', '.join(sorted(wide))} arguments are estimated with half the bits, as jax runs them "
      "unless jax_enable_x64 is set"
    )
  interpreted = sorted(set(_interpreted(call.trace.program.jaxpr)))
  if interpreted:
    yield (
      f"Pallas interprets {', '.join(interpreted)}, as on a CPU: pass interpret=False "
      f"(jax.default_backend() is {jax.default_backend()!r} here, whatever the target)"
    )


def _interpreted(jaxpr: Any) -> Iterator[str]:
  """The names of Pallas kernels that are interpreted."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "pallas_call":
      if equation.params.get("interpret"):
        yield str(equation.params.get("name") or "a kernel")
    else:
      for inner in choosing.programs_of(equation):
        yield from _interpreted(inner)


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Prints what each program of a source costs; 0, or 2 where the command was used wrongly."""
  parser = console.parser("estimate", "Estimates what functions cost on TPUs, without a TPU.")
  parser.add_argument(
    "source", help="FILE.py:KEY, FILE.py with a dictionary PROGRAMS, or a folder of such files"
  )
  parser.add_argument("--targets", nargs="+", default=TARGETS, help=f"default: {' '.join(TARGETS)}")
  parser.add_argument(
    "--timeout", type=float, default=compiler.TIMEOUT, help="seconds for one compilation"
  )
  args = parser.parse_args(argv)
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  for program in programs.load(args.source):
    call = calls.Call(program.function, program.args, program.kwargs)
    found = estimate_call(call, args.targets, timeout=args.timeout)
    print(f"{dataclasses.replace(found, name=program.name)}\n", flush=True)
  return 0
