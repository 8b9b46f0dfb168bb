"""The official layout model, on features that are split by reach."""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.batch import LayoutBatch
from tpugraphs_jax.models import layers, layout_features, pooling
from tpugraphs_jax.models import message_passing as mp
from tpugraphs_jax.models.layers import Dense, JoinedDense, OpcodeEmbedding, leaky_relu
from tpugraphs_jax.models.message_passing import SplitNodes

DROPOUT_MODES = ("fullgraph", "dropout", "backpropdropout")
NORMALIZATIONS = ("sym", "asym")


class ResModel(nn.Module):
  """The official layout model: residual convolutions, configurations at every layer.

  `dropout` says what training does with the sampled block of nodes:
  `fullgraph` ignores it; `dropout` passes messages and configurations inside
  the block only; `backpropdropout` does so in a second pass, takes that pass
  for nodes of the block, and a pass over the full graph without gradient for
  the others. Source: published baseline of TpuGraphs (arXiv 2308.13490).

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
  def hops(self) -> int:
    """Rounds of message passing: how far a batch's `Reach` must go."""
    return self.num_gnns

  def setup(self):
    layer_range = range(self.num_gnns)
    dense = lambda: Dense(self.hidden_dim, dtype=self.dtype, precision=self.precision)
    self.op_embedding = OpcodeEmbedding(self.op_embed_dim)
    self.pre_0, self.pre_1 = JoinedDense(self.hidden_dim), dense()
    self.update_0 = [JoinedDense(self.hidden_dim) for _ in layer_range]
    self.update_1 = [dense() for _ in layer_range]
    self.head = layers.MLP((self.hidden_dim, 1), use_bias=False, precision=self.precision)

  def __call__(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """Scores `[G, C]` float32."""
    return self.score(self.embed(batch, train=train))

  def score(self, pooled: jax.Array) -> jax.Array:
    """Scores `[...]` of readouts `[..., P]`."""
    return self.head(pooled)[..., 0]

  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32.

    `dropout` models look at the block in evaluation as well (averaged over
    blocks there); `backpropdropout` models only in training.
    """
    static = batch.graph.nodes["feat"], self.op_embedding(batch.graph)
    if self.dropout == "fullgraph" or (self.dropout == "backpropdropout" and not train):
      x = self.encode(static, batch)
      return self.readout(_sum_of_nodes(x, batch), x, batch)
    block = layout_features.inside_block(batch)
    x = self.encode(static, block)
    if self.dropout == "dropout":
      return self.readout(_sum_of_nodes(x, batch), x, block)
    others = _sum_of_nodes(self.encode(static, batch), batch, ~jnp.asarray(batch.block_mask))
    total = _sum_of_nodes(x, batch, batch.block_mask) + jax.lax.stop_gradient(others)
    return self.readout(total, x, block)

  def encode(self, static: Sequence[jax.Array], batch: LayoutBatch) -> Sequence[SplitNodes]:
    """Node features after message passing, as the two summands of the last residual.

    Readouts are sums: that of each summand spares an addition on the tensor that is by
    far the largest. `static` are features of nodes, each `[N, ...]`.
    """
    config_features = batch.rows.shape[-1]
    (config_kernel, *kernels), bias = self.pre_0(
        (config_features, *(part.shape[-1] for part in static)))
    project = lambda kernel: layout_features.config_rows(
        self.matmul(self.config_gain * batch.rows, kernel), batch)
    shared = sum(map(self.matmul, static, kernels))
    shared += bias.astype(shared.dtype)
    x = layout_features.start(shared, project(config_kernel), batch)
    x = jax.tree.map(lambda v: leaky_relu(self.pre_1(leaky_relu(v))), x)

    def update(self, x: SplitNodes, layer: int) -> SplitNodes:
      sides = 1 if self.adj_normalization == "sym" else 2
      joined = self.update_0[layer]((config_features, self.hidden_dim) * sides)
      total = self.propagate(x, joined, project, batch)
      return jax.tree.map(lambda v: leaky_relu(self.update_1[layer](leaky_relu(v))), total)

    if self.remat:
      update = nn.remat(update, static_argnums=2)
    summands = (x,)
    for layer in range(self.num_gnns):
      with jax.named_scope(f"res_{layer}"):
        x = functools.reduce(lambda x, change: _residual(x, change, batch), summands)
        summands = x, update(self, x, layer)
    return summands

  def matmul(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return layers.matmul(x, kernel, dtype=self.dtype, precision=self.precision)

  def propagate(self, x, blocks_and_bias, project, batch) -> SplitNodes:
    """`N concat(c, x) W + b`, with W applied first: it narrows what edges carry."""
    blocks, bias = blocks_and_bias
    narrow = lambda kernel: lambda v: self.matmul(v, kernel)
    parts = [
        layout_features.add_to_configurable(jax.tree.map(narrow(own), x), project(config))
        for config, own in zip(blocks[::2], blocks[1::2])
    ]
    if self.adj_normalization == "sym":
      total = _symmetric_mean(parts[0], batch)
    else:
      total = jax.tree.map(
          jnp.add, _mean_with_self(parts[0], batch, mp.USERS),
          _mean_with_self(parts[1], batch, mp.OPERANDS))
    return jax.tree.map(lambda v: v + bias[None].astype(v.dtype), total)

  def readout(
      self, total: jax.Array, summands: Sequence[SplitNodes], batch: LayoutBatch
  ) -> jax.Array:
    """Mean and direction of the `total` over nodes, direction of that over configurable ones.

    `[G, C, P]` float32, from `total [G, C, F]` and the features of nodes as `summands`.
    """
    mean = total / jnp.maximum(pooling.real_nodes(batch.graph), 1)[:, None, None]
    chosen = layout_features.configurable_selection(batch)
    configurable = sum(pooling.pool_sum(x.varying[: chosen.shape[1]], chosen) for x in summands)
    pooled = [mean, layers.l2_normalize(total), layers.l2_normalize(configurable)]
    return jnp.concatenate(pooled, axis=-1)


def _residual(x: SplitNodes, change: SplitNodes, batch: LayoutBatch) -> SplitNodes:
  return jax.tree.map(jnp.add, mp.grow(x, batch.reach, change.hop), change)


def _sum_of_nodes(
    summands: Sequence[SplitNodes], batch: LayoutBatch, keep: jax.Array | None = None
) -> jax.Array:
  """Sum over the nodes of each graph, those with `keep [N]` alone: `[G, C, F]` float32."""
  weight = None if keep is None else jnp.asarray(keep, jnp.float32)
  return sum(
      pooling.split_pool_sum(x, pooling.split_selection(batch.graph, batch.reach, x.hop, weight))
      for x in summands)


def _mean_with_self(x: SplitNodes, batch: LayoutBatch, direction: str) -> SplitNodes:
  """Mean over a node's neighbours on one side and the node itself."""
  total = mp.split_neighbour_sum(x, batch.adjacency, batch.reach, direction, own=True)
  count = 1 + mp.degree(batch.adjacency, direction, len(x.shared))
  return mp.divide_nodes(total, count, batch.reach)


def _symmetric_mean(x: SplitNodes, batch: LayoutBatch) -> SplitNodes:
  """`D^-1/2 (A + A^T + I) D^-1/2 x` with D the degree, itself included."""
  root = jnp.sqrt(1 + mp.degree(batch.adjacency, mp.BOTH, len(x.shared)))
  x = mp.divide_nodes(x, root, batch.reach)
  total = mp.split_neighbour_sum(x, batch.adjacency, batch.reach, mp.BOTH, own=True)
  return mp.divide_nodes(total, root, batch.reach)
