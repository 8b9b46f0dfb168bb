"""The base class of published systems."""

from __future__ import annotations

import functools

from tpugraphs_jax.nn.linear import Linear
from tpugraphs_jax.rankers import base


class System(base.Network):
  """A published system, whose layers begin as in PyTorch (`nn.linear`).

  A subclass has `embed`, compact and read from top to bottom, and `score`, whose layers it
  makes in `setup`.

  Attributes:
    dtype: of the computation; sums over nodes and the head are float32.
    precision: of matrix products.
  """

  dtype: str | None = "float32"
  precision: str | None = "highest"

  @property
  def linear(self) -> functools.partial:
    """Makes linear layers on nodes by their width; the factory that layers of `nn` take."""
    return functools.partial(Linear, dtype=self.dtype, precision=self.precision)

  @property
  def exact(self) -> functools.partial:
    """Makes linear layers on readouts, which are float32 in any dtype."""
    return functools.partial(Linear, precision=self.precision)
