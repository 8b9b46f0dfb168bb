"""The 4th place: edges at configurable nodes, without message passing. Copy it for a new system.

    e = MLP(features and opcodes of a configurable node and of an operand)         [E, B]
    g = MLP(e, configuration of the configurable node)                             [E, C, B']
    readout = [sum over edges of the outer product of e and g, mean over edges of g]
    score = MLP(readout)

A ReLU follows every layer but the last.

Published: 12 node features of both ends and 8 of the 18 configuration values; the write-up does not
name them. Here all are used. There is no public code.

Source: the write-up of the competition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.config_fields import option
from tpugraphs_jax.data.batching import ABSENT, Array, LayoutBatch
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.aggregation import take_rows
from tpugraphs_jax.nn.embeddings import Opcodes
from tpugraphs_jax.nn.nodes import Nodes, Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System


@base.LAYOUT_MODELS.register("Fourth")
class KaggleFourth(System):
  """The 4th place."""

  op_embed_dim: int = option(10, "width of the opcode vector", least=1)
  edge_widths: Sequence[int] = option((1024, 128), "widths of the layers on edges")
  config_widths: Sequence[int] = option(
    (1024, 128), "widths of the layers on edges with configurations"
  )
  head_widths: Sequence[int] = option((1024,), "widths of the hidden layers of the head")

  def __post_init__(self):
    super().__post_init__()
    for name in ("edge_widths", "config_widths"):
      if not getattr(self, name):
        raise ValueError(f"model.{name} is empty, expected at least one width")

  def setup(self):
    self.head = [self.exact(width) for width in self.head_widths]
    self.last = self.exact(1)

  @nn.compact
  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """Sums of outer products and means over edges, `[G, C, B B' + B']` float32."""
    del train  # no dropout
    slates, graph = Slates.of(batch), batch.graph
    edges = configurable_edges(slates)
    opcode = Opcodes(self.op_embed_dim, name="opcodes")(graph)
    node = jnp.concatenate([jnp.asarray(graph.nodes["feat"]), opcode], axis=-1)
    e = jnp.concatenate([take_rows(node, end) for end in (edges.consumer, edges.producer)], axis=-1)
    for number, width in enumerate(self.edge_widths):
      e = nn.relu(self.linear(width, name=f"edge_{number}")(e))

    graph_of = slates.graph_of.at[edges.consumer].get(mode="fill", fill_value=slates.graphs)
    slates = dataclasses.replace(slates, graph_of=graph_of)  # edges take the place of nodes
    first, *others = self.config_widths
    g = self.linear(first, name="config_0")(slates.nodes(e), EdgeLayouts(slates, edges.row))
    for number, width in enumerate(others, start=1):
      g = self.linear(width, name=f"config_{number}")(g.map(nn.relu))
    g = nn.relu(g.everywhere())

    member = pooling.selection(graph_of, slates.graphs)
    mean = pooling.pool_sum(g, member) / jnp.maximum(member.sum(axis=1), 1)[:, None, None]
    moments = bilinear(e, g, member)
    return jnp.concatenate([moments, mean], axis=-1)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., B B' + B']`."""
    for layer in self.head:
      readout = nn.relu(layer(readout))
    return self.last(readout)[..., 0]


class Edges(NamedTuple):
  """Edges from configurable nodes to their operands; ABSENT is padding.

  Attributes:
    consumer: `[E]` int32 configurable node.
    producer: `[E]` int32 operand.
    row: `[E]` int32 row of the consumer in hop 0.
  """

  consumer: jax.Array
  producer: jax.Array
  row: jax.Array


def configurable_edges(slates: Slates) -> Edges:
  """The edges of a batch whose consumer is configurable, from its neighbour tables."""
  table, node = slates.batch.adjacency.operands, jnp.asarray(slates.batch.by_hop.nodes[0])
  node = jnp.where(slates.is_configurable_row(), node, ABSENT)
  row_of = jnp.full(slates.num_nodes, ABSENT).at[node].set(jnp.arange(len(node)), mode="drop")
  operands = jnp.asarray(table.index).at[node].get(mode="fill", fill_value=ABSENT)
  ends = [_ends(node, operands), _ends(jnp.asarray(table.overflow_receiver), table.overflow_index)]
  consumer, producer = (jnp.concatenate(part) for part in zip(*ends))
  row = row_of.at[consumer].get(mode="fill", fill_value=ABSENT)
  real = (producer < ABSENT) & (row < ABSENT)
  return Edges(*(jnp.where(real, end, ABSENT) for end in (consumer, producer, row)))


def _ends(receiver: jax.Array, index: Array) -> tuple[jax.Array, jax.Array]:
  """Receivers and senders of a table, `[rows * slots]` each."""
  return jnp.repeat(receiver, index.shape[1]), jnp.asarray(index).reshape(-1)


class EdgeLayouts:
  """Layouts of the consumers of edges: an input of `Linear`, as `nn.layers.Layouts`.

  Args:
    edges: slates with edges in place of nodes.
    row: `[E]` int32 as in `Edges`.
  """

  def __init__(self, edges: Slates, row: jax.Array):
    self.edges, self.row, self.width = edges, row, edges.batch.rows.shape[-1]

  def map(self, function: Callable[[jax.Array], jax.Array]) -> Nodes:
    """Applies `function`, `[R, V] -> [R, F]`, to rows of the dictionary: `[E, C, F]`."""
    batch = self.edges.batch
    row_id = jnp.asarray(batch.row_id).at[self.row].get(mode="fill", fill_value=ABSENT)
    config = function(jnp.asarray(batch.rows))
    return self.edges.full(config.at[row_id].get(mode="fill", fill_value=0))


def bilinear(e: jax.Array, g: jax.Array, member: jax.Array) -> jax.Array:
  """Sums of outer products over the edges of each graph, `[G, C, A * B]` float32.

  Args:
    e: `[E, A]`.
    g: `[E, C, B]`.
    member: `[G, E]` float32, 1 where an edge belongs to a graph.
  """
  e, g = e.astype(jnp.float32), g.astype(jnp.float32)
  moments = jax.lax.map(lambda mask: jnp.einsum("ea,ecb->cab", mask[:, None] * e, g), member)
  return moments.reshape(*moments.shape[:2], -1)
