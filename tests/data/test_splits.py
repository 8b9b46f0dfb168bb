"""Which graphs of a split a run takes, said by name and number."""

import dataclasses

import numpy as np
import pytest
import random_graphs

from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data import npz, splits
from tpugraphs_jax.data.layout_data import LayoutData
from tpugraphs_jax.data.tile_data import TileData
from tpugraphs_jax.graph import LayoutConfigs, TileConfigs


def tile_configs(runtime_ns):
  count = len(runtime_ns)
  return TileConfigs(np.arange(3.0 * count, dtype=np.float32).reshape(count, 3),
                     np.array(runtime_ns, np.int64), np.full(count, 10, np.int64))


def layout_configs(runtime_ns, same=False):
  count = len(runtime_ns)
  group_row = np.zeros((count, 2), np.uint8)
  group_row[:, 0] = 0 if same else np.arange(count) % 3
  return LayoutConfigs(np.eye(3, 18, dtype=np.int8), np.array([0, 1, 1], np.int32), group_row,
                       np.array(runtime_ns, np.int64))


TILES, LAYOUTS = TileData(Collection("tile:xla")), LayoutData(Collection("layout:xla:random"))


@pytest.mark.parametrize("data, configs, reason", [
    (TILES, tile_configs([1, 2, 3]), ""), (TILES, tile_configs([1, 1, 1]), ""),
    (TILES, tile_configs([1, 2]), "fewer than 3 configurations"),
    (TILES, tile_configs([0, 0, 0]), "no runtimes"),
    (LAYOUTS, layout_configs([1, 2, 3]), ""),
    (LAYOUTS, layout_configs([1, 2]), "fewer than 3 configurations"),
    (LAYOUTS, layout_configs([0, 0, 0]), "no runtimes"),
    (LAYOUTS, layout_configs([1, 2, 3], same=True), "all configurations equal"),
    (LAYOUTS, layout_configs([2**40] * 3), "all runtimes equal"),
])
def test_each_reason_not_to_train_on_a_graph_is_named(data, configs, reason):
  assert data.why_not_trained(configs, min_configs=3) == reason


@pytest.mark.parametrize("configs, reason", [
    (tile_configs([1, 1]), ""), (tile_configs([5]), "fewer than 2 configurations"),
    (layout_configs([0, 0]), "no runtimes (ranked, not scored)"),
])
def test_each_reason_not_to_judge_a_graph_is_named(configs, reason):
  assert splits.why_not_judged(configs) == reason


def test_targets_are_those_that_the_data_were_asked_for():
  runtime = [4, 2, 8]
  ids = np.array([2, 0])
  official = TILES.targets(tile_configs(runtime), ids)
  np.testing.assert_array_equal(official, np.array([0.8, 0.4], np.float32))
  ranked = dataclasses.replace(TILES, target="rank").targets(tile_configs(runtime), np.arange(3))
  np.testing.assert_array_equal(ranked, np.array([0.5, 0.0, 1.0], np.float32))
  ratio = dataclasses.replace(LAYOUTS, target="ratio").targets(
      layout_configs(runtime), np.arange(3))
  np.testing.assert_array_equal(ratio, np.array([1.0, 0.0, 3.0], np.float32))


def test_all_configurations_of_a_kernel_are_judged():
  np.testing.assert_array_equal(TILES.validation_ids("a", tile_configs([1, 2, 3])), np.arange(3))


def test_transforms_are_fitted_on_configurations_of_kernels_and_rows_of_programs():
  graph = random_graphs.tile_graph(np.random.default_rng(0), nodes=3, edges=2, configs=4)
  assert TILES.config_values(graph) is graph.configs.config_feat
  graph = dataclasses.replace(graph, configs=layout_configs([1, 2]))
  assert LAYOUTS.config_values(graph) is graph.configs.rows


def test_a_graph_of_another_kind_is_refused_with_both_kinds():
  graph = random_graphs.tile_graph(np.random.default_rng(0), nodes=3, edges=2, configs=4)
  splits.check_kind(graph, TileConfigs)
  with pytest.raises(ValueError, match="configs of type TileConfigs; the model ranks LayoutConfi"):
    splits.check_kind(graph, LayoutConfigs)


def test_a_split_of_malformed_files_alone_is_an_error(tmp_path):
  paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
  for path in paths:
    path.write_bytes(b"no archive")
  with pytest.raises(npz.NpzError, match="a.npz"):
    splits.read_files(paths, npz.read_tile, skip_bad=False)
  with pytest.raises(ValueError, match="all 2 files in .* are malformed"):
    splits.read_files(paths, npz.read_tile, skip_bad=True)
