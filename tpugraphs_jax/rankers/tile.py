"""The official tile rankers: scores `[G, C]` of the tiles of kernels.

Inputs of every model are opcode embeddings, node features and tiles (`TileBatch.config_feat`,
`[G, C, F']`). With early join the tile is a feature of every node. With late join it is appended to
the features of the kernel, so that the network runs once per kernel (`late_join`). The names of
models stand at the end of this file.

Sizes of arrays: G kernels (graphs) with N nodes in all and C tiles each; F' features of a tile, H
of a layer, R of a kernel, P = R of a readout with early join and R + F' with late join.

Source: the published TensorFlow baseline of TpuGraphs (arXiv 2308.13490, section 4). Options have
the defaults of its flags.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data.batching import Array, TileBatch
from tpugraphs_jax.nn import layers, pooling
from tpugraphs_jax.nn.aggregation import BOTH, degree, neighbour_sum, node_graph, OPERANDS, USERS
from tpugraphs_jax.nn.embeddings import OpcodeEmbedding
from tpugraphs_jax.nn.kernel_inputs import InputDense
from tpugraphs_jax.nn.layers import Dense, DTYPES, leaky_relu, MLP
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.family import TileFamily
from tpugraphs_jax.rankers.late_join import LateJoin

REDUCTIONS = ("sum", "mean")  # over the nodes of a kernel


def _broadcast_to_rows(x: jax.Array, y: jax.Array) -> jax.Array:
  """`x [n]` in a shape `[n, 1, ...]` that multiplies the rows of `y [n, ...]`."""
  return x.reshape((-1,) + (1,) * (y.ndim - 1))


def _row_normalised(y: jax.Array, batch: TileBatch) -> tuple[jax.Array, jax.Array]:
  """`M y` and `M^T y` of `y [N, ..., H]`, M = A + I with rows divided by their sums.

  Row v of A marks the users of v: M averages over the users of a node and the node itself.
  """
  users = degree(batch.adjacency, USERS, len(y))
  scale = _broadcast_to_rows((1 / (users + 1)).astype(y.dtype), y)
  scaled = scale * y
  forward = scale * neighbour_sum(y, batch.adjacency, USERS, self_loops=True)
  return forward, neighbour_sum(scaled, batch.adjacency, OPERANDS, self_loops=True)


class _TileModel(base.Network):
  """Options and layers of all tile models.

  A model adds `early_join`, `kernel_features`, and in `setup` the layer `head`, from readouts to
  scores.
  """

  op_embed_dim: int = option(64, "width of the opcode embedding", least=1)
  hidden_dim: int = option(64, "width of every other layer", least=1)
  reduction: str = option(
    "sum",
    "readout over the nodes of a kernel, not scaled (published: sum; ResGCN: sum or mean)",
    one_of=REDUCTIONS,
  )
  opcodes: int = option(
    OPCODES, "rows of the opcode table; officially the largest opcode of the data + 1", least=1
  )

  def setup(self):
    self.op_embedding = OpcodeEmbedding(self.op_embed_dim, self.opcodes)

  @property
  def family(self) -> type[TileFamily]:
    return TileFamily if self.early_join else LateJoin

  def embed(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """Readouts of every kernel and tile, `[G, C, P]` float32."""
    del train
    features = self.kernel_features(batch)
    return features if self.early_join else self.join(features[:, None], batch.config_feat)

  def kernel_features(self, batch: TileBatch) -> jax.Array:
    """The sum or mean over nodes: `[G, C, R]` with early join, else `[G, R]`, float32."""
    raise NotImplementedError

  def join(self, kernels: jax.Array, tiles: Array) -> jax.Array:
    """Appends tiles `[..., F']` to features of kernels `[..., R]`: readouts `[..., P]`.

    Leading axes of `kernels` are broadcast to those of `tiles`.
    """
    shape = (*tiles.shape[:-1], kernels.shape[-1])
    return jnp.concatenate([jnp.broadcast_to(kernels, shape), tiles], axis=-1)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    return self.head(readout)[..., 0]

  def reduce_nodes(self, x: jax.Array, batch: TileBatch) -> jax.Array:
    """The sum or mean over nodes of `x [N, ..., H]` per kernel, `[G, ..., H]` float32."""
    total = pooling.graph_sum(x, node_graph(batch.graph), len(batch.config_feat))
    if self.reduction == "sum":
      return total
    count = jnp.maximum(pooling.real_nodes(batch.graph), 1)
    return total / _broadcast_to_rows(count, total)


class _MessagePassing(_TileModel):
  """Options and layers of models with rounds of message passing."""

  early_join: bool = option(True, "join configurations to nodes, not to readouts")
  num_gnns: int = option(3, "rounds of message passing", least=1, most=MOST_LAYERS)
  dtype: str = option(
    "float32", "dtype of layers before the readout; readout and head are float32", one_of=DTYPES
  )

  def input_dense(self) -> InputDense:
    """The first layer, to `hidden_dim` features."""
    return InputDense(
      self.hidden_dim,
      embed_dim=self.op_embed_dim,
      has_tiles=self.early_join,
      product_dtype=self.dtype,
    )

  def dense(self) -> Dense:
    """A linear layer to `hidden_dim` features."""
    return Dense(self.hidden_dim, dtype=self.dtype)


class TileSAGE(_MessagePassing):
  """GraphSAGE: `x <- l2_normalize(leaky_relu(Dense(concat(B x, x))))`.

  B sums over the neighbours of a node, along edges of both directions.
  """

  def setup(self):
    super().setup()
    rounds = [self.dense() for _ in range(1, self.num_gnns)]
    self.sage: list[Any] = [self.input_dense(), *rounds]  # named sage_0, sage_1, ... in a file
    self.head = MLP((self.hidden_dim, self.hidden_dim, 1))

  def kernel_features(self, batch: TileBatch) -> jax.Array:
    x = self.input_features(batch)
    for number, layer in enumerate(self.sage[1:], 1):
      with jax.named_scope(f"sage_{number}"):
        x = jnp.concatenate([neighbour_sum(x, batch.adjacency, BOTH), x], axis=-1)
        x = layers.l2_normalize(leaky_relu(layer(x)))
    return self.reduce_nodes(x, batch)

  def input_features(self, batch: TileBatch) -> jax.Array:
    """The first round, `[N, C, H]` with early join, `[N, H]` with late join.

    `Dense(concat(B x, x)) = B (x W1) + x W2 + b`. A tile t is equal on all nodes of a kernel. Its
    part of `B x` is therefore (number of neighbours) * t, without a sum over edges.

    `of_neighbours` is `x W1` and `own` is `x W2 + b`, each as a part of nodes `[N, H]` and one of
    tiles `[N, C, H]`.
    """
    of_neighbours, own = self.sage[0].parts(batch, copies=2)
    embedded = self.op_embedding(batch.graph)
    with jax.named_scope("sage_0"):
      x = neighbour_sum(of_neighbours.of_nodes(embedded), batch.adjacency, BOTH)
      x += own.of_nodes(embedded)
      if self.early_join:
        neighbours = degree(batch.adjacency, BOTH, len(x)).astype(x.dtype)
        x = x[:, None] + own.of_tiles()
        x += neighbours[:, None, None] * of_neighbours.of_tiles()
      return layers.l2_normalize(leaky_relu(x))


class ResGCN(_MessagePassing):
  """Residual graph convolutions: `x <- x + MLP(M y + M^T y + y)` with `y = leaky_relu(x)`.

  M is the row-normalised adjacency with self loops of `_row_normalised`; `directed` gives each of
  the three terms an MLP of its own.
  """

  op_embed_dim: int = option(32, "width of the opcode embedding", least=1)
  directed: bool = option(False, "separate layers for users, operands and the node itself")

  def setup(self):
    super().setup()
    self.pre_0, self.pre_1 = self.input_dense(), self.dense()
    self.gcn = [self.convolution() for _ in range(self.num_gnns)]
    self.head = MLP((self.hidden_dim, 1))

  def convolution(self) -> Any:
    """The layer of a round, for `update`.

    With `directed`, three by name: of users (`forward`), of operands (`reverse`), and of the node.
    """
    layer = functools.partial(MLP, (self.hidden_dim, self.hidden_dim), dtype=self.dtype)
    return {side: layer() for side in ("forward", "reverse", "self")} if self.directed else layer()

  def kernel_features(self, batch: TileBatch) -> jax.Array:
    x = self.input_features(batch)
    for number, convolution in enumerate(self.gcn):
      with jax.named_scope(f"gcn_{number}"):
        x += self.update(leaky_relu(x), batch, convolution)
    return self.reduce_nodes(leaky_relu(x), batch)

  def input_features(self, batch: TileBatch) -> jax.Array:
    """First features, `[N, C, H]` with early join, `[N, H]` with late join."""
    (own,) = self.pre_0.parts(batch)
    x = own.of_nodes(self.op_embedding(batch.graph))
    if self.early_join:
      x = x[:, None] + own.of_tiles()
    return self.pre_1(leaky_relu(x))

  def update(self, y: jax.Array, batch: TileBatch, convolution: Any) -> jax.Array:
    """The residual of one round, from features `y [N, ..., H]` and in their shape."""
    forward, reverse = _row_normalised(y, batch)
    if not self.directed:
      return convolution(forward + reverse + y)
    messages = convolution["forward"](forward) + convolution["reverse"](reverse)
    return messages + convolution["self"](y)


class PooledMLP(_TileModel):
  """No message passing: an MLP on pooled node features, pooled embeddings and the configuration."""

  op_embed_dim: int = option(32, "width of the opcode embedding", least=1)
  num_layers: int = option(2, "layers of the head before its last", least=1, most=MOST_LAYERS)
  early_join: ClassVar[bool] = False

  def setup(self):
    super().setup()
    self.head = MLP((*[self.hidden_dim] * self.num_layers, 1))

  def kernel_features(self, batch: TileBatch) -> jax.Array:
    embedded = self.op_embedding(batch.graph)
    return self.reduce_nodes(jnp.concatenate([batch.graph.nodes["feat"], embedded], axis=-1), batch)


# Names as in the official flags.
base.TILE_MODELS.register("EarlyJoinSAGE")(functools.partial(TileSAGE, early_join=True))
base.TILE_MODELS.register("LateJoinSAGE")(functools.partial(TileSAGE, early_join=False))
base.TILE_MODELS.register("EarlyJoinResGCN")(functools.partial(ResGCN, early_join=True))
base.TILE_MODELS.register("LateJoinResGCN")(functools.partial(ResGCN, early_join=False))
base.TILE_MODELS.register("MLP")(PooledMLP)
