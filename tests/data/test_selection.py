"""Which graphs and configurations are trained on and judged, and targets, against slow loops."""

import collections
import dataclasses
from fractions import Fraction
import json
import math

import numpy as np
import pytest

from tests.support import comparing, random_graphs
from tpugraphs_jax import synthetic
from tpugraphs_jax.data import npz, selection
from tpugraphs_jax.data.selection import JudgedOptions, LayoutData, TileData
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.graph import LayoutConfigs, TileConfigs


def tile_configs(runtime_ns):
  count = len(runtime_ns)
  return TileConfigs(
    np.arange(3.0 * count, dtype=np.float32).reshape(count, 3),
    np.array(runtime_ns, np.int64),
    np.full(count, 10, np.int64),
  )


def layout_configs(labels, same=False):
  count = len(labels)
  group_row = np.zeros((count, 2), np.uint8)
  group_row[:, 0] = 0 if same else np.arange(count) % 3
  return LayoutConfigs(
    np.eye(3, 18, dtype=np.int8),
    np.array([0, 1, 1], np.int32),
    group_row,
    np.array(labels, np.int64),
  )


def with_options(data, **changes):
  return dataclasses.replace(data, options=dataclasses.replace(data.options, **changes))


TILES = TileData(Collection("tile:xla"))
LAYOUTS = LayoutData(Collection("layout:xla:random"))


@pytest.mark.parametrize(
  "configs, reason",
  [
    (tile_configs([1, 1, 1]), ""),
    (tile_configs([1, 2]), "fewer than 3 configurations"),
    (tile_configs([0, 0, 0]), "no runtimes"),
  ],
)
def test_each_reason_not_to_train_on_a_kernel_is_named(configs, reason):
  assert TILES.why_not_trained(configs, min_configs=3) == reason


def test_graphs_with_nothing_to_learn_can_stay_in_training():
  data = with_options(LAYOUTS, skip_constant=False)
  for configs in (layout_configs([1, 2, 3], same=True), layout_configs([2**40] * 3)):
    assert data.why_not_trained(configs, min_configs=3) == ""
  assert data.why_not_trained(layout_configs([0] * 3), min_configs=3) == "no runtimes"


def test_targets_follow_the_option_of_the_data():
  runtime = [4, 2, 8]
  ids = np.array([2, 0])
  official = TILES.targets(tile_configs(runtime), ids)
  np.testing.assert_array_equal(official, np.array([0.8, 0.4], np.float32))
  ranked = dataclasses.replace(TILES, target="rank").targets(tile_configs(runtime), np.arange(3))
  np.testing.assert_array_equal(ranked, np.array([0.5, 0.0, 1.0], np.float32))
  ratio = dataclasses.replace(LAYOUTS, target="ratio").targets(
    layout_configs(runtime), np.arange(3)
  )
  np.testing.assert_array_equal(ratio, np.array([1.0, 0.0, 3.0], np.float32))


def test_absolute_targets_are_milliseconds_that_kernels_share():
  """A normalizer that differs within a kernel corrects the runtime of its configuration."""
  data = dataclasses.replace(TILES, target="absolute")
  configs = tile_configs([3_000_000, 6_000_000])
  np.testing.assert_array_equal(data.targets(configs, np.arange(2)), np.array([3, 6], np.float32))
  other = dataclasses.replace(configs, normalizer_ns=np.array([10, 30]))
  np.testing.assert_allclose(data.targets(other, np.arange(2)), [3 * 20 / 10, 6 * 20 / 30])
  layouts = dataclasses.replace(LAYOUTS, target="absolute")
  np.testing.assert_array_equal(
    layouts.targets(layout_configs([3_000_000, 500_000, 1]), np.arange(2)),
    np.array([3, 0.5], np.float32),
  )


def test_equal_tiles_of_a_training_kernel_count_once():
  graph = random_graphs.tile_graph(np.random.default_rng(0), nodes=3, edges=2, configs=4)
  configs = TileConfigs(
    np.array([[1.0], [2.0], [1.0]], np.float32), np.array([7, 5, 6]), np.full(3, 10)
  )
  found = selection.drop_duplicates(dataclasses.replace(graph, configs=configs), "min").configs
  assert found.config_feat.tolist() == [[1.0], [2.0]] and found.runtime_ns.tolist() == [6, 5]
  # The fastest of equal tiles is so by runtime over normalizer, and keeps its normalizer.
  configs = TileConfigs(np.ones((2, 1), np.float32), np.array([100, 90]), np.array([100, 50]))
  found = selection.drop_duplicates(dataclasses.replace(graph, configs=configs), "min").configs
  assert (found.runtime_ns.tolist(), found.normalizer_ns.tolist()) == ([100], [100])


def test_training_graphs_are_left_out_by_their_names(data_root):
  everything = dataclasses.replace(LAYOUTS, root=str(data_root))
  names = [graph.name for graph in everything.load("train")]
  data = with_options(everything, leave_out=(names[1],))
  assert [graph.name for graph in data.load("train")] == [names[0], *names[2:]]
  valid = [graph.name for graph in everything.load("valid")]
  assert [graph.name for graph in with_options(data, leave_out=valid).load("valid")] == valid


def test_malformed_files_are_an_error_or_are_left_out_by_name(tmp_path, caplog):
  root = synthetic.generate(tmp_path, collections=["tile:xla"], limit=2, progress=False)
  tiles = dataclasses.replace(TILES, root=str(root))
  bad, good = npz.split_files(root, "tile:xla", "train")
  bad.write_bytes(b"no archive")
  with pytest.raises(ValueError, match="data.skip_bad_files"):
    tiles.load("train")
  lenient = with_options(tiles, skip_bad_files=True)
  assert [graph.name for graph in lenient.load("train")] == [good.stem]
  assert bad.name in caplog.text
  good.write_bytes(b"no archive")
  with pytest.raises(ValueError, match="malformed"):
    lenient.load("train")


def of_rows(group_row, labels):
  graph = random_graphs.layout_graph(
    np.random.default_rng(0), nodes=6, edges=8, config_nodes=[1, 3, 4, 5], configs=1
  )
  group_row = np.asarray(group_row, np.uint8)
  return random_graphs.with_configs(
    graph,
    group_row=group_row,
    labels=np.asarray(labels, np.int64),
    node_group=np.arange(4, dtype=np.int32) % group_row.shape[1],
  )


def slow_policy(graph, policy):
  """Rows and runtimes by a dictionary of tuples."""
  runtimes = {}
  for row, runtime in zip(graph.configs.group_row.tolist(), graph.configs.labels.tolist()):
    runtimes.setdefault(tuple(row), []).append(runtime)
  combine = {"first": lambda r: r[0], "min": min}
  return list(runtimes), [combine[policy](r) for r in runtimes.values()]


@pytest.mark.parametrize("policy", ["first", "min"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_policies_equal_a_slow_dictionary(policy, groups):
  rng = np.random.default_rng(groups)
  # Around 2^60, where float64 is not exact.
  graph = of_rows(rng.integers(0, 3, (80, groups)), 2**60 + rng.integers(0, 100, 80))
  found = selection.drop_duplicates(graph, policy).configs
  rows, runtimes = slow_policy(graph, policy)
  assert [tuple(row) for row in found.group_row.tolist()] == rows
  assert found.labels.tolist() == runtimes
  assert found.labels.dtype == np.int64 and found.group_row.dtype == np.uint8


@pytest.mark.parametrize("policy", selection.DUPLICATE_POLICIES)
def test_distinct_configurations_stay_as_they_are(policy):
  graph = of_rows([[2, 0], [0, 2], [1, 1]], [7, 5, 6])
  comparing.assert_same_graph(selection.drop_duplicates(graph, policy), graph)
  equal = of_rows([[0], [0]], [5, 6])
  assert (selection.drop_duplicates(equal, policy) is equal) == (policy == "keep")


def test_equal_configurations_become_one_and_unlabelled_ones_stay_unlabelled():
  found = selection.drop_duplicates(of_rows([[1, 2]] * 4, [0] * 4), "min").configs
  assert found.group_row.tolist() == [[1, 2]] and not found.is_labelled


def judged(folder, name, configs, *, text=None):
  """Validation indices of a graph with `configs` configurations; `text` becomes their file."""
  if text is not None:
    (folder / "xla_random.json").write_text(text)
  data = dataclasses.replace(LAYOUTS, judged=JudgedOptions(indices_dir=str(folder)))
  return data.validation_ids(name, layout_configs([0] * configs))


def test_indices_are_read_in_their_order_and_with_repetitions(tmp_path):
  text = json.dumps({"unet": [3, 1, 3], "bert": [0]})
  found = judged(tmp_path, "unet", 4, text=text)
  assert found.dtype == np.int64
  np.testing.assert_array_equal(found, [3, 1, 3])
  np.testing.assert_array_equal(judged(tmp_path, "bert", 1), [0])


def test_a_missing_file_of_indices_names_the_flag(tmp_path):
  with pytest.raises(FileNotFoundError, match="indices_dir"):
    judged(tmp_path, "unet", 4)


_WRONG_IDS = (
  "[]",
  '"b"',
  "[1.5]",
  "[true]",
  "[[1], [2]]",
  "[[1], 2]",
  "7",
  "null",
  "[0, 4]",
  "[-1, 2]",
  "[99999999999999999999]",
)


@pytest.mark.parametrize(
  "text", ["{", "[1, 2]", "3", '{"bert": [1]}', *(f'{{"unet": {ids}}}' for ids in _WRONG_IDS)]
)
def test_indices_of_another_kind_or_graph_are_refused(tmp_path, text):
  with pytest.raises(ValueError, match="xla_random.json|unet"):
    judged(tmp_path, "unet", 4, text=text)


def test_official_targets_of_kernels_are_divided_in_float64():
  runtime, unit = np.array([2**40 + 1, 3, 2**33 + 5]), np.array([7, 5, 2**34])
  configs = dataclasses.replace(tile_configs(runtime), normalizer_ns=unit)
  found = TILES.targets(configs, np.array([2, 0, 1]))
  assert found.dtype == np.float32
  np.testing.assert_array_equal(
    found, np.float32([int(runtime[i]) / int(unit[i]) for i in (2, 0, 1)])
  )


def test_official_targets_of_programs_are_divided_in_float32():
  """Runtimes that are equal in float32 are ties, and the quotient is rounded once more."""
  runtime = [2**40, 2**40 + 1, *np.random.default_rng(0).integers(1, 2**34, 50).tolist()]
  found = LAYOUTS.targets(layout_configs(runtime), np.arange(len(runtime)))
  assert found.dtype == np.float32 and found[0] == found[1]
  nearest = lambda exact: np.float32(float(exact))  # float64 holds these exactly
  np.testing.assert_array_equal(
    found, [nearest(Fraction(int(np.float32(value))) / 10**7) for value in runtime]
  )
  assert (found != np.float32(np.array(runtime) / 1e7)).any()


@pytest.mark.parametrize("kind", ["ratio", "rank"])
@pytest.mark.parametrize("base", [2**31, 2**53, 2**61])
def test_runtimes_one_nanosecond_apart_stay_apart(kind, base):
  runtime = base + np.array([2, 0, 1, 2, 5])
  target = selection.slate_target(runtime, kind)
  assert target.dtype == np.float32
  np.testing.assert_array_equal(
    np.sign(np.subtract.outer(target, target)), np.sign(np.subtract.outer(runtime, runtime))
  )


def test_ratio_and_rank_by_their_formulas():
  target = lambda runtime, kind: selection.slate_target(np.array(runtime), kind)
  np.testing.assert_array_equal(target([40, 10, 25, 10], "ratio"), [3.0, 0.0, 1.5, 0.0])
  np.testing.assert_array_equal(target([40, 10, 25, 10], "rank"), [1.0, 0.0, 0.5, 0.0])
  for kind in ("ratio", "rank"):
    np.testing.assert_array_equal(target([7, 7], kind), [0, 0])


@pytest.mark.parametrize("count", [3, 7, 10, 29])
def test_thirds_keep_the_fastest_the_slowest_and_some_between(count):
  runtime = np.random.default_rng(1).permutation(30) * 10**10
  kept = selection.thirds(runtime, count, np.random.default_rng(2))
  assert len(set(kept.tolist())) == count and (np.diff(kept) > 0).all()
  order, third = np.argsort(runtime), count // 3
  assert {*order[:third], *order[30 - third :]} <= {*kept}


def test_thirds_draw_the_middle_evenly_and_keep_small_graphs_whole():
  runtime, rng = np.arange(10), np.random.default_rng(3)
  counts = collections.Counter(
    config for _ in range(3000) for config in selection.thirds(runtime, 4, rng).tolist()
  )
  assert counts[0] == counts[9] == 3000
  for config in range(1, 9):
    assert abs(counts[config] - 750) < 4 * math.sqrt(3000 * 0.25 * 0.75)
  for count in (10, 11):
    np.testing.assert_array_equal(selection.thirds(runtime, count, rng), np.arange(10))


def test_memory_maps_and_two_byte_rows_are_taken(tmp_path):
  rows = np.array([[300, 1], [2, 300], [300, 1]], np.uint16)
  np.save(tmp_path / "rows.npy", rows)
  mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
  graph = random_graphs.with_configs(of_rows([[0, 0]] * 3, [3, 2, 1]), group_row=mapped)
  found = selection.drop_duplicates(graph, "min").configs
  np.testing.assert_array_equal(found.group_row, rows[:2])
  np.testing.assert_array_equal(found.labels, [1, 2])
