"""Train, evaluate and predict: the jobs of a run, from a config to files in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
import time
from typing import Any

from absl import logging
import ml_collections
import numpy as np

from tpugraphs_jax import registry, submission
from tpugraphs_jax.data import features, sampling, splits
from tpugraphs_jax.data.layout_data import LayoutData
from tpugraphs_jax.data.tile_data import TileData
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.predict import artefact, judge, saved
from tpugraphs_jax.predict.ensemble import Ensemble
from tpugraphs_jax.predict.ranker import Ranker
from tpugraphs_jax.run import checks, phases
from tpugraphs_jax.train import loop, parallel, report

MODES = ("train", "evaluate", "predict", "all")


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
  record_extensions(config)
  checks.check(config)
  if mode in ("train", "all"):
    train(config, workdir, resume=resume)
  if mode == "train":
    return
  ranker = Ranker.load(workdir, config.to_dict())
  if mode in ("evaluate", "all"):
    evaluate(config, ranker, workdir)
  if mode in ("predict", "all"):
    predict(config, ranker, workdir)


def record_extensions(config: ml_collections.ConfigDict) -> None:
  """Imports the user's modules, and notes in the config where they were found."""
  with config.unlocked():
    config.extensions = registry.import_extensions(config.extensions)


def data_of(config: ml_collections.ConfigDict, ranker: Ranker) -> TileData | LayoutData:
  """The graphs that the config names."""
  data, common = config.data, dict(
      skip_bad_files=config.data.skip_bad_files, target=config.batch.target)
  if ranker.collection.kind == "tile":
    return TileData(ranker.collection, **common)
  return LayoutData(
      ranker.collection, **common, store_dir=data.store_dir,
      duplicate_policy=data.duplicate_policy, max_configs=data.max_configs,
      indices_dir=config.eval.indices_dir, max_validated=config.eval.max_configs,
      seed=config.seed)


def train(
    config: ml_collections.ConfigDict, workdir: Path, *, resume: bool = False
) -> loop.TrainResult:
  """Fits transforms, trains, keeps the best checkpoint by `config.train.best_metric`."""
  parallel.per_device(config.batch.graphs, field="batch.graphs")
  ranker = Ranker(config.to_dict())
  loop.check_workdir(workdir, resume=resume, config=saved.fingerprint(config.to_dict()))
  data = data_of(config, ranker)
  prepared, valid = _prepare(config, ranker, data, workdir, resume=resume)
  phase = phases.first_phase(config, ranker, prepared, data.targets, workdir)
  logging.info("%s: %d training graphs, %d validation graphs, %d steps per epoch",
               ranker.collection.name, len(prepared), len(valid), phase.plan.steps_per_epoch)
  while True:
    result = train_phase(config, ranker, phase, valid, workdir, resume=resume)
    if phase.following is None:
      return result
    phase = phase.following(result.state)


def _prepare(
    config: ml_collections.ConfigDict, ranker: Ranker, data: TileData | LayoutData, workdir: Path,
    *, resume: bool,
) -> tuple[list[Any], list[Any]]:
  """Training and validation graphs with fitted transforms; the raw graphs are not kept."""
  train_graphs = trainable(config, data, data.load(config.data_root, "train"))
  valid_graphs = judged(data.load(config.data_root, "valid"))
  if not valid_graphs:
    raise ValueError(f"no labelled validation graph of {ranker.collection.name} in "
                     f"{config.data_root}; choosing the best checkpoint needs at least one")
  _fit_once(ranker, data, train_graphs, workdir / saved.TRANSFORMS_FILE, resume=resume)
  report.write_manifest(workdir, config.to_dict())
  valid = [ranker.prepare(graph) for graph in valid_graphs]
  for graph in valid:
    data.validation_ids(graph.name, graph.configs)  # errors show before training
  return [ranker.prepare(graph) for graph in train_graphs], valid


def trainable(
    config: ml_collections.ConfigDict, data: TileData | LayoutData, graphs: Sequence[OpGraph]
) -> list[OpGraph]:
  """Graphs that nothing speaks against; the others are named. ValueError if none is left."""
  least = config.batch.min_configs
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


def _fit_once(
    ranker: Ranker, data: TileData | LayoutData, graphs: Sequence[OpGraph], path: Path, *,
    resume: bool,
) -> None:
  """Fits the transforms; a run that goes on keeps those that it began with."""
  if parallel.from_primary(resume and path.exists()):
    found = features.load(path) if parallel.is_primary() else None
    ranker.use_transforms(parallel.from_primary(found), where=path)
    return
  ranker.fit(graphs, [data.config_values(graph) for graph in graphs])
  if parallel.is_primary():
    features.save(path, ranker.transforms)


def train_phase(
    config: ml_collections.ConfigDict, ranker: Ranker, phase: phases.Phase,
    valid: Sequence[Any], workdir: Path, *, resume: bool,
) -> loop.TrainResult:
  """Runs the training loop once, judged on a seeded sample of each validation graph."""
  ids, options = sampled_ids(config, valid), config.train

  def evaluate(params: Any) -> dict[str, float]:
    scores = ranker.score(phase.scorer, params, valid, ids)
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


def evaluate(
    config: ml_collections.ConfigDict, ranker: Ranker, workdir: Path
) -> dict[str, float]:
  """Scores the validation split; writes validation.csv and prints the means."""
  data = data_of(config, ranker)
  graphs = [ranker.prepare(graph) for graph in judged(data.load(config.data_root, "valid"))]
  name = ranker.collection.name
  if not graphs:
    print(f"{name}: no labelled graph in the validation split; nothing to score")
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
    print(judge.summary(ranker.collection, rows, means), flush=True)
  return means


def _scoring_seconds(ranker: Ranker, scorer: Any, graph: Any, ids: np.ndarray) -> float:
  """Seconds to score these configurations of a graph, without compilation."""
  score = lambda: ranker.score(scorer, ranker.params, [graph], [ids])
  score()
  started = time.monotonic()
  score()
  return time.monotonic() - started


def predict(
    config: ml_collections.ConfigDict, ranker: Ranker | Ensemble, workdir: Path
) -> None:
  """Ranks the test split and writes results.csv in the form of a submission."""
  first = ranker.rankers[0] if isinstance(ranker, Ensemble) else ranker
  graphs = data_of(config, first).load(config.data_root, "test")
  scores = ranker.scores(graphs, progress=True)
  if parallel.is_primary():
    path, name = workdir / "results.csv", ranker.collection.name
    submission.write_results(path, name, {
        graph.name: np.argsort(s, kind="stable") for graph, s in zip(graphs, scores)})
    print(f"{name}: ranked {len(graphs)} test graphs, wrote {path}", flush=True)
