"""Searches for choices without a model, to which the searches of `tune` are compared.

random       random choices
coordinate   changes of one group at a time, in random order, each kept if it is better
"""

from __future__ import annotations

import numpy as np

from tpugraphs_jax.tuning.strategies import Pool, Search


def random(pool: Pool, seed: int) -> Search:
  """The compiler's own choice, then all other choices in random order."""
  yield pool.choices[0]
  rng = np.random.default_rng(seed)
  yield from (pool.choices[1 + place] for place in rng.permutation(len(pool.choices) - 1))


def coordinate(pool: Pool, seed: int) -> Search:
  """Changes of one group of the best choice so far, then all other choices in random order."""
  rng, best, least, tried = np.random.default_rng(seed), pool.choices[0], 1.0, {pool.choices[0]}
  yield best
  known, changes = set(pool.choices), pool.changes
  for place in rng.permutation(len(changes)):
    group, option = changes[place]
    numbers = (*best[:group], option, *best[group + 1 :])
    if numbers in tried or not (pool.is_open or numbers in known):
      continue
    tried.add(numbers)
    ratio = yield numbers
    if ratio is not None and ratio < least:
      best, least = numbers, ratio
  shuffled = (pool.choices[place] for place in rng.permutation(len(pool.choices)))
  yield from (numbers for numbers in shuffled if numbers not in tried)
