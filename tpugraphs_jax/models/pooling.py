"""Readouts: node features `[N, C, F]` to graph features `[G, C, F]`.

Sums are products with a `[G, N]` selection matrix: a batch has few graphs, and
a dense product runs at full speed forward and backward on every platform, where
a scatter into few rows does not.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jraph

from tpugraphs_jax.batch import ABSENT, NodesByHop
from tpugraphs_jax.models import message_passing as mp
from tpugraphs_jax.models.message_passing import SplitNodes


def real_nodes(graph: jraph.GraphsTuple) -> jax.Array:
  """Number of nodes of each graph slot, `[G]` int32, without the padding graph."""
  return graph.n_node[:-1]


def selection(graph_of: jax.Array, graphs: int) -> jax.Array:
  """Which node belongs to which graph.

  Args:
    graph_of: `[N]` int32 graph slot; a slot beyond `graphs` selects nothing.
    graphs: number of slots G.

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

  Nodes whose slot in `graph_of [N]` is beyond `graphs` count nowhere. The derivative
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
  """Hands every node its graph's row of `value [G, ...]`: `[N, ...]`, zeros in slots beyond."""
  return value.at[graph_of].get(mode="fill", fill_value=0)


def _per_node_fwd(value, graph_of):
  return per_node(value, graph_of), (graph_of, value[:, :0])


def _per_node_bwd(residuals, cotangent):
  graph_of, like = residuals
  return graph_sum(cotangent, graph_of, len(like)).astype(like.dtype), None


per_node.defvjp(_per_node_fwd, _per_node_bwd)


def split_selection(
    graph: jraph.GraphsTuple, by_hop: NodesByHop, hop: int
) -> tuple[jax.Array, jax.Array]:
  """`selection` for both parts of `SplitNodes` that cover hops 0..hop.

  Args:
    graph: batch of G slots and the padding graph.
    by_hop: nodes of the batch by hop.
    hop: last hop of the varying part.

  Returns:
    `[G, N]` for the shared part, zero on reached nodes, and `[G, positions]`.
  """
  graphs = len(real_nodes(graph))
  graph_of = mp.node_graph(graph)
  shared = selection(jnp.where(by_hop.hop > hop, graph_of, ABSENT), graphs)
  varying = graph_of.at[mp.nodes_within(by_hop, hop)].get(mode="fill", fill_value=ABSENT)
  return shared, selection(varying, graphs)


def split_pool_sum(nodes: SplitNodes, chosen: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Sum of the selected nodes of each graph and configuration, `[G, C, F]` float32."""
  return pool_sum(nodes.shared, chosen[0]) + pool_sum(nodes.varying, chosen[1])


def split_pool_max(nodes: SplitNodes, chosen: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Maximum over the selected nodes, `[G, C, F]`; 0 for a graph without any."""
  return _finite(jnp.maximum(
      _segment_max(nodes.shared, chosen[0]), _segment_max(nodes.varying, chosen[1])))


def pool_max(x: jax.Array, chosen: jax.Array) -> jax.Array:
  """Maximum of the selected rows of `x [N, ...]`, `[G, ...]`; 0 where there are none."""
  return _finite(_segment_max(x, chosen))


def _finite(x: jax.Array) -> jax.Array:
  return jnp.where(jnp.isfinite(x), x, 0)


def _segment_max(x: jax.Array, chosen: jax.Array) -> jax.Array:
  graphs = len(chosen)
  graph_of = jnp.where(chosen.any(axis=0), jnp.argmax(chosen, axis=0), graphs)
  return jax.ops.segment_max(x.astype(jnp.float32), graph_of, graphs + 1)[:graphs]
