"""The stages of training: a family, its batches and a step, run by the training loop.

Most families have one stage. Fine-tuning of the head (+F) is a second stage, which starts
from the last state of the first. One network can be trained on several collections, such as
programs and kernels (5th place): an epoch is then one epoch of each collection, their steps
in random order. The first collection is the run's own: its config says how to train, and
its validation graphs judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import ml_collections
import numpy as np

from tpugraphs_jax import losses, parallel
from tpugraphs_jax.data import selection
from tpugraphs_jax.data.batching import Budget
from tpugraphs_jax.data.plan import BatchPlan, Batches, ConfigSampler, graph_weights, training_batches
from tpugraphs_jax.rankers.base import Family, SECOND_STAGE
from tpugraphs_jax.rankers.scorer import Scorer
from tpugraphs_jax.train import state as state_lib, step as step_lib

_UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
Targets = Callable[[Any, np.ndarray], np.ndarray]  # (configs, ids [n]) -> [n] float32


class Plan(Protocol):
  """What is known of the batches of a run: `BatchPlan`, or `Turns`."""

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
  scorer: Scorer  # judges validation graphs meanwhile
  epochs: int
  learning_rate: Callable[[int], float]  # by steps taken
  folder: str = ""  # under the working folder
  following: Callable[[state_lib.TrainState], Phase] | None = None  # from the last state


class Part(NamedTuple):
  """A collection that a network is trained on.

  Attributes:
    config: of the collection.
    family: of the network, with fitted transforms.
    graphs: training graphs that the family has prepared.
    targets: what the network should predict.
    collection: its name, for errors.
  """

  config: ml_collections.ConfigDict
  family: Family
  graphs: Sequence[Any]
  targets: Targets
  collection: str = ""


def first_phase(parts: Sequence[Part], workdir: Path) -> Phase:
  """Training of one network from the start, on one collection or several.

  Args:
    parts: the run's own collection, then the others (`data.also`).
    workdir: for files of the family's own.

  Raises:
    ValueError: graphs that the family cannot train on, or collections that need parameters
      of different shapes.
  """
  config, family, graphs, *_ = parts[0]
  phase = _phase(parts, workdir, epochs=config.train.epochs, optimizer=config.optimizer)
  if not family.has_second_stage:
    return phase

  def following(state: state_lib.TrainState) -> Phase:
    folder = workdir / SECOND_STAGE
    stage = family.second_stage(state.eval_params, graphs, folder)
    part = parts[0]._replace(family=stage.family, graphs=stage.graphs)
    found = _phase([part], folder, epochs=stage.epochs, optimizer=stage.optimizer,
                   params=state.eval_params)
    return dataclasses.replace(found, folder=SECOND_STAGE)

  return dataclasses.replace(phase, following=following)


def _phase(
    parts: Sequence[Part], workdir: Path, *, epochs: int, optimizer: Mapping[str, Any],
    params: Any = None,
) -> Phase:
  """A stage of so many epochs, from `params` or from the start."""
  config, family, graphs, *_ = parts[0]
  for part in parts:
    part.family.check_graphs(part.graphs)
  plans = [plan_of(part, epochs=epochs) for part in parts]
  firsts = [first_batch(part, plan) for part, plan in zip(parts, plans)]
  if params is None:
    params = init_params(family.network, firsts[0], seed=config.seed)
  for part, batch in zip(parts[1:], firsts[1:]):
    _check_same_shapes(part, batch, params)
  plan = plans[0] if len(plans) == 1 else Turns(plans, seed=config.seed)
  steps = epochs * plan.steps_per_epoch
  change = family.optimizer(state_lib.create_optimizer(total_steps=steps, **optimizer))
  sources = [source_of(part, own, steps=epochs * own.steps_per_epoch)
             for part, own in zip(parts, plans)]
  source = sources[0] if len(parts) == 1 else _InTurns(sources, plan, steps)
  train_step, batches = family.training(
      _step_of(parts, firsts, change),
      training_batches(source, threads=config.data.loader_threads),
      params=params, batch=firsts[0], graphs=graphs, workdir=workdir)
  return Phase(
      state_lib.TrainState.create(params, change), plan, train_step, batches, family.scorer(),
      epochs, state_lib.learning_rates(total_steps=steps, **optimizer))


def plan_of(part: Part, *, epochs: int) -> BatchPlan:
  """The batches of a run over prepared graphs."""
  config, batch = part.config, part.config.batch
  configs = [graph.configs for graph in part.graphs]
  sampler = ConfigSampler(
      configs, count=batch.configs, sampling=batch.sampling, targets=part.targets)
  return BatchPlan(
      part.graphs, slates_per_step=batch.graphs, devices=parallel.device_count(),
      draw=part.family.draw(part.graphs, sampler), seed=config.seed, epochs=epochs,
      slates_per_epoch=batch.slates_per_epoch,
      weights=graph_weights(configs, batch.graph_sampling))


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


def loss_options(config: ml_collections.ConfigDict) -> losses.Options:
  """Options of the losses that a config names; ValueError for impossible ones."""
  loss = config.loss
  return losses.Options(
      loss.pair_reduction, loss.margin, loss.score_norm_clip,
      losses.Noise(loss.noise, selection.ORIGINS[config.batch.target]))


def make_step(
    config: ml_collections.ConfigDict, network: Any, optimizer: Any, *, sown: Sequence[str] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]:
  """The mapped training step of a network, its metrics `[devices]`; `sown` is returned besides.

  `devices` are the ones of this run, or others to compile for.
  """
  loss = config.loss
  objective = step_lib.Objective(
      losses.parse_losses(loss.losses), loss.temperature, loss_options(config), loss.kernel_l2,
      loss.activity_l2)
  return step_lib.make_train_step(
      network, optimizer, objective, seed=config.seed, config_chunk=config.batch.config_chunk,
      collections=sown, devices=devices)


def _step_of(parts: Sequence[Part], firsts: Sequence[Any], optimizer: Any) -> Callable:
  """The step of each kind of batch, chosen by the batch that comes."""
  of_kind = {
      type(batch): make_step(part.config, part.family.network, optimizer, sown=part.family.sown)
      for part, batch in zip(parts, firsts)}
  if len(of_kind) == 1:
    return next(iter(of_kind.values()))
  return lambda state, batch: of_kind[type(batch)](state, batch)


class Turns:
  """Which collection a step belongs to: a pure function of the seed and the step's number.

  Args:
    plans: the batches of each collection.
    seed: of the order.
  """

  def __init__(self, plans: Sequence[BatchPlan], *, seed: int):
    self._plans, self._seed = plans, seed
    self._each = [plan.steps_per_epoch for plan in plans]
    self.steps_per_epoch = sum(self._each)
    self.budgets = [budget for plan in plans for budget in plan.budgets]

  def turn(self, step: int) -> tuple[int, int]:
    """The number of a step's collection, and the step's number among the collection's own."""
    epoch, index = divmod(step, self.steps_per_epoch)
    order = np.random.default_rng([self._seed, 2, epoch]).permutation(
        np.repeat(np.arange(len(self._each)), self._each))
    which = int(order[index])
    return which, epoch * self._each[which] + int(np.count_nonzero(order[:index] == which))

  def budget(self, step: int) -> Budget:
    """What the batches of a step have room for."""
    which, own = self.turn(step)
    return self._plans[which].budget(own)


class _InTurns:
  """Random access source: step number to the batches of the step's collection."""

  def __init__(self, sources: Sequence[Batches], turns: Turns, steps: int):
    self._sources, self._turns, self._steps = sources, turns, steps

  def __len__(self) -> int:
    return self._steps

  def __getitem__(self, step: int) -> Any:
    which, own = self._turns.turn(step)
    return self._sources[which][own]


def _check_same_shapes(part: Part, batch: Any, params: Any) -> None:
  found = jax.eval_shape(part.family.network.init, jax.random.key(0), batch)["params"]
  shapes = lambda tree: {jax.tree_util.keystr(path): leaf.shape
                         for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
  ours, theirs = shapes(params), shapes(found)
  if differ := sorted(name for name in ours.keys() | theirs.keys()
                      if ours.get(name) != theirs.get(name)):
    raise ValueError(
        f"data.also has {part.collection}, which needs other parameters than the run's own "
        f"collection: {differ[0]} is {theirs.get(differ[0])} there and {ours.get(differ[0])} here. "
        "Leave it out of data.also, or take data.config_transform=none, which keeps all columns")
