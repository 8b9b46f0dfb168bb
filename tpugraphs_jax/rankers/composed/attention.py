"""Attention between nodes, between channels and between configurations."""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import layers
from tpugraphs_jax.rankers.composed import pooling
from tpugraphs_jax.rankers.composed.split_nodes import SplitNodes
from tpugraphs_jax.rankers.composed import nodes
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates
from tpugraphs_jax.rankers.composed.operations import MASKED, width_of
from tpugraphs_jax.rankers.composed.options import Options

Dense = Callable[..., nn.Module]


class GlobalAttention(nn.Module):
  """Attention of every node to all nodes of its graph, `[N, C, features]` in the plain form.

  Attributes:
    options: of the ranker.
    features: width of the result.
    dense: makes linear layers.
  """

  options: Options
  features: int
  dense: Dense

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> jax.Array:
    """Attends from and to `x [N, C, F]`."""
    options = self.options
    if options.global_attention == "softmax":
      return NodeAttention(options.heads, self.features, name="softmax")(
          nodes.everywhere(x, slates), slates)
    width = options.attention_keys or self.features
    project = lambda name, width, **kwargs: jax.tree.map(
        lambda v, layer=self.dense(width, name=name, **kwargs): _by_head(layer(v), options.heads),
        x)
    query, key = project("query", width), project("key", width)
    value = project("value", self.features, use_bias=False)
    kernel = _KERNELS[options.global_attention]
    normalize = options.attention_normalize or options.global_attention == "difformer"
    return kernel_attention(
        jax.tree.map(kernel, query), jax.tree.map(kernel, key), value, slates,
        normalize=normalize)


def _by_head(x: jax.Array, heads: int) -> jax.Array:
  return x.reshape(*x.shape[:2], heads, -1)


def positive(x: jax.Array) -> jax.Array:
  """`elu(x) + 1` of `x [..., D]`, the kernel of linear attention (Katharopoulos et al. 2020)."""
  return nn.elu(x) + 1


def unit_and_one(x: jax.Array) -> jax.Array:
  """`x [..., D]` scaled to length 1, with a 1 in front: `[..., 1 + D]`.

  Products of two such vectors are `1 + cos`, the weights of DIFFormer-s (Wu et al. 2023).
  """
  ones = jnp.ones_like(x[..., :1])
  return jnp.concatenate([ones, layers.l2_normalize(x)], axis=-1)


_KERNELS = {"linear": positive, "difformer": unit_and_one}


def kernel_attention(
    query: Nodes, key: Nodes, value: Nodes, slates: Slates, *, normalize: bool
) -> jax.Array:
  """`sum_j (q_i . k_j) v_j` over the nodes j of i's graph, at a cost linear in nodes.

  The sums `k_j v_j` over nodes that are stored once are made once. Graphs are passed one
  after the other: a state per graph is small, a state per node would not be.

  Args:
    query: `[N, C, H, D]` in either form, through the kernel.
    key: likewise.
    value: `[N, C, H, V]`.
    slates: of the nodes.
    normalize: divide by `sum_j (q_i . k_j)`.

  Returns:
    `[N, C, H * V]`.
  """
  if normalize:  # a further channel of ones adds the weights up
    value = jax.tree.map(
        lambda v: jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1), value)
  keys, masks = nodes.chosen(key, slates)
  values, _ = nodes.chosen(value, slates)
  of_graph = pooling.selection(slates.graph_of, slates.graphs)

  def attend(total: Nodes, graph):
    shared, varying, member = graph
    state = _state(keys.shared, values.shared, shared) + _state(
        keys.varying, values.varying, varying)
    heard = jax.tree.map(lambda q: _heard(q, state), query)
    rows = nodes.spread(member, query, slates)
    return jax.tree.map(
        lambda sum_, new, own: sum_ + own[..., None, None] * new, total, heard, rows), None

  configs = max(keys.varying.shape[1], keys.shared.shape[1])
  start = jax.tree.map(
      lambda q: jnp.zeros((len(q), configs, q.shape[2], values.varying.shape[-1])), query)
  total, _ = jax.lax.scan(attend, start, (masks.shared, masks.varying, of_graph))
  total = nodes.everywhere(total, slates)
  if normalize:
    weights = total[..., -1:]
    total = total[..., :-1] / jnp.where(weights == 0, 1, weights)  # padding has none
  return total.reshape(*total.shape[:2], -1).astype(values.varying.dtype)


def _state(key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
  """Sum of `key [n, C, H, D]` times `value [n, C, H, V]` over `mask [n]`: `[C, H, D, V]`."""
  return jnp.einsum("n,nchd,nche->chde", mask, key.astype(jnp.float32),
                    value.astype(jnp.float32), precision="highest")


def _heard(query: jax.Array, state: jax.Array) -> jax.Array:
  """`query [n, C, H, D]`, or of one configuration, times `state [C, H, D, V]`: `[n, C, H, V]`."""
  query = query.astype(jnp.float32)
  if query.shape[1] < len(state):
    return jnp.einsum("nhd,chde->nche", query[:, 0], state, precision="highest")
  return jnp.einsum("nchd,chde->nche", query, state, precision="highest")


class NodeAttention(nn.Module):
  """Softmax attention between the nodes of a graph; its cost grows with N^2.

  Attributes:
    heads: number of heads.
    features: width of the result.
  """

  heads: int
  features: int

  @nn.compact
  def __call__(self, x: jax.Array, slates: Slates) -> jax.Array:
    """`[N, C, features]` of plain `x [N, C, F]`."""
    same = slates.graph_of[:, None] == slates.graph_of[None]
    by_config = jnp.swapaxes(x, 0, 1)
    attend = nn.MultiHeadDotProductAttention(
        self.heads, qkv_features=self.features, out_features=self.features, name="heads")
    return jnp.swapaxes(attend(by_config, by_config, mask=same[None, None]), 0, 1)


class EncoderLayer(nn.Module):
  """A transformer layer with normalisation after each half (Vaswani et al. 2017).

  Attributes:
    features: width of input and result.
    heads: number of heads.
  """

  features: int
  heads: int

  @nn.compact
  def __call__(
      self, x: jax.Array, to: jax.Array | None = None, mask: jax.Array | None = None
  ) -> jax.Array:
    """`[..., L, features]` of tokens `x`, which attend to `to [..., M, F]`, or to themselves.

    `mask [..., 1, L, M]` bool says which pairs count; all of them if None.
    """
    attend = nn.MultiHeadDotProductAttention(
        self.heads, qkv_features=self.features, out_features=self.features, name="heads")
    x = nn.LayerNorm(name="norm_0")(x + attend(x, x if to is None else to, mask=mask))
    hidden = nn.relu(layers.Dense(self.features, name="hidden")(x))
    return nn.LayerNorm(name="norm_1")(x + layers.Dense(self.features, name="out")(hidden))


class ChannelGate(nn.Module):
  """`x * sigmoid(W_2 relu(W_1 x))`, W_1 to a bottleneck (1st place).

  Attributes:
    reduction: the bottleneck is so many times narrower.
    dense: makes linear layers.
  """

  reduction: int
  dense: Dense

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """`[N, C, F]` of `x [N, C, F]`."""
    width = width_of(x)
    narrow = self.dense(max(1, width // self.reduction), name="squeeze")
    wide = self.dense(width, name="excite")
    return jax.tree.map(lambda v: v * nn.sigmoid(wide(nn.relu(narrow(v)))), x)


class ConfigGate(nn.Module):
  """Features beside themselves times a softmax over the configurations (1st place).

  `[x, x * softmax_C(x / t)]` for every node and channel, t learned. A node that is the same
  in all configurations has weights 1 / C, without a softmax.

  Attributes:
    temperature: start of t.
  """

  temperature: float = 0.5

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> Nodes:
    """`[N, C, 2 F]` of `x [N, C, F]`."""
    t = self.param(
        "temperature", nn.initializers.constant(self.temperature), (), jnp.float32)

    def gated(rows, mask):
      exact = rows.astype(jnp.float32)
      weights = masked_softmax(exact / t, mask)
      return jnp.concatenate([rows, (exact * weights).astype(rows.dtype)], axis=-1)

    if not isinstance(x, SplitNodes):
      return gated(x, slates.node_configs)
    mask = nodes.spread(slates.node_configs, x, slates).varying[:, 0]
    count = jnp.maximum(slates.node_configs.sum(axis=1), 1)[:, None, None]
    shared = jnp.concatenate([x.shared, x.shared / count.astype(x.shared.dtype)], axis=-1)
    return SplitNodes(shared, gated(x.varying, mask), x.hop)


def masked_softmax(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Softmax of `x [n, C, F]` over C where `mask [n, C]` is set, 0 elsewhere."""
  where = mask[..., None]
  return jnp.where(where, nn.softmax(jnp.where(where, x, MASKED), axis=1), 0)
