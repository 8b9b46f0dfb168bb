"""The precision of matrix products, in one place for all products of a network."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax

PRECISIONS = ("default", "high", "highest")  # of `jax.lax.Precision`
DTYPES = ("float32", "bfloat16")  # of computations; parameters are float32


class Precise(nn.Module):
  """A flax module of which every product has one precision, those of flax's own layers too.

  A product without a precision rounds its inputs on accelerators: to TF32 on GPUs, to bfloat16
  on TPUs. Some layers of flax hand no precision on (LSTM cells) or are easily forgotten. Here
  `apply` sets jax's default instead. Gradients have the precision of the product that they are of.

  Attributes:
    precision: `default`, `high` or `highest`; None = the one that jax is configured with.
  """

  precision = None

  @nn.nowrap
  def apply(self, *args: Any, **options: Any) -> Any:
    """`nn.Module.apply` at this precision."""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    precision = self.precision or default
    with jax.default_matmul_precision(precision):
      return super().apply(*args, **options)
