"""The race: trains every system for the same CPU time on one core and compares their quality.

    python -m tpugraphs_jax.synthetic --out DIR --scale medium
    python -m benchmarks.systems --data_root DIR/npz

Runs and systems are those of `tpugraphs_jax.leaderboard.race`. Every finished run is a JSON file in
`--workdir` (`benchmarks/races`). A second call makes the missing runs, and two calls may share the
work by seeds, each on its own core (`--core`). A system is a preset, a variant, or one of them with
fields changed: `--systems tables "gst_ed+segments.max_nodes=2000"`. `--steps 300` gives every
system the same number of steps instead of the same time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

from benchmarks import pages, quality, timing
from tpugraphs_jax.leaderboard import race

ROOT = Path(__file__).parents[1]
RACE = ("tile:xla", "layout:xla:random")
_UNTRAINED = 100  # updates below which a system has hardly begun to learn


def limits(collection: str, data_root: str) -> dict[str, dict[str, float]]:
  """Figures of a random order, and on synthetic data of ranking by the noise-free runtimes."""
  case = quality.CASES[collection]._replace(columns=race.columns_of(collection))
  return quality.bounds(case, collection, data_root)


def table(results: Mapping[str, Any], collection: str, bounds: Mapping[str, Any]) -> str:
  """Systems of a collection as a Markdown table: the ceiling, systems best first, random order."""
  columns = race.columns_of(collection)
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
    for name, row in race.ranked(results, race.kind_of(collection))
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


def recorded(args: argparse.Namespace, collection: str) -> str:
  """The table of the systems with finished runs."""
  rows, failures = race.finished(args, collection)
  for line in failures:
    print(f"{collection}  {line}", flush=True)
  bounds = args.workdir / f"{race.name_of(collection)}.json"
  if not bounds.exists():
    timing.write(limits(collection, args.data_root), bounds)
  return table(
    {system: race.summarised(some, collection) for system, some in rows.items()},
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
  parser.add_argument("--core", type=int, default=race.CORE, help="core to run on")
  args = parser.parse_args()
  for collection in args.collections:
    for system in args.systems or race.racing(collection):
      for seed in args.seeds:
        race.run_missing(args, collection, system, seed)
    print(f"\n{collection}\n\n{recorded(args, collection)}\n", flush=True)


if __name__ == "__main__":
  main()
