"""Two estimates side by side, kernel by kernel.

They may be of two versions of a function, of jax or of libtpu. Kernels are matched by their source
line, scope and operation; where a line has moved, by its file; then by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
import dataclasses
import math

from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning.costs import KernelCost, Row
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
class Pair:
  """A program on one target, before and after.

  Attributes:
    name: of the program after.
    before, after: their rows.
    slower: the part by which it may be slower.
    changes: of its kernels, those that take most more first.
  """

  name: str
  before: Row
  after: Row
  slower: float
  changes: tuple[KernelChange, ...]

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
  by_name = {estimate.name: estimate for estimate in before}
  pairs = []
  for new in after:
    old = before[0] if len(before) == len(after) == 1 else by_name.get(new.name)
    rows = {row.target: row for row in old.rows} if old else {}
    for row in new.rows:
      if row.target in rows:
        changes = changes_of(rows[row.target].kernels, row.kernels)
        pairs.append(Pair(new.name, rows[row.target], row, slower, changes))
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
  changes = []
  for key in _KEYS:
    old, new = _groups(before, key), _groups(after, key)
    both = old.keys() & new.keys()
    for name in sorted(both, key=str):
      changes.append(KernelChange(new[name][0], _sum(old[name]), _sum(new[name])))
    before = [kernel for kernel in before if key(kernel) not in both]
    after = [kernel for kernel in after if key(kernel) not in both]
  changes += [KernelChange(kernel, _sum([kernel]), None) for kernel in before]
  changes += [KernelChange(kernel, None, _sum([kernel])) for kernel in after]
  return tuple(sorted(changes, key=lambda change: -change.more))


def _groups(
  kernels: Sequence[KernelCost], key: Callable[[KernelCost], Hashable]
) -> dict[Hashable, list[KernelCost]]:
  groups: dict[Hashable, list[KernelCost]] = {}
  for kernel in kernels:
    groups.setdefault(key(kernel), []).append(kernel)
  return groups


def _sum(kernels: Sequence[KernelCost]) -> float:
  return sum(kernel.milliseconds or 0.0 for kernel in kernels)


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
  number = lambda value: "" if value is None else f"{value:.3g}"
  kernel = change.kernel
  place = [kernel.operation, kernel.shape, kernel.scope, kernel.where]
  return [f"{change.more:+.3g}", number(change.before), number(change.after), *place]


def _largest(changes: Sequence[KernelChange]) -> list[KernelChange]:
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
