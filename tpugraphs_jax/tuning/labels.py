"""Labels of choices: the estimated time on a TPU, a measured time, or an estimate of bytes.

A choice is a version of a program, with an option for each group of its operations (`choosing`).
Its record is what a compiler or a device says of it. Its label is a positive integer made of the
record, by which choices are compared. A `Labeller` finds both; `create` makes the one of a name.

| labeller | record | label |
|---|---|---|
| `TpuEstimate` | `TimeRecord`: the times of the program and of its kernels | picoseconds |
| `BytesEstimate` | `BytesRecord`: bytes | bytes |
| `Measured` | `measure.Rounds`: the time of a call in each round | nanoseconds |

An estimate is computed and is no run time. One version of a compiler and of the simulator always
gives the same estimate; measured times vary.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
from typing import Any, ClassVar, final, Generic, TypedDict, TypeVar

import jax

from tpugraphs_jax.hlo import jaxprs, tpu
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.infra import trust
from tpugraphs_jax.tuning import choosing, costs, measure
from tpugraphs_jax.tuning.compiler import Compiler, Ended
from tpugraphs_jax.tuning.measure import CompilerOptions, Functions
from tpugraphs_jax.tuning.schedule import chips

_PICOSECONDS_PER_MILLISECOND = 1e9
_NANOSECONDS_PER_SECOND = 1e9
# What jax and XLA raise for a function that they cannot compile.
_REFUSALS = (jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError)


@final
class KernelRecord(TypedDict):
  """The time of a kernel."""

  picoseconds: int  # of all calls
  group: int | None  # of the choice; None for a kernel of no group
  nodes: list[int]  # of the problem's graph


@final
class TimeRecord(TypedDict):
  """The record of `TpuEstimate`."""

  milliseconds: float  # of the program
  kernels: list[KernelRecord]  # those that have a time, and not only a bound


@final
class BytesRecord(TypedDict):
  """The record of `BytesEstimate`."""

  bytes_accessed: int


LabelRecord = TimeRecord | BytesRecord | measure.Rounds


def kernels(record: LabelRecord) -> list[KernelRecord]:
  """The kernels of a choice; none where its label has no kernels."""
  return record["kernels"] if "kernels" in record else []


def group_of(kernel: costs.KernelCost) -> int | None:
  """The number of the group that a kernel comes from; None where it comes from none.

  The first operation that names a group decides. `costs.KernelCost` orders them: the kernel's own,
  then fused convolutions and dots, then other fused instructions.

  Args:
    kernel: of a function that `choosing.apply` returned.
  """
  numbers = (choosing.number_in(operation.name) for operation in kernel.operations)
  return next((number for number in numbers if number is not None), None)


def to_picoseconds(milliseconds: float) -> int:
  """Milliseconds as a whole number of picoseconds."""
  return round(_PICOSECONDS_PER_MILLISECOND * milliseconds)


Record = TypeVar("Record", TimeRecord, BytesRecord, measure.Rounds)
# The nodes of the problem's graph that operations of a compiled program come from.
NodesOf = Callable[[Sequence[costs.Operation]], list[int]]


class Labeller(abc.ABC, Generic[Record]):
  """Labels the choices of a program.

  Attributes:
    name: the value of `--label`.
    schema: of records in a file, as of `trust.check`.
    unit: of labels, in words.
    min_gain: the least relative gain that counts as one.
    target: TPU target, such as `tpu:v3`; None for the device at hand.
    made_together: whether all labels of a search are made at once, because measured times compare
      only within one run of interleaved rounds.
  """

  name: ClassVar[str]
  schema: ClassVar[trust.Record]
  unit: ClassVar[str]
  min_gain: ClassVar[float]
  target: str | None
  made_together: ClassVar[bool] = False

  @property
  @abc.abstractmethod
  def noun(self) -> str:
    """The name of the label in messages, such as `measured time`."""

  @property
  @abc.abstractmethod
  def caveat(self) -> str:
    """A sentence about how well labels agree with run times."""

  @abc.abstractmethod
  def records(
    self, functions: Functions, args: tuple, nodes_of: NodesOf
  ) -> Iterator[tuple[int, Record | Exception]]:
    """The record of each function in turn, or the error with which it failed.

    Args:
      functions: that compute the same, with their numbers and compiler options.
      args: their arguments, arrays or `jax.ShapeDtypeStruct`.
      nodes_of: finds the nodes of a kernel.
    """

  @abc.abstractmethod
  def value(self, record: Record) -> int:
    """The label: a positive integer, by which others can be divided.

    Raises:
      ValueError: the record is of a form that the labeller does not know.
    """

  def scaled(self, record: Record, factor: float) -> Record:
    """The record as if the machine had been this much slower, where it depends on that."""
    del factor
    return record

  def open(self) -> contextlib.AbstractContextManager[Labeller[Record]]:
    """Starts what a search needs, until the context ends."""
    return contextlib.nullcontext(self)

  def versions(self) -> dict[str, str]:
    """The target or device and the versions on which labels depend."""
    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}

  def compile(
    self, function: Callable[..., Any], args: tuple, compiler_options: CompilerOptions
  ) -> Any:
    """The function as the label's compiler compiles it; `tune` tries compiler options so, too."""
    return measure.compile_function(function, args, compiler_options)


class CompilerLabeller(Labeller[Record]):
  """Labels of a compiler: each function is compiled, and does not run."""

  min_gain: ClassVar[float] = 0.02  # smaller gains of an estimate may be none on the device

  @abc.abstractmethod
  def estimate(self, compiled: Any, call: Call, nodes_of: NodesOf) -> Record:
    """The record of a compiled call.

    Raises:
      ValueError: it has none.
    """

  def records(
    self, functions: Functions, args: tuple, nodes_of: NodesOf
  ) -> Iterator[tuple[int, Record | Exception]]:
    for number, function, compiler_options in functions:
      try:
        compiled = self.compile(function, args, compiler_options)
      except _REFUSALS as error:
        yield number, error
        continue
      try:
        yield number, self.estimate(compiled, Call(function, args, {}), nodes_of)
      except ValueError as error:
        yield number, error


@dataclasses.dataclass(frozen=True)
class TpuEstimate(CompilerLabeller[TimeRecord]):
  """The time that `tpugraphs_jax.estimate` gives, by the TPU compiler and without a TPU.

  It comes from the final schedules of the kernels. It orders AlexNet's measured layouts better than
  the compiler's own estimates (`benchmarks/simulated_labels.json`). A choice without a time has no
  label.

  Attributes:
    target: such as `tpu:v3`.
    compiler: compiles in a process of its own, which writes the schedules.
  """

  target: str
  compiler: Compiler = dataclasses.field(default_factory=Compiler, compare=False, repr=False)
  name: ClassVar[str] = "tpu_estimate"
  schema: ClassVar[trust.Record] = trust.Record(
    milliseconds=trust.NUMBER,
    kernels=[trust.Record(picoseconds=trust.COUNT, group=(int, type(None)), nodes=[trust.COUNT])],
  )
  unit: ClassVar[str] = (
    "picoseconds, the time of the program by the schedules of its kernels; an estimate and no "
    "measurement"
  )

  @contextlib.contextmanager
  def open(self) -> Iterator[TpuEstimate]:
    with self.compiler:
      yield self

  @property
  def noun(self) -> str:
    return f"estimated time on {self.target}"

  @property
  def caveat(self) -> str:
    ends = costs.spread(self.target)
    spread = (
      f"of the programs that were measured on {self.target}, nine of ten took {ends[0]:.2f} to "
      f"{ends[1]:.2f} of it"
      if ends
      else f"no program was measured on {self.target}"
    )
    return (
      f"The time of `estimate`, from the schedules of the kernels, and no measurement: {spread}. "
      "Measure on the device before you rely on it."
    )

  def versions(self) -> dict[str, str]:
    return {
      "target": self.target,
      "libtpu": tpu.libtpu_version(),
      "jax": jax.__version__,
      "simulator": chips.version(self.target),
    }

  def compile(
    self, function: Callable[..., Any], args: tuple, compiler_options: CompilerOptions
  ) -> tpu.TpuProgram:
    call = jaxprs.for_one_device(Call(function, args, {}))
    try:
      return self.compiler.compile(call, self.target, compiler_options=compiler_options)
    except Ended as error:
      raise ValueError(f"the compiler failed: {error}") from None

  def estimate(self, compiled: tpu.TpuProgram, call: Call, nodes_of: NodesOf) -> TimeRecord:
    """The time of a program and of its kernels.

    Kernels that have only a bound are left out, and so is the control of loops that the compiler
    made, which is no kernel.

    Raises:
      ValueError: the program has no time.
    """
    row = costs.cost(compiled, self.target, call)
    if row.milliseconds is None:
      raise ValueError(f"it has no time, because {row.why}")
    timed: list[KernelRecord] = [
      {
        "picoseconds": to_picoseconds(kernel.milliseconds),
        "group": group_of(kernel),
        "nodes": nodes_of(kernel.operations),
      }
      for kernel in row.kernels
      if kernel.milliseconds is not None and not (kernel.is_bound or kernel.is_loop)
    ]
    return {"milliseconds": row.milliseconds, "kernels": timed}

  def value(self, record: TimeRecord) -> int:
    if found := {"optimal_seconds", "estimated_cycles"} & record.keys():
      raise ValueError(
        f"its label is {min(found)}, of an earlier version, and no time: label the program again"
      )
    return max(1, to_picoseconds(record["milliseconds"]))


@dataclasses.dataclass(frozen=True)
class BytesEstimate(CompilerLabeller[BytesRecord]):
  """Bytes that the program moves after this machine's compiler has optimised it.

  It needs neither libtpu nor a quiet machine, so that everything can be tried with it.
  """

  name: ClassVar[str] = "bytes_estimate"
  schema: ClassVar[trust.Record] = trust.Record(bytes_accessed=trust.COUNT)
  unit: ClassVar[str] = "bytes accessed, an estimate of this machine's compiler"
  target = None

  @property
  def noun(self) -> str:
    return "number of bytes accessed"

  @property
  def caveat(self) -> str:
    return "An estimate of this machine's compiler and no run time."

  def estimate(self, compiled: jax.stages.Compiled, call: Call, nodes_of: NodesOf) -> BytesRecord:
    del call, nodes_of
    moved = (compiled.cost_analysis() or {}).get("bytes accessed")
    if moved is None:
      raise ValueError("this machine's compiler does not estimate the bytes of a program")
    return {"bytes_accessed": int(moved)}

  def value(self, record: BytesRecord) -> int:
    return max(1, record["bytes_accessed"])


@dataclasses.dataclass(frozen=True)
class Measured(Labeller[measure.Rounds]):
  """Run time on the device at hand."""

  seed: int = 0
  name: ClassVar[str] = "measured"
  schema: ClassVar[trust.Record] = trust.Record(seconds=[trust.NUMBER])
  unit: ClassVar[str] = "nanoseconds of a call, the minimum of interleaved rounds"
  made_together: ClassVar[bool] = True
  min_gain: ClassVar[float] = 0.0  # the interval of the pairs decides
  target = None

  @property
  def noun(self) -> str:
    return "measured time"

  @property
  def caveat(self) -> str:
    return "Measured on the device at hand, with random arrays for shapes."

  def versions(self) -> dict[str, str]:
    return {"platform": jax.devices()[0].platform, **super().versions()}

  def records(
    self, functions: Functions, args: tuple, nodes_of: NodesOf
  ) -> Iterator[tuple[int, measure.Rounds | Exception]]:
    del nodes_of
    return measure.measure(functions, args, seed=self.seed)

  def value(self, record: measure.Rounds) -> int:
    return max(1, round(_NANOSECONDS_PER_SECOND * min(record["seconds"])))

  def scaled(self, record: measure.Rounds, factor: float) -> measure.Rounds:
    return {**record, "seconds": [factor * seconds for seconds in record["seconds"]]}


def create(name: str, *, target: str | None, seed: int) -> Labeller:
  """The labeller of a name.

  Args:
    name: the value of `--label`.
    target: a TPU generation such as `v3`.
    seed: of measured labels.

  Raises:
    ValueError: there is no such label; a target is missing, or given to a label that has none; or
      as `tpu.full_name`.
  """
  known = [labeller.name for labeller in (TpuEstimate, BytesEstimate, Measured)]
  if name not in known:
    raise ValueError(f"unknown label {name!r}, expected one of {', '.join(known)}")
  if name == TpuEstimate.name:
    if target is None:
      raise ValueError(f"label {name} needs a target, such as --target=v3")
    return TpuEstimate(tpu.full_name(target))
  if target is not None:
    raise ValueError(
      f"label {name} is for the device at hand and has no target, found "
      f"--target={target}; leave it out, or choose --label={TpuEstimate.name}"
    )
  return Measured(seed) if name == Measured.name else BytesEstimate()
