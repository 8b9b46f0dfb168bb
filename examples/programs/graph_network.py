"""Graph networks with dense adjacency matrices or lists of edges."""

from _steps import array, forward, indices, train
from flax import linen as nn
import jax
import jax.numpy as jnp

SPLIT = "valid"


class Dense(nn.Module):
  """Two convolutions with a dense adjacency matrix per graph."""

  width: int

  @nn.compact
  def __call__(self, nodes, adjacency):
    for _ in range(2):
      nodes = nn.relu(adjacency @ nn.Dense(self.width)(nodes) + nn.Dense(self.width)(nodes))
    return nn.Dense(11)(nodes.sum(1))


class Messages(nn.Module):
  """Messages along edges, computed by a net and summed over the edges into a node."""

  width: int

  @nn.compact
  def __call__(self, nodes, senders, receivers):
    x = nn.Dense(self.width)(nodes)
    pairs = jnp.concatenate([x[senders], x[receivers]], -1)
    messages = nn.Dense(self.width)(nn.relu(nn.Dense(self.width)(pairs)))
    x = x + jax.ops.segment_sum(messages, receivers, x.shape[0])
    return nn.Dense(8)(nn.LayerNorm()(x))


class Attention(nn.Module):
  """Attention of nodes to their neighbours, with features of nodes and of edges."""

  heads: int

  @nn.compact
  def __call__(self, nodes, edges, adjacency):
    query, key, value = (nn.DenseGeneral((self.heads, 16))(nodes) for _ in range(3))
    scores = jnp.einsum("nhd,mhd->hnm", query, key)
    scores = scores + jnp.moveaxis(nn.Dense(self.heads)(edges), -1, 0)
    weights = nn.softmax(jnp.where(adjacency > 0, scores, -1e9))
    mixed = jnp.einsum("hnm,mhd->nhd", weights, value)
    return nn.Dense(nodes.shape[-1])(mixed.reshape(nodes.shape[0], -1))


PROGRAMS = {
  "dense_train": train(Dense(64), array(8, 30, 20), array(8, 30, 30)),
  "messages": forward(Messages(72), array(150, 40), indices(600), indices(600)),
  "attention": forward(Attention(4), array(90, 48), array(90, 90, 5), array(90, 90)),
}
