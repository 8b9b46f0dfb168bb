"""The ranker of many options, for tiles and for layouts.

    Inputs -> Encoder -> Middle -> Readout -> Hidden -> last          layouts
    Inputs -> Encoder -> Readout -> Late, or Cross -> Hidden -> last  tiles

`Inputs` has the configurations unless a join behind the encoder has them.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import layers
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.composed import inputs, joins, options as options_lib
from tpugraphs_jax.rankers.composed.drop_edge import drop_edges
from tpugraphs_jax.rankers.composed.encoder import Encoder, hops
from tpugraphs_jax.rankers.composed.nodes import Batch, Slates
from tpugraphs_jax.rankers.composed.options import Options
from tpugraphs_jax.rankers.composed.readouts import Hidden, Readout
from tpugraphs_jax.rankers.whole import Kernels

NAME = "Composed"


class ComposedKernels(Kernels):
  """Kernels whose equal nodes share the encoding of tensor dimensions."""

  @property
  def distinct(self) -> int:
    """See `Kernels`."""
    return self.network.distinct


class Composed(base.Network):
  """A ranker made of options.

  Attributes:
    kind: `tile` or `layout`.
    options: see `options.Options`.
  """

  kind: str
  options: Options

  @property
  def family(self):
    return ComposedKernels if self.kind == "tile" else None

  @property
  def distinct(self) -> int:
    """Columns of node features that the encoder of dimensions of tiles reads."""
    o = self.options
    return inputs.token_columns(o) if o.share and self.kind == "tile" else 0

  @property
  def hops(self) -> int:
    o = self.options
    shares = o.share and o.fusion == "early" and self.kind == "layout"
    return hops(o) if shares else 0

  @property
  def compares_configs(self) -> bool:
    return self.options.across_configs

  @property
  def sees_whole_graph(self) -> bool:
    return self.options.whole_graph

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
      self.join = joins.Middle(o, matmul, dense)
    elif o.fusion == "late":
      self.join = joins.Late(o, exact)
    elif o.fusion == "cross":
      self.join = joins.Cross(o)
    if o.fusion != "cross":
      self.readout = Readout(o, exact, configurable=o.fusion == "middle")
    if o.head_widths:
      self.hidden = Hidden(o, exact)
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


def _builder(kind: str) -> Callable[..., Composed]:
  def build(**options: Any) -> Composed:
    return Composed(kind, options_lib.check(Options(**options), kind))

  build.__signature__ = inspect.signature(Options)  # the names that a config may have
  build.__doc__ = Options.__doc__
  return build


for _kind, _models in base.MODELS.items():
  _models.register(NAME)(_builder(_kind))
