"""Rankers that predict times: a program takes the sum of the times of its nodes.

    time of node n = sum over quantities q of  rate[q] * quantity[q](n, order) * exp(factor[q])

The quantities are the bytes of the output, padded in its order, the bytes of its operands, the
floating-point operations, and 1. A network predicts the factors from the state of the node and from
features of the order. The order of a node is that of its choice, or the compiler's own.

The time of a kernel is the sum over its nodes. A node that is in several kernels of a configuration
has an equal part of its time in each of them. Kernels have no part in the scores of
configurations: `losses.kernel_error` teaches their times (Kaufman et al., MLSys 2021).
"""

from __future__ import annotations

import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.columns import MAX_RANK, NODE
from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data import features
from tpugraphs_jax.data.batching import Array
from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.nn import embeddings, pooling
from tpugraphs_jax.nn.aggregation import (
  degree,
  neighbour_sum,
  node_graph,
  OPERANDS,
  take_rows,
  USERS,
)
from tpugraphs_jax.nn.layers import Dense, DTYPES
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.tables import traffic
from tpugraphs_jax.rankers.tables.batches import TableBatch
from tpugraphs_jax.rankers.tables.family import ChoicesFamily
from tpugraphs_jax.rankers.tables.network import (
  add_up,
  GraphEncoder,
  TableNetwork,
  TablePart,
  Tables,
)

WORK, ORDERS = "work", "orders"  # blocks of node features
# Microseconds of a byte of the output, of a byte of the operands, of an operation, of a kernel and
# between kernels, from which factors begin: a few times less than those of a TPU v6e.
_RATES = 1e-7, 1e-7, 2e-10, 0.01, 0.01
_LARGEST = 6.0  # largest absolute logarithm of a factor
_WORK = 3  # columns of the block `work`
_BYTES = 9  # the column of `traffic.order_columns` with log(1 + bytes) / 10


@features.BLOCKS.register(ORDERS)
def own_orders(graph: OpGraph) -> np.ndarray:
  """`traffic.order_columns` of all nodes in the compiler's own orders, `[N, F]`."""
  nodes = np.arange(graph.num_nodes)
  return _order_features(graph, nodes, _own_order(graph, nodes))


@features.BLOCKS.register(WORK)
def work(graph: OpGraph) -> np.ndarray:
  """Logarithms of 1 + the bytes of the operands, the largest of them, and operations, `[N, 3]`.

  Bytes are padded in the compiler's own orders. A product of two arrays has as many operations as
  the root of the product of the elements of both and of the result, times 2: those of a product
  without batches.
  """
  dims = np.maximum(graph.node_feat[:, features.DIMENSIONS].astype(np.float64), 1)
  elements = dims.prod(axis=1)
  nbytes = np.exp(10 * own_orders(graph)[:, _BYTES]) - 1
  consumer, producer = graph.edge_index.T
  operands = np.bincount(consumer, nbytes[producer], graph.num_nodes)
  largest = np.zeros(graph.num_nodes)
  np.maximum.at(largest, consumer, nbytes[producer])
  flops = np.zeros(graph.num_nodes)
  nodes, pairs = features.contraction_operands(graph)
  sides = np.where(pairs >= 0, elements[np.maximum(pairs, 0)], 1)
  flops[nodes] = 2 * np.sqrt(sides.prod(axis=1) * elements[nodes])
  return np.log1p(np.stack([operands, largest, flops], axis=1))


def _order_features(graph: OpGraph, at: np.ndarray, order: np.ndarray) -> np.ndarray:
  return np.stack(list(traffic.order_columns(graph, at, order).values()), axis=1)


def _own_order(graph: OpGraph, at: np.ndarray) -> np.ndarray:
  """The compiler's own orders of nodes, `[U, 6]` int, -1 beyond the rank or beyond 6 dimensions."""
  feat = graph.node_feat[at]
  rank = (feat[:, features.DIMENSIONS] > 0).sum(axis=1)
  order = feat[:, NODE["minor_to_major"]].astype(int)
  return np.where((np.arange(MAX_RANK) < rank[:, None]) & (order < MAX_RANK), order, -1)


def choice_features(graph: OpGraph[LayoutConfigs], node: np.ndarray, row: np.ndarray) -> np.ndarray:
  """`traffic.order_columns` of choices, the last column being whether the choice is a change.

  The order of a choice that is left to the compiler or `changes_nothing` is the compiler's own.

  Args:
    graph: graph with the released node features.
    node: `[U]` numbers among the configurable nodes.
    row: `[U]` dictionary rows.
  """
  at, order = graph.config_node[node], graph.configs.rows[row, :MAX_RANK].astype(int)
  is_own = (order[:, 0] < 0) | traffic.changes_nothing(graph, node, row)
  order = np.where(is_own[:, None], _own_order(graph, at), order)
  values = _order_features(graph, at, order)
  return np.concatenate([values, ~is_own[:, None]], axis=1).astype(np.float32)


class _NodeTimes(nn.Module):
  """Times of nodes from their states and orders."""

  features: int
  dtype: str

  @nn.compact
  def __call__(self, state: jax.Array, order: Array, work: Array) -> jax.Array:
    """Microseconds `[..., 2]` float32 in kernels and between kernels.

    Args:
      state: `[..., H]` of nodes.
      order: `[..., F + 1]` `choice_features`.
      work: `[..., 3]` the block of that name.
    """
    dense = functools.partial(Dense, self.features, dtype=self.dtype)
    hidden = nn.gelu(dense(name="state")(state) + dense(use_bias=False, name="order")(order))
    hidden = nn.gelu(dense(name="hidden")(hidden))
    factor = Dense(5, dtype=self.dtype, name="factor")(hidden).astype(jnp.float32)
    # Logarithms of the quantities: bytes of the output and of the operands, operations, and 1 for
    # the time in a kernel and the time between kernels.
    quantities = [10 * order[..., _BYTES], work[..., 0], work[..., 2], *[jnp.zeros(())] * 2]
    logs = jnp.broadcast_arrays(*(q + math.log(rate) for q, rate in zip(quantities, _RATES)))
    part = jnp.exp(jnp.stack(logs, axis=-1) + jnp.clip(factor, -_LARGEST, _LARGEST))
    return jnp.stack([part[..., :4].sum(axis=-1), part[..., 4]], axis=-1)


class TimeNetwork(TableNetwork):
  """Base of networks whose scores are times: sums over nodes, in kernels and between kernels."""

  op_embed_dim: int = option(16, "width of the opcode embedding", least=1)
  hidden_dim: int = option(32, "width of node states", least=1)
  num_gnns: int = option(2, "rounds of message passing", least=1, most=MOST_LAYERS)
  dropout: float = option(0.1, "dropout rate on node states", least=0, below=1)
  dtype: str = option("float32", "dtype of the computation; times are float32", one_of=DTYPES)

  pair_hops = 0  # no pairs have costs
  tile_padding = True
  predicts_kernels = True
  reads = (ORDERS, WORK)
  choice_features = staticmethod(choice_features)

  def setup(self):
    options: dict[str, Any] = dict(features=self.hidden_dim, dtype=self.dtype)
    self.encoder = self.make_encoder(
      op_embed_dim=self.op_embed_dim, rounds=self.num_gnns, dropout=self.dropout, **options
    )
    self.node_times = _NodeTimes(**options)
    self.launch = self.param("launch", nn.initializers.constant(-1.0), (), jnp.float32)

  def make_encoder(self, **options: Any) -> nn.Module:
    """The module of node states."""
    raise NotImplementedError

  def times(self, batch: TableBatch, *, train: bool) -> jax.Array:
    """Times of nodes `[N, C, 2]` in kernels and between kernels; 0 of padding."""
    raise NotImplementedError

  def embed(self, batch: TableBatch, *, train: bool = False) -> jax.Array:
    """The time of each configuration in microseconds, `[G, C, 1]` float32."""
    times = self.times(batch, train=train)
    self.sow("kernels", "time", kernel_times(times[..., 0], batch))
    total = pooling.graph_sum(times.sum(axis=-1), node_graph(batch.graph), len(batch.target))
    return (total + jnp.exp(self.launch))[..., None]

  def kernels(self, batch: TableBatch) -> jax.Array:
    """The times of kernels in microseconds, `[D, C]` float32; 0 without such a kernel."""
    return kernel_times(self.times(batch, train=False)[..., 0], batch)


def kernel_times(times: jax.Array, batch: TableBatch) -> jax.Array:
  """The times of the kernels of a batch `[D, C]` from times of nodes `[N, C]`.

  A node that is in several kernels of a configuration has an equal part of its time in each.

  Raises:
    ValueError: the batch has no kernels.
  """
  if (kernels := batch.kernels) is None:
    raise ValueError("the batch has no kernels: prepare its programs with has_kernels=True")
  is_there = (jnp.asarray(kernels.time) > 0).astype(jnp.float32)
  share = add_up(take_rows(is_there, kernels.kernel), kernels.node, len(times))
  parts = times / jnp.maximum(share, 1)
  return add_up(take_rows(parts, kernels.node), kernels.kernel, len(is_there)) * is_there


@base.LAYOUT_MODELS.register("TimeTables")
class TimeTables(TimeNetwork):
  """Times of nodes from states that do not depend on choices: a score table."""

  def make_encoder(self, **options: Any) -> nn.Module:
    return GraphEncoder(**options)

  def times(self, batch: TableBatch, *, train: bool) -> jax.Array:
    """Times of nodes `[N, C, 2]` in kernels and between kernels; 0 of padding."""
    fixed, chosen = self.node_costs(batch, train=train)
    code = take_rows(jnp.asarray(batch.code, jnp.int32), batch.choices.group)
    chosen = jnp.take_along_axis(chosen, code[..., None], axis=1)
    times = jnp.broadcast_to(fixed[:, None], (len(fixed), code.shape[1], 2))
    return times.at[batch.choices.node].add(chosen, mode="drop")

  def tables(self, batch: TableBatch, *, train: bool = False) -> Tables:
    """Times `[B, R]` of choices of groups, None for pairs, and `[G]` of all other nodes."""
    unary, _, rest = self.node_tables(batch, train=train)
    rest = pooling.graph_sum(rest, node_graph(batch.graph), len(batch.target))
    return add_up(unary, batch.choices.group, len(batch.choices.row)), None, rest

  def node_tables(self, batch: TableBatch, *, train: bool = False) -> Tables:
    """Times `[K, R]` of choices of nodes, None for pairs, and `[N]` of nodes without choices.

    The launch of a program counts with its first node.
    """
    fixed, chosen = self.node_costs(batch, train=train)
    counts = jnp.asarray(batch.graph.n_node)[:-1]
    first = jnp.where(counts > 0, jnp.cumsum(counts) - counts, len(fixed))
    rest = fixed.sum(axis=-1).at[first].add(jnp.exp(self.launch), mode="drop")
    return chosen.sum(axis=-1), None, rest

  def node_costs(self, batch: TableBatch, *, train: bool) -> tuple[jax.Array, jax.Array]:
    """Times `[N, 2]` of nodes without choices, and `[K, R, 2]` of choices of nodes."""
    state, (own, work) = self.encoder(batch, train=train), _columns(batch)
    choices, graph_of = batch.choices, node_graph(batch.graph)
    is_fixed = (graph_of < len(batch.target)).at[choices.node].set(False, mode="drop")
    fixed = jnp.where(is_fixed[:, None], self.node_times(state, own, work), 0)
    at = lambda x: take_rows(x, choices.node)[:, None]
    is_real = (jnp.asarray(choices.node) < len(state))[:, None, None]
    return fixed, jnp.where(is_real, self.node_times(at(state), choices.feat, at(work)), 0)


@base.LAYOUT_MODELS.register("TimeSAGE")
class TimeSAGE(TimeNetwork):
  """Times of nodes from states that depend on the choices of nodes nearby: GraphSAGE."""

  @property
  def family(self):
    return ChoicesFamily

  def make_encoder(self, **options: Any) -> nn.Module:
    return ConfigEncoder(**options)

  def times(self, batch: TableBatch, *, train: bool) -> jax.Array:
    """Times of nodes `[N, C, 2]` in kernels and between kernels; 0 of padding."""
    own, work = _columns(batch)
    code = take_rows(jnp.asarray(batch.code, jnp.int32), batch.choices.group)
    chosen = jnp.take_along_axis(jnp.asarray(batch.choices.feat), code[..., None], axis=1)
    order = jnp.broadcast_to(own[:, None], (len(own), code.shape[1], own.shape[1]))
    order = order.at[batch.choices.node].set(chosen, mode="drop")
    state = self.encoder(batch, order, train=train)
    times = self.node_times(state, order, work[:, None])
    is_real = node_graph(batch.graph) < len(batch.target)
    return jnp.where(is_real[:, None, None], times, 0)


class ConfigEncoder(TablePart):
  """Rounds as of `GraphEncoder` on states `[N, C, H]`, which begin with the orders of nodes."""

  op_embed_dim: int = 16
  rounds: int = 2

  @nn.compact
  def __call__(self, batch: TableBatch, order: jax.Array, *, train: bool) -> jax.Array:
    """Node states `[N, C, H]` from orders `[N, C, F]`."""
    opcode = embeddings.OpcodeEmbedding(self.op_embed_dim)(batch.graph)
    x = self.dense("input")(jnp.concatenate([batch.graph.nodes["feat"], opcode], axis=-1))
    x = nn.gelu(x[:, None] + self.dense("order", use_bias=False)(order))
    for i in range(self.rounds):
      total = self.dense(f"self_{i}")(x)
      for side in (OPERANDS, USERS):
        sent = self.dense(f"{side}_{i}", use_bias=False)(x)
        count = jnp.maximum(degree(batch.adjacency, side, len(x)), 1)
        total += neighbour_sum(sent, batch.adjacency, side) / count[:, None, None].astype(x.dtype)
      total = nn.LayerNorm(dtype=self.dtype, name=f"norm_{i}")(total)
      x += self.drop(nn.gelu(total), node_graph(batch.graph), batch, train)
    return x


def _columns(batch: TableBatch) -> tuple[jax.Array, jax.Array]:
  """The blocks `orders`, with a last column of 0 for no change, and `work`."""
  feat = jnp.asarray(batch.graph.nodes["feat"])[:, : -features.PADDINGS]
  orders = batch.choices.feat.shape[-1] - 1
  own, work = feat[:, -orders - _WORK : -_WORK], feat[:, -_WORK:]
  return jnp.pad(own, ((0, 0), (0, 1))), work
