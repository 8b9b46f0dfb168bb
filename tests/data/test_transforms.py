"""Statistics are exact, fitted once, and come back from a file bit for bit."""

import dataclasses

import numpy as np
import pytest

from tests.support import comparing, parts, random_graphs
from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.data import transforms
from tpugraphs_jax.data.features import BLOCKS
from tpugraphs_jax.data.transforms import FeatureOptions, NodeFeatures

COLUMNS = 6
# Kinds of published systems are in their own tests.
KINDS = ("none", "varying", "minmax", "standardize", "signed_log1p", "signed_log", "left_out")


def arrays_of(rng):
  """Parts of uneven length, one empty; columns are of very different size, column 2 is constant."""
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
    if kind in ("signed_log1p", "signed_log"):
      seen = np.sign(seen) * np.log(1 + np.abs(seen))
      values = np.sign(values) * np.log(1 + np.abs(values))
    if kind == "left_out" or kind != "none" and len(set(seen)) == 1:
      continue
    offset, spread = 0.0, 1.0
    if kind == "minmax":
      offset, spread = seen.min(), seen.max() - seen.min()
    elif kind not in ("none", "varying", "signed_log"):
      offset, spread = seen.mean(), seen.std()
    columns.append((values - offset) / spread)
    steps.append(np.finfo(np.float32).eps * np.abs([*seen, *values]).max() / spread)
  return np.array(columns).reshape(len(columns), len(x)).T, np.array(steps)


def test_shifted_logarithms_stay_as_they_are_and_drop_constants():
  arrays = [np.array([[0, -2.5, 7, 4], [1e6, 3, 7, 4]], np.float32), np.zeros((0, 4), np.float32)]
  kinds = np.array(["log_offset(1)", "log_offset(3)", "log_offset(1)", "none"], object)
  transform = transforms.fit(arrays, kinds)
  found = transform(arrays[0])
  np.testing.assert_allclose(
    found, [[np.log(1), np.log(0.5), 4], [np.log(1e6 + 1), np.log(6), 4]], rtol=1e-6
  )
  np.testing.assert_array_equal(transform.kept, [0, 1, 3])
  again = transforms.Transform.from_dict(transform.to_dict())
  np.testing.assert_array_equal(again(arrays[0]), found)


def test_a_shift_that_is_too_small_is_refused_in_training_and_later():
  kinds = np.array(["none", "log_offset(3)"], object)
  with pytest.raises(ValueError, match="column"):
    transforms.fit([np.array([[0, -3], [0, 5]], np.float32)], kinds)
  transform = transforms.fit([np.array([[0, -2], [0, 5]], np.float32)], kinds)
  with pytest.raises(ValueError, match="column"):
    transform(np.array([[0, -9]], np.float32))


@pytest.mark.parametrize(
  "kinds",
  [
    *([kind] * COLUMNS for kind in KINDS),
    ["minmax", "standardize", "minmax", "signed_log1p", "none", "standardize"],
    ["signed_log", "left_out", "left_out", "signed_log1p", "none", "minmax"],
  ],
)
def test_transforms_equal_slow_statistics(kinds):
  rng = np.random.default_rng(0)
  arrays, kinds = arrays_of(rng), np.array(kinds, object)
  transform = transforms.fit(arrays, kinds)
  unseen = 2 * rng.normal(size=(9, COLUMNS)).astype(np.float32)
  for x in (*arrays, unseen):
    found = transform(x)
    expected, step = slow_transform(x, arrays, kinds)
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert (np.abs(found - expected) <= 3 * step + 1e-6 * np.abs(expected)).all()


def test_a_small_spread_far_from_zero_is_not_lost():
  rng = np.random.default_rng(2)
  x = (2.0**31 + 256 * rng.integers(0, 9, (500, 1))).astype(np.float32)
  transform = transforms.fit(np.array_split(x, 7), np.array(["standardize"], object))
  np.testing.assert_allclose(transform.scale, np.std(x.astype(np.float64)), rtol=1e-6)


def test_fitting_without_features_is_refused():
  for arrays in ([], [np.zeros((0, 3), np.float32)]):
    with pytest.raises(ValueError):
      transforms.fit(arrays, np.full(3, "minmax", object))


def test_saving_and_loading_is_exact(tmp_path):
  rng = np.random.default_rng(4)
  kinds = np.array(["minmax", "standardize", "none", "signed_log1p", "minmax", "none"], object)
  logs = np.array(["log_offset(7)", "none"], object)
  saved = {
    "node": transforms.fit(arrays_of(rng), kinds),
    "node/logs": transforms.fit([rng.normal(size=(4, 2))], logs),
    "config": transforms.fit([rng.normal(size=(4, 2))], np.full(2, "none", object)),
  }
  transforms.save(tmp_path / "features.json", saved)
  loaded = transforms.load(tmp_path / "features.json")
  assert loaded.keys() == saved.keys()
  for name, transform in saved.items():
    comparing.assert_same_fields(loaded[name], transform)
  assert [path.name for path in tmp_path.iterdir()] == ["features.json"]


def test_a_missing_or_damaged_file_says_so(tmp_path):
  with pytest.raises(FileNotFoundError, match="--workdir"):
    transforms.load(tmp_path / "features.json")
  for text in ('{"node": {"kept": [0], "log"', '{"node": {"kept": [0]}}', "[1]", '{"node": 3}'):
    (tmp_path / "features.json").write_text(text)
    with pytest.raises(ValueError, match="damaged"):
      transforms.load(tmp_path / "features.json")


def test_kinds_go_by_group_and_the_star_takes_the_rest():
  kinds = transforms.parse_kinds(
    "window=none, *=minmax,layout=signed_log1p", transforms.NODE_GROUPS
  )
  others = dict.fromkeys(transforms.NODE_GROUPS, "minmax")
  assert kinds == others | {"window": "none", "layout": "signed_log1p"}
  assert set(transforms.parse_kinds("standardize", ["a", "b"]).values()) == {"standardize"}


def test_every_column_is_in_one_group():
  columns = [column for group in transforms.NODE_GROUPS.values() for column in group]
  assert sorted(columns) == list(range(NODE_FEATURES))


@pytest.mark.parametrize(
  "text, problem",
  [
    ("log", "'log'"),
    ("shape=minmax", "leaves out type"),
    ("colour=minmax,*=none", "'colour'"),
    ("*=none,shape=", "of shape"),
    *(
      (f"shape={kind},*=none", "log_offset")
      for kind in (
        "log_offset",
        "log_offset()",
        "log_offset(0)",
        "log_offset(-1)",
        "log_offset(1.2.3)",
      )
    ),
    ("minmax,standardize", "transform"),
    ("", "transform"),
  ],
)
def test_a_bad_specification_names_its_mistake(text, problem):
  with pytest.raises(ValueError, match=problem):
    transforms.parse_kinds(text, transforms.NODE_GROUPS)


def graph_of(seed=0, nodes=12, edges=20):
  rng = np.random.default_rng(seed)
  graph = random_graphs.layout_graph(rng, nodes=nodes, edges=edges, config_nodes=[3, 7], configs=4)
  feat = rng.integers(0, 9, (nodes, NODE_FEATURES)).astype(np.float32)
  return dataclasses.replace(graph, node_feat=feat)


def made_of(names, kinds="none"):
  return NodeFeatures(FeatureOptions(features=names, feature_transform=kinds))


def test_blocks_stand_side_by_side_each_scaled_in_its_own_way():
  BLOCKS.register("test_twice")(lambda graph: 2 * graph.node_opcode[:, None])
  BLOCKS.register("test_rows")(lambda graph: np.arange(graph.num_nodes)[:, None] + [[0.0, 5.0]])
  graph = graph_of()
  made = made_of(
    ["test_twice", "released", "test_rows"], "test_twice=none,test_rows=minmax,*=standardize"
  )
  made.fit([graph])
  found = made(graph)
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found[:, 0], 2.0 * graph.node_opcode)
  np.testing.assert_allclose(found[:, -2], np.arange(12) / 11, rtol=1e-6)
  np.testing.assert_allclose(found[:, -2], found[:, -1], rtol=1e-6)
  np.testing.assert_allclose(found[:, 1:-2].mean(axis=0), 0, atol=1e-6)


@pytest.mark.parametrize(
  "values",
  [np.zeros(12), np.zeros((3, 2)), np.full((12, 1), "a"), np.full((12, 1), np.nan)],
  ids=["vector", "rows", "text", "nan"],
)
def test_a_block_of_the_wrong_shape_is_refused(values):
  BLOCKS.register("test_wrong")(lambda graph: values)
  with pytest.raises(ValueError, match="test_wrong"):
    made_of(["test_wrong"]).fit([graph_of()])


def test_a_block_must_always_give_as_many_columns():
  BLOCKS.register("test_growing")(lambda graph: np.ones((graph.num_nodes, graph.num_nodes)))
  made = made_of(["test_growing"])
  with pytest.raises(ValueError, match="columns"):
    made.fit([graph_of(), graph_of(1, nodes=9, edges=5)])
  made.fit([graph_of()])
  with pytest.raises(ValueError, match="trained"):
    made(graph_of(1, nodes=9, edges=5))


@pytest.mark.parametrize(
  "names, kinds, complaint",
  [
    ([], "none", "data.features"),
    (["released", "released"], "none", "different"),
    (["nope"], "none", "'nope'"),
    (["released"], "random_walk=none,*=none", "'random_walk'"),
    (["released", "random_walk"], "random_walk=none", "leaves out type"),
  ],
)
def test_impossible_blocks_are_refused(names, kinds, complaint):
  with pytest.raises(ValueError, match=complaint):
    made_of(names, kinds)


def test_transforms_are_saved_with_the_names_of_their_blocks():
  made = made_of(["released", "random_walk"], "standardize")
  made.fit([graph_of()])
  config = transforms.fit([np.eye(3)], np.full(3, "none", object))
  saved = transforms.to_saved(made.transforms, config)
  nodes, again = transforms.from_saved(saved, "here")
  assert nodes == made.transforms and again is config
  for damaged in ({"config": config}, {k: v for k, v in saved.items() if k != "config"}):
    with pytest.raises(ValueError, match="damaged"):
      transforms.from_saved(damaged, "here")


def test_blocks_look_at_the_whole_graph_before_it_is_reduced():
  BLOCKS.register("test_size")(lambda graph: np.full((graph.num_nodes, 1), graph.num_nodes))
  graph = graph_of(nodes=30, edges=30)
  fields = {"data.features": ("test_size",), "data.feature_transform": "none"}
  fields |= {"data.graph_reduction": "config_neighborhood", "data.reduction_hops": 1}
  experiment = parts.make("layout", **fields)
  experiment.fit_transforms([graph])
  prepared = experiment.ranker.prepare(graph)
  assert len(prepared.opcode) < 30
  np.testing.assert_array_equal(prepared.feat, np.full((len(prepared.opcode), 1), 30))
