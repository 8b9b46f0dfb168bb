import dataclasses

import numpy as np
import pytest

from tests.support import random_graphs, table_cases
from tpugraphs_jax.rankers.tables import terms

SEEDS = range(4)


def slow_choices(graph):
  """For every group its rows, ascending, configuration by configuration."""
  rows = [set() for _ in range(graph.configs.group_row.shape[1])]
  for chosen in graph.configs.group_row.tolist():
    for group, row in enumerate(chosen):
      rows[group].add(row)
  return [sorted(group) for group in rows]


def listed(found):
  """The choices of `Terms` in the form of `slow_choices`."""
  return [rows[rows >= 0].tolist() for rows in found.row_table]


@pytest.mark.parametrize("seed", SEEDS)
def test_choices_are_the_rows_that_occur_each_once(seed):
  graph = table_cases.program(seed)
  assert listed(terms.terms_of(graph)) == slow_choices(graph)


@pytest.mark.parametrize("seed", SEEDS)
def test_columns_are_the_groups_of_pairs_of_nodes(seed):
  graph = table_cases.program(seed)
  found, group = terms.terms_of(graph), graph.configs.node_group
  ends = [(group[i], group[j]) for i, j in found.pairs.ends.tolist()]
  assert list(map(tuple, found.columns.tolist())) == sorted({tuple(sorted(pair)) for pair in ends})
  for pair, column, is_turned in zip(ends, found.pair_column, found.is_turned):
    np.testing.assert_array_equal(found.columns[column][:: -1 if is_turned else 1], pair)


@pytest.mark.parametrize("seed", SEEDS)
def test_codes_lead_back_to_the_rows(seed):
  graph = table_cases.program(seed, configs=40)
  found = terms.terms_of(graph)
  codes = found.encode(graph.configs.group_row)
  assert codes.dtype == np.uint8
  np.testing.assert_array_equal(found.decode(codes), graph.configs.group_row)


def random_costs(found, seed):
  rng = np.random.default_rng(seed)
  shape = (found.choices, found.choices)
  return terms.Costs(
    rng.normal(size=(len(found.row_table), shape[0])), rng.normal(size=(len(found.columns), *shape))
  )


@pytest.mark.parametrize("block", [3, 4096])
@pytest.mark.parametrize("seed", SEEDS)
def test_total_is_the_sum_of_the_costs_of_a_configurations_choices(seed, block, monkeypatch):
  monkeypatch.setattr(terms, "_BLOCK_CONFIGS", block)
  monkeypatch.setattr(terms, "_BLOCK_CELLS", 2 * block)  # two columns at a time
  graph = table_cases.program(seed, configs=10)
  found = terms.terms_of(graph)
  costs = random_costs(found, seed)
  expected = []
  for chosen in graph.configs.group_row.tolist():
    x = [rows.index(row) for rows, row in zip(listed(found), chosen)]
    expected.append(
      sum(costs.unary[g, choice] for g, choice in enumerate(x))
      + sum(costs.pair[q, x[a], x[b]] for q, (a, b) in enumerate(found.columns.tolist()))
    )
  np.testing.assert_allclose(found.total(graph.configs.group_row, costs), expected)


@pytest.mark.parametrize("use", ["encode", "total"])
def test_a_row_that_is_none_of_a_groups_choices_is_refused(use):
  graph = table_cases.program(0, configs=30)
  some = terms.terms_of(dataclasses.replace(graph, configs=graph.configs.subset(np.arange(2))))
  call = some.encode if use == "encode" else lambda rows: some.total(rows, random_costs(some, 0))
  with pytest.raises(ValueError, match="gives group"):
    call(graph.configs.group_row)


def test_groups_of_too_many_choices_have_no_pairs_and_the_log_says_so(caplog):
  graph = table_cases.program(0)
  found = terms.terms_of(graph, max_choices=1)
  assert len(found.columns) == 0 and (found.pair_column == -1).all() and len(found.pairs) > 0
  assert f"{graph.name} has groups with up to {found.choices} choices" in caplog.text


def test_codes_take_the_smallest_type_that_holds_them():
  graph = table_cases.program(0, config_nodes=[3], rows=400, configs=900)
  group_row = (np.arange(900)[:, None] % 400).astype(np.uint16)
  graph = random_graphs.with_configs(graph, group_row=group_row)
  codes = terms.terms_of(graph).encode(graph.configs.group_row)
  assert codes.dtype == np.uint16
  np.testing.assert_array_equal(codes[0], np.arange(900) % 400)
