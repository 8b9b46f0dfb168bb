"""A run, from its config to its files.

    config -> collections, ranker -> graphs, features beside them -> plan -> state, step, batches
           -> loop -> model -> evaluation, ranked configurations

Most rankers train in one phase. Fine-tuning of the head (+F) is a second phase, which begins with
the parameters of the first. `train.step` computes the loss of a step. `train.loop` decides which
evaluation is the best, and its parameters are written to `model.npz` at once.

One network can be trained on several layout collections (`data.also`, 5th place): their training
graphs form one list. Validation on the collection of the config chooses the model. After training
every collection is evaluated and ranked. Results of further collections go to subfolders
(`also/layout_nlp_default`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
  graph_weights,
  training_batches,
)
from tpugraphs_jax.data.selection import Data
from tpugraphs_jax.infra import console, files, machine, parallel
from tpugraphs_jax.metrics import SAMPLE
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.family import Family, Phase
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.train import evaluation, log, loop, results
from tpugraphs_jax.train.loading import (
  data_of,
  keep_folds,
  load_graphs,
  transforms_digest,
  with_folders,
)
from tpugraphs_jax.train.session import check_workdir, Evaluate, Run, Training
from tpugraphs_jax.train.step import make_train_step, TrainState
from tpugraphs_jax.train.timetable import Timetable

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
  ranker, collections = Ranker(config), data_of(config)
  for _, folder in with_folders(collections, workdir):
    files.tidy(folder)
  if "train" in do:
    if "predict" in do:
      results.check_ranked(collections, split=split or "test")
    train_ranker(ranker, collections, workdir, resume=resume)
  if not {"evaluate", "predict"} & set(do):
    return
  ranker = Ranker.load(workdir, config)
  keep_folds(collections, workdir)
  judged = ("valid", "test") if config.data.folds and not split else (split,)
  for data, folder in with_folders(collections, workdir):
    if "evaluate" in do:
      if folder != workdir:
        results.begin_summary(config, folder, data)
      for name in judged:
        results.evaluate(ranker, data, folder, split=name)
    if "predict" in do:
      results.predict(data, ranker, folder, split=split or "test")


def train_ranker(
  ranker: Ranker, collections: Sequence[Data], workdir: Path, *, resume: bool = False
) -> None:
  """Fits transforms and trains. `train.result` chooses the model: best or last evaluation.

  Args:
    ranker: without transforms.
    collections: from `data_of`.
    workdir: see `run`.
    resume: continue the run in `workdir`.
  """
  config, data, started = ranker.config, collections[0], time.monotonic()
  check_machine(config)
  fingerprint = model_file.fingerprint(config.to_dict())
  shared = Run(resume=resume, config=fingerprint, digests=transforms_digest(workdir))
  check_workdir(workdir, shared)
  results.announce(config, data)
  # One run at a time may write to the folder.
  with files.hold(workdir) if machine.is_primary() else contextlib.nullcontext():
    with console.working("reading the data"):
      graphs, valid = load_graphs(ranker, collections, workdir, resume=resume)
    shared = dataclasses.replace(
      shared,
      about=config.to_dict(),
      digests=transforms_digest(workdir),
      profiled_steps=config.profiled_steps,
    )
    with results.interruptions(workdir):
      phase = ranker.family.first_phase(graphs, workdir)
      training = begin(phase, plan_batches(phase, data.targets))
      results.begin_summary(config, workdir, data)
      console.say(results.banner(config, collections, training, graphs, valid, workdir))
      valid = sample_graphs(config, valid)
      save_model = functools.partial(_save_model, ranker, workdir, [g.name for g in graphs])
      while True:
        evaluate = evaluation_of(phase.family, valid, data.collection.slowdown_ks)
        save = save_model if phase.is_last else None
        result = loop.train(training, evaluate, phase.folder, shared, save_model=save)
        if phase.is_last:
          break
        phase = phase.family.next_phase(phase, result.state.eval_params)
        training = begin(phase, plan_batches(phase, data.targets))
    seconds = time.monotonic() - started
    section = results.training_section(config, result, graphs=len(valid), seconds=seconds)
    results.update_summary(workdir, training=section)


def check_machine(config: Config) -> None:
  """Refuses (ValueError) a batch size or determinism that the devices do not support."""
  parallel.per_device(config.batch.graphs, field="batch.graphs")
  parallel.warn_of_slow_sums()
  if config.train.deterministic:
    parallel.check_deterministic()


@parallel.primary_only
def _save_model(
  ranker: Ranker, workdir: Path, names: list[str], params: optax.Params, step: int, metrics: dict
) -> None:
  """Writes `model.npz` with the parameters of an evaluation; `names` are of the training graphs."""
  about = {"step": step, SAMPLE: metrics, "versions": log.versions(), "training_graphs": names}
  ranker.save(workdir / model_file.MODEL_FILE, params, about)


# Evaluations during training.


def evaluation_of(family: Family, graphs: Sequence[Any], ks: Sequence[int]) -> Evaluate:
  """The function that judges parameters on a sample of configurations, for `loop.train`.

  Args:
    family: of the network.
    graphs: from `sample_graphs`.
    ks: the k of top-k slowdown.
  """

  def evaluate(params: optax.Params, step: int) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    ids = sample_ids(family.config, graphs, step)
    scores = family.scores(params, graphs, ids, permutations=1)
    rows, means = evaluation.evaluate(evaluation.with_labels(graphs, ids, scores), ks)
    named = {evaluation.mean_name(name): mean for name, mean in means.items()}
    return named, evaluation.by_graph(rows)

  return evaluate


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
  return [config_draw(graph.configs.labels, batch.configs, batch.sampling)(rng) for graph in graphs]


# From graphs to a state, a step, batches and a timetable.


def plan_batches(phase: Phase, targets: Callable) -> BatchPlan:
  """The plan of the batches of a phase.

  Args:
    phase: its family has fitted transforms.
    targets: training targets, `(configs, ids [n] int64) -> [n] float32`.

  Raises:
    ValueError: graphs that the family cannot train on.
  """
  family, graphs = phase.family, phase.graphs
  family.check_graphs(graphs)
  config, batch = family.config, family.config.batch
  configs = [graph.configs for graph in graphs]
  every = config.seed if batch.graph_sampling == "every_config" else None
  sampler = ConfigSampler(
    configs, count=batch.configs, sampling=batch.sampling, targets=targets, every=every
  )
  return BatchPlan(
    graphs,
    slates_per_step=batch.graphs,
    devices=parallel.device_count(),
    draw=family.draw(graphs, sampler),
    seed=config.seed,
    epochs=phase.epochs,
    slates_per_epoch=batch.slates_per_epoch,
    drop_remainder=batch.drop_remainder,
    weights=graph_weights(configs, batch.graph_sampling, batch.configs),
  )


def begin(phase: Phase, plan: BatchPlan) -> Training:
  """The first state, the step, the batches and the timetable of a phase.

  Args:
    phase: its family has fitted transforms.
    plan: of the batches.
  """
  family, config, params = phase.family, phase.family.config, phase.params
  steps, metric = (
    phase.epochs * plan.steps_per_epoch,
    evaluation.mean_name(config.train.best_metric),
  )
  rate = phase.optimizer.rate_after(steps)
  timetable = Timetable(config.train, phase.epochs, plan.steps_per_epoch, metric, rate)
  assemble = functools.partial(
    family.assemble, graphs=plan.slates_per_device, configs=config.batch.configs
  )
  first = assemble(plan.slates(0, 0), plan.budget(0))  # sets the shapes of parameters
  if params is None:
    params = init_params(family.network, first, seed=config.seed)
  optimizer = family.constrain(phase.optimizer.create(steps))
  train_step = make_step(config, family.network, optimizer)
  local = parallel.local_device_count()
  first_device = parallel.process_index() * local
  devices = range(first_device, first_device + local)
  source = Batches(plan, steps, devices, assemble, family.stack)
  train_step, batches = family.attach_readouts(
    train_step,
    training_batches(source, threads=config.data.loader_threads),
    params=params,
    batch=first,
    graphs=phase.graphs,
    folder=phase.folder,
  )
  return Training(TrainState.create(params, optimizer), train_step, batches, timetable)


def make_step(
  config: Config,
  network: nn.Module,
  optimizer: optax.GradientTransformation,
  devices: Sequence[jax.Device] | None = None,
) -> Callable:
  """The training step of a config; arguments as of `make_train_step`."""
  return make_train_step(
    network,
    optimizer,
    config.loss,
    seed=config.seed,
    config_chunk=config.batch.config_chunk,
    clip_lookups=config.optimizer.clip_norm_per_variable > 0,
    devices=devices,
  )


def init_params(network: nn.Module, batch: Any, *, seed: int) -> optax.Params:
  """Initial parameters of a network, from a batch of one device."""
  # Runs once: on CPUs, optimising the program takes longer than running it.
  is_cpu = jax.default_backend() == "cpu"
  init = jax.jit(network.init, compiler_options=_UNOPTIMISED if is_cpu else None)
  return init(jax.random.key(seed), batch)["params"]
