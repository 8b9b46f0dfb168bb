"""Layouts for a function of the user's: a model ranks many, the best few are tried.

    choices(f)  ->  candidates  ->  model ranks  ->  label the best few  ->  the best, if
     of layouts     thousands       all of them      (compile or time)       it is better

The compiler's own choice is among those that are tried, and stays unless another one is
really better: by the compiler's estimate, or, measured, in alternating pairs whose
bootstrap interval lies below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import os
from typing import Any

from tpugraphs_jax.collect import labels, measure
from tpugraphs_jax.collect.problem import Numbers, Problem
from tpugraphs_jax.serve import ranker as ranker_lib
from tpugraphs_jax.serve.ranker import Ranker


@dataclasses.dataclass(frozen=True, eq=False)
class Tuned:
  """A function with the layouts that did best, and what was found on the way.

  Attributes:
    function: with the layouts applied; the function itself where the default stays.
    numbers: the option of every group, all 0 for the compiler's own choice.
    ratio: label of `numbers` by label of the compiler's own choice; 1 where it stays.
    interval: 95 % of resampled ratios, where run times were measured and compared.
    tried: labels by numbers, of everything that was labelled.
    failed: how many of the tried could not be compiled or computed something else.
    ranked: how many candidates the model ranked.
    what: what a label is, such as `estimated time on tpu:v3`.
  """

  function: Callable[..., Any]
  numbers: Numbers
  ratio: float
  interval: tuple[float, float] | None
  tried: dict[Numbers, int]
  failed: int
  ranked: int
  what: str

  @property
  def keeps_default(self) -> bool:
    """Whether the compiler's own choice stays."""
    return not any(self.numbers)

  def __str__(self) -> str:
    found = (f"{self.ranked:,} layouts ranked, {len(self.tried)} tried, {self.failed} failed: ")
    if self.keeps_default:
      return f"{found}the compiler's own choice stays, none had a lower {self.what}"
    between = ""
    if self.interval:
      between = f" ({self.interval[0]:.3f} to {self.interval[1]:.3f})"
    return (f"{found}the best takes {self.ratio:.3f}{between} of the {self.what} of the "
            f"compiler's own choice, with layouts chosen for "
            f"{sum(number > 0 for number in self.numbers)} of {len(self.numbers)} groups")


def tune(
    function: Callable[..., Any], *args: Any, model: str | os.PathLike[str] | Ranker,
    target: str | None = None, budget: int = 16, candidates: int = 2000, seed: int = 0,
    operands: bool = False,
) -> Tuned:
  """Chooses layouts for a function: a model ranks many, the best few are labelled.

  Each label of a TPU target compiles the function once, in this process and without a
  TPU. Measured labels run it, on random arguments of the given shapes.

  Args:
    function: as for `collect.choices`.
    *args: its example arguments, arrays or `jax.ShapeDtypeStruct`.
    model: of layouts: a working folder, a model file, the name of a model that ships
      (`layout-v3-estimate`), or a loaded one. A score table proposes choices of its own.
    target: a TPU generation such as `v3` (needs libtpu, no TPU), or None: measure here.
    budget: how many choices are labelled, the compiler's own among them.
    candidates: how many random choices the model ranks.
    seed: of the candidates.
    operands: whether the orders of operands are chosen too, not of outputs alone.

  Raises:
    ValueError: nothing can be chosen, a budget below 2, the model is not of layouts, the
      compiler's own choice cannot be labelled, or (`NoisyMachineError`) the machine is
      too busy to measure on.
  """
  if budget < 2:
    raise ValueError(f"budget is {budget}, expected at least 2: the compiler's own choice and "
                     "another one")
  ranker = model if isinstance(model, Ranker) else ranker_lib.load(model)
  if ranker.collection.kind != "layout":
    raise ValueError(f"the model ranks {ranker.collection.kind} configurations, expected one of "
                     "layouts")
  name = labels.Measured.name if target is None else labels.TpuEstimate.name
  problem = Problem(function, args, labels.create(name, target=target, seed=seed), seed=seed,
                    operands=operands)
  drawn = list(itertools.islice(problem.candidates(), candidates))
  ranked = rank(problem, ranker, drawn, budget)
  tried = problem.labels_of(ranked[:budget])
  return _decide(problem, tried, failed=len(ranked[:budget]) - len(tried), ranked=len(drawn))


def rank(
    problem: Problem, ranker: Ranker, drawn: Sequence[Numbers], count: int
) -> list[Numbers]:
  """The compiler's own choice, then others from the most promising on.

  Args:
    problem: whose choices.
    ranker: of layouts; of a score table half of the first `count` are its proposals near
      the compiler's own choice.
    drawn: candidates, the compiler's own first.
    count: how many will be tried.
  """
  graph = problem.with_configs(drawn)
  order, _ = ranker.rank(graph)
  best = [drawn[place] for place in order]
  if ranker.family.can_propose:
    # Far from a choice that is known to be good the model is wrong most.
    proposed = problem.numbers_of(ranker.propose(graph, count, near=0).graph)
    best = [*itertools.chain.from_iterable(zip(proposed, best)), *best]
  return list(dict.fromkeys([drawn[0], *best]))


def _decide(
    problem: Problem, tried: dict[Numbers, int], *, failed: int, ranked: int
) -> Tuned:
  """The best of what was tried, or the compiler's own choice."""
  default = (0,) * len(problem.options)
  if default not in tried:
    raise ValueError(f"{problem.name}: the compiler's own choice cannot be labelled")
  best, interval = min(tried, key=tried.get), None  # the first of equals: the default
  ratio = tried[best] / tried[default]
  if isinstance(problem.label, labels.Measured) and best != default:
    ratio, *interval = measure.compare(
        problem.apply(default), problem.apply(best), problem.args, seed=problem.seed)
    if interval[1] >= 1:
      best = default
  if best == default:
    return Tuned(problem.function, default, 1.0, None, tried, failed, ranked, problem.label.what)
  return Tuned(problem.apply(best), best, ratio, tuple(interval) if interval else None, tried,
               failed, ranked, problem.label.what)
