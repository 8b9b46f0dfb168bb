"""Image segmentation: encoders and decoders with skip connections."""

from _steps import forward, image, train
from flax import linen as nn
import jax
import jax.numpy as jnp

SPLIT = "train"


def conv(features, x, dilation=1):
  return nn.relu(nn.Conv(features, (3, 3), kernel_dilation=(dilation, dilation))(x))


class UNet(nn.Module):
  """A U-Net of two levels, with transposed convolutions on the way up."""

  width: int
  classes: int = 5

  @nn.compact
  def __call__(self, x):
    first = conv(self.width, x)
    second = conv(2 * self.width, nn.max_pool(first, (2, 2), (2, 2)))
    deep = conv(4 * self.width, nn.max_pool(second, (2, 2), (2, 2)))
    x = nn.ConvTranspose(2 * self.width, (2, 2), (2, 2))(deep)
    x = conv(2 * self.width, jnp.concatenate([x, second], -1))
    x = nn.ConvTranspose(self.width, (2, 2), (2, 2))(x)
    x = conv(self.width, jnp.concatenate([x, first], -1))
    return nn.Conv(self.classes, (1, 1))(x)


class Dilated(nn.Module):
  """Parallel dilated convolutions, resized to the image."""

  @nn.compact
  def __call__(self, x):
    y = conv(32, nn.Conv(32, (3, 3), (4, 4))(x))
    y = jnp.concatenate([conv(24, y, dilation) for dilation in (1, 2, 4)], -1)
    y = nn.Conv(19, (1, 1))(y)
    return jax.image.resize(y, (*x.shape[:3], 19), "bilinear")


class Volume(nn.Module):
  """Three-dimensional convolutions down and up."""

  @nn.compact
  def __call__(self, x):
    first = nn.relu(nn.Conv(16, (3, 3, 3))(x))
    y = nn.relu(nn.Conv(32, (3, 3, 3), (2, 2, 2))(first))
    y = nn.ConvTranspose(16, (2, 2, 2), (2, 2, 2))(y)
    return nn.Conv(3, (1, 1, 1))(nn.relu(y + first))


PROGRAMS = {
  "unet": forward(UNet(16), image(2, 64, 64, 3)),
  "unet_train": train(UNet(16), image(2, 32, 40, 1)),
  "dilated": forward(Dilated(), image(3, 60, 84, 3)),
  "volume": forward(Volume(), jax.ShapeDtypeStruct((1, 16, 24, 24, 2), jnp.float32)),
}
