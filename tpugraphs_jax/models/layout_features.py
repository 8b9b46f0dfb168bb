"""What the layout models share: configurations on nodes, readouts over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpugraphs_jax.batch import ABSENT, LayoutBatch
from tpugraphs_jax.models import message_passing as mp
from tpugraphs_jax.models import pooling
from tpugraphs_jax.models.message_passing import SplitNodes


def inside_block(batch: LayoutBatch) -> LayoutBatch:
  """The batch with messages and configurations among the nodes of its block alone."""
  keep = jnp.asarray(batch.block_mask)
  by_hop, last = batch.by_hop, len(batch.by_hop.nodes) - 1
  at = lambda nodes: keep.at[nodes].get(mode="fill", fill_value=False)
  return batch._replace(
      adjacency=mp.among(batch.adjacency, keep),
      by_hop=by_hop._replace(
          adjacency=mp.among(by_hop.adjacency, at(mp.nodes_within(by_hop, last)))),
      row_id=jnp.where(at(by_hop.nodes[0])[:, None], batch.row_id, ABSENT))


def last_round(batch: LayoutBatch, block: LayoutBatch, hop: int) -> LayoutBatch:
  """The batch with edges for the last of a block's rounds, `mp.TwoPasses`.

  Nodes of the block receive within it, the others from all nodes of the full pass.

  Args:
    batch: the full batch.
    block: `inside_block(batch)`.
    hop: of the features that are sent.
  """
  by_hop, keep = batch.by_hop, jnp.asarray(batch.block_mask)
  kept = keep.at[mp.nodes_within(by_hop, len(by_hop.nodes) - 1)].get(mode="fill", fill_value=False)
  return batch._replace(
      adjacency=mp.two_passes(block.adjacency, batch.adjacency, keep, len(keep)),
      by_hop=by_hop._replace(adjacency=mp.two_passes(
          block.by_hop.adjacency, by_hop.adjacency, kept, mp.rows_within(by_hop, hop))))


def config_rows(embedded_rows: jax.Array, batch: LayoutBatch) -> jax.Array:
  """Looks up `embedded_rows [R, H]` per configurable node, `[hop 0, C, H]`."""
  return embedded_rows.at[batch.row_id].get(mode="fill", fill_value=0)


def add_to_configurable(nodes: SplitNodes, config: jax.Array) -> SplitNodes:
  """Adds `config [hop 0, C, H]` to the varying rows of hop 0."""
  varying = nodes.varying.at[: len(config)].add(config)
  return SplitNodes(nodes.shared, varying, nodes.hop)


def start(shared: jax.Array, config: jax.Array, batch: LayoutBatch) -> SplitNodes:
  """First features: `shared [N, H]` everywhere, plus `config [hop 0, C, H]`."""
  own = shared.at[batch.by_hop.nodes[0]].get(mode="fill", fill_value=0)
  return SplitNodes(shared[:, None], own[:, None] + config, hop=0)


def configurable_selection(batch: LayoutBatch) -> jax.Array:
  """Which configurable node belongs to which graph, `[G, hop 0]` float32."""
  _, chosen = pooling.split_selection(batch.graph, batch.by_hop, 0)
  # Tier 0 may hold other nodes too (a batch built without reuse).
  return jnp.where((batch.row_id < ABSENT).any(axis=1)[None], chosen, 0)
