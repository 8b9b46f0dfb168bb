"""Inverted residuals with depthwise convolutions."""

from _steps import forward, image, train
from flax import linen as nn

SPLIT = "train"


class Inverted(nn.Module):
  """Widens by a 1 x 1 convolution, filters each channel alone, gates and narrows again."""

  features: int
  expansion: int = 4
  kernel: int = 3
  stride: int = 1
  gated: bool = True

  @nn.compact
  def __call__(self, x):
    wide = x.shape[-1] * self.expansion
    y = nn.swish(nn.LayerNorm()(nn.Conv(wide, (1, 1), use_bias=False)(x)))
    y = nn.Conv(
      wide,
      (self.kernel, self.kernel),
      (self.stride, self.stride),
      feature_group_count=wide,
      use_bias=False,
    )(y)
    y = nn.swish(nn.LayerNorm()(y))
    if self.gated:
      gate = nn.Dense(wide // 8)(y.mean((1, 2)))
      y = y * nn.sigmoid(nn.Dense(wide)(nn.relu(gate)))[:, None, None]
    y = nn.Conv(self.features, (1, 1), use_bias=False)(y)
    return x + y if x.shape == y.shape else y


class Tower(nn.Module):
  """A stem and four inverted residuals."""

  @nn.compact
  def __call__(self, x):
    x = nn.swish(nn.Conv(16, (3, 3), (2, 2))(x))
    for features, kernel, stride in ((24, 3, 2), (24, 3, 1), (40, 5, 2), (40, 5, 1)):
      x = Inverted(features, kernel=kernel, stride=stride)(x)
    return nn.Dense(50)(x.mean((1, 2)))


PROGRAMS = {
  "inverted_train": train(Inverted(32), image(4, 28, 28, 32)),
  "wide_kernel": forward(Inverted(48, kernel=5, gated=False), image(16, 21, 21, 48)),
  "tower": forward(Tower(), image(2, 96, 96, 3)),
}
