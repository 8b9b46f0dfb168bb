"""Layers that the parts of a score table ranker share."""

from __future__ import annotations

import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.columns import LAYOUT_VALUE_RANGE
from tpugraphs_jax.nn import layers
from tpugraphs_jax.nn.aggregation import OPERANDS, USERS, degree, neighbour_sum
from tpugraphs_jax.nn.layers import Dense
from tpugraphs_jax.rankers.tables.batches import TableBatch

# Of costs that do not scale with bytes, beside those that do.
_FLAT = 0.1


class Part(nn.Module):
  """What the parts of the model have in common."""

  features: int
  dropout: float
  dtype: Any
  precision: Any

  def dense(
      self, name: str | None = None, features: int | None = None, **options
  ) -> nn.Dense:
    return Dense(features or self.features, name=name, dtype=self.dtype,
                 precision=self.precision, **options)

  def drop(self, x: jax.Array, train: bool) -> jax.Array:
    return nn.Dropout(self.dropout, deterministic=not train)(x)


class Encoder(Part):
  """`x + gelu(norm(W x + W_o mean(operands) + W_u mean(users)))`, some times."""

  op_embed_dim: int = 16
  rounds: int = 4

  @nn.compact
  def __call__(self, batch: TableBatch, *, train: bool) -> jax.Array:
    """Node states `[N, H]`."""
    opcode = layers.OpcodeEmbedding(self.op_embed_dim)(batch.graph)
    x = nn.gelu(self.dense("input")(
        jnp.concatenate([batch.graph.nodes["feat"], opcode], axis=-1)))
    for i in range(self.rounds):
      total = self.dense(f"self_{i}")(x)
      for side in (OPERANDS, USERS):
        sent = self.dense(f"{side}_{i}", use_bias=False)(x)
        count = jnp.maximum(degree(batch.adjacency, side, len(x)), 1)
        total += neighbour_sum(sent, batch.adjacency, side) / count[:, None].astype(x.dtype)
      total = nn.LayerNorm(dtype=self.dtype, name=f"norm_{i}")(total)
      x += self.drop(nn.gelu(total), train)
    return x


def row_features(rows: jax.Array) -> jax.Array:
  """What a row is to the network, `[R', 141]` float32, from layout values `[R', 18]`.

  The values one-hot; and for each two dimensions that follow each other in one of the
  three layouts whether they descend (1, as in a default layout), ascend (-1), or are
  not both given (0).
  """
  low, high = LAYOUT_VALUE_RANGE
  values = jnp.asarray(rows, jnp.int32)
  one_hot = jax.nn.one_hot(values - low, high - low + 1)
  layouts = values.reshape(len(rows), 3, rows.shape[1] // 3)
  before, after = layouts[..., :-1], layouts[..., 1:]
  order = jnp.where((before >= 0) & (after >= 0), jnp.sign(before - after), 0)
  flat = lambda x: x.reshape(len(rows), math.prod(x.shape[1:]))
  return jnp.concatenate([flat(one_hot), flat(order)], axis=1)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
  """Rows of `x [n, ...]`; absent indices give zeros."""
  if not len(x):
    return jnp.zeros(index.shape + x.shape[1:], x.dtype)  # jax gathers from no empty axis
  return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


def add_up(x: jax.Array, index: jax.Array, rows: int) -> jax.Array:
  """Sums rows of `x [n, ...]` with equal indices into `[rows, ...]` float32."""
  return jnp.zeros((rows,) + x.shape[1:], jnp.float32).at[index].add(
      x.astype(jnp.float32), mode="drop")


def by_bytes(cost: jax.Array, weight: jax.Array) -> jax.Array:
  """Of `cost [..., 2 n]` one half times bytes and the other as it is, `[..., n]` float32."""
  scaled, flat = jnp.split(cost.astype(jnp.float32), 2, axis=-1)
  return scaled * weight + flat * _FLAT
