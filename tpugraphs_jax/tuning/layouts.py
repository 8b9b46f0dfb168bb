"""Layouts of a function in a file, and the function with the layouts of a file.

tuned.save("layouts.json")
fast = jax.jit(tpugraphs_jax.apply(step, "layouts.json"))
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any
import zlib

from jax.extend import core

from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import jaxprs, names, proto
from tpugraphs_jax.hlo.calls import Call, RewrittenFunction
from tpugraphs_jax.hlo.jit_options import is_jitted
from tpugraphs_jax.hlo.layout_options import Dims
from tpugraphs_jax.infra import files, trust
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning import choosing
from tpugraphs_jax.tuning.choosing import Choice, Group, Orders

_EXPECTED = "a file that Tuned.save wrote"
_MOST_BYTES = 2**28  # of a module
_CHANGE = trust.Record(
  nodes=[trust.COUNT],
  operation=str,
  lines=[str],
  before=[trust.COUNT],
  after=[[trust.COUNT]],
  picoseconds=[trust.COUNT],
)
_SCHEMA = trust.Record(
  name=str,
  operations=str,
  groups=[trust.Record(operation=str, detail=str, orders=[[trust.COUNT]])],
  program=trust.Record(
    summary=str, stage=str, module=str, changes=[_CHANGE], picoseconds=[[trust.COUNT]]
  ),
)
_OPTIONS = {"compiler_options": {...: (bool, int, float, str)}}  # older files have none


@dataclasses.dataclass(frozen=True)
class Change:
  """Equal operations with another order of dimensions than the compiler's own."""

  nodes: list[int]  # of the program's graph
  operation: str  # with types and shapes of output and operands
  lines: list[str]  # of the user's source, such as `model.py:12`
  before: Dims  # the compiler's own order of the output; empty where it is not known
  # Minor to major, of the output and of operands; empty where it is left to the compiler.
  after: Orders
  picoseconds: tuple[int, ...]  # estimated, before and after; empty where times were measured

  @property
  def orders(self) -> tuple[str, str]:
    """The layouts before and after, as text."""
    text = lambda order: "{" + ",".join(map(str, order)) + "}" if order else "?"
    before, output, *operands = map(text, (self.before, *self.after))
    return before, output + (f" <- {', '.join(operands)}" if any(self.after[1:]) else "")

  def cells(self, graph: hlo.HloGraph) -> list[str]:
    """A row of `TunedProgram.table`; the graph has the nodes."""
    before, after = self.orders
    # Fixes an output to the order that the compiler chose anyway. This can still change layouts
    # and fusions downstream.
    is_fixed = self.before and self.before == self.after[0]
    text = after.replace(before, f"{before} fixed", 1) if is_fixed else f"{before} -> {after}"
    op_names = [graph.origins[node].op_name for node in self.nodes]
    group = choosing.number_in(op_names[0]) if op_names else None
    scopes = dict.fromkeys(filter(None, map(names.scope, op_names)))
    return [
      "" if group is None else str(group),
      self.operation,
      _first_two(list(scopes)),
      _first_two(self.lines),
      text,
      from_to(*self.picoseconds) if self.picoseconds else "",
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class TunedProgram:
  """A program and the changes of its layouts, as a file keeps them.

  Attributes:
    graph: the program as the compiler saw it before it assigned layouts.
    changes: against the compiler's own choice.
    picoseconds: estimated times of configurable nodes, before and after; empty where times were
      measured.
    summary: a sentence about the search.
  """

  graph: hlo.HloGraph
  changes: list[Change]
  picoseconds: dict[int, tuple[int, int]]
  summary: str

  def table(self, more: Sequence[Sequence[str]] = ()) -> Table:
    """The changes, and more rows of the same columns below them."""
    head = ["group", "changed output of", "scope", "line", "order", "estimated µs"]
    rows = [change.cells(self.graph) for change in self.changes]
    return Table(head, [*rows, *more], self.summary)

  def __str__(self) -> str:
    return str(self.table())


def _first_two(texts: Sequence[str]) -> str:
  return ", ".join(texts[:2]) + ", ..." * (len(texts) > 2)


def from_to(before: int, after: int) -> str:
  """Two times in picoseconds, as text in microseconds."""
  return f"{before / 1e6:,.4g} -> {after / 1e6:,.4g}"


def save(
  path: Path, call: Call, choice: Choice, about: Mapping[str, Any], program: TunedProgram
) -> None:
  """Writes a choice of layouts for a function.

  The literals of the program are not written: neither `view` nor `apply` needs them.

  Args:
    path: of the file, a JSON object.
    call: the function and example arguments that the choice was made for.
    choice: an option for each of its groups.
    about: what else is known of the choice: `name` of the function, `compiler_options`, label,
      versions.
    program: to be shown.
  """
  module = proto.HloModuleProto()
  module.CopyFrom(program.graph.module)
  module.DiscardUnknownFields()
  for instruction in proto.instructions(module):
    instruction.ClearField("literal")
  record = {
    **about,
    "operations": _hash(call.trace.program),
    "groups": [
      {"operation": str(group), "detail": group.detail, "orders": orders}
      for group, orders in choice.items()
    ],
    "program": {
      "summary": program.summary,
      "stage": program.graph.stage,
      "module": base64.b64encode(zlib.compress(module.SerializeToString())).decode(),
      "changes": [dataclasses.asdict(change) for change in program.changes],
      "picoseconds": [[node, *times] for node, times in program.picoseconds.items()],
    },
  }
  files.write_json(path, record, indent=1)


def read(path: str | os.PathLike[str]) -> TunedProgram:
  """The program of a file that `Tuned.save` wrote.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it holds no layouts, or is damaged.
  """
  record = _record(path)
  with trust.reading(path, f"expected {_EXPECTED}"):
    saved = record["program"]
    packed = base64.b64decode(saved["module"], validate=True)
    unpacked = zlib.decompressobj().decompress(packed, _MOST_BYTES)
    graph = dataclasses.replace(hlo.featurize(unpacked), name=record["name"], stage=saved["stage"])
    changes = [Change(**change) for change in saved["changes"]]
    times = {node: (before, after) for node, before, after in saved["picoseconds"]}
    if not set(times).union(*(change.nodes for change in changes)) <= set(range(graph.num_nodes)):
      raise ValueError(f"it names nodes that its program of {graph.num_nodes} nodes does not have")
    program = TunedProgram(graph, changes, times, saved["summary"])
    program.table()  # finds whatever cannot be shown
  return program


def _record(path: str | os.PathLike[str]) -> dict[str, Any]:
  files.check_file(Path(path), _EXPECTED)
  with trust.json_of(Path(path), _SCHEMA, f"expected {_EXPECTED}") as record:
    trust.check(record, _OPTIONS, "it")
  return record


def apply(
  function: Callable[..., Any],
  path: str | os.PathLike[str],
  *,
  compiler_options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
  """The function with the layouts that `Tuned.save` wrote; its outputs are equal up to rounding.

  A function that is jitted stays so: with its donated and static arguments, shardings and state.
  Call another one under `jax.jit`. Arguments have the shapes that it was tuned for. The attribute
  `compiler_options` of the result has the options of the file, which `jax.jit` takes by this name;
  it is empty where none were chosen.

  Args:
    function: that was tuned.
    path: of the file.
    compiler_options: for a function that is jitted, the options of the file, once you have read
      them: an option can make the compiler write files.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file holds no layouts, or has compiler options for a function that is jitted.
      The function that is returned raises it for a program other than the tuned one.
  """
  record = _record(path)
  options = record.get("compiler_options", {})
  if options and compiler_options is None and is_jitted(function):
    raise ValueError(
      f"{path} was made with the compiler options {options}: read them, and pass "
      "compiler_options= of your choice"
    )
  made = f"{path} was made for {record['name']!r}"
  saved: dict[tuple[str, str], Orders] = {}
  for group in record["groups"]:
    saved[group["operation"], group["detail"]] = tuple(map(tuple, group["orders"]))

  def chosen(program: core.ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
    groups = dict.fromkeys(choosing.groups_of(program.jaxpr))
    _check(made, saved, groups)
    for group in groups:
      _check_orders(path, group, saved[str(group), group.detail])
    if _hash(program) != record["operations"]:
      raise ValueError(f"{made}, whose other operations have changed: tune it again")
    choice = {group: saved[str(group), group.detail] for group in groups}
    return choosing.evaluate(program, arrays, choice)

  applied: Any = RewrittenFunction(function, chosen, compiler_options or {})
  applied.compiler_options = options
  return applied


def _check(made: str, saved: Mapping[tuple[str, str], Any], groups: Iterable[Group]) -> None:
  """Raises ValueError where a program has other convolutions, dots or reshapes than a file."""
  given = {(str(group), group.detail) for group in groups}
  for word, differing in (("without", given - set(saved)), ("with", set(saved) - given)):
    if differing:
      operation, _ = min(differing)
      raise ValueError(f"{made} {word} {operation}: the program has changed, tune it again")


def _check_orders(path: str | os.PathLike[str], group: Group, orders: Orders) -> None:
  """Refuses (ValueError) orders that are not of the arrays of a group."""
  is_order = lambda order, shape: len({*order} & {*range(len(shape))}) == len(order)
  if len(orders) != len(group.shapes) or not all(map(is_order, orders, group.shapes)):
    raise ValueError(
      f"{path} has the orders {list(map(list, orders))} for {group}, expected an order of the "
      f"dimensions of each of its {len(group.shapes)} arrays: tune it again"
    )


def _hash(jaxpr: core.ClosedJaxpr) -> str:
  """SHA-256 of the primitives of a program and of the shapes and types that they get and give."""
  lines = jaxprs.operations(jaxpr, with_details=False)
  return hashlib.sha256("\n".join(lines).encode()).hexdigest()
