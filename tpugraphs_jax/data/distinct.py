"""Equal rows of an array of choices."""

from __future__ import annotations

import numpy as np


def rows(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The first of every set of equal rows, and the set of each row.

  Args:
    array: `[n, ...]`; rows with equal bytes are equal.

  Returns:
    `[sets]` int64 ascending row numbers, and `[n]` int64 with
    `array == array[first][which]`.
  """
  flat = np.ascontiguousarray(array).reshape(len(array), -1)
  keys = flat.view(np.dtype((np.void, flat[:1].nbytes))).ravel()
  _, first, which = np.unique(keys, return_index=True, return_inverse=True)
  order = np.argsort(first)
  place = np.empty(len(order), np.int64)
  place[order] = np.arange(len(order))
  return first[order], place[which]
