"""Batches and node features in two forms, and the operations that a layer needs on both.

    form                                  stands for
    SplitNodes (`split_nodes`)            [N, C, F], nodes that no configuration has
                                          reached kept once
    array [N, C, F], or [N, 1, F]         itself; one configuration stands for all

Functions of single nodes apply to either with `jax.tree.map`. Message passing and functions
of single nodes keep the first form. Normalisation over nodes and attention, after which
every node depends on its whole graph, return the second.

DropEdge (`drop_edges`) leaves out edges at random in training. An edge stands in several
tables: in one row per end, among all nodes and among those that configurations reach, and
in the list of edges. Whether it stays is a hash of random numbers of its two ends, so that
every table comes to the same answer by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import ABSENT, Adjacency, LayoutBatch, Neighbours, NodesByHop
from tpugraphs_jax.data.batching import TileBatch
from tpugraphs_jax.rankers.composed import pooling
from tpugraphs_jax.nn.aggregation import neighbour_sum, node_graph, take_rows
from tpugraphs_jax.rankers.composed.split_nodes import SplitNodes, grow, nodes_within, split_neighbour_sum

Keep = Callable[[jax.Array, jax.Array], jax.Array]  # of consumers and producers
Nodes = SplitNodes | jax.Array
Batch = LayoutBatch | TileBatch


@dataclasses.dataclass(frozen=True)
class Slates:
  """A batch of G slates with N nodes and C configurations, and its edges that count.

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
    """The slates of a batch with all of its edges."""
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
  """The features of all nodes, `[N, C, ...]`, or `[N, 1, ...]` if `x` is."""
  if not isinstance(x, SplitNodes):
    return x
  shape = len(x.shared), *x.varying.shape[1:]
  rows = nodes_within(slates.by_hop, x.hop)
  return jnp.broadcast_to(x.shared, shape).at[rows].set(x.varying, mode="drop")


def aligned(slates: Slates, *parts: Nodes) -> list[Nodes]:
  """The parts in one form: all plain, or all split with the same hop."""
  if any(not isinstance(part, SplitNodes) for part in parts):
    return [everywhere(part, slates) for part in parts]
  hop = max(part.hop for part in parts)
  return [grow(part, slates.by_hop, hop) for part in parts]


def combine(function: Callable[..., jax.Array], slates: Slates, *parts: Nodes) -> Nodes:
  """Applies `function`, which acts on single nodes: `[..., F1], [..., F2] -> [..., F]`.

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
  """Features and the real nodes of each graph, as the functions of `nn.pooling` take them.

  Args:
    x: `[N, C, F]` in either form.
    slates: of the nodes.
    configurable: only nodes with a layout configuration count.
  """
  if isinstance(x, SplitNodes):
    if configurable:
      return pooling.configurable_rows(x, slates.batch)
    return x, pooling.split_selection(slates.batch.graph, slates.by_hop, x.hop)
  mask = pooling.selection(slates.graph_of, slates.graphs)
  if configurable:
    mask = jnp.where(_is_configurable(slates.batch)[None], mask, 0)
  return pooling.varying_alone(x, mask)


def graph_mean(x: Nodes, slates: Slates) -> jax.Array:
  """Mean over the nodes of each graph, `[G, C, F]` float32; 0 for a graph without nodes."""
  return pooling.split_pool_sum(*chosen(x, slates)) / slates.graph_nodes[:, None, None]


def drop_edges(slates: Slates, key: jax.Array, max_rate: float) -> Slates:
  """The slates without a random part of their edges.

  The rate is drawn anew with every key, uniformly from 0 to `max_rate` (5th place: 0.15).
  Edges with the same ends stay or go together.

  Args:
    slates: whose edges are dropped.
    key: `[]` of the rate and of the edges.
    max_rate: largest share of edges that are left out.
  """
  graph = slates.batch.graph
  keep = keep_function(key, max_rate, len(slates.graph_of))
  dropped = dataclasses.replace(
      slates, adjacency=_thin(slates.adjacency, keep, jnp.arange(len(slates.graph_of))),
      edge_mask=slates.edge_mask & keep(graph.receivers, graph.senders))
  if slates.by_hop is None:
    return dropped
  among_rows = _thin(slates.by_hop.adjacency, keep, jnp.concatenate(slates.by_hop.nodes))
  return dataclasses.replace(dropped, by_hop=slates.by_hop._replace(adjacency=among_rows))


def keep_function(key: jax.Array, max_rate: float, nodes: int) -> Keep:
  """Says of consumers and producers `[...]` int32 which edges between them stay, `[...]` bool."""
  rate_key, bits_key = jax.random.split(key)
  rate = jax.random.uniform(rate_key, maxval=max_rate)
  bits = jax.random.bits(bits_key, (2, nodes), jnp.uint32)

  def keep(consumer, producer):
    ends = (part.at[end].get(mode="fill", fill_value=0)
            for part, end in zip(bits, (consumer, producer)))
    first, second = ends
    return _uniform(first ^ (second * jnp.uint32(0x9E3779B1))) >= rate

  return keep


def _uniform(bits: jax.Array) -> jax.Array:
  """Numbers in [0, 1) from mixed bits `[...]` uint32 (the finaliser of MurmurHash3)."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
  bits ^= bits >> 16
  return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _thin(adjacency: Adjacency, keep: Keep, node: jax.Array) -> Adjacency:
  """Both halves without the edges that go; `node [rows]` is the node of each row."""
  of = lambda row: jnp.asarray(node).at[row].get(mode="fill", fill_value=ABSENT)

  def kept(receiver, index, consumers):
    ends = of(receiver)[:, None], of(index)
    return jnp.where(keep(*(ends if consumers else ends[::-1])), index, ABSENT)

  def table(side: Neighbours, consumers: bool) -> Neighbours:
    rows = jnp.arange(len(side.index))
    return Neighbours(
        kept(rows, side.index, consumers),
        kept(side.overflow_receiver, side.overflow_index, consumers), side.overflow_receiver)

  return Adjacency(table(adjacency.operands, True), table(adjacency.users, False))


def _is_configurable(batch: LayoutBatch) -> jax.Array:
  none = jnp.zeros(len(batch.graph.nodes["opcode"]), bool)
  return none.at[batch.by_hop.nodes[0]].set((batch.row_id < ABSENT).any(axis=1), mode="drop")
