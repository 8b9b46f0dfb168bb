"""A ranker that looks costs up: the network runs once per program.

    score(c) = sum over groups g      of unary[g, x_g]
             + sum over pairs (g, h)  of pair[g, h, x_g, x_h]

where x_g is the choice of group g in configuration c. Both tables come from a graph
network that sees the program alone, so that it may be deep and slates may have hundreds
of configurations; the sums are exact. With known costs this is the partitioned boolean
quadratic problem that compilers solve for layouts and primitives (Anderson and Gregg,
CGO 2018; Liu et al., USENIX ATC 2019).
"""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.graph import LAYOUT_VALUE_RANGE
from tpugraphs_jax.models import layers
from tpugraphs_jax.models import message_passing as mp
from tpugraphs_jax.models import pooling
from tpugraphs_jax.models.layers import Dense
from tpugraphs_jax.table_batch import TableBatch

PAIRS = ("none", "low_rank", "full")
# Of costs that do not scale with bytes, beside those that do.
_FLAT = 0.1


class ScoreTables(nn.Module):
  """Score tables from a bidirectional GraphSAGE encoder.

  Attributes:
    op_embed_dim: width of the opcode embedding.
    hidden_dim: width of node, choice and pair states.
    num_gnns: rounds of message passing.
    pairs: `none`; `low_rank`: a cost of two choices is a product of a factor of each
      and a gate of the pair, summed over `rank`; `full`: a network of all three.
    rank: factors, per direction.
    heads: independent tables on the same states, which add up.
    dropout: rate on node, choice and pair states in training.
    cost_scale: of initial costs.
    dtype: of the computation; sums over neighbours and costs are float32.
    precision: of matrix products.
  """

  op_embed_dim: int = 16
  hidden_dim: int = 32
  num_gnns: int = 4
  pairs: str = "low_rank"
  rank: int = 8
  heads: int = 1
  dropout: float = 0.0
  cost_scale: float = 4.0
  dtype: Any = None
  precision: Any = None

  def __post_init__(self):
    if self.pairs not in PAIRS:
      raise ValueError(f"pairs is {self.pairs!r}, expected one of {', '.join(PAIRS)}")
    super().__post_init__()

  def setup(self):
    options = dict(features=self.hidden_dim, dropout=self.dropout, dtype=self.dtype,
                   precision=self.precision)
    self.encoder = _Encoder(self.op_embed_dim, self.num_gnns, **options)
    self.row_state = Dense(self.hidden_dim, dtype=self.dtype, precision=self.precision)
    self.unary_costs = _UnaryCosts(self.heads, **options)
    if self.pairs != "none":
      self.pair_costs = _PairCosts(self.heads, self.rank, self.pairs == "full", **options)

  def __call__(self, batch: TableBatch, *, train: bool = False) -> jax.Array:
    """Scores `[G, C]` float32."""
    return self.score(self.embed(batch, train=train))

  def embed(self, batch: TableBatch, *, train: bool = False) -> jax.Array:
    """The sum of each head's costs, `[G, C, heads]` float32."""
    unary, pair = self.tables(batch, train=train)
    return table_sums(unary, pair, batch)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` of readouts `[..., heads]`."""
    return readout.sum(axis=-1)

  def tables(
      self, batch: TableBatch, *, train: bool = False
  ) -> tuple[jax.Array, jax.Array | None]:
    """Costs `[B, R, heads]` of choices and `[Q, R, R, heads]` of pairs, float32; or None."""
    x = self.encoder(batch, train=train)
    row = self.row_state(_row_values(batch.rows))
    row = nn.gelu(row.at[batch.choices.row].get(mode="fill", fill_value=0))
    unary = self.unary_costs(x, row, batch, train=train) * self.cost_scale
    if self.pairs == "none":
      return unary, None
    return unary, self.pair_costs(x, row, batch, train=train) * self.cost_scale


def table_sums(unary: jax.Array, pair: jax.Array | None, batch: TableBatch) -> jax.Array:
  """Sums the costs of each configuration's choices, `[G, C, heads]` float32."""
  graphs = len(batch.target)
  code = jnp.asarray(batch.code, jnp.int32)
  costs = jnp.take_along_axis(unary, code[..., None], axis=1)
  total = pooling.graph_sum(costs, batch.group_graph, graphs)
  if pair is None:
    return total
  first, second = _take(code, batch.pairs.groups[:, 0]), _take(code, batch.pairs.groups[:, 1])
  flat = pair.reshape(len(pair), -1, pair.shape[-1])
  costs = jnp.take_along_axis(flat, (first * pair.shape[2] + second)[..., None], axis=1)
  graph_of = batch.group_graph.at[batch.pairs.groups[:, 0]].get(mode="fill", fill_value=graphs)
  return total + pooling.graph_sum(costs, graph_of, graphs)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
  """Rows of `x [n, ...]`; absent indices give zeros."""
  if not len(x):
    return jnp.zeros(index.shape + x.shape[1:], x.dtype)  # jax gathers from no empty axis
  return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


def _add_up(x: jax.Array, index: jax.Array, rows: int) -> jax.Array:
  """Sums rows of `x [n, ...]` with equal indices into `[rows, ...]` float32."""
  return jnp.zeros((rows,) + x.shape[1:], jnp.float32).at[index].add(
      x.astype(jnp.float32), mode="drop")


def _row_values(rows: jax.Array) -> jax.Array:
  """One-hot layout values of rows `[R', 18]`: `[R', 126]` float32."""
  low, high = LAYOUT_VALUE_RANGE
  values = jnp.asarray(rows, jnp.int32) - low
  return jax.nn.one_hot(values, high - low + 1).reshape(len(rows), -1)


class _Encoder(nn.Module):
  """`x + gelu(norm(W x + W_o mean(operands) + W_u mean(users)))`, some times."""

  op_embed_dim: int
  rounds: int
  features: int
  dropout: float
  dtype: Any
  precision: Any

  @nn.compact
  def __call__(self, batch: TableBatch, *, train: bool) -> jax.Array:
    """Node states `[N, H]`."""
    dense = lambda **kw: Dense(self.features, dtype=self.dtype, precision=self.precision, **kw)
    opcode = layers.OpcodeEmbedding(self.op_embed_dim)(batch.graph)
    x = nn.gelu(dense()(jnp.concatenate([batch.graph.nodes["feat"], opcode], axis=-1)))
    count = {side: jnp.maximum(mp.degree(batch.adjacency, side, len(x)), 1)[:, None]
             for side in (mp.OPERANDS, mp.USERS)}
    for _ in range(self.rounds):
      total = dense()(x)
      for side in count:
        sent = dense(use_bias=False)(x)
        total += mp.neighbour_sum(sent, batch.adjacency, side) / count[side].astype(x.dtype)
      total = nn.LayerNorm(dtype=self.dtype)(total)
      x += nn.Dropout(self.dropout, deterministic=not train)(nn.gelu(total))
    return x


class _UnaryCosts(nn.Module):
  """Costs of groups' choices: of every node of the group with every choice, added up."""

  heads: int
  features: int
  dropout: float
  dtype: Any
  precision: Any

  @nn.compact
  def __call__(
      self, x: jax.Array, row: jax.Array, batch: TableBatch, *, train: bool
  ) -> jax.Array:
    """Costs `[B, R, heads]` float32.

    Args:
      x: `[N, H]` node states.
      row: `[B, R, H]` states of the rows chosen.
      batch: of programs.
      train: whether states are dropped.
    """
    dense = lambda n=self.features, **kw: Dense(
        n, dtype=self.dtype, precision=self.precision, **kw)
    choices, graph_of = batch.choices, mp.node_graph(batch.graph)
    mean = pooling.graph_sum(x, graph_of, len(batch.target))
    mean /= jnp.maximum(pooling.real_nodes(batch.graph), 1)[:, None]
    node_graph = _take(graph_of, choices.node)
    node = dense()(_take(x, choices.node)) + pooling.per_node(
        dense(use_bias=False)(mean.astype(x.dtype)), node_graph)
    state = (node[:, None] + dense(use_bias=False)(choices.feat)
             + _take(dense(use_bias=False)(row), choices.group))
    state = nn.Dropout(self.dropout, deterministic=not train)(nn.gelu(state))
    state = nn.gelu(dense()(state))
    cost = _by_bytes(dense(2 * self.heads)(state), choices.weight[:, None, None])
    return _add_up(cost, choices.group, len(choices.row))


class _PairCosts(nn.Module):
  """Costs of two groups' choices, from gates of the pairs of nodes between them."""

  heads: int
  rank: int
  is_full: bool
  features: int
  dropout: float
  dtype: Any
  precision: Any

  @nn.compact
  def __call__(
      self, x: jax.Array, row: jax.Array, batch: TableBatch, *, train: bool
  ) -> jax.Array:
    """Costs `[Q, R, R, heads]` float32; arguments as `_UnaryCosts`."""
    groups = batch.pairs.groups
    gate = self.gates(x, batch, train)  # [Q, 2, rank, heads]
    factor = self.factors(x, row, batch)  # [B, R, 2, rank, heads]
    first, second = _take(factor, groups[:, 0]), _take(factor, groups[:, 1])
    # A first end has the factors of a producer and a second end those of a consumer,
    # whichever group of the column they are in.
    products = jnp.einsum("qdkh,qrdkh,qsdkh->qrsh", gate, first, second[:, :, ::-1])
    return products.astype(jnp.float32)

  def gates(self, x: jax.Array, batch: TableBatch, train: bool) -> jax.Array:
    """Gates of pairs of nodes, added up by column and direction, `[Q, 2, rank, heads]`."""
    dense = lambda n=self.features, **kw: Dense(
        n, dtype=self.dtype, precision=self.precision, **kw)
    pairs = batch.pairs
    state = dense()(pairs.feat)
    for end in range(3):
      state += _take(dense(use_bias=False)(x), pairs.ends[:, end])
    state = nn.Dropout(self.dropout, deterministic=not train)(nn.gelu(state))
    state = nn.gelu(dense()(state))
    gate = _by_bytes(dense(2 * self.rank * self.heads)(state), pairs.weight[:, None])
    turned = jnp.stack([~jnp.asarray(pairs.is_turned), jnp.asarray(pairs.is_turned)], axis=1)
    gate = jnp.where(turned[..., None], gate[:, None], 0)
    total = _add_up(gate, pairs.column, len(pairs.groups))
    return total.reshape(-1, 2, self.rank, self.heads)

  def factors(self, x: jax.Array, row: jax.Array, batch: TableBatch) -> jax.Array:
    """Factors of every choice as producer and as consumer, `[B, R, 2, rank, heads]`."""
    dense = lambda n=self.features, **kw: Dense(
        n, dtype=self.dtype, precision=self.precision, **kw)
    choices = batch.choices
    ones = jnp.ones(len(choices.node))
    count = jnp.maximum(_add_up(ones, choices.group, len(row)), 1)[:, None]
    group = _add_up(_take(dense()(x), choices.node), choices.group, len(row)) / count
    state = nn.gelu(group[:, None].astype(x.dtype) + dense()(row))
    factor = dense(2 * self.rank * self.heads)(state)
    return factor.reshape(*factor.shape[:2], 2, self.rank, self.heads)


def _by_bytes(cost: jax.Array, weight: jax.Array) -> jax.Array:
  """Costs `[..., n]` of which half, `[..., 2 n]`, are taken by bytes and half as they are."""
  scaled, flat = jnp.split(cost.astype(jnp.float32), 2, axis=-1)
  return scaled * weight + flat * _FLAT
