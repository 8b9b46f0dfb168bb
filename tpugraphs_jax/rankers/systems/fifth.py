"""The 5th place: GraphSAGE over users beside GraphSAGE over operands, and the sum over nodes.

    columns, tokens, opcode and layouts of a node -> linear -> SAGE rounds -> sum -> linear -> score
    tiles: tokens and tile of a node -> transformer -> mean, in place of tokens and layouts

Published: a node has 53 columns, six tokens of 23 numbers, and an opcode vector of width 64, which
unary element-wise operations share. The layout of a node replaces its configuration where it is not
configurable. A linear layer of width 384 has ReLU. Each of three rounds concatenates SAGE of width
192 over users and over operands, with ReLU. A linear layer maps the sum over nodes to the score.
DropEdge removes a share of edges, drawn from 0 to 0.15 in each step.

A token was meant to describe one dimension of a tensor. The published code concatenates lists of
six numbers and splits the result into six parts: the first nine numbers of a token are from one or
two lists. Here tokens are equal to the published ones.

Source: knshnb/kaggle-tpu-graph-5th-place, 66c2f7f.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.columns import (
  LAYOUT_CONFIG_FEATURES,
  MAX_RANK,
  NODE,
  opcode_ids,
  OPCODES,
  sizes,
  span,
  TILE,
)
from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.data.features import BLOCKS
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.nn import nodes, pooling
from tpugraphs_jax.nn.aggregation import OPERANDS, take_rows, USERS
from tpugraphs_jax.nn.attention import TransformerLayer
from tpugraphs_jax.nn.conv import Sage
from tpugraphs_jax.nn.dropout import drop_edges
from tpugraphs_jax.nn.embeddings import Embedding
from tpugraphs_jax.nn.layers import Layouts, Tiles, uniform
from tpugraphs_jax.nn.nodes import Nodes, Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System

# Features. Minima and maxima are the constants of the published code, from the released data.

# Maxima of columns that are scaled from 0..maximum to -1..1.
_SCALED = dict.fromkeys([0, 3, 6, 7, 10, 13, 15, 18, 20, 30, 91, 92, *range(113, 116)], 1)
_SCALED |= dict.fromkeys([125, 128, 133], 1) | {30: 35, 91: 3, 92: 5, 115: 5}
# Minima of columns that become logarithms.
_LOGARITHMS = dict.fromkeys(
  np.r_[27:30, 43:45, 51:53, 59:61, 67:69, 75:77, 83:85, 107:113, 117:125, 126:128, 129:133], 0
) | {28: 1, 44: 1, 52: 1, 67: -2, 76: 1, 84: 1, 120: 1, 124: 1, 127: -39, 131: -24}
# Minima and maxima of lists with a number per dimension.
_SCALED_LISTS = {
  "dimensions": (0, 5),
  "window_stride": (0, 4),
  "window_padding_high": (-1, 4),
  "window_dilation": (0, 4),
  "base_dilation": (0, 4),
  "window_reversal": (0, 1),
}
_LOGARITHM_LISTS = ("shape", "window_size", "window_padding_low")
_CONVOLUTION = span(NODE, "input_batch_dimension", "output_feature_dimension")
TOKEN = len(_SCALED_LISTS) + len(_LOGARITHM_LISTS) + 14  # numbers of a token
TOKENS = MAX_RANK * TOKEN
_HEADS = 2  # of the attention between tokens


def _scaled(x: np.ndarray, low: Any, high: Any) -> np.ndarray:
  """Scales `x [N, F]` from low..high to -1..1."""
  return 2 * (x - np.float32(low)) / (np.float32(high) - np.float32(low)) - 1


def _logarithm(x: np.ndarray, low: Any) -> np.ndarray:
  """log(x + 1 - low) of `x [N, F]`; 0 below `low`, where the public logarithm is not finite."""
  return np.log1p(np.maximum(x - np.float32(low), 0))


@BLOCKS.register("fifth_columns")
def columns(graph: OpGraph) -> np.ndarray:
  """53 columns of single numbers, `[N, 53]` float32: 18 scaled to -1..1, 35 as logarithms."""
  select = lambda table: (graph.node_feat[:, list(table)].astype(np.float32), list(table.values()))
  scaled, high = select(_SCALED)
  return np.concatenate([_scaled(scaled, 0, high), _logarithm(*select(_LOGARITHMS))], axis=1)


@BLOCKS.register("fifth_tokens")
def tokens(graph: OpGraph) -> np.ndarray:
  """Six tokens of 23 numbers, `[N, 6 * 23]` float32.

  The concatenated lists of dimensions are split into six parts of nine numbers, one per token. The
  other 14 numbers mark dimension numbers of a convolution that are equal to the index of the token.
  A dimension number 0 is never marked, because other opcodes have it too.
  """
  feat, count = graph.node_feat.astype(np.float32), graph.num_nodes
  part = lambda name: feat[:, sizes(NODE[name])]
  lists = [_scaled(part(name), *ends) for name, ends in _SCALED_LISTS.items()]
  lists += [_logarithm(part(name), 0) for name in _LOGARITHM_LISTS]
  numbers = feat[:, None, _CONVOLUTION]
  is_equal = (numbers == np.arange(MAX_RANK)[None, :, None]) & (numbers > 0)
  sixths = np.concatenate(lists, axis=1).reshape(count, MAX_RANK, -1)
  return np.concatenate([sixths, is_equal], axis=2).reshape(count, TOKENS).astype(np.float32)


@BLOCKS.register("fifth_layout")
def own_layout(graph: OpGraph) -> np.ndarray:
  """The layout of each node's result, minor to major, with -1 for 0: `[N, 6]` float32.

  A released 0 is dimension 0 or no dimension; the published code does not distinguish them.
  """
  layout = graph.node_feat[:, NODE["minor_to_major"]].astype(np.float32)
  return np.where(layout == 0, np.float32(-1), layout)


# Unary element-wise operations, which share one opcode vector.
_UNARY = (
  "abs cbrt ceil cosine exponential exponential-minus-one floor is-finite log log-plus-one "
  "logistic negate not round-nearest-afz round-nearest-even rsqrt sign sine sqrt tan tanh"
).split()


def _opcode_rows() -> np.ndarray:
  """Row of the embedding table for each opcode, `[121]` int32."""
  ids, row = opcode_ids(), np.arange(OPCODES, dtype=np.int32)
  row[[ids[name] for name in _UNARY]] = ids[_UNARY[0]]
  return row


# Networks.


class KaggleFifth(System):
  """The 5th place."""

  op_embed_dim: int = option(64, "width of the opcode vector", least=1)
  width: int = option(
    384, "width of the first linear layer and of each round; a direction has half", least=1
  )
  num_layers: int = option(3, "SAGE rounds", least=1, most=MOST_LAYERS)
  drop_edge: float = option(
    0.15, "largest share of edges that a training step drops", least=0, below=1
  )

  embeds_integers = True  # configurations are unscaled

  @nn.compact
  def embed(self, batch: LayoutBatch | TileBatch, *, train: bool = False) -> jax.Array:
    """The sum over nodes, `[G, C, width]` float32."""
    slates = Slates.of(batch)
    if train and self.drop_edge:
      slates = drop_edges(slates, self.make_rng("dropout"), self.drop_edge)
    opcode = jnp.asarray(_opcode_rows())[batch.graph.nodes["opcode"]]
    opcode = Embedding(OPCODES, self.op_embed_dim, name="opcodes")(opcode)
    x = self.first(slates, jnp.asarray(batch.graph.nodes["feat"]), opcode).map(nn.relu)
    for number in range(self.num_layers):
      sage = lambda side: Sage(self.width // 2, (side,), self.linear, name=f"{side}_{number}")(x)
      x = nodes.concat(sage(USERS), sage(OPERANDS)).map(nn.relu)
    return pooling.total(x)


@base.LAYOUT_MODELS.register("Fifth")
class KaggleFifthLayout(KaggleFifth):
  """The 5th place on layouts."""

  reads = ("fifth_columns", "fifth_tokens", "fifth_layout")

  @property
  def hops(self) -> int:
    return self.num_layers

  def first(self, slates: Slates, feat: jax.Array, opcode: jax.Array) -> Nodes:
    """The first linear layer. Nodes without a configuration have their own layout three times."""
    feat, layout = feat[:, :-MAX_RANK], feat[:, -MAX_RANK:]
    elsewhere = jnp.tile(layout, (1, LAYOUT_CONFIG_FEATURES // MAX_RANK))
    static = jnp.concatenate([feat, opcode], axis=-1)
    # The published layer has 18 more inputs: tiles, which are 0 for programs.
    init = uniform(static.shape[-1] + 2 * LAYOUT_CONFIG_FEATURES)
    linear = self.linear(self.width, kernel_init=init, bias_init=init, name="first")
    return linear(slates.nodes(static), Layouts(slates, jnp.asarray(slates.batch.rows), elsewhere))


@base.TILE_MODELS.register("Fifth")
class KaggleFifthTile(KaggleFifth):
  """The 5th place on tiles."""

  token_width: int = option(256, "width of the transformer over tokens", least=1)
  token_layers: int = option(2, "number of layers of the transformer", least=1, most=MOST_LAYERS)

  reads = ("fifth_columns", "fifth_tokens")
  distinct = TOKENS

  def first(self, slates: Slates, feat: jax.Array, opcode: jax.Array) -> Nodes:
    """The first linear layer, on columns, opcode and the mean of encoded tokens."""
    encode = TokenEncoder(self.token_width, self.token_layers, self.linear, name="tokens")
    tokens = encode(feat[:, -TOKENS:].reshape(-1, MAX_RANK, TOKEN), slates)
    static = slates.nodes(feat[:, :-TOKENS], opcode)
    return self.linear(self.width, name="first")(static, tokens)


class TokenEncoder(nn.Module):
  """The mean of six tokens of a node after a transformer, which also reads the tile.

  Nodes of a kernel with equal tokens are encoded once, as published. In released kernels about a
  quarter of the nodes have unique tokens.

  Attributes:
    features: width of tokens and of the result.
    layers: number of layers.
    linear: creates a linear layer of a width.
  """

  features: int
  layers: int
  linear: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, tokens: jax.Array, slates: Slates) -> Nodes:
    """Maps `tokens [N, 6, 23]` to `[N, C, features]`."""
    sets = slates.batch.distinct
    graph_of = slates.graph_of.at[sets.first].get(mode="fill", fill_value=slates.graphs)
    first = dataclasses.replace(slates, graph_of=graph_of)
    static = take_rows(tokens, sets.first)
    number = jnp.broadcast_to(jnp.arange(MAX_RANK)[None, :, None], (*static.shape[:2], 1))
    static = jnp.concatenate([static, _places(static), number.astype(static.dtype)], axis=-1)
    linear = functools.partial(self.linear, kernel_init=nn.initializers.glorot_uniform())
    inputs = first.nodes(static), Tiles(first, _bounds(jnp.asarray(slates.batch.config_feat)))
    x = linear(self.features, name="tokens")(*inputs).map(nn.relu).everywhere()
    for layer in range(self.layers):
      x = TransformerLayer(self.features, _HEADS, linear=linear, name=f"layer_{layer}")(x)
    return slates.full(take_rows(x.mean(axis=2), sets.which))


def _places(tokens: jax.Array) -> jax.Array:
  """Maps `tokens [n, 6, 23]` to the place of their dimension in three layouts, `[n, 6, 3]`.

  Nodes of kernels have no layouts: all places are -1. A virtual node has zero tokens and layouts of
  -2. The published code inverts a layout by indexing, where -2 counts from the end: dimension 4
  gets the last place that is written, 5. A GPU may write another one last.
  """
  is_virtual = ~tokens.any(axis=(1, 2))
  place = jnp.where(is_virtual[:, None] & (jnp.arange(MAX_RANK) == 4)[None], 5.0, -1.0)
  return jnp.broadcast_to(place[..., None], (*place.shape, 3)).astype(tokens.dtype)


def _bounds(tiles: jax.Array) -> jax.Array:
  """log(1 + x) of three bounds per dimension, `[G, C, 6, 3]`, from `tiles [G, C, 24]`."""
  bounds = jnp.stack([tiles[..., sizes(block)] for block in TILE.values()], axis=-1)
  return jnp.log1p(jnp.maximum(bounds, 0))
