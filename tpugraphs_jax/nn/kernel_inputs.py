"""The first layer of tile models: a linear layer on the inputs of the nodes of kernels."""

from __future__ import annotations

import dataclasses

import jax

from tpugraphs_jax.data.batching import Array, TileBatch
from tpugraphs_jax.nn import layers, pooling
from tpugraphs_jax.nn.aggregation import node_graph


@dataclasses.dataclass(frozen=True)
class Part:
  """`concat(embedding, tile, features) @ W + b` of the nodes of a batch, as a sum of products.

  Attributes:
    embedding, tile, features: blocks of W, `[E, H]`, `[F', H]` and `[F, H]` float32.
    bias: b, `[H]` float32; None without one.
    batch: features and tiles of the nodes.
    dtype: of the products.
  """

  embedding: jax.Array
  tile: jax.Array
  features: jax.Array
  bias: jax.Array | None
  batch: TileBatch
  dtype: str

  def of_nodes(self, embedded: jax.Array) -> jax.Array:
    """The products of embeddings `[N, E]` and features, and the bias, once a node: `[N, H]`."""
    feat = self.batch.graph.nodes["feat"]
    x = self._product(embedded, self.embedding) + self._product(feat, self.features)
    return x if self.bias is None else x + self.bias[None].astype(x.dtype)

  def of_tiles(self) -> jax.Array:
    """The product of tiles, once a kernel, then copied to its nodes: `[N, C, H]`."""
    product = self._product(self.batch.config_feat, self.tile)
    return pooling.per_node(product, node_graph(self.batch.graph))

  def _product(self, x: Array, weight: jax.Array) -> jax.Array:
    return layers.matmul(x, weight, dtype=self.dtype)


class InputDense(layers.Dense):
  """A `Dense` on `concat(embedding, tile, features)` of nodes, which is never made.

  A tile is equal on all nodes of a kernel, and a node in all configurations of it. The layer is
  therefore the sum of the products of its `Part`s.

  Attributes:
    embed_dim: width of the embeddings, E.
    has_tiles: whether tiles are an input: with early join.
    product_dtype: of the products. The layer itself has no dtype, so that its weights are float32.
  """

  embed_dim: int = dataclasses.field(kw_only=True)
  has_tiles: bool = dataclasses.field(kw_only=True)
  product_dtype: str = dataclasses.field(kw_only=True)

  def parts(self, batch: TileBatch, copies: int = 1) -> list[Part]:
    """A part for each of `copies` concatenations, one after the other; the last has the bias."""
    tile_width = batch.config_feat.shape[-1] if self.has_tiles else 0
    widths = self.embed_dim, tile_width, batch.graph.nodes["feat"].shape[-1]
    blocks, bias = self.blocks(widths * copies)
    parts = []
    for copy in range(copies):
      embedding, tile, features = blocks[3 * copy : 3 * copy + 3]
      bias_of_copy = bias if copy == copies - 1 else None
      parts.append(Part(embedding, tile, features, bias_of_copy, batch, self.product_dtype))
    return parts
