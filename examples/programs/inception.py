"""Parallel convolutions of several sizes, concatenated."""

from _steps import forward, image, train
from flax import linen as nn
import jax.numpy as jnp

SPLIT = "train"


class Inception(nn.Module):
  """Four branches: 1 x 1, 3 x 3, factored 5 x 5 and pooled."""

  width: int

  @nn.compact
  def __call__(self, x):
    def conv(features, size, x):
      return nn.relu(nn.Conv(features, size)(x))

    width = self.width
    branches = (
      conv(width, (1, 1), x),
      conv(2 * width, (3, 3), conv(width, (1, 1), x)),
      conv(width, (1, 5), conv(width, (5, 1), conv(width // 2, (1, 1), x))),
      conv(width, (1, 1), nn.avg_pool(x, (3, 3), padding="SAME")),
    )
    return jnp.concatenate(branches, axis=-1)


class Two(nn.Module):
  """Two inception blocks with a pooling between them, and a head."""

  width: int

  @nn.compact
  def __call__(self, x):
    x = Inception(self.width)(x)
    x = Inception(self.width)(nn.max_pool(x, (2, 2), (2, 2)))
    return nn.Dense(37)(x.reshape(x.shape[0], -1))


PROGRAMS = {
  "block_train": train(Inception(32), image(8, 17, 17, 64)),
  "two": forward(Two(24), image(5, 26, 26, 48)),
}
