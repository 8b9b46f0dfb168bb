"""CPU time and memory of a training step of every preset, beside another version of the project.

    python -m tpugraphs_jax.synthetic --out DIR --scale tiny
    git worktree add ../before COMMIT
    python benchmarks/system_steps.py --data_root DIR/npz --other ../before

The two versions take turns, each run in a fresh process on one core (`systems.py --steps`). A
figure is the median over the runs of the mean over steps that compiled nothing; memory is the
peak of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import pages
import systems
import timing

ROOT = Path(__file__).parents[1]
_JUDGED = "+eval.max_configs=8"  # a run is judged at its end, which is not timed


def step_of(name: str, root: Path, collection: str, system: str, args: Any) -> dict[str, float]:
  """Figures of a run of some steps with the version of that name in a folder."""
  if collection.startswith("layout"):  # a store of its own, since formats may differ
    system += f"{_JUDGED}+data.store_dir={args.data_root}/store_{name}"
  with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "figures.json"
    subprocess.run(
      [
        sys.executable,
        str(root / "benchmarks/systems.py"),
        "--here",
        "--collections",
        collection,
        "--systems",
        system,
        "--seeds",
        "0",
        "--steps",
        str(args.steps),
        "--data_root",
        args.data_root,
        "--workdir",
        folder,
        "--out",
        str(out),
      ],
      check=True,
      cwd=folder,
      env={"PYTHONPATH": str(root), "PATH": ""},
      stdout=subprocess.DEVNULL,
    )
    return json.loads(out.read_text())


def beside(collection: str, system: str, args: Any) -> dict[str, float]:
  """Medians of both versions, and their ratio."""
  runs: dict[str, list[Mapping[str, float]]] = {"before": [], "now": []}
  for _ in range(args.repeats):
    for name, root in (("before", args.other), ("now", ROOT)):
      runs[name].append(step_of(name, root.resolve(), collection, system, args))
  figures = {
    f"{key}_{name}": statistics.median(run[key] for run in found)
    for name, found in runs.items()
    for key in ("step_ms", "peak_mib", "parameters")
  }
  return figures | {"ratio": figures["step_ms_now"] / figures["step_ms_before"]}


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
  """The figures as a Markdown table."""
  return pages.table(
    ["preset", "ms / step, before", "now", "ratio", "peak MiB, before", "now"],
    [
      [
        f"`{name}`",
        f"{row['step_ms_before']:,.0f}",
        f"{row['step_ms_now']:,.0f}",
        f"{row['ratio']:.2f}",
        f"{row['peak_mib_before']:,.0f}",
        f"{row['peak_mib_now']:,.0f}",
      ]
      for name, row in rows.items()
      if name != "machine"
    ],
  )


def main() -> None:
  parser = timing.parser(__doc__, repeats=3)
  parser.add_argument("--data_root", required=True, help="synthetic data, with tile/ and layout/")
  parser.add_argument("--other", required=True, type=Path, help="checkout of the other version")
  parser.add_argument("--steps", type=int, default=6, help="training steps of a run")
  parser.add_argument("--collections", nargs="+", default=systems.RACE)
  parser.add_argument("--systems", nargs="+", help="names of presets; default: all")
  args = parser.parse_args()
  rows = {}
  for collection in args.collections:
    names = [
      name
      for name in systems.racing(collection)
      if name not in systems.OTHERS[systems.kind_of(collection)]
    ]
    for system in args.systems or names:
      rows[f"{collection} {system}"] = beside(collection, system, args)
      print(table(rows).splitlines()[-1], flush=True)
      timing.write({"machine": timing.machine(), **rows}, args.out)


if __name__ == "__main__":
  main()
