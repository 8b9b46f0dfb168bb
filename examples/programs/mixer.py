"""Dense layers across positions and across channels in turn."""

from _steps import array, forward, image, train
from flax import linen as nn
import jax.numpy as jnp

SPLIT = "train"


class Mixer(nn.Module):
  """Mixes positions, then channels."""

  positions: int
  channels: int

  @nn.compact
  def __call__(self, x):
    def mixed(x, width):
      return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(width)(x)))

    y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
    x = x + jnp.swapaxes(mixed(y, self.positions), 1, 2)
    return x + mixed(nn.LayerNorm()(x), self.channels)


class Gated(nn.Module):
  """A feed-forward net; one half of its features, mixed across positions, gates the other."""

  width: int

  @nn.compact
  def __call__(self, x):
    y = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
    gate, value = jnp.split(y, 2, -1)
    gate = jnp.swapaxes(nn.Dense(x.shape[1])(jnp.swapaxes(gate, 1, 2)), 1, 2)
    return x + nn.Dense(x.shape[-1])(gate * value)


class Patched(nn.Module):
  """Two mixers over the patches of an image."""

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(72, (8, 8), (8, 8))(x)
    x = x.reshape(x.shape[0], -1, 72)
    for _ in range(2):
      x = Mixer(48, 200)(x)
    return nn.Dense(100)(x.mean(1))


PROGRAMS = {
  "mixer_train": train(Mixer(64, 256), array(6, 49, 128)),
  "gated": forward(Gated(192), array(5, 101, 96)),
  "patched": forward(Patched(), image(8, 64, 80, 3)),
}
