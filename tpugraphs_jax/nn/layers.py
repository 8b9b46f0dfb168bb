"""Layers that several networks share: precision, activations, norms, linear layers.

Official models are initialised as in Keras, and most published systems as in PyTorch, because their
results depend on its defaults. For a layer with K inputs and F outputs:

    `Linear`    kernel and bias uniform on [-1 / sqrt(K), 1 / sqrt(K)], as in PyTorch
    `Dense`     kernel uniform on [-a, a], a = sqrt(6 / (K + F)), bias 0, as in Keras
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any, cast

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpugraphs_jax.data.batching import Array
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.aggregation import take_rows
from tpugraphs_jax.nn.nodes import combine, Nodes, Slates

PRECISIONS = ("default", "high", "highest")  # names of `jax.lax.Precision`
DTYPES = ("float32", "bfloat16")  # dtypes of computations; parameters are float32
EPSILON = 1e-5  # PyTorch's default for instance norm and layer norm
Initializer = Callable[..., jax.Array]
# The activation of the official models, with TensorFlow's default slope.
leaky_relu = lambda x: nn.leaky_relu(x, negative_slope=0.2)


class Precise(nn.Module):
  """A flax module with one precision for all matrix products, including layers of flax.

  By default accelerators round the inputs of products: to TF32 on GPUs, to bfloat16 on TPUs. Some
  layers of flax, such as LSTM cells, have no option for the precision. `apply` sets jax's default
  precision instead. Gradients have the precision of the forward product.

  Attributes:
    precision: `default`, `high` or `highest`; None = the default precision of jax.
  """

  precision = cast(Any, None)  # networks declare an option of this name

  @nn.nowrap
  def apply(self, *args: Any, **options: Any) -> Any:
    """`nn.Module.apply` at this precision."""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    precision = self.precision or default
    with jax.default_matmul_precision(precision):
      return super().apply(*args, **options)


def gelu(x: jax.Array) -> jax.Array:
  """`x (1 + erf(x / sqrt(2))) / 2` of `x [...]`, as in PyTorch.

  `nn.gelu` uses erfc, which takes XLA on CPU more than twice the time of erf.
  """
  return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def l2_normalize(x: jax.Array) -> jax.Array:
  """Scales the last axis of `x [..., F]` to length 1, in float32: `[..., F]` in the dtype of `x`.

  The epsilon is 1e-12, as in TensorFlow.
  """
  exact = x.astype(jnp.float32)
  square = jnp.sum(jnp.square(exact), axis=-1, keepdims=True)
  return (exact * jax.lax.rsqrt(jnp.maximum(square, 1e-12))).astype(x.dtype)


def instance_norm(x: Nodes) -> Nodes:
  """`(x - mean) / sqrt(variance + 1e-5)`, over the nodes of a graph per configuration and channel.

  A node whose features are stored once counts once for each configuration.
  """
  slates = x.slates
  per_node = lambda value: pooling.per_node(value, slates.graph_of)
  mean = pooling.mean(x)
  # Squares lose precision far from 0. The variance does not depend on the shift.
  shift = jax.lax.stop_gradient(mean.mean(axis=1))
  centred = x - slates.nodes(per_node(shift))
  square = pooling.mean(centred.map(jnp.square))
  variance = jnp.maximum(square - jnp.square(mean - shift[:, None]), 0)
  factor = jax.lax.rsqrt(variance + EPSILON)
  full = x.everywhere()
  result = ((full - per_node(mean)) * per_node(factor)).astype(full.dtype)
  return slates.from_all(result, x)


def slate_norm(x: jax.Array, mask: jax.Array) -> jax.Array:
  """`x [n, C, F]` with mean 0 and variance 1 over C, where `mask [n, C]` is True."""
  where = mask[..., None]
  count = jnp.maximum(where.sum(axis=1, keepdims=True), 1)
  # After this subtraction equal values are exactly 0, and so is their difference from the mean.
  x = x - jax.lax.stop_gradient(x[:, :1])
  moment = lambda value: jnp.sum(jnp.where(where, value, 0), axis=1, keepdims=True) / count
  centred = x.astype(jnp.float32) - moment(x.astype(jnp.float32))
  return centred * jax.lax.rsqrt(moment(jnp.square(centred)) + EPSILON)


def matmul(x: Array, kernel: jax.Array, *, dtype: DTypeLike | None) -> jax.Array:
  """`x [..., K] @ kernel [K, F]` in `dtype` (None = the promoted dtype): `[..., F]`."""
  x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=dtype)
  # The gradient of a kernel contracts the leading axes of x. XLA on CPU transposes the whole tensor
  # to contract several axes, but not to contract one: with merged axes a linear layer with its
  # gradients was a third faster on [5024, 16, 32] (2 cores).
  rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
  product = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())))
  return product.reshape(x.shape[:-1] + kernel.shape[1:])


def uniform(inputs: int) -> Initializer:
  """An initialiser, uniform on [-1 / sqrt(inputs), 1 / sqrt(inputs)]."""
  bound = 1 / math.sqrt(inputs)
  return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)


class Linear(nn.Module):
  """`W x + b` on an array or on `Nodes`, initialised as in PyTorch.

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
  def blocks(self, widths: Sequence[int]) -> tuple[list[jax.Array], Any]:
    """The kernel of inputs of these widths, and the bias, for callers that apply them themselves.

    A caller can so apply each block where this is cheapest: to static features once per graph, to a
    configuration once per slate.

    Returns:
      A kernel `[width, features]` per input, and the bias `[features]`, float32; None without bias.
    """
    rows = sum(widths)
    init = self.kernel_init or uniform(rows)
    kernel = self.param("kernel", init, (rows, self.features), jnp.float32)
    bias = None
    if self.use_bias:
      bias = self.param("bias", self.bias_init or uniform(rows), (self.features,), jnp.float32)
    return jnp.split(kernel, list(itertools.accumulate(widths))[:-1]), bias

  def __call__(self, *inputs: Any) -> Any:
    """Maps one array `[..., K]` to `[..., features]`, or node features to `[N, C, features]`.

    Args:
      *inputs: one array, or `Nodes`, `Layouts` and `Tiles`.
    """
    is_array = hasattr(inputs[0], "shape")
    kernels, bias = self.blocks([inputs[0].shape[-1]] if is_array else [x.width for x in inputs])
    product = lambda x, kernel: matmul(x, kernel, dtype=self.dtype)
    add_bias = lambda x: x
    if self.use_bias:
      add_bias = lambda x: x + bias.reshape((1,) * (x.ndim - 1) + (-1,)).astype(x.dtype)
    if is_array:
      return add_bias(product(inputs[0], kernels[0]))
    parts = [x.map(lambda rows: product(rows, kernel)) for x, kernel in zip(inputs, kernels)]
    return combine(lambda *rows: add_bias(sum(rows[1:], rows[0])), *parts)


class Dense(Linear):
  """`Linear`, initialised as in Keras: Glorot uniform, zero bias."""

  kernel_init: Initializer | None = nn.initializers.glorot_uniform()
  bias_init: Initializer | None = nn.initializers.zeros


class MLP(nn.Module):
  """Dense layers with an activation between them, none after the last."""

  features: Sequence[int]
  activation: Callable[[jax.Array], jax.Array] = leaky_relu
  use_bias: bool = True
  dtype: DTypeLike | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    for i, features in enumerate(self.features):
      if i:
        x = self.activation(x)
      x = Dense(features, use_bias=self.use_bias, dtype=self.dtype)(x)
    return x


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
      static = jnp.zeros(shape, config.dtype)
    else:
      static = jnp.broadcast_to(function(self.elsewhere), shape)
      rows = take_rows(static, batch.by_hop.nodes[0])[:, None]
      config = jnp.where(slates.is_configurable_row()[:, None, None], config, rows)
    return Nodes(slates, static[:, None], config, 0)


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
