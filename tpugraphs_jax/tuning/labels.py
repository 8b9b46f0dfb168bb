"""Labels of choices: an estimate of a compiler, or a measured time.

An estimate is a number that a compiler computes, not a run time. One version of a compiler
always gives the same estimate; measured times vary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
from typing import Any, ClassVar

import jax

from tpugraphs_jax.graph import BEFORE_LAYOUTS, LOWERED
from tpugraphs_jax.hlo import proto, sources
from tpugraphs_jax.tuning import choosing, measure, tpu, tpu_kernels

Functions = Iterable[tuple[int, Callable[..., Any]]]  # with the numbers of the candidates
Raw = dict[str, Any]  # the numbers found for a candidate, as the sidecar of a program keeps them


class Label:
  """A way to label the choices of a program.

  Attributes:
    name: the value of `--label`.
    unit: of `value`, in words.
    target: TPU target, such as `tpu:v3`; None for the device at hand.
    worth: a sentence about how well labels agree with run times.
    is_comparative: whether only labels that were made together compare.
  """

  name: ClassVar[str]
  unit: ClassVar[str]
  worth: ClassVar[str]
  target: str | None = None
  is_comparative: ClassVar[bool] = False

  @property
  def what(self) -> str:
    """The name of the label in messages, such as `measured time`."""
    raise NotImplementedError

  @property
  def stage(self) -> str:
    """The stage of compilation of the module from which the graph is made."""
    return f"{BEFORE_LAYOUTS} for {self.target}" if self.target else LOWERED

  def versions(self) -> dict[str, str]:
    """The target or device and the versions on which labels depend."""
    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}

  def graph(self, function: Callable[..., Any], args: tuple) -> bytes:
    """The serialized module from which the graph is made: as jax lowers the function."""
    return sources.load(function, *args).data

  def run(self, functions: Functions, args: tuple) -> Iterator[tuple[int, Raw | Exception]]:
    """The raw numbers of each function, or the error with which it failed."""
    for number, function in functions:
      try:
        yield number, self.estimate(function, args)
      except (jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError) as error:
        yield number, error

  def estimate(self, function: Callable[..., Any], args: tuple) -> Raw:
    """The raw numbers of one function; labels that compare functions override `run` instead."""
    raise NotImplementedError

  def value(self, raw: Raw) -> int:
    """The label, a positive integer, from raw numbers."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TpuEstimate(Label):
  """Both estimates of the TPU compiler, on a machine without a TPU.

  The label is `optimal_seconds`, which is nearer to run times than the summed cycles; `worth` has
  the figures.
  """

  target: str  # such as tpu:v3
  name: ClassVar[str] = "tpu_estimate"
  unit: ClassVar[str] = (
    "picoseconds, the TPU compiler's optimal_seconds of the program; an estimate and no measurement"
  )

  worth: ClassVar[str] = (
    "An estimate of the compiler and no run time. On AlexNet's training step its Kendall tau-b "
    "with 39,187 times measured on TPU v3 is 0.55; it charges too little or nothing for some "
    "outputs of convolutions. Measure on the device before you rely on it."
  )

  @property
  def what(self) -> str:
    return f"estimated time on {self.target}"

  def versions(self) -> dict[str, str]:
    return {"target": self.target, "libtpu": tpu.libtpu_version(), "jax": jax.__version__}

  def graph(self, function: Callable[..., Any], args: tuple) -> bytes:
    """The program before layout assignment, with the layouts that the compiler then assigns."""
    return tpu.compile_function(function, args, self.target, keep_stages=True).before_layouts

  def estimate(self, function: Callable[..., Any], args: tuple) -> Raw:
    program = tpu.compile_function(function, args, self.target)
    estimate = tpu_kernels.estimated_cycles(proto.parse_module(program.module, where="TPU program"))
    if estimate.without_estimate:
      raise ValueError(
        f"the TPU compiler has no estimate for {estimate.without_estimate} of "
        f"{estimate.kernels} kernels of this program"
      )
    if estimate.cycles <= 0:
      raise ValueError("the TPU compiler estimates no cycles for this program")
    return {
      "estimated_cycles": estimate.cycles,
      "optimal_seconds": program.optimal_seconds,
      "cycles": cycles_by_group(estimate.by_kernel),
      "loops_counted_once": estimate.loops_counted_once,
    }

  def value(self, raw: Raw) -> int:
    return max(1, round(raw["optimal_seconds"] * 1e12))


@dataclasses.dataclass(frozen=True)
class BytesEstimate(Label):
  """Bytes that the program moves after this machine's compiler has optimised it.

  It needs neither libtpu nor a quiet machine, so that everything can be tried with it.
  """

  name: ClassVar[str] = "bytes_estimate"
  unit: ClassVar[str] = "bytes accessed, an estimate of this machine's compiler"
  what = "number of bytes accessed"
  worth: ClassVar[str] = "An estimate of this machine's compiler and no run time."

  def estimate(self, function: Callable[..., Any], args: tuple) -> Raw:
    cost = jax.jit(function).lower(*args).compile().cost_analysis()
    return {"bytes_accessed": int(cost["bytes accessed"])}

  def value(self, raw: Raw) -> int:
    return raw["bytes_accessed"]


@dataclasses.dataclass(frozen=True)
class Measured(Label):
  """Run time on the device at hand."""

  seed: int = 0
  name: ClassVar[str] = "measured"
  unit: ClassVar[str] = "nanoseconds of a call, the minimum of interleaved rounds"
  what = "measured time"
  worth: ClassVar[str] = "Measured on the device at hand, on random arguments."
  is_comparative: ClassVar[bool] = True

  def versions(self) -> dict[str, str]:
    return {"platform": jax.devices()[0].platform, **super().versions()}

  def run(self, functions: Functions, args: tuple) -> Iterator[tuple[int, Raw | Exception]]:
    return measure.measure(functions, args, seed=self.seed)

  def value(self, raw: Raw) -> int:
    return max(1, round(min(raw["seconds"]) * 1e9))


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
  """The label of a name; `target` is a TPU generation such as `v3`.

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
    raise ValueError(
      f"unknown label {name!r}, expected one of {', '.join([TpuEstimate.name, *others])}"
    )
  if target is not None:
    raise ValueError(
      f"label {name} is for the device at hand and has no target, found "
      f"--target={target}; leave it out, or choose --label={TpuEstimate.name}"
    )
  return others[name]
