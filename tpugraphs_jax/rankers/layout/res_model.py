"""The official layout model, on split features (`nn.nodes`), with sampled blocks of nodes.

The published model samples a block of consecutive nodes for each slate. In the mode `dropout`
messages and configurations stay inside the block. In the mode `backpropdropout` training runs two
passes: one inside the block with gradients, one on the whole graph without. The readout takes nodes
of the block from the first pass and other nodes from the second.

Source: published baseline of TpuGraphs (arXiv 2308.13490), flags `dropout`, `keep_nodes`.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import operator

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data import plan
from tpugraphs_jax.data.batching import (
  ABSENT,
  Adjacency,
  Array,
  LayoutBatch,
  Neighbours,
  PreparedGraph,
)
from tpugraphs_jax.data.plan import Draw, Sampler, SlateDraft
from tpugraphs_jax.nn import layers, pooling
from tpugraphs_jax.nn.aggregation import BOTH, degree, OPERANDS, USERS
from tpugraphs_jax.nn.embeddings import OpcodeEmbedding
from tpugraphs_jax.nn.layers import Dense, DTYPES, Layouts, leaky_relu
from tpugraphs_jax.nn.nodes import neighbours, Nodes, Slates
from tpugraphs_jax.rankers import base, scorer
from tpugraphs_jax.rankers.family import LayoutFamily

# The network sees a sampled block of nodes: never, always, in training.
DROPOUT_MODES = ("fullgraph", "dropout", "backpropdropout")
# Edges over which a round sums, by normalisation.
NORMALIZATIONS = {"sym": (BOTH,), "asym": (USERS, OPERANDS)}
_BLOCKS_IN_EVALUATION = 3  # blocks over which `dropout` averages scores, as the official code
_CONFIG_GAIN = 100.0  # factor of configuration features, as in the official code


class BlockFamily(LayoutFamily):
  """Whole programs, each slate with a block of at most `batch.keep_nodes` nodes."""

  def check(self) -> None:
    super().check()
    if self.config.segments is not None:
      raise ValueError(
        "this model samples blocks of nodes, which does not go with segments: set model.dropout "
        "to fullgraph, or train on whole graphs (variant full)"
      )

  def draw(self, graphs: Sequence[PreparedGraph], sampler: Sampler) -> Draw:
    """Draws slates and a block of each; see `Family.draw`."""
    draw = super().draw(graphs, sampler)

    def draw_with_block(number: int, rng: np.random.Generator, turn: int) -> SlateDraft:
      sizes, finish = draw(number, rng, turn)
      with_block = lambda: finish()._replace(block=self.draw_block(graphs[number], rng))
      return SlateDraft(sizes, with_block)

    return draw_with_block

  def draw_block(self, graph: PreparedGraph, rng: np.random.Generator) -> tuple[int, int]:
    """Draws a contiguous block of a program, `(first node, last node + 1)`."""
    return plan.sample_block(len(graph.opcode), self.config.batch.keep_nodes, rng)

  def run_network(
    self, params: optax.Params, graphs: Sequence[PreparedGraph], config_ids: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Scores `[n]` float32; with the mode `dropout` the mean over sampled blocks."""
    if self.network.dropout != "dropout":
      return super().run_network(params, graphs, config_ids)
    rngs = [scorer.rng_of(graph, self.config.seed) for graph in graphs]
    runs = []
    for _ in range(_BLOCKS_IN_EVALUATION):
      blocks = [self.draw_block(graph, rng) for graph, rng in zip(graphs, rngs)]
      runs.append(self.encoder(params, graphs, config_ids, blocks=blocks))
    return [np.mean(scores, axis=0) for scores in zip(*runs)]


@base.LAYOUT_MODELS.register("ResModel")
class ResModel(base.Network):
  """The official layout model: residual convolutions, with configurations at every layer.

  The option `dropout` sets the use of the sampled block of nodes (see the module): `fullgraph`
  without blocks, `dropout` in training and evaluation, `backpropdropout` in training.
  """

  op_embed_dim: int = option(32, "width of the opcode embedding", least=1)
  hidden_dim: int = option(32, "width of node features", least=1)
  num_gnns: int = option(2, "rounds of message passing", least=1, most=MOST_LAYERS)
  adj_normalization: str = option(
    "sym",
    "sym: one sum over both directions; asym: a mean and a kernel for each direction",
    one_of=tuple(NORMALIZATIONS),
  )
  dropout: str = option(
    "backpropdropout", "use of a sampled block: never, always, or in training", one_of=DROPOUT_MODES
  )
  opcodes: int = option(
    OPCODES, "rows of the opcode table; officially the largest opcode of the data + 1", least=1
  )
  remat: bool = option(False, "recompute each round in the backward pass instead of storing it")
  dtype: str = option(
    "float32", "dtype of the computation; sums over neighbours and nodes are float32", one_of=DTYPES
  )

  @property
  def family(self):
    return LayoutFamily if self.dropout == "fullgraph" else BlockFamily

  @property
  def hops(self) -> int:
    return self.num_gnns

  def setup(self):
    layer_range = range(self.num_gnns)
    dense = lambda: Dense(self.hidden_dim, dtype=self.dtype)
    self.op_embedding = OpcodeEmbedding(self.op_embed_dim, self.opcodes)
    self.pre_0, self.pre_1 = Dense(self.hidden_dim), dense()
    self.update_0 = [Dense(self.hidden_dim) for _ in layer_range]
    self.update_1 = [dense() for _ in layer_range]
    self.head = layers.MLP((self.hidden_dim, 1), use_bias=False)

  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32."""
    static = batch.graph.nodes["feat"], self.op_embedding(batch.graph)
    slates = Slates.of(batch)
    if self.dropout == "backpropdropout" and train:
      block = inside_block(slates)
      inside, outside = self.encode(static, block), self.encode(static, slates)
      parts = [merged(x, jax.lax.stop_gradient(y)) for x, y in zip(inside, outside)]
      return self.readout(parts)
    if self.dropout == "dropout":
      slates = inside_block(slates)
    return self.readout(self.encode(static, slates))

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    return self.head(readout)[..., 0]

  def encode(self, static: Sequence[jax.Array], slates: Slates) -> Sequence[Nodes]:
    """Summands of the node features after all rounds.

    The summands are the features before the last round `[rows of hops 0..h-1, C, H]` and the
    residual of the last round `[rows of hops 0..h, C, H]`. The readout sums each over nodes and
    adds the results, which saves an addition of two tensors of the second shape, by far the
    largest.

    Args:
      static: node features that do not depend on configurations, each `[N, F]`.
      slates: with the edges and configurations of the pass.
    """
    widths = slates.batch.rows.shape[-1], *(part.shape[-1] for part in static)
    (config_kernel, *kernels), bias = self.pre_0.blocks(widths)
    shared, *others = map(self.matmul, static, kernels)
    shared = sum(others, shared) + bias[None].astype(shared.dtype)
    x = slates.nodes(shared) + self.project(config_kernel, slates)
    summands: tuple[Nodes, ...] = (x.map(lambda v: leaky_relu(self.pre_1(leaky_relu(v)))),)
    for layer in range(self.num_gnns):
      update = functools.partial(ResModel.update, layer=layer)
      x = functools.reduce(operator.add, summands)
      with jax.named_scope(f"res_{layer}"):
        summands = x, (nn.remat(update) if self.remat else update)(self, x)
    return summands

  def update(self, x: Nodes, layer: int) -> Nodes:
    """The residual `[N, C, H]` of a round, from features `x [N, C, H]`.

    The published model sums `[config, x]` over neighbours and the node itself, normalises the sum
    and applies a linear layer. Here the kernel comes before the sum, because its results are
    narrower than its inputs; the bias comes after the sum.

    `sym` is `D^-1/2 (A + A^T + I) D^-1/2`, D the degree with the node itself. `asym` is the mean
    over users and the node itself plus the mean over operands and the node itself, with different
    kernels.
    """
    slates = x.slates
    directions = NORMALIZATIONS[self.adj_normalization]
    sizes = slates.batch.rows.shape[-1], self.hidden_dim  # of configurations and of x
    blocks, bias = self.update_0[layer].blocks(sizes * len(directions))
    means = []
    for config, node, direction in zip(blocks[::2], blocks[1::2], directions):
      message = x.map(lambda v: self.matmul(v, node))
      message = add_to_configurable(message, self.project(config, slates))
      by = 1 + degree(slates.batch.adjacency, direction, slates.num_nodes)
      if self.adj_normalization == "sym":
        by = jnp.sqrt(by)
        message = message.divide(by)
      means.append(neighbours(message, direction, self_loops=True).divide(by))
    row = bias[None]  # once, so that the gradient is summed once
    biased = lambda v: leaky_relu(v + row[None].astype(v.dtype))
    update = lambda v: leaky_relu(self.update_1[layer](biased(v)))
    return functools.reduce(operator.add, means).map(update)

  def matmul(self, x: Array, kernel: jax.Array) -> jax.Array:
    """`x [..., K] @ kernel [K, F]` in the dtype of the computation: `[..., F]`."""
    return layers.matmul(x, kernel, dtype=self.dtype)

  def project(self, kernel: jax.Array, slates: Slates[LayoutBatch]) -> Nodes:
    """Applies a block of a kernel to the configurations of a batch: `[N, C, H]`."""
    rows = Layouts(slates, _CONFIG_GAIN * slates.batch.rows)
    return rows.map(lambda values: self.matmul(values, kernel))

  def readout(self, summands: Sequence[Nodes]) -> jax.Array:
    """The readout `[G, C, P]` float32 of features, from their summands.

    Concatenates the mean over nodes, the normalised sum over nodes and the normalised sum over
    configurable nodes.
    """
    sum_of = lambda pool: functools.reduce(operator.add, map(pool, summands))
    total = sum_of(pooling.total)
    configurable = sum_of(functools.partial(pooling.total, configurable=True))
    mean = total / pooling.count(summands[0].slates)
    pooled = [mean, layers.l2_normalize(total), layers.l2_normalize(configurable)]
    return jnp.concatenate(pooled, axis=-1)


def add_to_configurable(x: Nodes, config: Nodes) -> Nodes:
  """Adds `config [N, C, F]`, zero on nodes that are not configurable, to `x [N, C, F]`."""
  _, varying = x.both()
  _, rows = config.both()
  return dataclasses.replace(x, varying=varying.at[: len(rows)].add(rows))


def inside_block(slates: Slates[LayoutBatch]) -> Slates:
  """The slates with messages and configurations inside their blocks only."""
  batch, by_hop = slates.batch, slates.batch.by_hop
  keep, last = jnp.asarray(batch.block_mask), len(by_hop.nodes) - 1
  at = lambda nodes: keep.at[nodes].get(mode="fill", fill_value=False)
  among_rows = among(by_hop.adjacency, at(slates.nodes_within(last)))
  among_nodes = among(batch.adjacency, keep)
  row_id = jnp.where(at(by_hop.nodes[0])[:, None], batch.row_id, ABSENT)
  by_hop = by_hop._replace(adjacency=among_rows)
  batch = batch._replace(adjacency=among_nodes, by_hop=by_hop, row_id=row_id)
  return dataclasses.replace(slates, batch=batch)


def among(adjacency: Adjacency, keep: jax.Array) -> Adjacency:
  """The edges with both ends in `keep [N]` bool."""
  # A branch makes XLA on CPU compute the tables once, instead of within every gather.
  inside = lambda: Adjacency(*(_among(table, keep) for table in adjacency))
  return jax.lax.cond(keep.all(), lambda: adjacency, inside)


def _among(table: Neighbours, keep: jax.Array) -> Neighbours:
  at = lambda node: keep.at[node].get(mode="fill", fill_value=False)
  select = lambda receiver, index: jnp.where(receiver[:, None] & at(index), index, ABSENT)
  return Neighbours(
    index=select(keep, table.index),
    # Receivers stay sorted.
    overflow_index=select(at(table.overflow_receiver), table.overflow_index),
    overflow_receiver=table.overflow_receiver,
  )


def merged(x: Nodes, others: Nodes) -> Nodes:
  """`x` on nodes of the sampled blocks, `others`, of the same hop, on all other nodes."""
  mask = jnp.asarray(x.slates.batch.block_mask)
  row_mask = mask.at[x.slates.nodes_within(x.hop)].get(mode="fill", fill_value=False)
  select = lambda mask, x, y: jnp.where(mask[:, None, None], x, y)
  shared = select(mask, x.shared, others.shared)
  varying = select(row_mask, x.varying, others.varying)
  return dataclasses.replace(x, shared=shared, varying=varying)
