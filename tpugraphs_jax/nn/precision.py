"""The precision of all matrix products of a network."""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax

PRECISIONS = ("default", "high", "highest")  # of `jax.lax.Precision`
DTYPES = ("float32", "bfloat16")  # of computations; parameters are float32


class Precise(nn.Module):
  """A flax module with one precision of all matrix products, including layers of flax.

  By default accelerators round the inputs of products: to TF32 on GPUs, to bfloat16 on TPUs. Some
  layers of flax have no option for it (LSTM cells). `apply` sets jax's default precision instead.
  Gradients have the precision of their product.

  Attributes:
    precision: `default`, `high` or `highest`; None = the default precision of jax.
  """

  precision = None

  @nn.nowrap
  def apply(self, *args: Any, **options: Any) -> Any:
    """`nn.Module.apply` at this precision."""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    precision = self.precision or default
    with jax.default_matmul_precision(precision):
      return super().apply(*args, **options)
