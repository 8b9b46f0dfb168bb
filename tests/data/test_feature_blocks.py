"""Feature blocks against loops, dense matrix powers and the columns from protobufs."""

import dataclasses
import math
from pathlib import Path
import shutil

import numpy as np
import parts
import pytest
import random_graphs
import recorded

from tpugraphs_jax import columns, hlo
from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.data import feature_blocks, npz
from tpugraphs_jax.data.feature_blocks import Options
from tpugraphs_jax.data.features import NodeFeatures
from tpugraphs_jax.hlo import tuning

SAMPLE = Path(__file__).parent / "hlo/control_flow.hlo.pb"
TUNING = Path(__file__).parent / "hlo/synth_layout_tuning.pb"
_COUNTED = [*range(21, 27), *range(31, 37), *range(37, 43), *range(53, 59), *range(61, 67)]


def graph_of(seed, nodes=20, edges=30):
  """A program with whole numbers as features, and some convolutions and products."""
  rng = np.random.default_rng(seed)
  graph = random_graphs.layout_graph(
      rng, nodes=nodes, edges=edges, config_nodes=[0], configs=2)
  feat = rng.integers(-3, 400, (nodes, NODE_FEATURES)).astype(np.float32)
  opcode = rng.choice([26, 34, 7, 1], nodes).astype(np.uint8)
  return dataclasses.replace(graph, node_feat=feat, node_opcode=opcode)


def slow_shapes(graph):
  rows = []
  for node in range(graph.num_nodes):
    if graph.node_opcode[node] not in (26, 34):
      rows.append([-2.0] * 16)
      continue
    operands = [v for u, v in graph.edge_index.tolist() if u == node][:2]
    row = [value for v in operands for value in graph.node_feat[v, 21:29].tolist()]
    rows.append(row + [-1.0] * (16 - len(row)))
  return np.array(rows, np.float32)


@pytest.mark.parametrize("nodes, edges", [(20, 30), (1, 0), (5, 0)])
def test_operand_shapes_equal_loops(nodes, edges):
  for seed in range(3):
    graph = graph_of(seed, nodes=nodes, edges=edges)
    found = feature_blocks.operand_shapes(graph)
    np.testing.assert_array_equal(found, slow_shapes(graph))
    assert found.dtype == np.float32


def test_tile_modulo_equals_the_formula_of_every_column():
  graph = graph_of(3)
  found = feature_blocks.tile_modulo(graph)
  assert found.shape == (20, 60)
  for node in range(20):
    for k, column in enumerate(_COUNTED):
      x = float(graph.node_feat[node, column])
      assert abs(found[node, k] - ((x + 127) % 128) / 128) < 1e-6
      assert abs(found[node, 30 + k] - math.floor(x / 128) / 10) < 1e-6
  full = dataclasses.replace(graph, node_feat=np.full_like(graph.node_feat, 128))
  np.testing.assert_allclose(
      feature_blocks.tile_modulo(full), [[127 / 128] * 30 + [0.1] * 30] * 20, rtol=1e-6)


def test_walks_on_a_chain_of_three_nodes_by_hand():
  """a feeds b feeds c feeds the output: who walks forward never comes back."""
  graph = graph_of(0, nodes=3, edges=0)
  feat = np.zeros_like(graph.node_feat)
  feat[2, 0] = 1  # the root
  edges = np.array([[1, 0], [2, 1]], np.int32)  # consumer, producer
  graph = dataclasses.replace(graph, node_feat=feat, edge_index=edges)
  found = feature_blocks.directed_walk(graph)
  np.testing.assert_allclose(found[:, 0], [1 / 2] * 3)  # stay, or go on
  # Two steps: nobody else comes to a; to b from a by 1/2 * 1/2 + 1/2 * 1/2; to c from b
  # likewise and from a by 1/4.
  np.testing.assert_allclose(found[:, 1], [0, 1 / 2, 3 / 4])
  both = feature_blocks.return_probabilities(graph)
  # Undirected, two steps from a and back: 1/2 * 1/2 by staying, 1/2 * 1/3 by way of b.
  np.testing.assert_allclose(both[0, 0], 1 / 4 + 1 / 6, rtol=1e-6)
  np.testing.assert_array_equal(both[:, 112:], found)


def slow_walks(graph):
  """The definition, with dense matrix powers in float64."""
  nodes = graph.num_nodes + 1  # the output is one more
  directed = np.eye(nodes)
  directed[graph.edge_index[:, 1], graph.edge_index[:, 0]] = 1
  directed[np.flatnonzero(graph.node_feat[:, 0] > 0), -1] = 1
  undirected = np.minimum(directed + directed.T, 1)
  columns = []
  walk = undirected / undirected.sum(axis=1, keepdims=True)
  power = walk
  for _ in range(112):
    power = power @ walk
    columns.append(np.diag(power))
  walk = directed / directed.sum(axis=1, keepdims=True)
  power = walk
  columns.append(np.diag(walk))
  for _ in range(15):
    power = power @ walk
    columns.append(power.sum(axis=0) - np.diag(power))
  return np.stack(columns, axis=1)[:-1]


@pytest.mark.parametrize("nodes, edges", [(1, 0), (5, 0), (12, 20), (40, 300), (300, 500)])
def test_random_walks_are_those_of_the_definition(nodes, edges):
  graph = graph_of(nodes, nodes=nodes, edges=edges)
  found = feature_blocks.return_probabilities(graph)
  assert found.shape == (nodes, 128) and found.dtype == np.float32
  np.testing.assert_allclose(found, slow_walks(graph), rtol=2e-4, atol=2e-6)


def test_edges_that_occur_twice_count_once_in_walks():
  graph = graph_of(0)
  twice = dataclasses.replace(graph, edge_index=np.concatenate([graph.edge_index] * 2))
  np.testing.assert_array_equal(
      feature_blocks.return_probabilities(twice), feature_blocks.return_probabilities(graph))


def test_lists_of_dimensions_are_marked_behind_their_ends():
  """A module by hand: dimension numbers of 0 count where the list has them."""
  ids = columns.opcode_ids()
  names = ["parameter", "convolution", "broadcast", "transpose", "reduce", "concatenate", "add"]
  feat = np.zeros((len(names), 140), np.float32)
  shape, dimensions = columns.NODE["shape"].start, columns.NODE["dimensions"].start
  for node, dims in enumerate([(4, 8), (4, 8), (2, 4, 8), (8, 4), (8,), (4, 8), (4, 8)]):
    feat[node, shape : shape + len(dims)] = dims
    feat[node, 134 : 134 + len(dims)] = np.arange(len(dims))[::-1]
  feat[1, 91:93] = 1, 1  # a window of two dimensions, one of them reversed
  feat[1, 95:97] = 1, 2
  feat[2, dimensions : dimensions + 2] = 1, 2
  feat[3, dimensions : dimensions + 2] = 1, 0
  graph = dataclasses.replace(
      graph_of(0, nodes=len(names), edges=0), node_feat=feat,
      node_opcode=np.array([ids[name] for name in names], np.uint8),
      edge_index=np.array([[1, 0], [2, 1], [3, 1], [4, 3], [5, 1], [6, 1]], np.int32))
  found = feature_blocks.padded(graph)
  lists = {name: found[:, columns.NODE[name]].tolist() for name in (
      "dimensions", "input_spatial_dimensions", "kernel_spatial_dimensions")}
  assert lists["dimensions"] == [
      [-1] * 6, [-1] * 6, [1, 2] + [-1] * 4, [1, 0] + [-1] * 4, [0] + [-1] * 5, [0] + [-1] * 5,
      [-1] * 6]
  nothing = [-1] * 4
  assert lists["input_spatial_dimensions"] == [nothing, [1, 2, -1, -1], *[nothing] * 5]
  assert lists["kernel_spatial_dimensions"] == [nothing, [0, 0, -1, -1], *[nothing] * 5]
  others = np.setdiff1d(np.arange(140), np.r_[31:37, 95:99, 101:105, 134:140])
  np.testing.assert_array_equal(found[:, others], feat[:, others])
  padded_layouts = feature_blocks.released(graph, feature_blocks.Options(pad_value=-1))
  np.testing.assert_array_equal(found[:, 134:], padded_layouts[:, 134:])


def test_padding_marks_layout_positions_beyond_the_rank():
  feat = np.zeros((4, NODE_FEATURES), np.float32)
  for node, shape in enumerate([(), (5,), (2, 3, 4), (1, 1, 1, 1, 1, 9)]):
    feat[node, 21 : 21 + len(shape)] = shape
    feat[node, 134 : 134 + len(shape)] = np.arange(len(shape))[::-1]
  graph = dataclasses.replace(graph_of(0, nodes=4, edges=3), node_feat=feat)
  found = feature_blocks.released(graph, Options(pad_value=-1))
  expected = [[-1] * 6, [0] + [-1] * 5, [2, 1, 0, -1, -1, -1], [5, 4, 3, 2, 1, 0]]
  np.testing.assert_array_equal(found[:, 134:], expected)
  np.testing.assert_array_equal(found[:, :134], feat[:, :134])
  np.testing.assert_array_equal(feature_blocks.released(graph), feat)
  assert not (graph.node_feat == -1).any()


@recorded.needs_npz
def test_padded_layouts_of_released_files_are_permutations():
  graph = npz.read_layout(
      recorded.NPZ / "layout/xla/default/valid/unet3d.npz", with_configs=False)
  feat = feature_blocks.released(graph, Options(pad_value=-1))
  rank = (graph.node_feat[:, 21:27] > 0).sum(axis=1)
  assert set(rank) >= {0, 1, 4, 5}
  for row, dimensions in zip(feat[:, 134:], rank):
    assert (row[dimensions:] == -1).all()
    # Tuples and other shapes without a layout have zeros.
    assert sorted(row[:dimensions]) == list(range(dimensions)) or not row[:dimensions].any()


def featurized():
  graph = hlo.featurize(SAMPLE)
  return graph, hlo.extra_features(graph)


def test_extra_columns_follow_the_released_ones():
  graph, extra = featurized()
  joined = feature_blocks.append_extra(graph, extra.values)
  np.testing.assert_array_equal(joined.node_feat[:, :140], graph.node_feat)
  np.testing.assert_array_equal(joined.node_feat[:, 140:], extra.values)


def test_extra_values_of_another_graph_are_refused():
  graph, extra = featurized()
  with pytest.raises(ValueError, match="rows"):
    feature_blocks.append_extra(graph, extra.values[1:])


def test_the_files_of_convert_are_read_by_graph_name(tmp_path):
  tuning.convert([TUNING], tmp_path / "npz", extra_out=tmp_path / "extra", jobs=1)
  (written,) = (tmp_path / "extra").glob("*.npz")
  with np.load(written) as file:
    expected = file["node_extra"]
  graph = npz.read_layout(tmp_path / "npz" / written.name, with_configs=False)
  options = Options(extra_dir=str(tmp_path / "extra"))
  np.testing.assert_array_equal(feature_blocks.extra(graph, options), expected)
  shutil.rmtree(tmp_path / "extra")
  with pytest.raises(FileNotFoundError, match="extra_dir"):
    feature_blocks.extra(graph, options)


def test_a_transform_may_treat_the_extra_columns_apart():
  graph, extra = featurized()
  joined = feature_blocks.append_extra(graph, extra.values)
  made = NodeFeatures(("released", "extra"), kinds="extra=none,*=minmax")
  made.fit([joined])
  np.testing.assert_array_equal(made(joined).node_feat[:, -46:], extra.values)
  assert made(joined).node_feat[:, :-46].max() <= 1


def test_a_model_that_saw_them_refuses_graphs_without():
  job = parts.make("layout", **{"data.features": ("released", "extra")})
  graph, extra = featurized()
  with pytest.raises(ValueError, match="140"):
    job.ranker.features.fit([graph])
  job.ranker.features.fit([feature_blocks.append_extra(graph, extra.values)])
  with pytest.raises(ValueError, match="140"):
    job.ranker.features(graph)
