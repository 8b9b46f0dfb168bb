"""The base class of published systems."""

from __future__ import annotations

from collections.abc import Callable
import functools

from tpugraphs_jax.nn.linear import Linear
from tpugraphs_jax.nn.precision import DTYPES, PRECISIONS
from tpugraphs_jax.options import option
from tpugraphs_jax.rankers import base


class System(base.Network):
  """A published system, whose layers begin as in PyTorch (`nn.linear`).

  A subclass has `embed`, compact and read from top to bottom, and `score`, whose layers it
  makes in `setup`.
  """

  dtype: str = option(
      "float32",
      "dtype of the computation; sums over nodes and the head are float32", one_of=DTYPES)
  precision: str = option("highest", "precision of matrix products", one_of=PRECISIONS)

  @property
  def linear(self) -> Callable[..., Linear]:
    """Makes linear layers on nodes by their width; the factory that layers of `nn` take."""
    return functools.partial(Linear, dtype=self.dtype)

  @property
  def exact(self) -> Callable[..., Linear]:
    """Makes linear layers on readouts, which are float32 in any dtype."""
    return Linear
