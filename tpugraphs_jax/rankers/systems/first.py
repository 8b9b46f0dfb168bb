"""The 1st place: instance norm, gates, and attention across the configurations of a slate.

    features, own layout, opcode and configuration of a node
      -> 2 linear blocks -> 2 SAGE blocks over users -> mean over nodes -> score

    linear block   x -> gelu(gates(norm(W x + b)))
    SAGE block     x -> dropout(gelu(x + gates(sage(norm(x)))))

Published: programs are cut to the edges at configurable nodes; lists of dimensions end with -1;
134 columns are standardised by the nodes of cut training programs; all layout integers, those of
configurations and of a node itself, go through one embedding, with -2 for a node that is not
configurable. The norm is over the nodes of a graph, for every configuration and channel. The
gates are one for each channel and, in default collections and for tiles, an attention across
configurations, which doubles the channels. Kernels go through the network without a
configuration; an MLP of the tile joins their maximum and mean.

Source: thanhhau097/google_fast_or_slow.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.columns import LAYOUT_VALUE_RANGE, MAX_RANK, NODE, opcode_ids, sizes
from tpugraphs_jax.data.feature_blocks import BLOCKS
from tpugraphs_jax.data.features import KINDS, Scaling, Statistics
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.aggregation import USERS
from tpugraphs_jax.nn.conv import MASKED, Sage
from tpugraphs_jax.nn.dropout import Dropout
from tpugraphs_jax.nn.layers import gelu
from tpugraphs_jax.nn.linear import Embedding, Layouts, Linear, Opcodes
from tpugraphs_jax.nn.nodes import concat, Nodes, NONE, Slates
from tpugraphs_jax.nn.norms import instance_norm
from tpugraphs_jax.options import option
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System

NOT_CONFIGURABLE = LAYOUT_VALUE_RANGE[0] - 1  # -2, below all layout values
_VALUES = LAYOUT_VALUE_RANGE[1] - NOT_CONFIGURABLE + 1
_LAYOUT = NODE["minor_to_major"]
_NUMBERS = _LAYOUT.start  # columns before the layout


# Features.


@BLOCKS.register("first")
def numbers(graph: OpGraph) -> np.ndarray:
  """The released columns without the layout, `padded`: `[N, 134]` float32."""
  return padded(graph)[:, :_NUMBERS]


@BLOCKS.register("first_layout")
def layout(graph: OpGraph) -> np.ndarray:
  """The layout of each node's result, minor to major, -1 beyond its rank: `[N, 6]` float32."""
  return padded(graph)[:, _LAYOUT]


@BLOCKS.register("first_tile")
def tile_numbers(graph: OpGraph) -> np.ndarray:
  """The released columns without the layout as they are, `[N, 134]` float32."""
  return graph.node_feat[:, :_NUMBERS]


@BLOCKS.register("first_tile_layout")
def tile_layout(graph: OpGraph) -> np.ndarray:
  """The released layout of each node's result, 0 beyond its rank: `[N, 6]` float32."""
  return graph.node_feat[:, _LAYOUT]


# Operations whose list `dimensions` has one entry.
_ONE_DIMENSION = ("concatenate", "iota", "sort")
_LISTS = ("dimensions", "input_spatial_dimensions", "kernel_spatial_dimensions", "minor_to_major")


def padded(graph: OpGraph) -> np.ndarray:
  """The released columns with -1 behind the end of every list of dimensions, `[N, 140]` float32.

  The 1st place made its layout files anew with such lists: `dimensions`, the spatial dimensions
  of convolutions, and the layout. Released files do not have their lengths, which follow from
  other columns: a layout is as long as its shape; spatial dimensions are as many as those of the
  window of a convolution; `dimensions` is as long as the operand of a broadcast and the result of
  a transpose, counts the dimensions that a reduction drops, is 1 for concatenate, iota and sort,
  and elsewhere reaches up to its last number above 0. Numbers 0 at the end of a `reverse`, and of
  a reduction of several arrays, are taken for padding.
  """
  feat, opcode, ids = graph.node_feat[:, :_LAYOUT.stop].copy(), graph.node_opcode, opcode_ids()
  rank = ranks(feat)
  operand = np.zeros_like(rank)
  np.maximum.at(operand, graph.edge_index[:, 0], rank[graph.edge_index[:, 1]])
  convolution = opcode == ids["convolution"]
  window = feat[:, NODE["window_reversal"]][:, MAX_RANK:].sum(axis=1).astype(int) * convolution
  listed = np.isin(opcode, [ids[name] for name in _ONE_DIMENSION]).astype(int)
  # A tuple, the result of a reduction of several arrays, does not tell how many are dropped.
  dropped = np.where(feat[:, NODE["tuple_size"].start] > 0, 0, np.maximum(operand - rank, 0))
  for name, length in (("broadcast", operand), ("transpose", rank), ("reduce", dropped)):
    listed = np.where(opcode == ids[name], length, listed)
  for name, length in zip(_LISTS, (listed, window, window, rank), strict=True):
    values = feat[:, NODE[name]]
    place = np.arange(1, values.shape[1] + 1)
    last = ((values != 0) * place).max(axis=1)
    values[place > np.maximum(length, last)[:, None]] = -1
  return feat


def ranks(feat: np.ndarray) -> np.ndarray:
  """Dimensions of the result of nodes with the released columns `feat [N, 140]`, `[N]` int64.

  They are the sizes in front of the first 0. Arrays without elements have a size 0 themselves:
  the numbers of their layout tell the rank.
  """
  size, elements = feat[:, sizes(NODE["shape"])], feat[:, NODE["shape"].stop - 1]
  full = np.cumprod(size != 0, axis=1).sum(axis=1)
  return np.where(elements == 0, feat[:, _LAYOUT].max(axis=1).astype(np.int64) + 1, full)


@KINDS.register("first")
def standard_scaler(statistics: Statistics) -> Scaling:
  """Mean 0 and deviation 1; columns that are constant in training stay, with scale 1.

  Source: StandardScaler of scikit-learn.
  """
  varies = statistics.low != statistics.high
  return Scaling(statistics.mean, np.where(varies, statistics.deviation, 1), keeps_constant=True)


# Blocks of the network.


class ChannelGate(nn.Module):
  """`x * sigmoid(W_2 relu(W_1 x + b_1) + b_2)`, W_1 to a bottleneck of an eighth of the channels.

  Attributes:
    linear: makes linear layers by their width.
  """

  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """`[N, C, F]` of `x [N, C, F]`."""
    narrow = self.linear(x.width // 8, name="linear1")
    wide = self.linear(x.width, name="linear2")
    return x.map(lambda v: v * nn.sigmoid(wide(nn.relu(narrow(v)))))


class CrossAttention(nn.Module):
  """Features beside themselves times a softmax over the configurations of the slate.

  `[x, x * softmax_C(x / t)]` for every node and channel, t learned from 0.5 on. Features without
  an axis of configurations have the weight 1.
  """

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """`[N, C, 2 F]` of `x [N, C, F]`."""
    t = self.param("temperature", nn.initializers.constant(0.5), (), jnp.float32)
    if x.hop == NONE:
      return concat(x, x)
    mask = x.slates.node_configs[..., None]
    logits = jnp.where(mask, x.everywhere().astype(jnp.float32) / t, MASKED)
    weights = jnp.where(mask, nn.softmax(logits, axis=1), 0)
    return concat(x, x * x.slates.full(weights.astype(x.dtype)))


class Gates(nn.Module):
  """The gate of channels, then the attention across configurations.

  Attributes:
    across_configs: whether that attention is there; it doubles the channels.
    linear: makes linear layers by their width.
  """

  across_configs: bool
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """`[N, C, F or 2 F]` of `x [N, C, F]`."""
    x = ChannelGate(self.linear, name="attn")(x)
    return CrossAttention(name="cross_attn")(x) if self.across_configs else x


class LinearBlock(nn.Module):
  """`gelu(gates(norm(W x + b)))`; W begins as Xavier's normal, b as 0.01.

  Attributes:
    width: of the result.
    across_configs: see `Gates`.
    linear: makes linear layers by their width.
  """

  width: int
  across_configs: bool
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, *inputs: Any) -> Nodes:
    """`[N, C, width]` of inputs of `nn.linear.Linear` on nodes."""
    x = self.linear(
        self.width // (1 + self.across_configs), name="linear",
        kernel_init=lambda _: nn.initializers.variance_scaling(1.0, "fan_avg", "normal"),
        bias_init=lambda _: nn.initializers.constant(0.01))(*inputs)
    return Gates(self.across_configs, self.linear, name="gates")(instance_norm(x)).map(gelu)


class SageBlock(nn.Module):
  """`dropout(gelu(x + gates(sage(norm(x)))))`, of the width of its input.

  Attributes:
    across_configs: see `Gates`.
    dropout: rate.
    linear: makes linear layers by their width.
  """

  across_configs: bool
  dropout: float
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes, *, train: bool) -> Nodes:
    """`[N, C, F]` of `x [N, C, F]`."""
    width = x.width // (1 + self.across_configs)
    y = Sage(width, (USERS,), self.linear, name="conv")(instance_norm(x))
    y = Gates(self.across_configs, self.linear, name="gates")(y)
    return Dropout(self.dropout)((x + y).map(gelu), train=train)


# Networks.


class First(System):
  """What programs and kernels have in common."""

  op_embed_dim: int = option(16, "width of the opcode vector", least=1)
  value_embed_dim: int = option(4, "width of the vector of a layout integer", least=1)
  width: int = option(256, "width of all blocks, and of the layers of tiles", least=1)
  across_configs: bool = option(True, "whether blocks have attention across configurations")
  dropout: float = option(
      0.2, "dropout rate, behind SAGE blocks and in the layers of tiles", least=0, below=1)

  def setup(self):
    self.last = self.exact(1)

  def encoded(self, slates: Slates, *, train: bool) -> Nodes:
    """Nodes `[N, C, width]` behind all blocks, for a compact method."""
    table = Embedding(_VALUES, self.value_embed_dim, name="layouts")

    def embedded(values):
      vectors = table(jnp.asarray(values, jnp.int32) - NOT_CONFIGURABLE)
      return vectors.reshape(*values.shape[:-1], -1)

    graph = slates.batch.graph
    feat, opcode = jnp.asarray(graph.nodes["feat"]), Opcodes(self.op_embed_dim, name="opcodes")
    static = slates.nodes(jnp.concatenate(
        [feat[:, :-MAX_RANK], embedded(feat[:, -MAX_RANK:]), opcode(graph)], axis=-1))
    linear = functools.partial(LinearBlock, self.width, self.across_configs, self.linear)
    x = linear(name="linear")(static, *self.configurations(slates, embedded))
    x = linear(name="linear2")(x)
    for number in range(2):
      block = SageBlock(self.across_configs, self.dropout, self.linear, name=f"convs_{number}")
      x = block(x, train=train)
    return x

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., width]`."""
    return self.last(readout)[..., 0]


@base.LAYOUT_MODELS.register("First")
class FirstLayout(First):
  """The 1st place on layouts."""

  reads = ("first_layout",)
  sees_whole_graph = True
  embeds_integers = True

  @property
  def compares_configs(self) -> bool:
    return self.across_configs

  def configurations(self, slates: Slates, embedded: Callable) -> list[Layouts]:
    """Embedded layouts."""
    rows = jnp.asarray(slates.batch.rows)
    nowhere = jnp.full((1, rows.shape[1]), NOT_CONFIGURABLE)
    return [Layouts(slates, embedded(rows), embedded(nowhere))]

  @nn.compact
  def embed(self, batch: Any, *, train: bool = False) -> jax.Array:
    """Means over nodes, `[G, C, width]` float32."""
    return pooling.mean(self.encoded(Slates.of(batch), train=train))


@base.TILE_MODELS.register("First")
class FirstTile(First):
  """The 1st place on tiles."""

  reads = ("first_tile_layout",)

  def configurations(self, slates: Slates, embedded: Callable) -> list:
    """None: tiles join behind the blocks."""
    del slates, embedded
    return []

  @nn.compact
  def embed(self, batch: Any, *, train: bool = False) -> jax.Array:
    """The MLP of tile, maximum and mean but for its last layer, `[G, C, width]` float32."""
    dense = lambda name: self.exact(self.width, name=name)
    hidden = lambda x: gelu(Dropout(self.dropout)(x, train=train))
    x = self.encoded(Slates.of(batch), train=train)
    tile = hidden(dense("dense_cfg_0")(jnp.asarray(batch.config_feat)))
    tile = dense("dense_cfg_1")(tile)
    kernel = jnp.concatenate([pooling.largest(x), pooling.mean(x)], axis=-1)
    kernel = jnp.broadcast_to(kernel, (*tile.shape[:2], kernel.shape[-1]))
    joined = jnp.concatenate([tile, kernel], axis=-1)
    return hidden(dense("dense_1")(hidden(dense("dense_0")(joined))))
