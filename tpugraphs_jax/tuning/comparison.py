"""Two estimates side by side, kernel by kernel.

They may be of two versions of a function, of jax or of libtpu. Kernels are matched by their source
line, scope and operation; where a line has moved, by its file; then by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
import dataclasses
import math
from typing import TypeVar

from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning.costs import CollectiveCost, KernelCost, TargetEstimate
from tpugraphs_jax.tuning.page import Page, Step
from tpugraphs_jax.tuning.summary import Estimate

_MOST = 10
_NAMED = 3
# What two kernels have in common that are the same, from the strictest to the loosest.
_KEYS: Sequence[Callable[[KernelCost], Hashable]] = (
  lambda kernel: (kernel.where, kernel.scope, kernel.operation, kernel.shape),
  lambda kernel: (kernel.where, kernel.scope, kernel.operation),
  lambda kernel: (_file(kernel), kernel.scope, kernel.operation, kernel.shape),
  lambda kernel: (_file(kernel), kernel.scope, kernel.operation),
  lambda kernel: (kernel.operation, kernel.shape),
)
_COLLECTIVE_KEYS: Sequence[Callable[[CollectiveCost], Hashable]] = (
  lambda one: (one.where, one.kind, one.axes, one.operation),
  lambda one: (one.kind, one.axes, one.operation),
  lambda one: (one.kind, one.axes),
)
_One = TypeVar("_One", KernelCost, CollectiveCost)


@dataclasses.dataclass(frozen=True)
class KernelChange:
  """The time of equal kernels before and after; None on the side that has none."""

  kernel: KernelCost  # of after, else of before
  before: float | None
  after: float | None

  @property
  def more(self) -> float:
    """Milliseconds that they take more."""
    return (self.after or 0.0) - (self.before or 0.0)


@dataclasses.dataclass(frozen=True)
class CollectiveChange:
  """Exposed milliseconds of equal collectives before and after; None on the side that has none."""

  collective: CollectiveCost  # of after, else of before
  before: float | None
  after: float | None

  @property
  def more(self) -> float:
    """Milliseconds in which the device waits more for them."""
    return (self.after or 0.0) - (self.before or 0.0)


@dataclasses.dataclass(frozen=True)
class Pair:
  """A program on one target, before and after.

  Attributes:
    name: of the program after.
    before, after: their rows.
    slower: the part by which it may be slower.
    changes: of its kernels, those that take most more first.
    waits: changes of its collectives, likewise.
  """

  name: str
  before: TargetEstimate
  after: TargetEstimate
  slower: float
  changes: tuple[KernelChange, ...]
  waits: tuple[CollectiveChange, ...] = ()

  @property
  def is_slower(self) -> bool:
    """Whether it is slower than it may be, or has no time any more."""
    if self.before.milliseconds is None:
      return False
    if self.after.milliseconds is None:
      return True
    return self.after.milliseconds > self.before.milliseconds * (1 + self.slower)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Page):
  """Programs before and after, as text and as tables of a notebook.

  Attributes:
    pairs: each program on each target that both sides have.
    versions: what differs between the versions of both sides.
  """

  pairs: tuple[Pair, ...]
  versions: str

  @property
  def is_slower(self) -> bool:
    """Whether a program is slower than it may be."""
    return any(pair.is_slower for pair in self.pairs)

  def _tables(self) -> Iterator[Table]:
    rows = [_cells(pair) for pair in self.pairs]
    title = "before and after" + (f" ({self.versions})" if self.versions else "")
    yield Table(["", "", "before, ms", "after, ms", "after / before", ""], rows, title)
    for pair in self.pairs:
      changed = [change for change in pair.changes if change.more]
      cells = [_kernel_cells(change) for change in _largest(changed)]
      if cells:
        target = pair.after.target
        title = f"{pair.name}, {target}: {len(cells)} of {len(changed)} kernels whose time changed"
        head = "ms more|before, ms|after, ms|kernel|shape|scope|line".split("|")
        yield Table(head, cells, title)
      yield from _waits(pair)

  def _title(self) -> str:
    return f"{', '.join(dict.fromkeys(pair.name for pair in self.pairs))}: before and after"

  def _steps(self) -> Iterator[Step]:
    for pair in self.pairs:
      target = pair.after.target
      several = f"{pair.name}, " * (len({pair.name for pair in self.pairs}) > 1)
      yield Step(f"{several}{target} before", pair.before)
      yield Step(f"{several}{target} after", pair.after)

  def _verdict(self) -> Iterator[str]:
    for pair in self.pairs:
      name, target, before, after, ratio, _ = _cells(pair)
      took = f"{ratio} of its time, " if ratio else ""
      changed = f"; {_culprits(pair)}" if pair.is_slower else ""
      verdict = "slower" if pair.is_slower else "not slower"
      yield f"{name}, {target}: {verdict}, {took}{before} to {after} ms{changed}"

  def _notes(self) -> Iterator[str]:
    for pair in self.pairs:
      if pair.is_slower:
        yield f"{pair.name}, {pair.after.target}: slower; {_culprits(pair)}"


def check_slower(slower: float) -> None:
  """Refuses (ValueError) what is no part of a time."""
  if not 0 <= slower < math.inf:
    raise ValueError(f"slower is {slower}, expected a part from 0 on, such as .02")


def counterpart(before: Sequence[Estimate], name: str, programs: int) -> Estimate | None:
  """The estimate with which a program is compared: of its name, or the only one of each side.

  Args:
    before: estimates.
    name: of the program.
    programs: how many are compared.
  """
  if len(before) == programs == 1:
    return before[0]
  return next((estimate for estimate in before if estimate.name == name), None)


def compare(
  before: Sequence[Estimate], after: Sequence[Estimate], *, slower: float = 0.0
) -> Comparison:
  """Compares estimates of the same programs.

  Args:
    before: estimates, such as those of `summary.load`.
    after: others. Programs are matched by name; one program on each side needs no equal name.
    slower: the part by which a program may be slower, .02 for 2 %.

  Raises:
    ValueError: both sides have no program and target in common, or no such part.
  """
  check_slower(slower)
  pairs = []
  for new in after:
    old = counterpart(before, new.name, len(after))
    rows = {row.target: row for row in old.rows} if old else {}
    name = new.name
    if old and old.name != name:
      name = f"{name} (before: {old.name})"
    for row in new.rows:
      if row.target in rows:
        one = rows[row.target]
        changes = changes_of(one.kernels, row.kernels)
        waits = waits_of(one.communication, row.communication)
        pairs.append(Pair(name, one, row, slower, changes, waits))
  if not pairs:
    describe = lambda side: ", ".join(
      f"{estimate.name} for {' '.join(row.target for row in estimate.rows)}" for estimate in side
    )
    raise ValueError(
      f"nothing to compare: before has {describe(before) or 'nothing'}, after has "
      f"{describe(after) or 'nothing'}: estimate the same programs for the same targets"
    )
  return Comparison(tuple(pairs), _versions(before, after))


def changes_of(
  before: Sequence[KernelCost], after: Sequence[KernelCost]
) -> tuple[KernelChange, ...]:
  """The times of kernels that are the same, those that take most more first."""
  cost = lambda kernel: kernel.milliseconds or 0.0
  changes = [KernelChange(*change) for change in _matched(before, after, _KEYS, cost)]
  return tuple(sorted(changes, key=lambda change: -change.more))


def waits_of(
  before: Sequence[CollectiveCost], after: Sequence[CollectiveCost]
) -> tuple[CollectiveChange, ...]:
  """The exposed time of collectives that are the same, those that take most more first."""
  cost = lambda one: one.exposed_ms
  changes = [CollectiveChange(*one) for one in _matched(before, after, _COLLECTIVE_KEYS, cost)]
  return tuple(sorted(changes, key=lambda change: -change.more))


def _matched(
  before: Sequence[_One],
  after: Sequence[_One],
  keys: Sequence[Callable[[_One], Hashable]],
  cost: Callable[[_One], float],
) -> Iterator[tuple[_One, float | None, float | None]]:
  """What is the same on both sides by the strictest key, with the sums of its cost."""
  for key in keys:
    old, new = _groups(before, key), _groups(after, key)
    both = old.keys() & new.keys()
    for name in sorted(both, key=str):
      yield new[name][0], sum(map(cost, old[name])), sum(map(cost, new[name]))
    before = [one for one in before if key(one) not in both]
    after = [one for one in after if key(one) not in both]
  yield from ((one, cost(one), None) for one in before)
  yield from ((one, None, cost(one)) for one in after)


def _groups(costs: Sequence[_One], key: Callable[[_One], Hashable]) -> dict[Hashable, list[_One]]:
  groups: dict[Hashable, list[_One]] = {}
  for one in costs:
    groups.setdefault(key(one), []).append(one)
  return groups


def _file(kernel: KernelCost) -> str:
  return kernel.where.rpartition(":")[0]


def _versions(before: Sequence[Estimate], after: Sequence[Estimate]) -> str:
  old, new = before[0].versions, after[0].versions
  names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
  return ", ".join(f"{name} {old.get(name, '?')} -> {new.get(name, '?')}" for name in names)


def _cells(pair: Pair) -> list[str]:
  before, after = pair.before.milliseconds, pair.after.milliseconds
  number = lambda value: "no time" if value is None else f"{value:.4g}"
  ratio = f"{after / before:.3f}" if before and after is not None else ""
  verdict = "slower" if pair.is_slower else ""
  target = pair.after.target
  return [pair.name, target, number(before), number(after), ratio, verdict]


def _kernel_cells(change: KernelChange) -> list[str]:
  kernel = change.kernel
  return [*_numbers(change), kernel.operation, kernel.shape, kernel.scope, kernel.where]


def _numbers(change: KernelChange | CollectiveChange) -> list[str]:
  number = lambda value: "" if value is None else f"{value:.3g}"
  return [f"{change.more:+.3g}", number(change.before), number(change.after)]


def _waits(pair: Pair) -> Iterator[Table]:
  """The collectives for which the device waits longer or shorter than before."""
  changed = [change for change in pair.waits if change.more]
  cells = []
  for change in _largest(changed):
    one = change.collective
    cells.append([*_numbers(change), one.kind, ", ".join(one.axes), one.operation, one.where])
  if cells:
    before, after = pair.before.exposed_ms, pair.after.exposed_ms
    title = (
      f"{pair.name}, {pair.after.target}: the device waits {before:.3g} ms for others before and "
      f"{after:.3g} after; {len(cells)} of {len(changed)} collectives that changed"
    )
    head = "ms more|exposed before|exposed after|collective|along|operation|line".split("|")
    yield Table(head, cells, title)


_Change = TypeVar("_Change", KernelChange, CollectiveChange)


def _largest(changes: Sequence[_Change]) -> list[_Change]:
  """The largest changes, those that take more first."""
  largest = sorted(changes, key=lambda change: -abs(change.more))[:_MOST]
  return sorted(largest, key=lambda change: -change.more)


def _culprits(pair: Pair) -> str:
  """The kernels that take most more, or why there is no time."""
  if pair.after.milliseconds is None:
    return f"it has no time any more, because {pair.after.why}"
  more = [change for change in pair.changes if change.more > 0][:_NAMED]
  names = [
    " ".join(filter(None, [change.kernel.operation, change.kernel.scope, change.kernel.where]))
    + f" ({change.more:+.3g} ms)"
    for change in more
  ]
  return f"most of it in {', '.join(names)}" if names else "between its kernels"
