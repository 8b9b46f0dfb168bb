"""Score tables on the synthetic layout collections: Kendall tau, proposals, ablations.

    python -m tpugraphs_jax.synthetic --out DIR --scale medium
    python benchmarks/tables_quality.py --data_root DIR/npz --workdir out/tables_quality

Trains every variation with every seed by `run_layout.py`, in working folders that are kept:
a second call continues where the first one stopped. Every run gives

  kendaltau   mean over the validation programs, up to 1,000 configurations of each
  cpu_s       CPU seconds of the training command, with compilation and validation

Runs of all epochs on the random collections also give four slowdowns over the optimum:

  proposed    the best of ten proposals from a free search
  near        the best of ten proposals from a search that starts at the program's own
              configuration
  own         the program's own configuration
  measured    the best configuration in the file

Slowdowns are of runtimes without noise, which the generator can compute for any choice. The
optimum is the minimum of the generator's cost function (`rankers.tables.search`).
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import json
from pathlib import Path
from typing import Any

import kept_runs
import numpy as np
import pages
import timing

from tpugraphs_jax import synthetic
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.rankers.tables import search
from tpugraphs_jax.synthetic import layouts

COLLECTIONS = tuple(
  f"layout:{source}:{search_}" for source in ("xla", "nlp") for search_ in ("random", "default")
)
_SHORT = ("--config.train.epochs=3",)  # the config has 10
# Variant of configs/layout.py and flags, by the name of a row. Ablations train for 3 epochs.
_SHORT_NAME = "score tables, 3 epochs of 10"
SAGE = "GraphSAGE, 3 epochs of 10"
MAIN = {"score tables": ("tables", ()), _SHORT_NAME: ("tables", _SHORT), SAGE: ("", _SHORT)}
ABLATIONS = {
  _SHORT_NAME: ("tables", _SHORT),
  **{f"{n} rounds": ("tables", (*_SHORT, f"--config.model.num_gnns={n}")) for n in (1, 3, 6, 10)},
  **{f"width {n}": ("tables", (*_SHORT, f"--config.model.hidden_dim={n}")) for n in (16, 64)},
  "no pairs": ("tables", (*_SHORT, "--config.model.pairs=none")),
  "costs not by bytes": ("tables", (*_SHORT, "--config.model.by_bytes=False")),
  "no tile padding": ("tables", (*_SHORT, "--config.model.tile_padding=False")),
  **{f"slates of {n}": ("tables", (*_SHORT, f"--config.batch.configs={n}")) for n in (16, 64)},
}
_PROPOSALS = 10
_EQUAL = 1e-9  # slowdown below which a configuration is the optimum


def figures(
  collection: str, variant: str, flags: Sequence[str], seed: int, data_root: str, workdir: Path
) -> dict[str, Any]:
  """Figures of a run; also the slowdowns of each validation program, of all epochs on `random`."""
  _, source, search_ = collection.split(":")
  cpu_s = kept_runs.train(
    "layout",
    (f"{source}-{search_}", variant),
    data_root,
    workdir,
    f"--config.seed={seed}",
    "--config.train.eval_every_epochs=1000",
    *flags,
  )
  taus = list(kept_runs.validation(workdir, "kendaltau").values())
  result = {"seed": seed, "kendaltau": float(np.mean(taus)), "cpu_s": cpu_s}
  if flags or search_ != "random":
    return result
  kept, ranker = workdir / "proposals.json", Ranker.load(workdir)
  if not kept.exists():
    kept.write_text(
      json.dumps(
        {
          graph.name: proposals(ranker, graph, collection, data_root)
          for graph in _valid(data_root, collection)
        }
      )
    )
  return result | {"programs": json.loads(kept.read_text())}


@functools.cache
def _valid(data_root: str, collection: str) -> list[OpGraph]:
  return [npz.read_layout(file) for file in npz.split_files(data_root, collection, "valid")]


def proposals(ranker: Ranker, graph: OpGraph, collection: str, data_root: str) -> dict[str, float]:
  """Slowdowns over the optimum of one program, by the names at the top of this file."""
  cost, groups = _truth(collection, graph.name)

  def runtime(group_row: np.ndarray) -> float:
    """Least noise-free runtime of configurations `[n, groups]`, in nanoseconds."""
    rows = graph.configs.rows[group_row]  # [n, B, 18]
    same = (groups.rows[groups.options] == rows[:, :, None]).all(axis=-1)  # [n, B, options]
    return cost(layouts.output_bits(same.argmax(axis=-1))).min()

  pairs = {(int(g), int(h)): np.diag([0.0, cost.pairs[g, h]]) for g, h in np.argwhere(cost.pairs)}
  best = search.propose([np.array([0, value]) for value in cost.linear], pairs, 1)
  optimum = cost.base + best.cost[0]
  proposed = {
    "proposed": ranker.propose(graph, _PROPOSALS),
    "near": ranker.propose(graph, _PROPOSALS, near=0),
  }
  truth = synthetic.read_ceiling(data_root, collection, "valid", graph.name).runtime_ns
  ours = {name: runtime(some.graph.configs.group_row) for name, some in proposed.items()}
  ours |= {"own": runtime(graph.configs.group_row[:1]), "measured": truth.min()}
  return {name: float(value / optimum - 1) for name, value in ours.items()} | {
    "optimum_is_exact": bool(best.is_exact)
  }


@functools.cache
def _truth(collection: str, name: str):
  """The cost function and the groups of a generated validation program."""
  (spec,) = (
    spec
    for spec in synthetic.file_specs("medium", 0, collection)
    if spec.split == "valid" and spec.name() == name
  )
  (design, steps), rng = synthetic.layout_program(spec), spec.rng("graph")
  program = design.build(rng)
  groups = layouts.find_groups(program, rng)
  return layouts.layout_cost(program, groups.by_node(), steps=steps), groups


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Means and standard deviations over seeds.

  `*_wins` counts programs whose best proposal is faster than the best measured configuration,
  `*_best` programs whose best proposal or measured configuration is the optimum.
  """
  rows = []
  for run in runs:
    programs = run.get("programs", {}).values()
    rows.append({"kendaltau": run["kendaltau"], "cpu_s": run["cpu_s"]})
    if programs:
      rows[-1] |= {
        f"{name}_wins": sum(row[name] < row["measured"] for row in programs)
        for name in ("proposed", "near")
      }
      rows[-1] |= {
        f"{name}_best": sum(row[name] < _EQUAL for row in programs)
        for name in ("proposed", "near", "measured")
      }
  return pages.summary(rows)


def table(results: dict[str, Any]) -> str:
  """All figures by collection and variation, as a Markdown table."""
  return pages.table(
    [
      "",
      "",
      "Kendall tau",
      "CPU s",
      "best of ten beats the best measured: free / near",
      "... is the optimum: free / near / measured",
    ],
    [
      [*_cells(collection, name, row), *_proposal_cells(row)]
      for collection, rows in results.items()
      for name, row in rows.items()
    ],
  )


def ablation_table(results: dict[str, Any]) -> str:
  """Kendall tau and CPU seconds by collection and variation, as a Markdown table."""
  return pages.table(
    ["", "", "Kendall tau", "CPU s"],
    [
      _cells(collection, name, row)
      for collection, rows in results.items()
      for name, row in rows.items()
    ],
  )


def _cells(collection: str, name: str, row: dict[str, Any]) -> list[str]:
  return [
    f"`{collection}`",
    name,
    pages.figure(row, "kendaltau") + " (one seed)" * (row["seeds"] == 1),
    f"{row['cpu_s']:.0f}",
  ]


def _proposal_cells(row: dict[str, Any]) -> list[str]:
  if "near_wins" not in row:
    return ["", ""]
  programs = len(row["runs"][0]["programs"])
  best = " / ".join(f"{row[f'{name}_best']:.1f}" for name in ("proposed", "near", "measured"))
  return [
    f"{row['proposed_wins']:.1f} / {row['near_wins']:.1f} of the "
    f"{programs - row['measured_best']:.0f} where it can",
    f"{best} of {programs}",
  ]


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", required=True)
  parser.add_argument("--workdir", required=True, type=Path, help="folder for the runs")
  parser.add_argument("--collections", nargs="+", choices=COLLECTIONS, default=list(COLLECTIONS))
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  parser.add_argument("--ablations", action="store_true", help="instead of the main variations")
  args = parser.parse_args()
  variations, show = (ABLATIONS, ablation_table) if args.ablations else (MAIN, table)
  results: dict[str, Any] = {}
  for collection in args.collections:
    rows = {}
    for name, (variant, flags) in variations.items():
      runs = []
      for seed in args.seeds:
        workdir = args.workdir.resolve() / collection.replace(":", "_") / name / str(seed)
        runs.append(figures(collection, variant, flags, seed, args.data_root, workdir))
      rows[name] = summary(runs) | {"runs": runs}
    results[collection] = rows
    print(f"{show({collection: rows})}\n", flush=True)
    timing.write({"machine": timing.machine(), **results}, args.out)


if __name__ == "__main__":
  main()
