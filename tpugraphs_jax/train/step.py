"""The training step, written for one device and mapped over all devices.

Each slate is on one device. Losses are a total and a count. Counts are summed over all devices
before the division, so that any number of devices computes the loss and gradient of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpugraphs_jax import losses as losses_lib
from tpugraphs_jax.data import batching
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.train import state as state_lib
from tpugraphs_jax.train.state import TrainState


def squared_kernels(params: Any) -> jax.Array:
  """Sum of squares of all Dense kernels, `[]` float32, without biases and embeddings."""
  flat = traverse_util.flatten_dict(params)
  squares = [jnp.sum(jnp.square(v)) for path, v in flat.items() if path[-1] == "kernel"]
  return sum(squares)  # type: ignore[return-value]  # never empty


def mean_activity(sown: Any) -> jax.Array:
  """The share of this device in the mean squared length of opcode embeddings, `[]` float32.

  Shares add up to the mean over the nodes of all devices. Means of several embeddings are added.
  """
  activity = traverse_util.flatten_dict(sown)
  total = jnp.zeros(())
  for path in (path for path in activity if path[-1] == "sum"):
    nodes = jax.lax.psum(activity[path[:-1] + ("nodes",)][0], parallel.DEVICES)
    total += activity[path][0] / nodes
  return total


def zero_perturbations(model: nn.Module, batch: Any) -> Any:
  """Zeros to add to embedding lookups: their gradients are the gradients of the lookups."""
  variables = jax.eval_shape(model.init, jax.random.key(0), batch)
  shapes = variables.get("perturbations", {})
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def keras_norms(grads: Any, lookup_grads: Any) -> Any:
  """Norm of each variable's gradient, as in Keras' `clipnorm`.

  The norm of an embedding table is over lookups, a gradient per node. Rows of the table add up the
  lookups of an opcode.
  """
  norms = traverse_util.flatten_dict(state_lib.variable_norms(grads))
  for path, grad in traverse_util.flatten_dict(lookup_grads).items():
    square = jax.lax.psum(jnp.sum(jnp.square(grad)), parallel.DEVICES)
    norms[path[:-1] + ("table", "embedding")] = jnp.sqrt(square)
  return traverse_util.unflatten_dict(norms)


def apply_in_chunks(
    model: nn.Module, variables: Any, batch: Any, *, config_chunk: int, **options: Any
) -> tuple[jax.Array, Any]:
  """`model.apply` on a few configurations at a time, with equal scores and gradients.

  The backward pass computes each chunk again, so that memory holds the features of one chunk. The
  loss is computed on whole slates.

  Args:
    model: maps a batch to scores `[G, C]`; the score of a configuration depends on no other.
    variables: of the model.
    batch: with C configurations, a multiple of `config_chunk`.
    config_chunk: configurations in a chunk.
    **options: of `model.apply`, including `mutable`.

  Returns:
    Scores `[G, C]` and the sown variables, which must not depend on the configurations.
  """
  configs = batch.config_mask.shape[1]

  @jax.checkpoint
  def chunk(start):
    part = batching.take_configs(batch, start, config_chunk)
    return model.apply(variables, part, **options)

  scores, sown = jax.lax.map(chunk, jnp.arange(0, configs, config_chunk))
  return jnp.concatenate(scores, axis=1), jax.tree.map(lambda leaf: leaf[0], sown)


def make_train_step(
    model: nn.Module, optimizer: optax.GradientTransformation,
    options: losses_lib.LossOptions, *,
    seed: int = 0, config_chunk: int = 0, collections: Sequence[str] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
  """The mapped step `(state, batch) -> (state, metrics)`; the state is donated.

  The seed is an argument of the compiled program, so that a compilation cache serves all seeds.

  Args:
    model: maps a batch to scores `[G, C]`.
    optimizer: from `state.create_optimizer`.
    options: losses and penalties.
    seed: of all random numbers; their keys also depend on the step.
    config_chunk: configurations that pass through the model at a time; 0 = all.
    collections: further variables that the model sows, returned as `state.extra`.
    devices: to compile for; all devices of the run unless given.
  """
  losses = options.weighted

  def loss_fn(params, perturbations, batch, key):
    variables = {"params": params, "perturbations": perturbations}
    flags = dict(train=True, mutable=["activity", *collections], rngs={"dropout": key})
    chunked = functools.partial(apply_in_chunks, model, config_chunk=config_chunk)
    scores, sown = (chunked if config_chunk else model.apply)(variables, batch, **flags)
    totals, counts = losses_lib.loss_sums(
        losses, scores, batch.target, where=batch.config_mask,
        key=parallel.slate_keys(key, len(scores)), options=options, axis=parallel.DEVICES)
    counts = jax.lax.psum(counts, parallel.DEVICES)
    ranking = losses_lib.combine(losses, totals, counts)
    penalty = (options.kernel_l2 * squared_kernels(params) / jax.lax.psum(1, parallel.DEVICES)
               + options.activity_l2 * mean_activity(sown.get("activity", {})))
    metrics = {"loss": ranking + penalty, "ranking_loss": ranking}
    return ranking + penalty, (metrics, {name: sown[name] for name in collections})

  def train_step(key_data, state: TrainState, batch):
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data), state.step)
    (grads, lookup_grads), (metrics, extra) = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(
        state.params, zero_perturbations(model, batch), batch, key)
    grads, metrics = jax.lax.psum((grads, metrics), parallel.DEVICES)
    metrics["grad_norm"] = optax.tree.norm(grads)
    norms = keras_norms(grads, lookup_grads)
    changes = {"extra": extra} if collections else {}
    return state.apply_gradients(grads, optimizer, norms=norms, **changes), metrics

  mapped = parallel.pmap(train_step, donate_argnums=1, in_axes=(None, 0, 0), devices=devices)
  return functools.partial(mapped, np.asarray(jax.random.key_data(jax.random.key(seed))))
