"""Lists of integers of different lengths, one per row, reduced all at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
import itertools

import numpy as np


class Ragged:
  """Rows of int64 of any length. Sums and products wrap modulo 2^64."""

  def __init__(self, rows: Sequence[Collection[int]]):
    self.counts = np.fromiter(map(len, rows), np.int64, len(rows))
    self._values = np.fromiter(
        itertools.chain.from_iterable(rows), np.int64, int(self.counts.sum()))
    self._starts = np.cumsum(self.counts) - self.counts

  def leading(self, width: int, *, padding: int = 0) -> np.ndarray:
    """The first `width` values of every row, `[rows, width]` int64."""
    column = np.arange(width)
    present = column < self.counts[:, None]
    result = np.full(present.shape, padding, np.int64)
    result[present] = self._values[(self._starts[:, None] + column)[present]]
    return result

  def sum(self) -> np.ndarray:
    """The sum of every row, `[rows]` int64; 0 for an empty row."""
    return self._reduce(np.add, empty=0)

  def product(self, *, empty: int = 1) -> np.ndarray:
    """The product of every row, `[rows]` int64; `empty` for an empty row."""
    return self._reduce(np.multiply, empty=empty)

  def aggregate(self, width: int, *, empty_product: int = 1) -> np.ndarray:
    """Leading values, then sum and product of all, `[rows, width + 2]` int64."""
    return np.column_stack(
        [self.leading(width), self.sum(), self.product(empty=empty_product)])

  def _reduce(self, ufunc: np.ufunc, *, empty: int) -> np.ndarray:
    result = np.full(len(self.counts), empty, np.int64)
    filled = self.counts > 0
    if filled.any():
      # Without the empty rows, each start is the end of the row before.
      result[filled] = ufunc.reduceat(self._values, self._starts[filled])
    return result
