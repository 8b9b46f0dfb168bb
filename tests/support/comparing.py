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
  """Largest relative error of a sum of `terms` terms, whatever the order of summation.

  Every addition rounds once, so that the error is at most `terms * eps` of the sum of
  magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
  """
  return terms * float(jnp.finfo(dtype).eps)


def in_float64(function: Callable[..., Any], *args: Any) -> Any:
  """`function(*args)` with float64 in place of float32, as numpy arrays.

  Two orders of summation differ by rounding alone. Where a function enlarges rounding, such
  as a normalisation over numbers that hardly differ, only float64 tells an error from
  rounding.
  """
  widen = lambda leaf: (
      np.asarray(leaf, np.float64) if np.asarray(leaf).dtype == np.float32 else leaf)
  with enable_x64(True):
    return jax.tree.map(np.asarray, function(*jax.tree.map(widen, args)))


def assert_trees_close(actual, expected, tolerance: float = 1e-5, *, sums: str = "") -> None:
  """Asserts that every array agrees within `tolerance` of its own largest number.

  The scale is that of the array, because the sums in single entries may cancel. It is at
  least 0.1, for arrays that are 0 up to rounding. It is at least 0.5 for arrays whose name
  holds `sums`: each of these is one sum over everything, which may cancel as a whole.
  """

  def close(path, a, b):
    name = jax.tree_util.keystr(path)
    least = 0.5 if sums and sums in name else 0.1
    np.testing.assert_allclose(
        a, b, rtol=tolerance, atol=tolerance * max(np.abs(b).max(), least), err_msg=name)

  jax.tree_util.tree_map_with_path(close, actual, expected)


def assert_same_fields(actual: Any, expected: Any, *, but: tuple[str, ...] = ()) -> None:
  """Asserts equal dtype, shape and bits of all fields of dataclasses, except those in `but`."""
  for name in {field.name for field in dataclasses.fields(expected)}.difference(but):
    one, other = np.asarray(getattr(actual, name)), np.asarray(getattr(expected, name))
    assert one.dtype == other.dtype, name
    np.testing.assert_array_equal(one, other, err_msg=name)


def assert_same_graph(actual: Any, expected: Any) -> None:
  """Asserts that two `OpGraph`s are equal, except in name, store and stage."""
  assert_same_fields(actual, expected, but=("name", "store", "stage", "configs"))
  assert_same_fields(actual.configs, expected.configs)
