"""Layouts for programs that no model has seen: a model's choices beside blind search.

    pip install ".[tpu]"
    JAX_PLATFORMS=cpu python benchmarks/tune.py --budget 12

Every way labels as many choices as the others, the compiler's own among them, with the
TPU compiler's estimate (no measurement): `model` as `tpugraphs_jax.tune`, `random` draws,
`coordinate` goes from group to group, tries an option and keeps what is better. The
figures are those of the best choice found, by those of the compiler's own.
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

# Of families that the collection `outputs` does not have: forward and training steps that compile
# in a few seconds, and three for which a better choice than the compiler's own was known.
PROGRAMS = ("diffusion.py:patchwise", "experts.py:layer", "experts.py:layer_train",
            "state_space.py:selective", "graph_network.py:messages", "detector.py:regions",
            "detector.py:pyramid_train")
_CANDIDATES = 1000

Label = Callable[[Sequence[tuning.Numbers]], Mapping[tuning.Numbers, int]]


def random_search(problem: tuning.Problem, label: Label, budget: int, seed: int) -> list[int]:
  """Labels of the compiler's own choice and of random ones, in the order of trial."""
  drawn = list(itertools.islice(problem.candidates(), _CANDIDATES))
  others = np.random.default_rng(seed).permutation(np.arange(1, len(drawn)))[:budget - 1]
  tried = [drawn[0], *(drawn[place] for place in others)]
  return _values(label(tried), tried)


def coordinate_search(problem: tuning.Problem, label: Label, budget: int, seed: int) -> list[int]:
  """As `random_search`, of changes to one group at a time that are kept where they help."""
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
  """As `random_search`, of the choices that a model puts first."""
  def search(problem: tuning.Problem, label: Label, budget: int, seed: int) -> list[int]:
    del seed
    ranked = tuning.rank(problem, model, list(itertools.islice(problem.candidates(), _CANDIDATES)), budget)[:budget]
    return _values(label(ranked), ranked)
  return search


def _values(found: Mapping[tuning.Numbers, int], tried: Sequence[tuning.Numbers]) -> list[int]:
  """Labels in the order of trial; a failure is worth nothing."""
  return [found.get(numbers, np.iinfo(np.int64).max) for numbers in tried]


def measure(source: str, model: str, budget: int, seeds: int) -> dict[str, object]:
  """The best ratio of every way on one program; of blind ways the mean over seeds."""
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
        # What the way would have given had it not kept the default.
        "best_of_others": statistics.mean(min(run[1:]) / run[0] for run in runs)}
  return figures | {"compiled": len(known), "seconds": time.monotonic() - started}


def table(results: Mapping[str, Mapping[str, object]]) -> str:
  """Best ratio of estimated time, in Markdown."""
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
  parser.add_argument("--budget", type=int, default=12, help="choices that each way labels")
  parser.add_argument("--seeds", type=int, default=3, help="repeats of the blind ways")
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
