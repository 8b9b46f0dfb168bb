"""Draws choices of a program to label, and picks choices to keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
import zlib

import numpy as np

# The most groups that a drawn choice changes. With more of them nearly every choice is
# several times slower than the compiler's own.
_GROUPS_AT_ONCE = 5
_TRIES = 200  # draws in a row that give nothing new, after which drawing ends
_LISTED = 1 << 12  # up to this many combinations all are listed
_LISTED_CHANGES = 1 << 20  # up to this many changes of two groups too

OptionIndices = tuple[int, ...]  # the option of every group; all 0 for the compiler's own choice


def candidates(options: Sequence[np.ndarray], *, seed: int, name: str) -> Iterator[OptionIndices]:
  """Distinct choices, one option number per group; the same ones at every call.

  The compiler's own choice comes first. Then come in turn a change of one group, of two groups, and
  of up to five groups, until no new choice is found. Up to 4,096 combinations are all listed. Of
  more than about a million changes of two groups random ones are drawn.

  Args:
    options: per group the options to draw from, 0 first.
    seed: of the draw.
    name: of the program; programs of other names have other draws.
  """
  rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
  numbers_of = [of_group.tolist() for of_group in options]
  free = [group for group, numbers in enumerate(options) if len(numbers) > 1]
  if math.prod(map(len, options)) <= _LISTED:
    every = list(itertools.product(*numbers_of))
    anything = iter([every[place] for place in rng.permutation(len(every))])
  else:
    anything = _drawn(numbers_of, free, rng)
  streams = [_changes(numbers_of, free, count, rng) for count in (1, 2)] + [anything]
  seen = {(0,) * len(options)}
  yield (0,) * len(options)
  while streams:
    for stream in tuple(streams):
      numbers = next((numbers for numbers in stream if numbers not in seen), None)
      if numbers is None:
        streams.remove(stream)
      else:
        seen.add(numbers)
        yield numbers


def _changes(
  options: list[list[int]], free: list[int], count: int, rng: np.random.Generator
) -> Iterator[OptionIndices]:
  """Changes of `count` groups in random order: all of them, or random ones of too many."""
  changed = sum(len(options[group]) - 1 for group in free)
  if count <= len(free) and changed**count > _LISTED_CHANGES:
    yield from _drawn(options, free, rng, count)
    return
  changes = [
    dict(zip(groups, changed))
    for groups in itertools.combinations(free, count)
    for changed in itertools.product(*(options[group][1:] for group in groups))
  ]
  for place in rng.permutation(len(changes)):
    yield tuple(changes[place].get(group, 0) for group in range(len(options)))


def _drawn(
  options: list[list[int]], free: list[int], rng: np.random.Generator, count: int | None = None
) -> Iterator[OptionIndices]:
  """Random changes of `count` groups, or of up to five."""
  seen: set[OptionIndices] = set()
  tries = 0
  while tries < _TRIES:
    groups_at_once = count or rng.integers(1, min(len(free), _GROUPS_AT_ONCE) + 1)
    groups = rng.choice(free, groups_at_once, replace=False).tolist()
    changed = {group: int(rng.choice(options[group][1:])) for group in groups}
    numbers = tuple(changed.get(group, 0) for group in range(len(options)))
    tries = tries + 1 if numbers in seen else 0
    seen.add(numbers)
    yield numbers


def wanted(labels: Mapping[int, int], configs: int, *, draws: int) -> int:
  """How many candidates to label next.

  If many labels are equal, up to half as many more candidates are labelled, until three quarters of
  the configurations have different labels.

  Args:
    labels: candidate number to label, without failures.
    configs: how many configurations are asked for.
    draws: how many candidates have been tried.
  """
  missing = max(configs - len(labels), 0)
  different = len(set(labels.values()))
  ties = max(configs * 3 // 4 - different - missing, 0)
  return min(max(missing, ties), configs + configs // 2 - draws)


def kept(labels: Mapping[int, int], configs: int) -> list[int]:
  """The candidates to keep, ascending: the first of every label, then ties."""
  first = {label: number for number, label in sorted(labels.items(), reverse=True)}
  chosen = sorted(first.values())[:configs]
  ties = sorted(set(labels) - set(chosen))
  return sorted(chosen + ties[: configs - len(chosen)])
