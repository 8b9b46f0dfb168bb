"""Which steps of `steps/` have a time on each TPU, and how long the estimate takes.

    python -m benchmarks.step_times --work WORK --out benchmarks/step_times.json

The steps are compiled for each target in a process of their own, those of real sizes last. `WORK`
keeps what the compiler wrote, so that a command that was stopped goes on; `--again` reads it anew.
The times are estimates; only the seconds are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import gzip
import hashlib
import json
from pathlib import Path
import pickle
import re
import signal
import statistics
import time
from typing import Any

import jax

from benchmarks import pages, timing
from tpugraphs_jax.hlo import calls, jaxprs, proto, tpu, tpu_kernels
from tpugraphs_jax.infra import console, files
from tpugraphs_jax.tuning import compiler, costs, programs

STEPS = Path(__file__).with_name("steps")
TARGETS = ("v6e", "v5e", "v5p", "7x")
LARGE = "large"  # the file of steps of real sizes
_LEVEL = 1  # of gzip
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of a function in the text of a program


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


TOO_LONG = "it took more than"  # of what was ended, by `compiler` too


class Late(Exception):
  """A part took too long."""


@contextlib.contextmanager
def limit(most: float) -> Iterator[None]:
  """Ends a part of this process after some seconds."""

  def late(*_: Any) -> None:
    raise Late(f"{TOO_LONG} {most} s")

  signal.signal(signal.SIGALRM, late)
  signal.setitimer(signal.ITIMER_REAL, most, 1)  # again: Python ignores what a callback raises
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


class Work:
  """What the compiler wrote of each step and target, in files of a folder.

  The name of a file has a digest of the step's program: a step that was changed is compiled again.
  """

  def __init__(self, folder: Path):
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)

  def path(self, name: str, target: str, call: calls.Call) -> Path:
    text = _ADDRESS.sub("", str(call.trace.program.jaxpr))
    return (
      self._folder / f"{name}__{target}__{hashlib.sha256(text.encode()).hexdigest()[:12]}.pkl.gz"
    )

  def read(self, name: str, target: str, call: calls.Call) -> tpu.TpuProgram | None:
    path = self.path(name, target, call)
    if not path.exists():
      return None
    with gzip.open(path) as file:
      return pickle.load(file)  # of this benchmark

  def write(self, name: str, target: str, call: calls.Call, program: tpu.TpuProgram) -> None:
    with files.replacing(self.path(name, target, call), "wb") as file:
      file.write(gzip.compress(pickle.dumps(program), _LEVEL))


def least_ms(program: tpu.TpuProgram, target: str) -> float:
  """Milliseconds of the bytes and operations of a program's instructions, at the peak of a device.

  The schedules have no part in it.
  """
  module = proto.parse_module(program.module, where=f"program for {target}")
  done = tpu_kernels.estimated_cycles(module).work
  return float(costs.least_ms(tpu.full_name(target), done.wide_flops, done.bytes_accessed))


def described(row: costs.TargetEstimate, least: float) -> dict[str, Any]:
  """What a record keeps of an estimate: its time, how much of it is bounds, and what is missing.

  Args:
    row: the estimate.
    least: as of `least_ms`.
  """
  if row.milliseconds is None:
    return {"why": row.why}
  bounds = [f"{kernel.name}: {kernel.why}" for kernel in row.kernels if kernel.is_bound]
  return {
    "ms": float(f"{row.milliseconds:.4g}"),
    **({"least_ms": float(f"{least:.4g}")} if least > row.milliseconds else {}),
    **({"bounded": round(row.bounded_ms / row.milliseconds, 4)} if bounds else {}),
    **({"why": ", ".join(bounds)[:300]} if bounds else {}),
    **({"assumed": len(row.assumed)} if row.assumed else {}),
  }


def trace(
  program: programs.Program, targets: Sequence[str]
) -> tuple[calls.Call | None, dict[str, Any]]:
  """The call of a step, or None and the reason, as the first target traces it."""
  row: dict[str, Any] = {}
  if not targets:
    return None, row
  try:
    with seconds(row, "trace_s"), tpu.as_device(targets[0]):
      given = calls.Call(program.function, program.args, program.kwargs)
      return jaxprs.for_one_device(given), row
  except Exception as error:  # one fault of the package leaves the others their rows
    return None, row | {"why": f"{type(error).__name__}: {console.one_line(error)[:300]}"}


def estimate(
  call: calls.Call, name: str, target: str, tpu_compiler: compiler.Compiler, work: Work, most: int
) -> dict[str, Any]:
  """The row of a step on a target."""
  row: dict[str, Any] = {}
  full = tpu.full_name(target)
  try:
    program = work.read(name, target, call)
    if program is None:
      with seconds(row, "compile_s"):
        program = tpu_compiler.compile(call, full)
      work.write(name, target, call, program)
    with seconds(row, "read_s"), limit(most):
      row |= described(costs.cost(program, full, call), least_ms(program, target))
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
    bounded, below = (sum(name in row for row in timed) for name in ("bounded", "least_ms"))
    counts = (len(rows), len(timed) - bounded, bounded, len(rows) - len(timed), below)
    lines.append([target, *map(str, counts)])
  head = ["TPU", "steps", "by schedules", "some kernels by a bound", "no time"]
  return pages.table([*head, "below their bytes or operations"], lines)


def _named(name: str) -> list[str]:
  """The file and the key of a step."""
  file, _, key = name.removeprefix("in_").partition("_")
  return [file, key.replace("_", " ")]


def missing_table(found: Mapping[str, Any]) -> str:
  """Steps without a time of all their kernels, with the reason."""
  lines = [
    [*_named(name), target, row["why"][:160]]
    for name, rows in found["steps"].items()
    for target, row in rows.items()
    if "why" in row
  ]
  return pages.table(["file", "step", "TPU", "why"], lines)


def _cell(row: Mapping[str, Any]) -> str:
  if "ms" not in row:
    return "no time" if row else ""
  share = f" ({row['bounded']:.0%} by a bound)" if "bounded" in row else ""
  return f"{row['ms']:.3g}{share}"


def all_table(found: Mapping[str, Any]) -> str:
  """The times of all steps, with the seconds of the compiler and of the execution of schedules."""
  lines = []
  for name, rows in found["steps"].items():
    seconds = ["", ""]
    if timed := [row for row in rows.values() if row.get("compile_s") and row.get("read_s")]:
      columns = ([row[part] for row in timed] for part in ("compile_s", "read_s"))
      seconds = [f"{statistics.median(column):.1f}" for column in columns]
    lines.append([*_named(name), *(_cell(rows.get(target, {})) for target in TARGETS), *seconds])
  head = ["file", "step", *(f"{target}, ms" for target in TARGETS)]
  return pages.table([*head, "compiler, s", "schedules, s"], lines)


def add_work(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of what is compiled."""
  parser.add_argument("--work", required=True, type=Path, help="folder of compiled steps")
  parser.add_argument("--timeout", type=int, default=900, help="seconds for one part of a step")


def main() -> None:
  parser = timing.parser(__doc__)
  add_work(parser)
  parser.add_argument("--targets", nargs="+", default=TARGETS)
  parser.add_argument("--only", default="", help="steps whose name contains this text")
  parser.add_argument("--steps", type=Path, default=STEPS, help="folder or file of steps")
  parser.add_argument("--again", action="store_true", help="reads anew what another commit read")
  parser.add_argument("--kept", action="store_true", help="compiles nothing")
  args = parser.parse_args()
  work = Work(args.work)
  before = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
  rows: dict[str, dict[str, Any]] = before.get("steps", {})
  paths = sources(args.steps) if args.steps.is_dir() else [args.steps]
  commit = timing.commit()
  with compiler.Compiler(timeout=args.timeout) as tpu_compiler:
    for path in paths:
      for program in programs.load(str(path)):
        if args.only not in program.name:
          continue
        known = rows.setdefault(program.name, {})
        missing = [
          target
          for target in args.targets
          if target not in known or args.again and known[target].get("commit") != commit
        ]
        call, traced = trace(program, missing)
        for target in missing:
          if args.kept and call and not work.path(program.name, target, call).exists():
            continue
          row = {**traced, "commit": commit}
          if call is not None:
            row |= estimate(call, program.name, target, tpu_compiler, work, args.timeout)
          known[target] = {"compile_s": known.get(target, {}).get("compile_s"), **row}
          written = {"libtpu": tpu.libtpu_version(), "steps": {k: v for k, v in rows.items() if v}}
          timing.write(written, args.out)
          print(f"{program.name} {target}: {json.dumps(row)[:300]}", flush=True)
  print(table({"steps": rows}))


if __name__ == "__main__":
  main()
