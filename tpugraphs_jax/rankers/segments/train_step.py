"""Training steps on segments: where the values of the other segments come from.

Each is `(state, batch) -> (state, metrics)` like the step of `train.step`, of fixed
shapes whatever the graphs' sizes: from a history table, recomputed without
gradient in batches of the same shapes, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax import parallel
from tpugraphs_jax.rankers.segments.batches import Others, SegmentBatch, Stale
from tpugraphs_jax.rankers.segments.history import History, Keys
from tpugraphs_jax.rankers.segments.model import READOUT_COLLECTION, SegmentModel
from tpugraphs_jax.train.state import TrainState

Step = Callable[[TrainState, SegmentBatch], tuple[TrainState, dict[str, jax.Array]]]


def without_others(step: Step) -> Step:
  """The fresh segments stand for all: eta = J / S, no table.

  Args:
    step: from `make_train_step` with `collections=(READOUT_COLLECTION,)`.
  """
  def train_step(state, batch):
    state, metrics = step(state, batch)
    return state.replace(extra=()), metrics

  return train_step


def with_history(step: Step, history: History, keys: Keys) -> Step:
  """The others' values come from the table, and the fresh ones go there.

  Args:
    step: as in `without_others`.
    history: the table, changed by every step.
    keys: its entries.
  """
  def train_step(state, batch):
    others, fresh = keys.rows(batch)
    state, metrics = step(state, batch._replace(stale=history.read(others)))
    (values,) = state.extra[READOUT_COLLECTION]["fresh"]
    history.write(fresh, values)
    return state.replace(extra=()), metrics

  return train_step


def with_recomputed(step: Step, model: SegmentModel, *, width: int) -> Step:
  """The others are recomputed with the current parameters, without gradient.

  Args:
    step: as in `without_others`.
    model: computes the readouts.
    width: numbers P of a readout.
  """
  def add(total, params, others: Others):
    values = model.apply({"params": params}, others.batch, method="segment_readout")
    return total.at[others.graph].add(values, mode="drop")

  add = parallel.pmap(add, donate_argnums=0, local=True)

  def train_step(state, batch):
    total = np.zeros((*batch.target.shape, width), np.float32)
    for others in batch.others:
      total = add(total, state.params, others)
    known = np.ones((*batch.target.shape, 1), bool)
    stale = Stale(jnp.expand_dims(total, -2), known)
    state, metrics = step(state, batch._replace(others=(), stale=stale))
    return state.replace(extra=()), metrics

  return train_step
