from __future__ import annotations

import functools

import numpy as np
import pytest
import table_cases

from tpugraphs_jax.rankers.tables import batches


@functools.cache
def programs() -> tuple[batches.PreparedTables, ...]:
  cases = (
    dict(nodes=30, edges=50),
    dict(nodes=12, edges=8, config_nodes=[1]),
    dict(nodes=45, edges=90, rows=9, configs=3),
  )
  return tuple(table_cases.prepared(table_cases.program(i, **case)) for i, case in enumerate(cases))


def batch(**options):
  return table_cases.batch_of(programs(), **options)


def test_pairs_are_in_the_order_of_their_columns():
  assert (np.diff(batch(spare=2).pairs.column) >= 0).all()


def test_weights_are_bytes_over_those_of_all_groups():
  for program in programs():
    group = np.bincount(program.choices.group, program.choices.weight)
    np.testing.assert_allclose(np.square(group).sum(), 1, rtol=1e-5)


def test_without_tiling_there_are_no_features_of_padding():
  graph = table_cases.program(0)
  plain, tiled = (table_cases.prepared(graph, tiling=tiling) for tiling in (False, True))
  assert not plain.choices.feat.any() and tiled.choices.feat.any()
  assert plain.graph.feat.shape[1] + 12 == tiled.graph.feat.shape[1]


@pytest.mark.parametrize("options", [dict(choices=2), dict(spare=-1)])
def test_batches_beyond_their_budget_are_refused(options):
  with pytest.raises(ValueError, match="budget"):
    batch(**options)
