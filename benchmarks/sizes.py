"""Times of gathers, scatters, sorts, reductions and copies, from small sizes to the memory's end.

    python -m benchmarks.sizes --work WORK --out benchmarks/sizes.json

Each size is twice the one before. A time that is far from its bytes and operations, or that jumps
between two sizes, is listed with what the notes of `estimate` say. All times are estimates. `WORK`
is as of `step_times`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import json
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import pages, step_times, timing
from tpugraphs_jax.hlo import calls, jaxprs, tpu
from tpugraphs_jax.infra import console
from tpugraphs_jax.tuning import compiler, costs, summary

WIDTH = 1_024
TARGETS = ("v6e",)
_FAR = 6.0  # times of the bytes and operations
_STEADY = (0.95, 3.0)  # times of the size before, which is half as large
_TELLING = ("times what its bytes", "the compiler made a loop")  # notes that explain a long time
_SMALL_MS = 0.02  # where launches, fills of pipelines and waits are a large part


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def _indices(n: int) -> jax.ShapeDtypeStruct:
  return _array(n, dtype=jnp.int32)


def _rows(n: int) -> jax.ShapeDtypeStruct:
  return _array(n, WIDTH)


Made = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]
# By name: the program of a size, and the logarithms of the first and the last size. Sorts end where
# the compiler takes minutes.
OPERATIONS: dict[str, tuple[Callable[[int], Made], int, int]] = {
  "gather of rows": (
    lambda n: (lambda x, i: jnp.take(x, i, axis=0), (_rows(n), _indices(n))),
    6,
    21,
  ),
  "scatter-add of rows": (
    lambda n: (lambda x, i, y: x.at[i].add(y), (_rows(n), _indices(n), _rows(n))),
    6,
    20,
  ),
  "sort of floats": (lambda n: (jnp.sort, (_array(n),)), 8, 17),
  "sum over rows": (lambda n: (lambda x: x.sum(0), (_rows(n),)), 6, 22),
  "transposition": (lambda n: (lambda x: x.T.copy(), (_rows(n),)), 6, 21),
  "concatenation": (lambda n: (lambda x, y: jnp.concatenate([x, y]), (_rows(n),) * 2), 6, 20),
}


def described(row: costs.TargetEstimate, least: float) -> dict[str, Any]:
  """What a record keeps of the estimate of a size; `least` is as of `step_times.least_ms`."""
  if row.milliseconds is None:
    return {"why": row.why}
  return {"ms": float(f"{row.milliseconds:.4g}"), "least_ms": float(f"{least:.4g}")}


def outliers(sizes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
  """Sizes whose time is none, far from its bytes and operations or beside its neighbour's.

  Args:
    sizes: as of `described`, by size, ascending.

  Yields:
    The size, and what is wrong with it.
  """
  before = None
  for size, row in sizes.items():
    if "ms" not in row:
      yield size, f"no time: {row['why']}"
      before = None
      continue
    ms, least = row["ms"], row["least_ms"]
    if ms < least:
      yield size, f"{ms / least:.2f} of its bytes and operations"
    elif ms > _SMALL_MS and ms > _FAR * least:
      yield size, f"{ms / least:.1f} times its bytes and operations"
    if before is not None and max(ms, before) > _SMALL_MS:
      low, high = _STEADY
      if not low <= ms / before <= high:
        yield size, f"{ms / before:.2f} times the size before"
    before = ms


def table(found: Mapping[str, Any]) -> str:
  """The range of sizes of each operation, and how many are steady."""
  lines = []
  for name, by_target in found["operations"].items():
    for target, sizes in by_target.items():
      timed = {size: row for size, row in sizes.items() if "ms" in row}
      odd = dict.fromkeys(size for size, _ in outliers(sizes))
      ratios = [row["ms"] / row["least_ms"] for row in timed.values() if row["ms"] > _SMALL_MS]
      within = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
      keys = list(sizes)
      counts = f"{len(sizes)}, {len(timed)}", str(len(odd))
      lines.append([name, target, f"{keys[0]} to {keys[-1]}", *counts, within])
  head = ["operation", "TPU", "rows or floats", "sizes, with a time", "odd"]
  return pages.table([*head, f"time / bytes and operations, above {_SMALL_MS} ms"], lines)


def outliers_table(found: Mapping[str, Any]) -> str:
  """Sizes that are odd, with the notes of their estimates."""
  lines = []
  for name, by_target in found["operations"].items():
    for target, sizes in by_target.items():
      for size, why in outliers(sizes):
        notes = "; ".join(sizes[size].get("notes", ()))
        lines.append([name, target, size, why, notes.removeprefix(f"{target}: ")])
  return pages.table(["operation", "TPU", "size", "what is odd", "notes"], lines)


def estimate(
  made: Made, name: str, target: str, work: step_times.Work, use: compiler.Compiler, most: int
) -> dict[str, Any]:
  """The row of a size, of whose parts none takes more than `most` seconds."""
  try:
    call = jaxprs.for_one_device(calls.Call(*made, {}))
    program = work.read(name, target, call)
    if program is None:
      program = use.compile(call, tpu.full_name(target))
      work.write(name, target, call, program)
    with step_times.limit(most):
      row = costs.cost(program, tpu.full_name(target), call)
  except step_times.Late as error:
    return {"why": f"the execution of its schedules: {error}"}
  except jax.errors.JaxRuntimeError as error:
    return {"why": f"the compiler says: {console.one_line(error)[:200]}"}
  except compiler.Ended as error:
    return {"why": f"the compiler failed: {error}"}
  lines = str(summary.Estimate(name, (row,))).splitlines()
  told = [line for line in lines if any(text in line for text in _TELLING)]
  return described(row, step_times.least_ms(program, target)) | ({"notes": told} if told else {})


def main() -> None:
  parser = timing.parser(__doc__)
  step_times.add_work(parser)
  parser.add_argument("--targets", nargs="+", default=TARGETS)
  args = parser.parse_args()
  work = step_times.Work(args.work)
  rows: dict[str, dict[str, dict[str, Any]]] = {}
  with compiler.Compiler(timeout=args.timeout) as use:
    for name, (make, first, last) in OPERATIONS.items():
      for target in args.targets:
        sizes = rows.setdefault(name, {}).setdefault(target, {})
        for size in (2**power for power in range(first, last + 1)):
          key = f"sizes_{name.replace(' ', '_')}_{size}"
          sizes[f"{size:,}"] = estimate(make(size), key, target, work, use, args.timeout)
          print(f"{name}, {size:,}, {target}: {json.dumps(sizes[f'{size:,}'])}", flush=True)
          timing.write({"libtpu": tpu.libtpu_version(), "operations": rows}, args.out)
          if step_times.TOO_LONG in sizes[f"{size:,}"].get("why", ""):
            break  # as larger ones take, too
  print(table({"operations": rows}))
  print(outliers_table({"operations": rows}))


if __name__ == "__main__":
  main()
