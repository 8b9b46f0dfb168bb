"""Comparison of pytrees of numbers, and of graphs bit for bit."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rounding(terms: int, dtype: Any = np.float32) -> float:
  """Largest relative error of a sum of `terms` terms, whatever the order of summation.

  Every addition rounds once, so that the error is at most `terms * eps` of the sum of
  magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
  """
  return terms * float(jnp.finfo(dtype).eps)


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
      a, b, rtol=tolerance, atol=tolerance * max(np.abs(b).max(), least), err_msg=name
    )

  jax.tree_util.tree_map_with_path(close, actual, expected)


def assert_same_trees(actual: Any, expected: Any) -> None:
  """Asserts equal structure, and equal dtype, shape and bits of all arrays."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, b in zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (actual, expected))):
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def assert_same_fields(actual: Any, expected: Any, *, but: tuple[str, ...] = ()) -> None:
  """Asserts equal dtype, shape and bits of all fields of dataclasses, except those in `but`."""
  for name in {field.name for field in dataclasses.fields(expected)}.difference(but):
    first, second = np.asarray(getattr(actual, name)), np.asarray(getattr(expected, name))
    assert first.dtype == second.dtype, name
    np.testing.assert_array_equal(first, second, err_msg=name)


def assert_same_graph(actual: Any, expected: Any) -> None:
  """Asserts that two `OpGraph`s are equal, except in name and stage."""
  assert_same_fields(actual, expected, but=("name", "stage", "configs"))
  assert_same_fields(actual.configs, expected.configs)


_SPARE = 2 << 20  # bytes: messages, objects of the reader itself


def assert_reading_takes(most: float, size: int, read: Callable[[], Any]) -> None:
  """A reader takes at most `most` bytes at a time for each of `size` bytes, also if it refuses."""
  tracemalloc.start()
  try:
    before, _ = tracemalloc.get_traced_memory()
    try:
      read()
    except ValueError as error:
      assert "\n" not in str(error) and len(str(error)) < 1000
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak - before <= most * size + _SPARE, f"{(peak - before) / size:.1f} bytes per byte"
