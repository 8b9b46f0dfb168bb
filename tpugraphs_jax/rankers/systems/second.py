"""The 2nd place: GraphSAGE over users, a runtime for every node, and their sum.

    features, opcode and configuration of a node -> linear -> SAGE rounds -> runtime of the node
    score = sum of the runtimes of all nodes

Published: node features are log(1 + max(x, 0)), for NLP sign(x) log(1 + |x|). A linear layer of
width 20 maps them. A linear layer with ReLU joins them with an opcode vector of width 12 and the
unscaled configuration. Each SAGE round over users has ReLU; for NLP the input of a round is added
before it. The last layer gives a runtime per node, for layouts in milliseconds.

Source: Obs01ete/kaggle_latenciaga, ca55746 (XLA and tiles) and b6b55b1 (NLP).
"""

from __future__ import annotations

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.config_fields import option
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.data.features import BLOCKS, signed_log
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.aggregation import USERS
from tpugraphs_jax.nn.conv import Sage
from tpugraphs_jax.nn.embeddings import Opcodes
from tpugraphs_jax.nn.layers import Layouts, Tiles
from tpugraphs_jax.nn.nodes import Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System


@BLOCKS.register("second")
def logarithms(graph: OpGraph) -> np.ndarray:
  """log(1 + max(x, 0)) of the released columns, `[N, 140]` float32."""
  return np.log1p(np.maximum(graph.node_feat[:, :NODE_FEATURES], 0)).astype(np.float32)


@BLOCKS.register("second_nlp")
def signed_logarithms(graph: OpGraph) -> np.ndarray:
  """sign(x) log(1 + |x|) of the released columns, `[N, 140]` float32."""
  return signed_log(graph.node_feat[:, :NODE_FEATURES]).astype(np.float32)


@base.LAYOUT_MODELS.register("Second")
@base.TILE_MODELS.register("Second")
class KaggleSecond(System):
  """The 2nd place."""

  feature_width: int = option(20, "width of the linear layer on node features", least=1)
  op_embed_dim: int = option(12, "width of the opcode vector", least=1)
  first_width: int = option(
    32, "width of the layer that joins features, opcode and configuration", least=1
  )
  widths: Sequence[int] = option((64, 64, 128, 128, 256, 256), "widths of the SAGE rounds")
  residual: bool = option(
    False, "add the input of a round to its convolution where the widths are equal"
  )
  score_scale: float = option(1.0, "factor of the sum over nodes")

  @property
  def hops(self) -> int:
    return len(self.widths)

  @nn.compact
  def embed(self, batch: LayoutBatch | TileBatch, *, train: bool = False) -> jax.Array:
    """The sum of the runtimes of all nodes, `[G, C, 1]` float32."""
    del train  # no dropout
    slates, graph = Slates.of(batch), batch.graph
    feat = self.linear(self.feature_width, name="features")(jnp.asarray(graph.nodes["feat"]))
    opcode = Opcodes(self.op_embed_dim, name="opcodes")(graph)
    static = slates.nodes(feat, opcode)
    if isinstance(batch, TileBatch):
      unscaled: Tiles | Layouts = Tiles(slates, jnp.asarray(batch.config_feat))
    else:
      unscaled = Layouts(slates, jnp.asarray(batch.rows))
    x = self.linear(self.first_width, name="first")(static, unscaled).map(nn.relu)
    for number, width in enumerate(self.widths):
      y = Sage(width, (USERS,), self.linear, name=f"sage_{number}")(x)
      x = (x + y if self.residual and x.width == width else y).map(nn.relu)
    return pooling.total(self.linear(1, name="node")(x))

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., 1]`."""
    return self.score_scale * readout[..., 0]
