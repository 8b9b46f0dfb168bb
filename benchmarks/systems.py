"""The race: trains every system for the same CPU time on one core and compares their quality.

    python -m tpugraphs_jax.synthetic --out DIR --scale medium
    python -m benchmarks.systems --data_root DIR/npz

A run is a fresh process on one core. It first times some steps, so that the schedule of its
learning rate ends with its budget. The budget counts the CPU time of training steps and of
making their batches, but not compilation, preparation and evaluation. Quality is judged on
the validation split after the last step. The systems are the presets, the official settings, the
default and the recommended one.

Every finished run is a JSON file in `--workdir` (`benchmarks/races`). A second call makes the
missing runs, and two calls may share the work by seeds, each on its own core (`--core`). A system
is a preset, a variant, or one of them with fields changed: `--systems tables
"gst_ed+segments.max_nodes=2000"`. `--steps 300` gives every system the same number of steps
instead of the same time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import json
import os
from pathlib import Path
import re
import subprocess
import tempfile
from typing import Any

ROOT = Path(__file__).parents[1]
from benchmarks import pages, quality, race_run, timing
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.run import configs, variants

RACE = ("tile:xla", "layout:xla:random")
CORE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
# The metric that ranks systems, and all metrics of a table.
HEADLINES = {"layout": "kendaltau", "tile": "slowdown1"}
COLUMNS = {
  "layout": ("kendaltau", "opa", "slowdown1", "slowdown10"),
  "tile": ("slowdown1", "slowdown5", "opa", "kendaltau"),
}
_SMALLER_IS_BETTER = ("slowdown1",)
# Systems besides the presets, with their variants of configs/layout.py and configs/tile.py.
OTHERS = {
  "layout": {"recommended": "recommended", "default": "", "official": "official"},
  "tile": {"recommended": "recommended", "official": ""},
}
# Presets that were published for one source of programs alone.
_ONLY = {"second_xla": "xla", "second_nlp": "nlp"}
_PRESET = "preset="
_UNTRAINED = 100  # updates below which a system has hardly begun to learn


def kind_of(collection: str) -> str:
  return collection.partition(":")[0]


def columns_of(collection: str) -> tuple[str, ...]:
  return COLUMNS[kind_of(collection)]


def systems_of(kind: str) -> dict[str, str]:
  """The config variant of every system of a kind (`layout` or `tile`), by name."""
  names = [name for name in variants.systems(kind) if name.startswith(_PRESET)]
  return {name.removeprefix(_PRESET): name for name in names} | OTHERS[kind]


def racing(collection: str) -> list[str]:
  """The systems that race on a collection, without those made for other programs."""
  kind, source, *_ = collection.split(":")
  return [name for name in systems_of(kind) if _ONLY.get(name, source) == source]


def config_name(collection: str, system: str) -> str:
  """The value of `--config` of a system on a collection, without changes of fields."""
  kind, source, *search = collection.split(":")
  place, name = "" if kind == "tile" else "-".join([source, *search]), system.partition("+")[0]
  variants = ",".join(filter(None, (place, systems_of(kind).get(name, name))))
  return ":".join(filter(None, (f"{kind}.py", variants)))


def config_of(collection: str, system: str, seed: int, data_root: str):
  """The config of a system on a collection."""
  changes, config = system.split("+")[1:], configs.load(config_name(collection, system))
  return config.replace(seed=seed, data_root=data_root, **dict(map(_field, changes)))


def _field(change: str) -> tuple[str, Any]:
  """The field and value of a change such as `loss.margin=0.01`; values are JSON or strings."""
  name, _, text = change.partition("=")
  try:
    value = json.loads(text)
    return name, tuple(value) if isinstance(value, list) else value
  except ValueError:
    return name, text


def limits(collection: str, data_root: str) -> dict[str, dict[str, float]]:
  """Figures of a random order, and on synthetic data of ranking by the noise-free runtimes."""
  case = quality.CASES[collection]._replace(columns=columns_of(collection))
  return quality.bounds(case, collection, data_root)


def summarised(rows: Sequence[Mapping[str, Any]], collection: str) -> dict[str, Any]:
  """Means over seeds of one system, and standard deviations of its metrics."""
  figures = (*columns_of(collection), "parameters", "updates", "step_ms", "rank_cpu_s", "peak_mib")
  return pages.summary([{name: row[name] for name in figures} for row in rows])


def ranked(results: Mapping[str, Mapping[str, Any]], kind: str) -> list[tuple[str, Any]]:
  """Systems with their figures, best first."""
  headline = HEADLINES[kind]
  sign = 1 if headline in _SMALLER_IS_BETTER else -1
  return sorted(results.items(), key=lambda item: sign * item[1][headline])


def table(results: Mapping[str, Any], collection: str, bounds: Mapping[str, Any]) -> str:
  """Systems of a collection as a Markdown table: the ceiling, systems best first, random order."""
  columns = columns_of(collection)
  updates = lambda row: (
    f"{row['updates']:,.0f}" + (" (untrained)" if row["updates"] < _UNTRAINED else "")
  )
  # `opa` of a run is pooled over graphs, that of a bound is a mean over graphs.
  pooled = lambda column: "opa_pooled" if column == "opa" else column
  bound = lambda name, row: [name, *(pages.figure(row, pooled(c)) for c in columns), *[""] * 6]
  lines = [
    [
      f"`{name}`",
      *(pages.figure(row, column) for column in columns),
      f"{row['parameters']:,.0f}",
      updates(row),
      f"{row['step_ms']:.1f}",
      f"{row['rank_cpu_s']:.1f}",
      f"{row['peak_mib']:,.0f}",
      str(row["seeds"]),
    ]
    for name, row in ranked(results, kind_of(collection))
  ]
  return pages.table(
    [
      "system",
      *("pooled OPA" if column == "opa" else column for column in columns),
      "parameters",
      "updates",
      "ms / step",
      "s to rank",
      "peak MiB",
      "seeds",
    ],
    [
      *(bound("ceiling (no noise)", row) for name, row in bounds.items() if name == "ceiling"),
      *lines,
      bound("random order", bounds["random"]),
    ],
  )


def row_path(args: argparse.Namespace, collection: str, system: str, seed: int) -> Path:
  length = f"{args.steps}steps" if args.steps else f"{args.minutes:g}min"
  name = name_of(f"{collection}-{system}-{length}-{seed}")
  return args.workdir / "runs" / f"{name}.json"


def name_of(text: str) -> str:
  """A text as a file name: other characters than letters, digits and `.=+-` become `_`."""
  return re.sub(r"[^\w.=+-]+", "_", text)


def run_missing(args: argparse.Namespace, collection: str, system: str, seed: int) -> None:
  """Makes a run in a fresh process unless it is recorded; reports a run that fails."""
  path = row_path(args, collection, system, seed)
  if path.exists():
    return
  print(f"{collection}  {system}  seed {seed}", flush=True)
  arguments = [
    "--here",
    "--collections",
    collection,
    "--systems",
    system,
    "--seeds",
    str(seed),
    "--minutes",
    str(args.minutes),
    "--steps",
    str(args.steps),
    "--data_root",
    str(args.data_root),
    "--workdir",
    str(args.workdir),
    "--core",
    str(args.core),
  ]
  try:
    row = timing.in_subprocess("systems", *arguments)
  except subprocess.CalledProcessError as error:
    print(f"  failed with exit code {error.returncode}: not counted", flush=True)
    return
  timing.write({"collection": collection, "system": system, "seed": seed, **row}, path)


def run_here(args: argparse.Namespace) -> None:
  """Makes one run in this process, on one core, and writes its figures to `--out`."""
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {args.core})
  (collection,), (system,), (seed,) = args.collections, args.systems, args.seeds
  config = config_of(collection, system, seed, args.data_root)
  length = {"steps": args.steps} if args.steps else {"budget": 60 * args.minutes}
  parallel.use_compilation_cache(args.workdir / "compilation_cache")
  with tempfile.TemporaryDirectory() as folder:
    try:
      figures = race_run.measure(config, Path(folder), **length)
    except ValueError as error:  # such as data on which this system cannot be trained
      figures = {"error": str(error)}
    timing.write(figures, args.out)


def finished(
  args: argparse.Namespace, collection: str
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
  """Figures of the finished runs by system, and a line for each other run."""
  rows: dict[str, list[dict[str, Any]]] = {}
  failures = []
  for system in args.systems or racing(collection):
    for seed in args.seeds:
      path = row_path(args, collection, system, seed)
      row = json.loads(path.read_text()) if path.exists() else {"error": "the run ended early"}
      if "error" in row:
        failures.append(f"{system}, seed {seed}: {row['error']}")
      else:
        rows.setdefault(system, []).append(row)
  return rows, failures


def recorded(args: argparse.Namespace, collection: str) -> str:
  """The table of the systems with finished runs."""
  rows, failures = finished(args, collection)
  for line in failures:
    print(f"{collection}  {line}", flush=True)
  bounds = args.workdir / f"{name_of(collection)}.json"
  if not bounds.exists():
    timing.write(limits(collection, args.data_root), bounds)
  return table(
    {system: summarised(some, collection) for system, some in rows.items()},
    collection,
    json.loads(bounds.read_text()),
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", help="synthetic data, with tile/ and layout/")
  parser.add_argument(
    "--workdir", type=Path, default=ROOT / "benchmarks/races", help="folder for the runs"
  )
  parser.add_argument("--collections", nargs="+", default=RACE, help=f"default: {', '.join(RACE)}")
  parser.add_argument("--systems", nargs="+", help="names of presets, or variants; default: all")
  parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
  parser.add_argument("--minutes", type=float, default=5.0, help="CPU minutes of training")
  parser.add_argument("--steps", type=int, default=0, help="training steps, instead of --minutes")
  parser.add_argument("--core", type=int, default=CORE, help="core to run on")
  parser.add_argument("--here", action="store_true", help="make one run, in this process")
  args = parser.parse_args()
  if args.here:
    run_here(args)
    return
  for collection in args.collections:
    for system in args.systems or racing(collection):
      for seed in args.seeds:
        run_missing(args, collection, system, seed)
    print(f"\n{collection}\n\n{recorded(args, collection)}\n", flush=True)


if __name__ == "__main__":
  main()
