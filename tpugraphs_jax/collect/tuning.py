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

import numpy as np

from tpugraphs_jax import hlo
from tpugraphs_jax.collect import choosing, draw, labels, measure, node_rows
from tpugraphs_jax.serve import ranker as ranker_lib
from tpugraphs_jax.serve.ranker import Ranker

Numbers = tuple[int, ...]  # the option of every group


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


class Problem:
  """A function's layouts: what there is to choose, its graph, and labels for choices.

  Args:
    function: that jax can trace, with example arguments `args`.
    args: arrays or `jax.ShapeDtypeStruct`.
    target: `v3`, `tpu:v3` or another generation for the TPU compiler's estimates; None
      for run times on the device at hand.
    seed: of candidates and of the order of measurements.
    operands: whether the orders of operands are chosen too.

  Attributes:
    options: per group the numbers of the options that the graph can tell apart.

  Raises:
    ValueError: nothing can be chosen, or as `labels.create` and `choosing.choices`.
  """

  def __init__(
      self, function: Callable[..., Any], args: tuple, *, target: str | None = None,
      seed: int = 0, operands: bool = False,
  ):
    name = labels.Measured.name if target is None else labels.TpuEstimate.name
    self.label = labels.create(name, target=target, seed=seed)
    self.function, self.args, self.seed = function, args, seed
    self.name = getattr(function, "__name__", "function")
    self.choices = choosing.choices(function, *args, operands=operands)
    default = choosing.apply(function, self.choices.default)
    self.graph = hlo.featurize(self.label.graph(default, args))
    self.options = node_rows.visible_options(self.graph, self.choices)
    if max(map(len, self.options), default=1) < 2:
      raise ValueError(f"{self.name}: no layout of its {len(self.options)} groups of equations "
                       "can be chosen; expected a convolution, dot or reshape")

  @property
  def what(self) -> str:
    if isinstance(self.label, labels.TpuEstimate):
      return f"estimated time on {self.label.target}"
    return "measured time"

  def apply(self, numbers: Sequence[int]) -> Callable[..., Any]:
    """The function with the layouts of option numbers `[groups]`."""
    return choosing.apply(self.function, self.choices.choice(numbers))

  def candidates(self, count: int) -> list[Numbers]:
    """Distinct random choices, first the compiler's own; see `draw.candidates`."""
    stream = draw.candidates(self.options, seed=self.seed, name=self.name)
    return [tuple(numbers) for numbers in itertools.islice(stream, count)]

  def with_configs(self, candidates: Sequence[Numbers]) -> hlo.HloGraph:
    """The graph with these choices as its configurations, not labelled."""
    configs = node_rows.layout_configs(
        self.graph, self.choices, np.array(candidates, np.int64),
        np.zeros(len(candidates), np.int64))
    return dataclasses.replace(self.graph, configs=configs)

  def labels_of(self, candidates: Sequence[Numbers]) -> dict[Numbers, int]:
    """Labels of choices, compared with each other; failed ones are left out."""
    functions = enumerate(map(self.apply, candidates))
    found = dict(self.label.run(functions, self.args))
    return {candidates[place]: self.label.value(raw) for place, raw in sorted(found.items())
            if not isinstance(raw, Exception)}


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
  problem = Problem(function, args, target=target, seed=seed, operands=operands)
  drawn = problem.candidates(candidates)
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
    proposed = _numbers_of(problem, ranker.propose(graph, count, near=0).graph)
    best = [*itertools.chain.from_iterable(zip(proposed, best)), *best]
  return list(dict.fromkeys([drawn[0], *best]))


def _numbers_of(problem: Problem, proposed: Any) -> list[Numbers]:
  """Option numbers of a graph's configurations; those that are of no choice are left out."""
  rows = node_rows.option_rows(problem.graph, problem.choices)
  groups = node_rows.node_groups(problem.graph, problem.choices)
  given = proposed.configs.decode(np.arange(len(proposed.configs)))  # [n, K, 18]
  found = []
  for config in given:
    numbers = [0] * len(problem.options)
    fits = [np.ones(len(group.options), bool) for group in problem.choices.groups]
    for node, group in enumerate(groups):
      if group >= 0:
        fits[group] &= (rows[node] == config[node]).all(axis=1)
    if all(fit.any() for fit in fits):
      numbers = [int(np.argmax(fit)) for fit in fits]
      found.append(tuple(numbers))
  return found


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
    return Tuned(problem.function, default, 1.0, None, tried, failed, ranked, problem.what)
  return Tuned(problem.apply(best), best, ratio, tuple(interval) if interval else None, tried,
               failed, ranked, problem.what)
