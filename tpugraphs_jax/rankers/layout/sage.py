"""A GraphSAGE ranker for layouts.

Configurations are joined to nodes before the first round of message passing (early join). Rounds
average operands and users with separate kernels. Readouts are over all nodes and over configurable
nodes.

Sources: early join and bidirectional SAGE of the 3rd and 5th place, residuals
and mean readout of the 1st, and the shared embedding of layout values of the
1st place of the "Fast or Slow?" competition.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.columns import LAYOUT_VALUE_RANGE
from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data.batching import LayoutBatch
from tpugraphs_jax.nn import embeddings, layers, pooling
from tpugraphs_jax.nn.aggregation import OPERANDS, USERS
from tpugraphs_jax.nn.conv import sage
from tpugraphs_jax.nn.embeddings import OpcodeEmbedding
from tpugraphs_jax.nn.layers import Dense, DTYPES, Layouts
from tpugraphs_jax.nn.nodes import Nodes, Slates
from tpugraphs_jax.rankers import base


@base.LAYOUT_MODELS.register("SAGE")
class SAGE(base.Network):
  """Bidirectional GraphSAGE with residual connections."""

  op_embed_dim: int = option(64, "width of the opcode embedding", least=1)
  value_embed_dim: int = option(4, "width of the embedding of each of 18 layout values", least=1)
  hidden_dim: int = option(128, "width of node features", least=1)
  num_gnns: int = option(3, "rounds of message passing", least=1, most=MOST_LAYERS)
  pooling: Sequence[str] = option(
    ("mean", "config_mean", "config_max"),
    "readouts, concatenated; config_ = over configurable nodes",
    some_of=pooling.names,
  )
  remat: bool = option(False, "recompute each round in the backward pass instead of storing it")
  dtype: str = option(
    "float32", "dtype of the computation; sums over neighbours and nodes are float32", one_of=DTYPES
  )

  embeds_integers = True

  def __post_init__(self):
    super().__post_init__()
    if not self.pooling:
      raise ValueError("model.pooling is empty, expected at least one readout")

  @property
  def hops(self) -> int:
    return self.num_gnns

  def setup(self):
    dense = functools.partial(Dense, self.hidden_dim, dtype=self.dtype)
    low, high = LAYOUT_VALUE_RANGE
    self.op_embedding = OpcodeEmbedding(self.op_embed_dim)
    self.layout_value = embeddings.Embed(high - low + 1, self.value_embed_dim)
    self.static, self.config = dense(), dense(use_bias=False)
    self.sentinel = self.param(
      "sentinel", nn.initializers.normal(0.02), (1, self.hidden_dim), jnp.float32
    )
    update = nn.remat(_Round) if self.remat else _Round
    self.sage = [update(self.hidden_dim, self.dtype) for _ in range(self.num_gnns)]
    self.head = layers.MLP((self.hidden_dim, self.hidden_dim, 1), nn.gelu)

  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32."""
    del train
    x = self.join_early(Slates.of(batch))
    for update in self.sage:
      x = update(x)
    return jnp.concatenate([pooling.pool(x, name) for name in self.pooling], axis=-1)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    return self.head(readout)[..., 0]

  def join_early(self, slates: Slates) -> Nodes:
    """A linear layer on node features and configurations: `[N, C, H]`."""
    graph = slates.batch.graph
    static = jnp.concatenate([graph.nodes["feat"], self.op_embedding(graph)], axis=-1)
    shared = self.static(static)
    config = Layouts(slates, self.embed_rows(slates.batch.rows)).map(self.config)
    # Nodes that are not configurable have a learned vector instead of a configuration (1st place:
    # value -2). It is added to every node, and subtracted from configurable nodes.
    sentinel = self.sentinel.astype(shared.dtype)
    shared += sentinel
    configurable = slates.is_configurable_row()[:, None, None]
    varying = config.both()[1] - jnp.where(configurable, sentinel[None], 0)
    config = dataclasses.replace(config, varying=varying)
    return (slates.nodes(shared) + config).map(nn.gelu)

  def embed_rows(self, rows: jax.Array) -> jax.Array:
    """Embeds the 18 integers of `rows [R, 18]` with one shared table: `[R, 18 * E]` float32."""
    values = jnp.asarray(rows, jnp.int32) - LAYOUT_VALUE_RANGE[0]
    return self.layout_value(values).reshape(len(rows), -1)


class _Round(nn.Module):
  """`x + gelu(norm(W x + W_o mean(operands) + W_u mean(users)))`."""

  features: int
  dtype: str

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    dense = functools.partial(Dense, self.features, dtype=self.dtype)
    messages = {side: dense(use_bias=False, name=side) for side in (OPERANDS, USERS)}
    y = sage(x, dense(name="self"), messages)
    return x + y.map(nn.LayerNorm(dtype=self.dtype, name="norm")).map(nn.gelu)
