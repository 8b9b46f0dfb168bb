"""Score tables: the network runs once per program, and the costs of choices are looked up.

    score(c) = sum over groups g      of unary[g, x_g]
             + sum over pairs (g, h)  of pair[g, h, x_g, x_h]

where x_g is the choice of group g in configuration c. A graph network computes both tables from the
program alone, so that it can be deep and slates can have hundreds of configurations. With known
costs this is the partitioned boolean quadratic problem that compilers solve for layouts and
primitives (Anderson and Gregg, CGO 2018; Liu et al., USENIX ATC 2019).
"""

from __future__ import annotations

import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.columns import LAYOUT_VALUE_RANGE
from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data import features
from tpugraphs_jax.data.batching import ABSENT, Array
from tpugraphs_jax.nn import embeddings, pooling
from tpugraphs_jax.nn.aggregation import (
  degree,
  neighbour_sum,
  node_graph,
  OPERANDS,
  take_rows,
  USERS,
)
from tpugraphs_jax.nn.dropout import SlateDropout
from tpugraphs_jax.nn.layers import Dense, DTYPES
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.tables.batches import TableBatch
from tpugraphs_jax.rankers.tables.family import TablesFamily

PAIRS = ("none", "low_rank")
# Costs of choices, of pairs of choices or None, and of all that has no choice.
Tables = tuple[jax.Array, jax.Array | None, jax.Array]
_FLAT = 0.1  # factor of costs that do not grow with bytes
_COST_SCALE = 4.0  # factor of all costs, which are small at initialisation


class TablePart(nn.Module):
  """Base class of parts of the network: options, linear layers and dropout."""

  features: int
  dropout: float
  dtype: str

  def dense(self, name: str | None = None, features: int | None = None, **options) -> Dense:
    return Dense(features or self.features, name=name, dtype=self.dtype, **options)

  def drop(self, x: jax.Array, slate_of: Array, batch: TableBatch, train: bool) -> jax.Array:
    """Dropout on `x [n, ...]`; arguments as in `SlateDropout`."""
    return SlateDropout(self.dropout)(x, slate_of, len(batch.target), train=train)


class GraphEncoder(TablePart):
  """Rounds of `x + gelu(norm(W x + W_o mean(operands) + W_u mean(users)))`."""

  op_embed_dim: int = 16
  rounds: int = 4

  @nn.compact
  def __call__(self, batch: TableBatch, *, train: bool) -> jax.Array:
    """Node states `[N, H]`."""
    opcode = embeddings.OpcodeEmbedding(self.op_embed_dim)(batch.graph)
    x = nn.gelu(self.dense("input")(jnp.concatenate([batch.graph.nodes["feat"], opcode], axis=-1)))
    for i in range(self.rounds):
      total = self.dense(f"self_{i}")(x)
      for side in (OPERANDS, USERS):
        sent = self.dense(f"{side}_{i}", use_bias=False)(x)
        count = jnp.maximum(degree(batch.adjacency, side, len(x)), 1)
        total += neighbour_sum(sent, batch.adjacency, side) / count[:, None].astype(x.dtype)
      total = nn.LayerNorm(dtype=self.dtype, name=f"norm_{i}")(total)
      x += self.drop(nn.gelu(total), node_graph(batch.graph), batch, train)
    return x


def row_features(rows: Array) -> jax.Array:
  """Features `[R', 141]` float32 of rows with layout values `[R', 18]`.

  One-hot values; then, for each pair of consecutive dimensions in the three layouts, 1 if they
  descend (as in a default layout), -1 if they ascend, 0 if one is not set.
  """
  low, high = LAYOUT_VALUE_RANGE
  values = jnp.asarray(rows, jnp.int32)
  one_hot = jax.nn.one_hot(values - low, high - low + 1)
  layouts = values.reshape(len(rows), 3, rows.shape[1] // 3)
  before, after = layouts[..., :-1], layouts[..., 1:]
  order = jnp.where((before >= 0) & (after >= 0), jnp.sign(before - after), 0)
  flat = lambda x: x.reshape(len(rows), math.prod(x.shape[1:]))
  return jnp.concatenate([flat(one_hot), flat(order)], axis=1)


def add_up(x: Array, index: Array, rows: int) -> jax.Array:
  """Sums rows of `x [n, ...]` with equal indices into `[rows, ...]` float32."""
  total = jnp.zeros((rows,) + x.shape[1:], jnp.float32)
  return total.at[index].add(x.astype(jnp.float32), mode="drop")


def by_bytes(cost: jax.Array, weight: Array) -> jax.Array:
  """`cost [..., 2 n]`: first half times bytes plus a tenth of the second, `[..., n]` float32."""
  scaled, flat = jnp.split(cost.astype(jnp.float32), 2, axis=-1)
  return scaled * weight + flat * _FLAT


class TableNetwork(base.Network):
  """Base of networks whose scores are sums of the costs in `tables`."""

  # A cost depends on the mean node state or on the bytes of the whole program.
  sees_whole_graph = True
  embeds_integers = True

  @property
  def family(self):
    return TablesFamily

  def embed(self, batch: TableBatch, *, train: bool = False) -> jax.Array:
    """The sum of the costs of each configuration, `[G, C, 1]` float32."""
    unary, pair, rest = self.tables(batch, train=train)
    return (table_sums(unary, pair, batch) + rest[:, None])[..., None]

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` of readouts `[..., 1]`."""
    return readout[..., 0]

  def tables(self, batch: TableBatch, *, train: bool = False) -> Tables:
    """Costs float32 `[B, R]` of choices, `[Q, R, R]` of pairs or None, and `[G]` of the rest."""
    raise NotImplementedError


@base.LAYOUT_MODELS.register("ScoreTables")
class ScoreTables(TableNetwork):
  """Score tables from a bidirectional GraphSAGE encoder."""

  op_embed_dim: int = option(16, "width of the opcode embedding", least=1)
  hidden_dim: int = option(32, "width of node, choice and pair states", least=1)
  num_gnns: int = option(4, "rounds of message passing", least=1, most=MOST_LAYERS)
  pairs: str = option(
    "low_rank",
    "costs of pairs of choices: none, or sums of `rank` products of a factor per choice and a "
    "weight per pair",
    one_of=PAIRS,
  )
  by_bytes: bool = option(
    True, "costs have a part that is proportional to the bytes of the tensors"
  )
  rank: int = option(8, "number of factors per direction", least=1)
  dropout: float = option(0.0, "dropout rate on node, choice and pair states", least=0, below=1)
  dtype: str = option(
    "float32", "dtype of the computation; sums over neighbours and costs are float32", one_of=DTYPES
  )
  tile_padding: bool = option(
    True, "features of nodes and choices: padding to the 8 x 128 tiles of a TPU"
  )

  pair_hops = 6  # most edges between two nodes whose layouts have a joint cost
  choice_features = staticmethod(features.choice_features)

  def setup(self):
    options: dict[str, Any] = dict(features=self.hidden_dim, dropout=self.dropout, dtype=self.dtype)
    self.encoder = GraphEncoder(op_embed_dim=self.op_embed_dim, rounds=self.num_gnns, **options)
    self.row_state = Dense(self.hidden_dim, dtype=self.dtype)
    self.unary_costs = _UnaryCosts(**options)
    if self.pairs != "none":
      self.pair_costs = _PairCosts(rank=self.rank, **options)

  def tables(self, batch: TableBatch, *, train: bool = False) -> Tables:
    """Costs float32 `[B, R]` of choices, `[Q, R, R]` of pairs or None, and 0 `[G]` of the rest."""
    batch, nothing = self.weighed(batch), jnp.zeros(len(batch.target))
    x, row = self.states(batch, train)
    unary = self.unary_costs(x, row, batch, train=train)
    unary = add_up(unary, batch.choices.group, len(batch.choices.row)) * _COST_SCALE
    if self.pairs == "none":
      return unary, None, nothing
    return unary, self.pair_costs(x, row, batch, train=train) * _COST_SCALE, nothing

  def node_tables(self, batch: TableBatch) -> Tables:
    """The summands of `tables`: costs `[K, R]` of nodes, `[P, R, R]` of pairs of nodes or None.

    The axes R are choices of the node, or of the first and the second end. All other nodes cost 0,
    `[N]`.
    """
    batch, nothing = self.weighed(batch), jnp.zeros(len(batch.graph.nodes["opcode"]))
    x, row = self.states(batch, False)
    unary = self.unary_costs(x, row, batch, train=False) * _COST_SCALE
    if self.pairs == "none":
      return unary, None, nothing
    return unary, self.pair_costs.of_nodes(x, row, batch) * _COST_SCALE, nothing

  def weighed(self, batch: TableBatch) -> TableBatch:
    """The batch; without the option `by_bytes` all nodes and pairs have the weight 1."""
    if self.by_bytes:
      return batch
    unweighed = lambda part: part._replace(weight=jnp.ones(part.weight.shape, jnp.float32))
    return batch._replace(choices=unweighed(batch.choices), pairs=unweighed(batch.pairs))

  def states(self, batch: TableBatch, train: bool) -> tuple[jax.Array, jax.Array]:
    """States `[N, H]` of nodes, and `[B, R, H]` of the dictionary rows of choices."""
    row = nn.gelu(self.row_state(row_features(batch.rows)))
    return self.encoder(batch, train=train), take_rows(row, batch.choices.row)


def table_sums(unary: jax.Array, pair: jax.Array | None, batch: TableBatch) -> jax.Array:
  """Sums the costs of each configuration's choices, `[G, C]` float32."""
  graphs = len(batch.target)
  code = jnp.asarray(batch.code, jnp.int32)
  if not len(code):  # programs without choices; jax does not gather from an empty axis
    return jnp.zeros((graphs, code.shape[1]), jnp.float32)
  costs = jnp.take_along_axis(unary, code, axis=1)
  total = pooling.graph_sum(costs, batch.group_graph, graphs)
  if pair is None:
    return total
  first, second = (take_rows(code, batch.pairs.groups[:, end]) for end in range(2))
  flat = pair.reshape(len(pair), pair.shape[1] * pair.shape[2])
  costs = jnp.take_along_axis(flat, first * pair.shape[2] + second, axis=1)
  graph_of = group_slates(batch, batch.pairs.groups[:, 0])
  return total + pooling.graph_sum(costs, graph_of, graphs)


class _UnaryCosts(TablePart):
  """Costs of every configurable node with every choice of its group."""

  @nn.compact
  def __call__(self, x: jax.Array, row: jax.Array, batch: TableBatch, *, train: bool) -> jax.Array:
    """Costs `[K, R]` float32.

    Args:
      x: `[N, H]` node states.
      row: `[B, R, H]` states of the dictionary rows of choices.
      batch: the batch.
      train: apply dropout to states.
    """
    choices, graph_of = batch.choices, node_graph(batch.graph)
    mean = pooling.graph_sum(x, graph_of, len(batch.target))
    mean /= jnp.maximum(pooling.real_nodes(batch.graph), 1)[:, None]
    node = self.dense("node")(take_rows(x, choices.node))
    mean = self.dense("mean", use_bias=False)(mean.astype(x.dtype))
    node += take_rows(mean, take_rows(graph_of, choices.node))
    state = node[:, None] + self.dense("feat", use_bias=False)(choices.feat)
    state += take_rows(self.dense("row", use_bias=False)(row), choices.group)
    slate_of = group_slates(batch, choices.group)
    state = nn.gelu(self.dense("state")(self.drop(nn.gelu(state), slate_of, batch, train)))
    return by_bytes(self.dense("cost", 2)(state), choices.weight[:, None, None])[..., 0]


class _PairCosts(TablePart):
  """Costs of choices of two groups, from the pairs of nodes between them."""

  rank: int = 8

  def setup(self):
    self.feat, self.ends = self.dense(), [self.dense(use_bias=False) for _ in range(3)]
    self.state, self.gate = self.dense(), self.dense(features=2 * self.rank)
    self.group, self.row = self.dense(), self.dense(use_bias=False)
    self.factor = self.dense(features=2 * self.rank)
    self.dropped = SlateDropout(self.dropout)

  def __call__(self, x: jax.Array, row: jax.Array, batch: TableBatch, *, train: bool) -> jax.Array:
    """Costs `[Q, R, R]` float32; arguments as in `_UnaryCosts`."""
    pairs, gate = batch.pairs, self.gates(x, batch, train)[:, None]
    turned = jnp.asarray(pairs.is_turned)[:, None, None]
    by_direction = [jnp.where(turned, 0, gate), jnp.where(turned, gate, 0)]
    gate = add_up(jnp.concatenate(by_direction, axis=1), pairs.column, len(pairs.groups))
    factor = self.factors(x, row, batch)
    first, second = (take_rows(factor, pairs.groups[:, i]) for i in range(2))
    # A first end has factors as a producer, a second end as a consumer, in either group of the
    # column.
    return jnp.einsum("qdk,qrdk,qsdk->qrs", gate, first, second[:, :, ::-1])

  def of_nodes(self, x: jax.Array, row: jax.Array, batch: TableBatch) -> jax.Array:
    """Costs `[P, R, R]` float32 of choices of the first and the second end."""
    pairs, factor = batch.pairs, self.factors(x, row, batch)
    groups = take_rows(jnp.asarray(pairs.groups), pairs.column)
    groups = jnp.where(jnp.asarray(pairs.is_turned)[:, None], groups[:, ::-1], groups)
    first, second = (take_rows(factor[:, :, end], groups[:, end]) for end in range(2))
    return jnp.einsum("pk,prk,psk->prs", self.gates(x, batch, False), first, second)

  def gates(self, x: jax.Array, batch: TableBatch, train: bool) -> jax.Array:
    """Weights of factors for each pair of nodes, `[P, rank]` float32."""
    pairs = batch.pairs
    ends = [take_rows(end(x), pairs.ends[:, i]) for i, end in enumerate(self.ends)]
    state = self.feat(pairs.feat) + sum(ends)
    state = self.dropped(nn.gelu(state), _slate_of_pairs(batch), len(batch.target), train=train)
    state = nn.gelu(self.state(state))
    return by_bytes(self.gate(state), pairs.weight[:, None])

  def factors(self, x: jax.Array, row: jax.Array, batch: TableBatch) -> jax.Array:
    """Factors of every choice as producer and consumer, `[B, R, 2, rank]` float32."""
    choices = batch.choices
    count = add_up(jnp.ones(len(choices.node)), choices.group, len(row))
    group = add_up(take_rows(self.group(x), choices.node), choices.group, len(row))
    group /= jnp.maximum(count, 1)[:, None]
    factor = self.factor(nn.gelu(group[:, None].astype(x.dtype) + self.row(row)))
    return factor.astype(jnp.float32).reshape(*factor.shape[:2], 2, self.rank)


def group_slates(batch: TableBatch, group: Array) -> jax.Array:
  """The slate of each group `[n]` int32, ABSENT for padding."""
  return jnp.asarray(batch.group_graph).at[group].get(mode="fill", fill_value=ABSENT)


def _slate_of_pairs(batch: TableBatch) -> jax.Array:
  """The slate of each pair of nodes, `[P]` int32, ABSENT for padding."""
  column = jnp.asarray(batch.pairs.groups[:, 0])
  return group_slates(batch, column.at[batch.pairs.column].get(mode="fill", fill_value=ABSENT))
