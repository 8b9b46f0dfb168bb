"""The ranker of many options, for tiles and for layouts.

    Inputs -> Encoder -> Middle -> Readout -> Hidden -> last          layouts
    Inputs -> Encoder -> Readout -> Late, or Cross -> Hidden -> last  tiles

`Inputs` has the configurations unless a join behind the encoder has them.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import layers
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.composed import inputs, options as options_lib, readouts
from tpugraphs_jax.rankers.composed.encoder import Encoder, hops
from tpugraphs_jax.rankers.composed.nodes import Batch, Slates, drop_edges
from tpugraphs_jax.rankers.composed.options import Options

NAME = "Composed"


class Composed(base.Network):
  """A ranker made of options.

  Attributes:
    kind: `tile` or `layout`.
    options: see `options.Options`.
  """

  kind: str
  options: Options

  @property
  def distinct(self) -> int:
    """Columns of node features that the encoder of dimensions of tiles reads."""
    return inputs.token_columns(self.options)

  @property
  def hops(self) -> int:
    is_early_layout = self.options.fusion == "early" and self.kind == "layout"
    return hops(self.options) if is_early_layout else 0

  @property
  def compares_configs(self) -> bool:
    return self.options.head_norm == "configuration" or self.options.config_attention != "none"

  @property
  def sees_whole_graph(self) -> bool:
    o = self.options
    return (o.norm == "instance" or o.global_attention != "none"
            or o.readout in ("lstm", "transformer"))

  @property
  def embeds_integers(self) -> bool:
    o = self.options
    return (o.encoding == "embedding" or o.dimension_encoder != "none"
            or o.missing != "zero" and self.kind == "layout")

  @property
  def reads(self) -> tuple[str, ...]:
    return inputs.read_blocks(self.options)

  def setup(self):
    o = self.options
    dense = functools.partial(layers.Dense, dtype=o.dtype, precision=o.precision)
    matmul = functools.partial(layers.matmul, dtype=o.dtype, precision=o.precision)
    exact = functools.partial(layers.Dense, precision=o.precision)  # readouts are float32
    self.inputs = inputs.Inputs(o, matmul, dense)
    self.encoder = Encoder(o, dense)
    if o.fusion == "middle":
      self.join = readouts.Middle(o, matmul, dense)
    elif o.fusion == "late":
      self.join = readouts.Late(o, exact)
    elif o.fusion == "cross":
      self.join = readouts.Cross(o)
    if o.fusion != "cross":
      self.readout = readouts.Readout(o, exact, configurable=o.fusion == "middle")
    if o.head_widths:
      self.hidden = readouts.Hidden(o, exact)
    if o.readout != "node_scalar_sum":
      self.last = exact(1)

  def embed(self, batch: Batch, *, train: bool = False) -> jax.Array:
    """The readout of every graph and configuration, `[G, C, P]` float32."""
    o, slates = self.options, Slates.of(batch)
    if o.drop_edge and train:
      slates = drop_edges(slates, self.make_rng("dropout"), o.drop_edge)
    x = self.encoder(*self.inputs(slates), slates, train=train)
    if o.fusion == "cross":
      readout = self.join(x, slates)
    elif o.fusion == "late":
      readout = self.join(self.readout(x, slates), slates, train=train)
    else:
      readout = self.readout(self.join(x, slates) if o.fusion == "middle" else x, slates)
    if o.head_in_embed:
      readout = self.hidden(readout, jnp.asarray(batch.config_mask), train=train)
    return readout

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    o = self.options
    if o.readout == "node_scalar_sum":
      return o.score_scale * readout[..., 0]
    if o.head_widths and not o.head_in_embed:
      readout = self.hidden(readout)
    return self.last(readout)[..., 0]


@base.LAYOUT_MODELS.register(NAME)
def layout(**options: Any) -> Composed:
  """The ranker of layouts with these `options.Options`."""
  return Composed("layout", options_lib.check(Options(**options), "layout"))


@base.TILE_MODELS.register(NAME)
def tile(**options: Any) -> Composed:
  """The ranker of tiles with these `options.Options`."""
  return Composed("tile", options_lib.check(Options(**options), "tile"))


# The names that a config may have, and their descriptions.
layout.__signature__ = tile.__signature__ = inspect.signature(Options)
layout.__doc__ = tile.__doc__ = Options.__doc__
