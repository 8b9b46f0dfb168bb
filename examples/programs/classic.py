"""Plain stacks of convolutions for images, text and sound."""

from _steps import array, forward, image, indices, train
from flax import linen as nn

SPLIT = "train"


class Stack(nn.Module):
  """Convolutions and pooling, then two dense layers on the flattened image."""

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(24, (11, 11), (4, 4), padding="VALID")(x))
    x = nn.max_pool(x, (3, 3), (2, 2))
    x = nn.relu(nn.Conv(64, (5, 5))(x))
    x = nn.relu(nn.Conv(48, (3, 3))(x))
    x = nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1)))
    return nn.Dense(100)(x)


class Small(nn.Module):
  """Two convolutions and a dense layer."""

  @nn.compact
  def __call__(self, x):
    x = nn.avg_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
    x = nn.avg_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), (2, 2))
    return nn.Dense(10)(x.reshape(x.shape[0], -1))


class Text(nn.Module):
  """Convolutions of three lengths over embedded words."""

  @nn.compact
  def __call__(self, words):
    x = nn.Embed(5000, 96)(words)
    x = sum(nn.Dense(20)(nn.relu(nn.Conv(64, (size,))(x)).max(1)) for size in (3, 4, 5))
    return x


class Sound(nn.Module):
  """Strided, then dilated convolutions over samples."""

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(48, (25,), (10,))(x)
    for dilation in (1, 2, 4):
      y = nn.Conv(96, (3,), kernel_dilation=(dilation,))(nn.LayerNorm()(x))
      gate, value = y[..., :48], y[..., 48:]
      x = x + nn.Dense(48)(nn.sigmoid(gate) * nn.tanh(value))
    return nn.Dense(30)(x)


PROGRAMS = {
  "stack": forward(Stack(), image(6, 115, 115, 3)),
  "small_train": train(Small(), image(64, 28, 28, 1)),
  "text_train": train(Text(), indices(16, 61)),
  "sound": forward(Sound(), array(8, 3000, 1)),
}
