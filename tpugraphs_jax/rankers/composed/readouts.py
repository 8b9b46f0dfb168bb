"""Node features `[N, C, F]` to one readout per graph and configuration, and the head."""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import layers, pooling
from tpugraphs_jax.rankers.composed import nodes
from tpugraphs_jax.rankers.composed.attention import EncoderLayer
from tpugraphs_jax.rankers.composed.blocks import drop, width_of
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates
from tpugraphs_jax.rankers.composed.norms import Activation, masked_normal
from tpugraphs_jax.rankers.composed.options import ATTENTION_POOLING, Options

Dense = Callable[..., nn.Module]


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
    if name == ATTENTION_POOLING:
      return AttentionPooling(self.dense, name="attention")(rows, mask)
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


class AttentionPooling(nn.Module):
  """Mean over nodes, weighted by a softmax over the nodes of a learned scalar (Li et al. 2016).

  Attributes:
    dense: makes linear layers.
  """

  dense: Dense

  @nn.compact
  def __call__(self, x: nodes.SplitNodes, mask: pooling.Chosen) -> jax.Array:
    """`[G, C, F]` float32 of `x [N, 1, F]` and `[rows, C, F]`; 0 for a graph without nodes."""
    logit = jax.tree.map(self.dense(1, name="logit"), x)
    logit = jax.tree.map(lambda v: v.astype(jnp.float32), logit)
    # The same shift for all configurations: weights of shared nodes stay shared.
    highest = jax.lax.stop_gradient(pooling.split_pool_max(logit, mask).max(axis=1))
    of_rows = lambda member: (member.T @ highest)[:, None]
    weight = nodes.SplitNodes(
        jnp.exp(logit.shared - of_rows(mask.shared)) * _counts(mask.shared),
        jnp.exp(logit.varying - of_rows(mask.varying)) * _counts(mask.varying), x.hop)
    total = pooling.split_pool_sum(jax.tree.map(lambda v, w: v * w, x, weight), mask)
    weights = pooling.split_pool_sum(weight, mask)
    return total / jnp.where(weights > 0, weights, 1)


def _counts(member: jax.Array) -> jax.Array:
  """Which rows count for any graph of `member [G, n]`, `[n, 1, 1]` float32."""
  return member.sum(axis=0)[:, None, None]


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
      if options.head_norm == "layer":
        readout = nn.LayerNorm(name=f"norm_{number}")(readout)
      elif options.head_norm == "configuration":
        readout = masked_normal(readout, config_mask)
      readout = drop(readout, options, "head", train=train)
      readout = Activation(options.activation, name=f"activation_{number}")(readout)
    return readout
