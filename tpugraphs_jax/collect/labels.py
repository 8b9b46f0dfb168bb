"""What a configuration is labelled with: estimates of a compiler, or measured time.

An estimate is a number that a compiler computes; it is no run time. Estimates
are the same at every run, times are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
from typing import Any, ClassVar, Protocol

import jax

from tpugraphs_jax.collect import measure, node_rows
from tpugraphs_jax.hlo import estimates, proto, sources, tpu

Functions = Iterable[tuple[int, Callable[..., Any]]]  # with the numbers of the candidates
Raw = dict[str, Any]


class Label(Protocol):
  """A way to label configurations; `unit` says what `value` counts."""

  name: str
  unit: str

  def versions(self) -> dict[str, str]:
    """What the labels depend on: target, versions, device."""

  def graph(self, function: Callable[..., Any], args: tuple) -> bytes:
    """The serialized module from which the graph is made."""

  def run(self, functions: Functions, args: tuple) -> Iterator[tuple[int, Raw | Exception]]:
    """Labels functions with the same arguments, one after another or all together."""

  def value(self, raw: Raw) -> int:
    """The label, positive, of what `run` found."""


def _one_by_one(
    functions: Functions, find: Callable[[Callable[..., Any]], Raw]
) -> Iterator[tuple[int, Raw | Exception]]:
  for number, function in functions:
    try:
      yield number, find(function)
    except (jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError) as error:
      yield number, error


@dataclasses.dataclass(frozen=True)
class TpuEstimate:
  """Both estimates of the TPU compiler, on a machine without a TPU.

  The label is `optimal_seconds`: over 33,177 measured configurations of AlexNet's
  training step on TPU v3 its Kendall tau-b with run time is .62, that of the summed
  cycles .43 (output orders alone, libtpu 0.0.42.1).
  """

  target: str  # such as tpu:v3
  name: ClassVar[str] = "tpu_estimate"
  unit: ClassVar[str] = (
      "picoseconds, the TPU compiler's optimal_seconds of the program; an estimate and no "
      "measurement")

  def versions(self) -> dict[str, str]:
    tpu.check_target(self.target)
    return {"target": self.target, "libtpu": tpu.libtpu_version(), "jax": jax.__version__}

  def graph(self, function: Callable[..., Any], args: tuple) -> bytes:
    """The program before layout assignment, as in the data set."""
    return tpu.compile_function(function, args, self.target, keep_stages=True).before_layouts

  def run(self, functions: Functions, args: tuple) -> Iterator[tuple[int, Raw | Exception]]:
    return _one_by_one(functions, lambda function: self._estimate(function, args))

  def value(self, raw: Raw) -> int:
    return max(1, round(raw["optimal_seconds"] * 1e12))

  def _estimate(self, function: Callable[..., Any], args: tuple) -> Raw:
    program = tpu.compile_function(function, args, self.target)
    found = estimates.estimated_cycles(
        proto.parse_module(program.module, where="TPU program"))
    if found.without_estimate:
      raise ValueError(f"the TPU compiler has no estimate for {found.without_estimate} of "
                       f"{found.kernels} kernels of this program")
    if found.cycles <= 0:
      raise ValueError("the TPU compiler estimates no cycles for this program")
    return {"estimated_cycles": found.cycles, "optimal_seconds": program.optimal_seconds,
            "cycles": node_rows.cycles_by_group(found.by_kernel), "loops_counted_once": found.loops_counted_once}


@dataclasses.dataclass(frozen=True)
class BytesEstimate:
  """Bytes that the program moves after this machine's compiler has optimised it.

  Needs no libtpu and no quiet machine: a label to try the way with.
  """

  name: ClassVar[str] = "bytes_estimate"
  unit: ClassVar[str] = "bytes accessed, an estimate of this machine's compiler"

  def versions(self) -> dict[str, str]:
    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}

  def graph(self, function: Callable[..., Any], args: tuple) -> bytes:
    return sources.load(function, *args).data

  def run(self, functions: Functions, args: tuple) -> Iterator[tuple[int, Raw | Exception]]:
    def find(function: Callable[..., Any]) -> Raw:
      cost = jax.jit(function).lower(*args).compile().cost_analysis()
      return {"bytes_accessed": int(cost["bytes accessed"])}
    return _one_by_one(functions, find)

  def value(self, raw: Raw) -> int:
    return raw["bytes_accessed"]


@dataclasses.dataclass(frozen=True)
class Measured:
  """Run time on the device at hand."""

  seed: int = 0
  name: ClassVar[str] = "measured"
  unit: ClassVar[str] = "nanoseconds of a call, the minimum of interleaved rounds"

  def versions(self) -> dict[str, str]:
    device = jax.devices()[0]
    return {"jax": jax.__version__, "platform": device.platform, "device": device.device_kind}

  def graph(self, function: Callable[..., Any], args: tuple) -> bytes:
    return sources.load(function, *args).data

  def run(self, functions: Functions, args: tuple) -> Iterator[tuple[int, Raw | Exception]]:
    return measure.measure(functions, args, seed=self.seed)

  def value(self, raw: Raw) -> int:
    return max(1, round(min(raw["seconds"]) * 1e9))


def create(name: str, *, target: str | None, seed: int) -> Label:
  """The label of a name; `target` is such as `v3` or `tpu:v3`.

  Raises:
    ValueError: there is no such label, or it has no or needs a target.
  """
  if name == TpuEstimate.name:
    if target is None:
      raise ValueError(f"label {name} needs a target, such as --target=v3")
    target = target if ":" in target else f"tpu:{target}"
    tpu.check_target(target)
    return TpuEstimate(target)
  others = {BytesEstimate.name: BytesEstimate(), Measured.name: Measured(seed)}
  if name not in others:
    raise ValueError(
        f"unknown label {name!r}, expected one of {', '.join([TpuEstimate.name, *others])}")
  if target is not None:
    raise ValueError(f"label {name} is for the device at hand and has no target, found "
                     f"--target={target}; leave it out, or choose --label={TpuEstimate.name}")
  return others[name]
