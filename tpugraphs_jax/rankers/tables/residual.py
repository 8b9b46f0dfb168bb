"""What sums of tables leave out: costs of more than two choices at a time.

Score tables charge single choices and pairs. A residual is a second score, computed for
every configuration on the graph of groups, whose edges are the columns of the pair table:

  triples   sum over groups m and pairs {a, b} of the neighbours of m of
                sum over k of middle[m, x_m, k] end[a, x_a, k] end[b, x_b, k]
            (a factorisation machine of third order: Blondel et al., NeurIPS 2016)
  sage      a GraphSAGE on the states of the groups' choices

Neither has a table that a search or an explanation could read. The node encoder is the
tables' own and still runs once per program.
"""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import pooling
from tpugraphs_jax.rankers.tables.batches import TableBatch
from tpugraphs_jax.rankers.tables.layers import Part, add_up, by_bytes, take

KINDS = ("none", "triples", "sage")


class _ChoiceStates(Part):
  """States of every choice of every group: the mean over its nodes, and the row."""

  @nn.compact
  def __call__(self, x: jax.Array, row: jax.Array, batch: TableBatch) -> jax.Array:
    """States `[B, R, H]` from node states `[N, H]` and row states `[B, R, H]`."""
    choices, groups = batch.choices, len(row)
    count = jnp.maximum(add_up(jnp.ones(len(choices.node)), choices.group, groups), 1)
    node = add_up(take(self.dense("node")(x), choices.node), choices.group, groups)
    feat = add_up(choices.feat, choices.group, groups) / count[:, None, None]
    state = (node / count[:, None])[:, None] + self.dense("feat", use_bias=False)(feat)
    return nn.gelu((state + self.dense("row", use_bias=False)(row)).astype(x.dtype))


class _ColumnWeights(Part):
  """Weights of the columns of the pair table, added up over their pairs of nodes."""

  @nn.compact
  def __call__(self, x: jax.Array, batch: TableBatch, *, train: bool) -> jax.Array:
    """Weights `[Q, H]` float32; 0 for pairs of a group with itself."""
    pairs = batch.pairs
    state = self.dense("feat")(pairs.feat) + sum(
        take(self.dense(f"end_{i}", use_bias=False)(x), pairs.ends[:, i]) for i in range(3))
    state = self.drop(nn.gelu(state), train)
    weight = by_bytes(self.dense("weight", 2 * self.features)(state), pairs.weight[:, None])
    weight = add_up(weight, pairs.column, len(pairs.groups))
    return weight * _is_apart(batch)


def _is_apart(batch: TableBatch) -> jax.Array:
  """1 for columns between two groups, 0 for a group with itself: `[Q, 1]` float32."""
  groups = jnp.asarray(batch.pairs.groups)
  return (groups[:, :1] != groups[:, 1:]).astype(jnp.float32)


def _of_configs(states: jax.Array, code: jax.Array) -> jax.Array:
  """The states `[B, C, F]` of the choices `[B, C]` among `[B, R, F]`."""
  return jnp.take_along_axis(states, jnp.asarray(code, jnp.int32)[..., None], axis=1)


def _from_neighbours(sent: jax.Array, weight: jax.Array, batch: TableBatch) -> jax.Array:
  """Sums of the neighbouring groups' `sent [B, C, F]` times the column's weight `[Q, F]`."""
  first, second = batch.pairs.groups[:, 0], batch.pairs.groups[:, 1]
  weight = weight[:, None]
  both = jnp.concatenate([weight * take(sent, second), weight * take(sent, first)])
  return add_up(both, jnp.concatenate([first, second]), len(sent))


class Triples(Part):
  """Costs of three groups' choices, two of them beside the third.

  Attributes:
    rank: number of factors.
  """

  rank: int = 8

  @nn.compact
  def __call__(
      self, x: jax.Array, row: jax.Array, batch: TableBatch, *, train: bool
  ) -> jax.Array:
    """The sum `[G, C, 1]` float32.

    Args:
      x: `[N, H]` node states.
      row: `[B, R, H]` states of the rows of choices.
      batch: of programs.
      train: whether states are dropped.
    """
    own = dict(dropout=self.dropout, dtype=self.dtype, precision=self.precision)
    states = _ChoiceStates(self.features, name="states", **own)(x, row, batch)
    factors = self.dense("factors", 2 * self.rank)(self.drop(states, train))
    end, middle = jnp.split(_of_configs(factors.astype(jnp.float32), batch.code), 2, axis=-1)
    weight = _ColumnWeights(self.rank, name="weights", **own)(x, batch, train=train)
    total = _from_neighbours(end, weight, batch)
    # Every pair of neighbours once: half of what is left of the square without its diagonal.
    squares = _from_neighbours(jnp.square(end), jnp.square(weight), batch)
    cost = (middle * (jnp.square(total) - squares)).sum(axis=-1, keepdims=True) / 2
    return pooling.graph_sum(cost, batch.group_graph, len(batch.target))


class GroupSAGE(Part):
  """`s <- s + gelu(norm(W s + mean of weighted neighbours))` on the states of choices.

  Attributes:
    rounds: of message passing between groups.
  """

  rounds: int = 2

  @nn.compact
  def __call__(
      self, x: jax.Array, row: jax.Array, batch: TableBatch, *, train: bool
  ) -> jax.Array:
    """The sum over groups `[G, C, 1]` float32; arguments as `Triples`."""
    own = dict(features=self.features, dropout=self.dropout, dtype=self.dtype,
               precision=self.precision)
    states = _ChoiceStates(name="states", **own)(x, row, batch)
    state = _of_configs(states, batch.code)
    degree = _from_neighbours(jnp.ones((len(state), 1, 1)), _is_apart(batch), batch)
    degree = jnp.maximum(degree, 1)
    for i in range(self.rounds):
      weight = _ColumnWeights(name=f"weights_{i}", **own)(x, batch, train=train)
      near = _from_neighbours(self.dense(f"sent_{i}")(state), weight, batch) / degree
      total = self.dense(f"self_{i}")(state) + near.astype(state.dtype)
      total = nn.LayerNorm(dtype=self.dtype, name=f"norm_{i}")(total)
      state += self.drop(nn.gelu(total), train)
    cost = self.dense("cost", 2)(state)
    nbytes = add_up(batch.choices.weight, batch.choices.group, len(state))
    return pooling.graph_sum(
        by_bytes(cost, nbytes[:, None, None]), batch.group_graph, len(batch.target))
