"""How long `estimate` takes beside the compiler alone on steps of `steps/`, and README's block.

    python -m benchmarks.estimate_seconds --out benchmarks/estimate_seconds.json

Each step is compiled in a fresh process, as jax compiles it, and estimated in another one, with the
process of its compiler. README's first block of Python is one estimate, and eight labels of `tune`.
Seconds are those after imports: of the clock, and of all processors. Both are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
import json
import os
from pathlib import Path
import re
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
  "large.py:gpt",
)
README = Path(__file__).parents[1] / "README.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TUNES = "tuned = "  # begins the part of README's block that makes labels
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
  """Seconds of the clock and of all processors, with those of children; the load at the end."""
  used = lambda: sum(
    sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  )
  begin, used_before = time.perf_counter(), used()
  work()
  passed, busy = time.perf_counter() - begin, used() - used_before
  return {"s": round(passed, 1), "cpu_s": round(busy, 1), "load": round(os.getloadavg()[0], 1)}


def measure(way: str, source: str, targets: Sequence[str]) -> dict[str, float]:
  """Seconds of one way, in this process."""
  (program,) = programs.load(source)
  call = calls.Call(program.function, program.args, program.kwargs)
  if way == "compiler":
    compile_alone(calls.Call(lambda x: x + 1, (_WARM,), {}), targets)
    return seconds(lambda: compile_alone(call, targets))
  return seconds(lambda: estimate_all(call, targets))


def measure_readme() -> dict[str, dict[str, float]]:
  """Seconds of both parts of README's block, in this process."""
  block = _BLOCK.search(README.read_text())
  assert block is not None
  before, tunes, after = block[1].partition(_TUNES)
  parts = {"README, estimate": before, "README, eight labels of tune": tunes + after}
  variables: dict[str, Any] = {"__name__": "__main__"}
  return {
    name: seconds(functools.partial(exec, compile(part, str(README), "exec"), variables))
    for name, part in parts.items()
  }


def table(found: Mapping[str, Any]) -> str:
  """Seconds of both ways, step by step."""
  lines = []
  for name, row in found["steps"].items():
    both = [f"{row[way]['s']:.1f}, {row[way]['cpu_s']:.1f}" if way in row else "" for way in WAYS]
    kinds = ("s", "cpu_s") if "compiler" in row else ()
    ratios = [f"{row['estimate'][kind] / row['compiler'][kind]:.2f}" for kind in kinds]
    lines.append([name.replace("_", " "), *both, ", ".join(ratios)])
  return pages.table(["step", *(f"{way}, s: clock, CPU" for way in WAYS.values()), "ratio"], lines)


def apart(*args: str) -> Any:
  """What this script prints last in a process of its own."""
  command = [sys.executable, "-m", "benchmarks.estimate_seconds", *args]
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
  ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
  return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--targets", nargs="+", default=("v5e", "v6e"))
  parser.add_argument("--steps", nargs="*", default=STEPS, help="FILE.py:KEY of steps/")
  parser.add_argument("--way", choices=(*WAYS, "readme"), help="measures in this process")
  args = parser.parse_args()
  if args.way:
    sources = [str(Path(step_times.STEPS, step)) for step in args.steps]
    found = [measure(args.way, source, args.targets) for source in sources]
    print(json.dumps(found[0] if found else measure_readme()))
    return
  rows: dict[str, dict[str, Any]] = {}
  for step in args.steps:
    name = step.replace(".py:", ", ")
    for way in WAYS:
      found = apart("--way", way, "--steps", step, "--targets", *args.targets)
      rows.setdefault(name, {})[way] = found
      print(name, way, found, flush=True)
  for name, found in apart("--way", "readme", "--steps").items():
    rows[name] = {"estimate": found}
    print(name, found, flush=True)
  about = {"machine": timing.machine(), "libtpu": tpu.libtpu_version(), "targets": args.targets}
  timing.write({**about, "steps": rows}, args.out)
  print(table({"steps": rows}))


if __name__ == "__main__":
  main()
