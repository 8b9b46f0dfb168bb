"""The official tile rankers: scores `[G, C]` of tile configurations of kernels.

Every model starts from the opcode embedding and the node features. With early
join the configuration of a kernel is a feature of each of its nodes; with late
join the configuration meets the pooled graph. Larger scores mean slower.

Source: the published TensorFlow baseline of TpuGraphs (arXiv 2308.13490,
section 4); defaults are those of its flags.
"""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.batch import TileBatch
from tpugraphs_jax.models import layers, pooling
from tpugraphs_jax.models import message_passing as mp
from tpugraphs_jax.models.layers import Dense, JoinedDense, MLP, OpcodeEmbedding, leaky_relu

REDUCTIONS = ("sum", "mean")  # over the nodes of a kernel


def _row_normalised(y: jax.Array, batch: TileBatch) -> tuple[jax.Array, jax.Array]:
  """`M y` and `M^T y` for M = A + I with rows divided by their sums.

  Row v of A marks the users of v, so that M averages over a node's users and
  itself, and M^T spreads each node's average share back over its operands.
  """
  users = mp.degree(batch.adjacency, mp.USERS, len(y))
  scale = (1 / (users + 1)).astype(y.dtype).reshape((-1,) + (1,) * (y.ndim - 1))
  scaled = scale * y
  forward = scale * mp.neighbour_sum(y, batch.adjacency, mp.USERS, own=True)
  return forward, mp.neighbour_sum(scaled, batch.adjacency, mp.OPERANDS, own=True)


class _TileModel(nn.Module):
  """Options common to all tile models.

  Attributes:
    op_embed_dim: width of the opcode embedding.
    hidden_dim: width of every other layer.
    dtype: of the layers before the readout; sums and what follows are float32.
    precision: of matrix products.
  """

  op_embed_dim: int = 64
  hidden_dim: int = 64
  dtype: Any = None
  precision: Any = None

  def dense(self, features: int, **kwargs) -> nn.Dense:
    return Dense(features, dtype=self.dtype, precision=self.precision, **kwargs)

  def mlp(self, *features: int, **kwargs) -> MLP:
    return MLP(features, precision=self.precision, **kwargs)

  def matmul(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return layers.matmul(x, kernel, dtype=self.dtype, precision=self.precision)

  def static_features(self, batch: TileBatch) -> tuple[jax.Array, jax.Array]:
    embedded = OpcodeEmbedding(self.op_embed_dim, name="op_embedding")(batch.graph)
    return embedded, batch.graph.nodes["feat"]

  def project_static(self, static: tuple[jax.Array, jax.Array], blocks: list[jax.Array]):
    """Embedding and node features through their kernel blocks, `[N, H]`."""
    return self.matmul(static[0], blocks[0]) + self.matmul(static[1], blocks[2])

  def project_config(self, batch: TileBatch, block: jax.Array) -> jax.Array:
    """Each configuration through its kernel block once, then per node: `[N, C, H]`."""
    return pooling.per_node(
        self.matmul(batch.config_feat, block), mp.node_graph(batch.graph))

  def pool(self, x: jax.Array, batch: TileBatch, reduction: str = "sum") -> jax.Array:
    pooled = pooling.graph_sum(x, mp.node_graph(batch.graph), len(batch.config_feat))
    if reduction == "sum":
      return pooled
    count = jnp.maximum(pooling.real_nodes(batch.graph), 1)
    return pooled / count.reshape((-1,) + (1,) * (pooled.ndim - 1))

  def join_late(self, pooled: jax.Array, batch: TileBatch) -> jax.Array:
    """Repeats `pooled [G, F]` per configuration and appends the configuration."""
    configs = batch.config_feat.shape[1]
    repeated = jnp.broadcast_to(pooled[:, None], (len(pooled), configs, pooled.shape[-1]))
    return jnp.concatenate([repeated, batch.config_feat], axis=-1)


class SAGE(_TileModel):
  """`x <- l2_normalize(leaky_relu(Dense(concat(B x, x))))`, B the undirected edges."""

  early_join: bool = True
  num_gnns: int = 3

  @nn.compact
  def __call__(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """Scores `[G, C]` float32."""
    x = self.first_layer(batch)
    for layer in range(1, self.num_gnns):
      with jax.named_scope(f"sage_{layer}"):
        x = jnp.concatenate([mp.neighbour_sum(x, batch.adjacency, mp.BOTH), x], axis=-1)
        x = layers.l2_normalize(leaky_relu(self.dense(self.hidden_dim, name=f"sage_{layer}")(x)))
    x = self.pool(x, batch)
    if not self.early_join:
      x = self.join_late(x, batch)
    return self.mlp(self.hidden_dim, self.hidden_dim, 1, name="head")(x)[..., 0]

  def first_layer(self, batch: TileBatch) -> jax.Array:
    """The first round, where all that differs between configurations is a constant.

    A configuration c has the same value on all nodes of a graph, so that its
    part of `B x` is (number of neighbours) * c: no edge has to carry it.
    """
    feat = batch.graph.nodes["feat"].shape[-1]
    config = batch.config_feat.shape[-1] if self.early_join else 0
    sizes = (self.op_embed_dim, config, feat)
    blocks, bias = JoinedDense(self.hidden_dim, name="sage_0")(sizes * 2)
    static = self.static_features(batch)
    with jax.named_scope("sage_0"):
      x = mp.neighbour_sum(
          self.project_static(static, blocks[:3]), batch.adjacency, mp.BOTH)
      x += self.project_static(static, blocks[3:]) + bias.astype(x.dtype)
      if self.early_join:
        degree = mp.degree(batch.adjacency, mp.BOTH, len(x)).astype(x.dtype)
        x = x[:, None] + self.project_config(batch, blocks[4])
        x += degree[:, None, None] * self.project_config(batch, blocks[1])
      return layers.l2_normalize(leaky_relu(x))


class ResGCN(_TileModel):
  """Residual graph convolutions over row-normalised edges with self loops."""

  op_embed_dim: int = 32
  early_join: bool = True
  num_gnns: int = 3
  directed: bool = False
  reduction: str = "sum"

  def __post_init__(self):
    if self.reduction not in REDUCTIONS:
      raise ValueError(
          f"reduction is {self.reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    super().__post_init__()

  @nn.compact
  def __call__(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """Scores `[G, C]` float32."""
    hidden = self.hidden_dim
    x = self.first_layer(batch)
    for layer in range(self.num_gnns):
      with jax.named_scope(f"gcn_{layer}"):
        x += self.update(leaky_relu(x), batch, f"gcn_{layer}")
    x = self.pool(leaky_relu(x), batch, self.reduction)
    if not self.early_join:
      x = self.join_late(x, batch)
    return self.mlp(hidden, 1, name="head")(x)[..., 0]

  def first_layer(self, batch: TileBatch) -> jax.Array:
    feat = batch.graph.nodes["feat"].shape[-1]
    config = batch.config_feat.shape[-1] if self.early_join else 0
    sizes = (self.op_embed_dim, config, feat)
    blocks, bias = JoinedDense(self.hidden_dim, name="pre_0")(sizes)
    x = self.project_static(self.static_features(batch), blocks)
    x += bias.astype(x.dtype)
    if self.early_join:
      x = x[:, None] + self.project_config(batch, blocks[1])
    return self.dense(self.hidden_dim, name="pre_1")(leaky_relu(x))

  def update(self, y: jax.Array, batch: TileBatch, name: str) -> jax.Array:
    forward, reverse = _row_normalised(y, batch)
    mlp = lambda suffix: self.mlp(
        self.hidden_dim, self.hidden_dim, name=name + suffix, dtype=self.dtype)
    if not self.directed:
      return mlp("")(forward + reverse + y)
    return mlp("_forward")(forward) + mlp("_reverse")(reverse) + mlp("_self")(y)


class PooledMLP(_TileModel):
  """No message passing: pooled node features and embeddings beside the configuration."""

  op_embed_dim: int = 64
  num_layers: int = 2

  def __post_init__(self):
    if self.dtype not in (None, "float32", jnp.float32):
      raise ValueError(f"dtype is {self.dtype}, expected float32: an MLP has no layer before its "
                       "readout")
    super().__post_init__()

  @nn.compact
  def __call__(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """Scores `[G, C]` float32."""
    embedded, feat = self.static_features(batch)
    pooled = self.pool(jnp.concatenate([feat, embedded], axis=-1), batch)
    x = self.join_late(pooled, batch)
    return self.mlp(*[self.hidden_dim] * self.num_layers, 1, name="head")(x)[..., 0]


# Names of the official flags.
MODELS = {
    "EarlyJoinSAGE": SAGE,
    "LateJoinSAGE": SAGE,
    "EarlyJoinResGCN": ResGCN,
    "LateJoinResGCN": ResGCN,
    "MLP": PooledMLP,
}


def create(name: str, **options: Any) -> nn.Module:
  """The tile model of that official name.

  Raises:
    ValueError: for a name that is not in `MODELS` or an option it does not have.
  """
  if name in MODELS and name != "MLP":
    options["early_join"] = name.startswith("Early")
  return layers.create(MODELS, name, **options)
