"""Recommenders: dense towers over embedding tables."""

from _steps import array, forward, indices, train
from flax import linen as nn
import jax
import jax.numpy as jnp

SPLIT = "train"


class Tower(nn.Module):
  """Dense layers of falling width."""

  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, x):
    for width in self.widths[:-1]:
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(self.widths[-1])(x)


class TwoTowers(nn.Module):
  """Scores of all users of a batch against all its items."""

  @nn.compact
  def __call__(self, users, items):
    users = Tower((200, 100, 64))(nn.Embed(3000, 48)(users).reshape(users.shape[0], -1))
    items = Tower((150, 64))(nn.Embed(2000, 48)(items).mean(1))
    return users @ items.T


class Interactions(nn.Module):
  """Products of every two embeddings, together with the dense features."""

  @nn.compact
  def __call__(self, dense, categories):
    dense = Tower((128, 32))(dense)
    embedded = nn.Embed(4000, 32)(categories)
    rows = jnp.concatenate([dense[:, None], embedded], 1)
    products = jnp.einsum("bic,bjc->bij", rows, rows)
    first, second = jnp.triu_indices(rows.shape[1], 1)
    x = jnp.concatenate([dense, products[:, first, second]], -1)
    return Tower((256, 128, 1))(x)


class Experts(nn.Module):
  """Three objectives that share four expert towers, each through its own gate."""

  @nn.compact
  def __call__(self, x):
    shared = jnp.stack([nn.relu(Tower((96, 48))(x)) for _ in range(4)], 1)
    outputs = []
    for _ in range(3):
      gate = nn.softmax(nn.Dense(4)(x))
      outputs.append(Tower((32, 1))(jnp.einsum("be,bef->bf", gate, shared)))
    return jnp.concatenate(outputs, -1)


def crossed(params, x):
  """Explicit feature crosses of low rank: each layer multiplies with the input again."""
  y = x
  for down, up in params["kernels"]:
    y = x * (jax.nn.relu(y @ down) @ up) + y
  return jax.nn.sigmoid(y @ params["out"])


PROGRAMS = {
  "towers_train": train(TwoTowers(), indices(64, 3), indices(64, 5)),
  "interactions": forward(Interactions(), array(128, 13), indices(128, 20)),
  "objectives_train": train(Experts(), array(100, 75)),
  "crossed": (
    crossed,
    (
      {
        "kernels": [(array(210, rank), array(rank, 210)) for rank in (40, 64, 100)],
        "out": array(210, 7),
      },
      array(77, 210),
    ),
  ),
}
