"""Which choices of a program are labelled, and which of them are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
import zlib

import numpy as np

# So many groups at most leave the compiler's own choice together: with more, nearly
# every configuration is several times slower and the near ones are missing.
_GROUPS_AT_ONCE = 5
_TRIES = 200
_LISTED = 1 << 12  # up to so many combinations all are yielded


def candidates(options: Sequence[np.ndarray], *, seed: int, name: str) -> Iterator[list[int]]:
  """Distinct option numbers `[groups]`, the same at every call.

  First the compiler's own choice, then in turn a change of one group, of two groups,
  and of any groups, until nothing new is found. Up to 4,096 combinations all come.

  Args:
    options: per group the options to draw from, 0 first.
    seed: of the draw, together with
    name: the name of the program.
  """
  rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
  options = [each.tolist() for each in options]
  free = [group for group, each in enumerate(options) if len(each) > 1]
  anything = _listed if math.prod(map(len, options)) <= _LISTED else _drawn
  streams = [_changes(options, free, 1, rng), _changes(options, free, 2, rng),
             anything(options, free, rng)]
  seen = {(0,) * len(options)}
  yield [0] * len(options)
  while streams:
    for stream in tuple(streams):
      numbers = next((each for each in stream if tuple(each) not in seen), None)
      if numbers is None:
        streams.remove(stream)
      else:
        seen.add(tuple(numbers))
        yield numbers


def _changes(
    options: list[list[int]], free: list[int], count: int, rng: np.random.Generator
) -> Iterator[list[int]]:
  """Every change of `count` groups, in random order."""
  found = [zip(groups, changed) for groups in itertools.combinations(free, count)
           for changed in itertools.product(*(options[group][1:] for group in groups))]
  for place in rng.permutation(len(found)):
    numbers = [0] * len(options)
    for group, number in found[place]:
      numbers[group] = number
    yield numbers


def _listed(
    options: list[list[int]], free: list[int], rng: np.random.Generator
) -> Iterator[list[int]]:
  """Every combination, in random order."""
  del free
  found = list(itertools.product(*options))
  return (list(found[place]) for place in rng.permutation(len(found)))


def _drawn(
    options: list[list[int]], free: list[int], rng: np.random.Generator
) -> Iterator[list[int]]:
  """Random changes of up to five groups, until 200 draws in a row give nothing new."""
  seen: set[tuple[int, ...]] = set()
  tries = 0
  while tries < _TRIES:
    numbers = [0] * len(options)
    count = rng.integers(1, min(len(free), _GROUPS_AT_ONCE) + 1)
    for group in rng.choice(free, count, replace=False):
      numbers[group] = int(rng.choice(options[group][1:]))
    tries = tries + 1 if tuple(numbers) in seen else 0
    seen.add(tuple(numbers))
    yield numbers


def wanted(labels: Mapping[int, int], configs: int, *, draws: int) -> int:
  """How many candidates to label next.

  Where many labels are ties more is drawn, up to half as much again, until three
  quarters of the configurations differ in label.

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
  first = {}
  for number, label in sorted(labels.items()):
    first.setdefault(label, number)
  chosen = sorted(first.values())[:configs]
  ties = sorted(set(labels) - set(chosen))
  return sorted(chosen + ties[:configs - len(chosen)])
