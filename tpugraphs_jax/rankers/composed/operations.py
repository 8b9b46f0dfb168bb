"""Operations on node features that layers are made of, on either form of the features.

Activations, norms, dropout, and convolutions. Notation of convolutions: x_u a neighbour's
features, N(v) the neighbours that node v receives from, d_v their number. Edges that occur
twice count twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import jraph

from tpugraphs_jax.rankers.composed import pooling
from tpugraphs_jax.nn.aggregation import BOTH, USERS, degree
from tpugraphs_jax.rankers.composed.split_nodes import SplitNodes
from tpugraphs_jax.rankers.composed import nodes
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates
from tpugraphs_jax.rankers.composed.options import EDGE_DIRECTIONS, Options

EPSILON = 1e-5
Dense = Callable[..., nn.Module]  # makes a linear layer by its width
MASKED = -1e30  # logit of what a softmax leaves out


class Activation(nn.Module):
  """One of `options.ACTIVATIONS` on node features."""

  kind: str

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """`[N, C, F]` of `x [N, C, F]`, in its form."""
    if self.kind == "none":
      return x
    if self.kind == "prelu":
      return jax.tree.map(nn.PReLU(negative_slope_init=0.25, name="prelu"), x)
    return jax.tree.map(getattr(nn, self.kind), x)


class Norm(nn.Module):
  """One of the norms of `options.CHOICES` on node features.

  Attributes:
    kind: which.
    dtype: of the computation of `layer`.
  """

  kind: str
  dtype: Any = None

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> Nodes:
    """Normalised `x [N, C, F]`; plain if the kind looks at all nodes of a graph."""
    if self.kind == "none":
      return x
    if self.kind == "layer":
      return jax.tree.map(nn.LayerNorm(dtype=self.dtype, name="layer"), x)
    return over_nodes(x, slates)


def over_nodes(x: Nodes, slates: Slates) -> jax.Array:
  """Mean 0 and variance 1 over the nodes of each graph, for every configuration and channel.

  `(x - mean) / sqrt(variance + 1e-5)`. A node that is stored once for all configurations
  counts once in the sums of each.

  Args:
    x: `[N, C, F]` in either form.
    slates: of the nodes.

  Returns:
    `[N, C, F]`.
  """
  mean = nodes.graph_mean(x, slates)
  # A shift near the mean keeps the digits of the squares. The variance is the same for any.
  shift = jax.lax.stop_gradient(mean.mean(axis=1))
  near = nodes.spread(pooling.per_node(shift, slates.graph_of), x, slates)
  square = nodes.graph_mean(jax.tree.map(lambda v, s: jnp.square(v - s), x, near), slates)
  variance = jnp.maximum(square - jnp.square(mean - shift[:, None]), 0)
  factor = jax.lax.rsqrt(variance + EPSILON)
  of_nodes = lambda value: pooling.per_node(value, slates.graph_of)
  full = nodes.everywhere(x, slates)
  return ((full - of_nodes(mean)) * of_nodes(factor)).astype(full.dtype)


def masked_normal(x: jax.Array, mask: jax.Array) -> jax.Array:
  """`x [n, C, F]` with mean 0 and variance 1 over the C that `mask [n, C]` marks as real."""
  where = mask[..., None]
  count = jnp.maximum(where.sum(axis=1, keepdims=True), 1)
  # Equal values are exactly 0 from each other, and exactly 0 from their mean then.
  x = x - jax.lax.stop_gradient(x[:, :1])
  moment = lambda value: jnp.sum(jnp.where(where, value, 0), axis=1, keepdims=True) / count
  centred = x.astype(jnp.float32) - moment(x.astype(jnp.float32))
  return centred * jax.lax.rsqrt(moment(jnp.square(centred)) + EPSILON)


class Dropout(nn.Module):
  """Leaves out node features in training, the same ones for all configurations of a node.

  The published systems draw anew for each configuration, which puts noise on the
  differences that a ranking loss looks at.
  """

  rate: float

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates, *, train: bool) -> Nodes:
    """`[N, C, F]` of `x [N, C, F]`, in its form."""
    if not self.rate or not train:
      return x
    width = width_of(x)
    kept = nn.Dropout(self.rate, deterministic=False)(jnp.ones((len(slates.graph_of), width)))
    return jax.tree.map(
        lambda v, k: v * k.astype(v.dtype), x, nodes.spread(kept, x, slates))


def drop(x: jax.Array, options: Options, place: str, *, train: bool) -> jax.Array:
  """`x [G, C, F]` without some features, the same ones for all C, if the options drop there."""
  if not (train and options.dropout and place in options.dropout_in):
    return x
  return nn.Dropout(options.dropout, broadcast_dims=(1,), deterministic=False)(x)


def width_of(x: Nodes) -> int:
  """The number of features F of `[N, C, F]`."""
  return (x.shared if isinstance(x, SplitNodes) else x).shape[-1]


def rounds(options: Options) -> int:
  """Hops that messages travel in one layer."""
  return options.appnp_steps if options.conv == "appnp" else 1


class Convolution(nn.Module):
  """A convolution of the options, along all sides that they name.

  Attributes:
    options: of the ranker.
    features: width of the result.
    dense: makes linear layers.
  """

  options: Options
  features: int
  dense: Dense

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> Nodes:
    """New features `[N, C, features]` of `x [N, C, F]`."""
    options = self.options
    sides = EDGE_DIRECTIONS[options.edge_direction]
    apart = options.direction_merge == "concat"
    width = self.features // len(sides) if apart else self.features
    results = []
    for number, side in enumerate(sides):
      kind = KINDS[options.conv]
      # Of several directions that are added up, the first alone adds the node's own half.
      extra = {"own": apart or number == 0} if kind is Sage else {}
      results.append(kind(options, width, self.dense, side, name=side, **extra)(x, slates))
    return (nodes.concatenate if apart else nodes.add)(slates, *results)


class _OneSide(nn.Module):
  """A convolution along one side.

  Attributes:
    options: of the ranker.
    features: width of the result.
    dense: makes linear layers.
    side: operands, users or both.
  """

  options: Options
  features: int
  dense: Dense
  side: str


class Sage(_OneSide):
  """`W x_v + b + W_m mean(x_u)`; the mean of no neighbours is 0 (GraphSAGE).

  Attributes:
    own: whether the first half is there.
  """

  own: bool = True

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> Nodes:
    """`[N, C, features]` of `x [N, C, F]`."""
    sent = jax.tree.map(self.dense(self.features, use_bias=False, name="neighbours"), x)
    count = degree(slates.adjacency, self.side, len(slates.graph_of))
    heard = nodes.sum_neighbours(sent, slates, self.side)
    heard = nodes.scale(heard, 1 / jnp.maximum(count, 1), slates)
    if not self.own:
      return heard
    return nodes.add(slates, jax.tree.map(self.dense(self.features, name="self"), x), heard)


def _propagate(x: Nodes, slates: Slates, side: str) -> Nodes:
  """`sum(x_u / sqrt((1 + d_u) (1 + d_v)))` over v and its neighbours, in the form of `x`.

  The degrees are numbers of received messages at both ends, as PyTorch Geometric has it.
  """
  inverse = jax.lax.rsqrt(1 + degree(slates.adjacency, side, len(slates.graph_of)))
  total = nodes.sum_neighbours(nodes.scale(x, inverse, slates), slates, side, own=True)
  return nodes.scale(total, inverse, slates)


class Appnp(_OneSide):
  """`z <- (1 - a) P z + a W x` from `z = W x` on, P x as `_propagate` (Gasteiger et al. 2019)."""

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> Nodes:
    """`[N, C, features]` of `x [N, C, F]`."""
    restart = self.options.appnp_restart
    start = z = jax.tree.map(self.dense(self.features, name="dense"), x)
    for _ in range(self.options.appnp_steps):
      z = nodes.combine(lambda moved, first: (1 - restart) * moved + restart * first,
                        slates, _propagate(z, slates, self.side), start)
    return z


class Gin(_OneSide):
  """`MLP(x_v + sum(x_u))` (Xu et al. 2019), without a learned weight of `x_v`.

  The MLP is twice a linear layer, the norm and the activation (6th place).
  """

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> Nodes:
    """`[N, C, features]` of `x [N, C, F]`."""
    options = self.options
    x = nodes.add(slates, x, nodes.sum_neighbours(x, slates, self.side))
    for number in range(2):
      x = jax.tree.map(self.dense(self.features, name=f"dense_{number}"), x)
      x = Norm(options.norm, options.dtype, name=f"norm_{number}")(x, slates)
      x = Activation(options.after_conv, name=f"activation_{number}")(x)
    return x


class Gatv2(_OneSide):
  """`sum(a_uv W x_u) + b` over v and its neighbours (Brody et al. 2022).

  The weights a_uv of each head are a softmax over u of `w . leaky_relu(W x_u + W_v x_v)`.
  Every edge has its own weight in each configuration: the result is in the plain form.
  """

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> jax.Array:
    """`[N, C, features]` of `x [N, C, F]`."""
    heads, full = self.options.heads, nodes.everywhere(x, slates)
    by_head = lambda v: v.reshape(*v.shape[:2], heads, -1)
    sent = by_head(self.dense(self.features, name="senders")(full))
    own = by_head(self.dense(self.features, name="receivers")(full))
    weight = self.param("attention", nn.initializers.glorot_uniform(),
                        (heads, self.features // heads), jnp.float32)
    senders, receivers, mask = _with_loops(slates, self.side)
    hidden = nn.leaky_relu(sent[senders] + own[receivers], 0.2)
    logits = jnp.einsum("echd,hd->ech", hidden.astype(jnp.float32), weight)
    logits = jnp.where(mask[:, None, None], logits, MASKED)
    shares = jraph.segment_softmax(logits, receivers, len(full))
    total = jraph.segment_sum(shares[..., None] * sent[senders], receivers, len(full))
    bias = self.param("bias", nn.initializers.zeros, (1, 1, self.features), jnp.float32)
    return (total.reshape(*full.shape[:2], -1) + bias).astype(sent.dtype)


def _with_loops(slates: Slates, side: str) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Senders, receivers and mask of all edges, and of one from each node to itself, `[E']`."""
  graph, loops = slates.batch.graph, jnp.arange(len(slates.graph_of))
  ends = [(graph.senders, graph.receivers)] if side != USERS else []
  ends += [(graph.receivers, graph.senders)] if side in (USERS, BOTH) else []
  senders, receivers = (jnp.concatenate([*part, loops]) for part in zip(*ends))
  real = [slates.edge_mask] * len(ends)
  return senders, receivers, jnp.concatenate([*real, jnp.ones(len(loops), bool)])


KINDS = {"sage": Sage, "gatv2": Gatv2, "gin": Gin, "appnp": Appnp}
