"""The optimiser follows its written definition, and refuses impossible values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax.optimizer import clip_by_variable_norm, Optimizer
from tpugraphs_jax.train.step import TrainState

STEPS = 7


def make_params():
  return {"kernel": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "bias": jnp.ones(3)}


def make_grads(step, scale=1.0):
  """Gradients of very different size, with exact zeros among them."""
  rng = np.random.default_rng(step)
  kernel = scale * rng.normal(size=(2, 3)) * 10.0 ** rng.integers(-7, 2, (2, 3))
  kernel[0, 0] = 0.0
  return {
    "kernel": jnp.asarray(kernel, jnp.float32),
    "bias": jnp.asarray(scale * rng.normal(size=3), jnp.float32),
  }


def run(optimizer, steps=STEPS, grads=make_grads):
  state = TrainState.create(make_params(), optimizer)
  take_step = jax.jit(lambda state, grads: state.apply_gradients(grads, optimizer))
  for step in range(steps):
    state = take_step(state, grads(step))
  return state


def slow_keras_adam(param, grads, rates):
  """Keras' Adam with its default options, on one variable in float64."""
  beta1, beta2, eps = 0.9, 0.999, 1e-7
  param = np.asarray(param, np.float64)
  mean, square = np.zeros_like(param), np.zeros_like(param)
  for t, (grad, rate) in enumerate(zip(grads, rates), start=1):
    grad = np.asarray(grad, np.float64)
    mean = beta1 * mean + (1 - beta1) * grad
    square = beta2 * square + (1 - beta2) * grad**2
    alpha = rate * np.sqrt(1 - beta2**t) / (1 - beta1**t)
    param = param - alpha * mean / (np.sqrt(square) + eps)
  return param


def assert_trees_close(found, expected, rtol=1e-5):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7), found, expected)


def test_adam_is_keras_adam():
  found = run(Optimizer(learning_rate=0.01).create(STEPS))
  for name, param in make_params().items():
    grads = [make_grads(step)[name] for step in range(STEPS)]
    expected = slow_keras_adam(param, grads, [0.01] * STEPS)
    np.testing.assert_allclose(found.params[name], expected, rtol=2e-5)
  assert found.step == STEPS and found.step.dtype == jnp.int32


def test_adamw_is_adam_plus_decoupled_decay():
  optimizer = Optimizer(name="adamw", learning_rate=0.01, weight_decay=0.1, eps=1e-8).create(1)
  state = run(optimizer, steps=1)
  for name, param in make_params().items():
    param, grad = np.asarray(param, np.float64), np.asarray(make_grads(0)[name], np.float64)
    expected = param - 0.01 * (grad / (np.abs(grad) + 1e-8) + 0.1 * param)
    np.testing.assert_allclose(state.params[name], expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e4])
def test_per_variable_clipping_scales_each_variable_by_its_own_norm(scale):
  grads = make_grads(3, scale)
  clip = clip_by_variable_norm(0.5)
  clipped, _ = clip.update(grads, clip.init(grads))
  for name, grad in grads.items():
    norm = np.linalg.norm(np.asarray(grad, np.float64))
    expected = np.asarray(grad, np.float64) * (0.5 / max(norm, 0.5))
    np.testing.assert_allclose(clipped[name], expected, rtol=1e-5)


@pytest.mark.parametrize("field", ["clip_norm", "clip_norm_per_variable"])
def test_clipping_happens_before_adam(field):
  clipped = run(Optimizer(learning_rate=0.1, **{field: 1e-6}).create(2), steps=2)
  norms = {
    "clip_norm": lambda grads: [np.sqrt(sum(np.sum(g**2) for g in grads.values()))] * 2,
    "clip_norm_per_variable": lambda grads: [np.linalg.norm(g) for g in grads.values()],
  }[field]
  for which, name in enumerate(make_params()):
    seen = []
    for step in range(2):
      grads = {k: np.asarray(g, np.float64) for k, g in make_grads(step).items()}
      seen.append(grads[name] * 1e-6 / max(norms(grads)[which], 1e-6))
    expected = slow_keras_adam(make_params()[name], seen, [0.1] * 2)
    np.testing.assert_allclose(clipped.params[name], expected, rtol=1e-4)


def test_cosine_warms_up_and_ends_at_the_final_rate():
  rate = Optimizer(
    learning_rate=0.8, schedule="cosine", warmup_fraction=0.2, final_learning_rate=0.2
  ).rate(100)
  found = [float(rate(step)) for step in (0, 10, 20, 60, 100)]
  np.testing.assert_allclose(found, [0, 0.4, 0.8, (0.8 + 0.2) / 2, 0.2], rtol=1e-5)


def test_multistep_multiplies_at_each_milestone():
  rate = Optimizer(
    learning_rate=1.0,
    schedule="multistep",
    warmup_fraction=0.1,
    milestones=(0.6, 0.9),
    milestone_factor=0.5,
  ).rate(100)
  found = [float(rate(step)) for step in (5, 10, 59, 61, 89, 91, 100)]
  np.testing.assert_allclose(found, [0.5, 1, 1, 0.5, 0.5, 0.25, 0.25])


def test_accumulation_updates_once_with_the_mean_gradient():
  options = dict(learning_rate=0.01, clip_norm_per_variable=0.1)
  optimizer = Optimizer(**options, accumulation_steps=3).create(6)
  assert_trees_close(run(optimizer, steps=2).params, make_params(), rtol=0)
  mean = jax.tree.map(lambda *g: sum(g) / 3, *[make_grads(step) for step in range(3)])
  plain = Optimizer(**options).create(2)
  expected = run(plain, steps=1, grads=lambda _: mean)
  assert_trees_close(run(optimizer, steps=3).params, expected.params)


def test_schedule_counts_updates_not_accumulated_steps():
  optimizer = Optimizer(
    learning_rate=1.0,
    schedule="multistep",
    milestones=(0.5,),
    milestone_factor=1e-6,
    accumulation_steps=2,
  ).create(4)
  grads = lambda _: jax.tree.map(jnp.ones_like, make_params())
  np.testing.assert_allclose(
    run(optimizer, steps=4, grads=grads).params["bias"], 1 - 1 - 1e-6, atol=1e-5
  )


def test_average_follows_the_parameters():
  optimizer = Optimizer(learning_rate=0.1, average_decay=0.5).create(STEPS)
  state = TrainState.create(make_params(), optimizer)
  expected = np.asarray(make_params()["bias"], np.float64)
  for step in range(STEPS):
    state = state.apply_gradients(make_grads(step), optimizer)
    decay = min(0.5, (1 + step) / (10 + step))
    expected = decay * expected + (1 - decay) * np.asarray(state.params["bias"])
  np.testing.assert_allclose(state.eval_params["bias"], expected, rtol=1e-5)
  assert np.abs(state.params["bias"] - expected).max() > 1e-3


@pytest.mark.parametrize(
  "window, counted",
  [
    ((0.3, 0.9), range(3, 9)),
    ((0.0, 1.0), range(10)),
    ((0.55, 0.56), range(5, 6)),
    ((0.99, 1.0), range(9, 10)),
  ],
)
def test_swa_is_the_plain_mean_over_its_window(window, counted):
  optimizer = Optimizer(learning_rate=0.1, average_window=window).create(10)
  state, seen = TrainState.create(make_params(), optimizer), []
  for step in range(10):
    state = state.apply_gradients(make_grads(step), optimizer)
    seen.append(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.params))
    within = [seen[i] for i in counted if i <= step]
    expected = (
      jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *within) if within else seen[-1]
    )
    assert_trees_close(state.eval_params, expected)


def test_swa_counts_updates_and_not_the_steps_that_they_gather():
  optimizer = Optimizer(learning_rate=0.1, accumulation_steps=2, average_window=(0.5, 1.0)).create(
    8
  )
  state, seen = TrainState.create(make_params(), optimizer), []
  for step in range(8):
    state = state.apply_gradients(make_grads(step), optimizer)
    seen.append(np.asarray(state.params["bias"], np.float64))
  np.testing.assert_allclose(state.eval_params["bias"], (seen[5] + seen[7]) / 2, rtol=1e-5)


@pytest.mark.parametrize(
  "field, value",
  [
    ("final_learning_rate", 2.0),
    ("milestones", (0.9, 0.6)),
    ("milestones", (1.5,)),
    ("weight_decay", 0.1),
    ("decay_layers", ("head",)),
    *(("average_window", window) for window in ((0.5,), (0.5, 0.5), (0.5, 1.5), (-0.1, 0.5))),
  ],
)
def test_values_that_contradict_others_are_refused_by_field_name(field, value):
  with pytest.raises(ValueError, match=rf"optimizer\.{field} is"):
    Optimizer(**{field: value})
