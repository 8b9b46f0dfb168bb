"""Tensor dimensions as tokens of a small transformer (5th place, its tile ranker).

A token is what a node says of one of its six dimensions: the columns of the feature block
`dimension_tokens`, where layouts put the dimension, how a tile cuts it, and its number.

The published code joins its columns group by group and cuts them into six tokens without
a transposition, so that its tokens mix dimensions. The feature block here is ordered by
dimension.
"""

from __future__ import annotations

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import layers
from tpugraphs_jax.nn.aggregation import take_rows
from tpugraphs_jax.nn.layers import JoinedDense
from tpugraphs_jax.rankers.composed import nodes, parts
from tpugraphs_jax.rankers.composed.attention import EncoderLayer
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates

DIMENSIONS = 6
FEATURES = 23  # of a dimension, in the feature block
_SLOTS = 3  # layouts of output, input, kernel; bounds of kernel, output, input of a tile
_HEADS = 2


def places(minor_to_major: jax.Array) -> jax.Array:
  """Where layouts `[..., 6]` have each dimension: 0 = minor; -1 where they do not name it.

  The result is `[..., 6]` float32, by dimension.
  """
  named = jnp.asarray(minor_to_major)[..., :, None] == _numbers(minor_to_major.ndim + 1)
  order = 1.0 + jnp.arange(DIMENSIONS).reshape((1,) * (named.ndim - 2) + (-1, 1))
  return jnp.max(jnp.where(named, order, 0), axis=-2) - 1


def _numbers(rank: int) -> jax.Array:
  return jnp.arange(DIMENSIONS, dtype=jnp.float32).reshape((1,) * (rank - 1) + (-1,))


class DimensionEncoder(nn.Module):
  """Six tokens per node through a linear layer and a transformer; their mean.

  Attributes:
    features: width.
    num_layers: of the transformer.
    share: whether the linear layer and the transformer see once what configurations share.
  """

  features: int
  num_layers: int = 2
  share: bool = True

  @nn.compact
  def __call__(self, columns: jax.Array, layout: jax.Array | None, slates: Slates) -> Nodes:
    """Encodes nodes with their configurations.

    Args:
      columns: `[N, 6 * 23]` float32, dimension after dimension.
      layout: `[N, 6]` float32 the nodes' own layouts, minor to major; None stands for -1
        throughout, as the 5th place has it for kernels.
      slates: of the nodes, with untransformed configurations.

    Returns:
      `[N, C, features]` in either form.
    """
    count = len(columns)
    layout = jnp.full((count, DIMENSIONS), -1.0) if layout is None else layout
    own = jnp.broadcast_to(places(layout)[..., None], (count, DIMENSIONS, _SLOTS))
    number = jnp.broadcast_to(_numbers(2)[..., None], (count, DIMENSIONS, 1))
    static = [columns.reshape(count, DIMENSIONS, FEATURES), number]
    config = (tile_tokens(jnp.asarray(slates.batch.config_feat)) if slates.by_hop is None
              else layout_tokens(jnp.asarray(slates.batch.rows)))
    static += [own] if slates.by_hop is None else []
    blocks, bias = JoinedDense(self.features, name="tokens")(
        (FEATURES + 1 + _SLOTS * (slates.by_hop is None), _SLOTS))
    project = lambda x, kernel: layers.matmul(x, kernel, dtype=None, precision="highest")
    flat = lambda x: x.reshape(*x.shape[:-2], -1)
    base = project(jnp.concatenate(static, axis=-1), blocks[0]) + bias[None]
    if slates.by_hop is None:
      part = parts.tile_part(flat(project(config, blocks[1])), slates)
    else:
      part = parts.layout_part(
          flat(project(config, blocks[1])), flat(project(own, blocks[1])), slates)
    x = part.through(lambda rows: rows)
    x = nodes.add(slates, x, nodes.spread(flat(base), x, slates))
    x = x if self.share else nodes.everywhere(x, slates)
    encoders = [EncoderLayer(self.features, _HEADS, name=f"layer_{i}")
                for i in range(self.num_layers)]

    def encode(rows):
      tokens = nn.relu(rows.reshape(*rows.shape[:2], DIMENSIONS, self.features))
      for encoder in encoders:
        tokens = encoder(tokens)
      return tokens.mean(axis=-2)

    return jax.tree.map(encode, x)


def once_each(
    encoder: DimensionEncoder, columns: jax.Array, layout: jax.Array | None, slates: Slates
) -> Nodes:
  """What `encoder(columns, layout, slates)` gives, computed once for equal nodes of a kernel.

  The published system does so (5th place). Among released kernels about a quarter of the
  nodes are distinct in what tokens say of them. A batch without `distinct`, and the plain
  form of the encoder, pass all nodes.
  """
  distinct = slates.batch.distinct if encoder.share and slates.by_hop is None else None
  if distinct is None:
    return encoder(columns, layout, slates)
  graph_of = slates.graph_of.at[distinct.first].get(mode="fill", fill_value=slates.graphs)
  take = lambda rows: None if rows is None else take_rows(rows, distinct.first)
  encoded = encoder(
      take(columns), take(layout), dataclasses.replace(slates, graph_of=graph_of))
  return take_rows(encoded, distinct.which)


def layout_tokens(rows: jax.Array) -> jax.Array:
  """The three layouts of configurations `[R, 18]` by dimension, `[R, 6, 3]`."""
  return jnp.swapaxes(places(rows.reshape(len(rows), _SLOTS, DIMENSIONS)), 1, 2)


def tile_tokens(configs: jax.Array) -> jax.Array:
  """The three bounds of tiles `[G, C, 24]` by dimension, `[G, C, 6, 3]`, as log(1 + x)."""
  bounds = configs.reshape(*configs.shape[:2], _SLOTS, -1)[..., :DIMENSIONS]
  return jnp.swapaxes(jnp.log1p(jnp.maximum(bounds, 0)), 2, 3)
