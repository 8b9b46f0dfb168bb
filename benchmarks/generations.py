"""How well the model and the prior of TPU v3 serve newer TPUs, on labels of their compilers.

    python benchmarks/generations.py --workdir out/generations

Reads the collections `outputs_T`, `blocks_T` and `kept_out_T` of `data/own` for each generation T.
Their labels are **estimates** of the TPU compiler for T and no measurements. The columns, for each
generation and each of the two estimates:

`tau-b` is the mean over programs of Kendall's tau-b between the label and the order of the model.
`changed groups` is the same of the number of changed groups. `own` is how much the compiler's own
choice costs above the best labelled one. `best of k` is simulated as in `benchmarks/tune.py`, with
five draws of the choices of each program.

Programs of the test families are judged apart from all programs: neither the model nor the prior
has learnt from them. There, two more ways are judged by the cycles of each newer generation: the
`recommended` model trained on its training programs (three seeds), and the search with the model of
v3 and a prior that is learnt from its training and validation programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import own_quality
import pages
import run_all
import search_prior
import timing
import tune as simulated
from tune import LABELS, Models, Program

from tpugraphs_jax import metrics
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers.ranker import load, Ranker
from tpugraphs_jax.tuning import tune

GENERATIONS = ("v3", "v5e", "v5p", "v6e")
COLLECTIONS = ("outputs", "blocks", "kept_out")
SETS = {"test families": ("test",), "all programs": ("train", "valid", "test")}
_MODEL = "layout-v3-estimate"
_LABEL = "cycles"  # of newer generations, `labels.TpuEstimate`
_SEEDS = 3  # of models that are trained


def programs(generation: str, splits: Sequence[str]) -> list[Program]:
  """Labelled programs of a generation."""
  suffix = "" if generation == "v3" else f"_{generation}"
  paths = search_prior.files([collection + suffix for collection in COLLECTIONS], splits)
  return list(map(Program.read, paths))


def mean_tau(orders: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> float:
  """The mean of Kendall's tau-b over the programs whose labels differ."""
  return float(
    np.mean(
      [
        metrics.kendall_tau(order, label)
        for order, label in zip(orders, labels)
        if np.ptp(label) > 0
      ]
    )
  )


def changed_groups(graph: OpGraph) -> np.ndarray:
  """The number of groups in which each choice differs from the first one, `[C]`."""
  rows = graph.configs.group_row[:]
  return (rows != rows[0]).sum(axis=1)


def judge(members: Sequence[Program], seeds: int) -> dict[str, Any]:
  """Figures of the model of v3 on the programs of one generation, by both estimates."""
  ranker, prior = load(_MODEL), tune.prior_of("tpu:v3")
  models = Models(dict.fromkeys((program.graph.name for program in members), ranker), ranker.about)
  first, second = ([program.estimates[name] for program in members] for name in LABELS)
  rows: dict[str, Any] = {"both estimates": mean_tau(first, second)}
  for name in LABELS:
    whole = [program for program in members if (program.estimates[name] > 0).all()]
    graphs = [program.graph for program in whole]
    values = [program.estimates[name] for program in whole]
    rows[name] = {
      **simulated.measure(whole, name, models, lambda pool: prior, seeds),
      "left out": len(members) - len(whole),
      "tau-b": {
        "model": mean_tau(models.scores(graphs), values),
        "changed groups": mean_tau(list(map(changed_groups, graphs)), values),
      },
    }
  return rows


def learnt(
  generation: str, members: Sequence[Program], workdir: Path, seeds: int
) -> dict[str, Any]:
  """Figures of a model and of a prior that have learnt from labels of the generation itself."""
  graphs = [program.graph for program in members]
  values = [program.estimates[_LABEL] for program in members]
  taus = [
    mean_tau(
      Ranker.load(
        own_quality.train(
          f"own-outputs_{generation}",
          "recommended",
          seed,
          str(search_prior.ROOT / "data/own/npz"),
          workdir.resolve() / generation / str(seed),
        )
      ).scores(graphs),
      values,
    )
    for seed in range(_SEEDS)
  ]
  ranker, shipped = load(_MODEL), tune.prior_of("tpu:v3")
  models = Models(dict.fromkeys((graph.name for graph in graphs), ranker), ranker.about)
  programs_learnt = [
    program.graph
    for program in programs(generation, search_prior.LEARNT)
    if np.ptp(program.estimates[_LABEL]) > 0
  ]
  prior = search_prior.learn(programs_learnt, ranker, shipped.unit, shipped.about)
  searched = simulated.measure(members, _LABEL, models, lambda pool: prior, seeds)
  return {
    "tau-b": {"mean": float(np.mean(taus)), "spread": float(np.std(taus, ddof=1)), "seeds": _SEEDS},
    "programs": len(programs_learnt),
    "learned": searched["ways"]["learned"],
  }


def learnt_table(results: Mapping[str, Any]) -> str:
  """The model and the prior of v3 beside those of the generation's own labels, Markdown."""
  part, rows = next(iter(SETS)), []
  for generation in GENERATIONS[1:]:
    row = results[f"{generation}, {part}"]
    learnt_here, shipped = row["learnt"], row[_LABEL]
    tau = learnt_here["tau-b"]
    rows.append(
      [
        generation,
        f"{shipped['tau-b']['model']:.3f}",
        f"{tau['mean']:.3f} ± {tau['spread']:.3f}",
        *(
          f"{search[f'best{k}']:.4f}"
          for k in (5, 8)
          for search in (shipped["ways"]["learned"], learnt_here["learned"])
        ),
        str(learnt_here["programs"]),
      ]
    )
  head = ["", "tau-b, model of v3", "tau-b, trained on it"]
  head += [f"best of {k}, {name}" for k in (5, 8) for name in ("prior of v3", "prior of it")]
  return pages.table([*head, "programs learnt from"], rows)


def table(results: Mapping[str, Any], part: str) -> str:
  """Tau-b and the best of 5 and of 8 labels of every generation, Markdown."""
  rows = []
  for generation in GENERATIONS:
    for name in LABELS:
      row = results.get(f"{generation}, {part}", {}).get(name)
      if row is None:
        continue
      ways = row["ways"]
      rows.append(
        [
          f"{generation}, {name}",
          str(row["programs"]),
          *(f"{row['tau-b'][order]:.3f}" for order in ("model", "changed groups")),
          f"{row['own']:.4f}",
          *(f"{ways[way][f'best{k}']:.4f}" for k in (5, 8) for way in ways),
        ]
      )
  ways = ("learned", "model", "random", "coordinate")
  head = ["label", "programs", "tau-b", "changed groups", "own"]
  return pages.table([*head, *(f"{way}, {k}" for k in (5, 8) for way in ways)], rows)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--workdir", type=Path, default=Path("out/generations"))
  parser.add_argument("--seeds", type=int, default=5, help="draws of the choices")
  parser.add_argument("--generations", nargs="+", choices=GENERATIONS, default=GENERATIONS)
  args = parser.parse_args()
  results: dict[str, Any] = {"seeds": args.seeds}
  for part, splits in SETS.items():
    for generation in args.generations:
      if members := programs(generation, splits):
        results[f"{generation}, {part}"] = judge(members, args.seeds)
        if part == "test families" and generation != "v3":
          learnt_here = learnt(generation, members, args.workdir, args.seeds)
          results[f"{generation}, {part}"]["learnt"] = learnt_here
    print(f"{part}\n\n{table(results, part)}\n", flush=True)
  if args.out:
    timing.write(results, args.out)
  else:
    run_all.record("generations", results)


if __name__ == "__main__":
  main()
