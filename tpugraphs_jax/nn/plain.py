"""Batches as plain arrays: all that a ranker on `[N, C, F]` node features needs.

N nodes, C configurations, G graphs. A model starts from

    batch.graph.nodes["feat"]     [N, F] float32 node features
    batch.graph.nodes["opcode"]   [N] int32
    node_configs(batch)           [N, C, F] float32 configuration of every node
    is_configurable(batch)        [N] bool
    batch.graph.senders           [E] int32 producers
    batch.graph.receivers         [E] int32 consumers of them

and ends with `graph_mean`, `graph_sum` or `graph_max`, `[G, C, F]`. A network of this
kind leaves `Network.hops` at 0. Padding never reaches a real graph: padding nodes belong
to no graph here, and padding edges connect padding nodes. docs/add_your_own.md has an
example.

Every node carries every configuration. For models that share the work on nodes that no
configuration has reached, see `split_nodes`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.nn import pooling, split_nodes
from tpugraphs_jax.nn.aggregation import node_graph

Batch = LayoutBatch | TileBatch


def node_configs(batch: Batch) -> jax.Array:
  """The transformed configuration features of every node, `[N, C, F]` float32.

  In a tile batch every node of a kernel has the kernel's configuration. In a layout batch
  nodes that are not configurable have zeros. Padding nodes have zeros in both.
  """
  if isinstance(batch, TileBatch):
    return pooling.per_node(jnp.asarray(batch.config_feat), node_graph(batch.graph))
  rows = split_nodes.config_rows(jnp.asarray(batch.rows), batch)
  nodes = len(batch.graph.nodes["opcode"])
  return jnp.zeros((nodes, *rows.shape[1:])).at[batch.by_hop.nodes[0]].set(rows, mode="drop")


def is_configurable(batch: LayoutBatch) -> jax.Array:
  """Which nodes have a layout configuration, `[N]` bool; False for padding nodes."""
  none = jnp.zeros(len(batch.graph.nodes["opcode"]), bool)
  chosen = split_nodes.is_configured_row(batch)
  return none.at[batch.by_hop.nodes[0]].set(chosen, mode="drop")


def graph_sum(x: jax.Array, batch: Batch, where: jax.Array | None = None) -> jax.Array:
  """Sum over the nodes of each graph.

  Args:
    x: `[N, C, F]` node features.
    batch: of the nodes.
    where: `[N]` bool: the nodes that count, for instance `is_configurable`; all if None.

  Returns:
    `[G, C, F]` float32; zeros for a graph without nodes that count.
  """
  return pooling.pool_sum(x, _chosen(batch, where))


def graph_mean(x: jax.Array, batch: Batch, where: jax.Array | None = None) -> jax.Array:
  """Mean over the nodes of each graph, `[G, C, F]` float32; arguments as in `graph_sum`."""
  chosen = _chosen(batch, where)
  return pooling.pool_sum(x, chosen) / jnp.maximum(chosen.sum(axis=1), 1)[:, None, None]


def graph_max(x: jax.Array, batch: Batch, where: jax.Array | None = None) -> jax.Array:
  """Maximum over the nodes of each graph, `[G, C, F]` float32; arguments as in `graph_sum`."""
  return pooling.split_pool_max(*pooling.varying_alone(x, _chosen(batch, where)))


def _chosen(batch: Batch, where: jax.Array | None) -> jax.Array:
  """Which node counts for which graph, `[G, N]` float32."""
  chosen = pooling.selection(node_graph(batch.graph), len(batch.target))
  return chosen if where is None else jnp.where(where[None], chosen, 0)
