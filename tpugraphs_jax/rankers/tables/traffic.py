"""Score tables from memory traffic: padded bytes of choices, and features of their tensors.

The TPU compiler's estimate of a program is nearly its memory traffic, and the effects of output
orders are nearly additive. The cost of a choice is its padded bytes, relative to the bytes of the
program's convolutions and dots, times a factor from a small network on `choice_features`. There is
no message passing: a hundred programs are too few to learn it (docs/records/own_models.md). An
order that is left to the compiler costs 0. The compiler's default layout of the node also costs 0,
unless a user of the same shape has another layout (`changes_nothing`). The score of a configuration
is therefore its cost relative to leaving all orders to the compiler.
"""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.columns import MAX_RANK, NODE, opcode_ids
from tpugraphs_jax.config_fields import option
from tpugraphs_jax.data import features
from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.nn.dropout import SlateDropout
from tpugraphs_jax.nn.layers import Dense, DTYPES
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.tables import node_pairs
from tpugraphs_jax.rankers.tables.batches import TableBatch
from tpugraphs_jax.rankers.tables.network import add_up, group_slates, TableNetwork, Tables

USER_OPCODES = "convolution dot reshape transpose reduce concatenate tuple add".split()
_LARGEST = 6.0  # largest absolute logarithm of a factor


def choice_features(graph: OpGraph[LayoutConfigs], node: np.ndarray, row: np.ndarray) -> np.ndarray:
  """Features of the tensor and the layout of each choice, `[U, F]` float32.

  The columns are those of `order_columns`; all are 0 where the order is left to the compiler, and
  the traffic is 0 where the choice `changes_nothing`.

  Args:
    graph: graph with the released node features.
    node: `[U]` numbers among the configurable nodes.
    row: `[U]` dictionary rows.
  """
  order = graph.configs.rows[row, :MAX_RANK].astype(int)
  values = np.stack(list(order_columns(graph, graph.config_node[node], order).values()), axis=1)
  values[:, 0] *= ~changes_nothing(graph, node, row)
  return np.where(order[:, :1] < 0, 0, values).astype(np.float32)


def order_columns(graph: OpGraph, at: np.ndarray, order: np.ndarray) -> dict[str, np.ndarray]:
  """The features of tensors in orders of their dimensions by name, each `[U]`.

  A padding is the logarithm of padded over real elements. Traffic is padded bytes of the output in
  the order, divided by the bytes that convolutions and dots of the program access with the smallest
  padding. `reverse` is the order with the two minor dimensions exchanged, `least` the order with
  the smallest padding.

  Args:
    graph: graph with the released node features.
    at: `[U]` nodes.
    order: `[U, 2 or more]` dimensions from minor to major, -1 beyond the rank.
  """
  feat = graph.node_feat
  dims = feat[:, features.DIMENSIONS]
  nbytes = node_pairs.tensor_bytes(feat).astype(np.float64)
  minor, second = order[:, 0], order[:, 1]
  rank = (dims > 0).sum(axis=1)[at]
  size = lambda axis: np.where(axis < 0, 0, dims[at, np.maximum(axis, 0)])
  padding, reverse = _padding(size(minor), size(second)), _padding(size(second), size(minor))
  least = _least_padding(dims)
  total = max(_contraction_bytes(graph, nbytes * np.exp(least)), 1.0)
  traffic = lambda padding: nbytes[at] * np.exp(padding) / total
  excess = lambda best: np.log1p(100 * np.maximum(traffic(padding) - traffic(best), 0))
  convolution, dot = (graph.node_opcode[at] == opcode for opcode in features.CONTRACTIONS)
  dimension = lambda name: feat[at, NODE[f"output_{name}_dimension"].start]
  batch, feature = dimension("batch"), dimension("feature")
  is_weight = convolution & (batch > 0)
  gain = padding - reverse
  return {
    "traffic": traffic(padding),
    "padding": padding,
    "padding over reverse": gain,
    "padding over reverse, if more": np.maximum(gain, 0),
    "reverse has the same padding": np.abs(gain) < 0.01,
    "padding over least": padding - least[at],
    "least padding": least[at],
    "padding of lanes": features.padding(size(minor), features.LANES),
    "log of least traffic": np.log(traffic(least[at]) + 1e-4),
    "log of padded bytes": np.log1p(nbytes[at] * np.exp(padding)) / 10,
    "log of traffic": np.log1p(100 * traffic(padding)),
    "log of traffic over least": excess(least[at]),
    "log of traffic over reverse": excess(reverse),
    "convolution": convolution & ~is_weight,
    "weight gradient": is_weight,
    "dot": dot,
    "other opcode": ~(convolution | dot),
    "padding over reverse, convolution": gain * convolution,
    "padding over reverse, dot": gain * dot,
    "minor is the feature": convolution & (minor == feature),
    "minor is the batch": convolution & (minor == batch),
    "minor is the last dimension": minor == rank - 1,
    "minor is the first dimension": minor == 0,
    "second comes before minor": second == minor - 1,
    "minor and second are apart": np.abs(minor - second) != 1,
    "rank above 2": rank > 2,
    "minor below 8": size(minor) < features.SUBLANES,
    "second at least 128": size(second) >= features.LANES,
    "first dimension below 8": dims[at, 0] < features.SUBLANES,
    "elements of two bytes": nbytes[at] == 2 * np.abs(feat[at, NODE["shape"].stop - 1]),
    **{name: column[at] for name, column in user_columns(graph).items()},
  }


def changes_nothing(graph: OpGraph[LayoutConfigs], node: np.ndarray, row: np.ndarray) -> np.ndarray:
  """Whether choices are the default layouts of their nodes and of users with the same shape, `[U]`.

  In the training and validation programs of `data/own`, 91 % of such choices have the label of the
  compiler's default. Where a user of the same shape has another layout, none has.

  Args:
    graph: graph whose nodes have the compiler's default layouts.
    node: `[U]` numbers among the configurable nodes.
    row: `[U]` dictionary rows.
  """
  layout, at = graph.node_feat[:, NODE["minor_to_major"]], graph.config_node[node]
  consumer, producer = graph.edge_index[_keeps_shape(graph)].T
  differs = (layout[consumer] != layout[producer]).any(axis=1)
  return is_default_layout(graph, node, row) & ~np.isin(at, producer[differs])


def is_default_layout(
  graph: OpGraph[LayoutConfigs], node: np.ndarray, row: np.ndarray
) -> np.ndarray:
  """Whether choices are the default layouts of their nodes, `[U]`; see `changes_nothing`."""
  layout, at = graph.node_feat[:, NODE["minor_to_major"]], graph.config_node[node]
  rank = (graph.node_feat[:, features.DIMENSIONS] > 0).sum(axis=1)[at]
  # Dimensions that the row does not name follow in descending order.
  matches = graph.configs.rows[row, :MAX_RANK, None] == np.arange(MAX_RANK)
  place = np.where(matches.any(axis=1), matches.argmax(axis=1), 2 * MAX_RANK - np.arange(MAX_RANK))
  is_real = np.arange(MAX_RANK) < rank[:, None]
  order = np.argsort(np.where(is_real, place, 3 * MAX_RANK), axis=1, kind="stable")
  return (order == layout[at]).all(axis=1, where=is_real)


def _keeps_shape(graph: OpGraph) -> np.ndarray:
  """Whether the consumer has the shape of the producer and is not configurable, `[E]` bool."""
  (consumer, producer), dims = graph.edge_index.T, graph.node_feat[:, features.DIMENSIONS]
  return (dims[consumer] == dims[producer]).all(axis=1) & ~np.isin(consumer, graph.config_node)


def _padding(minor: np.ndarray, second: np.ndarray) -> np.ndarray:
  """Logarithm of padded over real elements, from the sizes of the two minor dimensions."""
  lanes = features.padding(minor, features.LANES)
  return lanes + features.padding(second, features.SUBLANES)


def _least_padding(dims: np.ndarray) -> np.ndarray:
  """The smallest `_padding` of any order, `[N]`, from sizes `[N, 6]`; 0 for scalars."""
  pairs = ~np.eye(MAX_RANK, dtype=bool) & (dims[:, :, None] > 0) & (dims[:, None] > 0)
  least = np.where(pairs, _padding(dims[:, :, None], dims[:, None]), np.inf).min(axis=(1, 2))
  return np.where(np.isfinite(least), least, 0)


def _contraction_bytes(graph: OpGraph, nbytes: np.ndarray) -> float:
  """Bytes that all convolutions and dots read and write."""
  consumer, producer = graph.edge_index.T
  traffic = nbytes + np.bincount(consumer, nbytes[producer], graph.num_nodes)
  return traffic[np.isin(graph.node_opcode, features.CONTRACTIONS)].sum()


def user_columns(graph: OpGraph) -> dict[str, np.ndarray]:
  """Features of the users of each node by name, each `[N]` bool.

  An indirect user is also one that nodes which keep the shape lead to.
  """
  (consumer, producer), opcode = graph.edge_index.T, graph.node_opcode
  ids, direct = opcode_ids(), np.zeros((graph.num_nodes, len(USER_OPCODES)), bool)
  for place, name in enumerate(USER_OPCODES):
    direct[producer[opcode[consumer] == ids[name]], place] = True
  keeps = _keeps_shape(graph)
  indirect, previous = direct, None
  while previous is None or (indirect != previous).any():
    previous, indirect = indirect, indirect.copy()
    np.logical_or.at(indirect, producer[keeps], previous[consumer[keeps]])
  count = np.bincount(producer, minlength=graph.num_nodes)
  return {
    **{f"user is {name}": column for name, column in zip(USER_OPCODES, direct.T)},
    **{f"indirect user is {name}": column for name, column in zip(USER_OPCODES, indirect.T)},
    "no user": count == 0,
    "several users": count > 1,
  }


@base.LAYOUT_MODELS.register("TrafficTables")
class TrafficTables(TableNetwork):
  """Costs of single choices: relative traffic times a factor from features of the choice."""

  hidden_dim: int = option(16, "width of the hidden layer that predicts the factor", least=1)
  dropout: float = option(0.3, "dropout rate on the hidden layer", least=0, below=1)
  dtype: str = option("float32", "dtype of the computation; costs are float32", one_of=DTYPES)

  pair_hops = 0  # no pairs have costs
  tile_padding = True
  choice_features = staticmethod(choice_features)

  def setup(self):
    dense = lambda width: Dense(width, dtype=self.dtype)
    self.state, self.factor = dense(self.hidden_dim), dense(1)
    self.dropped = SlateDropout(self.dropout)

  def tables(self, batch: TableBatch, *, train: bool = False) -> Tables:
    """Costs `[B, R]` float32 of choices of groups, None for pairs, and 0 `[G]` of the rest."""
    costs = add_up(self.costs(batch, train=train), batch.choices.group, len(batch.choices.row))
    return costs, None, jnp.zeros(len(batch.target))

  def node_tables(self, batch: TableBatch) -> Tables:
    """Costs `[K, R]` float32 of choices of nodes, None for pairs, and 0 `[N]` of other nodes."""
    return self.costs(batch, train=False), None, jnp.zeros(len(batch.graph.nodes["opcode"]))

  def costs(self, batch: TableBatch, *, train: bool) -> jax.Array:
    """Costs `[K, R]` float32 of choices of nodes; 0 for orders left to the compiler."""
    traffic, feat = jnp.split(jnp.asarray(batch.choices.feat), [1], axis=-1)
    slate_of = group_slates(batch, batch.choices.group)
    state = self.dropped(nn.gelu(self.state(feat)), slate_of, len(batch.target), train=train)
    factor = self.factor(state).astype(jnp.float32)
    return (traffic * jnp.exp(jnp.clip(factor, -_LARGEST, _LARGEST)))[..., 0]
