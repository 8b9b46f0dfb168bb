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

from tpugraphs_jax.data import feature_blocks
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.aggregation import node_graph
from tpugraphs_jax.nn.layers import Dense
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.tables import residual as table_residual
from tpugraphs_jax.rankers.tables.batches import TableBatch
from tpugraphs_jax.rankers.tables.family import TablesFamily
from tpugraphs_jax.rankers.tables.layers import Encoder, Part, add_up, by_bytes, row_features, take

PAIRS = ("none", "low_rank")


@base.LAYOUT_MODELS.register("ScoreTables")
class ScoreTables(base.Network):
  """Score tables from a bidirectional GraphSAGE encoder.

  Attributes:
    op_embed_dim: width of the opcode embedding.
    hidden_dim: width of node, choice and pair states.
    num_gnns: rounds of message passing.
    pairs: `none`, or `low_rank`: the cost of two choices is a sum over `rank` of a
      factor of each times a weight of the pair.
    residual: `none`, or what is added for every configuration beyond the tables: `triples`,
      or `sage` (see `table_residual`).
    by_bytes: costs have a part that grows with the bytes of the tensors concerned.
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
  residual: str = "none"
  by_bytes: bool = True
  rank: int = 8
  heads: int = 1
  dropout: float = 0.0
  cost_scale: float = 4.0
  dtype: Any = None
  precision: Any = None

  # A cost depends on the mean node state of the program and on the bytes of all groups.
  sees_whole_graph = True
  embeds_integers = True
  choice_features = staticmethod(feature_blocks.choice_features)

  def __post_init__(self):
    for name, known in (("pairs", PAIRS), ("residual", table_residual.KINDS)):
      if (value := getattr(self, name)) not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    super().__post_init__()

  def setup(self):
    options = dict(features=self.hidden_dim, dropout=self.dropout, dtype=self.dtype,
                   precision=self.precision)
    self.encoder = Encoder(op_embed_dim=self.op_embed_dim, rounds=self.num_gnns, **options)
    self.row_state = Dense(self.hidden_dim, dtype=self.dtype, precision=self.precision)
    self.unary_costs = _UnaryCosts(heads=self.heads, **options)
    if self.pairs != "none":
      self.pair_costs = _PairCosts(heads=self.heads, rank=self.rank, **options)
    if self.residual == "triples":
      self.beyond = table_residual.Triples(rank=self.rank, **options)
    elif self.residual == "sage":
      self.beyond = table_residual.GroupSAGE(**options)

  @property
  def family(self):
    return TablesFamily

  @property
  def has_residual(self) -> bool:
    """Whether a score is more than a sum of costs: `residuals` gives the rest."""
    return self.residual != "none"

  def embed(self, batch: TableBatch, *, train: bool = False) -> jax.Array:
    """The sum of each head's costs and the residual, `[G, C, heads (+ 1)]` float32."""
    sums = table_sums(*self.tables(batch, train=train), batch)
    if not self.has_residual:
      return sums
    return jnp.concatenate([sums, self.residuals(batch, train=train)[..., None]], axis=-1)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` of readouts `[..., heads (+ 1)]`."""
    return readout.sum(axis=-1)

  def residuals(self, batch: TableBatch, *, train: bool = False) -> jax.Array:
    """What scores are beyond the sums of tables, `[G, C]` float32."""
    if not len(batch.code):  # programs without a choice; jax gathers from no empty axis
      return jnp.zeros(batch.target.shape, jnp.float32)
    batch = self.weighed(batch)
    x, row = self.states(batch, train)
    return self.beyond(x, row, batch, train=train)[..., 0] * self.cost_scale

  def tables(
      self, batch: TableBatch, *, train: bool = False
  ) -> tuple[jax.Array, jax.Array | None]:
    """Costs `[B, R, heads]` of choices and `[Q, R, R, heads]` of pairs, float32; or None."""
    batch = self.weighed(batch)
    x, row = self.states(batch, train)
    unary = self.unary_costs(x, row, batch, train=train)
    unary = add_up(unary, batch.choices.group, len(batch.choices.row)) * self.cost_scale
    if self.pairs == "none":
      return unary, None
    return unary, self.pair_costs(x, row, batch, train=train) * self.cost_scale

  def node_tables(self, batch: TableBatch) -> tuple[jax.Array, jax.Array | None]:
    """What `tables` adds up: costs `[K, R]` of nodes, `[P, R, R]` of pairs of nodes; or None.

    The choices are those of the node's group, of the first end and of the second. Heads
    are added up.
    """
    batch = self.weighed(batch)
    x, row = self.states(batch, False)
    unary = self.unary_costs(x, row, batch, train=False).sum(axis=-1) * self.cost_scale
    if self.pairs == "none":
      return unary, None
    return unary, self.pair_costs.of_nodes(x, row, batch).sum(axis=-1) * self.cost_scale

  def weighed(self, batch: TableBatch) -> TableBatch:
    """The batch as it is, or with the same weight for all nodes and pairs."""
    if self.by_bytes:
      return batch
    ones = lambda part: part._replace(weight=jnp.ones(part.weight.shape, jnp.float32))
    return batch._replace(choices=ones(batch.choices), pairs=ones(batch.pairs))

  def states(self, batch: TableBatch, train: bool) -> tuple[jax.Array, jax.Array]:
    """States `[N, H]` of nodes and `[B, R, H]` of the rows of choices."""
    row = nn.gelu(self.row_state(row_features(batch.rows)))
    return self.encoder(batch, train=train), take(row, batch.choices.row)


def table_sums(unary: jax.Array, pair: jax.Array | None, batch: TableBatch) -> jax.Array:
  """Sums the costs of each configuration's choices, `[G, C, heads]` float32."""
  graphs = len(batch.target)
  code = jnp.asarray(batch.code, jnp.int32)
  if not len(code):  # programs without a choice; jax gathers from no empty axis
    return jnp.zeros((graphs, code.shape[1], unary.shape[-1]), jnp.float32)
  costs = jnp.take_along_axis(unary, code[..., None], axis=1)
  total = pooling.graph_sum(costs, batch.group_graph, graphs)
  if pair is None:
    return total
  first, second = take(code, batch.pairs.groups[:, 0]), take(code, batch.pairs.groups[:, 1])
  flat = pair.reshape(len(pair), pair.shape[1] * pair.shape[2], pair.shape[3])
  costs = jnp.take_along_axis(flat, (first * pair.shape[2] + second)[..., None], axis=1)
  # Pairs of groups that are absent get 0 here, and then a slot beyond the last.
  graph_of = take(batch.group_graph + 1, batch.pairs.groups[:, 0])
  graph_of = jnp.where(graph_of > 0, graph_of - 1, graphs)
  return total + pooling.graph_sum(costs, graph_of, graphs)


class _UnaryCosts(Part):
  """Costs of every configurable node with every choice of its group."""

  heads: int = 1

  @nn.compact
  def __call__(
      self, x: jax.Array, row: jax.Array, batch: TableBatch, *, train: bool
  ) -> jax.Array:
    """Costs `[K, R, heads]` float32.

    Args:
      x: `[N, H]` node states.
      row: `[B, R, H]` states of the rows chosen.
      batch: of programs.
      train: whether states are dropped.
    """
    choices, graph_of = batch.choices, node_graph(batch.graph)
    mean = pooling.graph_sum(x, graph_of, len(batch.target))
    mean /= jnp.maximum(pooling.real_nodes(batch.graph), 1)[:, None]
    node = self.dense("node")(take(x, choices.node)) + take(
        self.dense("mean", use_bias=False)(mean.astype(x.dtype)), take(graph_of, choices.node))
    state = (node[:, None] + self.dense("feat", use_bias=False)(choices.feat)
             + take(self.dense("row", use_bias=False)(row), choices.group))
    state = nn.gelu(self.dense("state")(self.drop(nn.gelu(state), train)))
    return by_bytes(self.dense("cost", 2 * self.heads)(state), choices.weight[:, None, None])


class _PairCosts(Part):
  """Costs of two groups' choices, from the pairs of nodes between them."""

  heads: int = 1
  rank: int = 8

  def setup(self):
    self.feat, self.ends = self.dense(), [self.dense(use_bias=False) for _ in range(3)]
    self.state, self.gate = self.dense(), self.dense(features=2 * self.rank * self.heads)
    self.group, self.row = self.dense(), self.dense(use_bias=False)
    self.factor = self.dense(features=2 * self.rank * self.heads)
    self.dropped = nn.Dropout(self.dropout)

  def __call__(
      self, x: jax.Array, row: jax.Array, batch: TableBatch, *, train: bool
  ) -> jax.Array:
    """Costs `[Q, R, R, heads]` float32; arguments as `_UnaryCosts`."""
    pairs, gate = batch.pairs, self.gates(x, batch, train)[:, None]
    turned = jnp.asarray(pairs.is_turned)[:, None, None, None]
    by_direction = [jnp.where(turned, 0, gate), jnp.where(turned, gate, 0)]
    gate = add_up(jnp.concatenate(by_direction, axis=1), pairs.column, len(pairs.groups))
    factor = self.factors(x, row, batch)
    first, second = (take(factor, pairs.groups[:, i]) for i in range(2))
    # A first end has the factors of a producer and a second end those of a consumer,
    # whichever group of the column they are in.
    return jnp.einsum("qdkh,qrdkh,qsdkh->qrsh", gate, first, second[:, :, ::-1],
                      precision=self.precision)

  def of_nodes(self, x: jax.Array, row: jax.Array, batch: TableBatch) -> jax.Array:
    """Costs `[P, R, R, heads]` float32 of the choices of the first and of the second end."""
    pairs, factor = batch.pairs, self.factors(x, row, batch)
    groups = take(jnp.asarray(pairs.groups), pairs.column)
    groups = jnp.where(jnp.asarray(pairs.is_turned)[:, None], groups[:, ::-1], groups)
    first, second = take(factor[:, :, 0], groups[:, 0]), take(factor[:, :, 1], groups[:, 1])
    return jnp.einsum("pkh,prkh,pskh->prsh", self.gates(x, batch, False), first, second,
                      precision=self.precision)

  def gates(self, x: jax.Array, batch: TableBatch, train: bool) -> jax.Array:
    """Weights of the factors of pairs of nodes, `[P, rank, heads]` float32."""
    pairs = batch.pairs
    state = self.feat(pairs.feat) + sum(
        take(end(x), pairs.ends[:, i]) for i, end in enumerate(self.ends))
    state = nn.gelu(self.state(self.dropped(nn.gelu(state), deterministic=not train)))
    gate = by_bytes(self.gate(state), pairs.weight[:, None])
    return gate.reshape(-1, self.rank, self.heads)

  def factors(self, x: jax.Array, row: jax.Array, batch: TableBatch) -> jax.Array:
    """Factors of every choice as producer and consumer, `[B, R, 2, rank, heads]` float32."""
    choices = batch.choices
    count = add_up(jnp.ones(len(choices.node)), choices.group, len(row))
    group = add_up(take(self.group(x), choices.node), choices.group, len(row))
    group /= jnp.maximum(count, 1)[:, None]
    factor = self.factor(nn.gelu(group[:, None].astype(x.dtype) + self.row(row)))
    return factor.astype(jnp.float32).reshape(*factor.shape[:2], 2, self.rank, self.heads)
