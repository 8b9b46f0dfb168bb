"""Everything behind the encoder: configurations that join there, the readout, and the head.

A join behind the encoder lets the encoder run once for all configurations: its nodes are
`[N, 1, F]`. Configurations then meet encoded nodes (`Middle`, `Cross`) or the pooled
kernel (`Late`).
"""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import layers
from tpugraphs_jax.rankers.composed import pooling, split_nodes
from tpugraphs_jax.nn.layers import JoinedDense
from tpugraphs_jax.rankers.composed.split_nodes import SplitNodes
from tpugraphs_jax.rankers.composed import nodes
from tpugraphs_jax.rankers.composed.attention import EncoderLayer
from tpugraphs_jax.rankers.composed.inputs import Values, config_values
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates
from tpugraphs_jax.rankers.composed.operations import Activation, drop, masked_normal, width_of
from tpugraphs_jax.rankers.composed.options import Options

Dense = Callable[..., nn.Module]


def _encoded(options: Options, slates: Slates) -> jax.Array:
  """Configurations as inputs: rows `[R, V]` of layouts, or tiles `[G, C, V]`."""
  values = config_values(slates)
  return Values(
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
    """Mixes `x [N, 1, F]` with rows of hop 0: `[N, 1, H]` zeros and `[hop 0, C, H]`."""
    options, batch = self.options, slates.batch
    rows = _encoded(options, slates)
    own = x.at[batch.by_hop.nodes[0]].get(mode="fill", fill_value=0)
    width = options.fusion_widths[0]
    (kernel, config_kernel), bias = JoinedDense(width, name="join")(
        (x.shape[-1], rows.shape[-1]))
    config = split_nodes.config_rows(self.matmul(rows, config_kernel), batch)
    mixed = self.matmul(own, kernel) + config
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
    """Appends configurations to `pooled [G, 1, P]`: `[G, C, P + fusion width]`."""
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
    """Configurations after attention to the nodes `x [N, 1, F]` of their kernel: `[G, C, H]`."""
    options = self.options
    query = layers.MLP(options.fusion_widths, name="queries")(_encoded(options, slates))
    graphs, configs = slates.graphs, slates.configs
    member = slates.graph_of[None] == jnp.arange(graphs)[:, None]
    query = query.reshape(1, graphs * configs, -1)
    member = jnp.repeat(member, configs, axis=0)
    to = jnp.swapaxes(x, 0, 1)
    for number in range(options.decoder_layers):
      layer = EncoderLayer(query.shape[-1], options.heads, name=f"layer_{number}")
      query = layer(query, to, member[None, None])
    return query.reshape(graphs, configs, -1)


class Readout(nn.Module):
  """The readout of the options.

  Attributes:
    options: of the ranker.
    dense: makes linear layers.
    configurable: only configurable nodes are pooled, whatever the pooling is called.
  """

  options: Options
  dense: Dense
  configurable: bool = False

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> jax.Array:
    """The readout `[G, C, P]` float32 of `x [N, C, F]`."""
    options = self.options
    if options.readout == "node_scalar_sum":
      scalars = jax.tree.map(self.dense(1, name="scalar"), x)
      return pooling.split_pool_sum(*nodes.chosen(scalars, slates))
    if options.readout == "lstm":
      return LastState(width_of(x), name="lstm")(nodes.everywhere(x, slates), slates)
    if options.readout == "transformer":
      x = self.transformed(nodes.everywhere(x, slates), slates)
    pooled = [self.pooled(x, name, slates) for name in options.pooling]
    readout = jnp.concatenate(pooled, axis=-1) if options.pooling_merge == "concat" else sum(pooled)
    return layers.l2_normalize(readout) if options.readout_norm == "l2" else readout

  def pooled(self, x: Nodes, name: str, slates: Slates) -> jax.Array:
    """One pooling of `x [N, C, F]`: `[G, C, F]` float32."""
    only = self.configurable or name.startswith(pooling.CONFIGURABLE)
    rows, mask = nodes.chosen(x, slates, configurable=only)
    count = slates.graph_nodes
    if only:
      count = jnp.maximum(mask.varying.sum(axis=1), 1)
    return pooling.by_name(name)(rows, mask, count)

  def transformed(self, x: jax.Array, slates: Slates) -> jax.Array:
    """`x [N, C, F]` through transformer layers over the nodes of each graph."""
    same = slates.graph_of[:, None] == slates.graph_of[None]
    by_config = jnp.swapaxes(x, 0, 1)
    for number in range(self.options.decoder_layers):
      layer = EncoderLayer(x.shape[-1], self.options.heads, name=f"transformer_{number}")
      by_config = layer(by_config, mask=same[None, None])
    return jnp.swapaxes(by_config, 0, 1)


class LastState(nn.Module):
  """The state of an LSTM after the last node of each graph, in the order of the file.

  That order is a topological one: operands come before their users (MLSys 2021).

  Attributes:
    features: width of the state.
  """

  features: int

  @nn.compact
  def __call__(self, x: jax.Array, slates: Slates) -> jax.Array:
    """`[G, C, features]` of `x [N, C, F]`; a graph without nodes has no meaning."""
    first = jnp.diff(slates.graph_of, prepend=-1) != 0
    scan = nn.scan(_Cell, variable_broadcast="params", split_rngs={"params": False})
    start = (jnp.zeros((x.shape[1], self.features), x.dtype),) * 2
    _, states = scan(self.features, name="cell")(start, (x, first))
    ends = jnp.cumsum(slates.batch.graph.n_node)[: slates.graphs] - 1
    return states[jnp.maximum(ends, 0)].astype(jnp.float32)


class _Cell(nn.Module):
  """An LSTM cell that begins anew where a graph does."""

  features: int

  @nn.compact
  def __call__(self, carry, inputs):
    x, first = inputs
    carry = jax.tree.map(lambda state: jnp.where(first, 0, state), carry)
    return nn.OptimizedLSTMCell(self.features, name="lstm")(carry, x)


class Hidden(nn.Module):
  """The layers of the head before its last.

  Attributes:
    options: of the ranker.
    dense: makes linear layers.
  """

  options: Options
  dense: Dense

  @nn.compact
  def __call__(
      self, readout: jax.Array, config_mask: jax.Array | None = None, *, train: bool = False
  ) -> jax.Array:
    """`[..., H]` of readouts `[..., P]`, with dropout where the options have it.

    `config_mask [G, C]` says which configurations are real, for readouts `[G, C, P]` that
    are normalised across them.
    """
    options = self.options
    for number, width in enumerate(options.head_widths):
      readout = self.dense(width, name=f"dense_{number}")(readout)
      if options.head_norm == "configuration":
        readout = masked_normal(readout, config_mask)
      readout = drop(readout, options, "head", train=train)
      readout = Activation(options.activation, name=f"activation_{number}")(readout)
    return readout
