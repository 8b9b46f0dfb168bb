"""The official layout model, on features that are kept once (`nn.nodes`), and its blocks.

The published model samples a block of consecutive nodes for each slate. In the mode
`dropout` messages and configurations stay inside the block. In the mode `backpropdropout`
training runs two passes over a graph: one inside the block, with gradients, and one on the
whole graph, without. The readout takes nodes of the block from the first pass and all
other nodes from the second.

Source: published baseline of TpuGraphs (arXiv 2308.13490), flags `dropout`, `keep_nodes`.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import operator
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.data import plan
from tpugraphs_jax.data.batching import (
  ABSENT,
  Adjacency,
  LayoutBatch,
  Neighbours,
  PreparedGraph,
  Slate,
)
from tpugraphs_jax.data.plan import ConfigSampler, Draw, Drawn
from tpugraphs_jax.nn import layers, pooling
from tpugraphs_jax.nn.aggregation import BOTH, degree, OPERANDS, USERS
from tpugraphs_jax.nn.layers import Dense, JoinedDense, leaky_relu, OpcodeEmbedding
from tpugraphs_jax.nn.linear import Layouts
from tpugraphs_jax.nn.nodes import neighbour_sum, Nodes, Slates
from tpugraphs_jax.nn.precision import DTYPES, PRECISIONS
from tpugraphs_jax.options import option
from tpugraphs_jax.rankers import base, scorer

# Networks that look only at a sampled block of nodes: never, always, in training.
DROPOUT_MODES = ("fullgraph", "dropout", "backpropdropout")
# Whose messages the sums of a round add up, by normalisation.
NORMALIZATIONS = {"sym": (BOTH,), "asym": (USERS, OPERANDS)}
# A network that always looks at blocks is judged on the mean of three (official).
_BLOCKS_IN_EVALUATION = 3
# Factor of configuration features (official).
_CONFIG_GAIN = 100.0


class BlockPrograms(base.Programs):
  """Whole programs, each slate with a block of at most `batch.keep_nodes` nodes."""

  def check(self) -> None:
    super().check()
    if self.settings.task == "segments":
      raise ValueError(
          "this model looks at sampled blocks of nodes, and segments take the place of blocks: set "
          "model.dropout to fullgraph, or train on whole graphs (variant full)")

  def draw(self, graphs: Sequence[PreparedGraph], sampler: ConfigSampler) -> Draw:
    """Draws slates and a block of each; see `Family.draw`."""
    def draw(number: int, rng: np.random.Generator, turn: int) -> Drawn:
      graph = graphs[number]

      def finish() -> Slate:
        ids, target = sampler(number, rng, turn)
        return Slate(graph, ids, target, number, self.draw_block(graph, rng))

      return Drawn(graph.sizes, finish)

    return draw

  def draw_block(self, graph: PreparedGraph, rng: np.random.Generator) -> tuple[int, int]:
    """One of the contiguous blocks of a program, `(first node, last node + 1)` (official)."""
    return plan.sample_block(len(graph.opcode), self.settings.batch.keep_nodes, rng)

  def scores(
      self, params: Any, graphs: Sequence[PreparedGraph], config_ids: Sequence[np.ndarray], *,
      progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores `[n]` float32; the mean over sampled blocks where the network always needs one."""
    if self.network.dropout != "dropout":
      return super().scores(params, graphs, config_ids, progress=progress)
    rngs = [scorer.rng_of(graph, self.settings.seed) for graph in graphs]
    runs = []
    for _ in range(_BLOCKS_IN_EVALUATION):
      blocks = [self.draw_block(graph, rng) for graph, rng in zip(graphs, rngs)]
      found = self.encoder.run(params, graphs, config_ids, blocks=blocks, progress=progress)
      runs.append([scores for _, scores in found])
    return [np.mean(scores, axis=0) for scores in zip(*runs)]


@base.LAYOUT_MODELS.register("ResModel")
class ResModel(base.Network):
  """The official layout model: residual convolutions, configurations at every layer.

  `dropout` says how the sampled block of nodes is used. `fullgraph` ignores the block.
  `dropout` passes messages and configurations inside the block only, in
  evaluation as well. `backpropdropout` does so in training, in a pass of its own beside
  the full one (see the module).
  """

  op_embed_dim: int = option(32, "width of the opcode embedding", least=1)
  hidden_dim: int = option(32, "width of node features", least=1)
  num_gnns: int = option(2, "rounds of message passing", least=1)
  adj_normalization: str = option(
      "sym", "edges of a round: both directions as one, or one after the other",
      one_of=tuple(NORMALIZATIONS))
  dropout: str = option(
      "backpropdropout",
      "where the sampled block of nodes counts: nowhere, everywhere, or in training",
      one_of=DROPOUT_MODES)
  opcodes: int = option(
      OPCODES,
      "rows of the table of opcode embeddings (official: largest opcode of the data + 1)", least=1)
  remat: bool = option(False, "recompute each round in the backward pass instead of storing it")
  dtype: str = option(
      "float32", "dtype of the computation; sums over neighbours and nodes are float32",
      one_of=DTYPES)
  precision: str = option("highest", "precision of matrix products", one_of=PRECISIONS)

  @property
  def family(self):
    return base.Programs if self.dropout == "fullgraph" else BlockPrograms

  @property
  def hops(self) -> int:
    return self.num_gnns

  @property
  def directions(self) -> tuple[str, ...]:
    """The neighbours that a round sums messages of, one sum for each entry."""
    return NORMALIZATIONS[self.adj_normalization]

  def setup(self):
    layer_range = range(self.num_gnns)
    dense = lambda: Dense(self.hidden_dim, dtype=self.dtype)
    self.op_embedding = OpcodeEmbedding(self.op_embed_dim, self.opcodes)
    self.pre_0, self.pre_1 = JoinedDense(self.hidden_dim), dense()
    self.update_0 = [JoinedDense(self.hidden_dim) for _ in layer_range]
    self.update_1 = [dense() for _ in layer_range]
    self.head = layers.MLP((self.hidden_dim, 1), use_bias=False)

  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32."""
    static = batch.graph.nodes["feat"], self.op_embedding(batch.graph)
    slates = Slates.of(batch)
    if self.dropout == "backpropdropout" and train:
      block = inside_block(slates)
      inside, outside = self.encode(static, block), self.encode(static, slates)
      return self.readout([merged(x, jax.lax.stop_gradient(other))
                           for x, other in zip(inside, outside)])
    return self.readout(self.encode(
        static, inside_block(slates) if self.dropout == "dropout" else slates))

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    return self.head(readout)[..., 0]

  def encode(self, static: Sequence[jax.Array], slates: Slates) -> Sequence[Nodes]:
    """Node features after all rounds, as summands: their sum is the features.

    The summands are the features before the last round `[rows of hops 0..h-1, C, H]` and
    the change that the last round makes `[rows of hops 0..h, C, H]`. The readout is made
    of sums over nodes. It sums each summand over nodes and adds up the results, which are
    small: an addition of two tensors of the second shape, by far the largest, is spared.

    Args:
      static: features of nodes that no configuration changes, each `[N, F]`.
      slates: whose edges and configurations count.
    """
    (config_kernel, *kernels), bias = self.pre_0(
        (slates.batch.rows.shape[-1], *(part.shape[-1] for part in static)))
    shared = sum(map(self.matmul, static, kernels))
    shared += bias.astype(shared.dtype)
    x = slates.nodes(shared) + self.project(config_kernel, slates)
    summands = (x.map(lambda v: leaky_relu(self.pre_1(leaky_relu(v)))),)
    for layer in range(self.num_gnns):
      update = functools.partial(ResModel.update, layer=layer)
      x = functools.reduce(operator.add, summands)
      with jax.named_scope(f"res_{layer}"):
        summands = x, (nn.remat(update) if self.remat else update)(self, x)
    return summands

  def update(self, x: Nodes, layer: int) -> Nodes:
    """The change `[N, C, H]` that a round makes to features `x [N, C, H]`.

    The published model sums `[config, x]` over neighbours and the node itself, normalises
    the sum and applies a linear layer. Here the layer comes before the sum: it is linear,
    and its results are narrower than its inputs. The bias comes after the sum.

    `sym` is `D^-1/2 (A + A^T + I) D^-1/2`, with D the degree, itself included. `asym` is
    the mean over users and the node itself plus the mean over operands and the node
    itself, each with its own weights.
    """
    slates = x.slates
    blocks, bias = self.kernel(layer, slates.batch)
    means = []
    for config, own, direction in zip(blocks[::2], blocks[1::2], self.directions):
      message = add_to_configurable(
          x.map(lambda v: self.matmul(v, own)), self.project(config, slates))
      by = self.divisor(degree(slates.adjacency, direction, slates.num_nodes))
      if self.adj_normalization == "sym":
        message = message.divide(by)
      means.append(neighbour_sum(message, direction, own=True).divide(by))
    total = functools.reduce(operator.add, means).add_bias(bias).complete()
    return total.map(lambda v: leaky_relu(self.update_1[layer](leaky_relu(v))))

  def divisor(self, neighbours: jax.Array) -> jax.Array:
    """The divisor of each node by normalisation, from its number of `neighbours [N]`: `[N]`."""
    count = 1 + neighbours
    return jnp.sqrt(count) if self.adj_normalization == "sym" else count

  def kernel(self, layer: int, batch: LayoutBatch) -> tuple[list[jax.Array], jax.Array]:
    """Blocks of a round's kernel, `[config, x]` per direction, and the bias `[1, H]`."""
    sizes = batch.rows.shape[-1], self.hidden_dim
    return self.update_0[layer](sizes * len(self.directions))

  def matmul(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x [..., K] @ kernel [K, F]` in the dtype of the computation: `[..., F]`."""
    return layers.matmul(x, kernel, dtype=self.dtype)

  def project(self, kernel: jax.Array, slates: Slates) -> Nodes:
    """Configurations of a batch through a block of a kernel, `[N, C, H]`."""
    rows = Layouts(slates, _CONFIG_GAIN * slates.batch.rows)
    return rows.map(lambda values: self.matmul(values, kernel))

  def readout(self, summands: Sequence[Nodes]) -> jax.Array:
    """The readout `[G, C, P]` float32 of features that are given by their summands.

    Concatenates the mean over nodes, the direction of the sum over nodes and the
    direction of the sum over configurable nodes.
    """
    total = sum(map(pooling.total, summands))
    configurable = sum(pooling.total(x, configurable=True) for x in summands)
    mean = total / pooling.count(summands[0].slates)
    pooled = [mean, layers.l2_normalize(total), layers.l2_normalize(configurable)]
    return jnp.concatenate(pooled, axis=-1)


def add_to_configurable(x: Nodes, config: Nodes) -> Nodes:
  """Adds `config [N, C, F]`, zero on nodes that are not configurable, to `x [N, C, F]`."""
  rows = config.varying
  return dataclasses.replace(x, varying=x.varying.at[: len(rows)].add(rows))


def inside_block(slates: Slates) -> Slates:
  """The slates with messages and configurations among the nodes of their blocks alone."""
  batch: LayoutBatch = slates.batch
  by_hop = slates.by_hop
  keep, last = jnp.asarray(batch.block_mask), len(by_hop.nodes) - 1
  at = lambda nodes: keep.at[nodes].get(mode="fill", fill_value=False)
  among_rows = among(by_hop.adjacency, at(slates.nodes_within(last)))
  return dataclasses.replace(
      slates, adjacency=among(slates.adjacency, keep),
      by_hop=by_hop._replace(adjacency=among_rows),
      batch=batch._replace(row_id=jnp.where(at(by_hop.nodes[0])[:, None], batch.row_id, ABSENT)))


def among(adjacency: Adjacency, keep: jax.Array) -> Adjacency:
  """The edges with both ends among the nodes that `keep [N]` bool holds."""
  # A branch, so that XLA on CPU computes the tables once, and not within every gather.
  return jax.lax.cond(
      keep.all(), lambda: adjacency,
      lambda: Adjacency(*(_among(table, keep) for table in adjacency)))


def _among(table: Neighbours, keep: jax.Array) -> Neighbours:
  kept = lambda node: keep.at[node].get(mode="fill", fill_value=False)
  select = lambda receiver, index: jnp.where(receiver[:, None] & kept(index), index, ABSENT)
  return Neighbours(
      index=select(keep, table.index),
      # Receivers stay as they are: sorted.
      overflow_index=select(kept(table.overflow_receiver), table.overflow_index),
      overflow_receiver=table.overflow_receiver)


def merged(x: Nodes, others: Nodes) -> Nodes:
  """`x` on the nodes of the sampled blocks, elsewhere and in padding `others` of the same hop."""
  keep = jnp.asarray(x.slates.batch.block_mask)
  kept = keep.at[x.slates.nodes_within(x.hop)].get(mode="fill", fill_value=False)
  select = lambda keep, x, other: jnp.where(keep[:, None, None], x, other)
  return dataclasses.replace(
      x, shared=select(keep, x.shared, others.shared),
      varying=select(kept, x.varying, others.varying))
