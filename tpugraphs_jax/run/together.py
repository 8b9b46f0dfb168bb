"""One network for several collections, such as programs and kernels (5th place).

An epoch of the run is one epoch of each collection, their steps in random order. The first
collection is the run's own: its config says how to train, and its validation graphs judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from tpugraphs_jax.data.plan import Batches, BatchPlan, training_batches
from tpugraphs_jax.data.batching import Budget
from tpugraphs_jax.run import phases
from tpugraphs_jax.serve.ranker import Ranker
from tpugraphs_jax.train import state as state_lib


class Part(NamedTuple):
  """A collection of a run.

  Attributes:
    config: of the collection.
    ranker: with fitted transforms.
    graphs: training graphs that it has prepared.
    targets: what the model should predict.
  """

  config: ml_collections.ConfigDict
  ranker: Ranker
  graphs: Sequence[Any]
  targets: phases.Targets


class Turns:
  """Whose turn a step is: a pure function of the seed and the step's number.

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
    """The number of a step's collection, and that of the step among the collection's own."""
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
  """Random access source: step number to the batches of the collection whose turn it is."""

  def __init__(self, sources: Sequence[Batches], turns: Turns, steps: int):
    self._sources, self._turns, self._steps = sources, turns, steps

  def __len__(self) -> int:
    return self._steps

  def __getitem__(self, step: int) -> Any:
    which, own = self._turns.turn(step)
    return self._sources[which][own]


def phase(parts: Sequence[Part]) -> phases.Phase:
  """Training of one network on all collections; the first one's scorer judges it.

  Raises:
    ValueError: the collections need parameters of different shapes.
  """
  config, ranker, *_ = parts[0]
  epochs, options = config.train.epochs, config.optimizer
  plans = [phases.plan_of(part.config, part.ranker.batcher, part.graphs, part.targets,
                          epochs=epochs) for part in parts]
  turns = Turns(plans, seed=config.seed)
  steps = epochs * turns.steps_per_epoch
  optimizer = state_lib.create_optimizer(total_steps=steps, **options)
  first = [phases.first_batch(part.config, part.ranker.batcher, plan)
           for part, plan in zip(parts, plans)]
  params = phases.init_params(ranker.model, first[0], seed=config.seed)
  for part, batch in zip(parts[1:], first[1:]):
    _check_same_shapes(part.ranker, batch, params)
  of_kind = {type(batch): phases.make_step(part.config, part.ranker.model, optimizer)
             for part, batch in zip(parts, first)}
  sources = [
      phases.source_of(part.config, part.ranker.batcher, plan, steps=epochs * plan.steps_per_epoch)
      for part, plan in zip(parts, plans)]
  return phases.Phase(
      state_lib.TrainState.create(params, optimizer), turns,
      lambda state, batch: of_kind[type(batch)](state, batch),
      training_batches(
          _InTurns(sources, turns, steps), threads=config.data.loader_threads),
      ranker.scorer(), epochs, state_lib.learning_rates(total_steps=steps, **options))


def _check_same_shapes(ranker: Ranker, batch: Any, params: Any) -> None:
  found = jax.eval_shape(ranker.model.init, jax.random.key(0), batch)["params"]
  shapes = lambda tree: {jax.tree_util.keystr(path): leaf.shape
                         for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
  ours, theirs = shapes(params), shapes(found)
  if differ := sorted(name for name in ours.keys() | theirs.keys()
                      if ours.get(name) != theirs.get(name)):
    raise ValueError(
        f"data.also has {ranker.collection.name}, which needs other parameters than the run's own "
        f"collection: {differ[0]} is {theirs.get(differ[0])} there and {ours.get(differ[0])} here. "
        "Leave it out of data.also, or take data.config_transform=none, which keeps all columns")
