"""The training step: its loss, the gradient and the update; and the state that it changes.

The step is written for one device and mapped over all devices. Each slate is on one device. A loss
is a total and a count. The step sums counts over all devices before it divides, so that any number
of devices computes the loss and gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import flax
from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpugraphs_jax import losses
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.optimizer import variable_norms


class TrainState(flax.struct.PyTreeNode):
  """All that a training step changes."""

  step: jax.Array  # [] int32, training steps taken
  params: optax.Params  # float32
  opt_state: optax.OptState
  extra: Any = ()  # readouts that the model sows, see `make_train_step`

  @classmethod
  def create(cls, params: optax.Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state at step 0."""
    return cls(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))

  def apply_gradients(
    self,
    grads: optax.Updates,
    optimizer: optax.GradientTransformation,
    *,
    norms: Any = None,
    **changes: Any,
  ) -> TrainState:
    """The state one step later.

    Args:
      grads: gradient of each parameter.
      optimizer: as in `create`.
      norms: norm of each gradient for `clip_by_variable_norm`; computed from `grads` unless given.
      **changes: further fields to replace.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    updates, opt_state = optimizer.update(grads, self.opt_state, self.params, norms=norms)
    step, params = self.step + 1, optax.apply_updates(self.params, updates)
    return self.replace(step=step, params=params, opt_state=opt_state, **changes)

  @property
  def eval_params(self) -> optax.Params:
    """The average of the parameters where one is kept, else the parameters."""
    average = optax.tree.get(self.opt_state, "average_params")
    return self.params if average is None else average


def not_finite(state: TrainState) -> str:
  """Path of the first array of the state that is not finite; empty without one."""
  trees = {"params": state.params, "opt_state": state.opt_state}
  for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
    if not np.isfinite(leaf).all():
      return jax.tree_util.keystr(path)
  return ""


def squared_weights(params: optax.Params) -> jax.Array:
  """Sum of squares of all Dense kernels, `[]` float32, without biases and embeddings."""
  flat = traverse_util.flatten_dict(params)
  squares = [jnp.sum(jnp.square(v)) for path, v in flat.items() if path[-1] == "kernel"]
  return sum(squares)  # type: ignore[return-value]  # never empty


def mean_activity(sown: Mapping[str, Any]) -> jax.Array:
  """The part of this device in the mean squared length of opcode embeddings, `[]` float32.

  The parts of all devices add up to the mean over their nodes. Means of several embeddings add up.
  """
  activity = traverse_util.flatten_dict(sown)
  total = jnp.zeros(())
  for path in (path for path in activity if path[-1] == "sum"):
    nodes = jax.lax.psum(activity[path[:-1] + ("nodes",)][0], parallel.DEVICES)
    total += activity[path][0] / nodes
  return total


def kernel_loss(sown: Mapping[str, Any], batch: Any) -> jax.Array:
  """The part of this device in `losses.kernel_error` of the times that the model sows."""
  (times,) = sown["kernels"]["time"]
  total, count = losses.kernel_error(times, batch.kernels.time)
  return total / jnp.maximum(jax.lax.psum(count, parallel.DEVICES), 1)


def zero_perturbations(model: nn.Module, batch: Any) -> dict[str, Any]:
  """Zeros to add to embedding lookups, as variables of the model.

  Their gradients are the gradients of the lookups.
  """
  variables = jax.eval_shape(model.init, jax.random.key(0), batch)
  shapes = {"perturbations": variables.get("perturbations", {})}
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def keras_norms(grads: optax.Updates, lookup_grads: optax.Updates) -> Any:
  """Norm of each variable's gradient, as in Keras' `clipnorm`.

  Keras computes the norm of an embedding table over lookups, with one gradient per node. The
  gradient of a row of the table is the sum over nodes with this opcode.
  """
  norms = traverse_util.flatten_dict(variable_norms(grads))
  for path, grad in traverse_util.flatten_dict(lookup_grads).items():
    square = jax.lax.psum(jnp.sum(jnp.square(grad)), parallel.DEVICES)
    norms[path[:-1] + ("table", "embedding")] = jnp.sqrt(square)
  return traverse_util.unflatten_dict(norms)


def apply_in_chunks(
  model: nn.Module,
  variables: Mapping[str, Any],
  batch: TileBatch | LayoutBatch,
  *,
  config_chunk: int,
  **options: Any,
) -> tuple[jax.Array, Mapping[str, Any]]:
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
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  options: losses.LossOptions,
  *,
  seed: int = 0,
  config_chunk: int = 0,
  clip_lookups: bool = False,
  devices: Sequence[jax.Device] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
  """The mapped step `(state, batch) -> (state, metrics)`; the state is donated.

  The new state has the readouts that the model sows, see `rankers.segments.family`. The compiled
  program takes the seed as an argument, so that a compilation cache serves all seeds.

  Args:
    model: maps a batch to scores `[G, C]`.
    optimizer: such as from `Optimizer.create`.
    options: losses and penalties.
    seed: of all random numbers; their keys also depend on the step.
    config_chunk: configurations that pass through the model at a time; 0 = all.
    clip_lookups: whether `clip_by_variable_norm` in the optimizer clips embedding tables as Keras
      does, by the norm over their lookups. This costs one more trace of the model.
    devices: to compile for; all devices of the run unless given.
  """
  weighted = options.weighted

  def loss_fn(params, perturbations, batch, key):
    variables = {"params": params} | perturbations
    flags: dict[str, Any] = dict(
      train=True, mutable=["activity", "kernels", "readout"], rngs={"dropout": key}
    )
    chunked = functools.partial(apply_in_chunks, model, config_chunk=config_chunk)
    scores, sown = (chunked if config_chunk else model.apply)(variables, batch, **flags)
    totals, counts = losses.loss_sums(
      weighted,
      scores,
      batch.target,
      where=batch.config_mask,
      key=parallel.slate_keys(key, len(scores)),
      options=options,
      axis=parallel.DEVICES,
    )
    counts = jax.lax.psum(counts, parallel.DEVICES)
    ranking = losses.combine(weighted, totals, counts)
    penalty = options.kernel_l2 * squared_weights(params) / jax.lax.psum(1, parallel.DEVICES)
    penalty += options.activity_l2 * mean_activity(sown.get("activity", {}))
    metrics = {"loss": ranking + penalty, "ranking_loss": ranking}
    if options.kernels:
      metrics["kernel_loss"] = kernel_loss(sown, batch)
      metrics["loss"] += options.kernels * metrics["kernel_loss"]
    return metrics["loss"], (metrics, sown.get("readout", ()))

  def train_step(key_data, state: TrainState, batch):
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data), state.step)
    perturbations = zero_perturbations(model, batch) if clip_lookups else {}
    gradient = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)
    (grads, lookup_grads), (metrics, extra) = gradient(state.params, perturbations, batch, key)
    grads, metrics = jax.lax.psum((grads, metrics), parallel.DEVICES)
    metrics["grad_norm"] = optax.tree.norm(grads)
    norms = keras_norms(grads, lookup_grads["perturbations"]) if clip_lookups else None
    return state.apply_gradients(grads, optimizer, norms=norms, extra=extra), metrics

  mapped = parallel.pmap(train_step, donate_argnums=1, in_axes=(None, 0, 0), devices=devices)
  return functools.partial(mapped, np.asarray(jax.random.key_data(jax.random.key(seed))))
