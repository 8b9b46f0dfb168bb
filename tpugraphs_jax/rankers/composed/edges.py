"""The 4th place's ranker: no message passing, edges at configurable nodes alone.

    e = MLP(features and opcodes of a configurable node and its operand)     [E, B]
    g = MLP(e, configuration of the configurable node)                       [E, C, B]
    readout = [sum over edges of e (x) g, mean over edges of g]              [C, B * B + B]

Source: the write-up, which leaves open which columns it selects: here they are all in it.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import ABSENT, LayoutBatch
from tpugraphs_jax.nn import layers
from tpugraphs_jax.rankers.composed import pooling, split_nodes
from tpugraphs_jax.nn.aggregation import node_graph, take_rows
from tpugraphs_jax.nn.layers import JoinedDense, OpcodeEmbedding
from tpugraphs_jax.rankers import base


class ConfigurableEdges(NamedTuple):
  """Edges from configurable nodes to their operands; a table has many empty places.

  Attributes:
    consumer: `[E]` int32 configurable node, or ABSENT.
    producer: `[E]` int32 its operand, or ABSENT.
    row: `[E]` int32 place of the consumer among the rows of hop 0, or ABSENT.
  """

  consumer: jax.Array
  producer: jax.Array
  row: jax.Array


def configurable_edges(batch: LayoutBatch) -> ConfigurableEdges:
  """The edges `[E]` of a batch whose consumer is configurable, from its neighbour tables."""
  table, first = batch.adjacency.operands, jnp.asarray(batch.by_hop.nodes[0])
  first = jnp.where(split_nodes.is_configured_row(batch), first, ABSENT)
  row_of = jnp.full(len(batch.block_mask), ABSENT).at[first].set(
      jnp.arange(len(first)), mode="drop")
  own = jnp.asarray(table.index).at[first].get(mode="fill", fill_value=ABSENT)
  ends = [_ends(first, own), _ends(jnp.asarray(table.overflow_receiver), table.overflow_index)]
  consumer, producer = (jnp.concatenate(part) for part in zip(*ends))
  row = row_of.at[consumer].get(mode="fill", fill_value=ABSENT)
  real = (producer < ABSENT) & (row < ABSENT)
  return ConfigurableEdges(*(jnp.where(real, end, ABSENT) for end in (consumer, producer, row)))


def _ends(receiver: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Receivers and senders of a table, `[rows * slots]` each."""
  return jnp.repeat(receiver, index.shape[1]), jnp.asarray(index).reshape(-1)


@base.LAYOUT_MODELS.register("BilinearEdges")
class BilinearEdges(base.Network):
  """Bilinear pooling of edges and their configurations.

  Attributes:
    op_embed_dim: width of the opcode embedding.
    edge_widths: layers on edges.
    config_widths: layers on edges with configurations; both last widths must be equal.
    head_widths: layers of the head before its last.
    config_scale: factor of configuration values.
    dtype: of the computation; sums over edges and the head are float32.
    precision: of matrix products.
  """

  op_embed_dim: int = 10
  edge_widths: Sequence[int] = (1024, 128)
  config_widths: Sequence[int] = (1024, 128)
  head_widths: Sequence[int] = (1024,)
  config_scale: float = 1.0
  dtype: str | None = None
  precision: str | None = None

  def __post_init__(self):
    for name in ("edge_widths", "config_widths"):
      if not getattr(self, name):
        raise ValueError(f"model.{name} is empty, expected at least one width")
    super().__post_init__()

  def setup(self):
    mlp = functools.partial(layers.MLP, activation=nn.relu, precision=self.precision)
    self.op_embedding = OpcodeEmbedding(self.op_embed_dim)
    self.edge = mlp(tuple(self.edge_widths), dtype=self.dtype)
    self.first = JoinedDense(self.config_widths[0])
    self.rest = mlp(tuple(self.config_widths[1:]), dtype=self.dtype)
    self.head = mlp((*self.head_widths, 1))

  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32."""
    del train
    listed, graphs = configurable_edges(batch), len(batch.target)
    static = jnp.concatenate([batch.graph.nodes["feat"], self.op_embedding(batch.graph)], axis=-1)
    ends = [take_rows(static, end) for end in (listed.consumer, listed.producer)]
    edges = jnp.concatenate(ends, axis=-1)[:, None]
    edges = nn.relu(self.edge(edges))
    config = self.with_configurations(edges, listed, batch)
    graph_of = node_graph(batch.graph).at[listed.consumer].get(mode="fill", fill_value=graphs)
    member = pooling.selection(graph_of, graphs)
    mean = pooling.pool_sum(config, member) / jnp.maximum(member.sum(axis=1), 1)[:, None, None]
    return jnp.concatenate([bilinear(edges, config, member), mean], axis=-1)

  def with_configurations(
      self, edges: jax.Array, listed: ConfigurableEdges, batch: LayoutBatch
  ) -> jax.Array:
    """Edges `[E, 1, B]` with the configuration of their consumer: `[E, C, B']`."""
    matmul = functools.partial(layers.matmul, dtype=self.dtype, precision=self.precision)
    rows = self.config_scale * jnp.asarray(batch.rows)
    (kernel, config_kernel), bias = self.first((edges.shape[-1], rows.shape[-1]))
    config = split_nodes.config_rows(matmul(rows, config_kernel), batch)
    mixed = matmul(edges, kernel) + take_rows(config, listed.row)
    mixed = nn.relu(mixed + bias[None].astype(mixed.dtype))
    return nn.relu(self.rest(mixed)) if self.config_widths[1:] else mixed

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    return self.head(readout)[..., 0]


def bilinear(edges: jax.Array, config: jax.Array, member: jax.Array) -> jax.Array:
  """Sums of outer products over the edges of each graph.

  Args:
    edges: `[E, 1, A]`.
    config: `[E, C, B]`.
    member: `[G, E]` which edge belongs to which graph.

  Returns:
    `[G, C, A * B]` float32.
  """
  edges, config = edges.astype(jnp.float32), config.astype(jnp.float32)
  product = functools.partial(jnp.einsum, precision="highest")

  def of_graph(mask):
    return product("ea,ecb->cab", mask[:, None] * edges[:, 0], config)

  result = jax.lax.map(of_graph, member)
  return result.reshape(*result.shape[:2], -1)
