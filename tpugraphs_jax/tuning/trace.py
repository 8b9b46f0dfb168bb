"""The timeline of an estimate as a trace in Chrome's JSON, for Perfetto and XProf's trace viewer.

Tracks have the names that they have in XProf. On the track of operations the calls of kernels, the
waits of the program and what is between them follow each other without gaps: their times add up to
that of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import json
import os
from typing import Any, NamedTuple

from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.infra import files
from tpugraphs_jax.tuning.costs import BETWEEN, TargetEstimate
from tpugraphs_jax.tuning.schedule import mesh, program
from tpugraphs_jax.tuning.schedule.kernel import MEMORY

MODULES, OPERATIONS, COPIES = "XLA Modules", "XLA Ops", "Async XLA Ops"
LINKS = "ICI"
_MOST = 20_000  # events of a track: some megabytes
_MICRO = 1000  # microseconds of a millisecond


class TrackEvent(NamedTuple):
  """An event of a track, in milliseconds from the start of the program."""

  start: float
  end: float
  name: str
  bound: str = ""  # as of `KernelCost`, of what is no call
  size: int = 0  # bytes of a copy


def tracks(row: TargetEstimate, *, most: int = _MOST) -> dict[str, list[TrackEvent]]:
  """The events of a device by the names of their tracks.

  Args:
    row: with a time.
    most: events of a track. The shortest ones are joined with their neighbours.
  """
  of_unit = lambda *units: [event for event in row.events if event.unit in units]
  end = max([row.milliseconds or 0.0, *(event.end for event in row.events)])
  called = of_unit(program.CALL, program.WAIT)
  found = {OPERATIONS: list(_without_gaps([*called, *_bounded(row, called)], end))}
  for track, unit, bound in ((COPIES, program.DMA, MEMORY), (LINKS, program.LINK, mesh.LINKS)):
    found[track] = [
      TrackEvent(event.start, event.end, event.name, bound, event.size) for event in of_unit(unit)
    ]
  return {track: _joined(events, most) for track, events in found.items() if events}


def _bounded(row: TargetEstimate, called: Sequence[program.Event]) -> Iterator[program.Event]:
  """The kernels of which only a lower bound is known, after all others."""
  now, names = max((event.end for event in called), default=0.0), {event.name for event in called}
  for kernel in row.kernels:
    if kernel.is_bound and kernel.milliseconds and kernel.name not in names:
      yield program.Event(now, now + kernel.milliseconds, program.CALL, kernel.name)
      now += kernel.milliseconds


def _without_gaps(events: Sequence[program.Event], end: float) -> Iterator[TrackEvent]:
  """Calls and waits, with events for what is between them, up to the end of the program."""
  now = 0.0
  for event in events:
    if event.start > now:
      yield TrackEvent(now, event.start, BETWEEN)
    start = max(now, event.start)
    if event.end > start:
      name, bound = event.name, ""
      if event.unit == program.WAIT:
        bound = mesh.LINKS if name else MEMORY
        name = f"wait for {name or 'a copy'}"
      yield TrackEvent(start, event.end, name, bound)
      now = event.end
  if end > now:
    yield TrackEvent(now, end, BETWEEN)


def _joined(events: list[TrackEvent], most: int) -> list[TrackEvent]:
  """At most about `most` events: neighbours among the shortest ones are one event."""
  if len(events) <= most:
    return events
  lengths = sorted(event.end - event.start for event in events)
  shortest = lengths[len(events) - most // 2]
  joined: list[TrackEvent] = []
  counts: list[int] = []  # how many events each stands for; 0: it is long
  for event in events:
    is_short = event.end - event.start < shortest
    if is_short and counts and counts[-1]:
      counts[-1] += 1
      joined[-1] = joined[-1]._replace(
        end=max(joined[-1].end, event.end), name=f"{counts[-1]} short events"
      )
    else:
      counts.append(int(is_short))
      joined.append(event)
  return joined


def save(steps: Sequence[tuple[str, TargetEstimate]], path: str | os.PathLike[str]) -> None:
  """Writes the timelines of programs, each as a device.

  Raises:
    ValueError: no program has a time.
  """
  timed = [(name, row) for name, row in steps if row.milliseconds is not None and row.events]
  if not timed:
    raise ValueError("there is no timeline: no program has a time from its schedules")
  events = [
    event for number, (name, row) in enumerate(timed) for event in _events(name, row, number)
  ]
  with files.replacing(path, encoding="utf-8") as file:
    json.dump({"displayTimeUnit": "ns", "traceEvents": events}, file, separators=(",", ":"))


def _events(name: str, row: TargetEstimate, number: int) -> Iterator[dict[str, Any]]:
  """The events of a device in Chrome's form; times are in microseconds."""
  kernels = {kernel.name: kernel for kernel in row.kernels}
  process = {"pid": number + 1}
  device = f"/device:TPU:{number} {name} (estimate)"
  yield {"ph": "M", "name": "process_name", "args": {"name": device}} | process
  found = tracks(row)
  end = found[OPERATIONS][-1].end
  whole = TrackEvent(0.0, end, name)
  for thread, (track, events) in enumerate({MODULES: [whole], **found}.items(), 1):
    place = process | {"tid": thread}
    yield {"ph": "M", "name": "thread_name", "args": {"name": track}} | place
    for event in events:
      about: dict[str, Any] = {"bytes": event.size} if event.size else {}
      if (kernel := kernels.get(event.name)) is not None:
        about = {
          "operation": kernel.operation,
          "scope": kernel.scope,
          "line": kernel.where,
          "shape": kernel.shape,
          "bound by": kernel.bound,
        }
      yield (
        {
          "ph": "X",
          "name": event.name,
          "ts": round(_MICRO * event.start, 4),
          "dur": round(_MICRO * (event.end - event.start), 4),
        }
        | place
        | ({"args": about} if about else {})
      )
  if row.target:
    yield {
      "ph": "M",
      "name": "process_labels",
      "args": {"labels": tpu.short_name(row.target)},
    } | process
