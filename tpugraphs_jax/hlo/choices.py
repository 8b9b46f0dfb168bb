"""Distinct combinations of independent choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math

import numpy as np

# Up to so many combinations, all are listed; beyond, they are drawn.
_LISTED = 1 << 17
_ROUNDS = 50


def distinct_choices(
    options: Sequence[int], n: int, *, seed: int,
    accept: Callable[[np.ndarray], np.ndarray] = lambda choices: np.ones(len(choices), bool),
) -> np.ndarray:
  """At most `n` distinct combinations, `[C, len(options)]` int64.

  Args:
    options: the number of options of each choice: at least one choice, all positive.
    n: how many combinations; all of them where there are fewer.
    seed: of the draw.
    accept: of combinations `[c, len(options)]`, which ones are allowed, `[c]` bool.

  Returns:
    Option numbers in ascending order of combinations. The first options together,
    where allowed, are always among them.
  """
  if n < 1:
    raise ValueError(f"n is {n}, expected at least one configuration")
  rng = np.random.default_rng(seed)
  total = math.prod(options)
  if total <= max(n, _LISTED):
    found = np.stack(np.unravel_index(np.arange(total), tuple(options)), axis=1)
    found = found[accept(found)]
  else:
    found = _draw(options, n, rng, accept)
  if len(found) <= n:
    return found
  return found[np.append(0, 1 + np.sort(rng.choice(len(found) - 1, n - 1, replace=False)))]


def _draw(
    options: Sequence[int], n: int, rng: np.random.Generator,
    accept: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
  """At least `n` distinct allowed combinations, or what 50 rounds find of them."""
  found = np.zeros((1, len(options)), np.int64)
  found = found[accept(found)]
  for _ in range(_ROUNDS):
    drawn = rng.integers(0, options, (n, len(options)))
    found = np.unique(np.concatenate([found, drawn[accept(drawn)]]), axis=0)
    if len(found) >= n:
      break
  return found
