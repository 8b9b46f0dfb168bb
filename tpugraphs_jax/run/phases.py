"""The phases of training: each a batcher, a step and a scorer, run by the training loop.

Whole graphs and Graph Segment Training have one phase; fine-tuning of the head (+F)
adds a second one, which starts from the last state of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_collections
import numpy as np

from tpugraphs_jax import losses, parallel
from tpugraphs_jax.data import sampling
from tpugraphs_jax.data.plan import Batches, BatchPlan, training_batches
from tpugraphs_jax.data.batching import Budget
from tpugraphs_jax.rankers.segments import batches as segment_batcher, finetune, history
from tpugraphs_jax.rankers.segments import model as segment_model, snapshots as snapshots_lib
from tpugraphs_jax.rankers.segments import train_step
from tpugraphs_jax.rankers.segments.batches import SegmentedGraph
from tpugraphs_jax.rankers.segments.head import HeadBatcher
from tpugraphs_jax.serve import saved
from tpugraphs_jax.serve.models import uses_history
from tpugraphs_jax.serve.ranker import Ranker
from tpugraphs_jax.train import state as state_lib, step as step_lib

Targets = Callable[[Any, np.ndarray], np.ndarray]  # (configs, ids [n]) -> [n] float32
_HISTORY_FOLDER = "history"


class Plan(Protocol):
  """What is known of the batches of a run: `data.plan.BatchPlan`, or `together.Turns`."""

  steps_per_epoch: int
  budgets: Sequence[Budget]

  def budget(self, step: int) -> Budget:
    """What the batches of a step have room for."""


@dataclasses.dataclass(frozen=True)
class Phase:
  """One run of the training loop."""

  state: state_lib.TrainState
  plan: Plan
  train_step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
  batches: Any  # iterator that the loop can save and restore
  scorer: Any  # judges validation graphs meanwhile
  epochs: int
  learning_rate: Callable[[int], float]  # by steps taken
  folder: str = ""  # under the working folder
  following: Callable[[state_lib.TrainState], Phase] | None = None  # from the last state


def first_phase(
    config: ml_collections.ConfigDict, ranker: Ranker, graphs: Sequence[Any], targets: Targets,
    workdir: Path,
) -> Phase:
  """Training from the start.

  Args:
    config: see `configs/`.
    ranker: with fitted transforms.
    graphs: training graphs that it has prepared.
    targets: what a model should predict.
    workdir: for files of the phase's own.
  """
  if config.task == "segments":
    return _segment_phase(config, ranker, graphs, targets, workdir)
  return _phase(config, ranker, graphs, targets)


def plan_of(
    config: ml_collections.ConfigDict, batcher: Any, graphs: Sequence[Any], targets: Targets, *,
    epochs: int,
) -> BatchPlan:
  """The batches of a run over prepared graphs."""
  batch, configs = config.batch, [graph.configs for graph in graphs]
  sampler = sampling.ConfigSampler(
      configs, count=batch.configs, sampling=batch.sampling, targets=targets)
  return BatchPlan(
      graphs, slates_per_step=batch.graphs, devices=parallel.device_count(),
      draw=batcher.draw(graphs, sampler), seed=config.seed, epochs=epochs,
      slates_per_epoch=batch.slates_per_epoch,
      weights=sampling.graph_weights(configs, batch.graph_sampling))


def first_batch(config: ml_collections.ConfigDict, batcher: Any, plan: BatchPlan) -> Any:
  """The first batch of one device: gives the parameters their shapes."""
  return batcher.assemble(
      plan.slates(0, 0), plan.budget(0), graphs=plan.slates_per_device,
      configs=config.batch.configs)


def source_of(
    config: ml_collections.ConfigDict, batcher: Any, plan: BatchPlan, *, steps: int
) -> Batches:
  """This process's part of the batches of so many steps, by step."""
  first = parallel.process_index() * parallel.local_device_count()
  assemble = lambda slates, budget: batcher.assemble(
      slates, budget, graphs=plan.slates_per_device, configs=config.batch.configs)
  stack = lambda batches: parallel.stack_for_devices(batcher.align(batches))
  return Batches(
      plan, steps, range(first, first + parallel.local_device_count()), assemble, stack)


def batches_of(
    config: ml_collections.ConfigDict, batcher: Any, plan: BatchPlan, *, steps: int
) -> Any:
  """Iterator over this process's part of the batches of so many steps."""
  return training_batches(
      source_of(config, batcher, plan, steps=steps), threads=config.data.loader_threads)


def init_params(model: Any, batch: Any, *, seed: int) -> Any:
  """Fresh parameters for batches like this one (of one device)."""
  return jax.jit(model.init)(jax.random.key(seed), batch)["params"]


def loss_options(config: ml_collections.ConfigDict) -> losses.Options:
  """Options of the losses that a config names; ValueError for impossible ones."""
  loss = config.loss
  return losses.Options(
      loss.pair_reduction, loss.margin, loss.score_norm_clip,
      losses.Noise(loss.noise, sampling.ORIGINS[config.batch.target]))


def make_step(
    config: ml_collections.ConfigDict, model: Any, optimizer: Any, *, sown: Sequence[str] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]:
  """The mapped training step of a model, its metrics `[devices]`; `sown` is returned besides.

  `devices` are those of this run, or others to compile for.
  """
  loss = config.loss
  return step_lib.make_train_step(
      model, optimizer, losses=losses.parse_losses(loss.losses), temperature=loss.temperature,
      loss_options=loss_options(config),
      kernel_l2=loss.kernel_l2, activity_l2=loss.activity_l2, seed=config.seed,
      config_chunk=config.batch.config_chunk, collections=sown, devices=devices)


def _phase(
    config: ml_collections.ConfigDict, ranker: Ranker, graphs: Sequence[Any], targets: Targets, *,
    sown: Sequence[str] = (),
) -> Phase:
  """Training of all parameters on batches of the ranker's own batcher."""
  epochs = config.train.epochs
  plan = plan_of(config, ranker.batcher, graphs, targets, epochs=epochs)
  steps = epochs * plan.steps_per_epoch
  optimizer = state_lib.create_optimizer(total_steps=steps, **config.optimizer)
  params = init_params(
      ranker.model, first_batch(config, ranker.batcher, plan), seed=config.seed)
  return Phase(
      state_lib.TrainState.create(params, optimizer), plan,
      make_step(config, ranker.model, optimizer, sown=sown),
      batches_of(config, ranker.batcher, plan, steps=steps), ranker.scorer(), epochs,
      state_lib.learning_rates(total_steps=steps, **config.optimizer))


def _segment_phase(
    config: ml_collections.ConfigDict, ranker: Ranker, graphs: Sequence[SegmentedGraph],
    targets: Targets, workdir: Path,
) -> Phase:
  """Training on segments, with the others' readouts from wherever the config says."""
  options = config.segments
  segment_batcher.check(graphs, fresh=options.fresh, max_nodes=options.max_nodes)
  phase = _phase(
      config, ranker, graphs, targets, sown=(segment_model.READOUT_COLLECTION,))
  if options.finetune.epochs:
    phase = dataclasses.replace(phase, following=functools.partial(
        _head_phase, config, ranker, graphs, targets, workdir))
  if not options.recompute and not uses_history(options):
    return dataclasses.replace(phase, train_step=train_step.without_others(phase.train_step))
  width = _readout_width(ranker.model, phase.state.params, first_batch(
      config, ranker.batcher, phase.plan))
  if options.recompute:
    return dataclasses.replace(phase, train_step=train_step.with_recomputed(
        phase.train_step, ranker.model, width=width))
  return _with_history(phase, options, graphs, workdir / _HISTORY_FOLDER, width=width)


def _readout_width(model: Any, params: Any, batch: Any) -> int:
  """Numbers P of a segment's readout."""
  readout = lambda params, batch: model.apply({"params": params}, batch, method="segment_readout")
  return jax.eval_shape(readout, params, batch.fresh).shape[-1]


def _with_history(
    phase: Phase, options: Mapping[str, Any], graphs: Sequence[SegmentedGraph], folder: Path, *,
    width: int,
) -> Phase:
  """The phase with a table, which is saved and restored with the position in the data."""
  keys = history.Keys.of(graphs)
  table = history.create(
      keys, width=width, dtype=options["history_dtype"], place=options["history_place"],
      folder=folder)
  snapshots = snapshots_lib.Snapshots(folder, keys, table)
  snapshots.check()
  return dataclasses.replace(
      phase, train_step=train_step.with_history(phase.train_step, table, keys),
      batches=snapshots_lib.BatchesWithHistory(phase.batches, snapshots))


def _head_phase(
    config: ml_collections.ConfigDict, ranker: Ranker, graphs: Sequence[SegmentedGraph],
    targets: Targets, workdir: Path, state: state_lib.TrainState,
) -> Phase:
  """Training of the head alone, on readouts of the trained backbone (+F)."""
  options, scorer = config.segments.finetune, ranker.scorer()
  rng = np.random.default_rng(config.seed)
  ids = [sampling.some_configs(len(graph.configs), options.configs, rng) for graph in graphs]
  known = finetune.refresh(
      scorer, state.eval_params, graphs, ids, workdir / saved.HEAD_FOLDER)
  batcher = HeadBatcher()
  plan = plan_of(config, batcher, known, targets, epochs=options.epochs)
  steps = options.epochs * plan.steps_per_epoch
  optimizer = finetune.head_optimizer(
      state_lib.create_optimizer(total_steps=steps, **options.optimizer), ranker.model)
  head = segment_model.HeadModel(ranker.model)
  return Phase(
      state_lib.TrainState.create(state.eval_params, optimizer), plan,
      make_step(config, head, optimizer), batches_of(config, batcher, plan, steps=steps),
      finetune.FrozenScorer(scorer), options.epochs,
      state_lib.learning_rates(total_steps=steps, **options.optimizer),
      folder=saved.HEAD_FOLDER)
