"""Executes the blocks of a schedule: how often and when bundles run."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from tpugraphs_jax.tuning.schedule.bundles import Unreadable
from tpugraphs_jax.tuning.schedule.chips import Chip
from tpugraphs_jax.tuning.schedule.linker import Branch, Core, Schedule
from tpugraphs_jax.tuning.schedule.words import Unknown

MOST_BLOCKS = 4_000_000  # executed blocks of one kernel
# Iterations after which a loop that data may end has no counter that ends it.
_MOST_CONTINUED = 2_000


class Open(Exception):
  """A loop, by the word of its branch, that nothing but data ends."""


class DataLoops:
  """Loops that data may end: they go on until their counters end them.

  Args:
    iterations: of a loop that nothing but data ends.
    open_loops: words of the branches of such loops.

  Attributes:
    has_open: whether a loop that nothing but data ends has run.
  """

  def __init__(self, iterations: int, open_loops: Container[int]):
    self._iterations, self._open = iterations, open_loops
    self._counts: dict[int, int] = {}
    self.has_open = False

  def goes_on(self, unknown: Unknown, branch: Branch) -> bool:
    """Whether a loop has another iteration.

    Raises:
      Unreadable: an operation that is not known decides it.
      Open: it has no counter, and is none of the loops that are known to have none.
    """
    if not unknown.is_data:
      raise Unreadable(f"the number of iterations of a loop is unknown, {unknown.why}")
    count = self._counts[branch.taken] = self._counts.get(branch.taken, 0) + 1
    if branch.taken not in self._open:
      if count > _MOST_CONTINUED:
        raise Open(branch.taken)
      return True
    self.has_open = True
    if count < self._iterations:
      return True
    self._counts[branch.taken] = 0
    return False


def run(
  schedule: Schedule, core: Core, registers: list[Any], chip: Chip
) -> tuple[float, list[int]]:
  """Runs a schedule; its cycles, and how often each block ran.

  Args:
    schedule: of a kernel or of a program.
    core: what its blocks do beside scalar arithmetic.
    registers: of `Schedule.registers`.
    chip: constants of its generation.

  Raises:
    Unreadable: something unknown decides what happens next, or it does not end.
  """
  counts = [0] * len(schedule.blocks)
  lasts = [block.lasts(chip) for block in schedule.blocks]
  time, place, left = 0.0, 0, MOST_BLOCKS
  following: int | None = 0
  jump: Branch | None = None
  while following is not None:
    place = following
    block = schedule.blocks[place]
    for steps, effect, offset in block.segments:
      try:
        for compute, result, a, b, c in steps:
          registers[result] = compute(registers[a], registers[b], registers[c])
      except (TypeError, OverflowError):
        raise Unreadable("an operation has too few operands, or a word of another type") from None
      if effect is not None:
        time += effect(registers, core, time + offset)
    time += lasts[place]
    counts[place] += 1
    following = block.following
    for branch in block.branches:
      taken = registers[branch.taken]
      if taken.__class__ is Unknown:
        taken = core.choose(taken, branch)
      if taken:
        if jump is not None:
          raise Unreadable("a branch is taken in the slots of another")
        jump = branch
    if jump is not None and jump.leaves == place:
      following, jump = jump.target, None
    left -= 1
    if not left:
      raise Unreadable(f"a loop does not end within {MOST_BLOCKS} blocks")
  return time, counts
