"""The order in which choices of layouts are labelled, from the scores of a model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


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
