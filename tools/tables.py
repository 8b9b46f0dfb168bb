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
  alexnet,
  assumed_integers,
  best_of_k,
  device,
  estimate_seconds,
  gst,
  measured,
  measured_programs,
  own_quality,
  own_times,
  pages,
  run_all,
  sizes,
  step_times,
  systems,
  tune,
)
from tpugraphs_jax.leaderboard import race

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

_TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.S)
_SEEDS = (0, 1, 2)
_LAYOUTS = ("layout:xla:random", "layout:xla:default", "layout:nlp:random", "layout:nlp:default")
_RANDOM, _CEILING = "random order", "ceiling (no noise)"
_OFFICIAL = {
  "tile:xla": "`EarlyJoinSAGE`, official settings",
  **dict.fromkeys(_LAYOUTS, "`ResModel`, official settings"),
}
_RECOMMENDED = {
  "tile:xla": "`EarlyJoinSAGE`, recommended settings",
  **dict.fromkeys(_LAYOUTS, "`ScoreTables`, recommended settings"),
}
_WHOLE = "`SAGE`, 3 epochs of 10"
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
# Runs take 128 steps, one of the config's ten epochs, and are judged on 200 configurations of each
# validation program.
_EPOCH_STEPS, _JUDGED = 128, "+eval.max_configs=200"
_BESIDE = {
  "`full`": "full",
  "default": "gst_ed+segments.max_nodes=5000",
  "segments of 2,000 nodes": "gst_ed+segments.max_nodes=2000",
  "`gst_ed`": "gst_ed",
}
# Nodes of the largest training graph: of synthetic `medium` data by source, and of the first 12
# graphs of scale `full`.
_LARGEST = {"xla": 2951, "nlp": 2353, "large": 39_420}


def recorded(name: str) -> dict[str, Any]:
  """The figures in benchmarks/NAME.json, without the entry of the machine."""
  results = json.loads((BENCHMARKS / f"{name}.json").read_text())
  return {key: row for key, row in results.items() if key != "machine"}


def tiles() -> str:
  columns = {
    "slowdown5": "slowdown of the best of 5",
    "slowdown1": "slowdown of the first",
    "opa": "OPA (mean over graphs)",
  }
  rows = recorded("quality")["tile:xla"]
  return pages.table(
    ["", *columns.values()],
    [[name, *(pages.figure(row, column) for column in columns)] for name, row in rows.items()],
  )


def layouts() -> str:
  rows = recorded("quality")
  names = [_RANDOM, _OFFICIAL[_LAYOUTS[0]], _WHOLE, _RECOMMENDED[_LAYOUTS[0]], _CEILING]
  return pages.table(
    ["Kendall tau", *names],
    [
      [f"`{collection}`", *(pages.figure(rows[collection][name], "kendaltau") for name in names)]
      for collection in _LAYOUTS
    ],
  )


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
      pages.percent(trained[name], alexnet.SLOWDOWN, digits=2),
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


def race_table(collection: str) -> str:
  """The race on a collection; the systems that have not run with all seeds are named below it."""
  args, asked = argparse.Namespace(**vars(_RACE)), race.racing(collection)
  args.systems = [
    system
    for system in asked
    if all(race.row_path(args, collection, system, seed).exists() for seed in _SEEDS)
  ]
  text = systems.recorded(args, collection) if args.systems else ""
  missing = ", ".join(f"`{name}`" for name in asked if name not in args.systems)
  return text + (f"\n\nNot run with three seeds: {missing}." if missing else "")


def beside_default() -> str:
  """Recorded runs of the default of layouts, of whole graphs and of smaller segments."""
  lines = []
  cases = [
    *(("default", name, _EPOCH_STEPS) for name in _LAYOUTS),
    *(("large", _LAYOUTS[0], steps) for steps in (_EPOCH_STEPS, 3 * _EPOCH_STEPS)),
  ]
  for folder, collection, steps in cases:
    args = argparse.Namespace(workdir=BENCHMARKS / "races" / folder, steps=steps)
    source = collection.split(":")[1] if folder == "default" else folder
    for name, system in _BESIDE.items():
      paths = [race.row_path(args, collection, system + _JUDGED, seed) for seed in _SEEDS]
      if runs := [json.loads(path.read_text()) for path in paths if path.exists()]:
        row = race.summarised(runs, collection)
        more = f", {steps} steps" if steps > _EPOCH_STEPS else ""
        lines.append(
          [
            f"`{collection}`",
            f"{_LARGEST[source]:,}",
            name + more,
            pages.figure(row, "kendaltau"),
            str(row["seeds"]),
            f"{row['step_ms'] / 1e3:.2f} s",
            f"{row['peak_mib']:,.0f} MiB",
          ]
        )
  return pages.table(
    [
      "collection",
      "nodes of the largest graph",
      "variant",
      "Kendall tau",
      "seeds",
      "CPU time of a step",
      "peak memory",
    ],
    lines,
  )


def own(name: str, split: str) -> str:
  return own_quality.table(recorded(name)[split])


def output_orders() -> str:
  results = recorded("output_orders")
  columns = {
    "alexnet_tau_b": "AlexNet, tau-b",
    "alexnet_tau": "AlexNet, tau of the ranking",
    "unet3d_tau_b": "UNet3D, tau-b",
    "unet3d_tau": "UNet3D, tau of the ranking",
  }
  return pages.table(
    ["ranker", "integers of a node", *columns.values(), "CPU seconds of training"],
    [
      [name, integers, *(pages.figure(row, column) for column in columns), f"{row['train_s']:.0f}"]
      for name in ("ResModel", "GraphSAGE", "score tables")
      for features, integers in (("released", "18"), ("outputs", "6"))
      if (row := results.get(f"{name}, {features}"))
    ],
  )


TABLES: dict[str, Callable[[], str]] = {
  "front": front,
  "tiles": tiles,
  "layouts": layouts,
  "output orders": output_orders,
  "best of k": lambda: best_of_k.table(recorded("best_of_k")),
  "alexnet": lambda: alexnet.table(recorded("alexnet")),
  "comparisons": lambda: run_all.table(recorded("results")),
  "device": on_device,
  "compiled": lambda: accelerators.table(recorded("accelerators")),
  "segments by size": lambda: gst.table(recorded("results")["gst"]),
  "default beside whole graphs": beside_default,
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
    for split in own_quality.SPLITS
  },
  "own_quality kept out": lambda: own("own_quality", own_quality.KEPT_OUT),
  **{
    f"race {collection}": lambda collection=collection: race_table(collection)
    for collection in systems.RACE
  },
  "race of released kernels": lambda: systems.recorded(_RELEASED, "tile:xla"),
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
