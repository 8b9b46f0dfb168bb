"""Train, evaluate and predict: the jobs of a run, from a config to files in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
from pathlib import Path
import time
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from tpugraphs_jax import console, files as files_lib, parallel
from tpugraphs_jax.data import features, sampling
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.run import banner, phases, results, summary, together
from tpugraphs_jax.run.job import Job, judged, trainable
from tpugraphs_jax.serve import artefact, judge, saved
from tpugraphs_jax.serve.ranker import Ranker
from tpugraphs_jax.train import log, loop

MODES = ("train", "evaluate", "predict", "all")


def run(
    config: ml_collections.ConfigDict, workdir: Path, *, mode: str = "all", resume: bool = False,
    split: str = "test",
) -> None:
  """One job; `config.data_root` names the data.

  Args:
    config: see `configs/`.
    workdir: folder for checkpoints, metrics and results.
    mode: one of `MODES`.
    resume: go on with the run in `workdir`.
    split: which one is ranked.
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
      _use_saved(part.ranker, folder / saved.TRANSFORMS_FILE)
      part.ranker.params = own.params
    if mode in ("evaluate", "all"):
      results.evaluate(part, folder)
    if mode in ("predict", "all"):
      results.predict(part.data, config.data_root, part.ranker, folder, split=split)


def train(job: Job, workdir: Path, *, resume: bool = False) -> loop.TrainResult:
  """Fits transforms, trains, keeps the best checkpoint by `config.train.best_metric`."""
  config = job.config
  parallel.per_device(config.batch.graphs, field="batch.graphs")
  loop.check_workdir(workdir, resume=resume, config=saved.fingerprint(config.to_dict()),
                     files=_digests(job, workdir))
  with files_lib.held(workdir) if parallel.is_primary() else contextlib.nullcontext():
    return _train_alone(job, workdir, resume=resume)


def _train_alone(job: Job, workdir: Path, *, resume: bool) -> loop.TrainResult:
  """Trains in a folder that no other run writes in."""
  config, started = job.config, time.monotonic()
  prepared = prepare(job, workdir, resume=resume)
  phase = phase_of(job, prepared, workdir)
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


class Prepared(NamedTuple):
  """Graphs with fitted transforms.

  Attributes:
    train: training graphs.
    valid: labelled validation graphs.
    also: training graphs of each of the job's other collections.
    files: SHA-256 of the files with the transforms, as checkpoints note them.
  """

  train: list[Any]
  valid: list[Any]
  also: list[list[Any]]
  files: dict[str, str]


def phase_of(job: Job, prepared: Prepared, workdir: Path) -> phases.Phase:
  """The first phase of training; `workdir` is for files of its own."""
  config, targets = job.config, job.data.targets
  if not job.also:
    return phases.first_phase(config, job.ranker, prepared.train, targets, workdir)
  return together.phase([
      together.Part(part.config, part.ranker, graphs, part.data.targets)
      for part, graphs in zip((job, *job.also), (prepared.train, *prepared.also))])


def prepare(job: Job, workdir: Path, *, resume: bool) -> Prepared:
  """Loads, fits and prepares graphs; the raw ones are not kept."""
  config, data = job.config, job.data
  train_graphs, *also = (
      trainable(part, part.data.load(config.data_root, "train")) for part in (job, *job.also))
  valid_graphs = judged(data.load(config.data_root, "valid"))
  if not valid_graphs:
    raise ValueError(f"no labelled validation graph of {data.collection.name} in "
                     f"{config.data_root}; choosing the best checkpoint needs at least one")
  _fit_once(job, train_graphs, also, workdir, resume=resume)
  files = _digests(job, workdir)
  log.write_manifest(workdir, config.to_dict())
  valid = job.prepare(valid_graphs)
  for part in (job, *job.also):  # errors show before training
    for graph in valid_graphs if part is job else part.data.load(config.data_root, "valid"):
      part.data.validation_ids(graph.name, graph.configs)
  return Prepared(job.prepare(train_graphs), valid, [
      other.prepare(graphs) for other, graphs in zip(job.also, also)], files)


def _fit_once(
    job: Job, graphs: Sequence[OpGraph], also: Sequence[Sequence[OpGraph]], workdir: Path, *,
    resume: bool,
) -> None:
  """Fits the transforms; a run that goes on keeps those that it began with."""
  files = {folder / saved.TRANSFORMS_FILE: part.ranker for part, folder in job.placed(workdir)}
  are_there = parallel.from_primary([resume and path.exists() for path in files])
  if not all(are_there):
    job.fit(graphs, also)
  for is_there, (path, ranker) in zip(are_there, files.items()):
    if is_there:
      _use_saved(ranker, path)
    elif parallel.is_primary():
      path.parent.mkdir(parents=True, exist_ok=True)
      features.save(path, ranker.transforms)


def _digests(job: Job, workdir: Path) -> dict[str, str]:
  """SHA-256 of the files with the transforms, of those that are there."""
  files = [folder / saved.TRANSFORMS_FILE for _, folder in job.placed(workdir)]
  return saved.digests([path for path in files if path.exists()], workdir)


def _use_saved(ranker: Ranker, path: Path) -> None:
  """Gives a ranker the transforms that process 0 finds in a file."""
  found = features.load(path) if parallel.is_primary() else None
  ranker.use_transforms(parallel.from_primary(found), where=path)


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
    scores = ranker.score(phase.scorer, params, valid, ids, permutations=1)
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
        part.ranker.save(folder / artefact.FILE, params, about)

  return write


def sampled_ids(config: ml_collections.ConfigDict, graphs: Sequence[Any]) -> list[np.ndarray]:
  """Configurations judged during training, `[n]` int64: a seeded sample of each graph."""
  rng = np.random.default_rng(config.seed)
  return [sampling.some_configs(len(graph.configs), config.train.valid_configs, rng)
          for graph in graphs]
