"""Train, evaluate and predict: the jobs of a run, from a config to files in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
from pathlib import Path
import time
from typing import Any

import ml_collections
import numpy as np

from tpugraphs_jax import atomic, console, lock, losses, registry, submission
from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data import features, sampling, splits
from tpugraphs_jax.data.layout_data import LayoutData
from tpugraphs_jax.data.tile_data import TileData
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.predict import artefact, judge, saved
from tpugraphs_jax.predict.ensemble import Ensemble
from tpugraphs_jax.predict.ranker import Ranker
from tpugraphs_jax.run import banner, checks, phases, summary
from tpugraphs_jax.train import loop, parallel, report

MODES = ("train", "evaluate", "predict", "all")


@dataclasses.dataclass(frozen=True)
class Job:
  """What a config is made of.

  Attributes:
    config: see `configs/`; `config.data_root` names the data.
    data: loads graphs and says what is learnt from them.
    ranker: scores graphs.
  """

  config: ml_collections.ConfigDict
  data: TileData | LayoutData
  ranker: Ranker

  @classmethod
  def of(cls, config: ml_collections.ConfigDict) -> Job:
    """The job of a config, which is refused (ValueError) if it cannot work."""
    with config.unlocked():
      config.extensions = registry.import_extensions(config.extensions)
    checks.check(config)
    ranker = Ranker(config.to_dict())
    return cls(config, _data_of(config, ranker.collection), ranker)

  def prepare(self, graphs: Sequence[OpGraph]) -> list[Any]:
    """Graphs as the ranker's batcher wants them."""
    return [self.ranker.prepare(graph) for graph in graphs]

  def fit(self, graphs: Sequence[OpGraph]) -> None:
    """Fits the ranker's transforms on training graphs."""
    self.ranker.fit(graphs, [self.data.config_values(graph) for graph in graphs])


def run(
    config: ml_collections.ConfigDict, workdir: Path, *, mode: str = "all", resume: bool = False
) -> None:
  """One job; `config.data_root` names the data.

  Args:
    config: see `configs/`.
    workdir: folder for checkpoints, metrics and results.
    mode: one of `MODES`.
    resume: go on with the run in `workdir`.
  """
  job = Job.of(config)
  if parallel.is_primary():
    atomic.tidy(workdir)
  if mode in ("train", "all"):
    train(job, workdir, resume=resume)
  if mode == "train":
    return
  trained = dataclasses.replace(job, ranker=Ranker.load(workdir, config.to_dict()))
  if mode in ("evaluate", "all"):
    evaluate(trained, workdir)
  if mode in ("predict", "all"):
    predict(trained.data, config.data_root, trained.ranker, workdir)


def _data_of(
    config: ml_collections.ConfigDict, collection: Collection
) -> TileData | LayoutData:
  data, common = config.data, dict(
      skip_bad_files=config.data.skip_bad_files, target=config.batch.target)
  if collection.kind == "tile":
    return TileData(collection, **common)
  return LayoutData(
      collection, **common, store_dir=data.store_dir,
      duplicate_policy=data.duplicate_policy, entropy_threshold=data.entropy_threshold,
      max_configs=data.max_configs,
      indices_dir=config.eval.indices_dir, max_validated=config.eval.max_configs,
      seed=config.seed)


def train(job: Job, workdir: Path, *, resume: bool = False) -> loop.TrainResult:
  """Fits transforms, trains, keeps the best checkpoint by `config.train.best_metric`."""
  config = job.config
  parallel.per_device(config.batch.graphs, field="batch.graphs")
  loop.check_workdir(workdir, resume=resume, config=saved.fingerprint(config.to_dict()))
  with lock.held(workdir) if parallel.is_primary() else contextlib.nullcontext():
    return _train_alone(job, workdir, resume=resume)


def _train_alone(job: Job, workdir: Path, *, resume: bool) -> loop.TrainResult:
  """Trains in a folder that no other run writes in."""
  config, started = job.config, time.monotonic()
  prepared, valid = _prepare(job, workdir, resume=resume)
  phase = phases.first_phase(config, job.ranker, prepared, job.data.targets, workdir)
  name = job.data.collection.name
  summary.begin(config, workdir, name)
  if parallel.is_primary():
    console.say(banner.lines(config, name, phase, prepared, valid, workdir))
  with summary.interruptions(workdir):
    result = _train_phases(job, phase, valid, workdir, resume=resume)
  summary.update(workdir, training=summary.of_training(
      config, result, graphs=len(valid), seconds=time.monotonic() - started))
  return result


def _train_phases(
    job: Job, phase: phases.Phase, valid: Sequence[Any], workdir: Path, *, resume: bool
) -> loop.TrainResult:
  """Runs a phase and those that follow it; how the last one ended."""
  while True:
    result = train_phase(job, phase, valid, workdir, resume=resume)
    if phase.following is None:
      return result
    console.say("the first phase is done: now the head alone")
    phase = phase.following(result.state)


def _prepare(job: Job, workdir: Path, *, resume: bool) -> tuple[list[Any], list[Any]]:
  """Training and validation graphs with fitted transforms; the raw graphs are not kept."""
  config, data = job.config, job.data
  train_graphs = trainable(job, data.load(config.data_root, "train"))
  valid_graphs = judged(data.load(config.data_root, "valid"))
  if not valid_graphs:
    raise ValueError(f"no labelled validation graph of {data.collection.name} in "
                     f"{config.data_root}; choosing the best checkpoint needs at least one")
  _fit_once(job, train_graphs, workdir / saved.TRANSFORMS_FILE, resume=resume)
  report.write_manifest(workdir, config.to_dict())
  valid = job.prepare(valid_graphs)
  for graph in valid:
    data.validation_ids(graph.name, graph.configs)  # errors show before training
  return job.prepare(train_graphs), valid


def trainable(job: Job, graphs: Sequence[OpGraph]) -> list[OpGraph]:
  """Graphs that nothing speaks against; the others are named. ValueError if none is left."""
  least, data = job.config.batch.min_configs, job.data
  kept = splits.keep(
      graphs, "training", lambda configs: data.why_not_trained(configs, min_configs=least))
  if not kept:
    raise ValueError(
        f"none of the {len(graphs)} training graphs of {data.collection.name} can be trained on: "
        f"the lines above say why (batch.min_configs is {least})")
  return kept


def judged(graphs: Sequence[OpGraph]) -> list[OpGraph]:
  """Labelled graphs with at least two configurations; the others are named."""
  return splits.keep(graphs, "evaluation", splits.why_not_judged)


def _fit_once(job: Job, graphs: Sequence[OpGraph], path: Path, *, resume: bool) -> None:
  """Fits the transforms; a run that goes on keeps those that it began with."""
  if parallel.from_primary(resume and path.exists()):
    found = features.load(path) if parallel.is_primary() else None
    job.ranker.use_transforms(parallel.from_primary(found), where=path)
    return
  job.fit(graphs)
  if parallel.is_primary():
    features.save(path, job.ranker.transforms)


def train_phase(
    job: Job, phase: phases.Phase, valid: Sequence[Any], workdir: Path, *, resume: bool
) -> loop.TrainResult:
  """Runs the training loop once, judged on a seeded sample of each validation graph."""
  config, ranker = job.config, job.ranker
  ids, options = sampled_ids(config, valid), config.train

  def evaluate(params: Any) -> dict[str, float]:
    scores = ranker.score(phase.scorer, params, valid, ids, permutations=1)
    return judge.judge(ranker.collection, valid, ids, scores)[1]

  return loop.train(
      phase.state, train_step=phase.train_step, batches=phase.batches, evaluate=evaluate,
      workdir=workdir / phase.folder, total_epochs=phase.epochs,
      steps_per_epoch=phase.plan.steps_per_epoch, eval_every_epochs=options.eval_every_epochs,
      early_stop_epochs=options.early_stop_epochs, best_metric=options.best_metric,
      log_every_steps=options.log_every_steps,
      checkpoint_every_steps=options.checkpoint_every_steps, profile_steps=config.profile_steps,
      resume=resume, config=saved.fingerprint(config.to_dict()),
      on_best=_model_writer(ranker, phase, workdir))


def _model_writer(
    ranker: Ranker, phase: phases.Phase, workdir: Path
) -> Callable[[Any, int, dict[str, float]], None]:
  """Writes `model.npz` whenever validation finds better parameters of the last phase."""
  def write(params: Any, step: int, metrics: dict[str, float]) -> None:
    if phase.following is None and parallel.is_primary():
      about = {"step": step, "valid": metrics, "versions": report.versions()}
      ranker.save(workdir / artefact.FILE, params, about)

  return write


def sampled_ids(config: ml_collections.ConfigDict, graphs: Sequence[Any]) -> list[np.ndarray]:
  """Configurations judged during training, `[n]` int64: a seeded sample of each graph."""
  rng = np.random.default_rng(config.seed)
  return [sampling.some_configs(len(graph.configs), config.train.valid_configs, rng)
          for graph in graphs]


def evaluate(job: Job, workdir: Path) -> dict[str, float]:
  """Scores the validation split; writes what came of it and tells the means."""
  config, data, ranker, started = job.config, job.data, job.ranker, time.monotonic()
  graphs = job.prepare(judged(data.load(config.data_root, "valid")))
  name = ranker.collection.name
  if not graphs:
    console.say(f"{name}: no labelled graph in the validation split; nothing to score")
    return {}
  ids = [data.validation_ids(graph.name, graph.configs) for graph in graphs]
  scorer = ranker.scorer()
  scores = ranker.score(scorer, ranker.params, graphs, ids, progress=True)
  rows, means = judge.judge(ranker.collection, graphs, ids, scores)
  if config.eval.get("time"):
    for row, graph, chosen in zip(rows, graphs, ids):
      row["seconds"] = _scoring_seconds(ranker, scorer, graph, chosen)
  if parallel.is_primary():
    judge.write_csv(workdir / "validation.csv", rows)
    judge.write_scores(workdir / judge.SCORES_FILE, graphs, ids, scores)
    if ranker.collection.kind == "tile":
      judge.write_csv(workdir / judge.PROGRAMS_FILE, judge.program_rows(
          graphs, ids, scores, predicts=_predicts(config)))
    which, random = _which(config, graphs, ids), judge.random_order(ranker.collection, graphs, ids)
    summary.update(workdir, validation=summary.of_evaluation(
        means, random, which, ids, time.monotonic() - started))
    console.say(judge.summary(
        ranker.collection, rows, means, random=random, configurations=which))
  return means


def _predicts(config: ml_collections.ConfigDict) -> str:
  """What scores say of runtimes, see `losses.predicts`; with other targets their order."""
  is_official = config.batch.target == "official"
  return losses.predicts(losses.parse_losses(config.loss.losses)) if is_official else "order"


def _which(
    config: ml_collections.ConfigDict, graphs: Sequence[Any], ids: Sequence[np.ndarray]
) -> str:
  """Which configurations of each graph an evaluation judges, in words."""
  if all(len(chosen) == len(graph.configs) for chosen, graph in zip(ids, graphs)):
    return "all"
  if config.eval.get("indices_dir"):
    return "the published ones of each graph"
  return f"a seeded {config.eval.max_configs} of each graph"


def _scoring_seconds(ranker: Ranker, scorer: Any, graph: Any, ids: np.ndarray) -> float:
  """Seconds to score these configurations of a graph, without compilation."""
  score = lambda: ranker.score(scorer, ranker.params, [graph], [ids])
  score()
  started = time.monotonic()
  score()
  return time.monotonic() - started


def predict(
    data: TileData | LayoutData, data_root: str, ranker: Ranker | Ensemble, workdir: Path
) -> None:
  """Ranks the test split and writes results.csv in the form of a submission."""
  graphs = data.load(data_root, "test")
  scores = ranker.scores(graphs, progress=True)
  if parallel.is_primary():
    path, name = workdir / "results.csv", ranker.collection.name
    submission.write_results(path, name, {
        graph.name: np.argsort(s, kind="stable") for graph, s in zip(graphs, scores)})
    console.say(f"{name}: ranked {len(graphs)} test graphs, wrote {path}")
