import dataclasses

import numpy as np
import pytest
import table_cases

from tpugraphs_jax.graph import LayoutConfigs
from tpugraphs_jax.rankers.tables import node_pairs, terms

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
    np.testing.assert_array_equal(found.columns[column][::-1 if is_turned else 1], pair)


@pytest.mark.parametrize("seed", SEEDS)
def test_codes_lead_back_to_the_rows(seed):
  graph = table_cases.program(seed, configs=40)
  found = terms.terms_of(graph)
  codes = found.encode(graph.configs.group_row)
  assert codes.dtype == found.code_dtype == np.uint8
  np.testing.assert_array_equal(found.decode(codes), graph.configs.group_row)


def random_costs(found, seed):
  rng = np.random.default_rng(seed)
  shape = (found.choices, found.choices)
  return rng.normal(size=(len(found.row_table), shape[0])), rng.normal(
      size=(len(found.columns), *shape))


@pytest.mark.parametrize("block", [3, 4096])
@pytest.mark.parametrize("seed", SEEDS)
def test_total_is_the_sum_of_the_costs_of_a_configurations_choices(seed, block, monkeypatch):
  monkeypatch.setattr(terms, "_BLOCK_CONFIGS", block)
  monkeypatch.setattr(terms, "_BLOCK_CELLS", 2 * block)  # two columns at a time
  graph = table_cases.program(seed, configs=10)
  found = terms.terms_of(graph)
  unary, pair = random_costs(found, seed)
  expected = []
  for chosen in graph.configs.group_row.tolist():
    x = [rows.index(row) for rows, row in zip(listed(found), chosen)]
    expected.append(sum(unary[g, choice] for g, choice in enumerate(x)) + sum(
        pair[q, x[a], x[b]] for q, (a, b) in enumerate(found.columns.tolist())))
  np.testing.assert_allclose(found.total(graph.configs.group_row, unary, pair), expected)


def test_total_without_pairs_is_the_sum_of_single_costs():
  graph = table_cases.program(0)
  found = terms.terms_of(graph)
  unary, pair = random_costs(found, 0)
  np.testing.assert_allclose(
      found.total(graph.configs.group_row, unary, np.zeros((0, 0, 0))),
      found.total(graph.configs.group_row, unary, 0 * pair))


@pytest.mark.parametrize("use", ["encode", "total"])
def test_a_row_that_is_none_of_a_groups_choices_is_refused(use):
  graph = table_cases.program(0, configs=30)
  some = terms.find_terms(graph.configs.subset(np.arange(2)), node_pairs.find_pairs(graph))
  call = some.encode if use == "encode" else lambda rows: some.total(rows, *random_costs(some, 0))
  with pytest.raises(ValueError, match="gives group .* the row .* none of its choices; find"):
    call(graph.configs.group_row)


def test_groups_of_too_many_choices_have_no_pairs_and_the_log_says_so(caplog):
  graph = table_cases.program(0)
  pairs = node_pairs.find_pairs(graph)
  found = terms.find_terms(graph.configs, pairs, max_choices=1, name="wide")
  assert len(found.columns) == 0 and (found.pair_column == -1).all() and len(pairs) > 0
  assert f"wide has groups with up to {found.choices} choices; {len(pairs)} of" in caplog.text


def test_a_graph_without_configurable_nodes_has_no_choices():
  graph = table_cases.program(0)
  configs = LayoutConfigs(np.zeros((0, 18), np.int8), np.zeros(0, np.int32),
                          np.zeros((5, 0), np.uint8), np.zeros(5, np.int64))
  graph = dataclasses.replace(graph, config_node=np.zeros(0, np.int32), configs=configs)
  found = terms.terms_of(graph)
  assert found.encode(configs.group_row).shape == (0, 5)
  total = found.total(configs.group_row, *random_costs(found, 0))
  np.testing.assert_array_equal(total, np.zeros(5))


def test_one_configurable_node_has_no_columns():
  graph = table_cases.program(0, config_nodes=[3])
  found = terms.terms_of(graph)
  assert len(found.columns) == 0
  assert found.encode(graph.configs.group_row).shape == (1, 12)


def test_a_group_of_thousands_is_one_column():
  nodes = 6_000
  graph = table_cases.program(0, nodes=nodes, edges=9_000, config_nodes=range(0, 4_000))
  configs = dataclasses.replace(
      graph.configs, node_group=np.zeros(4_000, np.int32),
      group_row=graph.configs.group_row[:, :1])
  found = terms.terms_of(dataclasses.replace(graph, configs=configs))
  np.testing.assert_array_equal(found.columns, [[0, 0]])
  assert len(found.pairs) == len(found.pair_column) > 1_000


def test_codes_take_the_smallest_type_that_holds_them():
  graph = table_cases.program(0, config_nodes=[3], rows=400, configs=900)
  graph = dataclasses.replace(graph, configs=dataclasses.replace(
      graph.configs, group_row=(np.arange(900)[:, None] % 400).astype(np.uint16)))
  found = terms.terms_of(graph)
  assert found.code_dtype == np.uint16
  np.testing.assert_array_equal(found.encode(graph.configs.group_row)[0], np.arange(900) % 400)


def test_kept_terms_are_those_found(tmp_path):
  graph = table_cases.program(2)
  found = terms.terms_of(graph, folder=tmp_path)
  again = terms.load(tmp_path / "terms.npz", terms.identity(graph))
  for one, other in ((found, again), (found.pairs, again.pairs)):
    for field in dataclasses.fields(one):
      if field.name != "pairs":
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


@pytest.mark.parametrize("change", ["edges", "rows", "choices", "groups", "sizes", "options"])
def test_terms_are_found_anew_when_what_they_depend_on_changes(tmp_path, change):
  graph = table_cases.program(2)
  terms.terms_of(graph, folder=tmp_path)
  configs, options = graph.configs, {}
  if change == "edges":
    graph = dataclasses.replace(graph, edge_index=graph.edge_index[1:])
  elif change == "sizes":
    graph = dataclasses.replace(graph, node_feat=graph.node_feat * 2)
  elif change == "options":
    options = {"hops": 2}
  else:
    new = {"rows": {"rows": 1 - configs.rows},
           "choices": {"group_row": configs.group_row[::-1]},
           "groups": {"node_group": configs.node_group[::-1]}}[change]
    graph = dataclasses.replace(graph, configs=dataclasses.replace(configs, **new))
  assert terms.load(tmp_path / "terms.npz", terms.identity(graph, **options)) is None
  terms.terms_of(graph, folder=tmp_path, **options)
  assert terms.load(tmp_path / "terms.npz", terms.identity(graph, **options)) is not None


def test_a_damaged_file_is_named(tmp_path):
  graph = table_cases.program(2)
  terms.terms_of(graph, folder=tmp_path)
  path = tmp_path / "terms.npz"
  path.write_bytes(path.read_bytes()[:-40])
  with pytest.raises(ValueError, match="terms.npz is damaged"):
    terms.terms_of(graph, folder=tmp_path)
