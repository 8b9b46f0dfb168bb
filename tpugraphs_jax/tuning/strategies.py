"""Which choice of layouts to label next: two searches over a pool of choices.

A search is a generator. It yields a choice, is sent the label of the choice divided by
the label of the compiler's own choice, and ends when every choice of the pool has been yielded. It
is sent infinity for a choice that failed, and None where the label is not known yet. The compiler's
own choice comes first.

learned      in turn the choice with the largest expected improvement (Mockus 1975; Jones,
             Schonlau and Welch 1998) and the next one of `model`. Labels correct what is
             believed of every change, by Bayesian linear regression from a `prior`
model        the order of a model, the first of every score and set of changed groups first
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import scipy

from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.rankers.tables.family import TablesFamily
from tpugraphs_jax.tuning.draw import OptionIndices
from tpugraphs_jax.tuning.prior import change_features, LARGEST_EFFECT, Prior

Search = Generator[OptionIndices, float | None, None]

# Factor on the standard deviations of the prior: effects have heavier tails than a normal
# distribution. Chosen, like `prior.LARGEST_EFFECT`, on the training and validation programs of
# `data/own`.
_TAILS = 2.0
# Mean and standard deviation of the effect of a compiler option, of which no prior was learnt.
_OPTION = 0.05, 0.2
_PROPOSALS = 32  # of a score table


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
  """The choices to search.

  Attributes:
    choices: distinct ones, the compiler's own first.
    graph: makes the program's graph with choices as its configurations.
    numbers_of: the choices that are the configurations of a graph; None where no choices but
      those of the pool may be tried.
    compiler_options: how many of the last groups are compiler options, which the graph does not
      show.
  """

  choices: list[OptionIndices]
  graph: Callable[[Sequence[OptionIndices]], OpGraph[LayoutConfigs]]
  numbers_of: Callable[[OpGraph[LayoutConfigs]], list[OptionIndices]] | None = None
  compiler_options: int = 0

  @functools.cached_property
  def changes(self) -> list[tuple[int, int]]:
    """Every group and option in which a choice differs from the compiler's own, ascending."""
    numbers, default = np.array(self.choices), self.choices[0]
    return [
      (group, int(option))
      for group, column in enumerate(numbers.T)
      for option in np.unique(column)
      if option != default[group]
    ]

  @property
  def layouts(self) -> int:
    """How many of the first groups are layouts."""
    return len(self.choices[0]) - self.compiler_options

  @property
  def layout_changes(self) -> list[tuple[int, int]]:
    """The changes of layouts, which come before changes of compiler options."""
    return [change for change in self.changes if change[0] < self.layouts]

  @property
  def is_open(self) -> bool:
    """Whether choices outside of the pool may be tried, from options that occur in the pool."""
    return self.numbers_of is not None

  def rows(self, choices: Sequence[OptionIndices]) -> np.ndarray:
    """Which of the changes choices have, `[n, T]` float64."""
    numbers, default = np.array(choices), np.array(self.choices[0])
    group, option = np.array(self.changes, np.int64).reshape(-1, 2).T
    return ((numbers[:, group] == option) & (option != default[group])).astype(np.float64)


def learned(pool: Pool, ranker: Any, prior: Prior) -> Search:
  """In turn the choice of the largest expected improvement and the next of the model's order.

  The order puts cheap changes first, one of every set of groups, and so is diverse. It knows
  nothing of compiler options, which are taken from the best choice so far. Expected improvement
  goes to changes with uncertain effects, and follows what labels say. On the training and
  validation programs of `data/own`, left out by family, both in turn miss less of the gains than
  either alone.

  Args:
    pool: to search; where it is open the changes of the best choice come into it.
    ranker: of layouts, whose scores of single changes are the predicted costs.
    prior: of the effects of changes.
  """
  belief, choices = Belief.of(pool, ranker, prior), list(pool.choices)
  order, effects = list(model(pool, ranker)), {choices[0]: 0.0}
  yield choices[0]
  while len(effects) < len(choices):
    best = min(effects, key=effects.__getitem__)
    numbers = None
    if len(effects) % 2 == 0:
      turns = (choice[: pool.layouts] + best[pool.layouts :] for choice in order)
      is_new = lambda choice: choice not in effects and (pool.is_open or choice in pool.choices)
      numbers = next(filter(is_new, turns), None)
    if numbers is None:
      left = [choice for choice in choices if choice not in effects]
      numbers = left[belief.most_promising(left, effects[best])]
    ratio = yield numbers
    if ratio is None:  # no label yet: learns the expected effect
      effects[numbers] = belief.expected([numbers])[0]
      belief.learn(numbers, effects[numbers])
      continue
    effects[numbers] = math.log(ratio)
    belief.learn(numbers, effects[numbers])
    if pool.is_open and effects[numbers] < effects[best]:
      choices = list(dict.fromkeys([*choices, *_changed(numbers, pool.changes, choices[0])]))


def _changed(
  numbers: OptionIndices, changes: Sequence[tuple[int, int]], default: OptionIndices
) -> list[OptionIndices]:
  """The choices that differ from one in one group."""
  options = [*changes, *enumerate(default)]
  return [_with(numbers, group, option) for group, option in options if option != numbers[group]]


def _with(numbers: OptionIndices, group: int, option: int) -> OptionIndices:
  """A choice with another option of one group."""
  return (*numbers[:group], option, *numbers[group + 1 :])


class Belief:
  """A normal belief about the effects of the changes of a program.

  The effect of a choice is the sum of the effects of its changes, plus noise. Labels above
  `prior.LARGEST_EFFECT` count as that.

  Args:
    pool: with T changes.
    mean: `[T]` of their effects.
    covariance: `[T, T]` of their effects.
    noise: standard deviation of label minus sum.
  """

  def __init__(self, pool: Pool, mean: np.ndarray, covariance: np.ndarray, noise: float):
    self._pool, self._noise = pool, noise
    self.mean, self.covariance = mean.copy(), covariance.copy()

  @classmethod
  def of(cls, pool: Pool, ranker: Any, prior: Prior) -> Belief:
    """The belief before any label."""
    mean, covariance = np.zeros(0), np.zeros((0, 0))
    if pool.layout_changes:
      at, cost = costs(pool, ranker)
      name = getattr(ranker, "about", {}).get("name")
      mean, covariance = prior.effects(*change_features(*at, cost / prior.unit_of(name, cost)))
    expected, deviation = _OPTION
    options = len(pool.changes) - len(mean)
    mean = np.append(mean, np.full(options, expected))
    of_options = deviation**2 * np.eye(options)
    covariance = scipy.linalg.block_diag(_TAILS**2 * covariance, of_options)
    return cls(pool, mean, covariance, prior.noise)

  def learn(self, numbers: OptionIndices, effect: float) -> None:
    """Takes in the effect of a choice."""
    (row,) = self._pool.rows([numbers])
    gain = self.covariance @ row
    gain /= row @ gain + self._noise**2
    self.mean += gain * (min(effect, LARGEST_EFFECT) - row @ self.mean)
    self.covariance -= np.outer(gain, row @ self.covariance)

  def expected(self, choices: Sequence[OptionIndices]) -> np.ndarray:
    """The expected effects of choices `[n]`."""
    return self._pool.rows(choices) @ self.mean

  def most_promising(self, choices: Sequence[OptionIndices], best: float) -> int:
    """The place of the choice with the largest expected improvement on an effect."""
    rows = self._pool.rows(choices)
    deviation = np.sqrt(np.maximum(np.einsum("ct,ct->c", rows @ self.covariance, rows), 1e-12))
    expected = rows @ self.mean
    margin = (best - expected) / deviation
    improvement = deviation * (margin * scipy.stats.norm.cdf(margin) + scipy.stats.norm.pdf(margin))
    return int(np.lexsort([expected, -improvement])[0])


def costs(
  pool: Pool, ranker: Any
) -> tuple[tuple[OpGraph[LayoutConfigs], np.ndarray, np.ndarray], np.ndarray]:
  """The prediction of a model for every single change of layouts.

  Returns:
    A graph, a configurable node of each change `[T]`, and its dictionary row after the change
    `[T]`; and the score of each single change minus the score of the compiler's own choice, `[T]`
    float64; relative to that score if scores are times.
  """
  default = pool.choices[0]
  graph = pool.graph([default, *(_with(default, *change) for change in pool.layout_changes)])
  (scores,) = ranker.scores([graph])
  rows = graph.configs.row_id(np.arange(len(graph.configs)))  # [1 + T, K]
  node = (rows[1:] != rows[0]).argmax(axis=1)
  at = graph, node, rows[np.arange(1, len(rows)), node]
  unit = scores[0] if getattr(ranker, "predicts_times", False) else 1.0
  return at, ((scores[1:] - scores[0]) / unit).astype(np.float64)


def model(pool: Pool, ranker: Any) -> Search:
  """The order of a model, by `spread`.

  If choices outside of the pool are allowed, a score table proposes some near the compiler's own
  choice, where it is most reliable. Proposals and choices of the pool alternate.
  """
  proposed: list[OptionIndices] = []
  choices = pool.choices
  family = getattr(ranker, "family", None)  # an ensemble has none
  is_table = isinstance(family, TablesFamily)
  if pool.numbers_of is not None and pool.layout_changes and is_table:
    proposed = pool.numbers_of(ranker.propose(pool.graph(choices), _PROPOSALS, near=0).graph)
    choices = list(dict.fromkeys([*choices, *proposed]))
  scores = np.zeros(len(choices))
  if pool.layout_changes:
    (scores,) = ranker.scores([pool.graph(choices)])
  place = {numbers: number for number, numbers in enumerate(choices)}
  # Of equal layouts first the one with the fewest compiler options changed.
  options = np.array(choices)[:, pool.layouts :]
  cheapest = np.lexsort([(options > 0).sum(axis=1), scores])
  turns = itertools.chain.from_iterable(zip(map(place.get, proposed), cheapest))
  order = list(dict.fromkeys([*turns, *cheapest]))
  for number in spread(order, scores, np.array(choices) != choices[0]):
    yield choices[number]


def spread(order: Iterable[int], scores: np.ndarray, changed: np.ndarray) -> list[int]:
  """An order of choices whose first choices all differ for the model.

  The first choice of every score and of every set of changed groups comes first, then other
  choices of the same sets. Choices that score exactly as an earlier one come last: for the model
  they are the same program, such as the compiler's own choice with its orders written out.

  Args:
    order: choice numbers, most promising first.
    scores: `[C]` of all choices.
    changed: `[C, groups]` bool, the groups that choices change; choice 0 is the compiler's own.

  Returns:
    All choice numbers, 0 first.
  """
  new: list[int] = []
  again: list[int] = []
  equal: list[int] = []
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
