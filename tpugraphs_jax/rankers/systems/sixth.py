"""The 6th place: instance norm over nodes, and a head that normalises across the slate.

    layouts:  opcode, features, configuration -> 2 linear blocks -> 4 SAGE blocks over users
              readout = mean + maximum over nodes, scaled to length 1
    GIN:      opcode, features, configuration -> linear block -> 4 GIN layers over users
              readout = sum over layers of the mean over nodes
    tiles:    opcode, features -> 2 linear blocks -> 4 GATv2 blocks over users
              readout = [tile, mean + maximum over nodes]
    all:      readout -> 2 linear layers, each with a norm across the slate and GELU -> score

    linear block   x -> gelu(norm(W x))             GATv2 block   x -> gelu(norm(gatv2(x)))
    SAGE block     x -> gelu(norm(x + sage(x)))     GIN layer     x -> mlp(x + sum of users)

Published: programs are reduced to configurable nodes and five hops of users. Features are
(x - mean) / (deviation + 0.0001). Opcode vectors have at most length 1. Configurations are
unscaled, and 0 on nodes that are not configurable. The norm is over the nodes of a graph, per
configuration and channel, without parameters. In the head it is over the configurations of the
slate, so that a score depends on the other configurations. Dropout of 0.2 follows the first block.
The MLP of GIN is twice a linear layer, the norm and ELU. The fourth GIN layer reads the second, so
that the third is in the readout alone. This defect of the public code is kept.

Kernels are encoded without their tile. All tiles of a slate have the same encoding, which the norm
across the slate removes: it cannot change an order.

Different here: means and deviations of features are fixed. Published: they are trained from these
initial values.

Source: hengck23/solution-predict-ai-model-runtime.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.data.transforms import KINDS, Scaling, Statistics
from tpugraphs_jax.nn import nodes, pooling
from tpugraphs_jax.nn.aggregation import USERS
from tpugraphs_jax.nn.conv import Gatv2, Sage
from tpugraphs_jax.nn.dropout import Dropout
from tpugraphs_jax.nn.embeddings import Opcodes
from tpugraphs_jax.nn.layers import gelu, instance_norm, l2_normalize, Layouts, slate_norm
from tpugraphs_jax.nn.nodes import Nodes, Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System


@KINDS.register("sixth")
def standard_scaler(statistics: Statistics) -> Scaling:
  """(x - mean) / (deviation + 0.0001), also for constant columns."""
  constant = statistics.low == statistics.high
  deviation = np.where(constant, 0, statistics.deviation)
  return Scaling(statistics.mean, deviation + 1e-4, keeps_constant=True)


class KaggleSixth(System):
  """Parts that all networks of the 6th place share."""

  op_embed_dim: int = option(128, "width of the opcode vector", least=1)
  width: int = option(
    256, "width of layers on nodes and of the head's first layer; the second has half", least=1
  )
  layers: int = option(4, "number of convolutions", least=1, most=MOST_LAYERS)
  dropout: float = option(0.2, "dropout rate after the first block", least=0, below=1)

  compares_configs = True
  sees_whole_graph = True
  max_norms = {("opcodes", "embedding", "table"): 1.0}

  def inputs(self, slates: Slates, *more: Any, train: bool) -> Nodes:
    """The first linear block, on opcode, features and `more` inputs of `Linear`."""
    graph = slates.batch.graph
    opcode = Opcodes(self.op_embed_dim, max_norm=1.0, name="opcodes")(graph)
    static = slates.nodes(opcode, jnp.asarray(graph.nodes["feat"]))
    x = self.linear(self.width, use_bias=False, name="early_0")(static, *more)
    return Dropout(self.dropout, name="dropout")(instance_norm(x).map(gelu), train=train)

  def second_block(self, x: Nodes) -> Nodes:
    """The second linear block."""
    x = self.linear(self.width, use_bias=False, name="early_1")(x)
    return instance_norm(x).map(gelu)

  def head(self, readout: jax.Array, mask: jax.Array) -> jax.Array:
    """Maps readouts `[G, C, P]` to the input of the last layer, `[G, C, width // 2]`."""
    for number, width in enumerate((self.width, self.width // 2)):
      x = self.exact(width, use_bias=False, name=f"late_{number}")(readout)
      readout = gelu(slate_norm(x, mask))
    return readout


def mean_and_largest(x: Nodes) -> jax.Array:
  """Mean plus maximum over nodes, `[G, C, F]` float32."""
  return pooling.mean(x) + pooling.largest(x)


@base.LAYOUT_MODELS.register("Sixth")
class KaggleSixthLayout(KaggleSixth):
  """The 6th place on layouts."""

  @nn.compact
  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The input of the last layer, `[G, C, width // 2]` float32."""
    slates = Slates.of(batch)
    x = self.inputs(slates, Layouts(slates, jnp.asarray(batch.rows)), train=train)
    x = self.second_block(x)
    for number in range(self.layers):
      y = Sage(self.width, (USERS,), self.linear, name=f"conv_{number}")(x)
      x = instance_norm(x + y).map(gelu)
    readout = l2_normalize(mean_and_largest(x))
    return self.head(readout, jnp.asarray(batch.config_mask))


@base.LAYOUT_MODELS.register("SixthGIN")
class KaggleSixthGin(KaggleSixth):
  """The second network of the 6th place on default XLA layouts."""

  @nn.compact
  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The input of the last layer, `[G, C, width // 2]` float32."""
    slates = Slates.of(batch)
    first = self.inputs(slates, Layouts(slates, jnp.asarray(batch.rows)), train=train)
    results: list[Nodes] = []
    for number in range(self.layers):
      # Published: the fourth layer reads the second.
      x = results[1] if number == 3 else results[-1] if results else first
      results.append(Gin(self.width, self.linear, name=f"conv_{number}")(x))
    readout, *others = map(pooling.mean, results)
    return self.head(sum(others, readout), jnp.asarray(batch.config_mask))


class Gin(nn.Module):
  """`mlp(x_v + sum x_u)` over users u (Xu et al. 2019); the MLP has norms over nodes.

  Attributes:
    width: width of both layers of the MLP.
    linear: creates a linear layer of a width.
  """

  width: int
  linear: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, width]`."""
    x = nodes.neighbours(x, USERS, self_loops=True)
    for number in range(2):
      x = instance_norm(self.linear(self.width, name=f"dense_{number}")(x)).map(nn.elu)
    return x


@base.TILE_MODELS.register("Sixth")
class KaggleSixthTile(KaggleSixth):
  """The 6th place on tiles."""

  @nn.compact
  def embed(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """The input of the last layer, `[G, C, width // 2]` float32."""
    x = self.second_block(self.inputs(Slates.of(batch), train=train))
    glorot = nn.initializers.glorot_uniform()  # PyTorch Geometric's default
    linear = functools.partial(self.linear, kernel_init=glorot)
    for number in range(self.layers):
      x = instance_norm(Gatv2(self.width, USERS, linear=linear, name=f"conv_{number}")(x)).map(gelu)
    readout, tile = mean_and_largest(x), jnp.asarray(batch.config_feat)
    readout = jnp.broadcast_to(readout, (*tile.shape[:2], readout.shape[2]))
    readout = jnp.concatenate([tile, readout], axis=-1)
    return self.head(readout, jnp.asarray(batch.config_mask))
