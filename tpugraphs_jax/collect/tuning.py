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

from absl import logging
import numpy as np

from tpugraphs_jax.collect import choosing, labels, measure
from tpugraphs_jax.collect.choosing import Orders
from tpugraphs_jax.collect.labels import Raw
from tpugraphs_jax.collect.problem import Numbers, Problem
from tpugraphs_jax.hlo.search import Dims
from tpugraphs_jax.serve import ranker as ranker_lib
from tpugraphs_jax.serve.ensemble import Ensemble
from tpugraphs_jax.serve.ranker import Ranker

# The model that ships, by target; None for the machine at hand.
MODELS = {"tpu:v3": "layout-v3-estimate", None: "layout-cpu-measured"}


@dataclasses.dataclass(frozen=True)
class Change:
  """Equal operations with another order of dimensions than the compiler's own."""

  operation: str  # with types and shapes of output and operands
  lines: list[str]  # of the user's source, such as `model.py:12`
  before: Dims | None  # the compiler's own order of the output; None where it is not known
  # Minor to major, of the output and of operands; empty where it is left to the compiler.
  after: Orders
  cycles: tuple[int, int] | None  # estimated, before and after; None where times were measured


@dataclasses.dataclass(frozen=True, eq=False)
class Tuned:
  """A function with the best layouts that were labelled, and the record of the search.

  Attributes:
    function: with the layouts applied; the function itself where the default stays.
    numbers: the option of every group, all 0 for the compiler's own choice.
    ratio: label of `numbers` by label of the compiler's own choice; 1 where it stays.
    interval: 95 % of resampled ratios, where run times were measured and compared.
    raw: the raw numbers of every choice that was labelled.
    failed: how many choices could not be compiled or gave other outputs.
    ranked: how many candidates the model ranked.
    label: how choices were labelled.
    changes: of operations, against the compiler's own choice.
  """

  function: Callable[..., Any]
  numbers: Numbers
  ratio: float
  interval: tuple[float, float] | None
  raw: dict[Numbers, Raw]
  failed: int
  ranked: int
  label: labels.Label
  changes: list[Change]

  @property
  def tried(self) -> dict[Numbers, int]:
    """The label of every choice that was labelled, the compiler's own choice first."""
    return {numbers: self.label.value(raw) for numbers, raw in self.raw.items()}

  @property
  def keeps_default(self) -> bool:
    """Whether the compiler's own choice stays."""
    return not any(self.numbers)

  def __str__(self) -> str:
    parts = [self._summary()]
    if self.changes:
      parts.append(_aligned(["changed output of", "line", "order", "estimated cycles"],
                            [*map(_change_cells, self.changes), *self._other_cycles()]))
    own = self.tried[(0,) * len(self.numbers)]
    trials = sorted(self.tried.items(), key=lambda item: item[1])
    parts.append(_aligned([f"{self.label.what} / own", "groups changed"], [
        [f"{value / own:.3f}", _groups_text(numbers)] for numbers, value in trials]))
    return "\n\n".join([*parts, self.label.worth])

  def _summary(self) -> str:
    counts = f"{self.ranked:,} layouts ranked, {len(self.raw)} tried, {self.failed} failed: "
    if self.keeps_default:
      return f"{counts}the compiler's own choice stays, none had a lower {self.label.what}"
    between = "({:.3f} to {:.3f}) ".format(*self.interval) if self.interval else ""
    return (f"{counts}the best takes {self.ratio:.3f} {between}of the {self.label.what} of the "
            f"compiler's own choice, with layouts chosen for "
            f"{sum(number > 0 for number in self.numbers)} of {len(self.numbers)} groups")

  def _other_cycles(self) -> list[list[str]]:
    """A row for the kernels of all other operations, so that the cycles add up to the total."""
    if self.changes[0].cycles is None:
      return []
    totals = [self.raw[numbers]["estimated_cycles"]
              for numbers in ((0,) * len(self.numbers), self.numbers)]
    rest = [total - sum(change.cycles[place] for change in self.changes)
            for place, total in enumerate(totals)]
    return [["all other kernels", "", "", _from_to(*rest)], ["total", "", "", _from_to(*totals)]]


def _change_cells(change: Change) -> list[str]:
  before, output, *operands = (
      "{" + ",".join(map(str, order)) + "}" if order else "?"
      for order in (change.before, *change.after))
  chosen = f" <- {', '.join(operands)}" if any(change.after[1:]) else ""
  lines = ", ".join(change.lines[:2]) + (", ..." if len(change.lines) > 2 else "")
  cycles = _from_to(*change.cycles) if change.cycles else ""
  # The compiler's own order, named: operations behind it may get other layouts and fusions.
  orders = f"{output} fixed" if before == output != "?" else f"{before} -> {output}"
  return [change.operation, lines, orders + chosen, cycles]


def _from_to(before: int, after: int) -> str:
  return f"{before:,} -> {after:,}"


def _groups_text(numbers: Numbers) -> str:
  changed = [str(group) for group, number in enumerate(numbers) if number]
  return ", ".join(changed) or "none, the compiler's own"


def _aligned(head: list[str], rows: list[list[str]]) -> str:
  """A table in plain text, without columns that have no cells."""
  table = [head, *rows]
  kept = [column for column in range(len(head)) if any(row[column] for row in rows)]
  widths = {column: max(len(row[column]) for row in table) for column in kept}
  return "\n".join(
      "  ".join(row[column].ljust(widths[column]) for column in kept).rstrip() for row in table)


def tune(
    function: Callable[..., Any], *args: Any,
    model: str | os.PathLike[str] | Ranker | Ensemble | None = None, target: str | None = None,
    budget: int = 16, candidates: int = 2000, seed: int = 0, operands: bool = False,
) -> Tuned:
  """Chooses layouts for a function: a model ranks many, the best few are labelled.

  Each label of a TPU target compiles the function once, in this process and without a
  TPU. Measured labels run it, on random arguments of the given shapes.

  Args:
    function: as for `collect.choices`.
    *args: its example arguments, arrays or `jax.ShapeDtypeStruct`.
    model: of layouts: a working folder, a model file, the name of a model that ships, or a
      loaded one. Without one, the model that ships for the target (`MODELS`). A score table
      proposes choices of its own.
    target: a TPU generation such as `v3` (needs libtpu, no TPU), or None: measure here.
    budget: how many choices are labelled, the compiler's own among them.
    candidates: how many random choices the model ranks.
    seed: of the candidates.
    operands: whether the orders of operands are chosen too, not of outputs alone.

  Returns:
    The best function found; `print` shows changed operations, trials, and the worth of a label.

  Raises:
    ValueError: nothing can be chosen, a budget below 2, the model is not of layouts, no model
      ships for the target, the compiler's own choice cannot be labelled, or
      (`NoisyMachineError`) the machine is too busy to measure on.
  """
  if budget < 2:
    raise ValueError(f"budget is {budget}, expected at least 2: the compiler's own choice and "
                     "another one")
  name = labels.Measured.name if target is None else labels.TpuEstimate.name
  label = labels.create(name, target=target, seed=seed)
  ranker = _ranker(model, label)
  problem = Problem(function, args, label, seed=seed, operands=operands)
  drawn = list(itertools.islice(problem.candidates(), candidates))
  ranked = rank(problem, ranker, drawn, budget)
  tried = problem.raw_labels(ranked[:budget])
  return _decide(problem, tried, failed=len(ranked[:budget]) - len(tried), ranked=len(drawn))


def _ranker(model: Any, label: labels.Label) -> Ranker | Ensemble:
  """The model to rank with; warns where it has learnt another label than is tuned for."""
  if model is None and label.target not in MODELS:
    raise ValueError(f"no model ships for {label.target}, only {', '.join(MODELS.values())}: give "
                     "model=, such as one that you trained on labels of this target")
  model = MODELS[label.target] if model is None else model
  ranker = ranker_lib.load(model) if isinstance(model, (str, os.PathLike)) else model
  if ranker.collection.kind != "layout":
    raise ValueError(f"the model ranks {ranker.collection.kind} configurations, expected one of "
                     "layouts")
  for each in ranker.rankers if isinstance(ranker, Ensemble) else [ranker]:
    learnt = each.about.get("labels")
    if learnt and (learnt.get("target") or None) != label.target:
      logging.warning("%r has learnt labels of %s, and tune labels the %s: its order is worth less",
                      each, learnt.get("target") or "times measured on a device", label.what)
  return ranker


def rank(
    problem: Problem, ranker: Ranker | Ensemble, drawn: Sequence[Numbers], count: int
) -> list[Numbers]:
  """The choices in the order in which they are worth a label, the compiler's own first.

  Args:
    problem: whose choices.
    ranker: of layouts; a score table adds `count` proposals of its own, near the compiler's own
      choice, which take turns with the other choices.
    drawn: candidates, the compiler's own first.
    count: how many will be tried.
  """
  proposed, choices = [], list(drawn)
  if not isinstance(ranker, Ensemble) and ranker.family.can_propose:
    # The model is least reliable far from a choice that is known to be good.
    proposed = problem.numbers_of(
        ranker.propose(problem.with_configs(drawn), count, near=0).graph)
    choices = list(dict.fromkeys([*drawn, *proposed]))
  (scores,) = ranker.scores([problem.with_configs(choices)])
  order = np.argsort(scores, kind="stable")
  place = {numbers: number for number, numbers in enumerate(choices)}
  turns = itertools.chain.from_iterable(zip(map(place.get, proposed), order))
  order = list(dict.fromkeys([*turns, *order]))
  return [choices[number] for number in spread(order, scores, np.array(choices) > 0)]


def spread(order: Sequence[int], scores: np.ndarray, changed: np.ndarray) -> list[int]:
  """An order of choices in which each of the first ones tells something new.

  The first choice of every score and of every set of changed groups comes first, then other
  choices of the same sets. Choices that score exactly as an earlier one come last: to the model
  they are the same program, such as the compiler's own with its own orders written out.

  Args:
    order: choice numbers, most promising first.
    scores: `[C]` of all choices.
    changed: `[C, groups]` bool, the groups that choices change; choice 0 is the compiler's own.

  Returns:
    All choice numbers, 0 first.
  """
  new, again, equal = [], [], []
  known_scores, known_sets = set(), set()
  for number in dict.fromkeys([0, *map(int, order)]):
    score, groups = float(scores[number]), changed[number].tobytes()
    if score in known_scores:
      equal.append(number)
      continue
    (again if groups in known_sets else new).append(number)
    known_scores.add(score)
    known_sets.add(groups)
  return new + again + equal


def _decide(
    problem: Problem, tried: dict[Numbers, Raw], *, failed: int, ranked: int
) -> Tuned:
  """The best of the choices that were tried, or the compiler's own choice."""
  default = (0,) * len(problem.options)
  if default not in tried:
    raise ValueError(f"{problem.name}: the compiler's own choice cannot be labelled")
  value = {numbers: problem.label.value(raw) for numbers, raw in tried.items()}
  best, interval = min(value, key=value.get), None  # the first of equals: the default
  ratio = value[best] / value[default]
  if isinstance(problem.label, labels.Measured) and best != default:
    ratio, *interval = measure.compare(
        problem.apply(default), problem.apply(best), problem.args, seed=problem.seed)
    if interval[1] >= 1:
      best, ratio, interval = default, 1.0, None
  return Tuned(
      problem.apply(best) if any(best) else problem.function, best, ratio,
      tuple(interval) if interval else None, tried, failed, ranked, problem.label,
      _changes(problem, best, tried) if any(best) else [])


def _changes(problem: Problem, best: Numbers, tried: dict[Numbers, Raw]) -> list[Change]:
  """The changes of the best choice against the compiler's own, in the order of the groups."""
  own = problem.own_orders()
  changes = []
  for place, (group, number) in enumerate(zip(problem.choices.groups, best)):
    if number:
      cycles = tuple(sum(tried[numbers]["cycles"].get(str(place), ()))
                     for numbers in ((0,) * len(best), best)) if problem.label.target else None
      after = tuple(choosing.minor_to_major(order, len(shape)) if order else ()
                    for order, shape in zip(group.options[number], group.shapes))
      changes.append(Change(str(group), problem.lines(place), own[place], after, cycles))
  return changes
