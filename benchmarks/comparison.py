"""Compares the project's formulation of a training or scoring step with the plain one.

    python -m benchmarks.comparison layout_step --out layout_step.json

Both formulations run through the project's own steps, with the same loss, optimiser and
buffer donation. Peak memory is measured in a fresh process that runs one variant alone. With
`GLIBC_TUNABLES=glibc.malloc.hugetlb=0` in the environment freed memory is not kept
(`machine.keep_freed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing, workloads
from tests.support import plain
from tpugraphs_jax import losses
from tpugraphs_jax.data.batching import LayoutBatch
from tpugraphs_jax.infra import machine, parallel
from tpugraphs_jax.optimizer import Optimizer
from tpugraphs_jax.rankers.layout import res_model, sage
from tpugraphs_jax.rankers.scorer import network_step
from tpugraphs_jax.train import log
from tpugraphs_jax.train.step import make_train_step, TrainState

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
    optimizer = Optimizer().create(1000)
    self._state = parallel.replicate(TrainState.create(case.params(), optimizer))
    self._step = make_train_step(model, optimizer, losses.LossOptions())

  def __call__(self) -> dict[str, jax.Array]:
    self._state, metrics = self._step(self._state, self._batch)
    return metrics


class Scoring:
  """Calling it scores all batches and returns the scores."""

  def __init__(self, case: Case, variant: str):
    model, self._batches = case.variant(variant)
    self._params = parallel.replicate(case.params())
    self._step = network_step(model)

  def __call__(self) -> list[jax.Array]:
    # One batch at a time: asynchronous dispatch would hold all results in memory at once.
    return [jax.block_until_ready(self._step(self._params, batch)) for batch in self._batches]


def assert_same(first: Any, second: Any) -> None:
  """Asserts that metrics or scores of both variants agree to float32 rounding."""
  largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(first))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * largest), first, second
  )


def layout_step() -> Case:
  """The official layout model on 8 programs of about 6,000 nodes, 250 of them configurable.

  Each has 16 configurations; gradients flow through blocks of 5,000 nodes.
  """
  model = res_model.ResModel()
  batch = workloads.layout_batch(
    graphs=8, nodes=6_000, config_nodes=250, configs=16, hops=model.hops, keep_nodes=5_000
  )
  return Case(model, plain.res_model, [batch])


def layout_rank() -> Case:
  """The same model on 1,000 configurations of 10,000 nodes, 5 % of them configurable."""
  model = res_model.ResModel()
  batches = workloads.ranking_batches(
    nodes=10_000, config_nodes=500, configs=1_000, chunk=100, hops=model.hops
  )
  # A model trained with backpropdropout ranks on the full graph.
  return Case(model, functools.partial(plain.res_model, dropout="fullgraph"), batches)


def sage_step() -> Case:
  """GraphSAGE 128 x 3 on 10,000 nodes, 500 of them configurable, with 64 configurations."""
  model = sage.SAGE(hidden_dim=128, num_gnns=3)
  batch = workloads.layout_batch(
    graphs=1, nodes=10_000, config_nodes=500, configs=64, hops=model.hops
  )
  return Case(model, plain.layout_sage, [batch])


# What is compared, on which case, and how many timed calls.
CASES = {
  "layout_step": (Training, layout_step, 7),
  "layout_rank": (Scoring, layout_rank, 3),
  "sage_step": (Training, sage_step, 3),
}


def peak_mib(name: str, variant: str) -> float:
  """Peak memory of this process, which runs one variant alone."""
  kind, make_case, _ = CASES[name]
  function = kind(make_case(), variant)
  for _ in range(2):
    jax.block_until_ready(function())
  return log.peak_memory()[1] / 2**20


def compare(name: str, repeats: int) -> dict[str, float]:
  """Seconds and peak memory of both variants, and the ratio of their seconds."""
  # Before this process grows: on Linux a child's peak memory starts at its parent's peak.
  peaks = [timing.in_subprocess("comparison", name, "--only", variant) for variant in VARIANTS]
  kind, make_case, usual = CASES[name]
  case = make_case()
  functions = {variant: kind(case, variant) for variant in VARIANTS}
  assert_same(*(function() for function in functions.values()))
  seconds = timing.medians(functions, repeats=repeats or usual)
  figures = {f"{variant}_s": seconds[variant] for variant in VARIANTS}
  figures["ratio"] = seconds["plain"] / seconds["ours"]
  return figures | peaks[0] | peaks[1]


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("name", choices=CASES)
  parser.add_argument("--repeats", type=int, default=0, help="timed calls, if not the usual ones")
  parser.add_argument("--only", choices=VARIANTS, help="peak memory of one variant")
  args = parser.parse_args()
  if args.only:
    timing.report({f"{args.only}_peak_mib": peak_mib(args.name, args.only)}, args.out)
  else:
    timing.report(compare(args.name, args.repeats), args.out)


if __name__ == "__main__":
  machine.keep_freed()
  main()
