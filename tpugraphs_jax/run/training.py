"""Training: the stages of a job, and the whole way of a run from a config to files.

Most families have one stage. Fine-tuning of the head (+F) is a second stage, which starts
from the last state of the first. One network can be trained on several layout collections
(`data.also`, 5th place): their training graphs are one list. Validation graphs of the run's own
collection choose the checkpoint. Behind the training every collection is judged and ranked,
the others in folders of their own (`also/layout_nlp_default`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
from pathlib import Path
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from tpugraphs_jax import losses
from tpugraphs_jax.data import selection
from tpugraphs_jax.data.plan import (
  Batches,
  BatchPlan,
  config_draw,
  ConfigSampler,
  EVERY,
  graph_weights,
  training_batches,
)
from tpugraphs_jax.infra import console, parallel
from tpugraphs_jax.infra import files as files_lib
from tpugraphs_jax.rankers.base import Family, SECOND_STAGE
from tpugraphs_jax.rankers.scorer import Scorer
from tpugraphs_jax.run import job as job_lib
from tpugraphs_jax.run import results
from tpugraphs_jax.run.job import Job, Prepared
from tpugraphs_jax.serve import judge
from tpugraphs_jax.serve import ranker as ranker_lib
from tpugraphs_jax.train import log, loop
from tpugraphs_jax.train import state as state_lib
from tpugraphs_jax.train import step as step_lib

_UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


# A run.


def run(
    config: ml_collections.ConfigDict, workdir: Path, *, mode: str = "all", resume: bool = False,
    split: str = "",
) -> None:
  """Trains, evaluates and ranks; `config.data_root` names the data.

  Args:
    config: see `configs/`.
    workdir: folder for checkpoints, metrics and results.
    mode: one of `MODES`.
    resume: go on with the run in `workdir`.
    split: the one that is evaluated or ranked; unless given, valid is evaluated and test ranked.
  """
  job = Job.of(config)
  if parallel.is_primary():
    for _, folder in job.judged_in(workdir):
      files_lib.tidy(folder)
  if mode == "all":
    results.check_ranked(job, split=split or "test")
  if mode in ("train", "all"):
    train(job, workdir, resume=resume)
  if mode == "train":
    return
  job = dataclasses.replace(job, ranker=ranker_lib.Ranker.load(workdir, config.to_dict()))
  for each, folder in job.judged_in(workdir):
    if mode in ("evaluate", "all"):
      if folder != workdir:
        results.begin_summary(config, folder, each.data.collection.name)
      results.evaluate(each, folder, split=split)
    if mode in ("predict", "all"):
      results.predict(each.data, config.data_root, each.ranker, folder, split=split or "test")


def train(job: Job, workdir: Path, *, resume: bool = False) -> loop.TrainResult:
  """Fits transforms, trains, and keeps the best checkpoint by `config.train.best_metric`."""
  config = job.config
  parallel.per_device(config.batch.graphs, field="batch.graphs")
  parallel.warn_of_slow_sums()
  if config.train.deterministic:
    parallel.check_deterministic()
  loop.check_workdir(workdir, resume=resume, config=ranker_lib.fingerprint(config.to_dict()),
                     files=job_lib.digests(workdir))
  # No other run may write in the folder meanwhile.
  with files_lib.held(workdir) if parallel.is_primary() else contextlib.nullcontext():
    started = time.monotonic()
    prepared = job_lib.prepare(job, workdir, resume=resume)
    stage = first_stage(part_of(job, prepared), workdir)
    results.begin(job, stage, prepared, workdir)
    with results.interruptions(workdir):
      result = _train_stages(job, stage, prepared, workdir, resume=resume)
    judged, _ = validation_sample(config, prepared.valid)(result.step)
    results.update_summary(workdir, training=results.of_training(
        config, result, graphs=len(judged), seconds=time.monotonic() - started))
    return result


def _train_stages(
    job: Job, stage: Stage, prepared: Prepared, workdir: Path, *, resume: bool
) -> loop.TrainResult:
  """Runs a stage and those that follow it; returns how the last one ended."""
  while True:
    result = train_stage(
        job, stage, prepared.valid, workdir, resume=resume, files=prepared.files)
    if stage.following is None:
      return result
    console.say("the first stage is done: now the head alone")
    stage = stage.following(result.state)


def train_stage(
    job: Job, stage: Stage, valid: Sequence[Any], workdir: Path, *, resume: bool,
    files: Mapping[str, str] | None = None,
) -> loop.TrainResult:
  """Runs the training loop once, judged on samples of the validation graphs.

  Args:
    job: with fitted transforms.
    stage: of the job.
    valid: prepared validation graphs.
    workdir: the working folder of the run.
    resume: go on from the stage's newest checkpoint.
    files: those that its checkpoints belong to, see `Prepared`.
  """
  config = job.config
  sample = validation_sample(config, valid)

  def evaluate(params: Any, step: int) -> dict[str, Any]:
    graphs, ids = sample(step)
    scores = stage.scorer(params, graphs, ids, permutations=1)
    rows, means = judge.judge(
        judge.beside_labels(graphs, ids, scores), job.ranker.collection.slowdown_ks)
    return {judge.mean_name(name): mean for name, mean in means.items()} | judge.by_graph(rows)

  options = loop.TrainOptions.of(config.train)
  schedule = loop.Schedule(options, stage.epochs, stage.plan.steps_per_epoch,
                           judge.mean_name(options.best_metric))
  experiment = loop.Experiment(
      stage.train_step, stage.batches, evaluate, stage.learning_rate,
      _model_writer(job, stage, workdir))
  return loop.train(
      stage.state, experiment, schedule, workdir / stage.folder, resume=resume,
      about=config.to_dict(), config=ranker_lib.fingerprint(config.to_dict()), files=files,
      profile_steps=config.profile_steps)


def _model_writer(
    job: Job, stage: Stage, workdir: Path
) -> Callable[[Any, int, dict[str, float]], None]:
  """Writes `model.npz` whenever validation finds better parameters of the last stage."""
  def write(params: Any, step: int, metrics: dict[str, float]) -> None:
    if stage.following is None and parallel.is_primary():
      about = {"step": step, loop.SAMPLE: metrics, "versions": log.versions()}
      job.ranker.save(workdir / ranker_lib.MODEL_FILE, params, about)

  return write


def validation_sample(
    config: ml_collections.ConfigDict, graphs: Sequence[Any]
) -> Callable[[int], tuple[Sequence[Any], list[np.ndarray]]]:
  """The graphs and configurations that are judged after a step, as `train.valid_sampling` says.

  `fixed` is a seeded sample of `train.valid_configs` configurations of every graph. `slates` draws
  slates as in training, anew after each step, of the graphs with at least `batch.min_configs`
  configurations; with `batch.drop_remainder` the last graphs that do not fill a batch are left
  out (official).

  Args:
    config: of the run.
    graphs: prepared validation graphs.

  Returns:
    `step -> (graphs, configurations [n] int64 of each)`.

  Raises:
    ValueError: with `slates`, no graph has enough configurations.
  """
  batch, seed = config.batch, config.seed
  if config.train.valid_sampling == "fixed":
    rng = np.random.default_rng(seed)
    ids = [selection.some_configs(len(graph.configs), config.train.valid_configs, rng)
           for graph in graphs]
    return lambda step: (graphs, ids)
  graphs = [graph for graph in graphs if len(graph.configs) >= batch.min_configs]
  if not graphs:
    raise ValueError(f"no validation graph has batch.min_configs={batch.min_configs} "
                     "configurations: set train.valid_sampling to fixed")
  if batch.drop_remainder and len(graphs) > batch.graphs:
    graphs = graphs[: len(graphs) // batch.graphs * batch.graphs]
  draws = [config_draw(graph.configs.label, batch.configs, batch.sampling) for graph in graphs]

  def slates(step: int) -> tuple[Sequence[Any], list[np.ndarray]]:
    rng = np.random.default_rng([seed, 3, step])
    return graphs, [draw(rng) for draw in draws]

  return slates


# The stages of a run.


@dataclasses.dataclass(frozen=True)
class Stage:
  """One run of the training loop."""

  state: state_lib.TrainState
  plan: BatchPlan
  train_step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
  batches: Any  # iterator that the loop can save and restore
  scorer: Scorer  # judges validation graphs meanwhile
  epochs: int
  learning_rate: Callable[[int], float]  # by steps taken
  folder: str = ""  # under the working folder
  following: Callable[[state_lib.TrainState], Stage] | None = None  # from the last state


class Part(NamedTuple):
  """What a stage trains.

  Attributes:
    config: of the run.
    family: of the network, with fitted transforms.
    graphs: training graphs that the family has prepared.
    targets: `(configs, ids [n] int64) -> [n] float32`, which the network should predict.
  """

  config: ml_collections.ConfigDict
  family: Family
  graphs: Sequence[Any]
  targets: Callable[[Any, np.ndarray], np.ndarray]


def part_of(job: Job, prepared: Prepared) -> Part:
  """What the first stage of a job trains."""
  return Part(job.config, job.ranker.family, prepared.train, job.data.targets)


def first_stage(part: Part, workdir: Path) -> Stage:
  """Training of a network from the start.

  Args:
    part: config, network and graphs.
    workdir: for files of the family's own.

  Raises:
    ValueError: graphs that the family cannot train on.
  """
  config, family, graphs, _ = part
  stage = _stage(part, workdir, epochs=config.train.epochs, optimizer=config.optimizer)
  if not family.has_second_stage:
    return stage

  def following(state: state_lib.TrainState) -> Stage:
    folder = workdir / SECOND_STAGE
    second = family.second_stage(state.eval_params, graphs, folder)
    found = _stage(part._replace(family=second.family, graphs=second.graphs), folder,
                   epochs=second.epochs, optimizer=second.optimizer, params=state.eval_params)
    return dataclasses.replace(found, folder=SECOND_STAGE)

  return dataclasses.replace(stage, following=following)


def _stage(
    part: Part, workdir: Path, *, epochs: int, optimizer: Mapping[str, Any], params: Any = None
) -> Stage:
  """A stage of so many epochs, from `params` or from the start."""
  config, family, graphs, _ = part
  family.check_graphs(graphs)
  plan = plan_of(part, epochs=epochs)
  batch = first_batch(part, plan)
  if params is None:
    params = init_params(family.network, batch, seed=config.seed)
  steps = epochs * plan.steps_per_epoch
  change = family.optimizer(state_lib.create_optimizer(total_steps=steps, **optimizer))
  train_step, batches = family.training(
      make_step(config, family.network, change, sown=family.sown),
      training_batches(source_of(part, plan, steps=steps), threads=config.data.loader_threads),
      params=params, batch=batch, graphs=graphs, workdir=workdir)
  return Stage(
      state_lib.TrainState.create(params, change), plan, train_step, batches, family.scorer(),
      epochs, state_lib.learning_rates(total_steps=steps, **optimizer))


def plan_of(part: Part, *, epochs: int) -> BatchPlan:
  """The batches of a run over prepared graphs."""
  config, batch = part.config, part.config.batch
  configs = [graph.configs for graph in part.graphs]
  sampler = ConfigSampler(
      configs, count=batch.configs, sampling=batch.sampling, targets=part.targets,
      every=config.seed if batch.graph_sampling == EVERY else None)
  return BatchPlan(
      part.graphs, slates_per_step=batch.graphs, devices=parallel.device_count(),
      draw=part.family.draw(part.graphs, sampler), seed=config.seed, epochs=epochs,
      slates_per_epoch=batch.slates_per_epoch, drop_remainder=batch.drop_remainder,
      weights=graph_weights(configs, batch.graph_sampling, batch.configs))


def first_batch(part: Part, plan: BatchPlan) -> Any:
  """The first batch of one device: gives the parameters their shapes."""
  return part.family.assemble(
      plan.slates(0, 0), plan.budget(0), graphs=plan.slates_per_device,
      configs=part.config.batch.configs)


def source_of(part: Part, plan: BatchPlan, *, steps: int) -> Batches:
  """This process's part of the batches of so many steps, by step."""
  first = parallel.process_index() * parallel.local_device_count()
  assemble = lambda slates, budget: part.family.assemble(
      slates, budget, graphs=plan.slates_per_device, configs=part.config.batch.configs)
  stack = lambda batches: parallel.stack_for_devices(part.family.align(batches))
  return Batches(
      plan, steps, range(first, first + parallel.local_device_count()), assemble, stack)


def init_params(network: Any, batch: Any, *, seed: int) -> Any:
  """Fresh parameters for batches like this one (of one device)."""
  # It runs once: on CPUs, optimising it takes longer than running it.
  is_cpu = jax.default_backend() == "cpu"
  init = jax.jit(network.init, compiler_options=_UNOPTIMISED if is_cpu else None)
  return init(jax.random.key(seed), batch)["params"]


def make_step(
    config: ml_collections.ConfigDict, network: Any, optimizer: Any, *, sown: Sequence[str] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]:
  """The mapped training step of a network, with metrics `[devices]`.

  Args:
    config: its `loss`, `seed` and `batch.config_chunk` are read.
    network: maps a batch to scores `[G, C]`.
    optimizer: changes the parameters.
    sown: collections of variables that the step returns besides.
    devices: to compile for; all devices of the run unless given.
  """
  return step_lib.make_train_step(
      network, optimizer, losses.LossOptions.of(config.loss), seed=config.seed, config_chunk=config.batch.config_chunk,
      collections=sown, devices=devices)
