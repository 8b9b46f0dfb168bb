"""Steps with Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

BATCH, LENGTH, WIDTH = 32, 256, 256


def array(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def training(make, loss, *batch, optimizer):
  """A step of a model, whose arrays alone are arguments, with the arguments."""
  model = eqx.filter_eval_shape(make, jax.random.key(0))
  arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
  opt_state = jax.eval_shape(optimizer.init, arrays)

  def step(arrays, opt_state, *batch):
    of = lambda arrays: loss(eqx.combine(arrays, static), *batch)
    value, grads = eqx.filter_value_and_grad(of)(arrays)
    updates, opt_state = optimizer.update(grads, opt_state, arrays)
    return eqx.apply_updates(arrays, updates), opt_state, value

  return jax.jit(step, donate_argnums=(0, 1)), (arrays, opt_state, *batch)


def mean_squares(model, x, y):
  return jnp.square(jax.vmap(model)(x) - y).mean()


class Block(eqx.Module):
  norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
  attention: eqx.nn.MultiheadAttention
  feedforward: eqx.nn.MLP

  def __init__(self, key):
    first, second = jax.random.split(key)
    self.norms = (eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH))
    self.attention = eqx.nn.MultiheadAttention(8, WIDTH, key=first)
    self.feedforward = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=second)

  def __call__(self, x):
    y = jax.vmap(self.norms[0])(x)
    x = x + self.attention(y, y, y, mask=jnp.tri(len(x), dtype=bool))
    return x + jax.vmap(self.feedforward)(jax.vmap(self.norms[1])(x))


class Recurrent(eqx.Module):
  cell: eqx.nn.GRUCell

  def __init__(self, key):
    self.cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=key)

  def __call__(self, xs):
    turn = lambda state, x: (self.cell(x, state), None)
    return jax.lax.scan(turn, jnp.zeros(WIDTH), xs)[0]


def convolutions(key):
  keys = jax.random.split(key, 3)
  return eqx.nn.Sequential(
    [
      eqx.nn.Conv2d(3, 32, 3, padding=1, key=keys[0]),
      eqx.nn.GroupNorm(8, 32),
      eqx.nn.Lambda(jax.nn.relu),
      eqx.nn.MaxPool2d(2, 2),
      eqx.nn.Conv2d(32, 64, 3, padding=1, key=keys[1]),
      eqx.nn.Lambda(lambda x: jax.nn.relu(x).mean((1, 2))),
      eqx.nn.Linear(64, 10, key=keys[2]),
    ]
  )


ADAMW = optax.adamw(1e-3)
SEQUENCES = array(BATCH, LENGTH, WIDTH)
PROGRAMS = {
  "mlp": training(
    lambda key: eqx.nn.MLP(64, 64, 512, 3, key=key),
    mean_squares,
    *(array(512, 64), array(512, 64)),
    optimizer=ADAMW,
  ),
  "transformer": training(Block, mean_squares, SEQUENCES, SEQUENCES, optimizer=ADAMW),
  "gru": training(Recurrent, mean_squares, SEQUENCES, array(BATCH, WIDTH), optimizer=ADAMW),
  "convolutions": training(
    convolutions,
    mean_squares,
    *(array(BATCH, 3, 32, 32), array(BATCH, 10)),
    optimizer=optax.sgd(0.1, momentum=0.9),
  ),
}
