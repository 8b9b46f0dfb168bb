"""How far the time of a step depends on integers whose values `estimate` assumes.

    python -m benchmarks.assumed_integers --work WORK --out benchmarks/assumed_integers.json

Each step is compiled once for each target, and its schedules are executed with the assumed
integers, then with the values of `CASES`. All times are estimates. `WORK` is that of `step_times`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages, step_times, timing
from tpugraphs_jax.hlo import calls, jaxprs, tpu
from tpugraphs_jax.tuning import compiler, costs, programs

TARGETS = ("v5e", "v6e")
ASSUMED = "assumed"
Arrays = Mapping[int, np.ndarray]  # values of arguments by their number
_random = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Case:
  """A step of `steps/` whose time integers decide.

  Attributes:
    name: what it is.
    source: its FILE.py:KEY.
    assumed: what `estimate` assumes.
    values: integers by what they are.
  """

  name: str
  source: str
  assumed: str
  values: Mapping[str, Arrays]


def _indices(number: int, count: int, limit: int) -> dict[str, Arrays]:
  """Values of an argument that has `count` indices below `limit`."""
  made = {
    "uniform": _random.integers(0, limit, count),
    "ascending": np.arange(count) * limit // count,
    "equal": np.full(count, limit // 2),
    "lowest": np.zeros(count, int),
    "highest": np.full(count, limit - 1),
  }
  return {name: {number: values.astype(np.int32)} for name, values in made.items()}


def _groups(number: int, count: int, rows: int) -> dict[str, Arrays]:
  """Sizes of groups that have so many rows in all."""
  first = np.zeros(count, int)
  first[0] = rows
  made = {
    "uniform": _random.multinomial(rows, np.full(count, 1 / count)),
    "equal": np.full(count, rows // count),
    "first has all": first,
    "last has all": first[::-1],
  }
  return {name: {number: values.astype(np.int32)} for name, values in made.items()}


def _lengths(number: int, shape: tuple[int, int], page: int) -> dict[str, Arrays]:
  """Lengths of sequences, whose pages stand in argument `number + 1` of this shape."""
  sequences, most = shape[0], shape[1] * page
  made = {
    "uniform": _random.integers(1, most + 1, sequences),
    "equal": np.full(sequences, most // 2),
    "shortest": np.ones(sequences),
    "longest": np.full(sequences, most),
  }
  places = _random.permutation(sequences * shape[1]).reshape(shape).astype(np.int32)
  return {
    name: {number: values.astype(np.int32), number + 1: places} for name, values in made.items()
  }


CASES = (
  Case("gather of rows", "indices.py:take", "uniform", _indices(1, 4_096, 32_000)),
  Case("scatter-add of rows", "indices.py:scatter_add", "uniform", _indices(1, 8_192, 65_536)),
  Case("sort by a key", "indices.py:sort_by_key", "", _indices(0, 16_384, 2**20)),
  Case("paged attention", "kernels.py:paged_attention", "half", _lengths(3, (8, 32), 16)),
  Case("ragged product, Pallas", "kernels.py:gmm", "equal groups", _groups(2, 8, 2_048)),
  Case("ragged product, jax", "kernels.py:ragged_dot", "equal groups", _groups(2, 8, 2_048)),
)


def milliseconds(
  program: tpu.TpuProgram, target: str, arguments: Callable[[Arrays], calls.Call], case: Case
) -> dict[str, Any]:
  """Times of a case by the values of its integers."""
  given = {ASSUMED: {}, **case.values}
  rows = {
    name: costs.cost(program, tpu.full_name(target), arguments(values))
    for name, values in given.items()
  }
  found: dict[str, Any] = {
    name: float(f"{row.milliseconds:.4g}") if row.milliseconds else row.why
    for name, row in rows.items()
  }
  extremes = rows[ASSUMED].extremes
  return found | ({"extremes": [float(f"{ms:.4g}") for ms in extremes]} if extremes else {})


def table(found: Mapping[str, Any]) -> str:
  """Times with other integers in parts of the time with assumed ones."""
  lines = []
  for case in CASES:
    for target, times in found["cases"].get(case.name, {}).items():
      part = lambda ms, whole=times[ASSUMED]: f"{ms / whole:.2f}"
      values = ", ".join(f"{name} {part(times[name])}" for name in case.values)
      ends = " to ".join(map(part, times["extremes"])) if "extremes" in times else "none"
      lines.append([case.name, target, f"{times[ASSUMED]:.4g}", values, ends])
  head = ["step", "TPU", "ms, assumed integers", "times with other values / this time"]
  return pages.table([*head, "extremes that the note names"], lines)


def main() -> None:
  parser = timing.parser(__doc__)
  step_times.add_work(parser)
  args = parser.parse_args()
  work, rows = step_times.Work(args.work), {}
  with compiler.Compiler(timeout=args.timeout) as tpu_compiler:
    for case in CASES:
      (step,) = programs.load(str(Path(step_times.STEPS, case.source)))

      def with_values(values: Arrays, step: programs.Program = step) -> calls.Call:
        given = [values.get(number, each) for number, each in enumerate(step.args)]
        return jaxprs.for_one_device(calls.Call(step.function, tuple(given), step.kwargs))

      for target in TARGETS:
        call = with_values({})
        program = work.read(step.name, target, call)
        if program is None:
          program = tpu_compiler.compile(call, tpu.full_name(target))
          work.write(step.name, target, call, program)
        found = milliseconds(program, target, with_values, case)
        rows.setdefault(case.name, {})[target] = found
        print(case.name, target, json.dumps(found), flush=True)
  found = {"libtpu": tpu.libtpu_version(), "targets": TARGETS, "cases": rows}
  timing.write(found, args.out)
  print(table(found))


if __name__ == "__main__":
  main()
