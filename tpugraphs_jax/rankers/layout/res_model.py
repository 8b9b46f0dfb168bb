"""The official layout model, on features that are split by hop (`split_nodes`).

Source: published baseline of TpuGraphs (arXiv 2308.13490).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import operator
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.data.batching import LayoutBatch
from tpugraphs_jax.nn import layers, layout_features, pooling
from tpugraphs_jax.nn.aggregation import BOTH, OPERANDS, USERS, degree
from tpugraphs_jax.nn.layers import Dense, JoinedDense, OpcodeEmbedding, leaky_relu
from tpugraphs_jax.nn.split_nodes import PartialSum, SplitNodes, divide_nodes, grow
from tpugraphs_jax.nn.split_nodes import split_neighbour_sum
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.layout import block_training
from tpugraphs_jax.rankers.layout.blocks import BlockPrograms
from tpugraphs_jax.rankers.whole import Programs

# When the network looks at a sampled block of nodes alone: never, always, in training.
DROPOUT_MODES = ("fullgraph", "dropout", "backpropdropout")
# Whose messages the sums of a round add up, by normalisation.
NORMALIZATIONS = {"sym": (BOTH,), "asym": (USERS, OPERANDS)}


@base.LAYOUT_MODELS.register("ResModel")
class ResModel(base.Network):
  """The official layout model: residual convolutions, configurations at every layer.

  `dropout` says how the sampled block of nodes is used. `fullgraph` ignores the block.
  `dropout` passes messages and configurations inside the block only, in
  evaluation as well. `backpropdropout` does so in training, in a second pass beside the
  full one (`block_training`).

  Attributes:
    op_embed_dim: width of the opcode embedding.
    hidden_dim: width of node features.
    num_gnns: rounds of message passing.
    adj_normalization: one of `NORMALIZATIONS`.
    dropout: one of `DROPOUT_MODES`.
    config_gain: factor of configuration features (official: 100).
    remat: recompute each round in the backward pass instead of storing it.
    dtype: of the computation; sums over neighbours and nodes are float32.
    precision: of matrix products.
  """

  op_embed_dim: int = 32
  hidden_dim: int = 32
  num_gnns: int = 2
  adj_normalization: str = "sym"
  dropout: str = "backpropdropout"
  config_gain: float = 100.0
  remat: bool = False
  dtype: Any = None
  precision: Any = None

  def __post_init__(self):
    if self.dropout not in DROPOUT_MODES:
      raise ValueError(f"dropout is {self.dropout!r}, expected one of {', '.join(DROPOUT_MODES)}")
    if self.adj_normalization not in NORMALIZATIONS:
      raise ValueError(f"adj_normalization is {self.adj_normalization!r}, expected one of "
                       f"{', '.join(NORMALIZATIONS)}")
    super().__post_init__()

  @property
  def family(self):
    return Programs if self.dropout == "fullgraph" else BlockPrograms

  @property
  def hops(self) -> int:
    return self.num_gnns

  @property
  def directions(self) -> tuple[str, ...]:
    """The directions that messages of a round come from, one sum each."""
    return NORMALIZATIONS[self.adj_normalization]

  def setup(self):
    layer_range = range(self.num_gnns)
    dense = lambda: Dense(self.hidden_dim, dtype=self.dtype, precision=self.precision)
    self.op_embedding = OpcodeEmbedding(self.op_embed_dim)
    self.pre_0, self.pre_1 = JoinedDense(self.hidden_dim), dense()
    self.update_0 = [JoinedDense(self.hidden_dim) for _ in layer_range]
    self.update_1 = [dense() for _ in layer_range]
    self.head = layers.MLP((self.hidden_dim, 1), use_bias=False, precision=self.precision)

  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32."""
    static = batch.graph.nodes["feat"], self.op_embedding(batch.graph)
    if self.dropout == "backpropdropout" and train:
      return block_training.embed(self, static, batch)
    seen = block_training.inside_block(batch) if self.dropout == "dropout" else batch
    return self.readout(self.encode(static, seen, self.num_gnns), seen)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    return self.head(readout)[..., 0]

  def encode(
      self, static: Sequence[jax.Array], batch: LayoutBatch, rounds: int
  ) -> Sequence[SplitNodes]:
    """Node features after the first `rounds`, as summands: their sum is the features.

    The summands are the features before the last round `[rows of hops 0..h-1, C, H]` and
    the change that the last round makes `[rows of hops 0..h, C, H]`. The readout is made
    of sums over nodes. It sums each summand over nodes and adds up the results, which are
    small: an addition of two tensors of the second shape, by far the largest, is spared.

    Args:
      static: features of nodes that no configuration changes, each `[N, F]`.
      batch: whose edges and configurations count.
      rounds: at most `num_gnns`.
    """
    (config_kernel, *kernels), bias = self.pre_0(
        (batch.rows.shape[-1], *(part.shape[-1] for part in static)))
    shared = sum(map(self.matmul, static, kernels))
    shared += bias.astype(shared.dtype)
    x = layout_features.start(shared, self.project(config_kernel, batch), batch)
    x = jax.tree.map(lambda v: leaky_relu(self.pre_1(leaky_relu(v))), x)
    summands = (x,)
    for layer in range(rounds):
      x = self.residual(summands, batch)
      summands = x, self.update(layer, x, batch)
    return summands

  def residual(self, summands: Sequence[SplitNodes], batch: LayoutBatch) -> SplitNodes:
    """The sum of `summands`, `[N, 1, H]` and `[rows, C, H]`, each in the rows of the last."""
    return functools.reduce(
        lambda x, change: jax.tree.map(jnp.add, grow(x, batch.by_hop, change.hop), change),
        summands)

  def update(self, layer: int, x: SplitNodes, batch: LayoutBatch) -> SplitNodes:
    """The change that a round makes to features `x`, `[N, 1, H]` and `[rows, C, H]`."""
    def hear(self, x, batch):
      heard = [
          split_neighbour_sum(message, batch.adjacency, batch.by_hop, direction, own=True)
          for message, direction in zip(self.messages(layer, x, batch), self.directions)]
      degrees = [_degree(batch, direction) for direction in self.directions]
      return self.receive(layer, heard, degrees, batch)

    return self.round(layer, hear, x, batch)

  def round(self, layer: int, hear: Callable[..., SplitNodes], *arguments: Any) -> SplitNodes:
    """`hear(self, *arguments)`; `remat` decides whether its intermediates are stored."""
    with jax.named_scope(f"res_{layer}"):
      return (nn.remat(hear) if self.remat else hear)(self, *arguments)

  def messages(self, layer: int, x: SplitNodes, batch: LayoutBatch) -> list[SplitNodes]:
    """Messages of nodes in each of `directions`: `[config, x]` through a linear layer.

    The published model sums `[config, x]` first. Here the layer comes before the sum: it
    is linear, and its results are narrower than its inputs. The bias comes after the sum.
    """
    blocks, _ = self.kernel(layer, batch)
    sent = [
        layout_features.add_to_configurable(
            jax.tree.map(lambda v, own=own: self.matmul(v, own), x), self.project(config, batch))
        for config, own in zip(blocks[::2], blocks[1::2])]
    if self.adj_normalization == "sym":
      by = self.divisor(_degree(batch, BOTH))
      sent = [divide_nodes(message, by, batch.by_hop) for message in sent]
    return sent

  def receive(
      self, layer: int, heard: Sequence[PartialSum], degrees: Sequence[jax.Array],
      batch: LayoutBatch,
  ) -> SplitNodes:
    """The change that a round makes, from the sums `heard` in each of `directions`.

    `sym` is `D^-1/2 (A + A^T + I) D^-1/2`, with D the degree, itself included: senders
    are divided in `messages`, receivers here. `asym` is the mean over users and the node
    itself plus the mean over operands and the node itself, each with its own weights.

    Args:
      layer: number of the round.
      heard: sums of messages, the node's own included.
      degrees: number of neighbours of each receiver, `[N]` float32 per direction.
      batch: of the receivers.
    """
    means = [total.divide(self.divisor(count), batch.by_hop)
             for total, count in zip(heard, degrees)]
    _, bias = self.kernel(layer, batch)
    total = functools.reduce(operator.add, means).add_bias(bias).complete(batch.by_hop)
    return jax.tree.map(lambda v: leaky_relu(self.update_1[layer](leaky_relu(v))), total)

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
    return layers.matmul(x, kernel, dtype=self.dtype, precision=self.precision)

  def project(self, kernel: jax.Array, batch: LayoutBatch) -> jax.Array:
    """Configurations of a batch through a block of a kernel, `[hop 0, C, H]`."""
    rows = self.matmul(self.config_gain * batch.rows, kernel)
    return layout_features.config_rows(rows, batch)

  def readout(self, summands: Sequence[SplitNodes], batch: LayoutBatch) -> jax.Array:
    """The readout `[G, C, P]` float32 of features that are given by their summands.

    Concatenates the mean over nodes, the direction of the sum over nodes and the
    direction of the sum over configurable nodes.
    """
    total = sum(
        pooling.split_pool_sum(x, pooling.split_selection(batch.graph, batch.by_hop, x.hop))
        for x in summands)
    mean = total / jnp.maximum(pooling.real_nodes(batch.graph), 1)[:, None, None]
    chosen = layout_features.configurable_selection(batch)
    configurable = sum(pooling.pool_sum(x.varying[: chosen.shape[1]], chosen) for x in summands)
    pooled = [mean, layers.l2_normalize(total), layers.l2_normalize(configurable)]
    return jnp.concatenate(pooled, axis=-1)


def _degree(batch: LayoutBatch, direction: str) -> jax.Array:
  return degree(batch.adjacency, direction, len(batch.block_mask))
