"""Writes the tables of README.md and docs/ from recorded figures.

    python -m tools.tables

A table stands between the lines `<!-- table: NAME -->` and `<!-- end of table -->` of a page;
`TABLES` has the function that makes it. Figures are recorded in benchmarks/.
Continuous integration runs this command and fails if a page changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import json
from pathlib import Path
import re
from typing import Any

from benchmarks import (
  accelerators,
  assumed_integers,
  best_of_k,
  device,
  estimate_seconds,
  gst,
  measured,
  measured_programs,
  own_quality,
  own_tiles,
  own_times,
  pages,
  run_all,
  sizes,
  step_times,
  tune,
)
from tpugraphs_jax.leaderboard import race

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

_TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.S)
_SEEDS = (0, 1, 2)
# Runs of the race on the front, with their collection.
_RACE = argparse.Namespace(
  seeds=_SEEDS,
  minutes=5.0,
  steps=0,
  workdir=BENCHMARKS / "races",
  systems=("official", "recommended"),
)
_RELEASED = argparse.Namespace(**vars(_RACE) | {"workdir": BENCHMARKS / "races" / "released"})
_FRONT = {
  "**measured**: 3 released kernels": (_RELEASED, "tile:xla"),
  "synthetic: `tile:xla`": (_RACE, "tile:xla"),
  "synthetic: `layout:xla:random`": (_RACE, "layout:xla:random"),
  "synthetic: `layout:xla:default`": (_RACE, "layout:xla:default"),
  "synthetic: `layout:nlp:random`": (_RACE, "layout:nlp:random"),
  "synthetic: `layout:nlp:default`": (_RACE, "layout:nlp:default"),
}


def recorded(name: str) -> dict[str, Any]:
  """The figures in benchmarks/NAME.json, without the entry of the machine."""
  results = json.loads((BENCHMARKS / f"{name}.json").read_text())
  return {key: row for key, row in results.items() if key != "machine"}


def front() -> str:
  """The race in README.md: a row per collection, measured run times first."""
  head = ["run times", "minutes", "official: tau ↑", "first choice ↓"]
  head += ["recommended: tau ↑", "first choice ↓", "random: first choice ↓"]
  lines = []
  for name, (args, collection) in _FRONT.items():
    rows, _ = race.finished(args, collection)
    bounds = json.loads((args.workdir / f"{race.name_of(collection)}.json").read_text())
    cells = []
    for system in args.systems:
      row = race.summarised(rows[system], collection)
      cells += [pages.figure(row, "kendaltau"), pages.percent(row, "slowdown1")]
    random = pages.percent(bounds["random"], "slowdown1")
    lines.append([name, f"{args.minutes:g}", *cells, random])
  return pages.table(head, lines)


def front_measured() -> str:
  """The measured table of README.md: ways of ranking, on two programs."""
  measured, trained, first = recorded("measured"), recorded("alexnet"), recorded("best_of_k")
  unseen = measured["UNet3D, valid"]["ways"]
  ways = {
    "random order": ("random", "random"),
    "fewest changed layouts": ("changed", ""),
    "the TPU compiler's estimate": ("estimate", ""),
    "`layout-v3-estimate`, which has learnt such estimates of other programs": (
      "model",
      "the one that ships",
    ),
  }
  lines = [
    [
      label,
      pages.figure(first[way], "kendaltau"),
      pages.percent({"slowdown1": first[way]["slowdown"][0]}, "slowdown1", digits=2),
      pages.figure(unseen.get(result, {}), "kendaltau"),
    ]
    for label, (way, result) in ways.items()
  ]
  fits = {
    "GraphSAGE, fitted to 40,000 other layouts of AlexNet": "GraphSAGE, 2 epochs",
    "score tables, fitted to the same": "score tables, 2 epochs",
    "least squares, one number for each choice, fitted to the same": "one-hot least squares",
  }
  lines += [
    [
      label,
      pages.figure(trained[name], "alexnet"),
      pages.percent(trained[name], "slowdown1", digits=2),
      pages.figure(trained[name], "unet3d"),
    ]
    for label, name in fits.items()
  ]
  configs = [
    f"{measured[graph]['configs']:,} layouts" for graph in ("AlexNet, valid", "UNet3D, valid")
  ]
  head = [f"AlexNet, {configs[0]}: tau-b ↑", "first choice ↓", f"UNet3D, {configs[1]}: tau-b ↑"]
  return pages.table(["", *head], lines)


def on_device() -> str:
  """The record of a GPU, or a sentence where there is none."""
  path = BENCHMARKS / "device.json"
  if not path.exists():
    return "No GPU has run this yet."
  return device.table(json.loads(path.read_text()))


def score_table_speed() -> str:
  record = recorded("results")["tables"]
  cell = lambda part, configs: (
    f"{record[part]['step_s']:.2f} s and {record[part]['peak_mib']:,.0f} "
    f"MiB with {configs} configurations"
  )
  rate = lambda part, digits: (
    f"{round(record[part]['configs_per_s'], digits):,.0f} configurations "
    f"a second, {record[part]['peak_mib']:,.0f} MiB"
  )
  return pages.table(
    ["", "score tables", "GraphSAGE"],
    [
      [
        "training step, 8 programs of 6,000 nodes, 250 of them configurable",
        cell("training", 256),
        cell("sage_training", 16),
      ],
      [
        "ranking, program of 10,000 nodes, 500 of them configurable",
        rate("many", -3),
        rate("sage_ranking", 0),
      ],
    ],
  )


def own(name: str, split: str) -> str:
  return own_quality.table(recorded(name)[split])


TABLES: dict[str, Callable[[], str]] = {
  "front": front,
  "best of k": lambda: best_of_k.table(recorded("best_of_k")),
  "comparisons": lambda: run_all.table(recorded("results")),
  "device": on_device,
  "compiled": lambda: accelerators.table(recorded("accelerators")),
  "segments by size": lambda: gst.table(recorded("results")["gst"]),
  "speed of score tables": score_table_speed,
  **{
    f"tune {name}": lambda name=name: tune.table(recorded("results")["tune"][name])
    for name in recorded("results")["tune"].keys() - {"machine", "seeds", "model"}
  },
  "tune v6e": lambda: tune.table(recorded("tune_v6e")["test families"]),
  "measured": lambda: measured.table(recorded("measured")),
  "steps": lambda: step_times.table(recorded("step_times")),
  "all steps": lambda: step_times.all_table(recorded("step_times")),
  "steps without a time": lambda: step_times.missing_table(recorded("step_times")),
  "assumed integers": lambda: assumed_integers.table(recorded("assumed_integers")),
  "seconds of estimate": lambda: estimate_seconds.table(recorded("estimate_seconds")),
  "sizes": lambda: sizes.table(recorded("sizes")),
  "odd sizes": lambda: sizes.outliers_table(recorded("sizes")),
  "corpus": lambda: measured_programs.corpus_table(recorded("measured_corpus")),
  "measured in front": front_measured,
  **{
    f"measured programs, {name}": lambda made=made: made(recorded("measured_programs"))
    for name, made in (
      ("summary", measured_programs.summary_table),
      ("jaxbench", measured_programs.jaxbench_table),
      ("decisions", measured_programs.decisions_table),
      ("block sizes", measured_programs.block_sizes_table),
      ("constants", measured_programs.constants_table),
    )
  },
  **{
    f"{name} {split}": lambda name=name, split=split: own(name, split)
    for name in ("own_quality", "own_quality_cpu")
    for split in own_quality.SPLITS
  },
  **{
    f"own_times {split}": lambda split=split: own_times.table(recorded("own_times")[split])
    for split in own_times.SPLITS
  },
  **{
    f"own_tiles {group}": lambda group=group: own_tiles.table(recorded("own_tiles")[group])
    for group in own_tiles.GROUPS
  },
  "own_quality kept out": lambda: own("own_quality", own_quality.KEPT_OUT),
}


def written(text: str) -> str:
  """The text of a page with its tables made anew from recorded figures."""
  return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def main() -> None:
  argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
  for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
    text = page.read_text()
    new = written(text)
    if new != text:
      page.write_text(new)
      print(f"{page.relative_to(ROOT)}: written")


if __name__ == "__main__":
  main()
