import dataclasses

import numpy as np
import pytest
import table_cases

from tpugraphs_jax.data import node_pairs, terms
from tpugraphs_jax.graph import LayoutConfigs

SEEDS = range(4)


def slow_terms(graph, found):
  """Unary and pair terms that occur, as sets of tuples, configuration by configuration."""
  configs, group = graph.configs, graph.configs.node_group
  unary, pair = set(), set()
  for row in configs.group_row.tolist():
    unary |= {(g, r) for g, r in enumerate(row)}
    for i, j in found.pairs.ends.tolist():
      a, b = sorted((group[i], group[j]))
      pair.add((a, b, row[a], row[b]))
  return unary, pair


def listed(found):
  """The terms as sets of tuples, as `slow_terms` has them."""
  group = np.repeat(np.arange(len(found.row_start) - 1), np.diff(found.row_start))
  column = np.repeat(np.arange(len(found.columns)), np.diff(found.pair_start))
  pair = np.concatenate([found.columns[column], found.row[found.choices]], axis=1)
  assert (group[found.choices] == found.columns[column]).all()
  return (list(zip(group.tolist(), found.row.tolist())),
          list(map(tuple, pair.tolist())))


@pytest.fixture(params=["dense", "sparse"])
def _space(request, monkeypatch):
  """Tables with a place for every pair of choices, and those of few of very many."""
  if request.param == "sparse":
    monkeypatch.setattr(terms, "_DENSE", 0)


@pytest.mark.usefixtures("_space")
@pytest.mark.parametrize("seed", SEEDS)
def test_terms_are_the_choices_that_occur_each_once(seed):
  graph = table_cases.program(seed)
  found = terms.terms_of(graph)
  for some, expected in zip(listed(found), slow_terms(graph, found)):
    assert some == sorted(expected)


@pytest.mark.usefixtures("_space")
@pytest.mark.parametrize("seed", SEEDS)
def test_codes_lead_back_to_the_rows(seed):
  graph = table_cases.program(seed, configs=40)
  found = terms.terms_of(graph)
  group_row, groups = graph.configs.group_row, len(found.row_start) - 1
  codes = found.encode(group_row)
  assert codes.dtype == found.code_dtype == np.uint8
  np.testing.assert_array_equal(found.row[codes[:groups].T + found.row_start[:-1]], group_row)
  choices = found.choices[codes[groups:].T + found.pair_start[:-1]]  # [C, Q, 2]
  np.testing.assert_array_equal(found.row[choices], group_row[:, found.columns])


@pytest.mark.usefixtures("_space")
def test_blocks_of_configurations_make_no_difference(monkeypatch):
  graph = table_cases.program(0, configs=23)
  whole = terms.terms_of(graph)
  codes = whole.encode(graph.configs.group_row)
  monkeypatch.setattr(terms, "_BLOCK_CONFIGS", 5)
  monkeypatch.setattr(terms, "_BLOCK_CELLS", 7)
  parts = terms.terms_of(graph)
  np.testing.assert_array_equal(parts.choices, whole.choices)
  np.testing.assert_array_equal(parts.encode(graph.configs.group_row), codes)


@pytest.mark.usefixtures("_space")
@pytest.mark.parametrize("seed", SEEDS)
def test_total_is_the_sum_of_the_costs_of_a_configurations_terms(seed):
  graph = table_cases.program(seed)
  found, rng = terms.terms_of(graph), np.random.default_rng(seed)
  unary, pair = rng.normal(size=len(found.row)), rng.normal(size=len(found.choices))
  cost = {}
  for some, costs in zip(listed(found), (unary, pair)):
    cost |= dict(zip(some, costs))
  expected = []
  for row in graph.configs.group_row.tolist():
    terms_of_config = [(g, r) for g, r in enumerate(row)]
    terms_of_config += [(a, b, row[a], row[b]) for a, b in found.columns.tolist()]
    expected.append(sum(cost[term] for term in terms_of_config))
  np.testing.assert_allclose(
      found.total(graph.configs.group_row, unary, pair), expected, rtol=1e-5, atol=1e-6)


def test_terms_of_a_slate_are_those_of_its_configurations_alone():
  graph = table_cases.program(1, configs=30)
  ids = np.array([4, 9])
  some = terms.find_terms(graph.configs, node_pairs.find_pairs(graph), config_ids=ids)
  alone = terms.terms_of(dataclasses.replace(graph, configs=graph.configs.subset(ids)))
  np.testing.assert_array_equal(some.row, alone.row)
  np.testing.assert_array_equal(some.choices, alone.choices)


@pytest.mark.usefixtures("_space")
@pytest.mark.parametrize("use", ["encode", "total"])
def test_choices_without_a_term_are_refused(use):
  graph = table_cases.program(0, nodes=60, edges=120, configs=30)
  some = terms.find_terms(graph.configs, node_pairs.find_pairs(graph), config_ids=np.arange(2))
  costs = (np.zeros(len(some.row)), np.zeros(len(some.choices)))
  call = some.encode if use == "encode" else lambda rows: some.total(rows, *costs)
  with pytest.raises(ValueError, match="row .* for group .* no term; find the terms of all"):
    call(graph.configs.group_row)
  # Rows that are known, in a pair that is not: configuration 0 with one group of 1.
  first, second = graph.configs.group_row[:2].copy()
  a, b = next((a, b) for a, b in some.columns.tolist()
              if a != b and first[a] != second[a] and first[b] != second[b])
  first[a] = second[a]
  with pytest.raises(ValueError, match="a pair of choices without a term"):
    call(first[None])


def test_a_graph_without_configurable_nodes_has_no_terms():
  graph = table_cases.program(0)
  configs = LayoutConfigs(np.zeros((0, 18), np.int8), np.zeros(0, np.int32),
                          np.zeros((5, 0), np.uint8), np.zeros(5, np.int64))
  graph = dataclasses.replace(graph, config_node=np.zeros(0, np.int32), configs=configs)
  found = terms.terms_of(graph)
  assert found.encode(configs.group_row).shape == (0, 5)
  np.testing.assert_array_equal(
      found.total(configs.group_row, np.zeros(0), np.zeros(0)), np.zeros(5))


def test_one_configurable_node_has_unary_terms_alone():
  graph = table_cases.program(0, config_nodes=[3])
  found = terms.terms_of(graph)
  assert len(found.columns) == len(found.choices) == 0
  assert found.encode(graph.configs.group_row).shape == (1, 12)


def test_a_group_of_thousands_is_one_column():
  nodes = 6_000
  graph = table_cases.program(0, nodes=nodes, edges=9_000, config_nodes=range(0, 4_000))
  configs = dataclasses.replace(
      graph.configs, node_group=np.zeros(4_000, np.int32),
      group_row=graph.configs.group_row[:, :1])
  found = terms.terms_of(dataclasses.replace(graph, configs=configs))
  np.testing.assert_array_equal(found.columns, [[0, 0]])
  assert len(found.choices) == len(found.row)  # Both ends choose the same row.
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
