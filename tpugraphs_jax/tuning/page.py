"""The page of a result: where the time goes, a timeline of the device, its memory, and tables.

Every result of this package has it: `result.save_html("page.html")`, and in a notebook its part
without scripts. `report.templates` has the template.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import os
import re
from typing import Any, NamedTuple

from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.hlo.buffers import Buffer, LiveMemory
from tpugraphs_jax.infra import console, files
from tpugraphs_jax.report import templates
from tpugraphs_jax.tuning import trace
from tpugraphs_jax.tuning.costs import BETWEEN, KernelCost, TargetEstimate
from tpugraphs_jax.tuning.schedule import mesh

# Classes of the style sheet by what bounds a kernel.
COLOURS = {
  "products": "products",
  "vector work": "vector",
  "memory": "memory",
  "loop overhead": "overhead",
  mesh.LINKS: "communication",
  BETWEEN: "between",
}
_GRADIENT, _GRADIENTS = "gradient of ", "gradient"
_NUMBER = re.compile(r"[<+-]?\s*[\d.,]+(e[+-]?\d+)?\s?(%|x|ms|GiB|MiB)?")
_NARROW = 0.1  # percent of the widest step: narrower frames of a scope are one frame
_MOST_EVENTS = 20_000  # of a timeline
_BINS, _HEIGHT = 800, 100  # of the picture of a memory
_MOST_BUFFERS, _SMALL_BUFFER = 100, 1e-3  # listed at the peak; part of it below which none is
_GIB = 2**30
_PADDED = 1.05  # a buffer from so many times the bytes of its elements on is padded


class Step(NamedTuple):
  """A program on a target, as a page shows it."""

  name: str
  row: TargetEstimate


class Page(console.Tables):
  """A result that is text on a terminal, a page, and a part of that page in a notebook."""

  def _title(self) -> str:
    return type(self).__name__

  def _kind(self) -> str:
    """Whether its times are estimates or measured."""
    return "ESTIMATE, not measured"

  def _verdict(self) -> Iterable[str]:
    """Sentences at the top of the page, the one to read first."""
    return ()

  def _steps(self) -> Iterable[Step]:
    """The programs whose time and memory the page shows."""
    return ()

  def _page_tables(self) -> Iterable[console.Table]:
    return self._tables()

  def save_html(self, path: str | os.PathLike[str]) -> None:
    """Writes a page: one HTML file that needs no network."""
    with files.replacing(path, encoding="utf-8") as file:
      file.write(self._render(is_page=True))

  def save_trace(self, path: str | os.PathLike[str]) -> None:
    """Writes the timeline as JSON that Perfetto and XProf's trace viewer open.

    Raises:
      ValueError: no program has a time.
    """
    trace.save([(step.name, step.row) for step in self._steps()], path)

  def _repr_html_(self) -> str:
    return self._render(is_page=False)

  def _render(self, *, is_page: bool) -> str:
    steps = [step for step in self._steps() if step.row.kernels]
    longest = max((_length(step.row) for step in steps), default=0.0)
    return templates.render(
      "estimate.html",
      is_page=is_page,
      title=self._title(),
      kind=self._kind(),
      verdict=list(self._verdict()),
      tables=[_table(table) for table in (self._page_tables() if is_page else self._tables())],
      steps=[_step(step, longest) for step in steps],
      legend={colour: name for name, colour in COLOURS.items()},
      notes=list(self._notes()),
    )


class _Together(Page):
  """Several results on one page."""

  def __init__(self, results: Sequence[Page]):
    self._results = results

  def _title(self) -> str:
    return "; ".join(result._title() for result in self._results)

  def _kind(self) -> str:
    return ", ".join(dict.fromkeys(result._kind() for result in self._results))

  def _verdict(self) -> Iterator[str]:
    return (sentence for result in self._results for sentence in result._verdict())

  def _steps(self) -> Iterator[Step]:
    for result in self._results:
      for step in result._steps():
        yield step._replace(name=f"{getattr(result, 'name', '')} {step.name}".strip())

  def _tables(self) -> Iterator[console.Table]:
    return (table for result in self._results for table in result._page_tables())

  def _notes(self) -> Iterator[str]:
    return iter(dict.fromkeys(note for result in self._results for note in result._notes()))


def together(results: Sequence[Page]) -> Page:
  """Results on one page."""
  return results[0] if len(results) == 1 else _Together(results)


def verdict(step: Step) -> str:
  """The time of a program, its dearest module, line or collective, and what bounds it."""
  row = step.row
  if row.milliseconds is None:
    return f"{step.name}: no time, because {row.why}"
  interval = " ({:.3g} to {:.3g})".format(*row.interval) if row.interval else ""
  sentence = f"{step.name}: {row.milliseconds:.3g} ms{interval}."
  path, node = _dearest(_tree(row.kernels))
  line = max(by_line(row.kernels), key=_sum, default=[])
  # Code without modules has scopes of single operations.
  is_line = not path or _sum(line) > _sum(node.all())
  kernels = line if is_line else list(node.all())
  if row.communication and row.communication[0].exposed_ms > _sum(kernels):
    wait = row.communication[0]  # the longest
    place = ", ".join(filter(None, (wait.operation or wait.name, wait.where)))
    share = wait.exposed_ms / _length(row)
    along = f" along {' and '.join(wait.axes)}" if wait.axes else ""
    return f"{sentence} {share:.0%} of it is the wait for {wait.kind}{along}: {place}."
  if not kernels:
    return sentence
  share, longest = _sum(kernels) / _length(row), max(kernels, key=_ms)
  bound = f", bound by {_bound(kernels)}" if _bound(kernels) else ""
  place = ", ".join(filter(None, (longest.operation or longest.name, longest.where)))
  if is_line:
    return f"{sentence} {share:.0%} of it is {place}{bound}."
  part = _ms(longest) / _length(row)
  in_it = f"the longest kernel there, {part:.0%} of the step, is {place}"
  return f"{sentence} {share:.0%} of it is {_scope(path)}{bound}; {in_it}."


def by_line(kernels: Iterable[KernelCost]) -> list[list[KernelCost]]:
  """Groups of kernels of one scope, operation and line; a kernel without a line is alone."""
  groups: dict[Any, list[KernelCost]] = {}
  for kernel in kernels:
    has_time = kernel.milliseconds is not None
    place = (kernel.operation, kernel.scope, kernel.where, kernel.is_bound, has_time)
    groups.setdefault(place if kernel.where else kernel.name, []).append(kernel)
  return list(groups.values())


def _bound(kernels: Iterable[KernelCost]) -> str:
  """What bounds most of the time of kernels."""
  times: dict[str, float] = collections.defaultdict(float)
  for kernel in kernels:
    times[kernel.bound] += _ms(kernel)
  return max(times, key=times.__getitem__, default="")


def _ms(kernel: KernelCost) -> float:
  return kernel.milliseconds or 0.0


def _sum(kernels: Iterable[KernelCost]) -> float:
  return sum(map(_ms, kernels))


def _length(row: TargetEstimate) -> float:
  """Milliseconds of a program, not less than those of its kernels."""
  return max(row.milliseconds or 0.0, _sum(row.kernels)) or 1.0


def _step(step: Step, longest: float) -> dict[str, Any]:
  """What the template shows of a program.

  Args:
    step: the program.
    longest: milliseconds of the longest one of the page.
  """
  row, length = step.row, _length(step.row)
  frames = list(_Flame(step, _NARROW * longest / length).frames())
  return {
    "name": step.name,
    "time": "no time" if row.milliseconds is None else f"{row.milliseconds:.4g} ms",
    "milliseconds": length,
    "width": round(100 * length / longest, 3),
    "depth": 1 + max(frame["depth"] for frame in frames),
    "frames": frames,
    "timeline": _timeline(row) if row.events else None,
    "memory": _memory(row.live) if row.live.buffers else None,
    "kernels": _table(_kernels(row)),
  }


@dataclasses.dataclass
class _Node:
  """A scope, with its kernels and the scopes inside."""

  inside: dict[str, _Node] = dataclasses.field(default_factory=dict)
  kernels: list[KernelCost] = dataclasses.field(default_factory=list)

  def all(self) -> Iterator[KernelCost]:
    yield from self.kernels
    for node in self.inside.values():
      yield from node.all()


def _tree(kernels: Iterable[KernelCost]) -> _Node:
  """The scopes of kernels."""
  tree = _Node()
  for kernel in kernels:
    node = tree
    for part in _path(kernel.scope):
      node = node.inside.setdefault(part, _Node())
    node.kernels.append(kernel)
  return tree


def _dearest(tree: _Node) -> tuple[list[str], _Node]:
  """The scope with the most time, and the one inside as long as it has most of that time."""
  path: list[str] = []
  node = tree
  while node.inside:
    part = max(node.inside, key=lambda part: _sum(node.inside[part].all()))
    inner = node.inside[part]
    if path and _sum(inner.all()) < _sum(node.all()) / 2:
      break
    path.append(part)
    node = inner
  return path, node


class _Flame:
  """The frames of a program: its scopes, with those inside below, then kernels.

  Args:
    step: the program.
    narrow: percent of its width below which frames of a scope are joined.
  """

  def __init__(self, step: Step, narrow: float):
    self._step, self._narrow, self._length = step, narrow, _length(step.row)

  def frames(self) -> Iterator[dict[str, Any]]:
    tree = _tree(self._step.row.kernels)
    yield from self._of_node(self._step.name, tree, 0.0, 0, self._length)

  def _of_node(
    self, name: str, node: _Node, left: float, depth: int, milliseconds: float
  ) -> Iterator[dict[str, Any]]:
    kernels = list(node.all())
    yield self._frame(name, left, depth, milliseconds, kernels)
    parts: list[tuple[float, str, Any]] = [
      (_sum(inner.all()), part, inner) for part, inner in node.inside.items()
    ]
    parts += [(_ms(kernel), kernel.operation or kernel.name, kernel) for kernel in node.kernels]
    if depth == 0 and (between := milliseconds - _sum(kernels)) > 0:
      parts.append((between, BETWEEN, KernelCost(BETWEEN, bound=BETWEEN, milliseconds=between)))
    small: list[KernelCost] = []
    for time, part, inner in sorted(parts, key=lambda part: -part[0]):
      if not time:
        continue
      if 100 * time / self._length < self._narrow:
        small += [inner] if isinstance(inner, KernelCost) else inner.all()
        continue
      if isinstance(inner, KernelCost):
        yield self._frame(part, left, depth + 1, time, [inner])
      else:
        yield from self._of_node(part, inner, left, depth + 1, time)
      left += time
    if small:
      yield self._frame(f"{len(small)} smaller", left, depth + 1, _sum(small), small)

  def _frame(
    self, name: str, left: float, depth: int, milliseconds: float, kernels: Sequence[KernelCost]
  ) -> dict[str, Any]:
    bound = _bound(kernels)
    longest = max(kernels, key=_ms, default=KernelCost(name))
    words = [f"{name}: {milliseconds:.4g} ms, {milliseconds / self._length:.1%}"]
    words.append(f"bound by {bound}" if bound not in ("", BETWEEN) else "")
    words.append(longest.where if len(kernels) == 1 else "")
    if len(kernels) > 1:
      place = " ".join(filter(None, (longest.operation or longest.name, longest.where)))
      words.append(f"{len(kernels)} kernels, the longest {_ms(longest):.4g} ms: {place}")
    return {
      "name": name,
      "left": round(100 * left / self._length, 5),
      "width": round(100 * milliseconds / self._length, 5),
      "depth": depth,
      "colour": COLOURS.get(bound, "between"),
      "about": ", ".join(filter(None, words)),
    }


def _path(scope: str) -> list[str]:
  """The scopes from the outermost one; those of a gradient are inside `gradient`."""
  is_gradient = scope.startswith(_GRADIENT)
  parts = [part for part in scope.removeprefix(_GRADIENT).split("/") if part]
  return [_GRADIENTS] * is_gradient + parts


def _scope(path: Sequence[str]) -> str:
  """The scope of a path, the inverse of `_path`."""
  if path[0] == _GRADIENTS:
    return _GRADIENT + "/".join(path[1:]) if path[1:] else "gradients"
  return "/".join(path)


def _timeline(row: TargetEstimate) -> dict[str, Any]:
  """The tracks of a device for the script of the page: events with numbers of labels, colours."""
  kernels = {kernel.name: kernel for kernel in row.kernels}
  labels: dict[str, int] = {}
  colours = [*COLOURS.values()]
  tracks = []
  for name, events in trace.tracks(row, most=_MOST_EVENTS).items():
    shown = []
    for event in events:
      kernel = kernels.get(event.name)
      label = event.name
      if kernel:
        label = " ".join(filter(None, (kernel.operation, kernel.scope, kernel.where))) or event.name
      bound = event.bound or (kernel.bound if kernel else BETWEEN)
      colour = colours.index(COLOURS.get(bound, "between"))
      number = labels.setdefault(label, len(labels))
      shown.append([round(event.start, 7), round(event.end, 7), number, colour])
    tracks.append({"name": name, "events": shown})
  return {"end": _length(row), "tracks": tracks, "labels": list(labels), "colours": colours}


def _memory(live: LiveMemory) -> dict[str, Any]:
  """The picture of the live bytes over the schedule, and the buffers at the peak."""
  peak, count = live.peak_bytes or 1, len(live.sizes)
  bins = min(_BINS, count)
  heights = [
    max(live.sizes[count * number // bins : count * (number + 1) // bins]) for number in range(bins)
  ]
  points = " ".join(
    f"V{_HEIGHT * (1 - height / peak):.2f} H{number + 1}" for number, height in enumerate(heights)
  )
  large = [buffer for buffer in live.buffers if buffer.size >= _SMALL_BUFFER * peak]
  shown = large[:_MOST_BUFFERS]
  return {
    "width": bins,
    "height": _HEIGHT,
    "path": f"M0 {_HEIGHT} {points} V{_HEIGHT} Z",
    "about": (
      f"{peak / _GIB:.4g} GiB are live at the peak, at instruction {live.peak + 1} of {count} of "
      f"the schedule, {live.instructions[live.peak]}; the {len(shown)} largest of "
      f"{len(live.buffers)} buffers there:"
    ),
    "buffers": _table(buffers_table(shown)),
  }


def buffers_table(buffers: Iterable[Buffer], title: str = "") -> console.Table:
  """Buffers with their size, padding and place."""
  cells = [
    [
      f"{buffer.size / _GIB:.3g}",
      f"{buffer.padding:.3g}x" if buffer.padding >= _PADDED else "",
      buffer.kind,
      buffer.shape,
      buffer.operation,
      buffer.scope,
      buffer.where,
    ]
    for buffer in buffers
  ]
  return console.Table("GiB|padded|kind|shape|operation|scope|line".split("|"), cells, title)


def _kernels(row: TargetEstimate) -> console.Table:
  """All kernels of a program, the dearest first."""
  length = _length(row)
  cells = [
    [
      f"{_ms(kernel) / length:.2%}",
      "" if kernel.milliseconds is None else f"{kernel.milliseconds:.4g}",
      f"{kernel.calls:g}" if kernel.calls else "",
      kernel.bound,
      "" if kernel.stall is None else f"{kernel.stall:.0%}",
      f"{kernel.bytes_accessed / 1e6:.3g}" if kernel.bytes_accessed else "",
      kernel.operation,
      kernel.shape,
      kernel.scope,
      kernel.where,
      kernel.move.change if kernel.move else "",
      kernel.move.remedy if kernel.move else "",
      kernel.name,
      kernel.why and f"{'a bound' if kernel.is_bound else 'no time'}: {kernel.why}",
    ]
    for kernel in row.kernels
  ]
  head = "share|ms|calls|bound by|waits|MB|operation|shape|scope|line|layout|removed by|instruction"
  return console.Table([*head.split("|"), ""], cells)


def _table(table: console.Table) -> dict[str, Any]:
  """A table of the template, without empty columns."""
  columns = [column for column in range(len(table.head)) if any(row[column] for row in table.rows)]
  cell = lambda text: templates.Number(text) if _NUMBER.fullmatch(text) else text
  return {
    "title": table.title,
    "head": [table.head[column] for column in columns],
    "rows": [[cell(row[column]) for column in columns] for row in table.rows],
  }


def step_name(row: TargetEstimate, name: str = "") -> str:
  """The name of a program on a target."""
  return " ".join(filter(None, (name, tpu.short_name(row.target))))
