"""Linear layers and embeddings with the initialisation of PyTorch.

Most published systems were written in PyTorch, and their results depend on its defaults. For a
layer with K inputs:

    linear kernel and bias     uniform on [-1 / sqrt(K), 1 / sqrt(K)]
    embedding table            normal with mean 0 and deviation 1

`layers.Dense` and `layers.OpcodeEmbedding` are initialised as in Keras.
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
from jax.typing import DTypeLike
import jraph
import optax

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.data.batching import Array
from tpugraphs_jax.nn import layers, pooling
from tpugraphs_jax.nn.aggregation import take_rows
from tpugraphs_jax.nn.nodes import combine, Nodes, Slates

Initializer = Callable[..., jax.Array]


def uniform(inputs: int) -> Initializer:
  """An initialiser, uniform on [-1 / sqrt(inputs), 1 / sqrt(inputs)]."""
  bound = 1 / math.sqrt(inputs)
  return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)


class Linear(nn.Module):
  """`W x + b` on an array or on `Nodes`.

  Several inputs are concatenated: `W [x, y] = W_x x + W_y y`. Each block of the kernel is applied
  to its input before the results are added. Features that configurations share are multiplied once,
  a configuration once per row of the dictionary (`Layouts`) or per kernel (`Tiles`).

  Attributes:
    features: width of the result.
    use_bias: add b.
    kernel_init, bias_init: initialisers; None = `uniform` of the number of inputs.
    dtype: dtype of the computation.
  """

  features: int
  use_bias: bool = True
  kernel_init: Initializer | None = None
  bias_init: Initializer | None = None
  dtype: DTypeLike | None = None

  @nn.compact
  def __call__(self, *inputs: Any) -> Any:
    """Maps one array `[..., K]` to `[..., features]`, or node features to `[N, C, features]`.

    Args:
      *inputs: one array, or `Nodes`, `Layouts` and `Tiles`.
    """
    is_array = hasattr(inputs[0], "shape")
    widths = [inputs[0].shape[-1]] if is_array else [x.width for x in inputs]
    rows = sum(widths)
    init = self.kernel_init or uniform(rows)
    kernel = self.param("kernel", init, (rows, self.features), jnp.float32)
    blocks = jnp.split(kernel, list(itertools.accumulate(widths))[:-1])
    matmul = lambda x, block: layers.matmul(x, block, dtype=self.dtype)
    add_bias = lambda x: x
    if self.use_bias:
      bias = self.param("bias", self.bias_init or uniform(rows), (self.features,), jnp.float32)
      add_bias = lambda x: x + bias.reshape((1,) * (x.ndim - 1) + (-1,)).astype(x.dtype)
    if is_array:
      return add_bias(matmul(inputs[0], kernel))
    product = lambda x, block: x.map(lambda rows: matmul(rows, block))
    parts = map(product, inputs, blocks)
    return combine(lambda *rows: add_bias(sum(rows[1:], rows[0])), *parts)


class Layouts:
  """Layout configurations of nodes, as a dictionary: an input of `Linear`.

  Args:
    slates: slates of the nodes.
    rows: `[R, V]` values of each row of the dictionary.
    elsewhere: `[N, V]` or `[1, V]` values of nodes that are not configurable; None = their results
      are 0.
  """

  def __init__(self, slates: Slates, rows: Array, elsewhere: jax.Array | None = None):
    self.slates, self.rows, self.elsewhere = slates, rows, elsewhere
    self.width = rows.shape[-1]

  def map(self, function: Callable[[Array], jax.Array]) -> Nodes:
    """Applies `function`, `[n, V] -> [n, F]`, to the rows of the dictionary: `[N, C, F]`."""
    slates, batch = self.slates, self.slates.batch
    config = function(self.rows).at[batch.row_id].get(mode="fill", fill_value=0)
    shape = slates.num_nodes, config.shape[2]
    if self.elsewhere is None:
      other = jnp.zeros(shape, config.dtype)
    else:
      other = jnp.broadcast_to(function(self.elsewhere), shape)
      rows = take_rows(other, batch.by_hop.nodes[0])[:, None]
      config = jnp.where(slates.is_configurable_row()[:, None, None], config, rows)
    return Nodes(slates, other[:, None], config, 0)


class Tiles:
  """Tile configurations of kernels: an input of `Linear`.

  Args:
    slates: slates of the nodes.
    values: `[G, C, V]`.
  """

  def __init__(self, slates: Slates, values: jax.Array):
    self.slates, self.values, self.width = slates, values, values.shape[-1]

  def map(self, function: Callable[[jax.Array], jax.Array]) -> Nodes:
    """Applies `function`, `[G, C, V] -> [G, C, F]`, once per kernel: `[N, C, F]`."""
    return self.slates.full(pooling.per_node(function(self.values), self.slates.graph_of))


class Embedding(nn.Module):
  """An embedding table, initialised as in PyTorch.

  Attributes:
    rows: number of rows of the table.
    features: width of a vector.
    max_norm: largest length of a vector; 0 = no limit. As in PyTorch, gradients ignore the scaling;
      `keep_rows_short` shortens the table itself.
  """

  rows: int
  features: int
  max_norm: float = 0.0

  @nn.compact
  def __call__(self, index: jax.Array) -> jax.Array:
    """Maps `index [...]` int32 to vectors `[..., features]` float32."""
    normal, shape = nn.initializers.normal(1.0), (self.rows, self.features)
    table = self.param("table", normal, shape, jnp.float32)
    if self.max_norm:
      table += jax.lax.stop_gradient(shortened(table, self.max_norm) - table)
    return layers.take_few_rows(table, index)


def shortened(table: jax.Array, max_norm: float) -> jax.Array:
  """Scales rows of `table [R, F]` that are longer than `max_norm` to this length."""
  length = jnp.sqrt(jnp.sum(jnp.square(table), axis=-1, keepdims=True))
  return jnp.where(length > max_norm, table * (max_norm / (length + 1e-7)), table)


def keep_rows_short(
  optimizer: optax.GradientTransformation, max_norms: Mapping[tuple[str, ...], float]
) -> optax.GradientTransformation:
  """Wraps an optimizer for embeddings with a `max_norm`.

  PyTorch's lookup shortens the rows that it reads, and stores them. Its optimizer then updates the
  shortened rows. This wrapper shortens all rows before an update.

  Args:
    optimizer: updates the shortened parameters.
    max_norms: largest length of rows of each table, by path in the parameters.
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
  """Embeds opcodes. Attributes are as in `Embedding`."""

  features: int
  max_norm: float = 0.0

  @nn.compact
  def __call__(self, graph: jraph.GraphsTuple) -> jax.Array:
    """Embeds `graph.nodes["opcode"] [N]` to `[N, features]` float32."""
    embed = Embedding(OPCODES, self.features, self.max_norm, name="embedding")
    return embed(jnp.asarray(graph.nodes["opcode"]))
