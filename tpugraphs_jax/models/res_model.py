"""The official layout model, on features that are split by by_hop."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
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
    """Rounds of message passing: how far a batch's `NodesByHop` must go."""
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
      x = self.encode(static, batch, self.num_gnns)
      return self.readout(_sum_of_nodes(x, batch), x, batch)
    block = layout_features.inside_block(batch)
    if self.dropout == "dropout":
      x = self.encode(static, block, self.num_gnns)
      return self.readout(_sum_of_nodes(x, batch), x, block)
    return self.embed_block(static, batch, block)

  def embed_block(
      self, static: Sequence[jax.Array], batch: LayoutBatch, block: LayoutBatch
  ) -> jax.Array:
    """`embed` of `backpropdropout` in training.

    What a node of the block is in the full pass, or another node in the block's pass,
    counts only for what neighbours receive: the last round, by far the largest, is
    computed once, each node receiving in the pass that it is read out from.
    """
    inside, outside = (
        self.encode(static, part, self.num_gnns - 1) for part in (block, batch))
    if self.num_gnns:
      inside, outside = (_residual(x, batch) for x in (inside, outside))
      edges = layout_features.last_round(batch, block, inside.hop)
      change = self.update(self.num_gnns - 1, [(inside, block), (outside, batch)], edges)
      inside, outside = (inside, change), (outside, change)
    # Chosen before they are summed, so that what both hold, the last round, is read once.
    read = [mp.where(jnp.asarray(batch.block_mask), x, jax.lax.stop_gradient(other), batch.by_hop)
            for x, other in zip(inside, outside)]
    return self.readout(_sum_of_nodes(read, batch), inside, block)

  def encode(
      self, static: Sequence[jax.Array], batch: LayoutBatch, rounds: int
  ) -> Sequence[SplitNodes]:
    """Node features after the first `rounds`, as the two summands of the last residual.

    Readouts are sums: that of each summand spares an addition on the tensor that is by
    far the largest. `static` are features of nodes, each `[N, ...]`.
    """
    (config_kernel, *kernels), bias = self.pre_0(
        (batch.rows.shape[-1], *(part.shape[-1] for part in static)))
    shared = sum(map(self.matmul, static, kernels))
    shared += bias.astype(shared.dtype)
    x = layout_features.start(shared, self.project(config_kernel, batch), batch)
    x = jax.tree.map(lambda v: leaky_relu(self.pre_1(leaky_relu(v))), x)
    summands = (x,)
    for layer in range(rounds):
      x = _residual(summands, batch)
      summands = x, self.update(layer, [(x, batch)], batch)
    return summands

  def update(
      self, layer: int, passes: Sequence[tuple[SplitNodes, LayoutBatch]], edges: LayoutBatch
  ) -> SplitNodes:
    """What a round adds: messages along `edges`, through a layer.

    `passes` are the features that are sent, with the batch of their pass: one, or two
    if `edges` are those of `layout_features.last_round`.
    """
    def apply(self, passes, edges):
      total = self.propagate(layer, passes, edges)
      return jax.tree.map(lambda v: leaky_relu(self.update_1[layer](leaky_relu(v))), total)

    with jax.named_scope(f"res_{layer}"):
      return (nn.remat(apply) if self.remat else apply)(self, passes, edges)

  def matmul(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return layers.matmul(x, kernel, dtype=self.dtype, precision=self.precision)

  def project(self, kernel: jax.Array, batch: LayoutBatch) -> jax.Array:
    """Configurations of a batch through a block of a kernel, `[hop 0, C, H]`."""
    rows = self.matmul(self.config_gain * batch.rows, kernel)
    return layout_features.config_rows(rows, batch)

  def propagate(self, layer: int, passes, edges: LayoutBatch) -> SplitNodes:
    """`N concat(c, x) W + b`, with W applied first: it narrows what edges carry."""
    sides = 1 if self.adj_normalization == "sym" else 2
    blocks, bias = self.update_0[layer]((edges.rows.shape[-1], self.hidden_dim) * sides)

    def sent(config: jax.Array, own: jax.Array):
      return [
          (layout_features.add_to_configurable(
              jax.tree.map(lambda v: self.matmul(v, own), x), self.project(config, batch)), batch)
          for x, batch in passes]

    if self.adj_normalization == "sym":
      total = _symmetric_mean(sent(*blocks), edges)
    else:
      total = jax.tree.map(
          jnp.add, _mean_with_self(sent(*blocks[:2]), edges, mp.USERS),
          _mean_with_self(sent(*blocks[2:]), edges, mp.OPERANDS))
    shared = total.shared + bias[None].astype(total.shared.dtype)
    return mp.join(dataclasses.replace(total, shared=shared), edges.by_hop)

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


def _residual(summands: Sequence[SplitNodes], batch: LayoutBatch) -> SplitNodes:
  """The sum of features and what the last round added to them, if there was one."""
  return functools.reduce(
      lambda x, change: jax.tree.map(jnp.add, mp.grow(x, batch.by_hop, change.hop), change),
      summands)


def _sum_of_nodes(summands: Sequence[SplitNodes], batch: LayoutBatch) -> jax.Array:
  """Sum over the nodes of each graph, `[G, C, F]` float32."""
  return sum(
      pooling.split_pool_sum(x, pooling.split_selection(batch.graph, batch.by_hop, x.hop))
      for x in summands)


def _mean_with_self(sent, edges: LayoutBatch, direction: str) -> SplitNodes:
  """Mean over a node's neighbours on one side and the node itself, before `mp.join`."""
  total = _sum_with_self([x for x, _ in sent], edges, direction)
  return mp.divide_nodes(total, 1 + _degree(edges, direction), edges.by_hop)


def _symmetric_mean(sent, edges: LayoutBatch) -> SplitNodes:
  """`D^-1/2 (A + A^T + I) D^-1/2 x` with D the degree, itself included, before `mp.join`."""
  root = lambda batch: jnp.sqrt(1 + _degree(batch, mp.BOTH))
  sent = [mp.divide_nodes(x, root(batch), batch.by_hop) for x, batch in sent]
  return mp.divide_nodes(_sum_with_self(sent, edges, mp.BOTH), root(edges), edges.by_hop)


def _sum_with_self(sent: Sequence[SplitNodes], edges: LayoutBatch, direction: str) -> SplitNodes:
  return mp.split_neighbour_sum(
      sent[0], edges.adjacency, edges.by_hop, direction, own=True,
      others=sent[1] if len(sent) > 1 else None)


def _degree(batch: LayoutBatch, direction: str) -> jax.Array:
  return mp.degree(batch.adjacency, direction, len(batch.block_mask))
