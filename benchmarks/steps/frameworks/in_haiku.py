"""Steps with Haiku."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

BATCH, LENGTH, WIDTH = 32, 256, 256


def array(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def training(function, x, y, *, optimizer):
  """A step of a Haiku function with parameters and state, with the arguments of the step."""
  model = hk.transform_with_state(function)
  params, state = jax.eval_shape(model.init, jax.random.key(0), x)
  opt_state = jax.eval_shape(optimizer.init, params)

  def step(params, state, opt_state, key, x, y):
    def loss(params):
      out, changed = model.apply(params, state, key, x)
      return jnp.square(out - y).mean(), changed

    (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), changed, opt_state, value

  key = jax.eval_shape(lambda: jax.random.key(0))
  return jax.jit(step, donate_argnums=(0, 1, 2)), (params, state, opt_state, key, x, y)


def mlp(x):
  return hk.nets.MLP([512, 512, 64])(x, 0.1, hk.next_rng_key())


def transformer(words):
  x = hk.Embed(8_000, WIDTH)(words)
  norm = lambda x: hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
  init = hk.initializers.VarianceScaling(0.5)
  for _ in range(2):
    y = norm(x)
    x = x + hk.MultiHeadAttention(8, WIDTH // 8, w_init=init)(y, y, y, jnp.tri(LENGTH)[None, None])
    x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(norm(x))))
  return hk.Linear(8)(x)


def lstm(xs):
  core = hk.LSTM(WIDTH)
  out, _ = hk.dynamic_unroll(core, xs, core.initial_state(xs.shape[1]))
  return hk.Linear(1)(out)


def convolutions(images):
  x = images
  for channels in (32, 64):
    x = hk.Conv2D(channels, 3, with_bias=False)(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
    x = hk.max_pool(x, 2, 2, "SAME")
  return hk.Linear(10)(x.mean((1, 2)))


ADAMW = optax.adamw(1e-3)
PROGRAMS = {
  "mlp": training(mlp, array(512, 64), array(512, 64), optimizer=ADAMW),
  "transformer": training(
    transformer, *(array(8, LENGTH, dtype=jnp.int32), array(8, LENGTH, 8)), optimizer=ADAMW
  ),
  "lstm": training(lstm, array(64, BATCH, WIDTH), array(64, BATCH, 1), optimizer=ADAMW),
  "convolutions": training(
    convolutions,
    *(array(BATCH, 32, 32, 3), array(BATCH, 10)),
    optimizer=optax.sgd(0.1, momentum=0.9),
  ),
}
