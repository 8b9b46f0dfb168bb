"""Sums over neighbours: the only place that gathers or scatters along edges.

Two forms of node features are supported. `neighbour_sum` works on any array
`[N, ...]`. `SplitNodes` keeps the nodes that are the same for all
configurations once, `[N, 1, F]`, and only those that configurations have
reached as `[n, C, F]`; the functions on it give the numbers that the full
`[N, C, F]` tensor would have.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import jraph

from tpugraphs_jax.batch import Adjacency, Reach

OPERANDS = "operands"
USERS = "users"
BOTH = "both"
_SIDES = {OPERANDS: (OPERANDS,), USERS: (USERS,), BOTH: (OPERANDS, USERS)}
_OPPOSITE = {OPERANDS: USERS, USERS: OPERANDS, BOTH: BOTH}


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
  """Rows of `x [n, ...]`; absent indices give zeros."""
  if not len(x):
    return jnp.zeros(index.shape + x.shape[1:], x.dtype)  # jax gathers from no empty axis
  return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


def _sum_rows(
    x: jax.Array, adjacency: Adjacency, direction: str, receivers: int
) -> jax.Array:
  """Sums `x [senders, ...]` into `[receivers, ...]`, accumulating in float32."""
  tables = [getattr(adjacency, side) for side in _SIDES[direction]]
  flat = x.reshape(len(x), math.prod(x.shape[1:]))
  total = jnp.zeros((receivers, flat.shape[1]), jnp.float32)
  # One gather per slot, written out: XLA fuses them into a single pass, which
  # a gather of [receivers, slots, F] followed by a reduction is not.
  for table in tables:
    for slot in range(table.index.shape[1]):
      total += _take(flat, table.index[:receivers, slot]).astype(jnp.float32)
  for table in tables:
    if len(table.overflow_sender):
      rest = _take(flat, table.overflow_sender).astype(jnp.float32)
      total = total.at[table.overflow_receiver].add(rest, mode="drop", indices_are_sorted=True)
  return total.reshape((receivers,) + x.shape[1:]).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _neighbour_sum(x, adjacency, direction, receivers):
  return _sum_rows(x, adjacency, direction, receivers)


def _neighbour_sum_fwd(x, adjacency, direction, receivers):
  # A zero-width slice remembers how many rows x has without keeping x alive.
  return _neighbour_sum(x, adjacency, direction, receivers), (adjacency, x[:, :0])


def _neighbour_sum_bwd(direction, receivers, residuals, cotangent):
  # The transpose of a neighbour sum is the neighbour sum from the other end,
  # which is sorted as well: the backward pass never scatters unsorted edges.
  del receivers
  adjacency, senders = residuals
  return _sum_rows(cotangent, adjacency, _OPPOSITE[direction], len(senders)), None


_neighbour_sum.defvjp(_neighbour_sum_fwd, _neighbour_sum_bwd)


def neighbour_sum(
    x: jax.Array, adjacency: Adjacency, direction: str, *, receivers: int | None = None
) -> jax.Array:
  """Sums each node's operands, users or both; an edge that occurs twice counts twice.

  Args:
    x: `[N, ...]` node values. Edges from rows beyond its length do not count.
    adjacency: edges among (at least) these nodes.
    direction: `"operands"`, `"users"` or `"both"`: whose values a node receives.
    receivers: how many leading nodes receive; all of `x` unless given.

  Returns:
    `[receivers, ...]` in the dtype of `x`, accumulated in float32.
  """
  return _neighbour_sum(x, adjacency, direction, len(x) if receivers is None else receivers)


def degree(adjacency: Adjacency, direction: str, node_weight: jax.Array) -> jax.Array:
  """Sum of `node_weight [N]` over each node's operands or users, `[N]` float32."""
  return neighbour_sum(node_weight[:, None], adjacency, direction)[:, 0]


def node_graph(graph: jraph.GraphsTuple) -> jax.Array:
  """Graph slot of each node, `[N]` int32; padding nodes have the last one."""
  # Compiles in a fraction of the time of jnp.repeat, which builds a scatter.
  nodes = jnp.arange(graph.nodes["opcode"].shape[0], dtype=jnp.int32)
  ends = jnp.cumsum(graph.n_node)
  return jnp.sum(nodes[:, None] >= ends[None], axis=1, dtype=jnp.int32)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["shared", "varying"], meta_fields=["hop"])
@dataclasses.dataclass(frozen=True)
class SplitNodes:
  """Node features, stored once where all configurations agree.

  `varying` holds the nodes of tiers 0..hop of a `Reach`; rows of `shared` that
  belong to those nodes carry no meaning. Functions of single nodes apply to
  both parts with `jax.tree.map`.
  """

  shared: jax.Array  # [N, 1, F]
  varying: jax.Array  # [positions of tiers 0..hop, C, F]
  hop: int


def positions(reach: Reach, hop: int) -> int:
  """How many positions tiers 0..hop take, padding included."""
  return sum(len(tier) for tier in reach.tiers[: hop + 1])


def reached_nodes(reach: Reach, hop: int) -> jax.Array:
  """Node at each position of tiers 0..hop, `[positions]` int32, or ABSENT."""
  return jnp.concatenate(reach.tiers[: hop + 1])


def split_per_node(value: jax.Array, reach: Reach, hop: int) -> SplitNodes:
  """A value per node, `[N]`, in split form, `[N, 1, 1]` and `[positions, 1, 1]`."""
  varying = _take(value, reached_nodes(reach, hop))
  return SplitNodes(value[:, None, None], varying[:, None, None], hop)


def scale_nodes(nodes: SplitNodes, value: jax.Array, reach: Reach) -> SplitNodes:
  """Every node's features times its own `value [N]`, in the dtype of the features."""
  factor = split_per_node(value, reach, nodes.hop)
  return jax.tree.map(lambda x, f: x * f.astype(x.dtype), nodes, factor)


def grow(nodes: SplitNodes, reach: Reach, hop: int) -> SplitNodes:
  """Extends the varying rows to tier `hop`; the new rows repeat the shared value."""
  if hop == nodes.hop:
    return nodes
  known, configs, features = nodes.varying.shape
  fresh = reached_nodes(reach, hop)[known:]
  added = jnp.broadcast_to(_take(nodes.shared, fresh), (len(fresh), configs, features))
  return SplitNodes(nodes.shared, jnp.concatenate([nodes.varying, added]), hop)


def split_neighbour_sum(
    nodes: SplitNodes, adjacency: Adjacency, reach: Reach, direction: str
) -> SplitNodes:
  """`neighbour_sum` on split features; the result reaches one tier further.

  Raises:
    ValueError: if `reach` was built for fewer rounds of message passing.
  """
  hop = nodes.hop + 1
  if hop >= len(reach.tiers):
    raise ValueError(
        f"message passing round {hop} needs {hop + 1} tiers, the batch was built with "
        f"{len(reach.tiers)}: build it with hops = the model's number of layers")
  unreached = (reach.distance > nodes.hop)[:, None, None]
  shared = neighbour_sum(jnp.where(unreached, nodes.shared, 0), adjacency, direction)
  varying = neighbour_sum(
      nodes.varying, reach.adjacency, direction, receivers=positions(reach, hop))
  # A reached node also hears from neighbours that no configuration has touched.
  return SplitNodes(shared, varying + _take(shared, reached_nodes(reach, hop)), hop)
