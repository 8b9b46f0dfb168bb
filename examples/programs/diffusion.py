"""Diffusion models: networks that remove noise, given the noise level."""

from _steps import array, forward, image, train
from flax import linen as nn
import jax.numpy as jnp

SPLIT = "test"


def timing(time, width):
  """Sinusoidal embedding `[batch, width]` of a time `[batch]`."""
  frequency = jnp.exp(-jnp.arange(width // 2) * (9.0 / (width // 2)))
  angle = time[:, None] * frequency[None]
  return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


class Block(nn.Module):
  """Two convolutions, with the embedded time added in between."""

  features: int

  @nn.compact
  def __call__(self, x, time):
    y = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(num_groups=8)(x)))
    y = y + nn.Dense(self.features)(nn.swish(time))[:, None, None]
    y = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(num_groups=8)(y)))
    return y + (x if x.shape == y.shape else nn.Conv(self.features, (1, 1))(x))


class Denoiser(nn.Module):
  """A U-Net of one level with attention over all positions at the bottom."""

  width: int

  @nn.compact
  def __call__(self, x, time):
    time = nn.Dense(64)(nn.swish(nn.Dense(64)(timing(time, 32))))
    first = Block(self.width)(nn.Conv(self.width, (3, 3))(x), time)
    y = Block(2 * self.width)(nn.Conv(self.width, (3, 3), (2, 2))(first), time)
    flat = y.reshape(y.shape[0], -1, y.shape[-1])
    y = y + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(flat)).reshape(y.shape)
    y = nn.ConvTranspose(self.width, (4, 4), (2, 2))(y)
    return nn.Conv(x.shape[-1], (3, 3))(Block(self.width)(jnp.concatenate([y, first], -1), time))


class Patchwise(nn.Module):
  """A transformer layer over patches, whose norms are scaled and shifted by a condition."""

  width: int

  @nn.compact
  def __call__(self, tokens, condition):
    def adapted(x):
      scale, shift, gate = jnp.split(nn.Dense(3 * self.width)(nn.swish(condition)), 3, -1)
      y = nn.LayerNorm(use_scale=False, use_bias=False)(x)
      return y * (1 + scale[:, None]) + shift[:, None], gate[:, None]

    y, gate = adapted(tokens)
    tokens = tokens + gate * nn.MultiHeadDotProductAttention(4)(y)
    y, gate = adapted(tokens)
    return tokens + gate * nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(y)))


PROGRAMS = {
  "block_train": train(Block(32), image(4, 16, 16, 32), array(4, 64)),
  "denoiser": forward(Denoiser(24), image(3, 28, 28, 3), array(3)),
  "patchwise": forward(Patchwise(128), array(4, 81, 128), array(4, 100)),
}
