"""Attention between the nodes of a graph, and between tokens."""

from __future__ import annotations

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import aggregation, layers
from tpugraphs_jax.nn.layers import Linear
from tpugraphs_jax.nn.nodes import concat, EVERYWHERE, Nodes, NONE, Slates

_BLOCK = 512  # rows of one graph per product


def positive(x: jax.Array) -> jax.Array:
  """`elu(x) + 1` of `x [..., D]`, the kernel of linear attention (Katharopoulos et al. 2020)."""
  return nn.elu(x) + 1


def unit_and_one(x: jax.Array) -> jax.Array:
  """A 1, then `x [..., D]` scaled to length 1: `[..., 1 + D]`.

  The product of two such vectors is `1 + cos`, the weight of DIFFormer-s (Wu et al. 2023).
  """
  constant = jnp.ones_like(x[..., :1])
  return jnp.concatenate([constant, layers.l2_normalize(x)], axis=-1)


class KernelAttention(nn.Module):
  """Attention of nodes to all nodes of their graph: `sum_j w_ij v_j`.

  The weights w_ij are `f(q_i) . f(k_j)`, divided by their sum over j. The cost is linear in the
  number of nodes.

  Attributes:
    features: width of queries, keys and the result.
    kernel: the function f on `[..., D]`: `positive` or `unit_and_one`.
    heads: number of heads; their results are concatenated.
    linear: creates a linear layer of a width.
  """

  features: int
  kernel: Callable[[jax.Array], jax.Array]
  heads: int
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, features]`."""
    query, key = (self.linear(self.features, name=name)(x) for name in ("query", "key"))
    value = self.linear(self.features, use_bias=False, name="value")(x)
    heads = [
      self._attend(*(_head(part, number, self.heads) for part in (query, key, value)))
      for number in range(self.heads)
    ]
    return concat(*heads)

  def _attend(self, query: Nodes, key: Nodes, value: Nodes) -> Nodes:
    """The result of one head."""
    # A channel of ones sums the weights.
    value = value.map(lambda v: jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1))
    products = graph_products(key.map(self.kernel), value)
    total = times_graph(query.map(self.kernel), products)
    # Weights of padding nodes are 0.
    return total.map(lambda v: v[..., :-1] / jnp.where(v[..., -1:] == 0, 1, v[..., -1:]))


def _head(x: Nodes, number: int, heads: int) -> Nodes:
  """The channels of a head."""
  width = x.width // heads
  return x.map(lambda v: v[..., number * width : (number + 1) * width])


# Sums over pairs of nodes in linear time: `sum_j (q_i . k_j) v_j = q_i M`, with one matrix
# `M = sum_j k_j^T v_j` per graph.


def graph_products(x: Nodes, y: Nodes) -> jax.Array:
  """`sum_j x_j^T y_j` over the nodes j of each graph, `[G, C, X, Y]` float32.

  C is 1 if both arguments are equal in all configurations.

  Args:
    x: `[N, C, X]`.
    y: `[N, C, Y]`.
  """
  slates, hop, precision = x.slates, max(x.hop, y.hop), _precision()
  x, y = x.within(hop), y.within(hop)
  graph_of, graphs = slates.graph_of, slates.graphs
  if hop in (NONE, EVERYWHERE):
    return _products(x.everywhere(), y.everywhere(), graph_of, graphs, precision)
  (x_shared, x_varying), (y_shared, y_varying) = x.both(), y.both()
  unreached = jnp.where((slates.batch.by_hop.hop > hop)[:, None, None], x_shared, 0)
  row_graph = graph_of.at[slates.nodes_within(hop)].get(mode="fill", fill_value=graphs)
  order = jnp.argsort(row_graph)
  reached = _products(x_varying[order], y_varying[order], row_graph[order], graphs, precision)
  return _products(unreached, y_shared, graph_of, graphs, precision) + reached


def times_graph(x: Nodes, matrix: jax.Array) -> Nodes:
  """`x_i M` with the matrix M of each node's graph, `[N, C, Y]`.

  Args:
    x: `[N, C, X]`.
    matrix: `[G, C, X, Y]`.
  """
  slates, precision = x.slates, _precision()
  if x.hop in (NONE, EVERYWHERE):
    result = _times(x.everywhere(), matrix, slates.graph_of, precision)
    return slates.nodes(result[:, 0]) if result.shape[1] == 1 else slates.full(result)
  nodes = slates.nodes_within(x.hop)
  row_graph = slates.graph_of.at[nodes].get(mode="fill", fill_value=slates.graphs)
  order = jnp.argsort(row_graph)
  shared, varying = x.both()
  reached = _times(varying[order], matrix, row_graph[order], precision)
  result = _times(shared, matrix, slates.graph_of, precision)
  result = jnp.broadcast_to(result, (len(result), *reached.shape[1:]))
  return slates.full(result.at[nodes[order]].set(reached, mode="drop"))


class TimesGraph:
  """`times_graph` as an input of `Linear`.

  The layer is applied to the matrices, which have fewer rows than a graph has nodes.

  Args:
    x: `[N, C, X]`.
    matrix: `[G, C, X, Y]`.
  """

  def __init__(self, x: Nodes, matrix: jax.Array):
    self.x, self.matrix = x, matrix
    self.width = matrix.shape[-1]

  def map(self, function: Callable[[jax.Array], jax.Array]) -> Nodes:
    """Applies a linear function without bias to every `x_i M`."""
    return times_graph(self.x, function(self.matrix))


# `_products` and `_times` are linear in both arguments, and each is the derivative of the other.
# `configs` is the number of configurations C of the result; 1 sums over configurations. Rows are
# sorted by graph. Precision is an argument, because gradients are traced after
# `nn.layers.Precise.apply` has returned.


def _precision() -> str | None:
  return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _products(x: jax.Array, y: jax.Array, graph_of: jax.Array, graphs: int, precision: str | None):
  """`[n, C, X]` and `[n, C, Y]` to `[graphs, C, X, Y]` float32; either C may be 1."""
  return _add_products(x, y, graph_of, graphs, max(x.shape[1], y.shape[1]), precision)


def _products_fwd(x, y, graph_of, graphs, precision):
  return _products(x, y, graph_of, graphs, precision), (x, y, graph_of)


def _products_bwd(graphs, precision, residuals, cotangent):
  del graphs
  x, y, graph_of = aggregation.arrays(residuals)
  dx = _multiply_rows(y, jnp.swapaxes(cotangent, 2, 3), graph_of, x.shape[1], precision)
  dy = _multiply_rows(x, cotangent, graph_of, y.shape[1], precision)
  return dx.astype(x.dtype), dy.astype(y.dtype), None


_products.defvjp(_products_fwd, _products_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _times(
  x: jax.Array, matrix: jax.Array, graph_of: jax.Array, precision: str | None
) -> jax.Array:
  """`[n, C, X]` and `[G, C, X, Y]` to `[n, C, Y]` in the dtype of x; either C may be 1."""
  configs = max(x.shape[1], matrix.shape[1])
  return _multiply_rows(x, matrix, graph_of, configs, precision).astype(x.dtype)


def _times_fwd(x, matrix, graph_of, precision):
  return _times(x, matrix, graph_of, precision), (x, matrix, graph_of)


def _times_bwd(precision, residuals, cotangent):
  x, matrix, graph_of = aggregation.arrays(residuals)
  dx = _multiply_rows(cotangent, jnp.swapaxes(matrix, 2, 3), graph_of, x.shape[1], precision)
  dm = _add_products(x, cotangent, graph_of, len(matrix), matrix.shape[1], precision)
  return dx.astype(x.dtype), dm, None


_times.defvjp(_times_fwd, _times_bwd)


def _add_products(x, y, graph_of, graphs: int, configs: int, precision: str | None) -> jax.Array:
  def add(total, start, mask, graph):
    right = jax.lax.dynamic_slice_in_dim(y, start, len(mask)).astype(jnp.float32)
    new = total[graph] + _einsum("ncx,ncy->cxy", _rows(x, start, mask), right, configs, precision)
    return jax.lax.dynamic_update_index_in_dim(total, new, graph, 0)

  return _each_block(add, jnp.zeros((graphs, configs, x.shape[2], y.shape[2])), graph_of, graphs)


def _multiply_rows(x, matrix, graph_of, configs: int, precision: str | None) -> jax.Array:
  def add_rows(result, start, mask, graph):
    rows = _einsum("ncx,cxy->ncy", _rows(x, start, mask), matrix[graph], configs, precision)
    before = jax.lax.dynamic_slice_in_dim(result, start, len(rows))
    return jax.lax.dynamic_update_slice_in_dim(result, before + rows, start, 0)

  return _each_block(add_rows, jnp.zeros((len(x), configs, matrix.shape[3])), graph_of, len(matrix))


def _einsum(
  spec: str, x: jax.Array, y: jax.Array, configs: int, precision: str | None
) -> jax.Array:
  """`jnp.einsum`; an axis c of length 1 is broadcast, and `configs` = 1 sums over c."""
  inputs, result = spec.split("->")
  parts, names = [], []
  for part, name in zip((x, y), inputs.split(",")):
    is_shared = part.shape[name.index("c")] == 1
    parts.append(part.squeeze(name.index("c")) if is_shared else part)
    names.append(name.replace("c", "") if is_shared else name)
  axes = result.replace("c", "") if configs == 1 else result
  value = jnp.einsum(f"{','.join(names)}->{axes}", *parts, precision=precision)
  return jnp.expand_dims(value, result.index("c")) if configs == 1 else value


def _rows(x: jax.Array, start: jax.Array, mask: jax.Array) -> jax.Array:
  """Rows of `x [n, ...]` from `start` on in float32, 0 where `mask` is False."""
  rows = jax.lax.dynamic_slice_in_dim(x, start, len(mask)).astype(jnp.float32)
  return jnp.where(mask[:, None, None], rows, 0)


def _each_block(
  function: Callable[..., jax.Array], initial: jax.Array, graph_of: jax.Array, graphs: int
) -> jax.Array:
  """Folds `function(value, first row, mask [rows], graph)` over blocks of rows.

  All rows of a block belong to one graph. The cost does not depend on the number of graphs.
  """
  if graphs == 1:  # one block is as fast as the loop, and needs less memory
    return function(initial, 0, graph_of == 0, 0)
  size = min(_BLOCK, len(graph_of))
  count = jnp.sum(graph_of[None] == jnp.arange(graphs)[:, None], axis=1)
  first, blocks = jnp.cumsum(count) - count, -(-count // size)
  last = jnp.cumsum(blocks)

  def body(block, value):
    graph = jnp.sum(block >= last)
    start = first[graph] + (block - (last - blocks)[graph]) * size
    clamped = jnp.minimum(start, len(graph_of) - size)
    rows = clamped + jnp.arange(size)
    mask = (rows >= start) & (rows < first[graph] + count[graph])
    return function(value, clamped, mask, graph)

  return jax.lax.fori_loop(0, last[-1], body, initial)


# PyTorch's `xavier_uniform_` of a kernel `[K, 3 K]`, for one of query, key and value.
_PACKED = nn.initializers.variance_scaling(0.5, "fan_avg", "uniform")


class SoftmaxAttention(nn.Module):
  """Softmax attention with several heads (Vaswani et al. 2017), initialised as in PyTorch.

  Attributes:
    features: width of the result.
    heads: number of heads.
    linear: creates a linear layer of a width.
  """

  features: int
  heads: int
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: jax.Array, to: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Maps tokens `x [..., L, F]`, which attend to `to [..., M, F]`, to `[..., L, features]`.

    `mask [..., 1, L, M]` bool: pairs that attend; None = all.
    """
    by_head = lambda v: v.reshape(*v.shape[:-1], self.heads, -1)
    linear = functools.partial(self.linear, self.features, bias_init=nn.initializers.zeros)
    project = functools.partial(linear, kernel_init=_PACKED)
    query = by_head(project(name="query")(x))
    key, value = (by_head(project(name=name)(to)) for name in ("key", "value"))
    heads = nn.dot_product_attention(query, key, value, mask=mask)
    return linear(name="out")(heads.reshape(*heads.shape[:-2], -1))


class NodeAttention(nn.Module):
  """Softmax attention between the nodes of a graph, with cost N^2.

  Attributes are as in `SoftmaxAttention`.
  """

  features: int
  heads: int
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, features]`."""
    attend = SoftmaxAttention(self.features, self.heads, self.linear, name="heads")
    return between_nodes(lambda tokens, mask: attend(tokens, tokens, mask), x)


def between_nodes(attend: Callable[[jax.Array, jax.Array], jax.Array], x: Nodes) -> Nodes:
  """Applies attention to the nodes of each graph, separately per configuration: `[N, C, F']`.

  Args:
    attend: maps tokens `[C, N, F]` and a mask of pairs `[1, 1, N, N]` to `[C, N, F']`.
    x: `[N, C, F]`.
  """
  tokens = jnp.swapaxes(x.everywhere(), 0, 1)
  result = attend(tokens, same_graph(x.slates)[None, None])
  return x.slates.from_all(jnp.swapaxes(result, 0, 1), x)


def same_graph(slates: Slates) -> jax.Array:
  """Mask of pairs of nodes in the same graph, `[N, N]` bool."""
  return slates.graph_of[:, None] == slates.graph_of[None]


class TransformerLayer(nn.Module):
  """A transformer layer with normalisation after each half (Vaswani et al. 2017).

  Attributes:
    features: width of input and result.
    heads: number of heads.
    linear: creates a linear layer of a width.
    epsilon: epsilon of the norms.
  """

  features: int
  heads: int
  linear: Callable[..., nn.Module] = Linear
  epsilon: float = 1e-5

  @nn.compact
  def __call__(
    self, x: jax.Array, to: jax.Array | None = None, mask: jax.Array | None = None
  ) -> jax.Array:
    """Maps tokens `x [..., L, features]`, which attend to `to [..., M, F]` or to themselves.

    `mask [..., 1, L, M]` bool: pairs that attend; None = all.
    """
    norm = lambda name: nn.LayerNorm(epsilon=self.epsilon, name=name)
    attend = SoftmaxAttention(self.features, self.heads, self.linear, name="heads")
    x = norm("norm_0")(x + attend(x, x if to is None else to, mask))
    hidden = nn.relu(self.linear(self.features, name="hidden")(x))
    return norm("norm_1")(x + self.linear(self.features, name="out")(hidden))
