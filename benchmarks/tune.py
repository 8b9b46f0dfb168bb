r"""Compares ways to search for layouts on programs of families that nothing was learnt from.

    python -m benchmarks.tune --workdir out/tune
    python -m benchmarks.tune --data DIR --target v6e --sets "test families" --model MODEL \
        --out benchmarks/tune_v6e.json

Simulates the search on labelled choices of `--data`, by default of `data/own`: a search may label a
choice that has a label there, and is told it. The labels are estimates and no measurements. The
searches are those of `tpugraphs_jax.tuning.strategies` and `blind`. There are three sets of
programs: the test families of the collections `outputs` and `blocks`, all their families, and the
programs of `kept_out`, by which nothing was chosen. A target chooses collections such as
`outputs_v6e`.

The test families and `kept_out` are searched with the model and its prior, which have not learnt
from them. A model that does not ship gets a prior that is learnt from the training and validation
families. The other families are divided into seven parts. The programs of a part are searched with
a model and a prior that are learnt without its families. `--workdir` keeps these models.

Each seed draws three quarters of the labelled choices of a program, the same for every way of
search, as `tune` draws its candidates, and is the seed of random and coordinate search.

`best of k` is the label of the best of the first k choices, the compiler's own being the first,
divided by the lowest label that was drawn, minus 1; it is the mean over seeds, then programs. A
difference is that of another way minus that of the learned search, program by program, with a
95 % bootstrap interval of its mean over programs. `missed` is of the draws with a choice that
is more than 2 % better than the compiler's own: the share of the gain that the first k choices
miss. `found` is the share of these draws in which the first 8 choices hold a better one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any
import zlib

import numpy as np

from benchmarks import blind, own_quality, pages, run_all, timing
from tools import search_prior, ship
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.ranker import load, Ranker
from tpugraphs_jax.tuning import prior, strategies, tune
from tpugraphs_jax.tuning.prior import Prior

# Collections and splits.
SETS = {
  "test families": (("outputs", "blocks"), ("test",)),
  "all families": (("outputs", "blocks"), (*search_prior.LEARNT, "test")),
  "kept out": (("kept_out",), ("test",)),
}
KS = (5, 8, 16)
# Columns of tables.
_BEST = {f"best{k}": f"best of {k}" for k in KS}
_MISSED = {f"missed{k}": f"missed by {k}" for k in KS[:2]}
_COMPARED = {f"best{k}": f"best of {k}" for k in KS[:2]} | _MISSED
_BETTER, _FOUND = 0.02, 8  # a choice so much better; in so many labels
_DRAWN = 0.75  # of the choices of a program, for each seed
_RESAMPLED, _CONFIDENCE = 10_000, 0.95
_MODEL = "layout-v3-estimate"
_PARTS = 7  # of the families, left out in turn

PriorOf = Callable[[strategies.Pool], Prior]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A labelled program of `data/own`."""

  graph: OpGraph
  family: str

  @classmethod
  def read(cls, path: Path) -> Program:
    return cls(npz.read_layout(path), ship.family(path))

  @property
  def values(self) -> np.ndarray:
    """The labels, `[C]` float64."""
    return self.graph.configs.labels.astype(np.float64)


class Models:
  """A model for every program, to rank with; it scores every choice once.

  Args:
    of: the model of each program, by name.
    about: of the model that ships.
  """

  def __init__(self, of: Mapping[str, Ranker], about: Mapping[str, Any]):
    self.about, self._of = about, of
    self.predicts_times = all(ranker.predicts_times for ranker in of.values())
    self._known: dict[tuple[str, bytes], np.float32] = {}

  def scores(self, graphs: Sequence[OpGraph]) -> list[np.ndarray]:
    """The scores `[C]` of the choices of each program."""
    keys = [[(graph.name, row.tobytes()) for row in graph.configs.group_row[:]] for graph in graphs]
    new = [
      [place for place, key in enumerate(keys_there) if key not in self._known]
      for keys_there in keys
    ]
    of_ranker: dict[int, list[int]] = {}
    for place, graph in enumerate(graphs):
      if new[place]:
        of_ranker.setdefault(id(self._of[graph.name]), []).append(place)
    for places in of_ranker.values():
      scores = self._of[graphs[places[0]].name].scores(
        [
          dataclasses.replace(graphs[place], configs=graphs[place].configs.subset(new[place]))
          for place in places
        ]
      )
      for place, row in zip(places, scores):
        self._known.update(zip((keys[place][place_there] for place_there in new[place]), row))
    return [np.array([self._known[key] for key in keys_there]) for keys_there in keys]


def _with_single_changes(graph: OpGraph) -> OpGraph:
  """The graph with the changes of one group among its choices, which a search scores too."""
  pool = search_prior.pool(graph)
  default = pool.choices[0]
  single = ((*default[:group], option, *default[group + 1 :]) for group, option in pool.changes)
  return pool.graph(list(dict.fromkeys([*pool.choices, *single])))


def learn(programs: Sequence[Program], workdir: Path) -> tuple[Models, PriorOf]:
  """Models and priors that have learnt from no program of the family that they are asked about.

  Args:
    programs: to be searched.
    workdir: folder of the models that are trained.
  """
  ranker, shipped = load(_MODEL), tune.prior_of("tpu:v3")
  families = np.random.default_rng(0).permutation(shipped.about["families"])
  part_of = {family: place % _PARTS for place, family in enumerate(families)}
  rankers = [
    Ranker.load(
      own_quality.train(
        "own",
        "recommended",
        0,
        str(search_prior.ROOT / "data/own/npz"),
        workdir / str(part),
        leave_out=[f"_{family}_" for family in families if part_of[family] == part],
      )
    )
    for part in range(_PARTS)
  ]
  part = {program.graph.name: part_of.get(program.family) for program in programs}
  models = Models(
    {name: ranker if place is None else rankers[place] for name, place in part.items()},
    ranker.about,
  )
  learnt = [program.graph for program in programs if part[program.graph.name] is not None]
  priors = [
    search_prior.learn(
      [graph for graph in learnt if part[graph.name] != place], models, shipped.unit, shipped.about
    )
    for place in range(_PARTS)
  ]

  def prior_of(pool: strategies.Pool) -> Prior:
    place = part[pool.graph(pool.choices[:1]).name]
    return shipped if place is None else priors[place]

  return models, prior_of


def drawn(graph: OpGraph, seed: int) -> np.ndarray:
  """The numbers of the choices that a seed draws, ascending, the compiler's own among them."""
  others = len(graph.configs) - 1
  rng = np.random.default_rng([seed, zlib.crc32(graph.name.encode())])
  return np.sort(np.append(0, 1 + rng.permutation(others)[: math.ceil(_DRAWN * others)]))


def labelled(pool: strategies.Pool, way: strategies.Search, value: np.ndarray) -> np.ndarray:
  """The numbers of the choices that a search labels, in its order, at most as many as are judged.

  Args:
    pool: closed.
    way: of search.
    value: `[C]` labels of the choices.
  """
  number_of = {choice: number for number, choice in enumerate(pool.choices)}
  seen = [number_of[next(way)]]
  while len(seen) < min(max(KS), len(value)):
    seen.append(number_of[way.send(float(value[seen[-1]] / value[0]))])
  return np.array(seen)


def figures(seen: np.ndarray, least: float) -> dict[str, float]:
  """`best of k`, `missed` and `found` of one search on one draw of a program; NaN for no gain.

  Args:
    seen: labels in the order of the search, the compiler's own first.
    least: the lowest label of the draw.
  """
  best = np.minimum.accumulate(seen)
  at = {k: best[min(k, len(best)) - 1] for k in (*KS, _FOUND)}
  gain = seen[0] - least if seen[0] > (1 + _BETTER) * least else np.nan
  return {
    **{f"best{k}": at[k] / least - 1 for k in KS},
    **{f"missed{k}": (at[k] - least) / gain for k in KS},
    "found": np.where(np.isnan(gain), np.nan, at[_FOUND] < seen[0]),
  }


def simulate(
  program: Program, models: Models, prior_of: PriorOf, seeds: int
) -> dict[str, dict[str, float]]:
  """Figures of every search, means over seeds; NaN for no gain in any draw."""
  graph, value = program.graph, program.values
  runs = []
  for seed in range(seeds):
    chosen = drawn(graph, seed)
    pool = search_prior.pool(dataclasses.replace(graph, configs=graph.configs.subset(chosen)))
    ways = {
      "learned": strategies.learned(pool, models, prior_of(pool)),
      "model": strategies.model(pool, models),
      "random": blind.random(pool, seed),
      "coordinate": blind.coordinate(pool, seed),
    }
    of_chosen = value[chosen]
    runs.append(
      {
        name: figures(of_chosen[labelled(pool, way, of_chosen)], of_chosen.min())
        for name, way in ways.items()
      }
    )
  return {
    name: {figure: _mean([run[name][figure] for run in runs]) for figure in row}
    for name, row in runs[0].items()
  }


def _mean(values: Sequence[float] | np.ndarray) -> float:
  """The mean without NaN, which is NaN where nothing is left."""
  there = [value for value in values if not np.isnan(value)]
  return float(np.mean(there)) if there else math.nan


def compared(search: np.ndarray, learned: np.ndarray) -> dict[str, float]:
  """The mean difference of another search and its bootstrap interval."""
  difference = (search - learned)[~np.isnan(search)]
  means = np.random.default_rng(0).choice(difference, (_RESAMPLED, len(difference))).mean(axis=1)
  low, high = np.quantile(means, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
  return {"mean": float(difference.mean()), "low": float(low), "high": float(high)}


def measure(
  programs: Sequence[Program], models: Models, prior_of: PriorOf, seeds: int
) -> dict[str, Any]:
  """Figures of every search on programs."""
  models.scores([_with_single_changes(program.graph) for program in programs])  # at once
  rows = [simulate(program, models, prior_of, seeds) for program in programs]
  figures = {
    name: {figure: np.array([row[name][figure] for row in rows]) for figure in way}
    for name, way in rows[0].items()
  }
  values = [program.values for program in programs]
  default = np.array([value[0] / value.min() - 1 for value in values])
  return {
    "programs": len(programs),
    "choices": int(sum(map(len, values))),
    "families": sorted({program.family for program in programs}),
    "with a better choice": int((default > _BETTER).sum()),
    "own": float(default.mean()),
    "ways": {
      name: {figure: _mean(row) for figure, row in rows.items()} for name, rows in figures.items()
    },
    "differences": {
      name: {figure: compared(row, figures["learned"][figure]) for figure, row in rows.items()}
      for name, rows in figures.items()
      if name != "learned"
    },
  }


def table(row: Mapping[str, Any]) -> str:
  """What the best of k costs and misses, with differences to the learned search; Markdown."""
  ways = pages.table(
    ["", *_BEST.values(), *_MISSED.values(), f"found in {_FOUND}"],
    [
      [
        name,
        *(f"{way[column]:.4f}" for column in _BEST),
        *(f"{way[column]:.2f}" for column in (*_MISSED, "found")),
      ]
      for name, way in row["ways"].items()
    ],
  )
  more = "{mean:+.4f} ({low:+.4f} to {high:+.4f})"
  differences = pages.table(
    ["more than learned", *_COMPARED.values()],
    [
      [name, *(more.format(**way[column]) for column in _COMPARED)]
      for name, way in row["differences"].items()
    ],
  )
  return f"{ways}\n\n{differences}"


def shipped(model: str, learnt: Sequence[OpGraph]) -> tuple[Ranker, Prior]:
  """A model and its prior, which is learnt from programs where the model does not ship."""
  ranker = load(model)
  if (file := model_file.SHIPPED / f"{model}.prior.json").exists():
    return ranker, prior.read(file)
  about = {"model": ranker.about.get("name"), "programs": len(learnt)}
  unit = prior.read(model_file.SHIPPED / f"{search_prior.UNIT_OF}.prior.json")
  rms = search_prior.rms_cost(learnt, ranker)
  about["rms_cost"] = rms
  return ranker, search_prior.learn(learnt, ranker, rms / unit.about["rms_cost"], about)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--workdir", type=Path, default=Path("out/tune"), help="of trained models")
  parser.add_argument("--seeds", type=int, default=5, help="draws of the choices")
  parser.add_argument(
    "--data", type=Path, default=search_prior.DATA, help="folder of collections such as `outputs`"
  )
  parser.add_argument("--target", default="", help="of the collections, such as v6e (default: v3)")
  parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
  parser.add_argument("--model", default=_MODEL, help="a model that ships, or a working folder")
  args = parser.parse_args()
  files = functools.partial(search_prior.files, data=args.data, target=args.target)
  paths = {name: files(*SETS[name]) for name in args.sets}
  programs = {path: Program.read(path) for path in dict.fromkeys(itertools.chain(*paths.values()))}
  if "all families" in args.sets:
    models, prior_of = learn(list(programs.values()), args.workdir)
  else:
    learnt = list(map(npz.read_layout, files(SETS["test families"][0], search_prior.LEARNT)))
    ranker, of_model = shipped(args.model, learnt)
    names = (program.graph.name for program in programs.values())
    models, prior_of = Models(dict.fromkeys(names, ranker), ranker.about), lambda pool: of_model
  results: dict[str, Any] = {"seeds": args.seeds, "model": args.model}
  for name in args.sets:
    row = measure([programs[path] for path in paths[name]], models, prior_of, args.seeds)
    results[name] = row
    print(
      f"{name}: {row['programs']} programs, {row['with a better choice']} with a better "
      f"choice\n\n{table(row)}\n",
      flush=True,
    )
  if args.out:
    timing.write(results, args.out)
  else:
    run_all.record("tune", results)


if __name__ == "__main__":
  main()
