"""Configurations that meet encoded nodes, or the pooled graph, behind the encoder.

The encoder runs once for all configurations then: its nodes are `[N, 1, F]`. The plain
form has a copy for each configuration, `[N, C, F]`.
"""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import layers, layout_features
from tpugraphs_jax.nn.layers import JoinedDense
from tpugraphs_jax.nn.split_nodes import SplitNodes
from tpugraphs_jax.rankers.composed import encodings
from tpugraphs_jax.rankers.composed.attention import EncoderLayer
from tpugraphs_jax.rankers.composed.blocks import drop
from tpugraphs_jax.rankers.composed.inputs import config_values
from tpugraphs_jax.rankers.composed.nodes import Slates
from tpugraphs_jax.rankers.composed.norms import Activation
from tpugraphs_jax.rankers.composed.options import Options

Dense = Callable[..., nn.Module]


def _encoded(options: Options, slates: Slates) -> jax.Array:
  """Configurations as inputs: rows `[R, V]` of layouts, or tiles `[G, C, V]`."""
  values = config_values(slates)
  return encodings.Values(
      options.encoding, values.shape[-1], options.encoding_scale, options.value_embed_dim,
      name="values").configurations(values)


class Middle(nn.Module):
  """Configurable nodes with their configurations through an MLP (10th place).

  Attributes:
    options: of the ranker.
    matmul: product `[..., K] @ [K, F]` in the dtype of the computation.
    dense: makes linear layers.
  """

  options: Options
  matmul: Callable[[jax.Array, jax.Array], jax.Array]
  dense: Dense

  @nn.compact
  def __call__(self, x: jax.Array, slates: Slates) -> SplitNodes:
    """Mixes `x [N, 1 or C, F]` with rows of hop 0: `[N, 1, H]` zeros and `[hop 0, C, H]`."""
    options, batch = self.options, slates.batch
    rows = _encoded(options, slates)
    own = x.at[batch.by_hop.nodes[0]].get(mode="fill", fill_value=0)
    width = options.fusion_widths[0]
    (kernel, config_kernel), bias = JoinedDense(width, name="join")(
        (x.shape[-1], rows.shape[-1]))
    if options.share:
      config = layout_features.config_rows(self.matmul(rows, config_kernel), batch)
      mixed = self.matmul(own, kernel) + config
    else:
      config = layout_features.config_rows(rows, batch)
      mixed = self.matmul(jnp.concatenate([own, config], axis=-1),
                          jnp.concatenate([kernel, config_kernel]))
    mixed = Activation(options.activation, name="activation_0")(
        mixed + bias[None].astype(mixed.dtype))
    for number, width in enumerate(options.fusion_widths[1:], start=1):
      mixed = self.dense(width, name=f"dense_{number}")(mixed)
      mixed = Activation(options.activation, name=f"activation_{number}")(mixed)
    return SplitNodes(jnp.zeros((len(x), 1, mixed.shape[-1]), mixed.dtype), mixed, 0)


class Late(nn.Module):
  """Tiles through an MLP, beside the pooled kernel (1st and 6th place).

  Attributes:
    options: of the ranker.
    dense: makes linear layers.
  """

  options: Options
  dense: Dense

  @nn.compact
  def __call__(self, pooled: jax.Array, slates: Slates, *, train: bool = False) -> jax.Array:
    """Appends configurations to `pooled [G, 1 or C, P]`: `[G, C, P + fusion width]`."""
    config = _encoded(self.options, slates)
    for number, width in enumerate(self.options.fusion_widths):
      if number:
        config = drop(config, self.options, "fusion", train=train)
        config = Activation(self.options.activation, name=f"activation_{number}")(config)
      config = self.dense(width, name=f"dense_{number}")(config)
    shape = *config.shape[:2], pooled.shape[-1]
    return jnp.concatenate([jnp.broadcast_to(pooled, shape), config], axis=-1)


class Cross(nn.Module):
  """Tiles as queries to the nodes of their kernel (10th place).

  Attributes:
    options: of the ranker.
  """

  options: Options

  @nn.compact
  def __call__(self, x: jax.Array, slates: Slates) -> jax.Array:
    """What configurations learn from nodes `x [N, 1 or C, F]`: `[G, C, H]`."""
    options = self.options
    query = layers.MLP(options.fusion_widths, name="queries")(_encoded(options, slates))
    graphs, configs = slates.graphs, slates.configs
    member = slates.graph_of[None] == jnp.arange(graphs)[:, None]
    if options.share:  # all queries at once to nodes that have no configuration
      query = query.reshape(1, graphs * configs, -1)
      member = jnp.repeat(member, configs, axis=0)
    else:
      query = jnp.swapaxes(query, 0, 1)
    to = jnp.swapaxes(x, 0, 1)
    for number in range(options.decoder_layers):
      layer = EncoderLayer(query.shape[-1], options.heads, name=f"layer_{number}")
      query = layer(query, to, member[None, None])
    if options.share:
      return query.reshape(graphs, configs, -1)
    return jnp.swapaxes(query, 0, 1)
