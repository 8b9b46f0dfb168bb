"""Readouts: node features `[N, C, F]` to graph features `[G, C, F]`.

Sums are products with a `[G, N]` selection matrix. A batch has few graphs: a dense product is fast
in both passes on every platform, a scatter into few rows is not.

Poolings are registered by name, for instance:

    @pooling.POOLINGS.register("rms")
    def rms(x, *, configurable):
      return jnp.sqrt(pooling.mean(x.map(jnp.square), configurable=configurable))
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jraph

from tpugraphs_jax.config_fields import Registry
from tpugraphs_jax.data.batching import ABSENT
from tpugraphs_jax.nn import aggregation
from tpugraphs_jax.nn.nodes import EVERYWHERE, Nodes, NONE, Slates

POOLINGS = Registry("model.pooling")
CONFIGURABLE = "config_"  # prefix of names: pools configurable nodes only
_SUM_SCALE = 1e-2


def names() -> list[str]:
  """All names for `pool`."""
  return [*POOLINGS, *(CONFIGURABLE + name for name in POOLINGS)]


def pool(x: Nodes, name: str) -> jax.Array:
  """Pools node features to graph features `[G, C, F]` float32.

  Args:
    x: `[N, C, F]`.
    name: of a registered pooling; with the prefix `config_` it pools configurable nodes only.

  Raises:
    ValueError: an unknown name; the message lists all names.
  """
  function = POOLINGS[name.removeprefix(CONFIGURABLE)]
  return function(x, configurable=name.startswith(CONFIGURABLE))


def total(x: Nodes, *, configurable: bool = False) -> jax.Array:
  """Sum over the nodes of each graph, `[G, C, F]` float32.

  Args:
    x: node features `[N, C, F]`.
    configurable: pool configurable nodes only.
  """
  sums = [pool_sum(*part) for part in parts(x, configurable=configurable)]
  return sum(sums[1:], sums[0])


@POOLINGS.register("mean")
def mean(x: Nodes, *, configurable: bool = False) -> jax.Array:
  """Mean over the nodes of each graph, `[G, C, F]` float32; arguments as in `total`.

  The mean over no nodes is 0.
  """
  return total(x, configurable=configurable) / count(x.slates, configurable=configurable)


@POOLINGS.register("sum")
def scaled_sum(x: Nodes, *, configurable: bool = False) -> jax.Array:
  """`total` / 100, which has the scale of other poolings; arguments as in `total`."""
  return total(x, configurable=configurable) * _SUM_SCALE


@POOLINGS.register("max")
def largest(x: Nodes, *, configurable: bool = False) -> jax.Array:
  """Maximum over the nodes of each graph, `[G, C, F]` float32; arguments as in `total`.

  The maximum over no nodes is 0.
  """
  maxima = [_segment_max(*part) for part in parts(x, configurable=configurable)]
  most = functools.reduce(jnp.maximum, maxima)
  return jnp.where(jnp.isfinite(most), most, 0)


def count(slates: Slates, *, configurable: bool = False) -> jax.Array:
  """Number of (configurable) nodes of each graph, at least 1: `[G, 1, 1]`."""
  nodes = real_nodes(slates.batch.graph)
  if configurable:
    nodes = configurable_rows(slates).sum(axis=1)
  return jnp.maximum(nodes, 1)[:, None, None]


def parts(x: Nodes, *, configurable: bool = False) -> list[tuple[jax.Array, jax.Array]]:
  """The arrays of node features, each with its selection matrix.

  Args:
    x: node features `[N, C, ...]`.
    configurable: select configurable nodes only.

  Returns:
    Pairs of an array `[rows, C, ...]` and a matrix `[G, rows]` float32, 1 where a row is a node of
    a graph. Every selected node is in one pair.
  """
  slates = x.slates
  if configurable:  # rows of hop 0
    rows = configurable_rows(slates)
    if x.hop == EVERYWHERE:
      return [(x.everywhere(), _of_nodes(rows, slates))]
    return [(x.within(max(x.hop, 0)).both()[1][: rows.shape[1]], rows)]
  if x.hop in (NONE, EVERYWHERE):
    return [(x.everywhere(), selection(slates.graph_of, slates.graphs))]
  unreached = jnp.where(slates.batch.by_hop.hop > x.hop, slates.graph_of, ABSENT)
  reached = slates.graph_of.at[slates.nodes_within(x.hop)].get(mode="fill", fill_value=ABSENT)
  shared, varying = x.both()
  graphs = slates.graphs
  return [(shared, selection(unreached, graphs)), (varying, selection(reached, graphs))]


def configurable_rows(slates: Slates) -> jax.Array:
  """Selection matrix of the configurable nodes of each graph, `[G, hop 0]` float32."""
  graph_of = slates.graph_of.at[slates.batch.by_hop.nodes[0]].get(mode="fill", fill_value=ABSENT)
  rows = selection(graph_of, slates.graphs)
  return jnp.where(slates.is_configurable_row()[None], rows, 0)


def _of_nodes(rows: jax.Array, slates: Slates) -> jax.Array:
  """Scatters `rows [G, hop 0]` to their nodes, `[G, N]`."""
  nodes = slates.batch.by_hop.nodes[0]
  return jnp.zeros((len(rows), slates.num_nodes)).at[:, nodes].set(rows, mode="drop")


def real_nodes(graph: jraph.GraphsTuple) -> jax.Array:
  """Number of nodes of each graph, `[G]` int32, without the padding graph."""
  return graph.n_node[:-1]


def selection(graph_of: jax.Array, graphs: int) -> jax.Array:
  """The selection matrix `[G, N]` float32: 1 where a node belongs to a graph.

  Args:
    graph_of: `[N]` int32 graph of each node; G or more selects nothing.
    graphs: number of graphs G.
  """
  return jax.nn.one_hot(graph_of, graphs, dtype=jnp.float32, axis=0)


def pool_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
  """`mask [G, N]` times `x [N, ...]`, in float32: `[G, ...]`."""
  return jnp.tensordot(mask, x.astype(jnp.float32), axes=1, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def graph_sum(x: jax.Array, graph_of: jax.Array, graphs: int) -> jax.Array:
  """Sums the nodes `x [N, ...]` of each graph, `[graphs, ...]` float32.

  Nodes whose `graph_of [N]` is `graphs` or more are left out. The derivative is `per_node`, whose
  derivative is this function.
  """
  return pool_sum(x, selection(graph_of, graphs))


def _graph_sum_fwd(x, graph_of, graphs):
  # An empty slice has the dtype of x without keeping x alive.
  return graph_sum(x, graph_of, graphs), (graph_of, x[:0])


def _graph_sum_bwd(graphs, residuals, cotangent):
  del graphs
  graph_of, like = aggregation.arrays(residuals)
  return per_node(cotangent, graph_of).astype(like.dtype), None


graph_sum.defvjp(_graph_sum_fwd, _graph_sum_bwd)


@jax.custom_vjp
def per_node(value: jax.Array, graph_of: jax.Array) -> jax.Array:
  """Copies rows of `value [G, ...]` to the nodes of each graph: `[N, ...]`, 0 for padding nodes."""
  return value.at[graph_of].get(mode="fill", fill_value=0)


def _per_node_fwd(value, graph_of):
  return per_node(value, graph_of), (graph_of, value[:, :0])


def _per_node_bwd(residuals, cotangent):
  graph_of, like = aggregation.arrays(residuals)
  return graph_sum(cotangent, graph_of, len(like)).astype(like.dtype), None


per_node.defvjp(_per_node_fwd, _per_node_bwd)


def _segment_max(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Maximum of the rows of `x [N, ...]` that `mask [G, N]` selects; -inf without any."""
  graphs = len(mask)
  if not len(x):
    return jnp.full((graphs, *x.shape[1:]), -jnp.inf, jnp.float32)
  graph_of = jnp.where(mask.any(axis=0), jnp.argmax(mask, axis=0), graphs)
  return jax.ops.segment_max(x.astype(jnp.float32), graph_of, graphs + 1)[:graphs]
