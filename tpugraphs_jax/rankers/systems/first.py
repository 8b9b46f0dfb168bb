"""The 1st place: instance norm, gates, and attention across the configurations of a slate.

    features, layout, opcode and configuration of a node
      -> 2 linear blocks -> 2 SAGE blocks over users -> mean over nodes -> score

    linear block   x -> gelu(gates(norm(W x + b)))
    SAGE block     x -> dropout(gelu(x + gates(sage(norm(x)))))

Published: programs are reduced to the edges at configurable nodes. Lists of dimensions are padded
with -1. 134 columns are standardised with statistics of reduced training programs. One embedding
serves the layouts of nodes and of configurations; nodes that are not configurable have the value
-2. The norm is over the nodes of a graph, per configuration and channel. Gates scale each channel.
In default collections and for tiles they also have attention across configurations, which doubles
the channels. Kernels are encoded without their tile. An MLP joins the tile with maximum and mean
over nodes.

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
from tpugraphs_jax.config_fields import option
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.data.features import BLOCKS
from tpugraphs_jax.data.transforms import KINDS, Scaling, Statistics
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.aggregation import USERS
from tpugraphs_jax.nn.conv import MASKED, Sage
from tpugraphs_jax.nn.dropout import Dropout
from tpugraphs_jax.nn.embeddings import Embedding, Opcodes
from tpugraphs_jax.nn.layers import gelu, instance_norm, Layouts, Linear
from tpugraphs_jax.nn.nodes import concat, Nodes, NONE, Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System

NOT_CONFIGURABLE = LAYOUT_VALUE_RANGE[0] - 1  # -2, below all layout values
_VALUES = LAYOUT_VALUE_RANGE[1] - NOT_CONFIGURABLE + 1
_LAYOUT = NODE["minor_to_major"]
_NUMBERS = _LAYOUT.start  # columns before the layout


# Features.


@BLOCKS.register("first")
def numbers(graph: OpGraph) -> np.ndarray:
  """The released columns without the layout, from `pad_lists`: `[N, 134]` float32."""
  return pad_lists(graph)[:, :_NUMBERS]


@BLOCKS.register("first_layout")
def layout(graph: OpGraph) -> np.ndarray:
  """The layout of each node's result, minor to major, -1 beyond its rank: `[N, 6]` float32."""
  return pad_lists(graph)[:, _LAYOUT]


@BLOCKS.register("first_tile")
def tile_numbers(graph: OpGraph) -> np.ndarray:
  """The released columns without the layout, `[N, 134]` float32."""
  return graph.node_feat[:, :_NUMBERS]


@BLOCKS.register("first_tile_layout")
def tile_layout(graph: OpGraph) -> np.ndarray:
  """The released layout of each node's result, 0 beyond its rank: `[N, 6]` float32."""
  return graph.node_feat[:, _LAYOUT]


# Operations whose list `dimensions` has one entry.
_ONE_DIMENSION = ("concatenate", "iota", "sort")
_LISTS = ("dimensions", "input_spatial_dimensions", "kernel_spatial_dimensions", "minor_to_major")


def pad_lists(graph: OpGraph) -> np.ndarray:
  """The released columns with lists of dimensions padded by -1, `[N, 140]` float32.

  The 1st place rebuilt its layout files with such lists. Released files pad with 0 and do not
  have the lengths, which are inferred from other columns:

    layout               rank of the result
    spatial dimensions   number of window dimensions of a convolution
    dimensions           rank of the operand (broadcast), rank of the result (transpose), number of
                         reduced dimensions (reduce), 1 (concatenate, iota, sort); for other
                         opcodes the list ends at its last number above 0

  Zeros at the end of `dimensions` of a `reverse`, or of a reduction of several arrays, count as
  padding.
  """
  feat, opcode, ids = graph.node_feat[:, : _LAYOUT.stop].copy(), graph.node_opcode, opcode_ids()
  rank = ranks(feat)
  operand = np.zeros_like(rank)
  np.maximum.at(operand, graph.edge_index[:, 0], rank[graph.edge_index[:, 1]])
  convolution = opcode == ids["convolution"]
  window = feat[:, NODE["window_reversal"]][:, MAX_RANK:].sum(axis=1).astype(int) * convolution
  dimensions = np.isin(opcode, [ids[name] for name in _ONE_DIMENSION]).astype(int)
  # A reduction of several arrays has a tuple as its result, which has no rank.
  reduced = np.where(feat[:, NODE["tuple_size"].start] > 0, 0, np.maximum(operand - rank, 0))
  for name, length in (("broadcast", operand), ("transpose", rank), ("reduce", reduced)):
    dimensions = np.where(opcode == ids[name], length, dimensions)
  for name, length in zip(_LISTS, (dimensions, window, window, rank), strict=True):
    values = feat[:, NODE[name]]
    place = np.arange(1, values.shape[1] + 1)
    last = ((values != 0) * place).max(axis=1)
    values[place > np.maximum(length, last)[:, None]] = -1
  return feat


def ranks(feat: np.ndarray) -> np.ndarray:
  """Rank of the result of each node, `[N]` int64, from the released columns `feat [N, 140]`.

  The rank is the number of sizes before the first 0. Arrays without elements have a dimension of
  size 0: their rank is read from the layout.
  """
  size, elements = feat[:, sizes(NODE["shape"])], feat[:, NODE["shape"].stop - 1]
  full = np.cumprod(size != 0, axis=1).sum(axis=1)
  return np.where(elements == 0, feat[:, _LAYOUT].max(axis=1).astype(np.int64) + 1, full)


@KINDS.register("first")
def standard_scaler(statistics: Statistics) -> Scaling:
  """Scales columns to mean 0 and deviation 1; constant columns have scale 1.

  Source: StandardScaler of scikit-learn.
  """
  varies = statistics.low != statistics.high
  return Scaling(statistics.mean, np.where(varies, statistics.deviation, 1), keeps_constant=True)


# Blocks of the network.


class ChannelGate(nn.Module):
  """`x * sigmoid(W_2 relu(W_1 x + b_1) + b_2)`; the hidden layer has an eighth of the channels.

  Attributes:
    linear: creates a linear layer of a width.
  """

  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, F]`."""
    narrow = self.linear(x.width // 8, name="linear1")
    wide = self.linear(x.width, name="linear2")
    return x.map(lambda v: v * nn.sigmoid(wide(nn.relu(narrow(v)))))


class CrossAttention(nn.Module):
  """Features, and features weighted by a softmax over the configurations of the slate.

  `[x, x * softmax_C(x / t)]` per node and channel, with a learned t that is initially 0.5.
  Features that are equal in all configurations have the weight 1.
  """

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, 2 F]`."""
    t = self.param("temperature", nn.initializers.constant(0.5), (), jnp.float32)
    if x.hop == NONE:
      return concat(x, x)
    mask = x.slates.node_configs[..., None]
    logits = jnp.where(mask, x.everywhere().astype(jnp.float32) / t, MASKED)
    weights = jnp.where(mask, nn.softmax(logits, axis=1), 0)
    return concat(x, x * x.slates.full(weights.astype(x.dtype)))


class Gates(nn.Module):
  """`ChannelGate`, then optionally `CrossAttention`.

  Attributes:
    across_configs: apply `CrossAttention`, which doubles the channels.
    linear: creates a linear layer of a width.
  """

  across_configs: bool
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, F or 2 F]`."""
    x = ChannelGate(self.linear, name="attn")(x)
    return CrossAttention(name="cross_attn")(x) if self.across_configs else x


class LinearBlock(nn.Module):
  """`gelu(gates(norm(W x + b)))`; W is initialised as Xavier normal, b as 0.01.

  Attributes:
    width: width of the result.
    across_configs: see `Gates`.
    linear: creates a linear layer of a width.
  """

  width: int
  across_configs: bool
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, *inputs: Any) -> Nodes:
    """Maps inputs of `nn.layers.Linear` on nodes to `[N, C, width]`."""
    xavier = nn.initializers.variance_scaling(1.0, "fan_avg", "normal")
    width, bias = self.width // (1 + self.across_configs), nn.initializers.constant(0.01)
    x = self.linear(width, name="linear", kernel_init=xavier, bias_init=bias)(*inputs)
    return Gates(self.across_configs, self.linear, name="gates")(instance_norm(x)).map(gelu)


class SageBlock(nn.Module):
  """`dropout(gelu(x + gates(sage(norm(x)))))`.

  Attributes:
    across_configs: see `Gates`.
    dropout: dropout rate.
    linear: creates a linear layer of a width.
  """

  across_configs: bool
  dropout: float
  linear: Callable[..., nn.Module] = Linear

  @nn.compact
  def __call__(self, x: Nodes, *, train: bool) -> Nodes:
    """Maps `x [N, C, F]` to `[N, C, F]`."""
    width = x.width // (1 + self.across_configs)
    y = Sage(width, (USERS,), self.linear, name="conv")(instance_norm(x))
    y = Gates(self.across_configs, self.linear, name="gates")(y)
    return Dropout(self.dropout)((x + y).map(gelu), train=train)


# Networks.


class KaggleFirst(System):
  """The part of the network that programs and kernels share."""

  op_embed_dim: int = option(16, "width of the opcode vector", least=1)
  value_embed_dim: int = option(4, "width of the vector of a layout integer", least=1)
  width: int = option(256, "width of all blocks and of the layers of tiles", least=1)
  across_configs: bool = option(True, "attention across configurations in every block")
  dropout: float = option(
    0.2, "dropout rate after SAGE blocks and in the layers of tiles", least=0, below=1
  )

  def encode(self, slates: Slates, *, train: bool) -> Nodes:
    """Node features `[N, C, width]` after all blocks; to be called by a compact method."""
    table = Embedding(_VALUES, self.value_embed_dim, name="layouts")

    def embed_values(values):
      vectors = table(jnp.asarray(values, jnp.int32) - NOT_CONFIGURABLE)
      return vectors.reshape(*values.shape[:-1], -1)

    graph = slates.batch.graph
    feat, opcode = jnp.asarray(graph.nodes["feat"]), Opcodes(self.op_embed_dim, name="opcodes")
    static = slates.nodes(feat[:, :-MAX_RANK], embed_values(feat[:, -MAX_RANK:]), opcode(graph))
    inputs: list[Nodes | Layouts] = [static]
    if isinstance(slates.batch, LayoutBatch):  # tiles join after the blocks
      rows = jnp.asarray(slates.batch.rows)
      elsewhere = jnp.full((1, rows.shape[1]), NOT_CONFIGURABLE)
      inputs.append(Layouts(slates, embed_values(rows), embed_values(elsewhere)))
    linear = functools.partial(LinearBlock, self.width, self.across_configs, self.linear)
    x = linear(name="linear")(*inputs)
    x = linear(name="linear2")(x)
    for number in range(2):
      block = SageBlock(self.across_configs, self.dropout, self.linear, name=f"convs_{number}")
      x = block(x, train=train)
    return x


@base.LAYOUT_MODELS.register("First")
class KaggleFirstLayout(KaggleFirst):
  """The 1st place on layouts."""

  reads = ("first_layout",)
  sees_whole_graph = True
  embeds_integers = True

  @property
  def compares_configs(self) -> bool:
    return self.across_configs

  @nn.compact
  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The mean over nodes, `[G, C, width]` float32."""
    return pooling.mean(self.encode(Slates.of(batch), train=train))


@base.TILE_MODELS.register("First")
class KaggleFirstTile(KaggleFirst):
  """The 1st place on tiles."""

  reads = ("first_tile_layout",)

  @nn.compact
  def embed(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """The last hidden layer of the MLP on tile, maximum and mean, `[G, C, width]` float32."""
    dense = lambda name: self.exact(self.width, name=name)
    hidden = lambda x: gelu(Dropout(self.dropout)(x, train=train))
    x = self.encode(Slates.of(batch), train=train)
    tile = hidden(dense("dense_cfg_0")(jnp.asarray(batch.config_feat)))
    tile = dense("dense_cfg_1")(tile)
    kernel = jnp.concatenate([pooling.largest(x), pooling.mean(x)], axis=-1)
    kernel = jnp.broadcast_to(kernel, (*tile.shape[:2], kernel.shape[-1]))
    joined = jnp.concatenate([tile, kernel], axis=-1)
    return hidden(dense("dense_1")(hidden(dense("dense_0")(joined))))
