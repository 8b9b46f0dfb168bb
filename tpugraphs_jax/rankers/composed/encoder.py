"""The layers between the first linear layer and the readout.

    linear layers on nodes -> layers along edges -> linear layers on nodes

A layer along edges is

    pre norm -> convolution and attention -> gates -> residual -> norm -> activation
      -> dropout -> (norm after the activation) -> (residual after the activation)

The options leave steps out, and say at which of its two places norm and residual are.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.rankers.composed import nodes
from tpugraphs_jax.rankers.composed.attention import ChannelGate, ConfigGate, GlobalAttention
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates
from tpugraphs_jax.rankers.composed.operations import Activation, Convolution, Dropout, Norm
from tpugraphs_jax.rankers.composed.operations import rounds, width_of
from tpugraphs_jax.rankers.composed.options import Options

Dense = Callable[..., nn.Module]


class Gates(nn.Module):
  """Channel attention and attention over configurations, where the options have them.

  The second doubles the width of its input.
  """

  options: Options
  dense: Dense

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates) -> Nodes:
    """`[N, C, F or 2 F]` of `x [N, C, F]`."""
    options = self.options
    if options.channel_attention:
      x = ChannelGate(options.channel_attention, self.dense, name="channels")(x)
    if options.config_attention != "none":
      x = ConfigGate(options.config_temperature, name="configurations")(x, slates)
    return x


def gated_width(options: Options, features: int) -> int:
  """The width in front of the gates that gives `features` behind them."""
  return features // 2 if options.config_attention != "none" else features


class Pointwise(nn.Module):
  """A linear layer on nodes with gates, norm, activation and dropout around it.

  Attributes:
    options: of the ranker.
    features: width of the result.
    dense: makes linear layers.
    joined: the input went through its linear layer already (`inputs.Join`).
  """

  options: Options
  features: int
  dense: Dense
  joined: bool = False

  @nn.compact
  def __call__(self, x: Nodes, slates: Slates, *, train: bool) -> Nodes:
    """`[N, C, features]` of `x [N, C, F]`."""
    options = self.options
    if not self.joined:
      x = jax.tree.map(self.dense(gated_width(options, self.features), name="dense"), x)
    after = options.norm_position == "after_activation"
    norm = Norm(options.norm, options.dtype, name="norm")
    x = x if after else norm(x, slates)
    x = Gates(options, self.dense, name="gates")(x, slates)
    x = Activation(options.activation, name="activation")(x)
    drops = "linear" in options.dropout_in or self.joined and "first" in options.dropout_in
    x = Dropout(options.dropout * drops)(x, slates, train=train)
    return norm(x, slates) if after else x


class Layer(nn.Module):
  """One layer of the encoder.

  Attributes:
    options: of the ranker.
    features: width of the result.
    dense: makes linear layers.
    attends: whether the layer has the attention of the options.
  """

  options: Options
  features: int
  dense: Dense
  attends: bool = False

  @nn.compact
  def __call__(
      self, x: Nodes, beside: jax.Array | None, slates: Slates, *, train: bool
  ) -> Nodes:
    """One layer.

    Args:
      x: `[N, C, F]`.
      beside: `[N, P]` further features that the layer sees (positions), or None.
      slates: of the nodes.
      train: whether dropout is on.

    Returns:
      `[N, C, features]`.
    """
    if self.attends and self.options.attention_combine == "serial":
      attend = lambda y: self.attention()(y, slates)
      x = self.around(attend, x, beside, slates, train, name="attention_", quiet=True)
    return self.around(
        lambda y: self.mixed(y, slates), x, beside, slates, train, name="")

  def attention(self) -> GlobalAttention:
    """The attention of the layer."""
    width = gated_width(self.options, self.features)
    return GlobalAttention(self.options, width, self.dense, name="attention")

  def mixed(self, y: Nodes, slates: Slates) -> Nodes:
    """Convolution and attention of `y [N, C, F]`, in one: `[N, C, width in front of gates]`."""
    options, width = self.options, gated_width(self.options, self.features)
    moved = Convolution(options, width, self.dense, name="convolution")(y, slates)
    if not self.attends or options.attention_combine == "serial":
      return moved
    if options.attention_combine == "sum":
      return nodes.add(slates, moved, self.attention()(y, slates))
    moved = Activation(options.activation, name="convolution_activation")(moved)
    if options.norm_position == "after_activation":
      moved = Norm(options.norm, options.dtype, name="convolution_norm")(moved, slates)
    both = nodes.concatenate(slates, moved, self.attention()(y, slates))
    return jax.tree.map(self.dense(width, name="both"), both)

  def around(
      self, operation: Callable[[Nodes], Nodes], x: Nodes, beside: jax.Array | None,
      slates: Slates, train: bool, *, name: str, quiet: bool = False,
  ) -> Nodes:
    """An operation on `x [N, C, F]` with the steps around it; quiet: no gates, no activation."""
    options = self.options
    inside = options.conv == "gin" and not quiet  # its MLP has the norm and the activation
    norm = lambda v: v if inside else Norm(
        options.norm, options.dtype, name=f"{name}norm")(v, slates)
    residual = lambda y: Residual(options.residual, self.dense, name=f"{name}residual")(
        x, y, slates)
    y = norm(x) if options.norm_position == "pre" else x
    if beside is not None:
      y = nodes.concatenate(slates, y, nodes.spread(beside, y, slates))
    y = operation(y)
    y = y if quiet else Gates(options, self.dense, name="gates")(y, slates)
    early = options.residual_position == "before_activation"
    y = residual(y) if early else y
    y = norm(y) if options.norm_position == "post" else y
    y = y if quiet or inside else Activation(options.after_conv, name="activation")(y)
    y = Dropout(options.dropout * ("layers" in options.dropout_in))(y, slates, train=train)
    y = norm(y) if options.norm_position == "after_activation" else y
    return y if early else residual(y)


class Residual(nn.Module):
  """A layer's output with its input, where the widths are alike.

  Attributes:
    kind: one of `options.CHOICES`. `gated` is `g y + (1 - g) x` with a gate
      `g = sigmoid(W [x, y] + b)` per channel.
    dense: makes linear layers.
  """

  kind: str
  dense: Dense

  @nn.compact
  def __call__(self, x: Nodes, y: Nodes, slates: Slates) -> Nodes:
    """`[N, C, F]` of the layer's input `x` and its output `y`."""
    if self.kind == "none" or width_of(x) != width_of(y):
      return y
    if self.kind == "identity":
      return nodes.add(slates, x, y)
    gate = self.dense(width_of(y), name="gate")

    def gated(old, new):
      g = nn.sigmoid(gate(jnp.concatenate([old, new], axis=-1)))
      return g * new + (1 - g) * old

    return nodes.combine(gated, slates, x, y)


def hops(options: Options) -> int:
  """Rounds of message passing that keep nodes apart which no configuration has reached."""
  if options.norm == "instance" or options.conv == "gatv2":
    return 0
  count = 0
  for layer in range(len(options.widths)):
    attends = options.attends(layer)
    if attends and options.attention_combine == "serial":
      return count
    count += rounds(options)
    if attends:
      return count
  return count


class Encoder(nn.Module):
  """Linear layers on nodes, layers along edges, linear layers on nodes.

  Attributes:
    options: of the ranker.
    dense: makes linear layers.
  """

  options: Options
  dense: Dense

  @nn.compact
  def __call__(
      self, x: Nodes, walks: jax.Array | None, slates: Slates, *, train: bool
  ) -> Nodes:
    """Encodes nodes.

    Args:
      x: `[N, C, pre_widths[0]]` from `inputs.Inputs`.
      walks: `[N, 128]` random-walk features, or None.
      slates: of the nodes.
      train: whether dropout is on.

    Returns:
      `[N, C, F]`.
    """
    options = self.options
    for number, width in enumerate(options.pre_widths):
      x = Pointwise(options, width, self.dense, joined=number == 0, name=f"pre_{number}")(
          x, slates, train=train)
    positions = None if walks is None else nn.tanh(
        self.dense(options.position_width, name="positions")(walks))
    outputs = []
    for number, width in enumerate(options.widths):
      layer = Layer(options, width, self.dense, options.attends(number), name=f"layer_{number}")
      x = layer(x, positions, slates, train=train)
      outputs.append(x)
      if positions is not None:
        positions = Positions(options, self.dense, name=f"positions_{number}")(positions, slates)
    if options.readout_layers == "all":
      x = nodes.add(slates, *outputs)
    if positions is not None:
      x = nodes.concatenate(slates, x, nodes.spread(positions, x, slates))
    for number, width in enumerate(options.post_widths):
      x = Pointwise(options, width, self.dense, name=f"post_{number}")(x, slates, train=train)
    return x


class Positions(nn.Module):
  """A layer of the track of positions: a GraphSAGE of its own (3rd place).

  Attributes:
    options: of the ranker.
    dense: makes linear layers.
  """

  options: Options
  dense: Dense

  @nn.compact
  def __call__(self, x: jax.Array, slates: Slates) -> jax.Array:
    """Positions `[N, P]` one layer on."""
    width = self.options.position_width
    sage = dataclasses.replace(self.options, conv="sage", direction_merge="sum")
    moved = Convolution(sage, width, self.dense, name="convolution")(x[:, None], slates)[:, 0]
    moved = Activation("tanh")(moved)
    return nn.tanh(self.dense(width, name="dense")(moved))
