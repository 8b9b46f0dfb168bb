"""Sums over neighbours.

A batch has its edges as two neighbour tables (`data.batching.Adjacency`). A row of a table has the
senders of one receiver. The tables are transposes of each other: a sum is a few dense gathers with
one table, its gradient a few dense gathers with the other.

    c = f(a, b)      operands     users
    d = g(a, c)      a | .  .     a | c  d
                     b | .  .     b | c  .
                     c | a  b     c | d  .
                     d | a  c     d | .  .

`.` is ABSENT and adds 0. Receivers with more senders than columns have further rows in an overflow
table.

A second pair of tables, `NodesByHop.adjacency`, has the edges among nodes that configurations
reach. Its rows are these nodes, ordered by hop: the number of edges between a node and the nearest
configurable node (`*`).

    hop         0      1      2    ABSENT       rows of `NodesByHop.adjacency`
                *a --- b --- c --- d --- e      [a f | b g | c]
                *f --- g --/                     hop 0 hop 1 hop 2

After h rounds of message passing the rows of hops 0..h, a prefix, differ between configurations.
Every other node is computed once for all configurations (`nn.nodes`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jraph

from tpugraphs_jax.data.batching import Adjacency, Array

OPERANDS = "operands"
USERS = "users"
BOTH = "both"
_OPPOSITE = {OPERANDS: USERS, USERS: OPERANDS, BOTH: BOTH}
_SCATTER_COLUMNS = 4096  # at a time, see `_add_sorted_rows`
_SIDES = {OPERANDS: (OPERANDS,), USERS: (USERS,), BOTH: (OPERANDS, USERS)}


def neighbour_sum(
  x: jax.Array,
  adjacency: Adjacency,
  direction: str,
  *,
  receivers: int | None = None,
  self_loops: bool = False,
) -> jax.Array:
  """Sums each node's operands, users or both; a repeated edge counts repeatedly.

  Args:
    x: `[n, F, ...]` values of the first n nodes; edges from other nodes are ignored.
    adjacency: edges among at least these nodes.
    direction: `"operands"`, `"users"` or `"both"`: the senders of a node.
    receivers: number of leading nodes that receive; n unless given.
    self_loops: add a node's own value to its sum.

  Returns:
    `[receivers, ...]` in the dtype of `x`, accumulated in float32.
  """
  receivers = len(x) if receivers is None else receivers
  return _neighbour_sum(x, adjacency, direction, receivers, self_loops)


def arrays(residuals: Any) -> Any:
  """Residuals of a gradient rule as arrays.

  Outside `jax.jit`, jax 0.7 gives constants as `LiteralArray`, which has no operations.
  """
  return jax.tree.map(jnp.asarray, residuals)


def _sum_rows(
  x: jax.Array, adjacency: Adjacency, direction: str, receivers: int, self_loops: bool
) -> jax.Array:
  """`neighbour_sum` without its gradient rule."""
  tables = [getattr(adjacency, side) for side in _SIDES[direction]]
  flat = x.reshape(len(x), math.prod(x.shape[1:]))
  total = jnp.zeros((receivers, flat.shape[1]), jnp.float32)
  if self_loops and receivers <= len(x):
    total = jnp.asarray(flat[:receivers], jnp.float32)
  # XLA fuses one gather per column into a single pass, but not a gather of [receivers, columns, F]
  # with its reduction.
  gathered = lambda index: [
    take_rows(flat, index[:, column]).astype(jnp.float32) for column in range(index.shape[1])
  ]
  for table in tables:
    total = sum(gathered(table.index[:receivers]), total)
  for table in tables:
    if len(table.overflow_receiver):
      first, *others = gathered(table.overflow_index)
      total = _add_sorted_rows(total, table.overflow_receiver, sum(others, first))
  if self_loops and receivers > len(x):
    # In place: only the first rows are read and written again.
    total = total.at[: len(x)].add(flat.astype(jnp.float32))
  return total.reshape((receivers,) + x.shape[1:]).astype(x.dtype)


_neighbour_sum = jax.custom_vjp(_sum_rows, nondiff_argnums=(2, 3, 4))


def _neighbour_sum_fwd(x, adjacency, direction, receivers, self_loops):
  # A zero-width slice has the number of rows of x without keeping x alive.
  return _neighbour_sum(x, adjacency, direction, receivers, self_loops), (adjacency, x[:, :0])


def _neighbour_sum_bwd(direction, receivers, self_loops, residuals, cotangent):
  # The transpose of a neighbour sum is the neighbour sum in the opposite direction, whose table is
  # sorted as well: the backward pass never scatters unsorted edges.
  del receivers
  adjacency, senders = arrays(residuals)
  return _sum_rows(cotangent, adjacency, _OPPOSITE[direction], len(senders), self_loops), None


_neighbour_sum.defvjp(_neighbour_sum_fwd, _neighbour_sum_bwd)


def _add_sorted_rows(total: jax.Array, receiver: Array, rows: jax.Array) -> jax.Array:
  """Adds `rows [m, F]` to `total [n, F]` at the sorted indices `receiver [m]`; drops ABSENT.

  The TPU compiler keeps hundreds of rows of a scatter in the vector memory of a core, and refuses
  rows of 6,400 columns on a v3. They are added in blocks of columns.
  """
  parts = -(-total.shape[1] // _SCATTER_COLUMNS)
  add = lambda total, rows: total.at[receiver].add(rows, mode="drop", indices_are_sorted=True)
  if parts <= 1:
    return add(total, rows)
  blocks = zip(jnp.array_split(total, parts, axis=1), jnp.array_split(rows, parts, axis=1))
  return jnp.concatenate([add(*block) for block in blocks], axis=1)


def take_rows(x: Array, index: Array) -> jax.Array:
  """Rows `[m, ...]` of `x [n, ...]` at `index [m]` int32; zeros where the index is ABSENT."""
  if not len(x):
    return jnp.zeros(index.shape + x.shape[1:], x.dtype)  # jax gathers from no empty axis
  # Faster than `mode="fill"`, which also handles negative indices.
  rows = jnp.asarray(x).at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
  return jnp.where(jnp.expand_dims(index < len(x), range(index.ndim, rows.ndim)), rows, 0)


def degree(adjacency: Adjacency, direction: str, nodes: int) -> jax.Array:
  """Number of operands, users or both of each node, `[nodes]` float32."""
  return neighbour_sum(jnp.ones((nodes, 1)), adjacency, direction)[:, 0]


def node_graph(graph: jraph.GraphsTuple) -> jax.Array:
  """Index of the graph of each node, `[N]` int32; padding nodes have the last index."""
  # Compiles faster than jnp.repeat, which builds a scatter.
  nodes = jnp.arange(graph.nodes["opcode"].shape[0], dtype=jnp.int32)
  ends = jnp.cumsum(graph.n_node)
  return jnp.sum(nodes[:, None] >= ends[None], axis=1, dtype=jnp.int32)
