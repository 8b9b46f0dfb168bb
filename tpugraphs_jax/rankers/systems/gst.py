"""Graph Segment Training on TpuGraphs, and the 7th place, which is based on its code.

    features, opcode times 100 and configuration times 100 of a node
      -> linear 128 -> linear 256, dropout, PReLU, scaling to length 1
      -> 3 SAGE rounds over users
      -> maximum plus mean over nodes, scaling to length 1
      -> linear 256, ReLU, scaling to length 1 -> linear 1, the score of a segment

The score of a program is the sum over its segments. `rankers.segments` implements the training: a
step computes gradients of one segment, and uses scores of earlier steps for all other segments.

Published: columns are standardised over the nodes of training, validation and test programs. Opcode
vectors have at most length 1. Learned factors, initially 100, scale the opcode (one factor) and the
configuration (18). There is no activation after the first layer or a round, so that the rounds are
one linear map. The 7th place has no public code: here PReLU follows each round.

Source: Cao et al., "Learning Large Graph Property Prediction via Graph Segment Training"
(arXiv 2305.12322), kaidic/GST.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data.batching import LayoutBatch
from tpugraphs_jax.data.transforms import KINDS, Scaling, Statistics
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.aggregation import USERS
from tpugraphs_jax.nn.conv import Sage
from tpugraphs_jax.nn.dropout import Dropout
from tpugraphs_jax.nn.embeddings import Opcodes
from tpugraphs_jax.nn.layers import l2_normalize, Layouts
from tpugraphs_jax.nn.nodes import Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System

_GAIN = 100.0  # initial factor of opcode and configuration
_LEAST = 1e-6  # columns are scaled if their deviation is larger


@KINDS.register("gst")
def standard_scaler(statistics: Statistics) -> Scaling:
  """Scales all columns to mean 0 and unbiased deviation 1; deviations up to 1e-6 count as 1."""
  count = statistics.count
  deviation = statistics.deviation * np.sqrt(count / max(count - 1, 1))
  deviation = np.where(statistics.deviation <= _LEAST, 1, deviation)
  return Scaling(statistics.mean, deviation, keeps_constant=True)


@base.LAYOUT_MODELS.register("GST")
class GST(System):
  """Graph Segment Training."""

  op_embed_dim: int = option(128, "width of the opcode vector", least=1)
  map_width: int = option(128, "width of the first linear layer", least=1)
  width: int = option(256, "width of all later layers", least=1)
  rounds: int = option(3, "number of SAGE rounds", least=1, most=MOST_LAYERS)
  activate_rounds: bool = option(False, "PReLU after each round (7th place)")
  dropout: float = option(0.1, "dropout rate after the second linear layer", least=0, below=1)

  max_norms: ClassVar[Mapping[tuple[str, ...], float]] = {("opcodes", "embedding", "table"): 1.0}

  @property
  def hops(self) -> int:
    return self.rounds

  def setup(self):
    self.hidden, self.last = self.exact(self.width), self.exact(1)

  @nn.compact
  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """Maximum plus mean over nodes, scaled to length 1: `[G, C, width]` float32."""
    slates, graph, rows = Slates.of(batch), batch.graph, jnp.asarray(batch.rows)
    init = nn.initializers.constant(_GAIN)
    op_gain = self.param("op_weights", init, (), jnp.float32)
    config_gain = self.param("config_weights", init, (rows.shape[1],), jnp.float32)
    opcode = Opcodes(self.op_embed_dim, max_norm=1.0, name="opcodes")(graph)
    static = slates.nodes(jnp.asarray(graph.nodes["feat"]), op_gain * opcode)
    layouts = Layouts(slates, rows * config_gain[None])
    x = self.linear(self.map_width, name="linear_map")(static, layouts)
    x = self.linear(self.width, name="pre_mp")(x)
    x = Dropout(self.dropout)(x, train=train)
    x = x.map(nn.PReLU(negative_slope_init=0.25, name="pre_mp_prelu")).map(l2_normalize)
    for number in range(self.rounds):
      x = Sage(self.width, (USERS,), self.linear, name=f"gnn_layers_{number}")(x)
      if self.activate_rounds:
        x = x.map(nn.PReLU(negative_slope_init=0.25, name=f"prelu_{number}"))
    return l2_normalize(pooling.largest(x) + pooling.mean(x))

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., width]`."""
    return self.last(l2_normalize(nn.relu(self.hidden(readout))))[..., 0]
