"""Recurrent networks."""

from _steps import array, forward, indices, train
from flax import linen as nn
import jax
import jax.numpy as jnp

SPLIT = "train"


class Tagger(nn.Module):
  """A recurrent cell over embedded words in both directions."""

  width: int

  @nn.compact
  def __call__(self, words):
    x = nn.Embed(800, 64)(words)
    there = nn.RNN(nn.GRUCell(self.width))(x)
    back = nn.RNN(nn.GRUCell(self.width), reverse=True, keep_order=True)(x)
    return nn.Dense(17)(jnp.concatenate([there, back], -1))


class Memory(nn.Module):
  """An LSTM over a series, and a dense head on its last state."""

  width: int

  @nn.compact
  def __call__(self, x):
    x = nn.RNN(nn.OptimizedLSTMCell(self.width))(x)
    return nn.Dense(12)(nn.relu(nn.Dense(100)(x[:, -1])))


class Frames(nn.Module):
  """A convolutional LSTM over the frames of a film."""

  @nn.compact
  def __call__(self, film):
    x = nn.RNN(nn.ConvLSTMCell(16, (3, 3)))(film)
    return nn.Conv(1, (1, 1))(x[:, -1])


def unrolled(weights, x):
  """Three steps of a plain recurrent cell, without a loop."""
  state = jnp.zeros((x.shape[0], weights["state"].shape[0]))
  for step in range(3):
    state = jnp.tanh(x[:, step] @ weights["input"] + state @ weights["state"])
  return state @ weights["output"]


PROGRAMS = {
  "tagger": forward(Tagger(96), indices(8, 25)),
  "memory_train": train(Memory(128), array(12, 20, 40)),
  "frames": forward(Frames(), array(2, 6, 24, 24, 3)),
  "unrolled_train": (
    jax.value_and_grad(lambda *args: jnp.sum(unrolled(*args) ** 2)),
    (
      {"input": array(70, 150), "state": array(150, 150), "output": array(150, 33)},
      array(24, 3, 70),
    ),
  ),
}
