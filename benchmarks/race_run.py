"""One run of the race (`systems.py`): trains for a number of CPU seconds or steps, then judges."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from pathlib import Path
import tempfile
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from tpugraphs_jax import parallel
from tpugraphs_jax.run import job as job_lib, training
from tpugraphs_jax.serve import ensemble, judge
from tpugraphs_jax.train import log
import timing

OWN = "layout:own:outputs"
_COMBINE = ensemble.COMBINATIONS["min_max"]  # members differ in the scale of their scores
_TIMED_STEPS, _TIMED_SECONDS = 30, 15.0  # to estimate the time of a step
_STEPS_PER_EPOCH = 500
_STATES = 6  # states of a run, of which the validation split chooses one if it does not judge
_SUMS = ("parameters", "steps", "planned_steps", "train_cpu_s", "compile_s", "rank_cpu_s")


class Trained(NamedTuple):
  """A ranker after its training.

  Attributes:
    examined: the graphs that it is judged on; None if another member of the ensemble keeps them.
    scores: `[n]` float32 for each graph, one score per judged configuration.
    figures: cost of training and ranking, by name.
  """

  examined: Examined | None
  scores: list[np.ndarray]
  figures: dict[str, Any]


class Diverged(Exception):
  """The training loss is not finite."""


class Steps:
  """Takes training steps and measures the CPU seconds of those that compiled nothing."""

  def __init__(self, phase: training.Stage):
    self._phase, self._state = phase, parallel.replicate(phase.state)
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
    self._state, metrics = self._phase.train_step(self._state, next(self._phase.batches))
    self.loss = float(parallel.unreplicate(metrics)["loss"])
    self.taken += 1
    if self._compilations.count == compiled:
      self._timed += 1
      self._seconds += time.process_time() - started


class Examined:
  """Scores and judges a ranker on prepared graphs of a split that has labels.

  Args:
    job: job of the ranker.
    graphs: graphs prepared by that ranker.
    ids: configurations of each graph; by default those that the job's config judges.
  """

  def __init__(
      self, job: job_lib.Job, graphs: Sequence[Any], ids: Sequence[np.ndarray] | None = None):
    self._ranker, self._graphs = job.ranker, graphs
    self.ids = ids or [job.data.validation_ids(graph.name, graph.configs) for graph in graphs]
    self._chunk = job.config.eval.configs
    self._is_compiled = False

  def scores(self, scorer: Any, params: Any) -> tuple[list[np.ndarray], float]:
    """Scores of all graphs, and CPU seconds of scoring without compilation."""
    if not self._is_compiled:
      first = [ids[:self._chunk] for ids in self.ids]
      scorer(params, self._graphs, first)
      self._is_compiled = True
    started = time.process_time()
    scores = scorer(params, self._graphs, self.ids)
    return scores, time.process_time() - started

  def judge(self, scores: Sequence[np.ndarray]) -> dict[str, float]:
    """Metrics of scores, as means over graphs."""
    judged = judge.beside_labels(self._graphs, self.ids, scores)
    return judge.judge(judged, self._ranker.collection.slowdown_ks)[1]


def planned(job: job_lib.Job, steps: int) -> job_lib.Job:
  """The same job for about `steps` steps, in epochs short enough to be planned quickly."""
  epochs = max(1, steps // _STEPS_PER_EPOCH)
  of_each = max(1, round(steps / epochs / (1 + len(job.also))))  # collections take turns

  def lasting(part: job_lib.Job) -> job_lib.Job:
    config = part.config.copy_and_resolve_references()
    config.train.epochs, config.batch.slates_per_epoch = epochs, of_each * config.batch.graphs
    return dataclasses.replace(part, config=config)

  return dataclasses.replace(lasting(job), also=tuple(map(lasting, job.also)))


def phase_of(
    job: job_lib.Job, prepared: job_lib.Prepared, folder: Path, *, steps: int
) -> training.Stage:
  """The first stage of training; a second stage, of the head alone, is left out of the race."""
  job = planned(job, steps)
  return training.first_stage(training.parts_of(job, prepared), folder)


def seconds_per_step(job: job_lib.Job, prepared: job_lib.Prepared) -> float:
  """Mean CPU seconds of a training step, from some timed steps; 0 if each of them compiled."""
  with tempfile.TemporaryDirectory() as folder:
    steps = Steps(phase_of(job, prepared, Path(folder), steps=2 * _TIMED_STEPS))
    while steps.taken < 2 * _TIMED_STEPS and not (
        steps.seconds > _TIMED_SECONDS or steps.taken >= _TIMED_STEPS and steps.mean_seconds):
      steps.take()
  return steps.mean_seconds


def judged_split(job: job_lib.Job) -> str:
  """The split to judge on: `test` for own programs; the released test splits have no labels."""
  return "test" if job.data.collection.name == OWN else "valid"


def train(
    config, folder: Path, *, budget: float = np.inf, steps: int = 0,
    ids: Sequence[np.ndarray] | None = None,
) -> Trained:
  """Trains a ranker for `budget` CPU seconds or for `steps` steps, and scores the judged split.

  Args:
    config: config of the ranker.
    folder: folder for files of its training.
    budget: CPU seconds of training.
    steps: number of steps, whatever they cost; 0 = as many as the budget allows.
    ids: configurations of each graph to judge; by default those of the config.

  Raises:
    Diverged: the loss is not finite.
  """
  job, compilations = job_lib.Job.of(config), timing.Compilations()
  folder.mkdir()
  prepared = job_lib.prepare(job, folder, resume=False)
  timed = 0.0 if steps else seconds_per_step(job, prepared)
  total = steps or max(1, round(budget / max(timed, 1e-6)))
  phase = phase_of(job, prepared, folder, steps=total)
  taking, total = Steps(phase), phase.epochs * phase.plan.steps_per_epoch
  chooses = judged_split(job) != "valid"
  valid = Examined(job, prepared.valid, None if chooses else ids)
  chosen, params = _best_of(
      taking, phase, valid if chooses else None, total=total, budget=budget)
  peak_mib = log.peak_memory()[1] / 2**20
  examined = Examined(job, job.prepare(job_lib.judged(job.data.load(
      config.data_root, judged_split(job)))), ids) if chooses else valid
  scores, seconds = examined.scores(phase.scorer, params)
  return Trained(examined, scores, chosen | {
      "parameters": sum(leaf.size for leaf in jax.tree.leaves(phase.state.params)),
      "steps": taking.taken, "planned_steps": total,
      "step_ms": 1e3 * (taking.mean_seconds or timed),  # all steps may have compiled
      "train_cpu_s": taking.seconds, "compile_s": compilations.seconds, "rank_cpu_s": seconds,
      "peak_mib": peak_mib})


def _best_of(
    steps: Steps, phase: training.Stage, examined: Examined | None, *, total: int, budget: float
) -> tuple[dict[str, float], Any]:
  """Takes all steps; returns the last parameters, or the best of `_STATES` on `examined`."""
  saved = {max(1, total >> halvings) for halvings in range(_STATES)} if examined else set()
  best = -np.inf, 0, None  # quality, steps, parameters
  while steps.taken < total and steps.seconds < budget:
    steps.take()
    if not np.isfinite(steps.loss):
      raise Diverged(f"the loss is {steps.loss} after {steps.taken} of {total} steps")
    if steps.taken in saved:
      quality = examined.judge(examined.scores(phase.scorer, steps.params)[0])["kendaltau"]
      best = max(best, (quality, steps.taken, jax.device_get(steps.params)),
                 key=lambda state: state[:2])
  if examined is None:
    return {}, steps.params
  return {"valid_kendaltau": best[0], "chosen_steps": best[1]}, best[2]


def measure(
    members: Sequence[Any], folder: Path, *, budget: float = np.inf, steps: int = 0
) -> dict[str, Any]:
  """Quality, cost and versions of one ranker, or of an ensemble.

  Args:
    members: the config of each member.
    folder: folder for files of their training.
    budget: CPU seconds of training for all members together, in equal parts.
    steps: number of steps of each member; 0 = as many as the budget allows.

  Returns:
    Figures by name, or the error alone if the loss of a member was not finite.
  """
  trained, ids = [], None
  for number, config in enumerate(members):
    try:
      member = train(
          config, folder / str(number), budget=budget / len(members), steps=steps, ids=ids)
      # All members are judged on the graphs of the first one, since more copies would count in
      # peak memory, and on its configurations, which the seed of its config draws.
      ids = ids or member.examined.ids
      trained.append(member._replace(examined=None) if trained else member)
    except Diverged as error:
      return {"error": str(error)}
  (examined, scores, figures), *others = trained
  if others:
    of_each = [member.figures for member in trained]
    figures = {name: sum(found[name] for found in of_each) for name in _SUMS} | {
        "step_ms": float(np.mean([found["step_ms"] for found in of_each])),
        "peak_mib": max(found["peak_mib"] for found in of_each)}
    scores = [np.mean([_COMBINE(part) for part in parts], axis=0)
              for parts in zip(*(member.scores for member in trained))]
  return examined.judge(scores) | figures | {
      "members": len(trained), "machine": timing.machine(), "versions": log.versions()}
