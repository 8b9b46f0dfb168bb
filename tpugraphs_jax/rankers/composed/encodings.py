"""Opcodes and configuration values as numbers."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from tpugraphs_jax.columns import LAYOUT_VALUE_RANGE, opcode_ids
from tpugraphs_jax.nn.layers import OpcodeEmbedding

# In place of layout values of a node that is not configurable (1st place): below them all.
SENTINEL = LAYOUT_VALUE_RANGE[0] - 1
_VALUES = LAYOUT_VALUE_RANGE[1] - SENTINEL + 1
# Element-wise operations of one operand, which the 5th place does not tell apart.
UNARY = (
    "abs", "cbrt", "ceil", "cosine", "exponential", "exponential-minus-one", "floor",
    "is-finite", "log", "log-plus-one", "logistic", "negate", "not", "round-nearest-afz",
    "round-nearest-even", "rsqrt", "sign", "sine", "sqrt", "tan", "tanh")


class Opcodes(nn.Module):
  """Embedded opcodes.

  Attributes:
    features: width.
    max_norm: longer vectors are scaled to this length, 0 = none. As in PyTorch the factor
      has no gradient.
    gain: start of a learned factor; 0 = no factor.
    merge_unary: all of `UNARY` have the embedding of the first.
  """

  features: int
  max_norm: float = 0.0
  gain: float = 0.0
  merge_unary: bool = False

  @nn.compact
  def __call__(self, graph: jraph.GraphsTuple) -> jax.Array:
    """Embeds `graph.nodes["opcode"] [N]` to `[N, features]` float32."""
    if self.merge_unary:
      graph = graph._replace(nodes=graph.nodes | {"opcode": merged(graph.nodes["opcode"])})
    embedded = OpcodeEmbedding(self.features, name="embedding")(graph)
    if self.max_norm:
      square = jnp.sum(jnp.square(embedded), axis=-1, keepdims=True)
      longest = self.max_norm * jax.lax.rsqrt(jnp.maximum(square, 1e-12))
      embedded *= jax.lax.stop_gradient(jnp.minimum(longest, 1))
    if self.gain:
      embedded *= self.param("gain", nn.initializers.constant(self.gain), (), jnp.float32)
    return embedded


def merged(opcode: jax.Array) -> jax.Array:
  """Opcodes `[N]`, those of `UNARY` all as its first; whole numbers as the data set's."""
  ids = opcode_ids()
  unary = np.array([ids[name] for name in UNARY])
  return jnp.where(jnp.isin(opcode, unary), unary[0], opcode)


class Values(nn.Module):
  """Configuration values as inputs of a linear layer.

  Attributes:
    encoding: one of `options.ENCODINGS`.
    count: values V of a configuration.
    scale: factor of `raw` values, or start of the learned factors of `gain`.
    features: width of the embedding of a value.
  """

  encoding: str
  count: int
  scale: float = 1.0
  features: int = 4

  def setup(self):
    if self.encoding == "embedding":
      self.table = nn.Embed(_VALUES, self.features)
    elif self.encoding == "gain":
      start = nn.initializers.constant(self.scale)
      self.gain = self.param("factors", start, (self.count,), jnp.float32)

  def configurations(self, values: jax.Array) -> jax.Array:
    """Configurations `[..., V]`, whole numbers if embedded, as `[..., V or V * features]`."""
    if self.encoding == "embedding":
      return self.embed(values)
    values = jnp.asarray(values, jnp.float32)
    if self.encoding == "raw":
      return self.scale * values
    return values * self.gain.reshape((1,) * (values.ndim - 1) + (-1,))

  def layouts(self, values: jax.Array) -> jax.Array:
    """Nodes' own layouts `[N, 6]`: embedded like configurations, or as they are."""
    return self.embed(values) if self.encoding == "embedding" else jnp.asarray(values)

  def embed(self, values: jax.Array) -> jax.Array:
    """Whole numbers `[..., V]` from -2 on through the shared table: `[..., V * features]`."""
    embedded = self.table(jnp.asarray(values, jnp.int32) - SENTINEL)
    return embedded.reshape(*values.shape[:-1], -1)


def unconfigured(missing: str, layout: Any, width: int) -> jax.Array:
  """Values in place of a configuration, `[N, width]` or `[1, width]` float32.

  Args:
    missing: `sentinel`, or `layout` for each node's own layout in every slot.
    layout: `[N, 6]` float32 own layouts, or None.
    width: values of a configuration, a multiple of 6.
  """
  if missing == "sentinel":
    return jnp.full((1, width), SENTINEL, jnp.float32)
  return jnp.tile(layout, (1, width // layout.shape[1]))
