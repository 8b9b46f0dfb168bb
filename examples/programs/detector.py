"""Object detection on a pyramid of feature maps."""

from _steps import array, forward, image, train
from flax import linen as nn
import jax
import jax.numpy as jnp

SPLIT = "valid"


class Head(nn.Module):
  """Classes and boxes for every position of each map, by shared convolutions."""

  anchors: int = 6
  classes: int = 20

  @nn.compact
  def __call__(self, *maps):
    classify = [nn.Conv(48, (3, 3)), nn.Conv(self.anchors * self.classes, (3, 3))]
    locate = [nn.Conv(48, (3, 3)), nn.Conv(self.anchors * 4, (3, 3))]
    scores, boxes = [], []
    for x in maps:
      scores.append(classify[1](nn.relu(classify[0](x))).reshape(x.shape[0], -1, self.classes))
      boxes.append(locate[1](nn.relu(locate[0](x))).reshape(x.shape[0], -1, 4))
    return jnp.concatenate(scores, 1), jnp.concatenate(boxes, 1)


class Pyramid(nn.Module):
  """Maps of several sizes brought to one width and merged from coarse to fine."""

  width: int

  @nn.compact
  def __call__(self, *maps):
    merged = None
    outputs = []
    for x in maps[::-1]:
      x = nn.Conv(self.width, (1, 1))(x)
      if merged is not None:
        x = x + jax.image.resize(merged, x.shape, "nearest")
      merged = x
      outputs.append(nn.Conv(self.width, (3, 3))(x))
    return outputs


class Regions(nn.Module):
  """A class, a box and a mask for each region."""

  @nn.compact
  def __call__(self, regions):
    x = nn.relu(nn.Dense(200)(regions.reshape(regions.shape[0], -1)))
    mask = nn.relu(nn.ConvTranspose(32, (2, 2), (2, 2))(nn.relu(nn.Conv(32, (3, 3))(regions))))
    return nn.Dense(21)(x), nn.Dense(84)(x), nn.Conv(21, (1, 1))(mask)


PROGRAMS = {
  "head": forward(Head(), image(2, 20, 20, 64), image(2, 10, 10, 64), image(2, 5, 5, 64)),
  "pyramid_train": train(
    Pyramid(32), image(2, 24, 24, 48), image(2, 12, 12, 64), image(2, 6, 6, 96)
  ),
  "regions": forward(Regions(), array(30, 7, 7, 48)),
}
