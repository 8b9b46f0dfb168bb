"""DMAs that run beside a core: the queues of the HBM and of the host, flags, and waits for them.

A DMA adds its granules to a flag when it has arrived. A wait lasts until the flag has a count; an
addition of a negative count takes what was awaited.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tpugraphs_jax.tuning.schedule.bundles import Unreadable
from tpugraphs_jax.tuning.schedule.chips import Chip
from tpugraphs_jax.tuning.schedule.words import Unknown

HOST = "host_iova"  # the memory of the host, as the name of a DMA has it


@dataclasses.dataclass
class Flag:
  """A counter that DMAs and the core add to.

  Attributes:
    count: granules so far.
    arrivals: times and granules of DMAs that have not been counted yet.
  """

  count: int = 0
  arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)

  def settle(self, now: float) -> None:
    """Counts what has arrived."""
    if self.arrivals:
      self.count += sum(size for time, size in self.arrivals if time <= now)
      self.arrivals = [(time, size) for time, size in self.arrivals if time > now]

  def reaches(self, count: int) -> float | None:
    """When the flag has a count, 0 if it has; None if never."""
    total, time = self.count, 0.0
    for time_of_arrival, size in sorted(self.arrivals):
      if total >= count:
        break
      total, time = total + size, time_of_arrival
    return time if total >= count else None


class HostLink:
  """The link of a core to its host: in each direction one DMA after the other."""

  def __init__(self, chip: Chip):
    self._chip = chip
    self._ends = {HOST: 0.0, "hbm": 0.0}  # when the last DMA to each of them is through

  def move(self, spaces: tuple[str, str], now: float, size: int) -> float:
    """Moves bytes between memories from a cycle on; returns when they have arrived."""
    cycles = size * self._chip.clock / self._chip.link.host
    self._ends[spaces[1]] = max(now, self._ends[spaces[1]]) + cycles
    return self._ends[spaces[1]] + self._chip.latency


class Dmas:
  """The DMAs of a core: the HBM moves one after the other, in the order of their start.

  Those to and from the host also pass its link, which moves one after the other in each direction.

  Args:
    chip: its constants.
    busy: cycles for which the HBM moves what was started before.

  Attributes:
    hbm_bytes: bytes moved between HBM and the core.
    chip_bytes: bytes moved on the chip.
    count: DMAs.
    last: when the last one has arrived.
    flags: by address.
  """

  def __init__(self, chip: Chip, busy: float = 0.0):
    self._chip = chip
    self._free = busy
    # Of DMAs from and of DMAs to the HBM: when the last one is through, and the bytes on their way
    # that none in the other direction has met.
    self._ends, self._unmet = [0.0, 0.0], [0, 0]
    self._host = HostLink(chip)
    self.hbm_bytes = self.chip_bytes = self.count = 0
    self.last = 0.0
    self.flags: dict[int, Flag] = {}

  def start(self, spaces: tuple[str, str], now: float, size: Any, flag: Any) -> int:
    """Starts a DMA; returns its bytes.

    Args:
      spaces: memories from and to which it moves.
      now: cycle.
      size: granules.
      flag: address of its flag.
    """
    size, flag = known(size, "the size of a DMA"), known(flag, "the flag of a DMA")
    chip, moved = self._chip, size * self._chip.granule
    self.count += 1
    times = spaces.count("hbm")
    if times:
      arrival = self._move(now, times * moved, spaces.index("hbm"), is_both=times == 2)
      if HOST in spaces:
        arrival = max(arrival, self._host.move(spaces, now, moved))
    else:
      self.chip_bytes += moved
      arrival = now + moved / chip.vmem
    self.last = max(self.last, arrival)
    self.flags.setdefault(flag, Flag()).arrivals.append((arrival, size))
    return moved

  def _move(self, now: float, size: int, direction: int, *, is_both: bool) -> float:
    """Moves bytes behind all others; returns when they have arrived."""
    self.hbm_bytes += size
    self._unmet = [left if end > now else 0 for left, end in zip(self._unmet, self._ends)]
    met = size if is_both else min(size, self._unmet[1 - direction])
    if not is_both:
      self._unmet[1 - direction] -= met
      self._unmet[direction] += size
    is_written = direction == 1
    cycles = met / self._chip.rate(is_written=is_written, is_mixed=True)
    cycles += (size - met) / self._chip.rate(is_written=is_written, is_mixed=False)
    self._free = self._ends[direction] = max(now, self._free) + cycles
    return self._free + (self._chip.latency_written if is_written else self._chip.latency)

  def arrive(self, flag: int, time: float, size: int) -> None:
    """Lets a flag count granules that another core sent."""
    self.flags.setdefault(flag, Flag()).arrivals.append((time, size))

  def wait(self, now: float, flag: Any, count: Any) -> float:
    """Cycles until a flag has a count.

    Raises:
      Unreadable: nothing that was started makes it so.
    """
    count = known(count, "the count of a wait")
    waiting = self.flags.get(known(flag, "the flag of a wait"), Flag())
    time = waiting.reaches(count)
    if time is None:
      raise Unreadable("it waits for a DMA that nothing starts")
    return max(0.0, time - now)

  def add(self, now: float, flag: Any, count: Any) -> None:
    """Adds to a flag; counts from 2**31 on are negative."""
    count = known(count, "what is added to a flag")
    changed = self.flags.setdefault(known(flag, "a flag"), Flag())
    changed.settle(now)
    changed.count += count - (1 << 32) if count >= 1 << 31 else count


def known(word: Any, what: str) -> int:
  """The word.

  Raises:
    Unreadable: its value is unknown.
  """
  if word is None or word.__class__ is Unknown:
    why = "it is missing" if word is None else word.why
    raise Unreadable(f"{what} is unknown: {why}")
  return int(word)
