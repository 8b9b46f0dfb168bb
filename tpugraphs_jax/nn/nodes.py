"""Node features `[N, C, F]`, stored once where all configurations agree.

`Nodes` represents a tensor `[N, C, F]` of N nodes, C configurations and F features in two parts:

    shared  [N, 1, F]                     varying [rows of hops 0..h, C, F]

    node a  (no meaning, see row 0) ----> row 0   C values, hop 0
    node b  one value for all C
    node c  (no meaning, see row 1) ----> row 1   C values, hop 1
    node d  one value for all C

A node with a varying row is reached: configurations can change it. There are three forms:

    hop          shared     varying       features
    NONE         [N, 1, F]  -             are equal in all configurations
    0, 1, ...    [N, 1, F]  [rows, C, F]  differ on nodes up to this hop
    EVERYWHERE   -          [N, C, F]     differ on all nodes

A network is written as if `Nodes` were `[N, C, F]`. `x.map(gelu)` applies a function to single
nodes. `x + y` and `concat(x, y)` convert both sides to the form that reaches further.
`neighbours(x, USERS)` reaches one hop further. Norms over nodes and attention give the last form,
because every node depends on its whole graph.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import ABSENT, LayoutBatch, TileBatch
from tpugraphs_jax.nn import aggregation
from tpugraphs_jax.nn.aggregation import degree, node_graph, take_rows

NONE, EVERYWHERE = -1, ABSENT  # hops of `Nodes`
Batch = TypeVar("Batch", bound=LayoutBatch | TileBatch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slates(Generic[Batch]):
  """A batch of G slates with N nodes and C configurations.

  Attributes:
    batch: the batch, with the adjacency that DropEdge keeps.
    edge_mask: `[E]` bool mask of the edges of `batch.graph` that DropEdge keeps.
    graph_of: `[N]` int32 graph of each node; G for padding nodes.
  """

  batch: Batch
  edge_mask: jax.Array
  graph_of: jax.Array

  @classmethod
  def of(cls, batch: Batch) -> Slates[Batch]:
    """Slates of a batch, with all edges."""
    real = jnp.arange(len(batch.graph.senders)) < batch.graph.n_edge[:-1].sum()
    return cls(batch, real, node_graph(batch.graph))

  @property
  def graphs(self) -> int:
    """Number of slates G."""
    return self.batch.config_mask.shape[0]

  @property
  def configs(self) -> int:
    """Configurations C per slate, padding included."""
    return self.batch.config_mask.shape[1]

  @property
  def num_nodes(self) -> int:
    """Number of nodes N, padding included."""
    return len(self.graph_of)

  @property
  def node_configs(self) -> jax.Array:
    """Mask of the real configurations of each node, `[N, C]` bool; False for padding nodes."""
    mask = jnp.asarray(self.batch.config_mask)
    return mask.at[self.graph_of].get(mode="fill", fill_value=False)

  def rows_within(self: Slates[LayoutBatch], hop: int) -> int:
    """Number of rows of hops 0..hop, padding included."""
    return sum(len(nodes) for nodes in self.batch.by_hop.nodes[: hop + 1])

  def nodes_within(self: Slates[LayoutBatch], hop: int) -> jax.Array:
    """The node of each row of hops 0..hop, `[rows]` int32; ABSENT in padding."""
    return jnp.concatenate(self.batch.by_hop.nodes[: hop + 1])

  def is_configurable_row(self: Slates[LayoutBatch]) -> jax.Array:
    """Mask of rows of hop 0 with a configuration, `[hop 0]` bool; False in padding."""
    return jnp.any(self.batch.row_id < ABSENT, axis=1)

  def nodes(self, *values: jax.Array) -> Nodes:
    """`values [N, F]`, concatenated, as features that are equal in all configurations."""
    value = jnp.concatenate(values, axis=-1) if len(values) > 1 else values[0]
    return Nodes(self, value[:, None], None, NONE)

  def full(self, value: jax.Array) -> Nodes:
    """`value [N, C, F]` as features that differ on all nodes."""
    return Nodes(self, None, value, EVERYWHERE)

  def from_all(self, value: jax.Array, x: Nodes) -> Nodes:
    """`value [N, C, F]` as features in which every node depends on all nodes of `x`."""
    return Nodes(self, value, None, NONE) if x.hop == NONE else self.full(value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nodes:
  """Node features `[N, C, F]`; see the module.

  Attributes:
    slates: slates of the nodes.
    shared: `[N, 1, F]`, or None; rows of reached nodes have no meaning.
    varying: `[rows of hops 0..hop, C, F]`, `[N, C, F]` or None.
    hop: the last reached hop, NONE or EVERYWHERE.
  """

  slates: Slates
  shared: jax.Array | None
  varying: jax.Array | None
  hop: int = dataclasses.field(metadata={"static": True})

  @property
  def width(self) -> int:
    """Number of features F."""
    return self._some.shape[-1]

  @property
  def dtype(self) -> jnp.dtype:
    """Dtype of the features."""
    return self._some.dtype

  @property
  def _some(self) -> jax.Array:
    some = self.varying if self.shared is None else self.shared
    assert some is not None
    return some

  def both(self) -> tuple[jax.Array, jax.Array]:
    """`shared` and `varying` of features that differ up to a hop 0, 1, ..."""
    assert self.shared is not None and self.varying is not None
    return self.shared, self.varying

  def map(self, function: Callable[[jax.Array], jax.Array]) -> Nodes:
    """Applies a function to single nodes, `[n, C, F] -> [n, C, F']`."""
    apply = lambda part: None if part is None else function(part)
    return Nodes(self.slates, apply(self.shared), apply(self.varying), self.hop)

  def everywhere(self) -> jax.Array:
    """The features of all nodes, `[N, C, F]`, or `[N, 1, F]` if `hop` is NONE."""
    if self.hop in (NONE, EVERYWHERE):
      return self._some
    shared, varying = self.both()
    shape = len(shared), *varying.shape[1:]
    rows = self.slates.nodes_within(self.hop)
    return jnp.broadcast_to(shared, shape).at[rows].set(varying, mode="drop")

  def within(self, hop: int) -> Nodes:
    """The same features with varying rows of hops 0..hop, where `hop` is at least `self.hop`.

    New rows repeat the shared value of their node. With `self.hop` NONE they have one column
    `[rows, 1, F]`.
    """
    if hop == self.hop:
      return self
    if hop == EVERYWHERE:
      return self.slates.full(self.everywhere())
    if self.hop == NONE:
      rows = take_rows(self._some, self.slates.nodes_within(hop))
      return Nodes(self.slates, self._some, rows, hop)
    shared, varying = self.both()
    count, configs, features = varying.shape
    nodes = self.slates.nodes_within(hop)[count:]
    rows = jnp.broadcast_to(take_rows(shared, nodes), (len(nodes), configs, features))
    return Nodes(self.slates, shared, jnp.concatenate([varying, rows]), hop)

  def divide(self, by: jax.Array) -> Nodes:
    """Divides the features of every node by `by [N]`, in the dtype of the features.

    XLA on CPU repeats a product with the inverse in every gather that reads it, but not a division:
    a training step took an eighth less time.
    """
    divide = lambda x, by: None if x is None else x / by[:, None, None].astype(x.dtype)
    rows = by
    if NONE < self.hop < EVERYWHERE:
      rows = by.at[self.slates.nodes_within(self.hop)].get(mode="fill", fill_value=1)
    return Nodes(self.slates, divide(self.shared, by), divide(self.varying, rows), self.hop)

  def __add__(self, other: Nodes) -> Nodes:
    return combine(jnp.add, self, other)

  def __sub__(self, other: Nodes) -> Nodes:
    return combine(jnp.subtract, self, other)

  def __mul__(self, other: Nodes) -> Nodes:
    return combine(jnp.multiply, self, other)


def combine(function: Callable[..., jax.Array], *parts: Nodes) -> Nodes:
  """Applies a function to single nodes: `[n, C, F1], [n, C, F2], ... -> [n, C, F]`.

  The parts are converted to the form of the part that reaches furthest. Parts may have one column
  `[n, 1, F]`, which `function` broadcasts.
  """
  hop = max(part.hop for part in parts)
  parts = tuple(part.within(hop) for part in parts)
  apply = lambda rows: None if rows[0] is None else function(*rows)
  shared = apply([part.shared for part in parts])
  varying = apply([part.varying for part in parts])
  return Nodes(parts[0].slates, shared, varying, hop)


def concat(*parts: Nodes) -> Nodes:
  """Concatenates features `[N, C, F1]`, `[N, C, F2]`, ..."""

  def concatenate(*rows):
    configs = max(part.shape[1] for part in rows)
    wide = [jnp.broadcast_to(part, (len(part), configs, part.shape[2])) for part in rows]
    return jnp.concatenate(wide, axis=-1)

  return combine(concatenate, *parts)


def neighbours(x: Nodes, direction: str, *, self_loops: bool = False) -> Nodes:
  """The sum of each node's operands, users or both, `[N, C, F]`; features reach one hop further.

      senders        receivers               sum
      unreached  ->  all nodes               from_unreached [N, 1, F]
      reached    ->  nodes of hops 0..h+1    from_reached   [rows of hops 0..h+1, C, F]

  A reached receiver adds both.

  Args:
    x: features of the senders, `[N, C, F]`.
    direction: as in `aggregation.neighbour_sum`.
    self_loops: add a node's own value to its sum.

  Raises:
    ValueError: the batch has hops for fewer rounds of message passing.
  """
  slates, adjacency = x.slates, x.slates.batch.adjacency
  total = lambda rows: aggregation.neighbour_sum(rows, adjacency, direction, self_loops=self_loops)
  if not NONE < x.hop < EVERYWHERE:
    return x.map(total)
  hop, by_hop = x.hop + 1, slates.batch.by_hop
  if hop >= len(by_hop.nodes):
    raise ValueError(
      f"message passing round {hop} needs {hop + 1} hops, and the batch has "
      f"{len(by_hop.nodes)}: set `Network.hops` to the number of rounds"
    )
  shared, varying = x.both()
  unreached = jnp.where((by_hop.hop > x.hop)[:, None, None], shared, 0)
  from_unreached = total(unreached)
  from_reached = aggregation.neighbour_sum(
    varying, by_hop.adjacency, direction, receivers=slates.rows_within(hop), self_loops=self_loops
  )
  rows = take_rows(from_unreached, slates.nodes_within(hop))
  return Nodes(slates, from_unreached, from_reached + rows, hop)


def neighbour_mean(x: Nodes, direction: str) -> Nodes:
  """The mean of each node's operands, users or both; 0 for a node without any."""
  count = degree(x.slates.batch.adjacency, direction, x.slates.num_nodes)
  return neighbours(x, direction).divide(jnp.maximum(count, 1))
