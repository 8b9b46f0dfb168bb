"""Embeddings of opcodes and other small numbers.

`OpcodeEmbedding`      initialised as in Keras, uniform on [-0.05, 0.05]
`Opcodes`, `Embedding` as in PyTorch, normal with mean 0 and deviation 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import jraph
import optax

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.nn import aggregation, pooling


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
    return take_few_rows(table, index)


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
