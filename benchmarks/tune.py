"""Compares ways to search for layouts on programs of families that nothing was learnt from.

    python benchmarks/tune.py

Simulates the search on labelled choices of `data/own`: a way of search may label a choice that
has a label there, and is told it. The programs are those of the test families of the collections
`outputs` and `blocks`, and the three of `kept_out`, by which nothing was chosen. The labels are
estimates of the TPU v3 compiler and no measurements. The ways of search are those of
`tpugraphs_jax.collect.strategies`; the model and the prior are those that ship. The model's
order and the learned search use no randomness; random and coordinate search are
means over seeds.

A figure is the label of the best of the first k choices, the compiler's own being the first,
divided by the lowest label of the program, minus 1: the mean over programs. A difference is that
of another way minus that of the learned search, program by program, with a 95 % bootstrap interval
of its mean over programs. `found` is the share of the programs with a choice that is more than
2 % better than the compiler's own in which the first 8 choices hold a better one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
from typing import Any

import numpy as np

import run_all
import search_prior
import ship
import timing
from tpugraphs_jax.collect import strategies, tuning
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.serve import ranker as ranker_lib

SETS = {"test families": ("outputs", "blocks"), "kept out": ("kept_out",)}
LABELS = {"optimal seconds": "optimal_seconds", "cycles": "estimated_cycles"}
KS = (5, 8, 16)
_BETTER, _FOUND = .02, 8  # a choice so much better; in so many labels
_RESAMPLED, _CONFIDENCE = 10_000, .95

Search = Callable[[strategies.Pool, int], strategies.Way]


def order(pool: strategies.Pool, search: Search, value: np.ndarray, seed: int) -> np.ndarray:
  """The numbers of the choices of a pool in the order in which a way of search labels them.

  Args:
    pool: closed.
    search: the way of search.
    value: `[C]` labels of the choices.
    seed: of the search.
  """
  number = {numbers: place for place, numbers in enumerate(pool.choices)}
  way, tried = search(pool, seed), []
  numbers = next(way)
  while True:
    tried.append(number[numbers])
    try:
      numbers = way.send(float(value[tried[-1]] / value[0]))
    except StopIteration:
      return np.array(tried)


def figures(value: np.ndarray, tried: np.ndarray) -> dict[str, float]:
  """Of one program and one search: slowdowns of the best of k, and `found`."""
  least, seen = value.min(), np.minimum.accumulate(value[tried])
  at = lambda k: seen[min(k, len(seen)) - 1]
  is_better = value[0] > (1 + _BETTER) * least
  return {f"best{k}": at(k) / least - 1 for k in KS} | {
      "found": float(at(_FOUND) < value[0]) if is_better else np.nan}


def simulate(
    graphs: Sequence[OpGraph], values: Sequence[np.ndarray], search: Search, seeds: int
) -> dict[str, np.ndarray]:
  """Figures `[programs]` of a way of search, means over seeds."""
  rows = []
  for graph, value in zip(graphs, values):
    pool = search_prior.pool(graph)
    runs = [figures(value, order(pool, search, value, seed)) for seed in range(seeds)]
    rows.append({name: np.mean([run[name] for run in runs]) for name in runs[0]})
  return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def compared(other: np.ndarray, learned: np.ndarray) -> dict[str, float]:
  """The mean difference of another way of search and its bootstrap interval."""
  difference = other - learned
  means = np.random.default_rng(0).choice(
      difference, (_RESAMPLED, len(difference))).mean(axis=1)
  low, high = np.quantile(means, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
  return {"mean": float(difference.mean()), "low": float(low), "high": float(high)}


def measure(paths: Sequence[Any], key: str, searches: Mapping[str, Search], seeds: int) -> dict:
  """Figures of every way of search on the programs of some files."""
  graphs = list(map(npz.read_layout, paths))
  records = [json.loads(path.with_suffix(".json").read_text())["configs"] for path in paths]
  values = [np.array([raw[key] for raw in record], np.float64) for record in records]
  blind = ("random", "coordinate")
  found = {name: simulate(graphs, values, search, seeds if name in blind else 1)
           for name, search in searches.items()}
  own = np.array([value[0] / value.min() - 1 for value in values])
  return {
      "programs": len(graphs), "choices": int(sum(map(len, values))),
      "families": sorted({ship.family(path.with_suffix(".json")) for path in paths}),
      "with a better choice": int((own > _BETTER).sum()), "own": float(own.mean()),
      "ways": {name: {figure: float(np.nanmean(row)) if np.isfinite(row).any() else None
                      for figure, row in rows.items()} for name, rows in found.items()},
      "differences": {name: {f"best{k}": compared(rows[f"best{k}"], found["learned"][f"best{k}"])
                             for k in KS} for name, rows in found.items() if name != "learned"},
      "by program": {graph.name: {name: [round(float(rows[f"best{k}"][place]), 4) for k in KS]
                                  for name, rows in found.items()}
                     for place, graph in enumerate(graphs)}}


def table(row: Mapping[str, Any]) -> str:
  """Slowdowns of the best of k and differences to the learned search, as Markdown."""
  lines = ["| | " + " | ".join(f"best of {k}" for k in KS) + " | found in 8 | "
           + " | ".join(f"more than learned, {k}" for k in KS) + " |",
           "|---" * (2 * len(KS) + 2) + "|",
           f"| the compiler's own | {row['own']:.4f}" + " | " * (2 * len(KS) + 1) + "|"]
  for name, way in row["ways"].items():
    cells = [f"{way[f'best{k}']:.4f}" for k in KS] + [
        "" if way["found"] is None else f"{way['found']:.2f}"]
    more = row["differences"].get(name, {})
    cells += ["{mean:+.4f} ({low:+.4f} to {high:+.4f})".format(**more[f"best{k}"]) if more else ""
              for k in KS]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--model", default="layout-v3-estimate", help="a model file or name")
  parser.add_argument("--seeds", type=int, default=5, help="repeats of both blind ways of search")
  args = parser.parse_args()
  ranker, prior = ranker_lib.load(args.model), tuning.prior_of("tpu:v3")
  searches = {
      "learned": lambda pool, seed: strategies.learned(pool, ranker, prior),
      "model": lambda pool, seed: strategies.model(pool, ranker),
      "random": strategies.random, "coordinate": strategies.coordinate}
  results: dict[str, Any] = {"seeds": args.seeds, "learnt from": prior.about["families"]}
  for name, collections in SETS.items():
    paths = [path for collection in collections
             for path in sorted((search_prior.DATA / collection / "test").glob("*.npz"))]
    for label, key in LABELS.items():
      row = measure(paths, key, searches, args.seeds)
      shared = set(row["families"]) & set(prior.about["families"])
      if shared:
        raise ValueError(f"the prior was learnt from the families {', '.join(sorted(shared))}")
      results[f"{name}, {label}"] = row
      print(f"{name}: {row['programs']} programs, {row['with a better choice']} with a better "
            f"choice, by {label}\n\n{table(row)}\n", flush=True)
  if args.out:
    timing.write(results, args.out)
  else:
    run_all.record("tune", results)


if __name__ == "__main__":
  main()
