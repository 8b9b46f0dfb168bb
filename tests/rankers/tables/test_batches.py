from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import table_cases
from table_cases import CONFIGS

from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.data.batching import ABSENT
from tpugraphs_jax.rankers.tables import batches as table_batches


@functools.cache
def programs() -> tuple[table_batches.PreparedTables, ...]:
  cases = (dict(nodes=30, edges=50), dict(nodes=12, edges=8, config_nodes=[1]),
           dict(nodes=45, edges=90, rows=9, configs=3))
  return tuple(table_cases.prepared(table_cases.program(i, **case)) for i, case in enumerate(cases))


def slates():
  return table_cases.slates(programs(), CONFIGS)


def batch(**options):
  return table_cases.batch_of(programs(), **options)


def test_every_code_is_the_row_of_its_group_in_the_file():
  made, group = batch(spare=3), 0
  for i, slate in enumerate(slates()):
    layout = slate.graph.configs
    for g in range(layout.group_row.shape[1]):
      assert made.group_graph[group] == i
      for c, config in enumerate(slate.config_ids):
        row = made.rows[made.choices.row[group, made.code[group, c]]]
        np.testing.assert_array_equal(row, layout.rows[layout.group_row[config, g]])
      group += 1
  assert (made.group_graph[group:] == ABSENT).all()


def test_every_node_and_pair_is_where_its_program_is():
  made, node, pair, group = batch(), 0, 0, 0
  offsets = np.cumsum([0, *made.graph.n_node])
  for slate, offset in zip(slates(), offsets):
    tables = slate.graph
    count = len(tables.choices.node)
    np.testing.assert_array_equal(
        made.choices.node[node : node + count], tables.choices.node + offset)
    np.testing.assert_array_equal(
        made.choices.group[node : node + count], tables.configs.node_group + group)
    ends = made.pairs.ends[pair : pair + len(tables.pairs.ends)]
    np.testing.assert_array_equal(ends, tables.pairs.ends + offset)
    # Either way round, both ends of a pair are in the groups of its column.
    found = made.pairs.groups[made.pairs.column[pair : pair + len(ends)]]
    group_of = dict(zip(made.choices.node.tolist(), made.choices.group.tolist()))
    turned = made.pairs.is_turned[pair : pair + len(ends)]
    for (first, second, _), groups, is_turned in zip(ends.tolist(), found.tolist(), turned):
      assert [group_of[first], group_of[second]] == groups[:: -1 if is_turned else 1]
    node, pair, group = node + count, pair + len(ends), group + tables.sizes["groups"]


def test_sizes_are_what_a_batch_takes():
  made = batch()
  budget = batching.total_sizes(programs())
  assert len(made.choices.node) == budget["config_nodes"]
  assert len(made.pairs.ends) == budget["pairs"]
  assert len(made.pairs.groups) == budget["columns"]
  assert made.code.shape == (budget["groups"], CONFIGS) and made.code.dtype == np.uint8
  assert (plan.choose_budgets([budget])[0].keys()) == budget.keys()


def test_pairs_are_in_the_order_of_their_columns():
  assert (np.diff(batch(spare=2).pairs.column) >= 0).all()


def test_weights_are_bytes_over_those_of_all_groups():
  for program in programs():
    group = np.bincount(program.choices.group, program.choices.weight)
    np.testing.assert_allclose(np.square(group).sum(), 1, rtol=1e-5)


def test_without_tiling_nothing_is_said_of_padding():
  graph = table_cases.program(0)
  plain, tiled = (table_cases.prepared(graph, tiling=tiling) for tiling in (False, True))
  assert not plain.choices.feat.any() and tiled.choices.feat.any()
  assert plain.graph.feat.shape[1] + 12 == tiled.graph.feat.shape[1]


@pytest.mark.parametrize("options", [dict(choices=2), dict(spare=-1)])
def test_what_does_not_fit_is_refused(options):
  with pytest.raises(ValueError, match="choices exceed|exceed the budget"):
    batch(**options)


def test_more_room_for_choices_changes_only_absent_ones():
  small, large = batch(), batch(choices=12)
  width = small.choices.row.shape[1]
  np.testing.assert_array_equal(large.choices.row[:, :width], small.choices.row)
  assert (large.choices.row[:, width:] >= ABSENT).all()
  rest = lambda made: made._replace(choices=None)
  jax.tree.map(np.testing.assert_array_equal, rest(large), rest(small))
