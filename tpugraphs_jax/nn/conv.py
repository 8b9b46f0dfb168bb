"""Convolutions along edges, on node features `[N, C, F]`.

`direction` selects the neighbours u of a node v that send: `operands`, `users` or `both`
(`nn.aggregation`). x_u are the features of u, and d_v is the number of neighbours of v. A repeated
edge counts repeatedly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import jraph

from tpugraphs_jax.nn import nodes
from tpugraphs_jax.nn.aggregation import BOTH, degree, USERS
from tpugraphs_jax.nn.layers import Linear
from tpugraphs_jax.nn.nodes import Nodes, Slates

MASKED = -1e30  # logit of masked neighbours, whose softmax is 0
_RESTART = 0.1  # weight of the first features, as in the paper of APPNP


Layer = Callable[[jax.Array], jax.Array]  # a function of single nodes, [n, C, F] -> [n, C, F']


def sage(x: Nodes, self_layer: Layer, messages: Mapping[str, Layer]) -> Nodes:
  """GraphSAGE: `self_layer(x_v)` plus, per direction, the mean of `messages[direction](x_u)`.

  The mean over no neighbours is 0.

  Args:
    x: `[N, C, F]`.
    self_layer: layer on the node itself.
    messages: a linear layer without bias per direction.
  """
  result = x.map(self_layer)
  # The linear layer comes before the mean: a round has fewer senders than receivers.
  means = [nodes.neighbour_mean(x.map(layer), direction) for direction, layer in messages.items()]
  return sum(means, result)


class Sage(nn.Module):
  """`sage` with new linear layers.

  Attributes:
    features: width of the result.
    directions: directions of messages, each with a kernel.
    linear: creates a linear layer of a width.
  """

  features: int
  directions: Sequence[str]
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, features]`."""
    message = functools.partial(self.linear, self.features, use_bias=False)
    messages = {direction: message(name=direction) for direction in self.directions}
    return sage(x, self.linear(self.features, name="self"), messages)


def propagate(x: Nodes, direction: str) -> Nodes:
  """`sum(x_u / sqrt((1 + d_u) (1 + d_v)))` over v and its neighbours.

  Degrees d_u and d_v count received messages, as in PyTorch Geometric.
  """
  slates = x.slates
  root = jnp.sqrt(1 + degree(slates.batch.adjacency, direction, slates.num_nodes))
  return nodes.neighbours(x.divide(root), direction, self_loops=True).divide(root)


class Appnp(nn.Module):
  """`z <- 0.9 P z + 0.1 W x` from `z = W x`, P as in `propagate` (Gasteiger et al. 2019).

  Attributes:
    features: width of the result.
    direction: direction of messages.
    steps: number of propagation steps.
    linear: creates a linear layer of a width.
  """

  features: int
  direction: str
  steps: int
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, features]`."""
    start = self.linear(self.features, name="dense")(x)
    mix = lambda messages, start: (1 - _RESTART) * messages + _RESTART * start
    z = start
    for _ in range(self.steps):
      z = nodes.combine(mix, propagate(z, self.direction), start)
    return z


class Gatv2(nn.Module):
  """`sum(a_uv W x_u) + b` over v and its neighbours (Brody et al. 2022).

  The weights a_uv of each head are a softmax over u of `w . leaky_relu(W x_u + V x_v)`.
  An edge has a weight for each configuration.

  Attributes:
    features: width of the result, a multiple of `heads`.
    direction: direction of messages.
    heads: number of heads; their results are concatenated.
    linear: creates a linear layer of a width.
  """

  features: int
  direction: str
  heads: int = 1
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, features]`."""
    full, slates = x.everywhere(), x.slates
    by_head = lambda v: v.reshape(*v.shape[:2], self.heads, -1)
    sent = by_head(self.linear(self.features, name="senders")(full))
    target = by_head(self.linear(self.features, name="receivers")(full))
    shape = self.heads, self.features // self.heads
    weight = self.param("attention", nn.initializers.glorot_uniform(), shape, jnp.float32)
    senders, receivers, mask = _with_loops(slates, self.direction)
    hidden = nn.leaky_relu(sent[senders] + target[receivers], 0.2).astype(jnp.float32)
    logits = jnp.sum(hidden * weight[None, None], axis=-1)
    logits = jnp.where(mask[:, None, None], logits, MASKED)
    shares = jraph.segment_softmax(logits, receivers, len(full))
    total = jraph.segment_sum(shares[..., None] * sent[senders], receivers, len(full))
    bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
    result = (total.reshape(*full.shape[:2], -1) + bias[None, None]).astype(sent.dtype)
    return slates.from_all(result, x)


def _with_loops(slates: Slates, direction: str) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Senders, receivers and mask of all edges, with an edge from each node to itself, `[E']`."""
  graph, loops = slates.batch.graph, jnp.arange(slates.num_nodes)
  ends = [(graph.senders, graph.receivers)] if direction != USERS else []
  ends += [(graph.receivers, graph.senders)] if direction in (USERS, BOTH) else []
  senders, receivers = (jnp.concatenate([*part, loops]) for part in zip(*ends))
  real = [slates.edge_mask] * len(ends)
  return senders, receivers, jnp.concatenate([*real, jnp.ones(len(loops), bool)])
