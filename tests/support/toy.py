"""A straight line fitted by the real optimiser and loop: the toy model of the tests."""

import dataclasses

import grain
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.infra import parallel
from tpugraphs_jax.optimizer import Optimizer
from tpugraphs_jax.rankers.config import TrainOptions
from tpugraphs_jax.train import loop, session
from tpugraphs_jax.train.step import TrainState
from tpugraphs_jax.train.timetable import Timetable

DEVICES = 4  # of all processes
STEPS_PER_EPOCH = 4
EPOCHS = 3
STEPS = STEPS_PER_EPOCH * EPOCHS

OPTIMIZER = Optimizer(
  learning_rate=0.1, schedule="cosine", warmup_fraction=0.2, accumulation_steps=2, average_decay=0.9
).create(STEPS)


def make_batch(index):
  """`[devices, 8]` inputs and targets, a pure function of the index."""
  rng = np.random.default_rng(index)
  return {
    "x": rng.normal(size=(DEVICES, 8)).astype(np.float32),
    "y": rng.normal(size=(DEVICES, 8)).astype(np.float32),
    "index": np.full(DEVICES, index, np.int32),
  }


def make_batches(size=100):
  """An iterator over `size` batches, whose position can be saved and restored."""
  return iter(grain.MapDataset.range(size).map(make_batch).to_iter_dataset())


def make_state():
  params = {"slope": jnp.asarray(0.3), "offset": jnp.asarray(-0.1)}
  return TrainState.create(params, OPTIMIZER).replace(extra=jnp.zeros(5))


def device_step(state, batch):
  """One step on one device; `extra` is a table of losses by index modulo 5."""

  def loss_of(params):
    error = params["slope"] * batch["x"] + params["offset"] - batch["y"]
    return jnp.mean(error**2)

  loss, grads = jax.value_and_grad(loss_of)(state.params)
  loss, grads = jax.lax.pmean((loss, grads), parallel.DEVICES)
  table = state.extra.at[batch["index"] % 5].add(loss)
  return state.apply_gradients(grads, OPTIMIZER, extra=table), {"loss": loss}


TRAIN_STEP = parallel.pmap(device_step, donate_argnums=0)


def evaluate(params, step):
  del step
  return {"opa": float(params["slope"]), "tau": float(params["offset"])}, {}


_OPTIONS = {field.name for field in dataclasses.fields(TrainOptions)} | {
  "learning_rate",
  "total_epochs",
  "steps_per_epoch",
  "metric",
}


def timetable(
  *,
  total_epochs=EPOCHS,
  steps_per_epoch=STEPS_PER_EPOCH,
  metric="opa",
  log_every_steps=100,
  learning_rate=lambda steps: 0.1,
  **options,
):
  options = TrainOptions(log_every_steps=log_every_steps, **options)
  return Timetable(options, total_epochs, steps_per_epoch, metric, learning_rate)


def train(
  workdir,
  state=None,
  *,
  train_step=TRAIN_STEP,
  batches=None,
  evaluate=evaluate,
  save_model=None,
  **changes,
):
  """Trains the straight line; `changes` are fields of the timetable and of `session.Run`."""
  options = {name: changes.pop(name) for name in _OPTIONS & changes.keys()}
  state, batches = state or make_state(), batches or make_batches()
  training = session.Training(state, train_step, batches, timetable(**options))
  return loop.train(training, evaluate, workdir, session.Run(**changes), save_model=save_model)
