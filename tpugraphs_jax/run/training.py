"""Train, evaluate and predict: what a run does, from a config to files in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
from pathlib import Path
import time
from typing import Any

import ml_collections
import numpy as np

from tpugraphs_jax import console, files as files_lib, parallel
from tpugraphs_jax.data import selection
from tpugraphs_jax.run import banner, job as job_lib, phases, results, summary
from tpugraphs_jax.run.job import Job, Prepared
from tpugraphs_jax.serve import judge, saved
from tpugraphs_jax.serve.ranker import Ranker
from tpugraphs_jax.train import log, loop

MODES = ("train", "evaluate", "predict", "all")


def run(
    config: ml_collections.ConfigDict, workdir: Path, *, mode: str = "all", resume: bool = False,
    split: str = "",
) -> None:
  """One job; `config.data_root` names the data.

  Args:
    config: see `configs/`.
    workdir: folder for checkpoints, metrics and results.
    mode: one of `MODES`.
    resume: go on with the run in `workdir`.
    split: which one is evaluated or ranked; unless given, valid is evaluated and test ranked.
  """
  job = Job.of(config)
  if parallel.is_primary():
    for _, folder in job.placed(workdir):
      files_lib.tidy(folder)
  if mode in ("train", "all"):
    train(job, workdir, resume=resume)
  if mode == "train":
    return
  own = Ranker.load(workdir, config.to_dict())
  # The run's own collection comes last: once it is judged, the run is done.
  for part, folder in reversed(job.placed(workdir)):
    if part is job:
      part = dataclasses.replace(job, ranker=own)
    else:
      job_lib.use_saved(part.ranker, folder / saved.TRANSFORMS_FILE)
      part.ranker.params = own.params
    if mode in ("evaluate", "all"):
      results.evaluate(part, folder, split=split)
    if mode in ("predict", "all"):
      results.predict(part.data, config.data_root, part.ranker, folder,
                      split=split or "test")


def train(job: Job, workdir: Path, *, resume: bool = False) -> loop.TrainResult:
  """Fits transforms, trains, keeps the best checkpoint by `config.train.best_metric`."""
  config = job.config
  parallel.per_device(config.batch.graphs, field="batch.graphs")
  loop.check_workdir(workdir, resume=resume, config=saved.fingerprint(config.to_dict()),
                     files=job_lib.digests(job, workdir))
  with files_lib.held(workdir) if parallel.is_primary() else contextlib.nullcontext():
    return _train_alone(job, workdir, resume=resume)


def _train_alone(job: Job, workdir: Path, *, resume: bool) -> loop.TrainResult:
  """Trains in a folder that no other run writes in."""
  config, started = job.config, time.monotonic()
  prepared = job_lib.prepare(job, workdir, resume=resume)
  phase = phases.first_phase(job.parts(prepared), workdir)
  for part, folder in job.placed(workdir):
    summary.begin(part.config, folder, part.data.collection.name)
  if parallel.is_primary():
    console.say(banner.lines(
        config, job.data.collection.name, phase, prepared.train, prepared.valid, workdir,
        also={part.data.collection.name: len(graphs)
              for part, graphs in zip(job.also, prepared.also)}))
  with summary.interruptions(workdir):
    result = _train_phases(job, phase, prepared, workdir, resume=resume)
  summary.update(workdir, training=summary.of_training(
      config, result, graphs=len(prepared.valid), seconds=time.monotonic() - started))
  return result


def _train_phases(
    job: Job, phase: phases.Phase, prepared: Prepared, workdir: Path, *, resume: bool
) -> loop.TrainResult:
  """Runs a phase and those that follow it; how the last one ended."""
  while True:
    result = train_phase(
        job, phase, prepared.valid, workdir, resume=resume, files=prepared.files)
    if phase.following is None:
      return result
    console.say("the first phase is done: now the head alone")
    phase = phase.following(result.state)


def train_phase(
    job: Job, phase: phases.Phase, valid: Sequence[Any], workdir: Path, *, resume: bool,
    files: Mapping[str, str] | None = None,
) -> loop.TrainResult:
  """Runs the training loop once, judged on a seeded sample of each validation graph.

  `files` are those that its checkpoints belong to, see `Prepared`.
  """
  config, ranker = job.config, job.ranker
  ids, options = sampled_ids(config, valid), config.train

  def evaluate(params: Any) -> dict[str, Any]:
    scores = phase.scorer(params, valid, ids, permutations=1)
    rows, means = judge.judge(ranker.collection, valid, ids, scores)
    return {judge.mean_name(name): mean for name, mean in means.items()} | judge.by_graph(rows)

  schedule = loop.Schedule(
      total_epochs=phase.epochs, steps_per_epoch=phase.plan.steps_per_epoch,
      eval_every_epochs=options.eval_every_epochs, early_stop_epochs=options.early_stop_epochs,
      best_metric=judge.mean_name(options.best_metric), log_every_steps=options.log_every_steps,
      checkpoint_every_steps=options.checkpoint_every_steps, profile_steps=config.profile_steps)
  experiment = loop.Experiment(
      phase.train_step, phase.batches, evaluate, phase.learning_rate,
      _model_writer(job, phase, workdir))
  return loop.train(
      phase.state, experiment, schedule, workdir / phase.folder, resume=resume,
      about=config.to_dict(), config=saved.fingerprint(config.to_dict()), files=files)


def _model_writer(
    job: Job, phase: phases.Phase, workdir: Path
) -> Callable[[Any, int, dict[str, float]], None]:
  """Writes each `model.npz` whenever validation finds better parameters of the last phase."""
  def write(params: Any, step: int, metrics: dict[str, float]) -> None:
    if phase.following is None and parallel.is_primary():
      about = {"step": step, loop.SAMPLE: metrics, "versions": log.versions()}
      for part, folder in job.placed(workdir):
        part.ranker.save(folder / saved.FILE, params, about)

  return write


def sampled_ids(config: ml_collections.ConfigDict, graphs: Sequence[Any]) -> list[np.ndarray]:
  """Configurations judged during training, `[n]` int64: a seeded sample of each graph."""
  rng = np.random.default_rng(config.seed)
  return [selection.some_configs(len(graph.configs), config.train.valid_configs, rng)
          for graph in graphs]
