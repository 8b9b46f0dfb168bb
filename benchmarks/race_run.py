"""One run of the race (`systems.py`): trains for a number of CPU seconds or steps, then judges."""

from __future__ import annotations

from collections.abc import Sequence
import copy
from pathlib import Path
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from tpugraphs_jax.data.selection import Data
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.train import evaluation, log, training
from tpugraphs_jax.train.loading import data_of, evaluable, load_graphs
from tpugraphs_jax.train.session import TrainStep

# The time of a step is estimated from steps of so many CPU seconds: an estimate from 30 small steps
# was up to 1.6 times too long.
_TIMED_SECONDS, _MOST_TIMED, _MOST_COMPILED = 20.0, 4000, 60
_STEPS_PER_EPOCH = 500


class Steps:
  """Takes training steps and measures the CPU seconds of those that compiled nothing."""

  def __init__(self, state: Any, train_step: TrainStep, batches: Any):
    self._state, self._train_step, self._batches = parallel.replicate(state), train_step, batches
    self._compilations = timing.Compilations()
    self.taken, self._timed, self._seconds, self.loss = 0, 0, 0.0, 0.0

  @property
  def mean_seconds(self) -> float:
    return self._seconds / max(self._timed, 1)

  @property
  def seconds(self) -> float:
    """CPU seconds of all steps, each counted as the mean of those that compiled nothing."""
    return self.taken * self.mean_seconds

  @property
  def params(self) -> Any:
    return parallel.unreplicate(self._state).eval_params

  def take(self) -> None:
    compiled, started = self._compilations.count, time.process_time()
    self._state, metrics = self._train_step(self._state, next(self._batches))
    self.loss = float(parallel.unreplicate(metrics)["loss"])
    self.taken += 1
    if self._compilations.count == compiled:
      self._timed += 1
      self._seconds += time.process_time() - started


def judged(ranker: Ranker, data: Data, graphs: Sequence[Any], params: Any) -> dict[str, float]:
  """Means over graphs, metrics of each graph, and CPU seconds of scoring all of them."""
  family, configs = ranker.family, ranker.config.eval.configs
  ids = [data.validation_ids(graph.name, graph.configs) for graph in graphs]
  family.scores(params, graphs, [some[:configs] for some in ids])  # compiles
  started = time.process_time()
  scores = family.scores(params, graphs, ids)
  seconds = time.process_time() - started
  rows, means = evaluation.evaluate(
    evaluation.with_labels(graphs, ids, scores), data.collection.slowdown_ks
  )
  return means | {"by_graph": {row["graph"]: row for row in rows}, "rank_cpu_s": seconds}


def epochs_of(steps: int, graphs: int) -> tuple[int, int]:
  """Epochs, and slates of an epoch, for about `steps` steps of `graphs` slates each.

  Epochs are short enough to be planned quickly.
  """
  epochs = max(1, steps // _STEPS_PER_EPOCH)
  return epochs, max(1, round(steps / epochs)) * graphs


def phase_of(
  ranker: Ranker, data: Data, graphs: Sequence[Any], folder: Path, *, steps: int
) -> tuple[Steps, int]:
  """The first phase of training, of about `steps` steps, and its number of steps.

  A second phase, of the head alone, is left out of the race.
  """
  epochs, slates = epochs_of(steps, ranker.config.batch.graphs)
  family = copy.copy(ranker.family)
  family.config = ranker.config.replace(train__epochs=epochs, batch__slates_per_epoch=slates)
  phase = family.first_phase(graphs, folder)
  plan = training.plan_batches(phase, data.targets)
  state, train_step, batches, schedule = training.begin(phase, plan)
  return Steps(state, train_step, batches), schedule.total_steps


def seconds_per_step(ranker: Ranker, data: Data, graphs: Sequence[Any]) -> float:
  """Mean CPU seconds of a training step, from some timed steps; 0 if each of them compiled."""
  with tempfile.TemporaryDirectory() as folder:
    steps, _ = phase_of(ranker, data, graphs, Path(folder), steps=_MOST_TIMED)
    while steps.seconds < _TIMED_SECONDS and steps.taken < (
      _MOST_TIMED if steps.mean_seconds else _MOST_COMPILED
    ):
      steps.take()
  return steps.mean_seconds


def measure(config: Any, folder: Path, *, budget: float = np.inf, steps: int = 0) -> dict[str, Any]:
  """Trains a ranker for `budget` CPU seconds or for `steps` steps, and judges it.

  With `data.folds` it is judged on the test fold, otherwise on the validation split.

  Args:
    config: of the ranker.
    folder: for files of its training.
    budget: CPU seconds of training.
    steps: number of steps, whatever they cost; 0 = as many as the budget allows.

  Returns:
    Quality, cost and versions by name, or the error alone if the loss was not finite.
  """
  ranker, collections = Ranker(config), data_of(config)
  compilations, data = timing.Compilations(), collections[0]
  graphs, valid = load_graphs(ranker, collections, folder, resume=False)
  timed = 0.0 if steps else seconds_per_step(ranker, data, graphs)
  steps = steps or max(1, round(budget / max(timed, 1e-6)))
  taking, total = phase_of(ranker, data, graphs, folder, steps=steps)
  while taking.taken < total and taking.seconds < budget:
    taking.take()
    if not np.isfinite(taking.loss):
      return {"error": f"the loss is {taking.loss} after {taking.taken} of {total} steps"}
  peak_mib = log.peak_memory()[1] / 2**20
  if config.data.folds:
    test = evaluable(data.load("test"))
    valid = [ranker.prepare(graph) for graph in test]
  return judged(ranker, data, valid, taking.params) | {
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(taking.params)),
    "steps": taking.taken,
    "planned_steps": total,
    "updates": taking.taken // config.optimizer.accumulation_steps,
    "step_ms": 1e3 * (taking.mean_seconds or timed),  # all steps may have compiled
    "train_cpu_s": taking.seconds,
    "compile_s": compilations.seconds,
    "peak_mib": peak_mib,
    "machine": timing.machine(),
    "versions": log.versions(),
  }
