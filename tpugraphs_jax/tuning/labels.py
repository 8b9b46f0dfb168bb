"""Labels of choices: an estimate of a compiler, or a measured time.

An estimate is a number that a compiler computes, not a run time. One version of a compiler
always gives the same estimate; measured times vary.

`label_file` divides each estimate by the estimate of the compiler's own choice. `tune` passes the
ratio to its strategy (`strategies`), which learns from it and proposes the next choice. Measured
labels are made together, so that a search learns nothing from them, and the best one is compared
once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
from typing import Any, ClassVar

import jax

from tpugraphs_jax.graph import BEFORE_LAYOUTS, LOWERED
from tpugraphs_jax.hlo import jaxprs, proto, sources, tpu, tpu_kernels
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.infra import console
from tpugraphs_jax.tuning import choosing, costs, measure
from tpugraphs_jax.tuning.compiler import Compiler, Ended
from tpugraphs_jax.tuning.measure import CompilerOptions, Functions

Raw = dict[str, Any]  # the numbers found for a candidate, as `label_file` keeps them

# Targets whose label is `optimal_seconds`.
_BY_SECONDS = ("tpu:v2", "tpu:v3", "tpu:v4")
_LEAST_COUNTED = 0.5  # share of the bytes below which no gain is told
# Kendall's tau-b of estimates with the times of AlexNet (`benchmarks/bridge.json`).
ALEXNET_TAU = {"optimal seconds": 0.5545, "cycles of all kernels": 0.4704}
# Cycles of a program that may take a second. The estimates of a program of `data/own` give at most
# 1.44 ns a cycle: these are 0.6 s.
_LONG = 4 * 10**8


class Label:
  """A way to label the choices of a program.

  Attributes:
    name: the value of `--label`.
    unit: of `value`, in words.
    target: TPU target, such as `tpu:v3`; None for the device at hand.
    worth: a sentence about how well labels agree with run times.
    gap: the parts of the program that no label counts, in words; empty where there are none.
    unknown: why no gain can be told of the program, in words; empty where one can.
    part: the part of the program of which a gain is said, before a noun; empty for the whole.
    margin: smaller relative gains are none.
    made_together: whether all labels of a search are made at once, because only these compare.
  """

  name: ClassVar[str]
  target: str | None = None
  made_together: ClassVar[bool] = False
  margin: ClassVar[float] = 0.02  # of estimates, as in `benchmarks/tune.py`

  @property
  def unit(self) -> str:
    raise NotImplementedError

  @property
  def worth(self) -> str:
    raise NotImplementedError

  @property
  def what(self) -> str:
    """The name of the label in messages, such as `measured time`."""
    raise NotImplementedError

  @property
  def gap(self) -> str:
    return ""

  @property
  def unknown(self) -> str:
    return ""

  @property
  def part(self) -> str:
    return ""

  @property
  def stage(self) -> str:
    """The stage of compilation of the module from which the graph is made."""
    return f"{BEFORE_LAYOUTS} for {self.target}" if self.target else LOWERED

  def opened(self) -> contextlib.AbstractContextManager[Label]:
    """The label with what it needs for a search, which ends with the context."""
    return contextlib.nullcontext(self)

  def of(self, default: Raw) -> Label:
    """The label of a program, from the raw numbers of the compiler's own choice."""
    return self

  def versions(self) -> dict[str, str]:
    """The target or device and the versions on which labels depend."""
    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}

  def graph(self, function: Callable[..., Any], args: tuple) -> bytes:
    """The serialized module from which the graph is made, of the stage `stage`."""
    return sources.load(function, *args, target=self.target).data

  def compile(
    self, function: Callable[..., Any], args: tuple, compiler_options: CompilerOptions
  ) -> Any:
    """The function as the label's compiler compiles it."""
    return measure.compile_function(function, args, compiler_options)

  def run(self, functions: Functions, args: tuple) -> Iterator[tuple[int, Raw | Exception]]:
    """The raw numbers of each function, or the error with which it failed."""
    for number, function, compiler_options in functions:
      try:
        compiled = self.compile(function, args, compiler_options)
        yield number, self.estimate(compiled, Call(function, args, {}))
      except (jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError) as error:
        yield number, error

  def estimate(self, compiled: Any, call: Call) -> Raw:
    """The raw numbers of a compiled call.

    Labels that compare functions override `run`.
    """
    raise NotImplementedError

  def value(self, raw: Raw) -> int:
    """The label, a positive integer, from raw numbers.

    Raises:
      ValueError: the raw numbers leave out a part of the program that other choices count.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TpuEstimate(Label):
  """An estimate of a program by the TPU compiler, on a machine without a TPU.

  The label is the time of `estimate`, from the final schedules of the kernels, where the compiler's
  own choice has one: it orders AlexNet's measured layouts better than the compiler's two estimates
  (`benchmarks/simulated_labels.json`). Else it is `optimal_seconds` on v2, v3 and v4, and the
  cycles of all kernels, `estimated_cycles`, on newer targets and where the seconds of the own
  choice leave out a kernel.

  Attributes:
    default: the raw numbers of the compiler's own choice, of a program whose choices are labelled.
    compiler: compiles in a process of its own, which writes the schedules of kernels; without one
      this process compiles, and times come from cycles.
  """

  target: str  # such as tpu:v3
  default: Raw | None = None
  compiler: Compiler | None = None
  name: ClassVar[str] = "tpu_estimate"

  @contextlib.contextmanager
  def opened(self) -> Iterator[TpuEstimate]:
    with Compiler() as compiler:
      yield dataclasses.replace(self, compiler=compiler)

  def of(self, default: Raw) -> TpuEstimate:
    return dataclasses.replace(self, default=default)

  @property
  def is_of_time(self) -> bool:
    """Whether the label is the time of `estimate`."""
    return bool(self.default and self.default.get("milliseconds"))

  @property
  def is_of_seconds(self) -> bool:
    """Whether the label is `optimal_seconds`, and not `estimated_cycles`."""
    is_partial = self.default is not None and _seconds_are_partial(self.default)
    return self.target in _BY_SECONDS and not is_partial and not self.is_of_time

  @property
  def unit(self) -> str:
    if self.is_of_time:
      number = "picoseconds, the estimated time of the program"
    elif self.is_of_seconds:
      number = "picoseconds, the TPU compiler's optimal_seconds of the program"
    else:
      number = "cycles, the TPU compiler's estimated_cycles of all kernels that have an estimate"
    return f"{number}; an estimate and no measurement"

  @property
  def worth(self) -> str:
    if self.default and self.is_of_time:
      by_schedule = self.default["basis"] == costs.SCHEDULE
      ends = costs.spread(self.target, self.default["basis"])
      source = "the schedules of its kernels" if by_schedule else "the cycles of its kernels"
      spread = (
        f"of the programs that were measured on {self.target}, nine of ten took {ends[0]:.2f} to "
        f"{ends[1]:.2f} of it"
        if ends
        else f"no program was measured on {self.target}"
      )
      return (
        f"The time of `estimate`, from {source}, and no measurement: {spread}. Measure on the "
        "device before you rely on it."
      )
    return (
      f"An estimate of the compiler and no run time. {self._agreement} Measure on the device "
      "before you rely on it."
    )

  @property
  def _agreement(self) -> str:
    """How well estimates without a time agree with measured times, from the records."""
    if self.target in _BY_SECONDS:
      tau = ALEXNET_TAU["optimal seconds" if self.is_of_seconds else "cycles of all kernels"]
      return (
        "Over layouts of AlexNet's training step its Kendall tau-b with 39,187 times measured on "
        f"TPU v3 is {tau:.2f}."
      )
    if (time := costs.times().get(self.target)) is None:
      return f"No program was measured on {self.target}."
    return (
      f"Of {time.programs} programs of {time.operations} operations that were measured on "
      f"{self.target}, nine of ten took {time.low:.2f} to {time.high:.2f} of the time of their "
      "cycles."
    )

  @property
  def what(self) -> str:
    is_time = self.is_of_time or self.is_of_seconds
    what = "estimated time" if is_time else "number of estimated cycles"
    return f"{what} on {self.target}"

  @property
  def gap(self) -> str:
    if self.default is None or self.is_of_seconds or not self.default.get("without_estimate"):
      return ""
    if self.is_of_time and self.default["basis"] == costs.SCHEDULE:  # the schedule has all kernels
      return ""
    return (
      f"{self.default['without_estimate']} of {self.default['kernels']} kernels have no estimated "
      "cycles, and no label counts them"
    )

  @property
  def unknown(self) -> str:
    """Why no gain can be told: kernels without an estimate move most of the bytes."""
    if self.default is None or self.is_of_seconds or self.is_of_time:
      return ""
    if self.default.get("counted_share", 1.0) >= _LEAST_COUNTED:
      return ""
    return (
      f"the kernels that have an estimate move {self.default['counted_share']:.0%} of the bytes, "
      f"and the compiler does not estimate {self.default['unknown']}"
    )

  @property
  def part(self) -> str:
    """The part of the program of which a gain is said, in words; empty where it is the whole."""
    if (
      self.default is None
      or self.is_of_seconds
      or self.is_of_time
      or not self.default.get("unknown")
    ):
      return ""
    return f"the part that is counted, {self.default['counted_share']:.0%} of the bytes, of "

  def versions(self) -> dict[str, str]:
    return {"target": self.target, "libtpu": tpu.libtpu_version(), "jax": jax.__version__}

  def compile(
    self, function: Callable[..., Any], args: tuple, compiler_options: CompilerOptions
  ) -> tpu.TpuProgram:
    if self.compiler is None:
      return tpu.compile_function(function, args, self.target, compiler_options=compiler_options)
    call = jaxprs.for_one_device(Call(function, args, {}))
    try:
      return self.compiler.compile(call, self.target, compiler_options=compiler_options)
    except Ended as error:
      raise ValueError(f"the compiler failed: {error}") from None

  def estimate(self, compiled: tpu.TpuProgram, call: Call) -> Raw:
    module = proto.parse_module(compiled.module, where="TPU program")
    estimate = tpu_kernels.estimated_cycles(module)
    cost = costs.cost(compiled, self.target, call)
    unknown = costs.unknown_work(estimate, estimate.work.bytes_accessed)
    raw = {
      "estimated_cycles": estimate.cycles,
      "optimal_seconds": compiled.optimal_seconds,
      "bytes_accessed": compiled.bytes_accessed,
      "kernels": estimate.kernels,
      "without_estimate": estimate.without_estimate,
      "cycles": cycles_by_group(estimate.by_kernel),
      "loops_counted_once": estimate.loops_counted_once,
      "milliseconds": cost.milliseconds,
      "basis": cost.basis,
      "without_time": cost.why,
      "counted_share": estimate.counted_share,
      "unknown": costs.listed(unknown) if unknown else "",
    }
    self.of(raw).value(raw)  # refuses a program without a label
    return raw

  def value(self, raw: Raw) -> int:
    lacking = raw.get("without_estimate", 0)
    if self.is_of_time:
      if not raw.get("milliseconds"):
        raise ValueError(f"it has no time, because {raw.get('without_time', 'its label has none')}")
      if self.default and raw["basis"] != self.default["basis"]:
        raise ValueError(
          f"its time comes from its {raw['basis']}, that of the compiler's own choice from its "
          f"{self.default['basis']}: the two do not compare"
        )
      value = round(raw["milliseconds"] * 1e9)
    elif self.is_of_seconds:
      if _seconds_are_partial(raw):
        raise ValueError("the TPU compiler has no estimated seconds for some of its kernels")
      value = round(raw["optimal_seconds"] * 1e12)
    else:
      if self.default and lacking > (of_default := self.default.get("without_estimate", 0)):
        raise ValueError(
          f"the TPU compiler has no estimated cycles for {lacking} of its {raw['kernels']} "
          f"kernels, for {of_default} of the compiler's own choice: the two do not compare"
        )
      value = raw["estimated_cycles"]
    if not 0 < value < tpu_kernels.SATURATED:
      raise ValueError(
        f"the TPU compiler has no estimate for this program ({raw.get('kernels', 0)} kernels, "
        f"{lacking} without estimated cycles)"
      )
    return value


def _seconds_are_partial(raw: Raw) -> bool:
  """Whether `optimal_seconds` leaves out a kernel: it counts -1 for each without an estimate.

  The sum is then negative, unless the other kernels take more than a second.
  """
  return raw["optimal_seconds"] <= 0 or bool(
    raw.get("without_estimate") and raw["estimated_cycles"] > _LONG
  )


@dataclasses.dataclass(frozen=True)
class BytesEstimate(Label):
  """Bytes that the program moves after this machine's compiler has optimised it.

  It needs neither libtpu nor a quiet machine, so that everything can be tried with it.
  """

  name: ClassVar[str] = "bytes_estimate"
  unit = "bytes accessed, an estimate of this machine's compiler"
  what = "number of bytes accessed"
  worth = "An estimate of this machine's compiler and no run time."

  def estimate(self, compiled: jax.stages.Compiled, call: Call) -> Raw:
    cost = compiled.cost_analysis()
    if cost is None:
      raise ValueError("this machine's compiler does not estimate the bytes of a program")
    return {"bytes_accessed": int(cost["bytes accessed"])}

  def value(self, raw: Raw) -> int:
    return raw["bytes_accessed"]


@dataclasses.dataclass(frozen=True)
class Measured(Label):
  """Run time on the device at hand."""

  seed: int = 0
  name: ClassVar[str] = "measured"
  unit = "nanoseconds of a call, the minimum of interleaved rounds"
  what = "measured time"
  worth = "Measured on the device at hand, with random arrays for shapes."
  made_together: ClassVar[bool] = True
  margin: ClassVar[float] = 0.0  # the interval of the pairs decides

  def versions(self) -> dict[str, str]:
    return {"platform": jax.devices()[0].platform, **super().versions()}

  def run(self, functions: Functions, args: tuple) -> Iterator[tuple[int, Raw | Exception]]:
    return measure.measure(functions, args, seed=self.seed)

  def value(self, raw: Raw) -> int:
    return max(1, round(min(raw["seconds"]) * 1e9))


def reason(error: Exception) -> str:
  """Why a choice failed, in a line: the first of a compiler's, the last of a callback's."""
  lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
  return console.one_line(lines[-1 if "Traceback (most recent call last)" in lines[0] else 0])


def cycles_by_group(kernels: Iterable[tpu_kernels.KernelCycles]) -> dict[str, list[int]]:
  """The cycles of every kernel, by the group that it comes from.

  The first name that holds a group decides: the kernel's own name, then the names of fused
  convolutions and dots, then of other fused instructions.

  Args:
    kernels: of a function that `choosing.apply` returned.

  Returns:
    Cycles by number of the group; kernels that come from no group are under `rest`.
  """
  cycles: dict[str, list[int]] = {}
  for kernel in kernels:
    numbers = (choosing.number_in(name) for name in kernel.names)
    group = next((str(number) for number in numbers if number is not None), "rest")
    cycles.setdefault(group, []).append(kernel.cycles)
  return cycles


def create(name: str, *, target: str | None, seed: int) -> Label:
  """The label of a name.

  Args:
    name: the value of `--label`.
    target: a TPU generation such as `v3`.
    seed: of measured labels.

  Raises:
    ValueError: there is no such label; a target is missing, or given to a label that has none; or
      as `tpu.full_name`.
  """
  if name == TpuEstimate.name:
    if target is None:
      raise ValueError(f"label {name} needs a target, such as --target=v3")
    return TpuEstimate(tpu.full_name(target))
  others = {BytesEstimate.name: BytesEstimate(), Measured.name: Measured(seed)}
  if name not in others:
    known = ", ".join([TpuEstimate.name, *others])
    raise ValueError(f"unknown label {name!r}, expected one of {known}")
  if target is not None:
    raise ValueError(
      f"label {name} is for the device at hand and has no target, found "
      f"--target={target}; leave it out, or choose --label={TpuEstimate.name}"
    )
  return others[name]
