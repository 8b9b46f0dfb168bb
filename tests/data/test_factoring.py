"""Distinct rows; factored configurations are lossless, small and the same from any blocks."""

import dataclasses

import numpy as np
import pytest

from tests.support import comparing, random_graphs
from tpugraphs_jax import graph
from tpugraphs_jax.data import factoring


@pytest.mark.parametrize(
  "array",
  [
    np.array([[1, 2], [3, 4], [1, 2], [0, 9], [3, 4]], np.uint8),
    np.array([[[0.5, 2]], [[0.5, 2]]], np.float32),
    np.array([[7], [300]], np.uint16),
    np.broadcast_to(np.arange(3), (4, 3)),
    np.asfortranarray([[1, 2], [2, 1], [1, 2]]),
    np.zeros((0, 3), np.float32),
  ],
)
def test_distinct_rows_are_the_first_of_each_in_file_order(array):
  first, which = graph.distinct_rows(array)
  rows = [row.tobytes() for row in np.ascontiguousarray(array)]
  assert [rows[i] for i in first] == list(dict.fromkeys(rows))
  assert first.tolist() == [rows.index(row) for row in dict.fromkeys(rows)]
  np.testing.assert_array_equal(array[first][which], array)


def _grouped(rng, *, configs, groups, members):
  """Configurations `[C, K, 18]`, equal for all nodes of a group, and the group of each node."""
  rows = rng.integers(-1, 6, (groups, 9, 18))
  choice = rng.integers(0, 9, (configs, groups))
  feat = rows[np.arange(groups), choice].astype(np.float32)
  node_group = rng.permutation(np.repeat(np.arange(groups), members))
  return feat[:, node_group], node_group


def test_factoring_is_lossless_and_as_small_as_a_brute_force_search():
  rng = np.random.default_rng(0)
  feat, _ = _grouped(rng, configs=50, groups=7, members=3)
  feat[:, 4] = feat[:, 11]  # two groups may become partly equal
  configs = factoring.factor_layout_configs(feat, np.arange(50))
  np.testing.assert_array_equal(configs.decode(np.arange(50)), feat)
  columns = {feat[:, node].tobytes() for node in range(feat.shape[1])}
  assert configs.group_row.shape == (50, len(columns))
  np.testing.assert_array_equal(configs.rows, np.unique(feat.reshape(-1, 18), axis=0))


@pytest.mark.parametrize("cuts", [[1], [49], [1, 2, 3], list(range(1, 50)), [10, 40]])
def test_factoring_does_not_depend_on_the_blocks(cuts):
  rng = np.random.default_rng(1)
  feat, _ = _grouped(rng, configs=50, groups=9, members=2)
  feat[:30] = feat[:1]  # groups differ only in late configurations
  expected = factoring.factor_layout_configs(feat, np.arange(50))
  factorer = factoring.LayoutFactorer(feat.shape[1])
  for block in np.split(feat, cuts):
    factorer.add(block)
  result = factorer.finish(np.arange(50))
  comparing.assert_same_fields(result, expected)


def test_groups_are_numbered_by_their_first_node():
  rng = np.random.default_rng(2)
  feat, node_group = _grouped(rng, configs=40, groups=6, members=4)
  found = factoring.factor_layout_configs(feat, np.arange(40)).node_group
  _, first = np.unique(found, return_index=True)
  assert (np.diff(first) > 0).all()
  same = found[:, None] == found
  np.testing.assert_array_equal(same, node_group[:, None] == node_group)


def test_all_65536_ids_are_used_and_one_row_more_is_an_error():
  number = np.arange(2**16 + 1)
  feat = np.stack([number // 7**i % 7 - 1 for i in range(18)], axis=1)[:, None]
  configs = factoring.factor_layout_configs(feat[:-1], number[:-1])
  assert configs.group_row.max() == 2**16 - 1
  np.testing.assert_array_equal(configs.decode(number[:-1]), feat[:-1])
  with pytest.raises(ValueError, match="65536"):
    factoring.factor_layout_configs(feat, number)


def test_rows_that_differ_in_one_digit_stay_apart():
  feat = np.zeros((37, 1, 18), np.float32)
  for digit in range(18):
    feat[1 + 2 * digit, 0, digit] = -1
    feat[2 + 2 * digit, 0, digit] = 5
  configs = factoring.factor_layout_configs(feat, np.arange(37))
  assert len(configs.rows) == 37
  np.testing.assert_array_equal(configs.decode(np.arange(37)), feat)


@pytest.mark.parametrize("shape", [(3, 18), (3, 0, 18), (3, 2, 17), (4, 2, 18)])
def test_factoring_refuses_wrong_shapes(shape):
  with pytest.raises(ValueError, match="node_config_feat"):
    factoring.factor_layout_configs(np.zeros(shape, np.float32), np.arange(3))


def test_output_orders_keep_the_first_six_integers_and_merge_what_is_then_equal():
  rng = np.random.default_rng(5)
  feat, _ = _grouped(rng, configs=40, groups=5, members=3)
  feat[:, 2, :6] = feat[:, 7, :6]  # these nodes differ only in operands
  whole = random_graphs.layout_graph(rng, nodes=20, edges=20, config_nodes=range(15), configs=40)
  whole = dataclasses.replace(whole, configs=factoring.factor_layout_configs(feat, np.arange(40)))
  feat[:, :, 6:] = -1
  expected = factoring.factor_layout_configs(feat, np.arange(40))
  comparing.assert_same_fields(factoring.output_orders(whole).configs, expected)


def test_configurations_say_in_a_line_how_many_there_are():
  tiles = graph.TileConfigs(np.ones((3, 24), np.float32), np.array([5, 7, 6]), np.ones(3, int))
  assert repr(tiles) == "<TileConfigs: 3 tiles, labels 5.0 to 7.0>"
  layouts = factoring.factor_layout_configs(np.zeros((2, 3, 18)), np.zeros(2))
  assert repr(layouts) == "<LayoutConfigs: 2 layouts of 3 nodes in 1 groups, not labelled>"
