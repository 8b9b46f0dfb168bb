"""Which steps of `steps/` have a time on each TPU, and how long the estimate takes.

    python -m benchmarks.step_times --work WORK --out benchmarks/step_times.json

The steps are compiled for each target in a process of their own, those of real sizes last. `WORK`
keeps what the compiler wrote, so that a command that was stopped goes on; `--again` reads it anew.
The times are estimates; only the seconds are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import gzip
import json
from pathlib import Path
import pickle
import signal
import time
from typing import Any

import jax

from benchmarks import pages, timing
from tpugraphs_jax.hlo import calls, jaxprs, tpu
from tpugraphs_jax.infra import console, files
from tpugraphs_jax.tuning import compiler, costs, programs

STEPS = Path(__file__).with_name("steps")
TARGETS = ("v6e", "v5e", "v5p", "7x")
LARGE = "large"  # the file of steps of real sizes
_LEVEL = 1  # of gzip


def sources(folder: Path) -> list[Path]:
  """The files of steps, that of real sizes last."""
  return sorted(folder.glob("[!_]*.py"), key=lambda path: (path.stem == LARGE, path.stem))


@contextlib.contextmanager
def seconds(row: dict[str, Any], name: str) -> Iterator[None]:
  begin = time.perf_counter()
  try:
    yield
  finally:
    row[name] = round(time.perf_counter() - begin, 2)


class _Late(Exception):
  """A part took too long."""


@contextlib.contextmanager
def limit(most: int) -> Iterator[None]:
  """Ends a part of this process after some seconds."""

  def late(*_: Any) -> None:
    raise _Late(f"it took more than {most} s")

  signal.signal(signal.SIGALRM, late)
  signal.alarm(most)
  try:
    yield
  finally:
    signal.alarm(0)


class Work:
  """What the compiler wrote of each step and target, in files of a folder."""

  def __init__(self, folder: Path):
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)

  def _path(self, name: str, target: str) -> Path:
    return self._folder / f"{name}__{target}.pkl.gz"

  def read(self, name: str, target: str) -> tpu.TpuProgram | None:
    path = self._path(name, target)
    if not path.exists():
      return None
    with gzip.open(path) as file:
      return pickle.load(file)  # of this benchmark

  def write(self, name: str, target: str, program: tpu.TpuProgram) -> None:
    with files.replacing(self._path(name, target), "wb") as file:
      file.write(gzip.compress(pickle.dumps(program), _LEVEL))


def described(row: costs.Row) -> dict[str, Any]:
  """What a record keeps of an estimate: its time, how much of it is bounds, and what is missing."""
  if row.milliseconds is None:
    return {"why": row.why}
  bounds = [f"{kernel.name}: {kernel.why}" for kernel in row.kernels if kernel.is_bound]
  return {
    "ms": float(f"{row.milliseconds:.4g}"),
    **({"bounded": round(row.bounded_ms / row.milliseconds, 4)} if bounds else {}),
    **({"why": ", ".join(bounds)[:300]} if bounds else {}),
    **({"assumed": len(row.assumed)} if row.assumed else {}),
  }


def estimate(
  call: calls.Call, name: str, target: str, tpu_compiler: compiler.Compiler, work: Work, most: int
) -> dict[str, Any]:
  """The row of a step on a target."""
  row: dict[str, Any] = {}
  full = tpu.full_name(target)
  try:
    program = work.read(name, target)
    if program is None:
      with seconds(row, "compile_s"):
        program = tpu_compiler.compile(call, full)
      work.write(name, target, program)
    with seconds(row, "read_s"), limit(most):
      row |= described(costs.cost(program, full, call))
    row["schedules_mb"] = round(sum(map(len, program.schedules.values())) / 1e6, 2)
  except jax.errors.JaxRuntimeError as error:
    row["why"] = f"the compiler says: {console.one_line(error)[:300]}"
  except compiler.Ended as error:
    row["why"] = f"the compiler failed: {error}"
  except Exception as error:  # one fault of the package leaves the others their rows
    row["why"] = f"{type(error).__name__}: {console.one_line(error)[:300]}"
  return row


def table(found: Mapping[str, Any]) -> str:
  """How many steps have a time on each target, and from what."""
  lines = []
  for target in TARGETS:
    rows = [row[target] for row in found["steps"].values() if target in row]
    timed = [row for row in rows if "ms" in row]
    bounded = sum("bounded" in row for row in timed)
    none = len(rows) - len(timed)
    lines.append([target, *map(str, (len(rows), len(timed) - bounded, bounded, none))])
  return pages.table(["TPU", "steps", "by schedules", "some kernels by a bound", "no time"], lines)


def missing_table(found: Mapping[str, Any]) -> str:
  """Steps without a time of all their kernels, with the reason."""
  lines = [
    [name.partition("_")[0], name.partition("_")[2].replace("_", " "), target, row["why"][:160]]
    for name, rows in found["steps"].items()
    for target, row in rows.items()
    if "why" in row
  ]
  return pages.table(["file", "step", "TPU", "why"], lines)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--work", required=True, type=Path, help="folder of compiled steps")
  parser.add_argument("--targets", nargs="+", default=TARGETS)
  parser.add_argument("--only", default="", help="steps whose name contains this text")
  parser.add_argument("--steps", type=Path, default=STEPS, help="folder or file of steps")
  parser.add_argument("--timeout", type=int, default=900, help="seconds for one part of a step")
  parser.add_argument("--again", action="store_true", help="reads what was compiled anew")
  args = parser.parse_args()
  work = Work(args.work)
  before = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
  rows: dict[str, dict[str, Any]] = before.get("steps", {})
  paths = sources(args.steps) if args.steps.is_dir() else [args.steps]
  with compiler.Compiler(timeout=args.timeout) as tpu_compiler:
    for path in paths:
      for program in programs.load(str(path)):
        if args.only not in program.name:
          continue
        known = rows.setdefault(program.name, {})
        missing = [target for target in args.targets if args.again or target not in known]
        if not missing:
          continue
        part: dict[str, Any] = {}
        try:
          with seconds(part, "trace_s"):
            call = jaxprs.for_one_device(calls.Call(program.function, program.args, program.kwargs))
        except Exception as error:
          call = None
          part["why"] = f"{type(error).__name__}: {console.one_line(error)[:300]}"
        for target in missing:
          row = dict(part)
          if call is not None:
            row |= estimate(call, program.name, target, tpu_compiler, work, args.timeout)
          before = {"compile_s": known[target].get("compile_s")} if target in known else {}
          known[target] = before | row
          timing.write({"libtpu": tpu.libtpu_version(), "steps": rows}, args.out)
          print(f"{program.name} {target}: {json.dumps(row)[:300]}", flush=True)
  print(table({"steps": rows}))


if __name__ == "__main__":
  main()
