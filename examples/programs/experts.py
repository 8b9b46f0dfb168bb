"""A mixture of experts: each word goes through one of several feed-forward nets."""

from _steps import array, forward, train
from flax import linen as nn
import jax
import jax.numpy as jnp

SPLIT = "test"


class Experts(nn.Module):
  """Every word goes to its expert with the highest score; each takes up to `capacity` words."""

  experts: int
  hidden: int
  capacity: int

  @nn.compact
  def __call__(self, words):
    width = words.shape[-1]
    scores = nn.softmax(nn.Dense(self.experts)(words))
    chosen = jax.nn.one_hot(scores.argmax(-1), self.experts)
    place = ((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(jnp.int32)
    dispatch = chosen[:, :, None] * jax.nn.one_hot(place, self.capacity)[:, None]
    up = self.param("up", nn.initializers.lecun_normal(), (self.experts, width, self.hidden))
    down = self.param("down", nn.initializers.lecun_normal(), (self.experts, self.hidden, width))
    inputs = jnp.einsum("nec,nw->ecw", dispatch, words)
    hidden = nn.gelu(jnp.einsum("ecw,ewh->ech", inputs, up))
    outputs = jnp.einsum("ech,ehw->ecw", hidden, down)
    weight = dispatch * (scores * chosen).sum(-1)[:, None, None]
    return words + jnp.einsum("nec,ecw->nw", weight, outputs)


PROGRAMS = {
  "layer": forward(Experts(6, 200, 40), array(160, 72)),
  "layer_train": train(Experts(4, 128, 24), array(60, 64)),
}
