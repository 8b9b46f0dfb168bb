"""The base class of published systems. To add one, copy `fourth.py` (layouts) or `mlsys21.py`."""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax

from tpugraphs_jax.config_fields import option
from tpugraphs_jax.nn.layers import DTYPES, Linear
from tpugraphs_jax.rankers import base


class System(base.Network):
  """A published system, with layers initialised as in PyTorch (`nn.layers`).

  Subclasses define a compact method `embed`. The score is a linear layer on the readout. A subclass
  with another score defines `setup` and `score`.
  """

  dtype: str = option(
    "float32", "dtype of the computation; sums over nodes and the head are float32", one_of=DTYPES
  )

  @property
  def linear(self) -> Callable[..., Linear]:
    """Creates a linear layer of a width on nodes: the argument `linear` of layers in `nn`."""
    return functools.partial(Linear, dtype=self.dtype)

  @property
  def exact(self) -> Callable[..., Linear]:
    """Creates a linear layer of a width on readouts, in float32."""
    return Linear

  def setup(self):
    self.last = self.exact(1)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    return self.last(readout)[..., 0]
