"""The official layout model, on features that are split by reach."""

from __future__ import annotations

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
    static = jnp.concatenate(
        [batch.graph.nodes["feat"], self.op_embedding(batch.graph)], axis=-1)
    everything = jnp.ones(len(static))
    block = jnp.asarray(batch.block_mask, jnp.float32)
    if self.dropout == "fullgraph" or (self.dropout == "backpropdropout" and not train):
      return self.readout(self.encode(static, batch, everything), batch, everything)
    x = self.encode(static, batch, block)
    if self.dropout == "backpropdropout":
      full = jax.lax.stop_gradient(self.encode(static, batch, everything))
      inside = mp.split_per_node(block, batch.reach, x.hop)
      x = jax.tree.map(lambda i, new, old: jnp.where(i > 0, new, old), inside, x, full)
    return self.readout(x, batch, block)

  def encode(self, static, batch: LayoutBatch, keep: jax.Array) -> SplitNodes:
    """Node features after message passing among the nodes with `keep [N]` = 1."""
    config_features = batch.rows.shape[-1]
    (config_kernel, static_kernel), bias = self.pre_0((config_features, static.shape[-1]))
    own_keep = keep.astype(self.dtype or keep.dtype).at[batch.reach.tiers[0]].get(
        mode="fill", fill_value=0)[:, None, None]
    project = lambda kernel: own_keep * layout_features.config_rows(
        self.matmul(self.config_gain * batch.rows, kernel), batch)
    shared = self.matmul(static, static_kernel)
    shared += bias.astype(shared.dtype)
    x = layout_features.start(shared, project(config_kernel), batch)
    x = jax.tree.map(lambda v: leaky_relu(self.pre_1(leaky_relu(v))), x)

    def round_(self, x: SplitNodes, layer: int) -> SplitNodes:
      sides = 1 if self.adj_normalization == "sym" else 2
      joined = self.update_0[layer]((config_features, self.hidden_dim) * sides)
      update = self.propagate(x, joined, project, batch, keep)
      update = jax.tree.map(lambda v: leaky_relu(self.update_1[layer](leaky_relu(v))), update)
      return jax.tree.map(jnp.add, mp.grow(x, batch.reach, update.hop), update)

    if self.remat:
      round_ = nn.remat(round_, static_argnums=2)
    for layer in range(self.num_gnns):
      with jax.named_scope(f"res_{layer}"):
        x = round_(self, x, layer)
    return x

  def matmul(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return layers.matmul(x, kernel, dtype=self.dtype, precision=self.precision)

  def propagate(self, x, blocks_and_bias, project, batch, keep) -> SplitNodes:
    """`N concat(c, x) W + b`, with W applied first: it narrows what edges carry."""
    blocks, bias = blocks_and_bias
    narrow = lambda kernel: lambda v: self.matmul(v, kernel)
    parts = [
        layout_features.add_to_configurable(jax.tree.map(narrow(own), x), project(config))
        for config, own in zip(blocks[::2], blocks[1::2])
    ]
    if self.adj_normalization == "sym":
      total = _symmetric_mean(parts[0], batch, keep)
    else:
      total = jax.tree.map(
          jnp.add, _mean_with_self(parts[0], batch, keep, mp.USERS),
          _mean_with_self(parts[1], batch, keep, mp.OPERANDS))
    return jax.tree.map(lambda v: v + bias[None].astype(v.dtype), total)

  def readout(self, x: SplitNodes, batch: LayoutBatch, keep: jax.Array) -> jax.Array:
    """Pools over all nodes and over the configurable nodes that were kept."""
    graph, reach = batch.graph, batch.reach
    total = pooling.split_pool_sum(x, pooling.split_selection(graph, reach, x.hop))
    mean = total / jnp.maximum(pooling.real_nodes(graph), 1)[:, None, None]
    chosen = layout_features.configurable_selection(batch, keep)
    configurable = pooling.pool_sum(x.varying[: chosen.shape[1]], chosen)
    pooled = [mean, layers.l2_normalize(total), layers.l2_normalize(configurable)]
    return jnp.concatenate(pooled, axis=-1)


def _masked_sum(x: SplitNodes, batch: LayoutBatch, keep, direction: str) -> SplitNodes:
  """Neighbour sum over edges with both ends kept."""
  kept = mp.scale_nodes(x, keep, batch.reach)
  total = mp.split_neighbour_sum(kept, batch.adjacency, batch.reach, direction)
  return mp.scale_nodes(total, keep, batch.reach)


def _mean_with_self(x: SplitNodes, batch: LayoutBatch, keep, direction: str) -> SplitNodes:
  """Mean over a node's neighbours on one side and the node itself."""
  total = _masked_sum(x, batch, keep, direction)
  count = 1 + keep * mp.degree(batch.adjacency, direction, keep)
  own = mp.grow(x, batch.reach, total.hop)
  return mp.scale_nodes(jax.tree.map(jnp.add, total, own), 1 / count, batch.reach)


def _symmetric_mean(x: SplitNodes, batch: LayoutBatch, keep) -> SplitNodes:
  """`D^-1/2 (A + A^T + I) D^-1/2 x` with D the degree, itself included."""
  root = jax.lax.rsqrt(1 + keep * mp.degree(batch.adjacency, mp.BOTH, keep))
  x = mp.scale_nodes(x, root, batch.reach)
  total = _masked_sum(x, batch, keep, mp.BOTH)
  own = mp.grow(x, batch.reach, total.hop)
  return mp.scale_nodes(jax.tree.map(jnp.add, total, own), root, batch.reach)
