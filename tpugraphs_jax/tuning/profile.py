"""Measured times of a profile beside estimates of the same operations.

    python -m tpugraphs_jax.estimate --profile DIR
    python -m tpugraphs_jax.estimate FILE.py:NAME --profile DIR

With a source the function is compiled and its kernels have the times of their schedules. Without
one the estimates come from the HLO modules in the profile: Pallas kernels are compiled alone, and
other kernels have the cycles that the compiler estimated when it made the module, which is less
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import os
import re

import jax

from tpugraphs_jax import columns
from tpugraphs_jax.hlo import calls, module_graph, names, profiles, proto, tpu, tpu_kernels
from tpugraphs_jax.infra import console, trust
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning import comparison
from tpugraphs_jax.tuning.costs import KernelCost, TargetEstimate
from tpugraphs_jax.tuning.page import Page
from tpugraphs_jax.tuning.schedule import chips

_LISTED = 30
_SHOWN_SHARE = 0.01  # of the time of a profile, from which a module is compared
_PALLAS = "tpu_custom_call"
_KIND = re.compile(r"tpu\s*v?(\d)\s*(lite|e|p|x)?", re.IGNORECASE)
_GENERATIONS = {"2": "v2", "3": "v3", "4": "v4", "6": "v6e", "7": "7x"}
# Beginnings of the names of types in XLA and in jax.
_WORDS = {
  "pred": "bool",
  "f8": "float8_",
  "f4": "float4_",
  "bf": "bfloat",
  "f": "float",
  "s": "int",
  "u": "uint",
  "c": "complex",
}
_DTYPES = {kind.number: kind.name for kind in columns.ELEMENT_TYPES + columns.LATER_TYPES}

Estimate = Callable[[calls.Call, str], TargetEstimate]


@dataclasses.dataclass(frozen=True)
class Operation:
  """An operation of a module, in one run on one device.

  Attributes:
    kernel: its names and place; its time is the estimate.
    calls: measured calls in a run; None where it was not measured.
    measured, estimated: milliseconds of all calls; None on the side that has none.
  """

  kernel: KernelCost
  calls: float | None
  measured: float | None
  estimated: float | None


@dataclasses.dataclass(frozen=True, repr=False)
class Measured(Page):
  """A module of a profile beside its estimate, as text and as tables of a notebook.

  Attributes:
    name: of the module.
    target: such as `tpu:v6e`.
    kind: of the device that was measured.
    runs: measured runs on all devices; 0 where the profile does not tell.
    devices: how many ran it.
    measured_ms: mean of a run; of an unknown number of runs the sum of all operations.
    estimated_ms: of a run; None without a source, or without a time.
    operations: the longest first.
    has_source: whether the estimates come from schedules of the whole program.
    why: why the program has no estimate.
  """

  name: str
  target: str
  kind: str
  runs: int
  devices: int
  measured_ms: float
  estimated_ms: float | None
  operations: tuple[Operation, ...]
  has_source: bool = True
  why: str = ""

  def _sum(self, of: Callable[[Operation], float | None], others: bool | None = None) -> float:
    """Milliseconds of operations that have a time on both sides, or on one side alone."""
    total = 0.0
    for operation in self.operations:
      is_alone = None in (operation.measured, operation.estimated)
      if others is None or is_alone == others:
        total += of(operation) or 0.0
    return total

  def _tables(self) -> Iterator[Table]:
    listed = self.operations[:_LISTED]
    where = f" on {self.devices} x {self.kind}" if self.kind else ""
    per = f"mean of {self.runs} runs" if self.runs else "all runs"
    title = (
      f"{self.name}: measured{where} ({per}) beside estimates for {tpu.short_name(self.target)}; "
      f"the {len(listed)} longest of {len(self.operations)} operations"
    )
    head = "operation|calls|measured, ms|estimated, ms|estimated / measured|kernel|shape|scope|line"
    head += "|no estimate because"
    yield Table(head.split("|"), [_cells(operation) for operation in listed], title)
    yield Table(["", "measured, ms", "estimated, ms", "estimated / measured"], self._sums())

  def _title(self) -> str:
    return f"{self.name}: measured and estimated"

  def _kind(self) -> str:
    return "measured, beside ESTIMATES"

  def _verdict(self) -> Iterator[str]:
    for name, *cells in self._sums():
      words = ("measured {} ms", "estimated {} ms", "a ratio of {}")
      told = [word.format(cell) for word, cell in zip(words, cells) if cell]
      yield f"{name}: {', '.join(told)}"

  def _sums(self) -> list[list[str]]:
    measured = lambda operation: operation.measured
    estimated = lambda operation: operation.estimated
    both = self._sum(measured, False), self._sum(estimated, False)
    rows = [_row("operations that both have", *both)]
    rows.append(_row("only in the profile", self._sum(measured, True), None))
    rows.append(_row("only in the estimate", None, self._sum(estimated, True)))
    rows.append(_row("the whole module", self.measured_ms, self.estimated_ms))
    return [row for row in rows if any(row[1:])]

  def _notes(self) -> Iterator[str]:
    if not self.has_source:
      yield (
        "estimates of Pallas kernels are from their schedules, others are the cycles in the "
        "profile's HLO at the clock of the device: name the program, FILE.py:NAME, for the "
        "schedules of all kernels"
      )
    if self.why:
      yield f"{tpu.short_name(self.target)}: the program has no estimate, because {self.why}"


def _row(name: str, measured: float | None, estimated: float | None) -> list[str]:
  number = lambda value: f"{value:.4g}" if value else ""
  ratio = f"{estimated / measured:.2f}" if measured and estimated else ""
  return [name, number(measured), number(estimated), ratio]


def _cells(operation: Operation) -> list[str]:
  kernel = operation.kernel
  _, measured, estimated, ratio = _row("", operation.measured, operation.estimated)
  count = f"{operation.calls:.4g}" if operation.calls else ""
  place = [kernel.operation, kernel.shape, kernel.scope, kernel.where]
  return [kernel.name, count, measured, estimated, ratio, *place, kernel.why]


def target_of(kind: str) -> str:
  """The target of a kind of device, such as `TPU v6 Lite`; empty of others."""
  match = _KIND.search(kind)
  if match is None:
    return ""
  number, suffix = match[1], (match[2] or "").lower()
  if number == "5":
    return "tpu:v5e" if suffix in ("lite", "e") else "tpu:v5p"
  return f"tpu:{_GENERATIONS[number]}" if number in _GENERATIONS else ""


def compare(
  path: str | os.PathLike[str],
  estimate: Estimate,
  *,
  call: calls.Call | None = None,
  target: str = "",
) -> list[Measured]:
  """The modules of a profile beside their estimates, the dearest first.

  Args:
    path: as of `profiles.read`.
    estimate: returns what a call costs on a target.
    call: of the function of one module, that with its name, else the dearest one.
    target: such as `v6e`; empty: that of the devices of the profile.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no profile, ran on no TPU, or has no HLO modules where there is no call.
  """
  with console.working(f"reading {path}"):
    profile = profiles.read(path)
  found, rows = [], dict[tuple, TargetEstimate]()
  for trace in _chosen(profile, call, str(path)):
    full = tpu.full_name(target or target_of(trace.kind) or _no_target(trace, path))
    data = profile.modules.get(trace.name)
    module = proto.parse_module(data, where=f"{path}: {trace.name}") if data else None
    if call is None and module is None:
      raise ValueError(
        f"{path} has times of {trace.name} and no HLO modules: name the program too, FILE.py:NAME"
      )
    with trust.reading(path, "record the profile again"):
      measured = _measured(trace, module)
      alone = [] if module is None or call else list(_pallas_calls(module, measured))
      by_cycles = [] if module is None or call else list(_by_cycles(module, measured, full))
    if call is not None:
      row = estimate(call, full)
      kernels: Sequence[KernelCost] = row.kernels
      time, why = row.milliseconds, row.why
    else:
      time, why = None, ""
      kernels = by_cycles
      for kernel, key, one in alone:
        if key not in rows:  # layers have equal kernels
          rows[key] = estimate(one, full)
        kernels = [*kernels, _alone(kernel, rows[key])]
    operations = _matched(measured, kernels)
    found.append(
      Measured(
        trace.name,
        full,
        trace.kind,
        trace.runs.calls,
        trace.devices,
        (trace.runs.milliseconds or trace.milliseconds) / max(trace.runs.calls, 1),
        time,
        operations,
        call is not None,
        why,
      )
    )
  return found


def _no_target(trace: profiles.Trace, path: str | os.PathLike[str]) -> str:
  devices = f"ran on {trace.kind}" if trace.kind else "do not say on which device they ran"
  raise ValueError(
    f"{path}: the operations {devices}, expected a TPU: name the generation, --targets v6e; "
    "featurize reads the HLO modules"
  )


def _chosen(profile: profiles.Profile, call: calls.Call | None, where: str) -> list[profiles.Trace]:
  """The modules to compare: that of the call, else those with a share of the time."""
  if not profile.traces:
    raise ValueError(f"{where} has no operation of a device: profile a step that runs on a TPU")
  if call is not None:
    is_its = lambda trace: re.sub(r"\(\d+\)$", "", trace.name) == f"jit_{call.__name__}"
    return list(filter(is_its, profile.traces))[:1] or [profile.traces[0]]
  least = _SHOWN_SHARE * sum(trace.milliseconds for trace in profile.traces)
  return [trace for trace in profile.traces if trace.milliseconds >= least]


def _measured(trace: profiles.Trace, module: proto.HloModuleProto | None) -> list[KernelCost]:
  """The operations of a module with their times in one run."""
  runs = max(trace.runs.calls, 1)
  nodes = {node.name: node for node in proto.instructions(module)} if module else {}
  kernels = []
  for name, times in trace.operations.items():
    kernel = KernelCost(name)
    if name in nodes and module is not None:
      kernel = _described(nodes[name], module)
    time = times.milliseconds / runs
    kernels.append(dataclasses.replace(kernel, calls=times.calls / runs, milliseconds=time))
  return kernels


def _described(node: proto.HloInstructionProto, module: proto.HloModuleProto) -> KernelCost:
  origin = module_graph.origin(node, module)
  operation = names.operation(origin.op_name) or node.opcode
  return KernelCost(
    console.one_line(node.name),
    console.one_line(operation),
    scope=console.printable(names.scope(origin.op_name)),
    where=console.printable(origin.where),
    shape=names.shape(node.shape),
  )


def _by_cycles(
  module: proto.HloModuleProto, measured: Sequence[KernelCost], target: str
) -> Iterator[KernelCost]:
  """The kernels of a module with the cycles that the compiler estimated, at the device's clock.

  A kernel that was measured counts as often as it ran, another one as often as its loops say.
  """
  clock, counts = chips.chips()[target].clock, {kernel.name: kernel.calls for kernel in measured}
  nodes = {node.name: node for node in proto.instructions(module)}
  for kernel in tpu_kernels.estimated_cycles(module).by_kernel:
    tiles = tpu_kernels.window(nodes[kernel.name])
    if tiles and tiles.estimated_cycles and kernel.cycles:
      calls_of = counts.get(kernel.name) or kernel.cycles / tiles.estimated_cycles
      ms = 1e3 * calls_of * tiles.estimated_cycles / clock
      described = _described(nodes[kernel.name], module)
      yield dataclasses.replace(described, calls=calls_of, milliseconds=ms)


def _pallas_calls(
  module: proto.HloModuleProto, measured: Sequence[KernelCost]
) -> Iterator[tuple[KernelCost, tuple, calls.Call]]:
  """The Pallas kernels that were measured, what equal ones have in common, and a call of each."""
  counts = {kernel.name: kernel.calls for kernel in measured}
  nodes = {node.id: node for node in proto.instructions(module)}
  for node in nodes.values():
    if node.custom_call_target == _PALLAS and counts.get(node.name):
      operands = [nodes[id].shape for id in node.operand_ids]
      key = node.backend_config, *(proto.shape_text(shape) for shape in (node.shape, *operands))
      kernel = dataclasses.replace(_described(node, module), calls=counts[node.name])
      yield kernel, key, _pallas_call(node, operands)


def _alone(kernel: KernelCost, row: TargetEstimate) -> KernelCost:
  """A kernel with the time that its call alone has."""
  if row.milliseconds is None:
    return dataclasses.replace(kernel, why=row.why)
  one = sum(part.milliseconds or 0.0 for part in row.kernels if part.is_custom)
  return dataclasses.replace(kernel, milliseconds=(kernel.calls or 0.0) * one)


def _pallas_call(
  node: proto.HloInstructionProto, operands: Sequence[proto.ShapeProto]
) -> calls.Call:
  """A call of the kernel of an instruction, alone."""
  results = [_shape(array) for array in proto.arrays(node.shape)]
  config = node.backend_config.decode("utf-8", "replace")

  def kernel(*arrays: jax.Array) -> Sequence[jax.Array] | jax.Array:
    function = jax.ffi.ffi_call(
      _PALLAS,
      results if node.shape.tuple_shapes else results[0],
      custom_call_api_version=1,
      legacy_backend_config=config,
    )
    return function(*arrays)

  return calls.Call(kernel, tuple(map(_shape, operands)), {})


def _shape(array: proto.ShapeProto) -> jax.ShapeDtypeStruct:
  """A shape of XLA as jax has it.

  Raises:
    ValueError: jax has no such type.
  """
  name = _DTYPES.get(array.element_type, "?")
  short = next((short for short in _WORDS if name.startswith(short)), "")
  long = _WORDS.get(short, "") + name.removeprefix(short)
  try:
    return jax.ShapeDtypeStruct(tuple(array.dimensions), jax.numpy.dtype(long))
  except TypeError:
    raise ValueError(f"jax has no type {name}") from None


def _matched(
  measured: Sequence[KernelCost], estimated: Sequence[KernelCost]
) -> tuple[Operation, ...]:
  """Operations of both sides: equal names, then equal places as in `comparison`."""
  by_name = {kernel.name: kernel for kernel in estimated}
  operations = []
  for kernel in measured:
    if (other := by_name.pop(kernel.name, None)) is not None:
      operations.append(Operation(other, kernel.calls, kernel.milliseconds, other.milliseconds))
  named = {operation.kernel.name for operation in operations}
  rest = [kernel for kernel in measured if kernel.name not in named]
  counts = {kernel.name: kernel.calls for kernel in measured}
  for change in comparison.changes_of(rest, list(by_name.values())):
    operations.append(
      Operation(change.kernel, counts.get(change.kernel.name), change.before, change.after)
    )
  longest = lambda operation: -max(operation.measured or 0.0, operation.estimated or 0.0)
  return tuple(sorted(operations, key=longest))
