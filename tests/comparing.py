"""Comparison of pytrees of numbers."""

from __future__ import annotations

import jax
import numpy as np


def assert_trees_close(actual, expected, tolerance: float = 1e-5, *, sums: str = "") -> None:
  """Every array agrees within `tolerance` of its own largest number.

  Sums cancel in single entries, so that these can only be judged beside the
  others; what is 0 but for rounding is compared on the scale 0.1. Arrays whose name holds
  `sums` are single sums over everything, which cancel as a whole: their scale is 0.5.
  """

  def close(path, a, b):
    name = jax.tree_util.keystr(path)
    least = 0.5 if sums and sums in name else 0.1
    np.testing.assert_allclose(
        a, b, rtol=tolerance, atol=tolerance * max(np.abs(b).max(), least), err_msg=name)

  jax.tree_util.tree_map_with_path(close, actual, expected)
