"""How long `estimate` takes beside the compiler alone, on steps of `steps/`.

    python -m benchmarks.estimate_seconds --out benchmarks/estimate_seconds.json

Each step is compiled in a fresh process, as jax compiles it, and estimated in another one, with the
process of its compiler. Seconds are those after imports: of the clock, and of all processors. Both
are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
import os
from pathlib import Path
import resource
import subprocess
import sys
import time
from typing import Any

import jax

from benchmarks import pages, step_times, timing
from tpugraphs_jax.hlo import calls, jaxprs, tpu
from tpugraphs_jax.tuning import estimate, programs

STEPS = (
  "indices.py:embed_gradient",
  "serving.py:sample",
  "serving.py:decode",
  "transformers.py:language_model",
)
WAYS = {"compiler": "compiler alone", "estimate": "`estimate`"}
# What each way compiles first: the first function takes longer.
_WARM = jax.ShapeDtypeStruct((8, 128), "float32")


def compile_alone(call: calls.Call, targets: Sequence[str]) -> None:
  """Compiles one target after the other, without schedules."""
  for target in targets:
    tpu.lower(jaxprs.for_one_device(call), tpu.full_name(target)).compile()


def estimate_all(call: calls.Call, targets: Sequence[str]) -> None:
  for row in estimate.estimate_call(call, targets).rows:
    if row.milliseconds is None:
      sys.exit(f"error: no time on {row.target}: {row.why}")


def seconds(work: Callable[[], Any]) -> dict[str, float]:
  """Seconds of the clock, and of all processors that this process and its children took."""
  used = lambda: sum(
    sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  )
  begin, used_before = time.perf_counter(), used()
  work()
  return {"s": round(time.perf_counter() - begin, 1), "cpu_s": round(used() - used_before, 1)}


def measure(way: str, source: str, targets: Sequence[str]) -> dict[str, float]:
  """Seconds of one way, in this process."""
  (program,) = programs.load(source)
  call = calls.Call(program.function, program.args, program.kwargs)
  if way == "compiler":
    compile_alone(calls.Call(lambda x: x + 1, (_WARM,), {}), targets)
    return seconds(lambda: compile_alone(call, targets))
  return seconds(lambda: estimate_all(call, targets))


def table(found: Mapping[str, Any]) -> str:
  """Seconds of both ways, step by step."""
  lines = []
  for name, row in found["steps"].items():
    both = [f"{row[way]['s']:.1f}, {row[way]['cpu_s']:.1f}" for way in WAYS]
    ratios = [f"{row['estimate'][kind] / row['compiler'][kind]:.2f}" for kind in ("s", "cpu_s")]
    lines.append([name.replace("_", " "), *both, ", ".join(ratios)])
  return pages.table(["step", *(f"{way}, s: clock, CPU" for way in WAYS.values()), "ratio"], lines)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--targets", nargs="+", default=("v5e", "v6e"))
  parser.add_argument("--steps", nargs="+", default=STEPS, help="FILE.py:KEY of steps/")
  parser.add_argument("--way", choices=WAYS, help="measures one step in this process")
  args = parser.parse_args()
  if args.way:
    (step,) = args.steps
    source = str(Path(step_times.STEPS, step))
    print(json.dumps(measure(args.way, source, args.targets)))
    return
  rows: dict[str, dict[str, Any]] = {}
  for step in args.steps:
    name = step.replace(".py:", ", ")
    for way in WAYS:
      command = [sys.executable, "-m", "benchmarks.estimate_seconds", "--way", way]
      command += ["--steps", step, "--targets", *args.targets]
      environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
      ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, text=True
      )
      rows.setdefault(name, {})[way] = json.loads(ended.stdout.splitlines()[-1])
      print(name, way, rows[name][way], flush=True)
  found = {"machine": timing.machine(), "libtpu": tpu.libtpu_version(), "targets": args.targets}
  timing.write({**found, "steps": rows}, args.out)
  print(table({"steps": rows}))


if __name__ == "__main__":
  main()
