"""Transformers: encoders, decoders and images in patches."""

from _steps import array, forward, image, indices, train
from flax import linen as nn
import jax.numpy as jnp

SPLIT = "train"


class Layer(nn.Module):
  """Attention and a feed-forward net, each with a residual connection."""

  heads: int
  causal: bool = False
  crossed: bool = False

  @nn.compact
  def __call__(self, x, other=None):
    mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
    x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
    if self.crossed:
      x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), other)
    y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
    return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Encoder(nn.Module):
  """Two layers over embedded words; a classifier on the first position."""

  width: int
  heads: int

  @nn.compact
  def __call__(self, words):
    x = nn.Embed(1000, self.width)(words)
    x = x + self.param("position", nn.initializers.zeros, (1, *x.shape[1:]))
    for _ in range(2):
      x = Layer(self.heads)(x)
    return nn.Dense(2)(x[:, 0])


class Decoder(nn.Module):
  """A causal layer, then one that also attends to another sequence; logits of words."""

  heads: int

  @nn.compact
  def __call__(self, x, other):
    x = Layer(self.heads, causal=True)(x)
    x = Layer(self.heads, causal=True, crossed=True)(x, other)
    return nn.Dense(777)(nn.LayerNorm()(x))


class Patches(nn.Module):
  """An image cut into patches, and a layer over them."""

  patch: int
  width: int

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(self.width, (self.patch,) * 2, (self.patch,) * 2, padding="VALID")(x)
    x = x.reshape(x.shape[0], -1, self.width)
    return nn.Dense(64)(Layer(4)(x).mean(1))


class Step(nn.Module):
  """A decoding step: a new word attends to the cached keys and values of earlier words."""

  heads: int

  @nn.compact
  def __call__(self, x, keys, values):
    width = x.shape[-1]
    query = nn.DenseGeneral((self.heads, width // self.heads))(x)
    weights = nn.softmax(jnp.einsum("bhd,blhd->bhl", query, keys) / 8.0)
    mixed = jnp.einsum("bhl,blhd->bhd", weights, values)
    x = x + nn.DenseGeneral(width, axis=(-2, -1))(mixed)
    return x + nn.Dense(width)(nn.gelu(nn.Dense(3 * width)(x)))


PROGRAMS = {
  "layer_train": train(Layer(4), array(4, 50, 96)),
  "encoder": forward(Encoder(128, 8), indices(3, 77)),
  "decoder": forward(Decoder(6), array(2, 33, 192), array(2, 60, 192)),
  "patches": forward(Patches(14, 160), image(4, 98, 98, 3)),
  "step": forward(Step(8), array(16, 512), array(16, 200, 8, 64), array(16, 200, 8, 64)),
}
