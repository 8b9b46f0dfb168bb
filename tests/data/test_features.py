"""Feature blocks against loops, dense matrix powers and the columns from protobufs."""

import dataclasses
import math

import numpy as np
import pytest

from tests.support import parts, random_graphs, recorded, table_cases
from tests.support.random_graphs import made_of, NUMBERS, whole_numbers
from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.data import features, npz
from tpugraphs_jax.rankers.systems import third


@pytest.mark.parametrize("kernel_first", [True, False])
def test_left_and_right_operands_are_told_apart_by_their_shapes(kernel_first):
  """Edges are sorted by node and do not tell the order of operands."""
  kernel, image = ("parameter", "f32", (3, 3, 4, 8), {}), ("parameter", "f32", (2, 5, 5, 4), {})
  tall, wide = ("parameter", "f32", (7, 3), {}), ("parameter", "f32", (3, 5), {})
  graph = made_of(
    [
      *((kernel, image, wide, tall) if kernel_first else (image, kernel, tall, wide)),
      ("convolution", "f32", (2, 5, 5, 8), NUMBERS),
      ("dot", "f32", (7, 5), {}),
      ("dot", "f32", (4, 4), {}),
      ("add", "f32", (7, 5), {}),
    ],
    [[4, 0], [4, 1], [5, 2], [5, 3], [6, 5], [7, 5]],
  )
  nodes, operands = features.contraction_operands(graph)
  swapped = [[1, 0], [3, 2]] if kernel_first else [[0, 1], [2, 3]]
  assert nodes.tolist() == [4, 5, 6] and operands.tolist() == [*swapped, [5, -1]]
  shapes = third.operand_shapes(graph)
  np.testing.assert_array_equal(shapes[4], [2, 5, 5, 4, 0, 0, 16, 200, 3, 3, 4, 8, 0, 0, 18, 288])
  np.testing.assert_array_equal(shapes[7], [-2] * 16)


def test_padding_marks_layout_positions_beyond_the_rank():
  feat = np.zeros((4, NODE_FEATURES), np.float32)
  for node, shape in enumerate([(), (5,), (2, 3, 4), (1, 1, 1, 1, 1, 9)]):
    feat[node, 21 : 21 + len(shape)] = shape
    feat[node, 134 : 134 + len(shape)] = np.arange(len(shape))[::-1]
  graph = dataclasses.replace(whole_numbers(0, nodes=4, edges=3), node_feat=feat)
  found = features.released(graph, pad_value=-1)
  expected = [[-1] * 6, [0] + [-1] * 5, [2, 1, 0, -1, -1, -1], [5, 4, 3, 2, 1, 0]]
  np.testing.assert_array_equal(found[:, 134:], expected)
  np.testing.assert_array_equal(found[:, :134], feat[:, :134])
  np.testing.assert_array_equal(features.released(graph), feat)
  assert not (graph.node_feat == -1).any()


def slow_padding(size, tile):
  if size < 1:
    return 0.0
  padded = size
  while padded % tile:
    padded += 1
  return np.log(padded / size)


def test_node_padding_has_every_dimension_in_both_places():
  graph = table_cases.program(0)
  dims = graph.node_feat[:, 21:27]
  expected = [[slow_padding(int(d), tile) for tile in (128, 8) for d in row] for row in dims]
  np.testing.assert_allclose(features.node_padding(graph.node_feat), expected, rtol=1e-5)


def test_choice_features_hold_the_padding_of_output_input_and_kernel():
  graph = table_cases.program(3, config_nodes=[5, 9, 20])
  rows = np.full((2, 18), -1, np.int8)
  rows[0, :2], rows[0, 6:8], rows[0, 12] = (1, 0), (0, 2), 2
  graph = random_graphs.with_configs(graph, rows=rows)
  dims = graph.node_feat[:, 21:27].astype(int)
  found = features.choice_features(graph, np.array([0, 1, 2, 2]), np.array([0, 0, 0, 1]))
  assert found.dtype == np.float32 and found.shape == (4, 9)
  for feat, node, row in zip(found, (5, 9, 20, 20), (0, 0, 0, 1)):
    operands = [v for u, v in graph.edge_index.tolist() if u == node][:2]
    tensors = [node, *operands, *[None] * (2 - len(operands))]
    for role, tensor in enumerate(tensors):
      minor, second = rows[row, 6 * role : 6 * role + 2]
      size = lambda axis: dims[tensor, axis] if tensor is not None and axis >= 0 else 0
      np.testing.assert_allclose(
        feat[[role, 3 + role, 6 + role]],
        [slow_padding(size(minor), 128), slow_padding(size(second), 8), minor < 0],
        rtol=1e-5,
      )


def test_without_choices_or_edges_there_are_no_features_or_operands():
  graph = dataclasses.replace(table_cases.program(0), edge_index=np.zeros((0, 2), np.int32))
  none = np.zeros(0, np.int64)
  assert features.choice_features(graph, none, none).shape == (0, 9)
  assert (features.operand_table(graph, graph.config_node) == -1).all()


def node(*sizes, layout=None):
  """Node features of an array, its layout minor to major."""
  feat = np.zeros(NODE_FEATURES, np.float32)
  feat[21 : 21 + len(sizes)] = sizes
  if layout is not None:
    feat[134 : 134 + len(layout)] = layout
  return feat


@pytest.mark.parametrize(
  "array, expected",
  [
    (node(2, 300, 300, 64, layout=(2, 3, 1, 0)), [2, 300, 8, 3]),
    (node(4, 1024, 768, layout=(2, 1, 0)), [4, 128, 6]),
    (node(4, 1024, 768), [4, 128, 6]),  # no order of dimensions: the last one is minor
    (node(33, layout=(0,)), [1]),
    (node(4096, layout=(0,)), [4]),
    (node(), []),
    (node(7, 129, layout=(1, 0)), [1, 2]),
    (node(7, 129, layout=(0, 1)), [17, 1]),
  ],
)
def test_registers_of_an_array(array, expected):
  assert features.registers(array).tolist() == expected


def kernel(opcodes, arrays, edges, configs):
  """A kernel of these arrays; configurations are (kernel bounds, output bounds)."""
  graph = random_graphs.tile_graph(
    np.random.default_rng(0), nodes=len(opcodes), edges=0, configs=len(configs)
  )
  feat = np.zeros((len(configs), 24), np.float32)
  for row, (kernel_bounds, output_bounds) in zip(feat, configs):
    row[: len(kernel_bounds)] = kernel_bounds
    row[8 : 8 + len(output_bounds)] = output_bounds
  return dataclasses.replace(
    random_graphs.with_configs(graph, config_feat=feat),
    node_opcode=np.array(opcodes, np.uint8),
    node_feat=np.array(arrays),
    edge_index=np.array(edges, np.int32).reshape(-1, 2),
  )


PARAMETER, CONVOLUTION, DOT, ADD = 63, 26, 34, 2
ARRAYS = [node(32, 4096), node(4096, 1000), node(32, 1000), node(32, 1000)]


@pytest.mark.parametrize("contraction", [CONVOLUTION, DOT])
def test_bounds_of_a_contraction_cut_its_output_and_its_second_operand(contraction):
  graph = kernel(
    [PARAMETER, PARAMETER, contraction, ADD],
    ARRAYS,
    [(2, 0), (2, 1), (3, 2)],
    [((100, 3), (3, 8)), ((512, 8), (4, 8)), ((), ())],
  )
  assert features.tiled_arrays(graph)["kernel"].tolist() == [512, 8]
  found = features.tile_counts(graph)
  assert found.shape == (3, 28) and found.dtype == np.float32

  def slow(counts, bounds):
    """Tiles and overhang of each dimension, minor first, by walking along the array."""
    tiles, overhang = [], []
    for count, bound in list(zip(counts, bounds))[::-1]:
      starts = range(0, count, bound)
      tiles.append(math.log(len(starts)))
      overhang.append(math.log((starts[-1] + bound) / count))
    pad = [0.0] * (6 - len(counts))
    return [*tiles, *pad, sum(tiles), *overhang, *pad, sum(overhang)]

  np.testing.assert_allclose(found[0], slow([4, 8], [3, 8]) + slow([512, 8], [100, 3]), atol=1e-6)
  np.testing.assert_array_equal(found[1:], 0)  # one tile that fits, and no bounds


def test_without_a_contraction_the_largest_array_is_cut():
  arrays = [node(64, 12, 12, 256), node(256), node(64, 2)]
  graph = kernel([PARAMETER, ADD, ADD], arrays, [(1, 0)], [((), (64, 12, 1, 2))])
  found = features.tiled_arrays(graph)
  assert found["output"].tolist() == [64, 12, 2, 2] and not len(found["kernel"])
  assert features.tile_counts(graph)[0, 1] == pytest.approx(math.log(2))


def test_a_contraction_with_one_operand_and_an_empty_kernel_have_no_kernel_array():
  graph = kernel([PARAMETER, DOT], [node(8, 128), node(8, 256)], [(1, 0)], [((1,), (1, 1))])
  assert not len(features.tiled_arrays(graph)["kernel"])
  nothing = kernel([ADD], [node()], [], [((), (1, 1))])
  np.testing.assert_array_equal(features.tile_counts(nothing), 0)
  no_nodes = dataclasses.replace(
    nothing, node_feat=nothing.node_feat[:0], node_opcode=nothing.node_opcode[:0]
  )
  assert features.tile_counts(no_nodes).shape == (1, 28)
  np.testing.assert_array_equal(features.tile_counts(no_nodes), 0)


@recorded.needs_npz
def test_the_largest_bounds_of_released_contractions_are_the_registers():
  """So the arrays are the right ones: some tile is the whole array, and none is longer."""
  checked = 0
  for path in sorted((recorded.NPZ / "tile" / "xla").rglob("*.npz")):
    graph = npz.read_tile(path)
    arrays, feat = features.tiled_arrays(graph), graph.configs.config_feat
    if not len(arrays["kernel"]) or not feat.any():
      continue
    for name, first in (("output", 8), ("kernel", 0)):
      largest = feat[:, first : first + len(arrays[name])].max(axis=0)
      assert largest.tolist() == arrays[name].tolist(), (path.name, name)
    checked += 1
  assert checked >= 3


def test_a_ranker_gets_the_counts_where_its_config_says_so():
  graph = kernel([PARAMETER, PARAMETER, DOT], ARRAYS[:3], [(2, 0), (2, 1)], 5 * [((1, 2), (3, 4))])
  # A transform refuses tiles that do not vary.
  graph.configs.config_feat[:, 0] = np.arange(5)
  plain, more = (parts.make("tile", variant) for variant in ("ci", "recommended,ci"))
  for experiment, columns in ((plain, 24), (more, 24 + 28)):
    assert experiment.data.config_values(graph).shape == (5, columns)
    experiment.fit_transforms([graph])
    prepared = experiment.ranker.prepare(graph)
    assert prepared.configs.config_feat.shape == (5, columns)
    np.testing.assert_array_equal(prepared.configs.config_feat[:, :24], graph.configs.config_feat)
