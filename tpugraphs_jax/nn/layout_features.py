"""What the layout models share: configurations on nodes, readouts over nodes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import ABSENT, LayoutBatch
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.split_nodes import SplitNodes


def config_rows(embedded_rows: jax.Array, batch: LayoutBatch) -> jax.Array:
  """Looks up `embedded_rows [R, H]` per configurable node: `[hop 0, C, H]`, zeros in padding."""
  return embedded_rows.at[batch.row_id].get(mode="fill", fill_value=0)


def add_to_configurable(nodes: SplitNodes, config: jax.Array) -> SplitNodes:
  """Adds `config [hop 0, C, H]` to the varying rows of hop 0."""
  varying = nodes.varying.at[: len(config)].add(config)
  return SplitNodes(nodes.shared, varying, nodes.hop)


def start(shared: jax.Array, config: jax.Array, batch: LayoutBatch) -> SplitNodes:
  """First features: `shared [N, H]` on every node, plus `config [hop 0, C, H]` on hop 0."""
  own = shared.at[batch.by_hop.nodes[0]].get(mode="fill", fill_value=0)
  return SplitNodes(shared[:, None], own[:, None] + config, hop=0)


def is_configured_row(batch: LayoutBatch) -> jax.Array:
  """Which rows of hop 0 have a configuration, `[hop 0]` bool.

  A batch that was built without reuse has every node in hop 0.
  """
  return (batch.row_id < ABSENT).any(axis=1)


def configurable_selection(batch: LayoutBatch) -> jax.Array:
  """Which configurable node belongs to which graph, `[G, hop 0]` float32."""
  chosen = pooling.split_selection(batch.graph, batch.by_hop, 0).varying
  return jnp.where(is_configured_row(batch)[None], chosen, 0)


def pool(nodes: SplitNodes, batch: LayoutBatch, name: str) -> jax.Array:
  """Node features to graph features `[G, C, F]` float32, by a pooling of `pooling.NAMES`.

  Args:
    nodes: features after the last round.
    batch: of the nodes.
    name: registered in `pooling.POOLINGS`; with `config_` in front of it only the
      configurable nodes count.
  """
  function = pooling.by_name(name)
  if not name.startswith(pooling.CONFIGURABLE):
    chosen = pooling.split_selection(batch.graph, batch.by_hop, nodes.hop)
    return function(nodes, chosen, jnp.maximum(pooling.real_nodes(batch.graph), 1))
  chosen = configurable_selection(batch)
  # Configurable nodes are reached from the start: none of the shared rows counts.
  none, varying = nodes.shared[:0], nodes.varying[: chosen.shape[1]]
  return function(SplitNodes(none, varying, 0), pooling.Chosen(chosen[:, :0], chosen),
                  jnp.maximum(chosen.sum(axis=1), 1))
