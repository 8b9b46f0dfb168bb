"""Attention between the nodes of a graph, and between tokens."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import ABSENT
from tpugraphs_jax.nn import layers
from tpugraphs_jax.nn.aggregation import take_rows
from tpugraphs_jax.nn.linear import Linear
from tpugraphs_jax.nn.nodes import Nodes, Slates

_BLOCK = 256  # nodes that kernel attention takes at a time


def positive(x: jax.Array) -> jax.Array:
  """`elu(x) + 1` of `x [..., D]`, the kernel of linear attention (Katharopoulos et al. 2020)."""
  return nn.elu(x) + 1


def unit_and_one(x: jax.Array) -> jax.Array:
  """`x [..., D]` scaled to length 1, with a 1 in front: `[..., 1 + D]`.

  Products of two such vectors are `1 + cos`, the weights of DIFFormer-s (Wu et al. 2023).
  """
  ones = jnp.ones_like(x[..., :1])
  return jnp.concatenate([ones, layers.l2_normalize(x)], axis=-1)


class KernelAttention(nn.Module):
  """Attention of every node to all nodes of its graph, at a cost linear in nodes.

  `sum_j (f(q_i) . f(k_j)) v_j`, over nodes j of the graph of i.

  Attributes:
    features: width of the result.
    kernel: the function f of `[..., D]`: `positive` or `unit_and_one`.
    heads: number of heads, whose results stand side by side.
    keys: width of queries and keys; 0 = `features`.
    normalize: divide by `sum_j f(q_i) . f(k_j)`.
    linear: makes linear layers by their width.
    precision: of the products of queries, keys and values.
  """

  features: int
  kernel: Callable[[jax.Array], jax.Array] = positive
  heads: int = 1
  keys: int = 0
  normalize: bool = True
  linear: Callable[..., nn.Module] = Linear
  precision: Any = "highest"

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """`[N, C, features]` of `x [N, C, F]`."""
    by_head = lambda v: v.reshape(*v.shape[:2], self.heads, -1)
    width = self.keys or self.features
    query, key = (self.linear(width, name=name)(x).map(lambda v: self.kernel(by_head(v)))
                  for name in ("query", "key"))
    value = self.linear(self.features, use_bias=False, name="value")(x).map(by_head)
    heard = kernel_attention(
        *(part.everywhere() for part in (query, key, value)), x.slates, normalize=self.normalize,
        precision=self.precision)
    heard = heard.reshape(*heard.shape[:2], -1).astype(value.dtype)
    return x.slates.from_all(heard, x)


def kernel_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, slates: Slates, *, normalize: bool,
    precision: Any = "highest",
) -> jax.Array:
  """`sum_j (q_i . k_j) v_j` over the nodes j of i's graph, at a cost linear in nodes.

  Nodes pass in blocks of one graph each: first `sum_j k_j v_j` is added up for every graph,
  then every block of queries meets the sum of its graph. The cost does not depend on the
  number of graphs.

  Args:
    query: `[N, C, H, D]`, through the kernel.
    key: likewise.
    value: `[N, C, H, V]`.
    slates: of the nodes.
    normalize: divide by `sum_j (q_i . k_j)`.
    precision: of the products.

  Returns:
    `[N, C, H, V]` float32; zeros for padding nodes.
  """
  product = functools.partial(jnp.einsum, precision=precision)
  blocks, graph_of = graph_blocks(slates)
  take = lambda x: take_rows(x.astype(jnp.float32), blocks)
  if normalize:  # a further channel of ones adds the weights up
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)

  def add(state, block):
    key, value, graph = block
    return state.at[graph].add(product("nchd,nche->chde", key, value)), None

  @jax.checkpoint  # keeps the queries of a block, not a copy of its graph's state
  def hear(state, block):
    query, graph = block
    return state, product("nchd,chde->nche", query, state[graph])

  state = jnp.zeros((slates.graphs, *key.shape[1:], value.shape[-1]))
  state, _ = jax.lax.scan(add, state, (take(key), take(value), graph_of))
  _, heard = jax.lax.scan(hear, state, (take(query), graph_of))
  total = jnp.zeros(value.shape).at[blocks].set(heard, mode="drop")
  if not normalize:
    return total
  weights = total[..., -1:]
  return total[..., :-1] / jnp.where(weights == 0, 1, weights)  # padding has none


def graph_blocks(slates: Slates) -> tuple[jax.Array, jax.Array]:
  """All nodes in blocks, each of one graph.

  Returns:
    The nodes of each block, `[B, _BLOCK]` int32, ABSENT where a graph has no more; and the
    graph of each block, `[B]` int32.
  """
  size, count = min(_BLOCK, slates.num_nodes), slates.graph_nodes
  number = -(-count // size)  # blocks of each graph
  last = jnp.cumsum(number)
  block = jnp.arange(-(-slates.num_nodes // size) + slates.graphs)
  graph = jnp.sum(block[:, None] >= last[None], axis=1)
  place = (block - (last - number).at[graph].get(mode="clip")) * size
  place = place[:, None] + jnp.arange(size)[None]
  first = (jnp.cumsum(count) - count).at[graph].get(mode="clip")
  is_node = (graph < slates.graphs)[:, None] & (
      place < count.at[graph].get(mode="clip")[:, None])
  nodes = jnp.where(is_node, first[:, None] + place, ABSENT)
  return nodes, jnp.minimum(graph, slates.graphs - 1)


def _zeros(inputs: int) -> Callable[..., jax.Array]:
  """The first biases of PyTorch's attention."""
  del inputs
  return nn.initializers.zeros


def _packed(inputs: int) -> Callable[..., jax.Array]:
  """`xavier_uniform_` of a kernel `[K, 3 K]` of which query, key and value have a third each."""
  del inputs  # known from the shape
  return nn.initializers.variance_scaling(0.5, "fan_avg", "uniform")


class SoftmaxAttention(nn.Module):
  """Softmax attention with several heads (Vaswani et al. 2017), which begins as in PyTorch.

  Attributes:
    features: width of the result.
    heads: number of heads.
    linear: makes linear layers by their width.
    precision: of the products of queries, keys and values.
  """

  features: int
  heads: int
  linear: Callable[..., nn.Module] = Linear
  precision: Any = "highest"

  @nn.compact
  def __call__(self, x: jax.Array, to: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """`[..., L, features]` of tokens `x [..., L, F]`, which attend to `to [..., M, F]`.

    `mask [..., 1, L, M]` bool says which pairs count; all of them if None.
    """
    by_head = lambda v: v.reshape(*v.shape[:-1], self.heads, -1)
    linear = functools.partial(self.linear, self.features, bias_init=_zeros)
    sent = functools.partial(linear, kernel_init=_packed)
    query = by_head(sent(name="query")(x))
    key, value = (by_head(sent(name=name)(to)) for name in ("key", "value"))
    heard = nn.dot_product_attention(query, key, value, mask=mask, precision=self.precision)
    return linear(name="out")(heard.reshape(*heard.shape[:-2], -1))


class NodeAttention(nn.Module):
  """Softmax attention between the nodes of a graph; its cost grows with N^2.

  Attributes: as `SoftmaxAttention`.
  """

  features: int
  heads: int
  linear: Callable[..., nn.Module] = Linear
  precision: Any = "highest"

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """`[N, C, features]` of `x [N, C, F]`."""
    slates, by_config = x.slates, jnp.swapaxes(x.everywhere(), 0, 1)
    attend = SoftmaxAttention(
        self.features, self.heads, self.linear, self.precision, name="heads")
    heard = jnp.swapaxes(attend(by_config, by_config, same_graph(slates)[None, None]), 0, 1)
    return slates.from_all(heard, x)


def same_graph(slates: Slates) -> jax.Array:
  """Which pairs of nodes are of one graph, `[N, N]` bool."""
  return slates.graph_of[:, None] == slates.graph_of[None]


class TransformerLayer(nn.Module):
  """A transformer layer with normalisation after each half (Vaswani et al. 2017).

  Attributes:
    features: width of input and result.
    heads: number of heads.
    hidden: width of the hidden layer; 0 = `features`.
    linear: makes linear layers by their width.
    precision: of the products of queries, keys and values.
    epsilon: of the norms.
  """

  features: int
  heads: int
  hidden: int = 0
  linear: Callable[..., nn.Module] = Linear
  precision: Any = "highest"
  epsilon: float = 1e-5

  @nn.compact
  def __call__(
      self, x: jax.Array, to: jax.Array | None = None, mask: jax.Array | None = None
  ) -> jax.Array:
    """`[..., L, features]` of tokens `x`, which attend to `to [..., M, F]`, or to themselves.

    `mask [..., 1, L, M]` bool says which pairs count; all of them if None.
    """
    norm = lambda name: nn.LayerNorm(epsilon=self.epsilon, name=name)
    attend = SoftmaxAttention(
        self.features, self.heads, self.linear, self.precision, name="heads")
    x = norm("norm_0")(x + attend(x, x if to is None else to, mask))
    hidden = nn.relu(self.linear(self.hidden or self.features, name="hidden")(x))
    return norm("norm_1")(x + self.linear(self.features, name="out")(hidden))
