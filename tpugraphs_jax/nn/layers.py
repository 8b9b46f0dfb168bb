"""Flax layers that several ranker families use, and the precision of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any, cast

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import jraph

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.data.batching import Array
from tpugraphs_jax.nn import aggregation, pooling

PRECISIONS = ("default", "high", "highest")  # names of `jax.lax.Precision`
DTYPES = ("float32", "bfloat16")  # dtypes of computations; parameters are float32
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


def l2_normalize(x: jax.Array) -> jax.Array:
  """Scales the last axis of `x [..., F]` to length 1, in float32: `[..., F]` in the dtype of `x`.

  The epsilon is 1e-12, as in TensorFlow.
  """
  exact = x.astype(jnp.float32)
  square = jnp.sum(jnp.square(exact), axis=-1, keepdims=True)
  return (exact * jax.lax.rsqrt(jnp.maximum(square, 1e-12))).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
  """`x (1 + erf(x / sqrt(2))) / 2` of `x [...]`, as in PyTorch.

  `nn.gelu` uses erfc, which takes XLA on CPU more than twice the time of erf.
  """
  return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def matmul(x: Array, kernel: jax.Array, *, dtype: DTypeLike | None) -> jax.Array:
  """`x [..., K] @ kernel [K, F]` in `dtype` (None = the promoted dtype): `[..., F]`."""
  x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=dtype)
  return _dot_rows(x, kernel)


def _dot_rows(x: Array, kernel: jax.Array, dimensions: object = None, **options) -> jax.Array:
  """`jax.lax.dot_general` of a linear layer, with the leading axes of `x [..., K]` merged.

  The gradient of a kernel contracts the leading axes. XLA on CPU transposes the whole tensor to
  contract several axes, but not to contract one: a linear layer with its gradients was a third
  faster on `[5024, 16, 32]` (2 cores).
  """
  del dimensions  # nn.Dense contracts the last axis of x and the first axis of the kernel
  rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
  product = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), **options)
  return product.reshape(x.shape[:-1] + kernel.shape[1:])


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


def Dense(features: int, **kwargs) -> nn.Dense:  # pylint: disable=invalid-name
  """`nn.Dense` with Keras' initialisation (Glorot uniform, zero bias)."""
  kwargs.setdefault("kernel_init", nn.initializers.glorot_uniform())
  return nn.Dense(features, dot_general=_dot_rows, **kwargs)


class JoinedDense(nn.Module):
  """The kernel of a Dense layer on a concatenation, in blocks.

  `Dense(concat(a, b)) = a @ Wa + b @ Wb + bias`. The caller applies each block where this is
  cheapest: to static features once per graph, to a configuration once per slate.
  """

  features: int

  @nn.compact
  def __call__(self, sizes: Sequence[int]) -> tuple[list[jax.Array], jax.Array]:
    """A kernel block `[size, features]` per input size, and the bias `[1, features]`."""
    init, shape = nn.initializers.glorot_uniform(), (sum(sizes), self.features)
    kernel = self.param("kernel", init, shape, jnp.float32)
    bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
    return jnp.split(kernel, list(itertools.accumulate(sizes))[:-1]), bias[None]


class Embed(nn.Embed):
  """`nn.Embed` with few rows and many indices; see `take_few_rows`."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Maps `inputs [...]` int32 to rows `[..., features]`."""
    return take_few_rows(self.embedding, inputs)


@jax.custom_vjp
def take_few_rows(table: jax.Array, index: jax.Array) -> jax.Array:
  """Rows `[..., F]` of `table [R, F]` at `index [...]` int32, for small R.

  On NVIDIA GPUs the gradient is a product with a `[R, number of indices]` matrix of zeros and ones.
  A scatter into few rows is slow there, and its order of additions differs from run to run. On CPUs
  and TPUs the gradient is a scatter, which is at least as fast (`[6000]` indices of 121 rows on a
  CPU: 0.03 ms, the product 0.3 ms).
  """
  return jnp.take(table, index, axis=0)


def _take_few_rows_fwd(table, index):
  # A zero-width slice has the number of rows.
  return take_few_rows(table, index), (index, table[:, :0])


def _take_few_rows_bwd(residuals, cotangent):
  index, table = aggregation.arrays(residuals)
  rows = cotangent.reshape(-1, cotangent.shape[-1])
  add = lambda rows, index: jnp.zeros((len(table), rows.shape[1]), rows.dtype).at[index].add(rows)
  product = lambda rows, index: pooling.pool_sum(rows, pooling.selection(index, len(table))).astype(
    rows.dtype
  )
  return jax.lax.platform_dependent(rows, index.reshape(-1), cuda=product, default=add), None


take_few_rows.defvjp(_take_few_rows_fwd, _take_few_rows_bwd)


class OpcodeEmbedding(nn.Module):
  """Embeds opcodes, and sows the activity for the regulariser.

  The official models add `1e-4 * sum(output ** 2) / nodes` to the loss. The sum and the number of
  real nodes are sown in the collection "activity": the training step sums them over devices before
  it divides.
  """

  features: int
  opcodes: int = OPCODES

  @nn.compact
  def __call__(self, graph: jraph.GraphsTuple) -> jax.Array:
    """Embeds `graph.nodes["opcode"] [N]` to `[N, features]` float32."""
    table = Embed(self.opcodes, self.features, embedding_init=_uniform_init(0.05), name="table")
    embedded = self.perturb("lookup", table(graph.nodes["opcode"]))
    nodes = pooling.real_nodes(graph).sum()
    real = jnp.arange(len(embedded)) < nodes
    self.sow("activity", "sum", jnp.sum(jnp.square(embedded), where=real[:, None]))
    self.sow("activity", "nodes", nodes.astype(jnp.float32))
    return embedded


def _uniform_init(scale: float) -> Callable[..., jax.Array]:
  """The initialiser of embeddings in Keras, uniform on [-scale, scale]."""
  return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -scale, scale)
