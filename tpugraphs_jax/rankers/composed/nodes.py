"""Node features in two forms, and the operations that a layer needs on both.

    form                                  stands for
    SplitNodes (`split_nodes`)            [N, C, F], nodes that no configuration has
                                          reached kept once
    array [N, C, F], or [N, 1, F]         itself; one configuration stands for all

Functions of single nodes apply to either with `jax.tree.map`. Message passing keeps the
first form, and so does everything that looks at one node alone. What brings every node
news of the whole graph (normalisation over nodes, attention) ends in the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import Adjacency, LayoutBatch, NodesByHop, TileBatch
from tpugraphs_jax.nn import layout_features, pooling
from tpugraphs_jax.nn.aggregation import neighbour_sum, node_graph, take_rows
from tpugraphs_jax.nn.split_nodes import SplitNodes, grow, nodes_within, split_neighbour_sum

Nodes = SplitNodes | jax.Array
Batch = LayoutBatch | TileBatch


@dataclasses.dataclass(frozen=True)
class Slates:
  """What layers look up in a batch of G slates with N nodes and C configurations.

  Attributes:
    batch: the batch itself.
    adjacency: edges that count, among nodes.
    by_hop: nodes by hop, with the edges among them that count; None for tiles.
    edge_mask: `[E]` bool: which edges of `batch.graph` count.
    graph_of: `[N]` int32 graph of each node; padding nodes have G.
  """

  batch: Batch
  adjacency: Adjacency
  by_hop: NodesByHop | None
  edge_mask: jax.Array
  graph_of: jax.Array

  @classmethod
  def of(cls, batch: Batch) -> Slates:
    """All that is in a batch."""
    real = jnp.arange(len(batch.graph.senders)) < batch.graph.n_edge[:-1].sum()
    by_hop = batch.by_hop if isinstance(batch, LayoutBatch) else None
    return cls(batch, batch.adjacency, by_hop, real, node_graph(batch.graph))

  @property
  def graphs(self) -> int:
    """Number of slates G."""
    return self.batch.config_mask.shape[0]

  @property
  def configs(self) -> int:
    """Configurations C per slate, padding included."""
    return self.batch.config_mask.shape[1]

  @property
  def graph_nodes(self) -> jax.Array:
    """Number of nodes of each graph, at least 1: `[G]` int32."""
    return jnp.maximum(pooling.real_nodes(self.batch.graph), 1)

  @property
  def node_configs(self) -> jax.Array:
    """Which configurations of each node's slate are real, `[N, C]` bool; none in padding."""
    mask = jnp.asarray(self.batch.config_mask)
    return mask.at[self.graph_of].get(mode="fill", fill_value=False)


def everywhere(x: Nodes, slates: Slates) -> jax.Array:
  """The features of all nodes, `[N, C, F]`, or `[N, 1, F]` if `x` is."""
  if not isinstance(x, SplitNodes):
    return x
  shape = len(x.shared), *x.varying.shape[1:]
  rows = nodes_within(slates.by_hop, x.hop)
  return jnp.broadcast_to(x.shared, shape).at[rows].set(x.varying, mode="drop")


def aligned(slates: Slates, *parts: Nodes) -> list[Nodes]:
  """The same features, all in one form and with the same hop."""
  if any(not isinstance(part, SplitNodes) for part in parts):
    return [everywhere(part, slates) for part in parts]
  hop = max(part.hop for part in parts)
  return [grow(part, slates.by_hop, hop) for part in parts]


def combine(function: Callable[..., jax.Array], slates: Slates, *parts: Nodes) -> Nodes:
  """`function` of single nodes on features of several: `[..., F1], [..., F2] -> [..., F]`.

  Parts with one configuration are repeated where others have all.
  """
  parts = aligned(slates, *parts)
  return jax.tree.map(lambda *rows: function(*_broadcast(rows)), *parts)


def _broadcast(rows: Sequence[jax.Array]) -> list[jax.Array]:
  configs = max(part.shape[1] for part in rows)
  return [jnp.broadcast_to(part, (len(part), configs, *part.shape[2:])) for part in rows]


def concatenate(slates: Slates, *parts: Nodes) -> Nodes:
  """Features `[..., F1]` and `[..., F2]` side by side."""
  return combine(lambda *rows: jnp.concatenate(rows, axis=-1), slates, *parts)


def add(slates: Slates, *parts: Nodes) -> Nodes:
  """Sum of features of one width."""
  return combine(lambda *rows: sum(rows[1:], rows[0]), slates, *parts)


def spread(value: jax.Array, like: Nodes, slates: Slates) -> Nodes:
  """`value [N, ...]`, the same for all configurations, in the form of `like`."""
  if not isinstance(like, SplitNodes):
    return value[:, None]
  rows = take_rows(value, nodes_within(slates.by_hop, like.hop))
  return SplitNodes(value[:, None], rows[:, None], like.hop)


def scale(x: Nodes, by: jax.Array, slates: Slates) -> Nodes:
  """Every node's features times its own `by [N]`."""
  return jax.tree.map(lambda v, b: v * b[..., None].astype(v.dtype), x, spread(by, x, slates))


def sum_neighbours(x: Nodes, slates: Slates, direction: str, *, own: bool = False) -> Nodes:
  """`aggregation.neighbour_sum` of either form; a `SplitNodes` reaches one hop further."""
  if not isinstance(x, SplitNodes):
    return neighbour_sum(x, slates.adjacency, direction, own=own)
  total = split_neighbour_sum(x, slates.adjacency, slates.by_hop, direction, own=own)
  return total.complete(slates.by_hop)


def chosen(
    x: Nodes, slates: Slates, *, configurable: bool = False
) -> tuple[SplitNodes, pooling.Chosen]:
  """Either form as poolings take it, with the real nodes of each graph.

  Args:
    x: `[N, C, F]` in either form.
    slates: of the nodes.
    configurable: only nodes with a layout configuration count.
  """
  if isinstance(x, SplitNodes):
    if configurable:
      return _configurable_rows(x, slates.batch)
    return x, pooling.split_selection(slates.batch.graph, slates.by_hop, x.hop)
  mask = pooling.selection(slates.graph_of, slates.graphs)
  if configurable:
    mask = jnp.where(configurable_nodes(slates.batch)[None], mask, 0)
  return SplitNodes(x[:0], x, 0), pooling.Chosen(mask[:, :0], mask)


def _configurable_rows(x: SplitNodes, batch: LayoutBatch) -> tuple[SplitNodes, pooling.Chosen]:
  """The rows of hop 0 alone: configurable nodes are reached from the start."""
  mask = layout_features.configurable_selection(batch)
  rows = SplitNodes(x.shared[:0], x.varying[: mask.shape[1]], 0)
  return rows, pooling.Chosen(mask[:, :0], mask)


def configurable_nodes(batch: LayoutBatch) -> jax.Array:
  """Which nodes have a layout configuration, `[N]` bool; False for padding nodes."""
  none = jnp.zeros(len(batch.graph.nodes["opcode"]), bool)
  rows = layout_features.is_configured_row(batch)
  return none.at[batch.by_hop.nodes[0]].set(rows, mode="drop")


def graph_mean(x: Nodes, slates: Slates) -> jax.Array:
  """Mean over the nodes of each graph, `[G, C, F]` float32; 0 for a graph without nodes."""
  return pooling.split_pool_sum(*chosen(x, slates)) / slates.graph_nodes[:, None, None]
