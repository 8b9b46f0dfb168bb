"""Compares the project's formulation of a training or scoring step with the plain one.

Both formulations run through the project's own steps, with the same loss, optimiser and
buffer donation. Peak memory is measured in a fresh process that runs one variant alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
import dataclasses
from pathlib import Path
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import plain
import timing

from tpugraphs_jax import losses as losses_lib
from tpugraphs_jax.data.batching import LayoutBatch
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers.scorer import network_step
from tpugraphs_jax.train import log
from tpugraphs_jax.train import state as state_lib

VARIANTS = ("plain", "ours")


@dataclasses.dataclass(frozen=True)
class PlainModel:
  """A plain formulation behind `init` and `apply`, the methods of a Flax model that steps use."""

  score: Callable[[Any, Any], jax.Array]

  def init(self, *unused) -> dict[str, Any]:
    return {}

  def apply(self, variables, batch, mutable=(), **unused):
    scores = self.score(variables["params"], batch)
    return (scores, {}) if mutable else scores


@dataclasses.dataclass(frozen=True)
class Case:
  """A model, its plain formulation and batches to run them on."""

  model: Any
  plain_score: Callable[[Any, Any], jax.Array]
  batches: Sequence[LayoutBatch]

  def variant(self, name: str) -> tuple[Any, list[Any]]:
    """The model of `plain` or `ours`, and its batches with a leading device axis."""
    if name == "ours":
      return self.model, [_on_device(batch) for batch in self.batches]
    batches = [_on_device(plain.from_layout(batch)) for batch in self.batches]
    return PlainModel(self.plain_score), batches

  def params(self) -> Any:
    return jax.jit(self.model.init)(jax.random.key(0), self.batches[0])["params"]


def _on_device(batch: Any) -> Any:
  return jax.device_put(jax.tree.map(lambda leaf: np.asarray(leaf)[None], batch))


class Training:
  """Calling it takes one training step and returns its metrics."""

  def __init__(self, case: Case, variant: str):
    model, (self._batch,) = case.variant(variant)
    optimizer = state_lib.create_optimizer(total_steps=1000)
    self._state = parallel.replicate(state_lib.TrainState.create(case.params(), optimizer))
    self._step = state_lib.make_train_step(model, optimizer, losses_lib.LossOptions())

  def __call__(self) -> dict[str, jax.Array]:
    self._state, metrics = self._step(self._state, self._batch)
    return metrics

  def planned_mib(self) -> float:
    mapped, key = self._step.func, self._step.args
    return timing.planned_mib(mapped.lower(*key, self._state, self._batch).compile())


class Scoring:
  """Calling it scores all batches and returns the scores."""

  def __init__(self, case: Case, variant: str):
    model, self._batches = case.variant(variant)
    self._params = parallel.replicate(case.params())
    self._step = network_step(model)

  def __call__(self) -> list[jax.Array]:
    # One batch at a time: asynchronous dispatch would hold all results in memory at once.
    return [jax.block_until_ready(self._step(self._params, batch)) for batch in self._batches]

  def planned_mib(self) -> float:
    return timing.planned_mib(self._step.lower(self._params, self._batches[0]).compile())


def assert_same(first: Any, second: Any) -> None:
  """Asserts that metrics or scores of both variants agree to float32 rounding."""
  largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(first))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * largest), first, second)


def run(description: str, script: str, kind: type, case: Callable[[], Case], *, repeats: int):
  """Command line of a comparison: times medians in this process, peak memory in fresh ones."""
  parser = timing.parser(description, repeats=repeats)
  parser.add_argument("--only", choices=VARIANTS, help="peak memory of one variant")
  args = parser.parse_args()
  if args.only:
    timing.report(_peak(kind(case(), args.only)), args.out)
  else:
    timing.report(_compare(script, kind, case, args), args.out)


def _peak(function: Training | Scoring) -> dict[str, float]:
  for _ in range(2):
    jax.block_until_ready(function())
  return {"peak_mib": log.peak_memory()[1] / 2**20, "planned_mib": function.planned_mib()}


def _compare(
    script: str, kind: type, make_case: Callable[[], Case], args: argparse.Namespace
) -> dict[str, float]:
  # Before this process grows: on Linux a child's peak memory starts at its parent's peak.
  peaks = {name: timing.in_subprocess(script, "--only", name) for name in VARIANTS}
  case = make_case()
  functions = {name: kind(case, name) for name in VARIANTS}
  assert_same(*(function() for function in functions.values()))
  seconds = timing.medians(functions, repeats=args.repeats)
  figures = {f"{name}_s": seconds[name] for name in VARIANTS}
  figures["ratio"] = seconds["plain"] / seconds["ours"]
  for name in VARIANTS:
    figures |= {f"{name}_{key}": value for key, value in peaks[name].items()}
  return figures
