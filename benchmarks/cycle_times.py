"""The times that the compiler's estimated cycles would take, for records that compare with them.

`measured_ops.py` of commit 2ff07450 fitted the factors of `cycle_times.json` to the operations that
tokamax measured.
Programs with work of which the compiler estimates no cycles have no such time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from tpugraphs_jax.hlo import tpu_kernels

_TIMES = Path(__file__).with_suffix(".json")
# Kinds of `tpu_kernels.Uncounted` whose time does not follow from the size of their results.
_NEVER_SMALL = ("loop", "kernel", "custom-call")
_SORT_PASSES = 100  # over the results of a sort, about log2(n)^2 / 2 of a bitonic one
# Share of a program's bytes that the other instructions without an estimate may write.
_SMALL_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Time:
  """How long estimated cycles take on a generation, from programs measured on it.

  Attributes:
    product_ms: milliseconds of a million cycles in kernels with a convolution or a dot.
    other_ms: milliseconds of a million cycles in other kernels.
    low, high: the range of time / estimated time that nine of ten measured programs had.
    programs: how many were measured, of `operations` operations.
  """

  product_ms: float
  other_ms: float
  low: float
  high: float
  programs: int
  operations: int


@functools.cache
def times() -> dict[str, Time]:
  """The generations on which programs with estimated cycles were measured."""
  return {target: Time(**row) for target, row in json.loads(_TIMES.read_text()).items()}


def unknown_work(cycles: tpu_kernels.Cycles, bytes_accessed: float) -> list[tpu_kernels.Uncounted]:
  """The instructions without an estimate that leave the time of a program unknown.

  Loops of unknown length, custom calls and kernels without an estimate are never small. Gathers,
  scatters, sorts and the like are, together, where they write few of the program's bytes.

  Args:
    cycles: of a program.
    bytes_accessed: by the program.
  """
  written = sum(
    lacking.size * (_SORT_PASSES if lacking.kind == "sort" else 1)
    for lacking in cycles.uncounted
    if lacking.kind not in _NEVER_SMALL
  )
  is_small = written <= _SMALL_SHARE * bytes_accessed
  return [lacking for lacking in cycles.uncounted if lacking.kind in _NEVER_SMALL or not is_small]
