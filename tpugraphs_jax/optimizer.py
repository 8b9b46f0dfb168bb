"""The optimizer of a run: the section `optimizer` of a config, and its optax transformations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpugraphs_jax.config_fields import option, Options


@dataclasses.dataclass(frozen=True)
class Optimizer(Options):
  """The optimizer of a run."""

  section = "optimizer"
  name: str = option(
    "adam",
    "adam (epsilon as in Keras), adamw (decoupled weight decay) or adam_l2 (Adam of "
    "PyTorch: the decay is added to the gradient)",
    one_of=("adam", "adamw", "adam_l2"),
  )
  learning_rate: float = option(1e-3, "value after the warm-up", above=0)
  schedule: str = option(
    "constant",
    "constant, cosine (to final_learning_rate) or multistep (times milestone_factor)",
    one_of=("constant", "cosine", "multistep"),
  )
  warmup_fraction: float = option(
    0.0, "share of the run in which the rate grows from zero", least=0, below=1
  )
  final_learning_rate: float = option(0.0, "last learning rate of cosine", least=0)
  milestones: Sequence[float] = option((), "shares of the run at which multistep changes the rate")
  milestone_factor: float = option(0.1, "factor of the rate at each milestone", above=0)
  eps: float = option(1e-7, "added to the root of Adam's mean of squared gradients", above=0)
  weight_decay: float = option(0.0, "weight decay of adamw and adam_l2", least=0)
  decay_layers: Sequence[str] = option((), "top-level layers whose parameters decay; empty = all")
  clip_norm: float = option(0.0, "largest global L2 norm of gradients; 0 = no clipping", least=0)
  clip_norm_per_variable: float = option(
    0.0, "largest L2 norm of each variable's gradient (Keras' clipnorm); 0 = no clipping", least=0
  )
  accumulation_steps: int = option(1, "steps whose mean gradient makes one update", least=1)
  average_decay: float = option(
    0.0, "decay of a moving average (EMA) of parameters, to evaluate; 0 = none", least=0, below=1
  )
  average_window: Sequence[float] = option(
    (), "FIRST,LAST shares of the run; their parameters are averaged (SWA)"
  )

  def check(self) -> None:
    """Refuses (ValueError) fields that contradict each other."""
    milestones, window, name = tuple(self.milestones), tuple(self.average_window), self.name
    increasing = all(a < b for a, b in zip((0.0, *milestones), (*milestones, 1.0)))
    is_window = len(window) == 2 and 0 <= window[0] < window[1] <= 1
    rate, grows = self.learning_rate, self.final_learning_rate > self.learning_rate
    for field, is_wrong, expected in (
      ("final_learning_rate", grows, f"no more than the learning rate {rate}"),
      ("milestones", self.schedule == "multistep" and not milestones, "at least one"),
      ("milestones", not increasing, "increasing shares in (0, 1)"),
      ("weight_decay", self.weight_decay and name == "adam", "0, or optimizer.name adamw"),
      ("decay_layers", self.decay_layers and name != "adamw", "(), or optimizer.name adamw"),
      ("average_window", window and not is_window, "two increasing shares in [0, 1], or ()"),
      ("average_window", window and self.average_decay, "(), or optimizer.average_decay 0"),
    ):
      if is_wrong:
        raise ValueError(f"{self.section}.{field} is {getattr(self, field)!r}, expected {expected}")

  def rate(self, total_steps: int) -> optax.Schedule:
    """The learning rate by update number, in a run of `total_steps` training steps."""
    total = self._updates(total_steps)
    warmup_steps = round(self.warmup_fraction * total)
    if self.schedule == "constant":
      rate = optax.constant_schedule(self.learning_rate)
    elif self.schedule == "cosine":
      share = self.final_learning_rate / self.learning_rate
      decay_steps = max(1, total - warmup_steps)
      rate = optax.cosine_decay_schedule(self.learning_rate, decay_steps, alpha=share)
    else:
      steps = [round(share * total) - warmup_steps for share in self.milestones]
      factors = dict.fromkeys(steps, self.milestone_factor)
      rate = optax.piecewise_constant_schedule(self.learning_rate, factors)
    if not warmup_steps:
      return rate
    warmup = optax.linear_schedule(0.0, self.learning_rate, warmup_steps)
    return optax.join_schedules([warmup, rate], [warmup_steps])

  def rate_after(self, total_steps: int) -> Callable[[int], float]:
    """The learning rate by number of training steps taken."""
    # One compiled program instead of a dozen operations.
    rate = jax.jit(self.rate(total_steps))
    return lambda steps: float(rate(steps // self.accumulation_steps))

  def create(self, total_steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `total_steps` training steps."""
    rate = self.rate(total_steps)
    if self.name == "adam":
      adam = optax.chain(scale_by_keras_adam(eps=self.eps), optax.scale_by_learning_rate(rate))
    elif self.name == "adam_l2":
      decay = optax.add_decayed_weights(self.weight_decay)
      adam = optax.chain(decay, optax.adam(rate, eps=self.eps))
    else:
      mask = self._decays if self.decay_layers else None
      adam = optax.adamw(rate, eps=self.eps, weight_decay=self.weight_decay, mask=mask)
    # An update of one flat vector compiles faster than one update per variable.
    parts = [adam if self.decay_layers else optax.flatten(adam)]
    if self.clip_norm:
      parts.insert(0, optax.clip_by_global_norm(self.clip_norm))
    if self.clip_norm_per_variable:
      parts.insert(0, clip_by_variable_norm(self.clip_norm_per_variable))
    if self.average_decay:
      parts.append(track_average(self.average_decay))
    if self.average_window:
      updates = self._updates(total_steps)
      parts.append(track_mean(*(round(share * updates) for share in self.average_window)))
    optimizer = optax.chain(*parts)
    if self.accumulation_steps == 1:
      return optimizer
    return optax.MultiSteps(optimizer, self.accumulation_steps).gradient_transformation()

  def _decays(self, params: Mapping[str, Any]) -> dict[str, bool]:
    """Which layers decay."""
    return {name: name in self.decay_layers for name in params}

  def _updates(self, steps: int) -> int:
    return max(1, steps // self.accumulation_steps)


def scale_by_keras_adam(*, eps: float) -> optax.GradientTransformation:
  """Adam with epsilon outside of the bias correction, as in Keras.

  Definition, with step t counted from 1 (Kingma and Ba 2015, end of section 2):
    m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
    update = sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)
  with the paper's beta1 = 0.9 and beta2 = 0.999.

  `optax.scale_by_adam` adds epsilon to the corrected sqrt(v). Its update equals the one above with
  an epsilon sqrt(1 - beta2^t) times as large, which matters in the first steps.
  """
  beta1, beta2 = 0.9, 0.999

  def init(params: optax.Params) -> optax.ScaleByAdamState:
    mean, square = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
    return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=mean, nu=square)

  def update(grads, state, params=None):
    del params
    count = optax.safe_increment(state.count)
    mean = optax.tree.update_moment(grads, state.mu, beta1, 1)
    square = optax.tree.update_moment(grads, state.nu, beta2, 2)
    scale = jnp.sqrt(1 - beta2**count) / (1 - beta1**count)
    updates = jax.tree.map(lambda m, v: scale * m / (jnp.sqrt(v) + eps), mean, square)
    return updates, optax.ScaleByAdamState(count=count, mu=mean, nu=square)

  return optax.GradientTransformation(init, update)


def variable_norms(grads: optax.Updates) -> Any:
  """L2 norm of each variable's gradient, a pytree of float32 scalars."""
  return jax.tree.map(lambda grad: jnp.sqrt(jnp.sum(jnp.square(grad))), grads)


def clip_by_variable_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
  """Scales each variable's gradient by `max_norm / max(its L2 norm, max_norm)`.

  Keras' `clipnorm` does the same. (`optax.clip_by_block_rms` bounds the root mean square, which
  depends on the size of the variable.) The caller may pass `norms`, a scalar per variable: Keras
  clips an embedding by the norm over its lookups.
  """

  def update(grads, state, params=None, *, norms=None, **unused):
    del params, unused
    norms = variable_norms(grads) if norms is None else norms
    clip = lambda grad, norm: grad * (max_norm / jnp.maximum(norm, max_norm))
    return jax.tree.map(clip, grads, norms), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class AverageState(NamedTuple):
  """State of `track_average` and `track_mean`."""

  count: jax.Array  # type: ignore[assignment]  # [] int32; hides a method of tuple
  average_params: optax.Params


def track_average(decay: float) -> optax.GradientTransformation:
  """Keeps an exponential moving average of the updated parameters.

  Must come last in a chain. In update t (from 0) the decay is at most
  (1 + t) / (10 + t), so that the initial parameters soon lose their weight.
  """
  return _tracking(lambda count: 1 - jnp.minimum(decay, (1 + count) / (10 + count)))


def track_mean(first: int, last: int) -> optax.GradientTransformation:
  """Keeps the mean of the parameters after the updates `first` + 1 to `last`.

  Must come last in a chain. Before the window the mean equals the parameters, and after it the mean
  does not change. In an empty window the update `last` alone counts.
  """
  last = max(last, 1)
  first = min(first, last - 1)

  def share(count):
    number = count - first + 1  # of this update in the window
    return jnp.where(count < last, 1 / jnp.maximum(number, 1), 0.0)

  return _tracking(share)


def _tracking(share: Callable[[jax.Array], jax.Array]) -> optax.GradientTransformation:
  """Keeps an average of the parameters: update i adds new parameters with weight `share(i)`."""

  def init(params: optax.Params) -> AverageState:
    # A copy, because a donated state may not hold one buffer twice.
    return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

  def update(updates, state, params):
    new = optax.apply_updates(params, updates)
    average = optax.incremental_update(new, state.average_params, share(state.count))
    return updates, AverageState(optax.safe_increment(state.count), average)

  return optax.GradientTransformation(init, update)
