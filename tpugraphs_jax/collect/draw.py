"""Which choices of a program are labelled, and which of them are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import zlib

import numpy as np

# So many groups at most leave the compiler's own choice together: with more, nearly
# every configuration is several times slower and the near ones are missing.
_GROUPS_AT_ONCE = 5
_TRIES = 200


def candidates(options: Sequence[np.ndarray], *, seed: int, name: str) -> Iterator[list[int]]:
  """Distinct option numbers `[groups]`, first the compiler's own, the same at every call.

  Args:
    options: per group the options to draw from, 0 first.
    seed: of the draw, together with
    name: the name of the program.

  Yields:
    Lists of option numbers, until 200 draws in a row give nothing new.
  """
  rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
  free = [group for group, each in enumerate(options) if len(each) > 1]
  numbers = [0] * len(options)
  seen = {tuple(numbers)}
  yield numbers
  tries = 0
  while free and tries < _TRIES:
    numbers = [0] * len(options)
    count = rng.integers(1, min(len(free), _GROUPS_AT_ONCE) + 1)
    for group in rng.choice(free, count, replace=False):
      numbers[group] = int(rng.choice(options[group][1:]))
    tries = tries + 1 if tuple(numbers) in seen else 0
    if not tries:
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
