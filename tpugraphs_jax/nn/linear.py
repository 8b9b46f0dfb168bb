"""Linear layers and embeddings that begin with PyTorch's parameters.

Most published systems were written in PyTorch, and what they learn depends on where they
begin. Its defaults, for a layer with K inputs:

    linear kernel and bias     uniform on [-1 / sqrt(K), 1 / sqrt(K)]
    table of an embedding      normal with mean 0 and deviation 1

`layers.Dense` and `layers.OpcodeEmbedding` begin as in Keras instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import itertools
import math
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import jraph
import optax

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.nn import layers, pooling
from tpugraphs_jax.nn.aggregation import take_rows
from tpugraphs_jax.nn.nodes import combine, Nodes, Slates

Initializer = Callable[..., jax.Array]


def uniform(inputs: int) -> Initializer:
  """The initialiser uniform on [-1 / sqrt(inputs), 1 / sqrt(inputs)]."""
  bound = 1 / math.sqrt(inputs)
  return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)


class Linear(nn.Module):
  """`W x + b`, of an array or of `Nodes`.

  Several inputs stand for their concatenation: `W [x, y] = W_x x + W_y y`. Each block of the
  kernel is applied to its own input before the results are brought to one form, so that
  features that configurations share are multiplied once, and a configuration once per row of
  the dictionary (`Layouts`) or per kernel (`Tiles`).

  Attributes:
    features: width of the result.
    use_bias: whether b is there.
    kernel_init: maps the number of inputs to an initialiser.
    bias_init: likewise.
    dtype: of the computation.
  """

  features: int
  use_bias: bool = True
  kernel_init: Callable[[int], Initializer] = uniform
  bias_init: Callable[[int], Initializer] = uniform
  dtype: Any = None

  @nn.compact
  def __call__(self, *inputs: Any) -> Any:
    """`[..., features]` of one array `[..., K]`, or `[N, C, features]` of node features.

    Args:
      *inputs: one array, or `Nodes`, `Layouts` and `Tiles`.
    """
    is_array = hasattr(inputs[0], "shape")
    widths = [inputs[0].shape[-1]] if is_array else [x.width for x in inputs]
    rows = sum(widths)
    kernel = self.param("kernel", self.kernel_init(rows), (rows, self.features), jnp.float32)
    blocks = jnp.split(kernel, list(itertools.accumulate(widths))[:-1])
    matmul = lambda x, block: layers.matmul(x, block, dtype=self.dtype)
    biased = lambda x: x
    if self.use_bias:
      bias = self.param("bias", self.bias_init(rows), (self.features,), jnp.float32)
      biased = lambda x: x + bias.reshape((1,) * (x.ndim - 1) + (-1,)).astype(x.dtype)
    if is_array:
      return biased(matmul(inputs[0], kernel))
    parts = [x.map(lambda rows, block=block: matmul(rows, block))
             for x, block in zip(inputs, blocks)]
    return combine(lambda *rows: biased(sum(rows[1:], rows[0])), *parts)


class Layouts:
  """Layout configurations of the nodes of a batch, not yet looked up.

  Args:
    slates: of the nodes.
    rows: `[R, V]` values of each row of the dictionary.
    elsewhere: `[N, V]` or `[1, V]` values of nodes that are not configurable; None = zeros,
      whatever function is applied.
  """

  def __init__(self, slates: Slates, rows: jax.Array, elsewhere: jax.Array | None = None):
    self.slates, self.rows, self.elsewhere = slates, rows, elsewhere
    self.width = rows.shape[-1]

  def map(self, function: Callable[[jax.Array], jax.Array]) -> Nodes:
    """`function`, `[n, V] -> [n, F]`, on every row of the dictionary, then of every node."""
    slates, batch = self.slates, self.slates.batch
    config = function(self.rows).at[batch.row_id].get(mode="fill", fill_value=0)
    shape = slates.num_nodes, config.shape[2]
    if self.elsewhere is None:
      other = jnp.zeros(shape, config.dtype)
    else:
      other = jnp.broadcast_to(function(self.elsewhere), shape)
      own = take_rows(other, batch.by_hop.nodes[0])[:, None]
      config = jnp.where(slates.is_configurable_row()[:, None, None], config, own)
    return Nodes(slates, other[:, None], config, 0)


class Tiles:
  """Tile configurations of the kernels of a batch, not yet on their nodes.

  Args:
    slates: of the nodes.
    values: `[G, C, V]`.
  """

  def __init__(self, slates: Slates, values: jax.Array):
    self.slates, self.values, self.width = slates, values, values.shape[-1]

  def map(self, function: Callable[[jax.Array], jax.Array]) -> Nodes:
    """`function`, `[G, C, V] -> [G, C, F]`, once per kernel, then on every node."""
    return self.slates.full(pooling.per_node(function(self.values), self.slates.graph_of))


class Embedding(nn.Module):
  """A vector for each of a few whole numbers.

  Attributes:
    rows: of the table.
    features: width of a vector.
    max_norm: longer vectors are shortened to this length; 0 = none. As in PyTorch the gradient
      is that of the shortened row; `keep_rows_short` shortens the table itself.
  """

  rows: int
  features: int
  max_norm: float = 0.0

  @nn.compact
  def __call__(self, index: jax.Array) -> jax.Array:
    """Vectors `[..., features]` float32 of `index [...]` int32."""
    table = self.param(
        "table", nn.initializers.normal(1.0), (self.rows, self.features), jnp.float32)
    if self.max_norm:
      table += jax.lax.stop_gradient(shortened(table, self.max_norm) - table)
    return table[index]


def shortened(table: jax.Array, max_norm: float) -> jax.Array:
  """Rows of `table [R, F]` cut to length `max_norm`."""
  length = jnp.sqrt(jnp.sum(jnp.square(table), axis=-1, keepdims=True))
  return jnp.where(length > max_norm, table * (max_norm / (length + 1e-7)), table)


def keep_rows_short(
    optimizer: optax.GradientTransformation, max_norms: Mapping[tuple[str, ...], float]
) -> optax.GradientTransformation:
  """The optimizer of a network whose embeddings have a `max_norm`.

  PyTorch shortens rows in place when they are looked up, so that its optimizer updates the
  shortened row. Here all rows are shortened before an update.

  Args:
    optimizer: of the shortened parameters.
    max_norms: length of the rows of tables, by their path in the parameters.
  """
  def shorten(params):
    flat = traverse_util.flatten_dict(params)
    short = {path: shortened(flat[path], norm) for path, norm in max_norms.items()}
    return traverse_util.unflatten_dict(flat | short)

  def update(grads, state, params, **options):
    short = shorten(params)
    updates, state = optimizer.update(grads, state, short, **options)
    return jax.tree.map(lambda new, s, old: new + (s - old), updates, short, params), state

  return optax.GradientTransformationExtraArgs(optimizer.init, update)


class Opcodes(nn.Module):
  """Embedded opcodes; attributes as in `Embedding`."""

  features: int
  max_norm: float = 0.0

  @nn.compact
  def __call__(self, graph: jraph.GraphsTuple) -> jax.Array:
    """Embeds `graph.nodes["opcode"] [N]` to `[N, features]` float32."""
    embed = Embedding(OPCODES, self.features, self.max_norm, name="embedding")
    return embed(jnp.asarray(graph.nodes["opcode"]))
