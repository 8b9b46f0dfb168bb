import numpy as np
import pytest

from tpugraphs_jax.graph import distinct_rows


@pytest.mark.parametrize("array", [
    np.array([[1, 2], [3, 4], [1, 2], [0, 9], [3, 4]], np.uint8),
    np.array([[[0.5, 2]], [[0.5, 2]]], np.float32), np.array([[7], [300]], np.uint16),
    np.broadcast_to(np.arange(3), (4, 3)), np.asfortranarray([[1, 2], [2, 1], [1, 2]]),
])
def test_distinct_rows_are_the_first_of_each_in_file_order(array):
  first, which = distinct_rows(array)
  rows = [row.tobytes() for row in np.ascontiguousarray(array)]
  assert [rows[i] for i in first] == list(dict.fromkeys(rows))
  assert first.tolist() == [rows.index(row) for row in dict.fromkeys(rows)]
  np.testing.assert_array_equal(array[first][which], array)
