"""Profiles of XProf (`jax.profiler`): the times of operations on devices, and the HLO modules.

A profile is a file `.xplane.pb`, one for each host, or a folder that holds such files. The table
"HLO Op Stats" of XProf, saved as CSV or JSON, has the times alone.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import csv
import dataclasses
import io
import math
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

from tpugraphs_jax.hlo import proto, xplane_pb2
from tpugraphs_jax.infra import console, files, machine, trust

ENDING = ".xplane.pb"
_COST, _TABLE_COST = 12, 4  # bytes of memory that a byte of a profile and of a table may take
_MODULES, _OPERATIONS = "XLA Modules", "XLA Ops"  # lines of a TPU
_OPERATION = "hlo_op"  # the stat of an event of a CPU or GPU
_SPARSE = "SparseCore"
_EXPECTED = f"a folder of jax.profiler, a file *{ENDING}, or XProf's HLO Op Stats as .csv or .json"
_INSTRUCTION = re.compile(r"%?([^\s=]+)(?: = |$)")  # at the beginning of an operation's text
_PROGRAM = re.compile(r"\((\d+)\)$")  # the id at the end of a module's name
# Columns of XProf's table by their ids and labels, without signs and case.
_COLUMNS = {
  "program": ("programid", "hlomodule", "modulename", "program"),
  "operation": ("hloopname", "opname", "operation", "operationname"),
  "text": ("hloopexpression", "hlooptext"),
  "count": ("occurrences", "count"),
  "microseconds": (
    *("totalselftime", "totalselftimeus", "totalselftimeinus", "selftimeus"),
    *("totaltime", "totaltimeus", "totaltimeinus"),
  ),
}


class Times(NamedTuple):
  """How often something ran on a device, and for how long in all; of loops without their bodies."""

  calls: int = 0
  milliseconds: float = 0.0

  def plus(self, milliseconds: float, calls: int = 1) -> Times:
    """With further calls."""
    return Times(self.calls + calls, self.milliseconds + milliseconds)


@dataclasses.dataclass(frozen=True)
class Trace:
  """What a module took in a profile, as sums over all devices.

  Attributes:
    name: such as `jit_step(4)`.
    kind: of the devices, such as `TPU v6 Lite`; empty of a table.
    devices: how many ran it.
    runs: of the module on all devices; their number is 0 where the profile does not tell.
    operations: by the name of the HLO instruction.
  """

  name: str
  kind: str
  devices: int
  runs: Times
  operations: Mapping[str, Times]

  @property
  def milliseconds(self) -> float:
    """Of all operations."""
    return sum(times.milliseconds for times in self.operations.values())


@dataclasses.dataclass(frozen=True)
class Profile:
  """What a profile holds.

  Attributes:
    traces: the modules that ran, the dearest first.
    modules: serialized HLO by the name of the module, also of modules that did not run.
  """

  traces: tuple[Trace, ...]
  modules: Mapping[str, bytes]

  def names(self) -> str:
    """All modules with their times, for a message."""
    times = {trace.name: trace.milliseconds for trace in self.traces}
    times |= {name: 0.0 for name in self.modules if name not in times}
    return ", ".join(f"{name} {ms:.3g} ms" for name, ms in times.items())

  def module(self, name: str = "", *, where: str) -> tuple[str, bytes]:
    """The name and the bytes of an HLO module.

    Args:
      name: with or without its id in brackets; empty where there is one module.
      where: the profile, with which messages begin.

    Raises:
      ValueError: there is no such module, or there are several.
    """
    if not self.modules:
      raise ValueError(
        f"{where} is a profile without HLO modules: record it with jax.profiler, or with XProf and "
        "its HLO modules"
      )
    found = [key for key in self.modules if name in ("", key, _PROGRAM.sub("", key))]
    if len(found) != 1:
      matching = f", of which {len(found)} are {name!r}" if name else ""
      ran = [trace.name for trace in self.traces if trace.name in self.modules]
      raise ValueError(
        f"{where} is a profile of {len(self.modules)} modules ({self.names()}){matching}: name "
        f"one, such as '{where}:{next(iter(ran or self.modules))}'"
      )
    return found[0], self.modules[found[0]]


def paths(path: Path) -> list[Path]:
  """The profiles of a folder, those of its latest session, or the file itself."""
  if not path.is_dir():
    return [path]
  found = sorted(path.rglob(f"*{ENDING}"))
  latest = max((file.parent for file in found), default=None, key=lambda folder: folder.name)
  return [file for file in found if file.parent == latest]


def is_profile(path: Path) -> bool:
  """Whether a path is a file `.xplane.pb` or a folder that holds one."""
  return path.name.endswith(ENDING) or (path.is_dir() and bool(paths(path)))


def split(path: Path) -> tuple[Path, str]:
  """The path of a profile and the name of a module in it, of `vm.xplane.pb:jit_step`."""
  place, _, name = str(path).rpartition(":")
  return (Path(place), name) if place and is_profile(Path(place)) else (path, "")


def read(path: str | os.PathLike[str]) -> Profile:
  """The profile in a file or folder.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no profile, or damaged.
  """
  path = Path(path)
  if not is_profile(path):
    if path.is_dir():
      raise ValueError(f"{path} has no file *{ENDING}, expected {_EXPECTED}")
    return _read_table(path)
  spaces = []
  for file in paths(path):
    files.check_file(file, _EXPECTED)
    _check_room(file, _COST)
    spaces.append(proto.parse_profile(file.read_bytes(), where=str(file)))
  with trust.reading(path, "record the profile again"):
    return _profile(spaces)


def _check_room(path: Path, cost: int) -> None:
  """Refuses (ValueError) a file that may take more memory than there is, `cost` times its size."""
  if cost * path.stat().st_size > (available := machine.available()):
    raise ValueError(
      f"{path} has {console.size(path.stat().st_size)}, and reading takes up to {cost} times as "
      f"much memory: {console.size(available)} are available"
    )


def _profile(spaces: Iterable[xplane_pb2.XSpace]) -> Profile:
  modules: dict[str, bytes] = {}
  of_name: dict[str, list[Trace]] = {}
  planes = [_Plane(plane) for space in spaces for plane in space.planes]
  for plane in planes:
    modules |= plane.modules
  by_program = {match[1]: name for name in modules if (match := _PROGRAM.search(name))}
  for plane in planes:
    for trace in plane.traces(by_program):
      of_name.setdefault(trace.name, []).append(trace)
  traces = [_sum(same) for same in of_name.values()]
  return Profile(tuple(sorted(traces, key=lambda trace: -trace.milliseconds)), modules)


def _sum(traces: Sequence[Trace]) -> Trace:
  """One module on several devices."""
  runs, operations = Times(), collections.defaultdict[str, Times](Times)
  for trace in traces:
    runs = runs.plus(trace.runs.milliseconds, trace.runs.calls)
    for name, times in trace.operations.items():
      operations[name] = operations[name].plus(times.milliseconds, times.calls)
  first = traces[0]
  return dataclasses.replace(first, devices=len(traces), runs=runs, operations=dict(operations))


class _Event(NamedTuple):
  """An event in picoseconds; `about` holds the stats of the event and of its kind."""

  start: int
  end: int
  name: str
  about: Mapping[str, Any]


class _Plane:
  """A plane of a profile: a device, the host, or the metadata with HLO modules."""

  def __init__(self, plane: xplane_pb2.XPlane):
    self._plane = plane
    self._stats = {number: stat.name for number, stat in plane.stat_metadata.items()}
    self._kinds = {number: self._kind(kind) for number, kind in plane.event_metadata.items()}

  def _kind(self, kind: xplane_pb2.XEventMetadata) -> tuple[str, dict[str, Any]]:
    match = _INSTRUCTION.match(kind.name)
    name = kind.display_name or (match[1] if match else kind.name)
    return console.one_line(name) if name else "", self._values(kind.stats)

  def _values(self, stats: Iterable[xplane_pb2.XStat]) -> dict[str, Any]:
    values = {}
    for stat in stats:
      field = stat.WhichOneof("value")
      value = getattr(stat, field) if field else None
      values[self._stats.get(stat.metadata_id, "")] = (
        self._stats.get(value, "") if field == "ref_value" else value
      )
    return values

  @property
  def modules(self) -> dict[str, bytes]:
    """The HLO modules in the metadata of a profile."""
    found = {name: about.get("Hlo Proto") for name, about in self._kinds.values()}
    return {name: data for name, data in found.items() if isinstance(data, bytes)}

  def _events(self, line: xplane_pb2.XLine, *, with_stats: bool = False) -> list[_Event]:
    """The events of a line by their starts, the longer one first.

    Args:
      line: of the plane.
      with_stats: whether `about` has the stats of each event too, not of its kind alone.

    Raises:
      ValueError: an event ends before it starts.
    """
    events = []
    for event in line.events:
      if event.duration_ps < 0:
        raise ValueError(f"an event lasts {event.duration_ps} ps")
      name, about = self._kinds.get(event.metadata_id, ("", {}))
      about = {**about, **self._values(event.stats)} if with_stats else about
      start = 1000 * line.timestamp_ns + event.offset_ps
      events.append(_Event(start, start + event.duration_ps, name, about))
    return sorted(events, key=lambda event: (event.start, -event.end))

  def traces(self, by_program: Mapping[str, str]) -> Iterator[Trace]:
    """The modules that this plane ran.

    Args:
      by_program: names of modules by the ids of their programs.
    """
    lines = {line.name: line for line in self._plane.lines}
    if _SPARSE in self._plane.name:  # it works for the device of another plane
      return
    if _OPERATIONS in lines:
      runs = self._events(lines[_MODULES]) if _MODULES in lines else []
      yield from self._of_device(runs, self._events(lines[_OPERATIONS]), by_program)
      return
    operations = []
    for line in self._plane.lines if _OPERATION in self._stats.values() else ():
      events = self._events(line, with_stats=True)
      operations += [event for event in events if _OPERATION in event.about]
    yield from self._of_host(operations, by_program)

  def _of_device(
    self, runs: Sequence[_Event], operations: Sequence[_Event], by_program: Mapping[str, str]
  ) -> Iterator[Trace]:
    """Modules of a TPU, whose line of operations has events inside of others."""
    kind = str(self._values(self._plane.stats).get("device_type_string", self._plane.name))
    modules, starts = collections.defaultdict[str, Times](Times), [run.start for run in runs]
    for run in runs:
      modules[run.name] = modules[run.name].plus((run.end - run.start) / 1e9)
    found: dict[str, dict[str, Times]] = {name: {} for name in modules}
    for event, own in zip(operations, _self_times(operations)):
      at = bisect.bisect_right(starts, event.start) - 1
      name = runs[at].name if at >= 0 and event.start <= runs[at].end else ""
      name = by_program.get(str(event.about.get("program_id", "")), name)
      of_module = found.setdefault(name, {})
      of_module[event.name] = of_module.get(event.name, Times()).plus(own / 1e9)
    for name, times in found.items():
      if times:
        yield Trace(name or "no module", console.one_line(kind), 1, modules[name], times)

  def _of_host(
    self, operations: Iterable[_Event], by_program: Mapping[str, str]
  ) -> Iterator[Trace]:
    """Modules of a CPU or GPU, whose events name module and operation."""
    found: dict[str, dict[str, Times]] = {}
    runs: dict[str, set] = {}
    for event in operations:
      name = f"{event.about.get('hlo_module', '')}({event.about.get('program_id', '')})"
      name = by_program.get(str(event.about.get("program_id", "")), console.one_line(name))
      of_module = found.setdefault(name, {})
      operation = console.one_line(event.about[_OPERATION])
      of_module[operation] = of_module.get(operation, Times()).plus((event.end - event.start) / 1e9)
      runs.setdefault(name, set()).add(event.about.get("run_id"))
    for name, times in found.items():
      total = sum(part.milliseconds for part in times.values())
      yield Trace(name, console.one_line(self._plane.name), 1, Times(len(runs[name]), total), times)


def _self_times(events: Sequence[_Event]) -> list[int]:
  """The picoseconds of events without those of the events inside them."""
  own = [event.end - event.start for event in events]
  around: list[int] = []  # events that have begun and not ended
  for place, event in enumerate(events):
    while around and events[around[-1]].end <= event.start:
      around.pop()
    if around:
      own[around[-1]] -= min(event.end, events[around[-1]].end) - event.start
    around.append(place)
  return [max(0, time) for time in own]


def _read_table(path: Path) -> Profile:
  """The times in XProf's table of operations."""
  files.check_file(path, _EXPECTED)
  _check_room(path, _TABLE_COST)
  with trust.reading(path, f"expected {_EXPECTED}"):
    text = path.read_text(encoding="utf-8-sig")
    is_json = text.lstrip()[:1] in ("{", "[")
    found: dict[str, dict[str, Times]] = {}
    for row in _json_rows(trust.parse(text)) if is_json else _csv_rows(text):
      name, operation, times = _table_row(row)
      of_module = found.setdefault(name, {})
      of_module[operation] = of_module.get(operation, Times()).plus(times.milliseconds, times.calls)
    if not found:
      raise ValueError("it has no operations with times")
  traces = [Trace(name, "", 1, Times(), operations) for name, operations in found.items()]
  return Profile(tuple(sorted(traces, key=lambda trace: -trace.milliseconds)), {})


def _csv_rows(text: str) -> Iterator[dict[str, Any]]:
  for row in csv.DictReader(io.StringIO(text)):
    yield {_plain(key): value for key, value in row.items() if isinstance(key, str)}


def _json_rows(value: Any) -> Iterator[dict[str, Any]]:
  """Rows of a list of records, of one table with `cols` and `rows`, or of a list of such tables."""
  if isinstance(value, dict):
    trust.check(value, trust.Record(cols=[trust.Record(id=str)], rows=[{"c": [object]}]), "table")
    ids = [_plain(column["id"]) for column in value["cols"]]
    for row in value["rows"]:
      cells = [cell.get("v") if isinstance(cell, dict) else cell for cell in row.get("c", ())]
      yield dict(zip(ids, cells))
  elif isinstance(value, list):
    for part in value:
      if isinstance(part, dict) and "cols" not in part:
        yield {_plain(key): cell for key, cell in part.items()}
      else:
        yield from _json_rows(part)


def _plain(name: str) -> str:
  return re.sub("[^a-z]", "", name.lower())


def _table_row(row: Mapping[str, Any]) -> tuple[str, str, Times]:
  """The module, the operation and the times of a row of XProf's table.

  Raises:
    ValueError: a column is missing, or a number is none.
  """
  cells = {
    name: next((row[column] for column in columns if row.get(column) not in (None, "")), None)
    for name, columns in _COLUMNS.items()
  }
  match = _INSTRUCTION.match(str(cells["operation"] or cells["text"] or ""))
  if match is None or cells["microseconds"] is None:
    raise ValueError(f"a row has the columns {', '.join(row)[:200]}, expected HLO op name and time")
  number = lambda value: float(str(value).replace(",", ""))
  microseconds, count = number(cells["microseconds"]), number(cells["count"] or 1)
  if not (0 <= microseconds < math.inf and 0 <= count < 1e15):
    raise ValueError(f"{match[1][:80]} has {count} runs of {microseconds} us")
  program = console.one_line(cells["program"]) if cells["program"] else "the table"
  return program, console.one_line(match[1]), Times(int(count), microseconds / 1000)
