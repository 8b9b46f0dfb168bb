"""Comparison of pytrees of numbers."""

from __future__ import annotations

import jax
import numpy as np


def assert_trees_close(actual, expected, tolerance: float = 1e-5) -> None:
  """Every array agrees within `tolerance` of its own largest number.

  Sums cancel in single entries, so that these can only be judged beside the
  others; what is 0 but for rounding is compared on the scale 0.1.
  """

  def close(path, a, b):
    np.testing.assert_allclose(
        a, b, rtol=tolerance, atol=tolerance * max(np.abs(b).max(), 0.1),
        err_msg=jax.tree_util.keystr(path))

  jax.tree_util.tree_map_with_path(close, actual, expected)
