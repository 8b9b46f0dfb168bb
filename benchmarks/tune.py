"""Compares a model's layout choices with blind search, on programs that no model was trained on.

    pip install ".[tpu]"
    JAX_PLATFORMS=cpu python benchmarks/tune.py --budget 12

Every way of search labels the same number of choices, the compiler's own among them, with the
TPU compiler's estimate, which is no measurement:

model        the choices that a model ranks first
random       random choices
coordinate   changes of one group at a time, in random order, each kept if it is better

A figure is the label of the best choice found, divided by the label of the compiler's own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import itertools
import statistics
import time

import jax
import numpy as np

import run_all
import timing
from tpugraphs_jax.collect import labels, programs, tuning
from tpugraphs_jax.serve import ranker as ranker_lib

# Of families that the collection `own:outputs` does not have: forward and training steps compiled
# within seconds, and three for which a better choice than the compiler's own was known.
PROGRAMS = ("diffusion.py:patchwise", "experts.py:layer", "experts.py:layer_train",
            "state_space.py:selective", "graph_network.py:messages", "detector.py:regions",
            "detector.py:pyramid_train")
_CANDIDATES = 1000

Label = Callable[[Sequence[tuning.Numbers]], Mapping[tuning.Numbers, int]]


def random_search(problem: tuning.Problem, label: Label, budget: int, seed: int) -> list[int]:
  """Labels of the compiler's own choice and of random choices, in the order of trial."""
  drawn = list(itertools.islice(problem.candidates(), _CANDIDATES))
  others = np.random.default_rng(seed).permutation(np.arange(1, len(drawn)))[:budget - 1]
  tried = [drawn[0], *(drawn[place] for place in others)]
  return _values(label(tried), tried)


def coordinate_search(problem: tuning.Problem, label: Label, budget: int, seed: int) -> list[int]:
  """Labels of the compiler's own choice and of changes to one group, each kept if it is better."""
  rng = np.random.default_rng(seed)
  best = (0,) * len(problem.options)
  found = label([best])
  values = _values(found, [best])
  free = [group for group, options in enumerate(problem.options) if len(options) > 1]
  moves = [(group, int(option)) for group in rng.permutation(free)
           for option in rng.permutation(problem.options[group][1:])]
  for group, option in moves[:budget - 1]:
    tried = (*best[:group], option, *best[group + 1:])
    values += _values(label([tried]), [tried])
    if values[-1] < values[0] and values[-1] == min(values):
      best = tried
  return values


def model_search(model: ranker_lib.Ranker) -> Callable[..., list[int]]:
  """A search that labels the choices that a model ranks first, in their order."""
  def search(problem: tuning.Problem, label: Label, budget: int, seed: int) -> list[int]:
    del seed
    candidates = list(itertools.islice(problem.candidates(), _CANDIDATES))
    ranked = tuning.rank(problem, model, candidates, budget)[:budget]
    return _values(label(ranked), ranked)
  return search


def _values(found: Mapping[tuning.Numbers, int], tried: Sequence[tuning.Numbers]) -> list[int]:
  """Labels in the order of trial; the largest int64 for a choice that failed."""
  return [found.get(numbers, np.iinfo(np.int64).max) for numbers in tried]


def measure(source: str, model: str, budget: int, seeds: int) -> dict[str, object]:
  """The best ratio of every way of search on one program; for blind ways the mean over seeds."""
  program, = programs.load(f"examples/programs/{source}")
  problem = tuning.Problem(program.function, program.args, labels.TpuEstimate("tpu:v3"))
  known: dict[tuning.Numbers, int] = {}

  def label(candidates: Sequence[tuning.Numbers]) -> dict[tuning.Numbers, int]:
    new = [numbers for numbers in candidates if numbers not in known]
    found = problem.raw_labels(new) if new else {}
    known.update({numbers: problem.label.value(raw) for numbers, raw in found.items()})
    return {numbers: known[numbers] for numbers in candidates if numbers in known}

  figures, started = {}, time.monotonic()
  for name, search, repeats in (
      ("model", model_search(ranker_lib.load(model)), 1), ("random", random_search, seeds),
      ("coordinate", coordinate_search, seeds)):
    runs = [search(problem, label, budget, seed) for seed in range(repeats)]
    figures[name] = {
        "best": statistics.mean(min(run) / run[0] for run in runs),
        # The best ratio without the compiler's own choice, which is 1.
        "best_of_others": statistics.mean(min(run[1:]) / run[0] for run in runs)}
  return figures | {"compiled": len(known), "seconds": time.monotonic() - started}


def table(results: Mapping[str, Mapping[str, object]]) -> str:
  """Best ratios of estimated time, in brackets without the compiler's own choice; Markdown."""
  ways = ("model", "random", "coordinate")
  lines = ["| program | " + " | ".join(ways) + " |", "|---|" + "---|" * len(ways)]
  for name, row in results.items():
    if isinstance(row, Mapping) and "model" in row:
      cells = [f"{row[way]['best']:.3f} ({row[way]['best_of_others']:.3f})" for way in ways]
      lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def main() -> None:
  jax.config.update("jax_platforms", "cpu")
  parser = timing.parser(__doc__)
  parser.add_argument("--programs", nargs="+", default=PROGRAMS, help="FILE.py:KEY of examples")
  parser.add_argument("--model", default="layout-v3-estimate", help="a model file or name")
  parser.add_argument("--budget", type=int, default=12, help="labels that each way of search takes")
  parser.add_argument("--seeds", type=int, default=3, help="repeats of both blind ways of search")
  args = parser.parse_args()
  results = {"budget": args.budget, "seeds": args.seeds}
  for source in args.programs:
    results[source] = measure(source, args.model, args.budget, args.seeds)
    print(table({source: results[source]}).splitlines()[-1], flush=True)
  if args.out:
    timing.write(results, args.out)
  else:
    run_all.record("tune", results)


if __name__ == "__main__":
  main()
