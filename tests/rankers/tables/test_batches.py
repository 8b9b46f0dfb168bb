from __future__ import annotations

import numpy as np
import pytest

from tests.support import table_cases


def test_pairs_are_in_the_order_of_their_columns():
  assert (np.diff(table_cases.batch_of(spare=2).pairs.column) >= 0).all()


def test_weights_are_bytes_over_those_of_all_groups():
  for program in table_cases.three_programs():
    group = np.bincount(program.choices.group, program.choices.weight)
    np.testing.assert_allclose(np.square(group).sum(), 1, rtol=1e-5)


def test_without_tiling_there_are_no_features_of_padding():
  graph = table_cases.program(0)
  plain, tiled = (table_cases.prepared(graph, tiling=tiling) for tiling in (False, True))
  assert not plain.choices.feat.any() and tiled.choices.feat.any()
  assert plain.feat.shape[1] + 12 == tiled.feat.shape[1]


@pytest.mark.parametrize("options", [dict(choices=2), dict(spare=-1)])
def test_batches_beyond_their_budget_are_refused(options):
  with pytest.raises(ValueError, match="budget"):
    table_cases.batch_of(**options)
