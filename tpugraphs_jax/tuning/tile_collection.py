"""Kernels with tiles as a tile collection, whose times the tile ranker learns.

The graph of a kernel is its function as HLO, with the first tile and with Pallas kernels as jax
interprets them: a loop over the grid, whose body computes a block. The features of a tile have the
released form of three windows of up to six bounds:

| columns | of a tile of a Pallas kernel |
|---|---|
| kernel bounds | the grid |
| output bounds | the block of the first output |
| input bounds | the values of the tile, in its order |

The first Pallas kernel of a function counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
from pathlib import Path
import random
from typing import Any

from jax.extend import core
import numpy as np

from tpugraphs_jax import columns, datasets, graph, hlo
from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo import jaxprs, tpu
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.infra import console, files, machine
from tpugraphs_jax.tuning import compiler, label_file, labels, programs
from tpugraphs_jax.tuning.programs import KernelWithTiles
from tpugraphs_jax.tuning.tiles import call_of_tile, Tile, TileTime, tune_tiles
from tpugraphs_jax.version import __version__

_KERNEL = "pallas_call"
_NANOSECONDS_PER_MILLISECOND = 1e6
_FEWEST = 2  # tiles with a time, of which an order can be learnt


def collect(
  kernels: Sequence[KernelWithTiles],
  *,
  out: str,
  collection: str,
  target: str,
  configs: int,
  seed: int = 0,
  progress: bool = True,
) -> list[str]:
  """Labels tiles of kernels with their times on a TPU; a line for each failure.

  Every kernel is a file `OUT/npz/tile/own/NAME/SPLIT/KERNEL.npz` in the released form, with a line
  of JSON for each tile beside it. A kernel whose files are finished is not labelled again.

  Args:
    kernels: with different names.
    out: folder of the data.
    collection: tile:own:NAME.
    target: a TPU generation such as `v6e`.
    configs: tiles of a kernel that are drawn; all where it has fewer.
    seed: of the draw.
    progress: shows a bar.

  Raises:
    ValueError: an argument is wrong, or libtpu is missing.
    OSError: a file cannot be written.
  """
  labeller = labels.create(labels.TpuEstimate.name, target=target, seed=seed)
  shared = {"label": labeller.name, **labeller.versions(), "seed": seed, "configs_asked": configs}
  names = Counter(programs.file_name(kernel.name) for kernel in kernels)
  if repeated := [name for name, count in names.items() if count > 1]:
    raise ValueError(f"two kernels have the name {repeated[0]}: rename the key of one")
  failures = []
  with console.working("labelling", total=len(kernels), unit="kernels", is_on=progress) as work:
    for kernel in kernels:
      folder = datasets.Collection(collection).folder(files.expanded(out) / "npz", kernel.split)
      about = {"name": kernel.name, "split": kernel.split, "collection": collection}
      try:
        files.check_way(files.expanded(out), folder)
        _collect(
          kernel,
          folder / f"{programs.file_name(kernel.name)}.npz",
          {"source": programs.portable(kernel.source), **shared},
          about,
        )
      except OSError:  # such as a full disk, with which no other kernel would be kept
        raise
      except Exception as error:  # a kernel of the user may raise anything
        failures.append(f"{kernel.name}: {compiler.reason(error)}")
      work.update()
  return failures


def _collect(
  kernel: KernelWithTiles, path: Path, shared: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
  """Writes both files of a kernel, unless they are finished.

  Raises:
    ValueError: fewer than two tiles have a time, or as `op_graph`.
  """
  tiles = _drawn(kernel.tiles, shared["configs_asked"], shared["seed"])
  with tpu.as_device(shared["target"]):
    traced = [call_of_tile(kernel.function, tile, kernel.args) for tile in tiles]
  key = {**shared, "program_sha256": _sha256(tiles, traced)}
  if _is_finished(path, key):
    return
  tuned = tune_tiles(kernel.function, *kernel.args, tiles=tiles, target=shared["target"])
  by_place = sorted(tuned.times, key=lambda time: tiles.index(time.tile))
  timed = [
    (call, time)
    for call, time in zip(traced, by_place)
    if isinstance(call, Call) and time.milliseconds is not None
  ]
  if len(timed) < _FEWEST:
    raise ValueError(f"{len(timed)} of {len(tiles)} tiles have a time: {by_place[0].why}")
  npz.write_tile(path, op_graph(kernel.name, *zip(*timed)))
  lines = path.with_suffix(label_file.SUFFIX)
  lines.unlink(missing_ok=True)  # of another key
  for place, time in enumerate(by_place):
    raw = {"milliseconds": time.milliseconds, "bytes_accessed": time.hbm_bytes}
    outcome = {"error": time.why} if time.milliseconds is None else {"raw": raw}
    label_file.append(lines, {**key, "numbers": [place], "tile": dict(time.tile), **outcome})
  rest = {
    "config_runtime": "estimated time in nanoseconds",
    "tpugraphs_jax": __version__,
    "machine": machine.described(),
  }
  label_file.append(lines, {**key, "about": {**about, **rest}})


def _drawn(tiles: Sequence[Tile], count: int, seed: int) -> list[Tile]:
  """Up to `count` tiles, drawn without repetition, in the order given."""
  places = random.Random(seed).sample(range(len(tiles)), min(count, len(tiles)))
  return [tiles[place] for place in sorted(places)]


def _sha256(tiles: Sequence[Tile], traced: Sequence[Call | Exception]) -> str:
  """SHA-256 of tiles and of the equations of the first one that the kernel does not refuse."""
  first = next((call for call in traced if isinstance(call, Call)), None)
  equations = jaxprs.operations(first.trace.program, with_details=True) if first else ()
  return hashlib.sha256("\n".join([repr(tiles), *equations]).encode()).hexdigest()


def _is_finished(path: Path, key: Mapping[str, Any]) -> bool:
  """Whether both files of a kernel are there and whole, with this key."""
  try:
    npz.read_tile(path)
    *_, last = label_file.records(path.with_suffix(label_file.SUFFIX))
  except (OSError, ValueError):
    return False
  return "about" in last and key.items() <= last.items()


def op_graph(
  name: str, kernel_calls: Sequence[Call], times: Sequence[TileTime]
) -> graph.OpGraph[graph.TileConfigs]:
  """The graph of a kernel, with its tiles.

  The runtime of the first tile is the normalizer of all.

  Args:
    name: of the kernel.
    kernel_calls: its function with each tile.
    times: of the tiles.

  Raises:
    ValueError: a tile has other values than up to six integers, a function has no Pallas kernel, or
      jax cannot interpret it.
  """
  nanoseconds = [_NANOSECONDS_PER_MILLISECOND * (time.milliseconds or 0) for time in times]
  runtime_ns = np.maximum(1, np.rint(nanoseconds)).astype(np.int64)
  configs = graph.TileConfigs(
    features(kernel_calls, [time.tile for time in times]),
    runtime_ns,
    np.full_like(runtime_ns, runtime_ns[0]),
  )
  first = kernel_calls[0]
  op_graph = hlo.featurize(interpreted(first), *first.arrays).for_rankers()
  return dataclasses.replace(op_graph, name=name, configs=configs)


def features(kernel_calls: Sequence[Call], tiles: Sequence[Tile]) -> np.ndarray:
  """The features `[C, 24]` float32 of C tiles.

  Args:
    kernel_calls: the function of each tile.
    tiles: of each.

  Raises:
    ValueError: as of `op_graph`.
  """
  for tile in tiles:
    if len(tile) > columns.MAX_RANK or not all(
      isinstance(value, (int, np.integer)) for value in tile.values()
    ):
      raise ValueError(f"the tile is {dict(tile)}, expected up to {columns.MAX_RANK} integers")
  grids, blocks = zip(*(_windows(call) for call in kernel_calls))
  return columns.released_tile_features(grids, blocks, [tuple(tile.values()) for tile in tiles])


def _windows(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The grid of the first Pallas kernel, and the block of its first output."""
  equation = next(_kernels(call.trace.program.jaxpr), None)
  if equation is None:
    raise ValueError(f"{call.__name__} has no pallas_call, expected a Pallas kernel")
  mapping = equation.params["grid_mapping"]
  grid = tuple(size if isinstance(size, int) else 1 for size in mapping.grid)  # else known later
  place = mapping.num_index_operands + mapping.num_inputs
  block = equation.params["jaxpr"].invars[place].aval.shape
  return grid[-columns.MAX_RANK :], tuple(block)[-columns.MAX_RANK :]


def _kernels(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
  for equation in jaxpr.eqns:
    if equation.primitive.name == _KERNEL:
      yield equation
    else:
      for inner in jaxprs.programs_of(equation):
        yield from _kernels(inner)


def interpreted(call: Call) -> Callable[..., list[Any]]:
  """The function of a call with interpreted Pallas kernels, from its arrays to its outputs."""
  return lambda *arrays: jaxprs.evaluate(call.trace.program, arrays, _bind_interpreted)


def _bind_interpreted(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
  params = dict(equation.params)
  if equation.primitive.name == _KERNEL:
    params["interpret"] = True
  else:
    params = {key: jaxprs.rewrite(value, _bind_interpreted) for key, value in params.items()}
  return jaxprs.bind_primitive(equation, params, inputs)
