"""Comparison of pytrees of numbers, and of graphs bit for bit."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
  from jax import enable_x64
except ImportError:  # before jax 0.8
  from jax.experimental import enable_x64


def rounding(terms: int, dtype: Any = np.float32) -> float:
  """Largest relative error of a sum of so many terms, whatever the order of summation.

  Every addition rounds once, so that the error is at most `terms * eps` of the sum of
  magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
  """
  return terms * float(jnp.finfo(dtype).eps)


def in_float64(function: Callable[..., Any], *args: Any) -> Any:
  """`function(*args)` with float64 in place of float32, as numpy arrays.

  Two orders of summation differ by rounding alone. Where a function enlarges rounding, such
  as a normalisation over numbers that hardly differ, float32 cannot tell an error from
  rounding, and float64 can.
  """
  widen = lambda leaf: (
      np.asarray(leaf, np.float64) if np.asarray(leaf).dtype == np.float32 else leaf)
  with enable_x64(True):
    return jax.tree.map(np.asarray, function(*jax.tree.map(widen, args)))


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


def assert_same_fields(actual: Any, expected: Any, *, but: tuple[str, ...] = ()) -> None:
  """Every field of a dataclass of arrays has the same dtype, shape and bits, `but` some."""
  for name in {field.name for field in dataclasses.fields(expected)}.difference(but):
    one, other = np.asarray(getattr(actual, name)), np.asarray(getattr(expected, name))
    assert one.dtype == other.dtype, name
    np.testing.assert_array_equal(one, other, err_msg=name)


def assert_same_graph(actual: Any, expected: Any) -> None:
  """Two `OpGraph`s are equal with their configurations, whatever their names and places."""
  assert_same_fields(actual, expected, but=("name", "store", "stage", "configs"))
  assert_same_fields(actual.configs, expected.configs)
