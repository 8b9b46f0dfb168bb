"""The order of the tiles (block sizes) of a kernel, by time.

    python -m tpugraphs_jax.tune_tiles FILE.py:NAME --target v6e

A kernel is a function from a tile, a dictionary such as `{"block_m": 256}`, to the function with
that tile. For a TPU as target every tile is compiled, without a TPU, and has the time of its
schedules. Without a target the functions are measured on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import math
from pathlib import Path
import types
from typing import Any

import jax

from tpugraphs_jax.hlo import calls, jaxprs, tpu
from tpugraphs_jax.infra import console
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning import compiler, costs, measure, page, programs, summary
from tpugraphs_jax.tuning.page import Page

Tile = Mapping[str, Any]
# Tiles whose times differ by less have no sure order: the ratio of two times of a Pallas kernel is
# off by up to 9 %, as a mean of a generation (docs/records/measured_programs.md).
_CLOSE = 0.1
_FEWEST, _MOST = 2, 5  # tiles that it advises to measure


@dataclasses.dataclass(frozen=True)
class TileTime:
  """What a kernel takes with one tile.

  Attributes:
    tile: as it was given.
    milliseconds: of the whole function; None where there is no time.
    kernel_ms: of its Pallas kernels and other custom calls alone; None where it was measured.
    waits: the share of the time in which it waits for memory; None where it was measured.
    hbm_bytes: moved between the large memory and the chip; None where it was measured.
    vmem_bytes: moved by copies on the chip; None where it was measured.
    why: why there is no time, such as what the compiler says.
  """

  tile: Tile
  milliseconds: float | None = None
  kernel_ms: float | None = None
  waits: float | None = None
  hbm_bytes: int | None = None
  vmem_bytes: int | None = None
  why: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Tiles(Page):
  """Tiles in the order of their times, as text and as a table of a notebook.

  Attributes:
    name: of the kernel.
    target: such as `v6e`; empty where they were measured.
    times: the fastest tile first; those without a time last.
    versions: of jax and of the compiler.
  """

  name: str
  target: str
  times: tuple[TileTime, ...]
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def best(self) -> Tile | None:
    """The fastest tile; None where no tile has a time."""
    return self.times[0].tile if self.to_measure else None

  @property
  def to_measure(self) -> int:
    """How many of the first tiles to measure on a device: the others are slower beyond doubt.

    Those within 10 % of the fastest, two at the least and five at the most; 1 of measured tiles.
    The record of measured programs has the best measured tile at the first place of each of five
    kernels, and errors of up to 9 % of the ratio of two times.
    """
    timed = [time.milliseconds for time in self.times if time.milliseconds is not None]
    if not timed or not self.target:
      return min(1, len(timed))
    close = sum(ms <= (1 + _CLOSE) * timed[0] for ms in timed)
    return min(len(timed), max(_FEWEST, min(close, _MOST)))

  def _tables(self) -> list[Table]:
    names = list(dict.fromkeys(name for time in self.times for name in time.tile))
    where = (
      f"{self.target}, estimates from the schedules of its compiler"
      if self.target
      else "measured on the machine at hand"
    )
    head = [*names, "ms", "/ best", "kernels, ms", "waits", "HBM, MB", "VMEM, MB", ""]
    best = self.times[0].milliseconds if self.times else None
    rows = [_cells(time, names, best) for time in self.times]
    return [Table(head, rows, f"{self.name}: tiles by time ({where})")]

  def _title(self) -> str:
    return f"{self.name}: tiles by time"

  def _kind(self) -> str:
    return super()._kind() if self.target else "measured on this machine"

  def _verdict(self) -> Iterator[str]:
    if (best := self.best) is not None:
      values = ", ".join(f"{name}={value}" for name, value in best.items())
      ms = self.times[0].milliseconds
      yield f"the fastest of {len(self.times)} tiles is {values}: {ms:.3g} ms"
    yield from self._notes()

  def _notes(self) -> Iterator[str]:
    if not self.to_measure:
      yield "no tile has a time"
    elif self.target:
      left = sum(time.milliseconds is not None for time in self.times) - self.to_measure
      yield (
        f"measure the first {self.to_measure} on a device, with tune_tiles without a target; "
        f"{left} others are not expected to be faster"
      )


def _cells(time: TileTime, names: Sequence[str], best: float | None) -> list[str]:
  number = lambda value, scale: "" if value is None else f"{value / scale:.3g}"
  ms = time.milliseconds
  return [
    *(str(time.tile.get(name, "")) for name in names),
    number(ms, 1),
    f"{ms / best:.2f}" if ms and best else "",
    number(time.kernel_ms, 1),
    "" if time.waits is None else f"{time.waits:.0%}",
    number(time.hbm_bytes, 1e6),
    number(time.vmem_bytes, 1e6),
    time.why,
  ]


def tune_tiles(
  kernel: Callable[[Tile], Callable[..., Any]],
  /,
  *args: Any,
  tiles: Sequence[Tile],
  target: str | None = None,
  **kwargs: Any,
) -> Tiles:
  """Orders the tiles of a kernel by the time of its function.

  Args:
    kernel: returns, for a tile, a function of the arguments; the outputs do not depend on the tile.
    *args: example arguments of the functions, arrays or `jax.ShapeDtypeStruct`. Integer arrays with
      values, such as the group sizes of a ragged product, decide which tiles a kernel computes.
    tiles: dictionaries of block sizes, such as `[{"block_m": 128}, {"block_m": 256}]`.
    target: a TPU generation such as `v6e`; None: the functions are measured on the machine at hand.
    **kwargs: further keyword arguments of the functions.

  Returns:
    The tiles, the fastest first. A tile that the compiler refuses has the reason instead of a time.

  Raises:
    ValueError: there are no tiles, or as `estimate`; of measured times also where the machine is
      too noisy.
  """
  tiles = list(tiles) if isinstance(tiles, Iterable) else [tiles]
  if not tiles or not all(isinstance(tile, Mapping) and _has_names(tile) for tile in tiles):
    raise ValueError(
      f"tiles is {console.one_line(tiles)[:80]}, expected a list of dictionaries of block sizes"
    )
  name = getattr(kernel, "__name__", type(kernel).__name__)
  target = None if target is None else tpu.full_name(target)
  device = tpu.as_device(target) if target else contextlib.nullcontext()
  with console.working(name):
    with device, console.working("tracing", total=len(tiles), unit="tiles") as work:
      kernel_calls = []
      for tile in tiles:
        kernel_calls.append(call_of_tile(kernel, tile, args, kwargs))
        work.update()
    if target is None:
      times, versions = _measured(tiles, kernel_calls), {"jax": jax.__version__}
    else:
      times, versions = list(_estimated(tiles, kernel_calls, target)), summary.versions()
  times.sort(key=lambda time: math.inf if time.milliseconds is None else time.milliseconds)
  return Tiles(name, tpu.short_name(target or ""), tuple(times), versions)


def _has_names(tile: Mapping) -> bool:
  return all(isinstance(name, str) for name in tile)


def call_of_tile(
  kernel: Callable[[Tile], Callable[..., Any]],
  tile: Tile,
  args: tuple,
  kwargs: Mapping[str, Any] = types.MappingProxyType({}),
) -> calls.Call | Exception:
  """The call of a tile's function, or the error with which the kernel refuses the tile."""
  try:
    call = calls.Call(kernel(tile), args, kwargs)
    return jaxprs.for_one_device(call)  # traces it
  except Exception as error:  # kernels assert what a tile must be
    return error


def _estimated(
  tiles: Sequence[Tile], kernel_calls: Sequence[calls.Call | Exception], target: str
) -> Iterator[TileTime]:
  with (
    console.working("estimating", total=len(tiles), unit="tiles") as work,
    compiler.Compiler() as tpu_compiler,
  ):
    for tile, call in zip(tiles, kernel_calls):
      if isinstance(call, Exception):
        yield TileTime(tile, why=f"the kernel refuses it: {compiler.reason(call)}")
      else:
        yield _time(tile, call, target, tpu_compiler)
      work.update()


def _time(tile: Tile, call: calls.Call, target: str, tpu_compiler: compiler.Compiler) -> TileTime:
  try:
    compiled = tpu_compiler.compile(call, target)
  except compiler.Ended as error:
    return TileTime(tile, why=f"the compiler failed: {error}")
  except Exception as error:  # Pallas refuses tiles with many types when it lowers them
    return TileTime(tile, why=f"the compiler says: {compiler.reason(error)}")
  with console.working("executing its schedules"):
    row = costs.cost(compiled, target, call)
  if row.milliseconds is None:
    return TileTime(tile, why=row.why)
  return TileTime(
    tile,
    row.milliseconds,
    sum(kernel.milliseconds or 0.0 for kernel in row.kernels if kernel.is_custom),
    row.waits,
    row.bytes_accessed,
    sum(kernel.vmem_bytes for kernel in row.kernels),
  )


def _measured(
  tiles: Sequence[Tile], kernel_calls: Sequence[calls.Call | Exception]
) -> list[TileTime]:
  """The times of tiles on the machine at hand; the outputs are compared with those of the first."""
  times = {
    number: TileTime(tiles[number], why=f"the kernel refuses it: {compiler.reason(call)}")
    for number, call in enumerate(kernel_calls)
    if isinstance(call, Exception)
  }
  left = {
    number: call for number, call in enumerate(kernel_calls) if not isinstance(call, Exception)
  }
  while left:  # again after a failure of the first one, with which others are compared
    arrays = next(iter(left.values())).arrays
    for number, outcome in measure.measure(_functions(dict(left)), arrays):
      del left[number]
      if isinstance(outcome, Exception):
        times[number] = TileTime(tiles[number], why=compiler.reason(outcome))
      else:
        times[number] = TileTime(tiles[number], 1e3 * min(outcome["seconds"]))
  return [times[number] for number in range(len(tiles))]


def _functions(
  kernel_calls: Mapping[int, calls.Call],
) -> Iterator[tuple[int, Callable[..., Any], dict]]:
  """Functions of arrays with their numbers, without compiler options."""
  for number, call in kernel_calls.items():
    yield number, (lambda *arrays, call=call: call(*arrays)), {}


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Prints the order of the tiles of each kernel; 0, or 2 where the command was used wrongly."""
  parser = console.parser("tune_tiles", "Orders the tiles of kernels by time.")
  parser.add_argument("source", help="FILE.py:KEY, or FILE.py with a dictionary TILES")
  parser.add_argument("--target", help="such as v6e; without it: measures on this machine")
  parser.add_argument("--html", type=Path, help="a page with the tables")
  args = parser.parse_args(argv)
  if args.target:
    jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  results = []
  for kernel in programs.load_tiles(args.source):
    tuned = tune_tiles(kernel.function, *kernel.args, tiles=kernel.tiles, target=args.target)
    results.append(dataclasses.replace(tuned, name=kernel.name))
    print(f"{results[-1]}\n", flush=True)
  if args.html:
    page.together(results).save_html(args.html)
  return 0
