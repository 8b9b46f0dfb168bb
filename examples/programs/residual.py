"""Residual networks for images."""

from _steps import forward, image, train
from flax import linen as nn
import jax.numpy as jnp

SPLIT = "train"


class Basic(nn.Module):
  """Two 3 x 3 convolutions with a shortcut."""

  features: int
  stride: int = 1

  @nn.compact
  def __call__(self, x):
    strides = (self.stride, self.stride)
    y = nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)
    y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
    y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
    y = nn.BatchNorm(use_running_average=False)(y)
    if x.shape != y.shape:
      x = nn.Conv(self.features, (1, 1), strides, use_bias=False)(x)
    return nn.relu(x + y)


class Bottleneck(nn.Module):
  """1 x 1, grouped 3 x 3 and 1 x 1 convolutions, normalised in groups, then a head."""

  width: int
  groups: int = 1
  classes: int = 100
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    y = nn.Conv(self.width, (1, 1), dtype=self.dtype)(x)
    y = nn.relu(nn.GroupNorm(num_groups=4)(y))
    y = nn.Conv(self.width, (3, 3), feature_group_count=self.groups, dtype=self.dtype)(y)
    y = nn.relu(nn.GroupNorm(num_groups=4)(y))
    y = nn.Conv(x.shape[-1], (1, 1), dtype=self.dtype)(y)
    x = nn.relu(x + y)
    return nn.Dense(self.classes)(x.mean((1, 2)))


class Stages(nn.Module):
  """A stem and three basic blocks that halve the image twice."""

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(32, (7, 7), (2, 2))(x))
    x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    for features, stride in ((32, 1), (64, 2), (128, 2)):
      x = Basic(features, stride)(x)
    return nn.Dense(10)(x.mean((1, 2)))


PROGRAMS = {
  "basic_train": train(Basic(64), image(8, 28, 28, 64)),
  "bottleneck": forward(Bottleneck(64), image(32, 14, 14, 256)),
  "grouped_bf16": forward(
    Bottleneck(96, groups=8, dtype=jnp.bfloat16), image(7, 19, 19, 192, jnp.bfloat16)
  ),
  "stages": forward(Stages(), image(4, 97, 97, 3)),
}
