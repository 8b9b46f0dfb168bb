"""The layers between the first linear layer and the readout."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from flax import linen as nn
import jax

from tpugraphs_jax.rankers.composed import nodes
from tpugraphs_jax.rankers.composed.blocks import Layer, Pointwise
from tpugraphs_jax.rankers.composed.convolutions import Convolution, rounds
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates
from tpugraphs_jax.rankers.composed.norms import Activation
from tpugraphs_jax.rankers.composed.options import NORMS_OVER_NODES, Options

Dense = Callable[..., nn.Module]


def hops(options: Options) -> int:
  """Rounds of message passing that keep nodes apart which no configuration has reached."""
  if options.norm in NORMS_OVER_NODES or options.conv == "gatv2":
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
    first, found = x, []
    for number, width in enumerate(options.widths):
      layer = Layer(options, width, self.dense, options.attends(number), name=f"layer_{number}")
      x = layer(x, first, positions, slates, train=train)
      found.append(x)
      if positions is not None:
        positions = Positions(options, self.dense, name=f"positions_{number}")(positions, slates)
    if options.readout_layers == "all":
      x = nodes.add(slates, *found)
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
