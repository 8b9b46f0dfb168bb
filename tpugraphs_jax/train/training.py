"""A run, from its config to its files.

    config -> data, ranker -> graphs, features beside them -> plan -> state, step, batches -> loop
           -> model -> evaluation, ranked configurations

Most rankers train in one stage. Fine-tuning of the head (+F) is a second stage, which begins with
the parameters of the first. `train.step` computes the loss of a step. `train.loop` decides which
evaluation is the best, and its parameters are written to `model.npz` at once.

One network can be trained on several layout collections (`data.also`, 5th place): their training
graphs form one list. Validation on the collection of the config chooses the model. After training
every collection is evaluated and ranked. Results of further collections go to subfolders
(`also/layout_nlp_default`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
from pathlib import Path
import time
from typing import Any

from flax import linen as nn
import jax
import numpy as np
import optax

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
from tpugraphs_jax.infra import console, files, machine, parallel
from tpugraphs_jax.metrics import SAMPLE
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.base import Family
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.rankers.scorer import Scorer
from tpugraphs_jax.rankers.segments.family import HEAD_FOLDER, Segments
from tpugraphs_jax.train import evaluation, log, loop, results
from tpugraphs_jax.train.experiment import Experiment, keep_folds, load_graphs, transforms_digest
from tpugraphs_jax.train.step import make_train_step, TrainState

_UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


# A run.


def run(
  config: Config,
  workdir: Path,
  *,
  do: Sequence[str] = ("train", "evaluate", "predict"),
  resume: bool = False,
  split: str = "",
) -> None:
  """Trains, evaluates and ranks.

  Args:
    config: see `configs/`; `config.data_root` is the folder of the data.
    workdir: folder for checkpoints, metrics and results.
    do: steps to take, always in the order train, evaluate, predict; without `train` a step uses the
      model in `workdir`.
    resume: continue the run in `workdir`.
    split: the split to evaluate (default `valid`) or to rank (default `test`).

  Raises:
    ValueError: a link in `workdir`, which may come from somebody else: writes would follow it.
  """
  files.check_plain(workdir)
  experiment = Experiment.of(config)
  for _, folder in experiment.evaluations(workdir):
    files.tidy(folder)
  if "train" in do:
    if "predict" in do:
      results.check_ranked(experiment, split=split or "test")
    train(experiment, workdir, resume=resume)
  if not {"evaluate", "predict"} & set(do):
    return
  experiment = dataclasses.replace(experiment, ranker=Ranker.load(workdir, config))
  keep_folds(experiment, workdir)
  judged = ("valid", "test") if config.data.folds and not split else (split,)
  for each, folder in experiment.evaluations(workdir):
    if "evaluate" in do:
      if folder != workdir:
        results.begin_summary(config, folder, each.data.collection)
      for one in judged:
        results.evaluate(each, folder, split=one)
    if "predict" in do:
      results.predict(each.data, config.data_root, each.ranker, folder, split=split or "test")


def train(experiment: Experiment, workdir: Path, *, resume: bool = False) -> None:
  """Fits transforms and trains. `train.result` chooses the model: best or last evaluation."""
  config, started = experiment.config, time.monotonic()
  check_machine(config)
  fields = model_file.fingerprint(config.to_dict())
  loop.check_workdir(workdir, resume=resume, config=fields, digests=transforms_digest(workdir))
  results.announce(experiment)
  # One run at a time may write to the folder.
  with files.hold(workdir) if machine.is_primary() else contextlib.nullcontext():
    graphs, valid = load_graphs(experiment, workdir, resume=resume)
    with results.interruptions(workdir):
      stage, _ = begin(experiment, graphs, workdir)
      results.begin_summary(config, workdir, experiment.data.collection)
      console.say(results.banner(experiment, stage, graphs, valid, workdir))
      valid = sample_graphs(config, valid)
      result = _train_stages(experiment, stage, graphs, valid, workdir, resume=resume)
    seconds = time.monotonic() - started
    section = results.of_training(config, result, graphs=len(valid), seconds=seconds)
    results.update_summary(workdir, training=section)


def check_machine(config: Config) -> None:
  """Refuses (ValueError) a batch size or determinism that the devices do not support."""
  parallel.per_device(config.batch.graphs, field="batch.graphs")
  parallel.warn_of_slow_sums()
  if config.train.deterministic:
    parallel.check_deterministic()


def _train_stages(
  experiment: Experiment,
  stage: loop.Stage,
  graphs: list,
  valid: list,
  workdir: Path,
  *,
  resume: bool,
) -> loop.TrainResult:
  """Trains the network, then, with `segments.finetune.epochs`, the head alone (+F)."""
  train_one = functools.partial(
    train_stage, experiment, valid=valid, resume=resume, digests=transforms_digest(workdir)
  )
  names = [graph.name for graph in graphs]
  write = functools.partial(_write_model, experiment.ranker, workdir, names)
  segments = experiment.config.segments
  if segments is None or not segments.finetune.epochs:
    return train_one(stage, experiment.ranker.scorer, folder=workdir, on_best=write)
  params = train_one(stage, experiment.ranker.scorer, folder=workdir).state.eval_params
  console.say(f"the first stage is done: next, the {HEAD_FOLDER} alone")
  family, folder = experiment.ranker.family, workdir / HEAD_FOLDER
  assert isinstance(family, Segments)
  head, sums = family.head_stage(params, graphs, folder)
  epochs, rate = segments.finetune.epochs, segments.finetune.learning_rate
  stage, _ = begin(
    experiment, sums, folder, family=head, params=params, epochs=epochs, learning_rate=rate
  )
  return train_one(stage, Scorer(head), folder=folder, on_best=write)


def train_stage(
  experiment: Experiment,
  stage: loop.Stage,
  scorer: Scorer,
  valid: Sequence[Any],
  folder: Path,
  *,
  resume: bool,
  digests: Mapping[str, str] | None = None,
  on_best: loop.OnBest | None = None,
) -> loop.TrainResult:
  """Runs the training loop of a stage.

  Args:
    experiment: with fitted transforms.
    stage: its state, step and batches.
    scorer: scores validation graphs with the parameters of the stage.
    valid: graphs to judge, from `sample_graphs`.
    folder: for the files of the stage.
    resume: continue from the newest checkpoint of the folder.
    digests, on_best: see `loop.train`.
  """
  config = experiment.config

  def evaluate(params: optax.Params, step: int) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    ids = sample_ids(config, valid, step)
    scores = scorer(params, valid, ids, permutations=1)
    judged = evaluation.with_labels(valid, ids, scores)
    rows, means = evaluation.evaluate(judged, experiment.ranker.collection.slowdown_ks)
    named = {evaluation.mean_name(name): mean for name, mean in means.items()}
    return named, evaluation.by_graph(rows)

  return loop.train(
    stage,
    evaluate,
    folder,
    on_best=on_best,
    resume=resume,
    about=config.to_dict(),
    config=model_file.fingerprint(config.to_dict()),
    digests=digests,
    profiled_steps=config.profiled_steps,
  )


@parallel.primary_only
def _write_model(
  ranker: Ranker, workdir: Path, names: list[str], params: optax.Params, step: int, metrics: dict
) -> None:
  """Writes `model.npz` with the best parameters so far; `names` are of the training graphs."""
  about = {"step": step, SAMPLE: metrics, "versions": log.versions(), "training_graphs": names}
  ranker.save(workdir / model_file.MODEL_FILE, params, about)


def sample_graphs(config: Config, graphs: list[Any]) -> list[Any]:
  """The validation graphs that training judges, by `train.valid_sampling`.

  `fixed` takes all graphs. `slates` takes graphs with at least `batch.min_configs` configurations;
  with `batch.drop_remainder` it leaves out the last graphs if they do not fill a batch, as the
  official code does.

  Args:
    config: of the run.
    graphs: prepared validation graphs.

  Raises:
    ValueError: with `slates`, no graph has enough configurations.
  """
  batch = config.batch
  if config.train.valid_sampling == "fixed":
    return graphs
  graphs = [graph for graph in graphs if len(graph.configs) >= batch.min_configs]
  if not graphs:
    raise ValueError(
      f"no validation graph has batch.min_configs={batch.min_configs} "
      "configurations: set train.valid_sampling to fixed"
    )
  if batch.drop_remainder and len(graphs) > batch.graphs:
    graphs = graphs[: len(graphs) // batch.graphs * batch.graphs]
  return graphs


def sample_ids(config: Config, graphs: Sequence[Any], step: int) -> list[np.ndarray]:
  """Numbers `[n]` int64 of the configurations that an evaluation judges, for each graph.

  `fixed` draws `train.valid_configs` configurations, equal in every evaluation. `slates` draws
  slates as in training, new slates for each evaluation.

  Args:
    config: of the run.
    graphs: from `sample_graphs`.
    step: training steps before the evaluation.
  """
  if config.train.valid_sampling == "fixed":
    rng, most = np.random.default_rng(config.seed), config.train.valid_configs
    return [selection.some_configs(len(graph.configs), most, rng) for graph in graphs]
  rng, batch = np.random.default_rng([config.seed, 3, step]), config.batch
  return [config_draw(graph.configs.label, batch.configs, batch.sampling)(rng) for graph in graphs]


# From graphs to a state, a step and batches.


def begin(
  experiment: Experiment,
  graphs: Sequence[Any],
  folder: Path,
  *,
  family: Family | None = None,
  params: optax.Params | None = None,
  epochs: int | None = None,
  learning_rate: float | None = None,
) -> tuple[loop.Stage, BatchPlan]:
  """State, step and batches of a stage, and the plan of its batches.

  Args:
    experiment: with fitted transforms.
    graphs: prepared training graphs.
    folder: for files of the family.
    family: in place of the family of the experiment.
    params: first parameters; initialised from the seed unless given.
    epochs, learning_rate: in place of `train.epochs` and `optimizer.learning_rate`.

  Raises:
    ValueError: graphs that the family cannot train on.
  """
  config, family = experiment.config, family or experiment.ranker.family
  family.check_graphs(graphs)
  epochs = epochs or config.train.epochs
  plan = plan_of(config, family, graphs, experiment.data.targets, epochs=epochs)
  metric = evaluation.mean_name(config.train.best_metric)
  schedule = loop.Schedule(config.train, epochs, plan.steps_per_epoch, metric)
  first = first_batch(config, family, plan)
  if params is None:
    params = init_params(family.network, first, seed=config.seed)
  options = config.optimizer
  if learning_rate is not None:
    options = dataclasses.replace(options, learning_rate=learning_rate)
  optimizer = family.optimizer(options.create(schedule.total_steps))
  step = step_of(config, family.network, optimizer)
  batches = load_batches(config, family, plan, steps=schedule.total_steps)
  step, batches = family.training(
    step, batches, params=params, batch=first, graphs=graphs, workdir=folder
  )
  state, rate = TrainState.create(params, optimizer), options.rate_after(schedule.total_steps)
  return loop.Stage(state, step, batches, schedule, rate), plan


def step_of(
  config: Config,
  network: nn.Module,
  optimizer: optax.GradientTransformation,
  *,
  devices: Sequence[jax.Device] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
  """`make_train_step` with the losses, the seed, the chunks and the clipping of a config."""
  return make_train_step(
    network,
    optimizer,
    config.loss,
    seed=config.seed,
    config_chunk=config.batch.config_chunk,
    clip_lookups=config.optimizer.clip_norm_per_variable > 0,
    devices=devices,
  )


def plan_of(
  config: Config, family: Family, graphs: Sequence[Any], targets: Callable, *, epochs: int
) -> BatchPlan:
  """The plan of the batches of a stage.

  Args:
    config: of the run.
    family: with fitted transforms.
    graphs: prepared training graphs.
    targets: training targets, `(configs, ids [n] int64) -> [n] float32`.
    epochs: length of the stage.
  """
  batch, configs = config.batch, [graph.configs for graph in graphs]
  every = config.seed if batch.graph_sampling == EVERY else None
  sampler = ConfigSampler(
    configs, count=batch.configs, sampling=batch.sampling, targets=targets, every=every
  )
  return BatchPlan(
    graphs,
    slates_per_step=batch.graphs,
    devices=parallel.device_count(),
    draw=family.draw(graphs, sampler),
    seed=config.seed,
    epochs=epochs,
    slates_per_epoch=batch.slates_per_epoch,
    drop_remainder=batch.drop_remainder,
    weights=graph_weights(configs, batch.graph_sampling, batch.configs),
  )


def first_batch(config: Config, family: Family, plan: BatchPlan) -> Any:
  """The first batch of one device, which sets the shapes of parameters."""
  return family.assemble(
    plan.slates(0, 0), plan.budget(0), graphs=plan.slates_per_device, configs=config.batch.configs
  )


def load_batches(config: Config, family: Family, plan: BatchPlan, *, steps: int) -> Iterator[Any]:
  """The part of this process in the batches of `steps` steps, with a leading device axis."""
  local, configs = parallel.local_device_count(), config.batch.configs
  first = parallel.process_index() * local
  assemble = functools.partial(family.assemble, graphs=plan.slates_per_device, configs=configs)
  batches = Batches(plan, steps, range(first, first + local), assemble, family.stack)
  return training_batches(batches, threads=config.data.loader_threads)


def init_params(network: nn.Module, batch: Any, *, seed: int) -> optax.Params:
  """Initial parameters of a network, from a batch of one device."""
  # Runs once: on CPUs, optimising the program takes longer than running it.
  is_cpu = jax.default_backend() == "cpu"
  init = jax.jit(network.init, compiler_options=_UNOPTIMISED if is_cpu else None)
  return init(jax.random.key(seed), batch)["params"]
