"""Training on a sampled block of nodes: all that `ResModel` does with `block_mask`.

The mode `backpropdropout` of the published baseline runs two passes over a graph:

                 block's pass (gradient)         full pass (no gradient)
    round 1      block -> block                  all -> all
      ...          ...                             ...
    round L-1    block -> block                  all -> all
                      \\                            /
    round L      a node of the block receives    any other node receives
                 from the block's pass           from the full pass
    readout      a node of the block             any other node

The result of round L of a node of the block in the full pass, or of another node in the
block's pass, is sent to nobody and read by nobody. Round L reaches the most nodes and is
by far the largest. `two_pass_sum` therefore computes it once, each node receiving in the
pass that it is read from. `edges_of_last_round` gives the neighbour tables for it: the
senders of the full pass lie behind the senders of the block's pass.

    senders      [block's pass: 0 .. n-1 | full pass: n .. 2n-1]
    receiver in the block:      columns of the block's table
    any other receiver:         columns of the full table, plus n

Source: published baseline of TpuGraphs (arXiv 2308.13490).
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import ABSENT, Adjacency, LayoutBatch, Neighbours, NodesByHop
from tpugraphs_jax.nn.aggregation import OPPOSITE, sum_rows
from tpugraphs_jax.nn.split_nodes import PartialSum, SplitNodes, next_hop, nodes_within, rows_within
from tpugraphs_jax.nn.split_nodes import unreached


def embed(model: Any, static: Sequence[jax.Array], batch: LayoutBatch) -> jax.Array:
  """The readout of a `ResModel` in training on blocks, `[G, C, P]` float32.

  Args:
    model: the bound `ResModel`.
    static: features of nodes that no configuration changes, each `[N, F]`.
    batch: with the block of each graph in `block_mask`.
  """
  block = inside_block(batch)
  inside, outside = (
      model.encode(static, part, model.num_gnns - 1) for part in (block, batch))
  if model.num_gnns:
    inside, outside = (model.residual(x, batch) for x in (inside, outside))
    change = _last_update(model, inside, outside, block, batch)
    inside, outside = (inside, change), (outside, change)
  # Chosen before they are summed, so that the last round, which both hold, is read once.
  read = [where(jnp.asarray(batch.block_mask), x, jax.lax.stop_gradient(other), batch.by_hop)
          for x, other in zip(inside, outside)]
  return model.readout(read, block)


def _last_update(
    model: Any, inside: SplitNodes, outside: SplitNodes, block: LayoutBatch, batch: LayoutBatch
) -> SplitNodes:
  """`ResModel.update` of the last round, of both passes at once."""
  layer, nodes = model.num_gnns - 1, len(batch.block_mask)

  def hear(model, inside, outside, block, batch, edges):
    pairs = zip(model.messages(layer, inside, block), model.messages(layer, outside, batch))
    heard = [
        split_two_pass_sum(*pair, edges, batch.by_hop, direction, own=True)
        for pair, direction in zip(pairs, model.directions)]
    degrees = [degree(edges.nodes, direction, nodes) for direction in model.directions]
    return model.receive(layer, heard, degrees, batch)

  edges = edges_of_last_round(batch, block, inside.hop)
  return model.round(layer, hear, inside, outside, block, batch, edges)


def inside_block(batch: LayoutBatch) -> LayoutBatch:
  """The batch with messages and configurations among the nodes of its block alone."""
  keep = jnp.asarray(batch.block_mask)
  by_hop, last = batch.by_hop, len(batch.by_hop.nodes) - 1
  at = lambda nodes: keep.at[nodes].get(mode="fill", fill_value=False)
  return batch._replace(
      adjacency=among(batch.adjacency, keep),
      by_hop=by_hop._replace(adjacency=among(by_hop.adjacency, at(nodes_within(by_hop, last)))),
      row_id=jnp.where(at(by_hop.nodes[0])[:, None], batch.row_id, ABSENT))


def among(adjacency: Adjacency, keep: jax.Array) -> Adjacency:
  """The edges with both ends among the nodes that `keep [N]` bool holds."""
  # A branch, so that XLA on CPU computes the tables once, and not within every gather.
  return jax.lax.cond(
      keep.all(), lambda: adjacency,
      lambda: Adjacency(*(_among(table, keep) for table in adjacency)))


def _among(table: Neighbours, keep: jax.Array) -> Neighbours:
  kept = lambda node: keep.at[node].get(mode="fill", fill_value=False)
  select = lambda receiver, index: jnp.where(receiver[:, None] & kept(index), index, ABSENT)
  return Neighbours(
      index=select(keep, table.index),
      # Receivers stay as they are: sorted.
      overflow_index=select(kept(table.overflow_receiver), table.overflow_index),
      overflow_receiver=table.overflow_receiver)


class TwoPassEdges(NamedTuple):
  """Edges of two passes over the same n nodes; each node receives in one of the passes.

  Attributes:
    keep: `[n]` bool: the nodes that receive in the first pass.
    first: edges of the first pass, all among nodes of `keep`.
    stacked: edges of the pass in which a node receives; senders of the second pass
      follow the senders of the first.
  """

  keep: jax.Array
  first: Adjacency
  stacked: Adjacency


class LastRound(NamedTuple):
  """Edges of a last round, among nodes and among the rows of `NodesByHop`."""

  nodes: TwoPassEdges
  rows: TwoPassEdges


def edges_of_last_round(batch: LayoutBatch, block: LayoutBatch, hop: int) -> LastRound:
  """Edges on which nodes of the block receive within it, and other nodes from all nodes.

  Args:
    batch: the full batch.
    block: `inside_block(batch)`.
    hop: the last reached hop of the features that are sent.
  """
  by_hop, keep = batch.by_hop, jnp.asarray(batch.block_mask)
  kept = keep.at[nodes_within(by_hop, len(by_hop.nodes) - 1)].get(mode="fill", fill_value=False)
  return LastRound(
      nodes=two_passes(block.adjacency, batch.adjacency, keep, len(keep)),
      rows=two_passes(
          block.by_hop.adjacency, by_hop.adjacency, kept, rows_within(by_hop, hop)))


def two_passes(
    first: Adjacency, second: Adjacency, keep: jax.Array, senders: int
) -> TwoPassEdges:
  """The edges of `first` for receivers that `keep` holds, of `second` for other receivers.

  Args:
    first: `among(second, keep)`.
    second: the edges of the second pass.
    keep: `[N]` bool.
    senders: how many rows of each pass send; edges from rows beyond do not count.
  """
  known = lambda sender, offset: jnp.where(sender < senders, sender + offset, ABSENT)

  def either(inside: Neighbours, full: Neighbours) -> Neighbours:
    kept = keep.at[full.overflow_receiver].get(mode="fill", fill_value=False)
    select = lambda receiver, index, other: jnp.where(
        receiver[:, None], known(index, 0), known(other, senders))
    return Neighbours(
        index=select(keep, inside.index, full.index),
        overflow_index=select(kept, inside.overflow_index, full.overflow_index),
        overflow_receiver=jnp.asarray(full.overflow_receiver))

  # A branch, for the same reason as in `among`.
  stacked = jax.lax.cond(
      keep.all(),
      lambda: Adjacency(*(either(table, table) for table in first)),
      lambda: Adjacency(*map(either, first, second)))
  return TwoPassEdges(keep, first, stacked)


def two_pass_sum(
    x: jax.Array, others: jax.Array, edges: TwoPassEdges, direction: str, *,
    receivers: int | None = None, own: bool = False,
) -> jax.Array:
  """`neighbour_sum` of `x` for receivers of the first pass, of `others` for the rest.

  One sum takes the place of two. No derivative goes to `others`.

  Args:
    x: `[n, ...]` values of the first pass.
    others: `[n, ...]` values of the second pass.
    edges: `two_passes(..., senders=n)`.
    direction: as in `neighbour_sum`.
    receivers: number of leading nodes that receive; n unless given.
    own: whether a node receives its own value of the pass in which it receives.

  Returns:
    `[receivers, ...]` in the dtype of `x`, accumulated in float32.
  """
  receivers = len(x) if receivers is None else receivers
  # Stopped here, so that nothing is derived from zeros on the way to `others`.
  return _two_pass_sum(x, jax.lax.stop_gradient(others), edges, direction, receivers, own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _two_pass_sum(x, others, edges, direction, receivers, own):
  rows = jnp.concatenate([x, others])
  own = jnp.where(_like(edges.keep[: len(x)], x), x, others) if own else None
  return sum_rows(rows, edges.stacked, direction, receivers, own)


def _two_pass_sum_fwd(x, others, edges, direction, receivers, own):
  return _two_pass_sum(x, others, edges, direction, receivers, own), (edges, x[:, :0])


def _two_pass_sum_bwd(direction, receivers, own, residuals, cotangent):
  del receivers
  edges, senders = residuals
  own = jnp.where(_like(edges.keep[: len(cotangent)], cotangent), cotangent, 0) if own else None
  total = sum_rows(cotangent, edges.first, OPPOSITE[direction], len(senders), own)
  return total, None, None


_two_pass_sum.defvjp(_two_pass_sum_fwd, _two_pass_sum_bwd)


def split_two_pass_sum(
    nodes: SplitNodes, others: SplitNodes, edges: LastRound, by_hop: NodesByHop, direction: str, *,
    own: bool = False,
) -> PartialSum:
  """`split_neighbour_sum` of two passes, `[N, 1, F]` and `[rows, C, F]`, by `two_pass_sum`.

  Raises:
    ValueError: `by_hop` was built for fewer rounds of message passing.
  """
  hop = next_hop(nodes, by_hop)
  from_unreached = two_pass_sum(
      unreached(nodes, by_hop), unreached(others, by_hop), edges.nodes, direction, own=own)
  from_reached = two_pass_sum(
      nodes.varying, others.varying, edges.rows, direction, receivers=rows_within(by_hop, hop),
      own=own)
  return PartialSum(from_unreached, from_reached, hop)


def degree(edges: TwoPassEdges, direction: str, nodes: int) -> jax.Array:
  """Number of neighbours of each node in the pass in which it receives, `[nodes]` float32."""
  ones = jnp.ones((nodes, 1))
  return two_pass_sum(ones, ones, edges, direction)[:, 0]


def where(keep: jax.Array, nodes: SplitNodes, others: SplitNodes, by_hop: NodesByHop) -> SplitNodes:
  """`nodes` where `keep [N]` bool holds, elsewhere and in padding `others` of the same hop."""
  kept = keep.at[nodes_within(by_hop, nodes.hop)].get(mode="fill", fill_value=False)
  select = lambda keep, x, other: jnp.where(_like(keep, x), x, other)
  return SplitNodes(
      select(keep, nodes.shared, others.shared), select(kept, nodes.varying, others.varying),
      nodes.hop)


def _like(values: jax.Array, x: jax.Array) -> jax.Array:
  """`values [n]` as `[n, 1, ...]`, with as many axes as `x`."""
  return values.reshape(values.shape + (1,) * (x.ndim - 1))
