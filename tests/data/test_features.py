"""Statistics are exact, fitted once, and come back from a file bit for bit."""

import dataclasses

import numpy as np
import pytest
import random_graphs
import recorded

from tpugraphs_jax.data import features, npz
from tpugraphs_jax.graph import NODE_FEATURES

COLUMNS = 6


def arrays_of(rng):
  """Uneven parts, one empty, with columns of very different size; 2 is constant."""
  scale = np.array([1, 1e-4, 0, 3e9, 50, 1e6])
  parts = [rng.normal(size=(n, COLUMNS)) * scale for n in (7, 0, 1, 30)]
  return [(part + [0, 5, -3, 0, 1e5, 0]).astype(np.float32) for part in parts]


def slow_transform(x, arrays, kinds):
  """Column by column in float64, with NumPy's own statistics.

  Returns the values and how far float32 may be off: its step at the column's
  size, in units of the column's spread.
  """
  columns, steps = [], []
  for column, kind in enumerate(kinds):
    seen = np.concatenate(arrays)[:, column].astype(np.float64)
    values = x[:, column].astype(np.float64)
    if kind == "signed_log1p":
      seen = np.sign(seen) * np.log(1 + np.abs(seen))
      values = np.sign(values) * np.log(1 + np.abs(values))
    if kind != "none" and len(set(seen)) == 1:
      continue
    offset, spread = 0.0, 1.0
    if kind == "minmax":
      offset, spread = seen.min(), seen.max() - seen.min()
    elif kind not in ("none", "varying"):
      offset, spread = seen.mean(), seen.std()
    columns.append((values - offset) / spread)
    steps.append(np.finfo(np.float32).eps * np.abs([*seen, *values]).max() / spread)
  return np.stack(columns, axis=1), np.array(steps)


def test_shifted_logarithms_stay_as_they_are_and_drop_constants():
  arrays = [np.array([[0, -2.5, 7, 4], [1e6, 3, 7, 4]], np.float32), np.zeros((0, 4), np.float32)]
  kinds = np.array(["log_offset(1)", "log_offset(3)", "log_offset(1)", "none"], object)
  transform = features.fit(arrays, kinds)
  found = transform(arrays[0])
  np.testing.assert_allclose(
      found, [[np.log(1), np.log(0.5), 4], [np.log(1e6 + 1), np.log(6), 4]], rtol=1e-6)
  np.testing.assert_array_equal(transform.kept, [0, 1, 3])
  again = features.Transform.from_dict(transform.to_dict())
  np.testing.assert_array_equal(again(arrays[0]), found)


def test_a_shift_that_is_too_small_is_refused_in_training_and_later():
  kinds = np.array(["none", "log_offset(3)"], object)
  with pytest.raises(ValueError, match=r"log_offset\(3\) of column 1, which holds -3: take a larger"):
    features.fit([np.array([[0, -3], [0, 5]], np.float32)], kinds)
  transform = features.fit([np.array([[0, -2], [0, 5]], np.float32)], kinds)
  with pytest.raises(ValueError, match=r"of column 1, which holds -9"):
    transform(np.array([[0, -9]], np.float32))


def test_a_file_says_nothing_of_shifts_where_there_are_none():
  transform = features.fit([np.array([[0, -3], [0, 5]], np.float32)], np.full(2, "minmax", object))
  assert sorted(transform.to_dict()) == ["kept", "log", "offset", "scale"]


@pytest.mark.parametrize("kind", ["log_offset", "log_offset()", "log_offset(0)", "log_offset(-1)"])
def test_shifts_that_are_none_are_refused(kind):
  with pytest.raises(ValueError, match=r"expected one of .* or log_offset\(K\) with K above 0"):
    features.parse_kinds(f"shape={kind},*=none", features.NODE_GROUPS)


@pytest.mark.parametrize("kinds", [
    *([kind] * COLUMNS for kind in features.KINDS),
    ["minmax", "standardize", "minmax", "signed_log1p", "none", "standardize"],
])
def test_transforms_equal_slow_statistics(kinds):
  rng = np.random.default_rng(0)
  arrays, kinds = arrays_of(rng), np.array(kinds, object)
  transform = features.fit(arrays, kinds)
  unseen = 2 * rng.normal(size=(9, COLUMNS)).astype(np.float32)
  for x in (*arrays, unseen):
    found = transform(x)
    expected, step = slow_transform(x, arrays, kinds)
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert (np.abs(found - expected) <= 3 * step + 1e-6 * np.abs(expected)).all()


def test_minmax_of_training_spans_zero_to_one():
  arrays = arrays_of(np.random.default_rng(1))
  x = np.concatenate(arrays)
  found = features.fit(arrays, np.full(COLUMNS, "minmax", object))(x)
  np.testing.assert_array_equal(found.min(axis=0), np.zeros(COLUMNS - 1))
  np.testing.assert_allclose(found.max(axis=0), np.ones(COLUMNS - 1), rtol=1e-6)


def test_a_small_spread_far_from_zero_is_not_lost():
  rng = np.random.default_rng(2)
  x = (2.0**31 + 256 * rng.integers(0, 9, (500, 1))).astype(np.float32)
  transform = features.fit(np.array_split(x, 7), np.array(["standardize"], object))
  np.testing.assert_allclose(transform.scale, np.std(x.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("kind", features.KINDS[1:])
def test_columns_constant_in_training_are_dropped_everywhere(kind):
  arrays = [np.array([[1, 7, 0], [2, 7, 0]], np.float32), np.array([[3, 7, 0]], np.float32)]
  transform = features.fit(arrays, np.full(3, kind, object))
  np.testing.assert_array_equal(transform.kept, [0])
  assert transform(np.array([[5, 8, 9]], np.float32)).shape == (1, 1)


def test_other_data_never_changes_a_transform():
  rng = np.random.default_rng(3)
  transform = features.fit(arrays_of(rng), np.full(COLUMNS, "standardize", object))
  before = {k: np.copy(v) for k, v in dataclasses.asdict(transform).items()}
  x = 1e6 * rng.normal(size=(5, COLUMNS)).astype(np.float32)
  whole = transform(x)
  np.testing.assert_array_equal(np.concatenate([transform(row[None]) for row in x]), whole)
  for name, array in before.items():
    np.testing.assert_array_equal(getattr(transform, name), array)


def test_fitting_without_features_is_refused():
  for arrays in ([], [np.zeros((0, 3), np.float32)]):
    with pytest.raises(ValueError, match="no training features"):
      features.fit(arrays, np.full(3, "minmax", object))


def test_saving_and_loading_is_exact(tmp_path):
  rng = np.random.default_rng(4)
  kinds = np.array(["minmax", "standardize", "none", "signed_log1p", "minmax", "none"], object)
  logs = np.array(["log_offset(7)", "none"], object)
  saved = {"node": features.fit(arrays_of(rng), kinds),
           "node/logs": features.fit([rng.normal(size=(4, 2))], logs),
           "config": features.fit([rng.normal(size=(4, 2))], np.full(2, "none", object))}
  features.save(tmp_path / "features.json", saved)
  loaded = features.load(tmp_path / "features.json")
  assert loaded.keys() == saved.keys()
  for name, transform in saved.items():
    for field, array in dataclasses.asdict(transform).items():
      found = getattr(loaded[name], field)
      assert (found is None) == (array is None)
      assert array is None or found.dtype == array.dtype
      np.testing.assert_array_equal(found, array)
  assert [path.name for path in tmp_path.iterdir()] == ["features.json"]


def test_a_missing_or_damaged_file_says_so(tmp_path):
  with pytest.raises(FileNotFoundError, match="features.json is missing: --workdir"):
    features.load(tmp_path / "features.json")
  for text in ('{"node": {"kept": [0], "log"', '{"node": {"kept": [0]}}', "[1]", '{"node": 3}'):
    (tmp_path / "features.json").write_text(text)
    with pytest.raises(ValueError, match="features.json is damaged"):
      features.load(tmp_path / "features.json")


def test_kinds_go_by_group_and_the_star_takes_the_rest():
  kinds = features.parse_kinds("window=none, *=minmax,layout=signed_log1p", features.NODE_GROUPS)
  expected = ["minmax"] * 37 + ["none"] * 56 + ["minmax"] * 41 + ["signed_log1p"] * 6
  np.testing.assert_array_equal(kinds, expected)
  assert set(features.parse_kinds("standardize", features.NODE_GROUPS)) == {"standardize"}


def test_every_column_is_in_one_group():
  columns = [column for group in features.NODE_GROUPS.values() for column in group]
  assert sorted(columns) == list(range(NODE_FEATURES))


@pytest.mark.parametrize("text, problem", [
    ("log", "field of \\* is 'log', expected one of none, varying, minmax"),
    ("shape=minmax", "leaves out type; add \\*=KIND"),
    ("colour=minmax,*=none", "names group 'colour', expected one of type, shape"),
    ("*=none,shape=", "field of shape is ''"),
    ("minmax,standardize", "field"),
    ("", "field of \\* is ''"),
])
def test_a_bad_specification_names_its_mistake(text, problem):
  with pytest.raises(ValueError, match=problem):
    features.parse_kinds(text, features.NODE_GROUPS, field="field")


def graph_with(feat):
  graph = random_graphs.tile_graph(np.random.default_rng(5), nodes=len(feat), edges=3, configs=2)
  return dataclasses.replace(graph, node_feat=feat)


def test_padding_marks_layout_positions_beyond_the_rank():
  feat = np.zeros((4, NODE_FEATURES), np.float32)
  for node, shape in enumerate([(), (5,), (2, 3, 4), (1, 1, 1, 1, 1, 9)]):
    feat[node, 21 : 21 + len(shape)] = shape
    feat[node, 134 : 134 + len(shape)] = np.arange(len(shape))[::-1]
  graph = graph_with(feat)
  found = features.node_features(graph, pad_value=-1)
  expected = [[-1] * 6, [0] + [-1] * 5, [2, 1, 0, -1, -1, -1], [5, 4, 3, 2, 1, 0]]
  np.testing.assert_array_equal(found[:, 134:], expected)
  np.testing.assert_array_equal(found[:, :134], feat[:, :134])
  np.testing.assert_array_equal(features.node_features(graph, pad_value=0), feat)
  assert not (graph.node_feat == -1).any()


def test_padded_layouts_of_released_files_are_permutations():
  path = recorded.NPZ / "layout/xla/default/valid/unet3d.npz"
  if not path.exists():
    pytest.skip("the released sample is not there")
  graph = npz.read_layout(path, with_configs=False)
  feat = features.node_features(graph, pad_value=-1)
  rank = (graph.node_feat[:, 21:27] > 0).sum(axis=1)
  assert set(rank) >= {0, 1, 4, 5}
  for row, dimensions in zip(feat[:, 134:], rank):
    assert (row[dimensions:] == -1).all()
    # Tuples and other shapes without a layout have zeros.
    assert sorted(row[:dimensions]) == list(range(dimensions)) or not row[:dimensions].any()
