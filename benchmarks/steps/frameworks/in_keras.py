"""Steps with Keras on jax, through its stateless functions."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras

BATCH, LENGTH, WIDTH = 32, 128, 128
layers = keras.layers


def array(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def training(model, loss, x, y, *, optimizer):
  """A step of a model, with the arguments of the step."""
  optimizer.build(model.trainable_variables)

  def step(variables, others, opt_state, x, y):
    def of(variables):
      out, changed = model.stateless_call(variables, others, x, training=True)
      return jnp.mean(loss(y, out)), changed

    (value, changed), grads = jax.value_and_grad(of, has_aux=True)(variables)
    variables, opt_state = optimizer.stateless_apply(opt_state, grads, variables)
    return variables, changed, opt_state, value

  shapes = lambda found: [array(*each.shape, dtype=each.dtype) for each in found]
  groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
  return jax.jit(step, donate_argnums=(0, 1, 2)), (*map(shapes, groups), x, y)


def convolutions():
  return keras.Sequential(
    [
      keras.Input((32, 32, 3)),
      *(layers.Conv2D(32, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU()),
      layers.MaxPooling2D(),
      *(layers.Conv2D(64, 3, activation="relu"), layers.GlobalAveragePooling2D()),
      layers.Dense(10),
    ]
  )


def attention():
  words = keras.Input((LENGTH,), dtype="int32")
  x = layers.Embedding(8_000, WIDTH)(words)
  x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, WIDTH // 4)(x, x))
  y = layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(x))
  x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + y))
  return keras.Model(words, layers.Dense(10)(x))


def lstm():
  return keras.Sequential([keras.Input((LENGTH, WIDTH)), layers.LSTM(WIDTH), layers.Dense(10)])


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LABELS = array(BATCH, dtype=jnp.int32)
PROGRAMS = {
  "convolutions": training(
    convolutions(),
    CROSS_ENTROPY,
    *(array(BATCH, 32, 32, 3), LABELS),
    optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
  ),
  "attention": training(
    attention(),
    CROSS_ENTROPY,
    *(array(BATCH, LENGTH, dtype=jnp.int32), LABELS),
    optimizer=keras.optimizers.AdamW(1e-3),
  ),
  "lstm": training(
    lstm(),
    CROSS_ENTROPY,
    *(array(BATCH, LENGTH, WIDTH), LABELS),
    optimizer=keras.optimizers.Adam(1e-3),
  ),
}
