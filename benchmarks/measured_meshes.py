"""Compares simulated times of collectives on TPU slices with times that others measured.

    python -m venv ENV
    ENV/bin/pip install '.[tpu]'
    ENV/bin/python -m benchmarks.measured_meshes --data DIR --out benchmarks/measured_meshes.json

`DIR` has tables of measured collectives, `collectives.csv` and `recipes_collectives.csv`: TPU
generation, topology, operation, shape and microseconds. Each one is written with `shard_map`,
compiled for its topology by the libtpu at hand, and simulated. The formula of the links stands
beside it. Rows whose topology, shape or operation is not told exactly are left out, with a reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import csv
import dataclasses
import math
from pathlib import Path
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.hlo import calls, meshes, proto, topology, tpu
from tpugraphs_jax.infra import files
from tpugraphs_jax.tuning import compiler, costs
from tpugraphs_jax.tuning.schedule import chips, ici, mesh

P = jax.sharding.PartitionSpec
_KINDS = {
  "all_gather": "all-gather",
  "all_reduce": "all-reduce",
  "psum": "all-reduce",
  "reduce_scatter": "reduce-scatter",
  "psum_scatter": "reduce-scatter",
  "all_to_all": "all-to-all",
  "ppermute": "collective-permute",
}
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SHAPE = re.compile(r"(bf16|f32|s8|int8)\[([\d,]+)\]")
_TYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "s8": jnp.int8, "int8": jnp.int8}
_STEPS = 16  # of a chain of exchanges, whose slope was measured
# Sources to whose times the constants of the links of a generation were fitted, and constants that
# do not come from them: the share that the scaling book reads from a figure of v5e, no launch of a
# SparseCore, and to start and await a DMA what it costs on the chip.
_UNFITTED = {"share": 0.95, "launch": 0.0}
_FITTED = {
  "tpu:v5p": "marin",
  "tpu:v6e": "marin tpu-recipes",
  "tpu:7x": "tpu-recipes",
  "tpu:v5e": "",
}


@dataclasses.dataclass(frozen=True)
class Measured:
  """A measured collective.

  Attributes:
    target: such as `tpu:v5e:8x4`.
    axes: of the mesh: size by name.
    along: axes along which it exchanges data.
    kind: of `collectives.KINDS`.
    shape, dtype: of the whole array; of a `collective-permute` and an `all-to-all` that of one
      device.
    microseconds: measured.
    source: its address.
  """

  target: str
  axes: Mapping[str, int]
  along: tuple[str, ...]
  kind: str
  shape: tuple[int, ...]
  dtype: Any
  microseconds: float
  source: str

  @property
  def name(self) -> str:
    shape = f"{jnp.dtype(self.dtype).name}[{','.join(map(str, self.shape))}]"
    return f"{self.kind} {shape} along {' '.join(self.along)} of {tpu.short_name(self.target)}"

  @property
  def size(self) -> int:
    """Bytes of the array."""
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

  @property
  def is_fitted(self) -> bool:
    """Whether the constants of its generation's links were fitted to its source."""
    names = _FITTED.get(topology.generation_of(self.target), "").split()
    return any(name in self.source for name in names)


def read(folder: Path) -> tuple[list[Measured], list[str]]:
  """The collectives of the tables of a folder, and the reasons of rows that are left out."""
  found, left_out = [], []
  for name in ("collectives.csv", "recipes_collectives.csv"):
    with open(folder / name, newline="", encoding="utf-8") as file:
      for number, row in enumerate(csv.DictReader(file), 2):
        try:
          found.append(_parse(row))
        except (ValueError, KeyError) as error:
          left_out.append(f"{name}:{number}: {error}")
  return found, left_out


def _parse(row: Mapping[str, str]) -> Measured:
  operation = row.get("operation") or row.get("collective") or ""
  kind = _KINDS.get(operation.split()[0] if operation else "")
  if kind is None or "DCN" in operation:
    raise ValueError(f"the operation is {operation!r}")
  time = row.get("time_us") or _from_bandwidth(row)
  if not re.fullmatch(r"[\d.]+", time):
    raise ValueError(f"the time is {time!r}")
  target, axes = _mesh(row["generation"], row["topology"])
  along = tuple(re.findall(r"\b[A-Z]\b", operation.partition(" over ")[2])) or tuple(axes)
  shape, dtype = _shape(row.get("shape_or_bytes") or row["output"])
  if row.get("input") and kind == "all-gather":  # over groups of a part of the devices
    ranks = shape[0] // _shape(row["input"])[0][0]
    axes = {"group": ranks, "other": math.prod(axes.values()) // ranks}
    along = ("group",)
  return Measured(target, axes, along, kind, shape, dtype, float(time), row["source"])


def _from_bandwidth(row: Mapping[str, str]) -> str:
  """Microseconds of a row with the transferred bytes and their rate."""
  if not row.get("achieved_GB_s"):
    raise ValueError("it has no time")
  # Their script counts an all-reduce twice.
  seconds = 2 * float(row["transferred_GB"]) / float(row["achieved_GB_s"])
  return f"{1e6 * seconds}"


def _mesh(generation: str, text: str) -> tuple[str, dict[str, int]]:
  """The target and the axes of a mesh."""
  named = {name: int(size) for name, size in re.findall(r"([A-Z]):(\d+)", text)}
  if named:
    text = f"{generation}:{'x'.join(map(str, named.values()))}"
  elif match := re.fullmatch(r"mesh (\d+(?:x\d+)+)", text):  # of devices, not of chips
    named = {name: int(size) for name, size in zip("xyz", match[1].split("x"))}
    text = topology.example(f"tpu:{generation}", math.prod(named.values()))
  elif re.fullmatch(r"\d+(x\d+)+", text):
    text = f"{generation}:{text}"
  target = topology.full_name(text)
  described = topology.parse(target)
  if described is None:
    raise ValueError(f"the topology is {text!r}")
  devices = len(topology.devices(target))
  if math.prod(named.values() or [devices]) != devices:
    raise ValueError(f"the topology is {text!r}")
  return target, named or {"ring": devices}


def _shape(text: str) -> tuple[tuple[int, ...], Any]:
  if match := _SHAPE.search(text):
    return tuple(map(int, match[2].split(","))), _TYPES[match[1]]
  if match := re.fullmatch(r"(\d+) (KiB|MiB|GiB)", text):
    return (int(match[1]) * _UNITS[match[2]] // 512, 128), jnp.float32
  raise ValueError(f"the shape is {text!r}")


def program(measured: Measured) -> tuple[Callable[..., Any], jax.ShapeDtypeStruct]:
  """The collective as a function of its array, on an abstract mesh."""
  mesh = jax.sharding.AbstractMesh(tuple(measured.axes.values()), tuple(measured.axes))
  split, along = P(measured.along), measured.along
  count = math.prod(measured.axes[axis] for axis in along)
  shape = measured.shape
  if measured.kind in ("collective-permute", "all-to-all"):
    shape = (measured.shape[0] * count, *measured.shape[1:])
  if measured.kind == "collective-permute":
    pairs = [(place, (place + 1) % count) for place in range(count)]

    def exchange(x: jax.Array) -> jax.Array:
      step = lambda _, x: jax.lax.optimization_barrier(jax.lax.ppermute(x, along, pairs))
      return jax.lax.fori_loop(0, _STEPS, step, x)

    bodies = {measured.kind: (exchange, split, split)}
  else:
    bodies = {
      "all-gather": (lambda x: jax.lax.all_gather(x, along, tiled=True), split, P()),
      "all-reduce": (lambda x: jax.lax.psum(x, along), P(), P()),
      "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, along, tiled=True), P(), split),
      "all-to-all": (lambda x: jax.lax.all_to_all(x, along, 0, 0, tiled=True), split, split),
    }
  body, given, returned = bodies[measured.kind]
  mapped = jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False)
  sharding = jax.sharding.NamedSharding(mesh, given)
  return jax.jit(mapped), jax.ShapeDtypeStruct(shape, measured.dtype, sharding=sharding)


def simulate(measured: Measured, tpu_compiler: compiler.Compiler) -> dict[str, Any]:
  """A row of the record: microseconds measured, simulated, and of the formula of the links."""
  function, array = program(measured)
  call = calls.Call(function, (array,), {})
  found = meshes.find(call)
  assert found is not None
  placement = meshes.place(found, measured.target)
  made = tpu_compiler.compile(call, measured.target, placement=placement)
  row = costs.cost(made, measured.target, call, placement)
  times = _STEPS if measured.kind == "collective-permute" else 1
  chip = chips.chips()[row.generation]
  described = topology.parse(measured.target)
  assert described is not None
  devices = ici.Slice(placement.axes, placement.ids, placement.coords, described.wrap, made.rings)
  groups = devices.groups_along(measured.along)
  formula = ici.formula_cycles(measured.kind, measured.size, groups, devices, chip) / chip.clock
  of_collective = sum(one.milliseconds for one in row.communication)
  unfitted = 1e3 * row.milliseconds / times if row.milliseconds else None
  if measured.is_fitted:
    module = proto.parse_module(made.module, where=measured.name)
    link = dataclasses.replace(chip.link, start=chip.wait, **_UNFITTED)
    other = dataclasses.replace(chip, link=link)
    simulation = mesh.Simulation(module, made.schedules, row.generation, devices)
    unfitted = 1e3 * (simulation.time(other).milliseconds or 0.0) / times or None
  return {
    "name": measured.name,
    "target": measured.target,
    "source": measured.source,
    "is_fitted": measured.is_fitted,
    "by_formula": any(one.why for one in row.communication),
    "measured_us": measured.microseconds,
    "simulated_us": None if row.milliseconds is None else 1e3 * row.milliseconds / times,
    "collective_us": 1e3 * of_collective / times,
    "unfitted_us": unfitted,
    "formula_us": 1e6 * formula,
    "why": row.why,
  }


def errors(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float | int | None]:
  """The mean relative error of the rows that have a time, and how many these are."""
  ratios = [row[key] / row["measured_us"] for row in rows if row[key]]
  mean = float(np.mean(np.abs(np.array(ratios) - 1))) if ratios else None
  return {"rows": len(ratios), "error": None if mean is None else round(mean, 4)}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Errors of all rows, of those to which no constant was fitted, and by generation."""
  named = {"all": rows, "not fitted": [row for row in rows if not row["is_fitted"]]}
  for target in sorted({topology.generation_of(row["target"]) for row in rows}):
    named[target] = [row for row in rows if topology.generation_of(row["target"]) == target]
  keys = {
    "simulated": "simulated_us",
    "collective": "collective_us",
    "unfitted": "unfitted_us",
    "formula": "formula_us",
  }
  return {
    name: {method: errors(each, key) for method, key in keys.items()}
    for name, each in named.items()
  }


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
  for row in record["rows"]:
    simulated = "none" if row["simulated_us"] is None else f"{row['simulated_us']:.1f}"
    yield f"{row['name']}: measured {row['measured_us']:.1f} us, simulated {simulated}, of it the "
    yield (
      f"  collective {row['collective_us']:.1f}, unfitted {row['unfitted_us'] or 0:.1f}, formula "
      f"{row['formula_us']:.1f} {row['why'][:80]}"
    )
  for name, methods in record["errors"].items():
    said = ", ".join(f"{method} {found['error']}" for method, found in methods.items())
    yield f"{name}: mean relative error of {methods['formula']['rows']} rows: {said}"
  yield from (f"left out: {reason}" for reason in record["left_out"])


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--data", type=Path, required=True, help="folder of the measured tables")
  parser.add_argument("--out", type=Path, help="file of the record")
  args = parser.parse_args(argv)
  jax.config.update("jax_platforms", "cpu")
  measured, left_out = read(args.data)
  rows = []
  with compiler.Compiler() as tpu_compiler:
    for each in measured:
      try:
        rows.append(simulate(each, tpu_compiler))
      except (compiler.Ended, jax.errors.JaxRuntimeError, ValueError) as error:
        left_out.append(f"{each.name}: {error}")
      else:
        print(rows[-1]["name"], rows[-1]["simulated_us"], flush=True, file=sys.stderr)
  record = {
    "versions": {"jax": jax.__version__, "libtpu": tpu.libtpu_version()},
    "rows": rows,
    "errors": summary(rows),
    "left_out": left_out,
  }
  print("\n".join(_lines(record)))
  if args.out:
    files.write_json(args.out, record, indent=1)
  return 0


if __name__ == "__main__":
  sys.exit(main())
