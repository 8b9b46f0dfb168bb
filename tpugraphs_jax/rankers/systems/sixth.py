"""The 6th place: instance norm over nodes, and a head that normalises across the slate.

    layouts:  opcode, features, configuration -> 2 linear blocks -> 4 SAGE blocks over users
              readout = mean + maximum over nodes, at length 1
    GIN:      opcode, features, configuration -> linear block -> 4 GIN layers over users
              readout = sum over layers of their means over nodes
    tiles:    opcode, features -> 2 linear blocks -> 4 GATv2 blocks over users
              readout = the tile, then mean + maximum over nodes
    all:      readout -> 2 linear layers, each with a norm across the slate and GELU -> score

    linear block   x -> gelu(norm(W x))             GATv2 block   x -> gelu(norm(gatv2(x)))
    SAGE block     x -> gelu(norm(x + sage(x)))     GIN layer     x -> mlp(x + sum of users)

Published: programs are cut to the configurable nodes and five hops of users; features are
(x - mean) / (deviation + 0.0001); vectors of opcodes are shortened to length 1; configurations are
as they are and 0 on nodes that are not configurable. The norm is over the nodes of a graph, for
every configuration and channel, and has no parameters. In the head the same layer meets a matrix of
configurations and channels, and there it is over the configurations of the slate: a score depends
on the others of its slate. A dropout of 0.2 is behind the first block. The MLP of GIN is twice a
linear layer, the norm and ELU. Its fourth layer reads the second, not the third, of which only the
mean is used: published so.

Kernels go through the network without a tile. What their encoder gives is the same for all tiles of
a slate, so that the norm across the slate takes it out again: it cannot change an order.

Different here: means and deviations of features are fixed (published: they begin as such and are
trained).

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

from tpugraphs_jax.data.features import KINDS, Scaling, Statistics
from tpugraphs_jax.nn import nodes, pooling
from tpugraphs_jax.nn.aggregation import USERS
from tpugraphs_jax.nn.conv import Gatv2, Sage
from tpugraphs_jax.nn.dropout import Dropout
from tpugraphs_jax.nn.layers import gelu, l2_normalize
from tpugraphs_jax.nn.linear import Layouts, Opcodes
from tpugraphs_jax.nn.nodes import Nodes, Slates
from tpugraphs_jax.nn.norms import instance_norm, slate_norm
from tpugraphs_jax.options import option
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System


@KINDS.register("sixth")
def standardized(statistics: Statistics) -> Scaling:
  """(x - mean) / (deviation + 0.0001), of constant columns too."""
  constant = statistics.low == statistics.high
  deviation = np.where(constant, 0, statistics.deviation)
  return Scaling(statistics.mean, deviation + 1e-4, keeps_constant=True)


class Sixth(System):
  """What all networks of the 6th place have in common."""

  op_embed_dim: int = option(128, "width of the opcode vector", least=1)
  width: int = option(
      256,
      "width of all layers on nodes, and of the first layer of the head; the second has half",
      least=1)
  layers: int = option(4, "number of convolutions", least=1)
  dropout: float = option(
      0.2, "share of features that is left out behind the first block", least=0, below=1)

  compares_configs = True
  sees_whole_graph = True
  max_norms = {("opcodes", "embedding", "table"): 1.0}

  def inputs(self, slates: Slates, *more: Any, train: bool) -> Nodes:
    """The first block: opcode, features and `more` through a linear layer."""
    graph = slates.batch.graph
    opcode = Opcodes(self.op_embed_dim, max_norm=1.0, name="opcodes")(graph)
    static = slates.nodes(jnp.concatenate([opcode, jnp.asarray(graph.nodes["feat"])], axis=-1))
    x = self.linear(self.width, use_bias=False, name="early_0")(static, *more)
    return Dropout(self.dropout, name="dropout")(instance_norm(x).map(gelu), train=train)

  def second_block(self, x: Nodes) -> Nodes:
    """A linear block."""
    x = self.linear(self.width, use_bias=False, name="early_1")(x)
    return instance_norm(x).map(gelu)

  def head(self, readout: jax.Array, mask: jax.Array) -> jax.Array:
    """The head without its last layer, `[G, C, width // 2]`, of readouts `[G, C, P]`."""
    for number, width in enumerate((self.width, self.width // 2)):
      x = self.exact(width, use_bias=False, name=f"late_{number}")(readout)
      readout = gelu(slate_norm(x, mask))
    return readout

  def setup(self) -> None:
    self.predict = self.exact(1)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., width // 2]`."""
    return self.predict(readout)[..., 0]


def mean_and_largest(x: Nodes) -> jax.Array:
  """Mean plus maximum over nodes, `[G, C, F]` float32."""
  return pooling.mean(x) + pooling.largest(x)


@base.LAYOUT_MODELS.register("Sixth")
class SixthLayout(Sixth):
  """The 6th place on layouts."""

  @nn.compact
  def embed(self, batch: Any, *, train: bool = False) -> jax.Array:
    """The head without its last layer, `[G, C, width // 2]` float32."""
    slates = Slates.of(batch)
    x = self.inputs(slates, Layouts(slates, jnp.asarray(batch.rows)), train=train)
    x = self.second_block(x)
    for number in range(self.layers):
      y = Sage(self.width, (USERS,), self.linear, name=f"conv_{number}")(x)
      x = instance_norm(x + y).map(gelu)
    readout = l2_normalize(mean_and_largest(x))
    return self.head(readout, jnp.asarray(batch.config_mask))


@base.LAYOUT_MODELS.register("SixthGIN")
class SixthGin(Sixth):
  """The 6th place on default XLA layouts, the other half of its ensemble."""

  @nn.compact
  def embed(self, batch: Any, *, train: bool = False) -> jax.Array:
    """The head without its last layer, `[G, C, width // 2]` float32."""
    slates = Slates.of(batch)
    first = self.inputs(slates, Layouts(slates, jnp.asarray(batch.rows)), train=train)
    results: list[Nodes] = []
    for number in range(self.layers):
      # Published: the fourth layer reads the second.
      read = results[1] if number == 3 else results[-1] if results else first
      results.append(Gin(self.width, self.linear, name=f"conv_{number}")(read))
    readout = sum(pooling.mean(result) for result in results)
    return self.head(readout, jnp.asarray(batch.config_mask))


class Gin(nn.Module):
  """`mlp(x_v + sum of x_u)` over users u (Xu et al. 2019), the MLP with norms over nodes.

  Attributes:
    width: of both layers of the MLP.
    linear: makes linear layers by their width.
  """

  width: int
  linear: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """`[N, C, width]` of `x [N, C, F]`."""
    x = nodes.neighbours(x, USERS, own=True)
    for number in range(2):
      x = instance_norm(self.linear(self.width, name=f"dense_{number}")(x)).map(nn.elu)
    return x


@base.TILE_MODELS.register("Sixth")
class SixthTile(Sixth):
  """The 6th place on tiles."""

  @nn.compact
  def embed(self, batch: Any, *, train: bool = False) -> jax.Array:
    """The head without its last layer, `[G, C, width // 2]` float32."""
    x = self.second_block(self.inputs(Slates.of(batch), train=train))
    # PyTorch Geometric begins kernels of GATv2 as Glorot has it.
    linear = functools.partial(
        self.linear, kernel_init=lambda inputs: nn.initializers.glorot_uniform())
    for number in range(self.layers):
      x = instance_norm(Gatv2(self.width, USERS, linear=linear, name=f"conv_{number}")(x)).map(gelu)
    readout, tile = mean_and_largest(x), jnp.asarray(batch.config_feat)
    readout = jnp.broadcast_to(readout, (*tile.shape[:2], readout.shape[2]))
    readout = jnp.concatenate([tile, readout], axis=-1)
    return self.head(readout, jnp.asarray(batch.config_mask))
