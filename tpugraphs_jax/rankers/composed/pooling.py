"""Readouts: node features `[N, C, F]` to graph features `[G, C, F]`.

Sums are products with a `[G, N]` selection matrix. A batch has few graphs, and a
dense product runs at full speed forward and backward on every platform; a scatter
into few rows does not.

Poolings are registered by name. One of a few lines:

    @pooling.POOLINGS.register("square")
    def square(nodes, chosen, count):
      return pooling.split_pool_sum(jax.tree.map(jnp.square, nodes), chosen)
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jraph

from tpugraphs_jax.data.batching import ABSENT, LayoutBatch, NodesByHop
from tpugraphs_jax.nn.aggregation import node_graph
from tpugraphs_jax.rankers.composed.split_nodes import SplitNodes, is_configured_row, nodes_within
from tpugraphs_jax.registry import Registry

POOLINGS = Registry("model.pooling")
# In front of a registered name: only configurable nodes count.
CONFIGURABLE = "config_"
# Sums over graphs of very different sizes are brought to a common scale.
_SUM_SCALE = 1e-2


class Chosen(NamedTuple):
  """Which nodes of a `SplitNodes` count for which graph.

  Attributes:
    shared: `[G, N]` float32 for the shared part, zero on reached nodes.
    varying: `[G, rows]` float32 for the varying part.
  """

  shared: jax.Array
  varying: jax.Array


Pooling = Callable[[SplitNodes, Chosen, jax.Array], jax.Array]


def by_name(name: str) -> Pooling:
  """The registered pooling of that name, with or without `config_` in front of it.

  A pooling maps node features `[N, 1, F]` and `[rows, C, F]`, the chosen nodes and
  their number `count [G]`, at least 1, to graph features `[G, C, F]` float32.

  Raises:
    ValueError: there is none; the message lists all names.
  """
  return POOLINGS[name.removeprefix(CONFIGURABLE)]


def names() -> list[str]:
  """All names that `by_name` knows."""
  return [*POOLINGS, *(CONFIGURABLE + name for name in POOLINGS)]


@POOLINGS.register("mean")
def mean(nodes: SplitNodes, chosen: Chosen, count: jax.Array) -> jax.Array:
  """Mean of the chosen nodes, `[G, C, F]` float32; arguments as in `by_name`."""
  return split_pool_sum(nodes, chosen) / count[:, None, None]


@POOLINGS.register("sum")
def scaled_sum(nodes: SplitNodes, chosen: Chosen, count: jax.Array) -> jax.Array:
  """A hundredth of the sum of the chosen nodes, `[G, C, F]` float32; arguments as in `by_name`."""
  del count
  return split_pool_sum(nodes, chosen) * _SUM_SCALE


@POOLINGS.register("max")
def largest(nodes: SplitNodes, chosen: Chosen, count: jax.Array) -> jax.Array:
  """Maximum of the chosen nodes, `[G, C, F]` float32; arguments as in `by_name`."""
  del count
  return split_pool_max(nodes, chosen)


def real_nodes(graph: jraph.GraphsTuple) -> jax.Array:
  """Number of nodes of each graph, `[G]` int32, without the padding graph."""
  return graph.n_node[:-1]


def selection(graph_of: jax.Array, graphs: int) -> jax.Array:
  """Which node belongs to which graph.

  Args:
    graph_of: `[N]` int32 graph of each node; G or more selects nothing.
    graphs: number of graphs G.

  Returns:
    `[G, N]` float32.
  """
  return jax.nn.one_hot(graph_of, graphs, dtype=jnp.float32, axis=0)


def pool_sum(x: jax.Array, chosen: jax.Array) -> jax.Array:
  """`chosen [G, N]` times `x [N, ...]`, in float32: `[G, ...]`."""
  return jnp.tensordot(
      chosen, x.astype(jnp.float32), axes=1, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def graph_sum(x: jax.Array, graph_of: jax.Array, graphs: int) -> jax.Array:
  """Sums the nodes `x [N, ...]` of each graph, `[graphs, ...]` float32.

  Nodes whose `graph_of [N]` is `graphs` or more count nowhere. The derivative
  hands every node its graph's row: `per_node`, whose derivative is this function.
  """
  return pool_sum(x, selection(graph_of, graphs))


def _graph_sum_fwd(x, graph_of, graphs):
  # A zero-width slice remembers the dtype of x without keeping x alive.
  return graph_sum(x, graph_of, graphs), (graph_of, x[:0])


def _graph_sum_bwd(graphs, residuals, cotangent):
  del graphs
  graph_of, like = residuals
  return per_node(cotangent, graph_of).astype(like.dtype), None


graph_sum.defvjp(_graph_sum_fwd, _graph_sum_bwd)


@jax.custom_vjp
def per_node(value: jax.Array, graph_of: jax.Array) -> jax.Array:
  """Hands every node its graph's row of `value [G, ...]`: `[N, ...]`, zeros in padding nodes."""
  return value.at[graph_of].get(mode="fill", fill_value=0)


def _per_node_fwd(value, graph_of):
  return per_node(value, graph_of), (graph_of, value[:, :0])


def _per_node_bwd(residuals, cotangent):
  graph_of, like = residuals
  return graph_sum(cotangent, graph_of, len(like)).astype(like.dtype), None


per_node.defvjp(_per_node_fwd, _per_node_bwd)


def split_selection(graph: jraph.GraphsTuple, by_hop: NodesByHop, hop: int) -> Chosen:
  """All real nodes of each graph, for a `SplitNodes` that reaches `hop`.

  Args:
    graph: batch of G graphs and the padding graph.
    by_hop: nodes of the batch by hop.
    hop: the last reached hop.
  """
  graphs = len(real_nodes(graph))
  graph_of = node_graph(graph)
  shared = selection(jnp.where(by_hop.hop > hop, graph_of, ABSENT), graphs)
  varying = graph_of.at[nodes_within(by_hop, hop)].get(mode="fill", fill_value=ABSENT)
  return Chosen(shared, selection(varying, graphs))


def split_pool_sum(nodes: SplitNodes, chosen: Chosen) -> jax.Array:
  """Sum of the chosen nodes of each graph and configuration, `[G, C, F]` float32."""
  return pool_sum(nodes.shared, chosen.shared) + pool_sum(nodes.varying, chosen.varying)


def split_pool_max(nodes: SplitNodes, chosen: Chosen) -> jax.Array:
  """Maximum of the chosen nodes, `[G, C, F]` float32; 0 for a graph without any."""
  largest = jnp.maximum(
      _segment_max(nodes.shared, chosen.shared), _segment_max(nodes.varying, chosen.varying))
  return jnp.where(jnp.isfinite(largest), largest, 0)


def varying_alone(x: jax.Array, chosen: jax.Array) -> tuple[SplitNodes, Chosen]:
  """Features `x [N, C, F]` of nodes that all vary, and which are `chosen [G, N]`."""
  return SplitNodes(x[:0], x, 0), Chosen(chosen[:, :0], chosen)


def _segment_max(x: jax.Array, chosen: jax.Array) -> jax.Array:
  """Maximum of the rows of `x [N, ...]` that `chosen [G, N]` holds; -inf without any."""
  graphs = len(chosen)
  if not len(x):
    return jnp.full((graphs, *x.shape[1:]), -jnp.inf, jnp.float32)
  graph_of = jnp.where(chosen.any(axis=0), jnp.argmax(chosen, axis=0), graphs)
  return jax.ops.segment_max(x.astype(jnp.float32), graph_of, graphs + 1)[:graphs]


def configurable_selection(batch: LayoutBatch) -> jax.Array:
  """Which configurable node belongs to which graph, `[G, hop 0]` float32."""
  chosen = split_selection(batch.graph, batch.by_hop, 0).varying
  return jnp.where(is_configured_row(batch)[None], chosen, 0)


def configurable_rows(nodes: SplitNodes, batch: LayoutBatch) -> tuple[SplitNodes, Chosen]:
  """The rows of hop 0 alone: configurable nodes are reached from the start."""
  mask = configurable_selection(batch)
  return varying_alone(nodes.varying[: mask.shape[1]], mask)


def pool(nodes: SplitNodes, batch: LayoutBatch, name: str) -> jax.Array:
  """Node features to graph features `[G, C, F]` float32, by a pooling of `names()`.

  Args:
    nodes: features after the last round.
    batch: of the nodes.
    name: registered in `POOLINGS`; with `config_` in front of it only the
      configurable nodes count.
  """
  if name.startswith(CONFIGURABLE):
    nodes, chosen = configurable_rows(nodes, batch)
    count = chosen.varying.sum(axis=1)
  else:
    chosen = split_selection(batch.graph, batch.by_hop, nodes.hop)
    count = real_nodes(batch.graph)
  return by_name(name)(nodes, chosen, jnp.maximum(count, 1))
