"""Node features, stored once where all configurations agree.

`SplitNodes` stands for a tensor `[N, C, F]` and keeps it in two parts:

    shared  [N, 1, F]                     varying [rows of hops 0..h, C, F]

    node a  (no meaning, see row 0) ----> row 0   C values, hop 0
    node b  one value for all C
    node c  (no meaning, see row 1) ----> row 1   C values, hop 1
    node d  one value for all C

A node that has a varying row is reached: a configuration can have changed it. A round
of message passing reaches one hop further. A sum over neighbours needs two gathers,
one per part of the senders, and the gathers end in different rows:

    senders        receivers               held in `PartialSum` as
    unreached  ->  all nodes               from_unreached [N, 1, F]
    reached    ->  nodes of hops 0..h+1    from_reached   [rows of hops 0..h+1, C, F]

A reached receiver needs both; `PartialSum.complete` adds them. Both parts take sums and
divisions before, so that several directions are added up and completed once.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import ABSENT, Adjacency, LayoutBatch, NodesByHop
from tpugraphs_jax.nn.aggregation import neighbour_sum, take_rows


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["shared", "varying"], meta_fields=["hop"])
@dataclasses.dataclass(frozen=True)
class SplitNodes:
  """Node features; functions of single nodes apply to both parts with `jax.tree.map`.

  Attributes:
    shared: `[N, 1, F]`; rows of reached nodes carry no meaning.
    varying: `[rows of hops 0..hop, C, F]`, the rows of a `NodesByHop`.
    hop: the last hop that is reached.
  """

  shared: jax.Array
  varying: jax.Array
  hop: int


def rows_within(by_hop: NodesByHop, hop: int) -> int:
  """Number of rows of hops 0..hop, padding included."""
  return sum(len(nodes) for nodes in by_hop.nodes[: hop + 1])


def nodes_within(by_hop: NodesByHop, hop: int) -> jax.Array:
  """The node of each row of hops 0..hop, `[rows]` int32; ABSENT in padding."""
  return jnp.concatenate(by_hop.nodes[: hop + 1])


def divide_nodes(nodes: SplitNodes, by: jax.Array, by_hop: NodesByHop) -> SplitNodes:
  """Every node's features divided by its own `by [N]`, in the dtype of the features.

  A product with the inverse is the same, but XLA on CPU repeats a product in each of
  the gathers that read it, forward or backward; a division it carries out once. A
  training step took an eighth less time.
  """
  varying = by.at[nodes_within(by_hop, nodes.hop)].get(mode="fill", fill_value=1)
  return SplitNodes(_divide(nodes.shared, by), _divide(nodes.varying, varying), nodes.hop)


def _divide(x: jax.Array, by: jax.Array) -> jax.Array:
  """`x [n, C, F]` divided by `by [n]`."""
  return x / by[:, None, None].astype(x.dtype)


def grow(nodes: SplitNodes, by_hop: NodesByHop, hop: int) -> SplitNodes:
  """The same features with varying rows `[rows of hops 0..hop, C, F]`.

  New rows repeat the shared value of their node.
  """
  if hop == nodes.hop:
    return nodes
  known, configs, features = nodes.varying.shape
  fresh = nodes_within(by_hop, hop)[known:]
  added = jnp.broadcast_to(take_rows(nodes.shared, fresh), (len(fresh), configs, features))
  return SplitNodes(nodes.shared, jnp.concatenate([nodes.varying, added]), hop)


@dataclasses.dataclass(frozen=True)
class PartialSum:
  """A neighbour sum that reached nodes have only half of: unreached senders are missing.

  Not a pytree and without the fields of `SplitNodes`, so that a nonlinear layer
  cannot be applied to it: only sums, divisions and a bias may come before `complete`.

  Attributes:
    from_unreached: `[N, 1, F]`: every node's sum over its unreached neighbours.
    from_reached: `[rows of hops 0..hop, C, F]`: reached nodes' sums over reached neighbours.
    hop: the last hop that is reached after the sum.
  """

  from_unreached: jax.Array
  from_reached: jax.Array
  hop: int

  def __add__(self, other: PartialSum) -> PartialSum:
    return PartialSum(self.from_unreached + other.from_unreached,
                      self.from_reached + other.from_reached, self.hop)

  def divide(self, by: jax.Array, by_hop: NodesByHop) -> PartialSum:
    """Every receiver's sum divided by its own `by [N]`."""
    divided = divide_nodes(SplitNodes(self.from_unreached, self.from_reached, self.hop), by, by_hop)
    return PartialSum(divided.shared, divided.varying, self.hop)

  def add_bias(self, bias: jax.Array) -> PartialSum:
    """Adds `bias [1, F]` to every receiver's sum."""
    # To one part alone: `complete` hands it on to the other.
    biased = self.from_unreached + bias[None].astype(self.from_unreached.dtype)
    return dataclasses.replace(self, from_unreached=biased)

  def complete(self, by_hop: NodesByHop) -> SplitNodes:
    """The whole sum, `[N, 1, F]` and `[rows of hops 0..hop, C, F]`.

    Adds to reached nodes their sums over unreached neighbours.
    """
    heard = take_rows(self.from_unreached, nodes_within(by_hop, self.hop))
    return SplitNodes(self.from_unreached, self.from_reached + heard, self.hop)


def split_neighbour_sum(
    nodes: SplitNodes, adjacency: Adjacency, by_hop: NodesByHop, direction: str, *,
    own: bool = False,
) -> PartialSum:
  """`neighbour_sum` of split features; it reaches one hop further.

  Args:
    nodes: features of the senders, `[N, 1, F]` and `[rows, C, F]`.
    adjacency: edges among nodes.
    by_hop: nodes by hop of the same batch.
    direction: as in `neighbour_sum`.
    own: as in `neighbour_sum`.

  Raises:
    ValueError: `by_hop` was built for fewer rounds of message passing.
  """
  hop = nodes.hop + 1
  if hop >= len(by_hop.nodes):
    raise ValueError(
        f"message passing round {hop} needs {hop + 1} hops, the batch was built with "
        f"{len(by_hop.nodes)}: build it with hops = the model's number of layers")
  unreached = jnp.where((by_hop.hop > nodes.hop)[:, None, None], nodes.shared, 0)
  from_unreached = neighbour_sum(unreached, adjacency, direction, own=own)
  from_reached = neighbour_sum(
      nodes.varying, by_hop.adjacency, direction, receivers=rows_within(by_hop, hop), own=own)
  return PartialSum(from_unreached, from_reached, hop)


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
