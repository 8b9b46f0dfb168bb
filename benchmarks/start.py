"""Seconds from the start of a command to its first finished step, and to its end.

    python benchmarks/start.py --out start.json
    python benchmarks/start.py --before DIR

Every case is a config of the two commands on tiny synthetic data or `data/own`, in a fresh process
without a compilation cache. `xla_s` are seconds of XLA's compilations before the end of
the first step. `--before` names another checkout of this project, whose commands take turns
with those of this checkout. Figures are medians over `--repeats`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = Path(__file__).parents[1]
CASES = {
  "tile": ("tile", "ci"),
  "tile, recommended": ("tile", "recommended,ci"),
  "tile, preset=sixth": ("tile", "preset=sixth,ci"),
  "layout, full": ("layout", "xla-random,full,ci"),
  "layout, gst_ed": ("layout", "xla-random,gst_ed,ci"),
  "layout, official": ("layout", "xla-random,official,ci"),
  "layout, recommended": ("layout", "xla-random,recommended,ci"),
  "layout, preset=first": ("layout", "xla-random,preset=first,ci"),
  "layout, preset=tenth": ("layout", "xla-random,preset=tenth,ci"),
  "own, recommended": ("layout", "own,recommended"),
}
_FIRST_STEP = "first step, with compilation"


def child(events: Path, script: str, flags: list[str]) -> None:
  """Runs a command in this process, and writes the ends and durations of XLA's compilations."""
  import jax

  from tpugraphs_jax import run

  heard: list[tuple[float, float]] = []

  def hear(event: str, duration: float, **unused) -> None:
    if event.endswith("backend_compile_duration"):
      heard.append((time.time(), duration))

  jax.monitoring.register_event_duration_secs_listener(hear)
  sys.argv = [script, *flags]
  try:
    getattr(run, script.removeprefix("run_").removesuffix(".py"))()
  finally:
    events.write_text(json.dumps(heard))


def start(root: Path, case: str, data_root: str) -> dict[str, float]:
  """Figures of one run of a case, by the checkout in `root`."""
  kind, variant = CASES[case]
  if "own" in variant:
    data_root = str(root / "data/own/npz")
  # A compilation cache would hide the time of compilation.
  surroundings = os.environ | {
    "PYTHONPATH": str(root),
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    "JAX_PLATFORMS": "cpu",
  }
  with tempfile.TemporaryDirectory() as folder:
    events, started, first = Path(folder) / "events.json", time.time(), 0.0
    command = [
      sys.executable,
      __file__,
      "--child",
      str(events),
      f"run_{kind}.py",
      f"--config=configs/{kind}.py:{variant}",
      f"--data_root={data_root}",
      f"--workdir={folder}/run",
    ]
    with subprocess.Popen(
      command, cwd=root, env=surroundings, text=True, stdout=subprocess.PIPE
    ) as process:
      for line in process.stdout:
        if _FIRST_STEP in line:
          first = first or time.time() - started
    if process.returncode:
      raise subprocess.CalledProcessError(process.returncode, command)
    end = time.time() - started
    seconds = [duration for at, duration in json.loads(events.read_text()) if at < started + first]
  return {"xla_s": sum(seconds), "first_step_s": first, "compilations": len(seconds), "end_s": end}


def main() -> None:
  import timing

  from tpugraphs_jax import synthetic

  parser = timing.parser(__doc__, repeats=3)
  parser.add_argument("--before", type=Path, help="another checkout to compare with")
  parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
  args = parser.parse_args()
  roots = {"now": ROOT} | ({"before": args.before.resolve()} if args.before else {})
  figures = {}
  with tempfile.TemporaryDirectory() as folder:
    data_root = synthetic.generate(
      folder, collections=["tile:xla", "layout:xla:random"], progress=False
    )
    for case in args.cases:
      found = {name: [] for name in roots}
      for _ in range(args.repeats):
        for name, root in roots.items():
          found[name].append(start(root, case, data_root))
      figures[case] = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
      }
      for name, row in figures[case].items():
        print(
          f"{case:22} {name:6} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()),
          flush=True,
        )
  timing.write({"machine": timing.machine(), **figures}, args.out)


if __name__ == "__main__":
  if sys.argv[1:2] == ["--child"]:
    child(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
  else:
    main()
