"""How tiles cut arrays, against counting tiles one by one, and on released kernels."""

import dataclasses
import math

import numpy as np
import parts
import pytest
import random_graphs
import recorded

from tpugraphs_jax.data import npz, tile_counts
from tpugraphs_jax.graph import NODE_FEATURES


def node(*sizes, layout=None):
  """Node features of an array, its layout minor to major."""
  feat = np.zeros(NODE_FEATURES, np.float32)
  feat[21 : 21 + len(sizes)] = sizes
  if layout is not None:
    feat[134 : 134 + len(layout)] = layout
  return feat


@pytest.mark.parametrize("array, expected", [
    (node(2, 300, 300, 64, layout=(2, 3, 1, 0)), [2, 300, 8, 3]),
    (node(4, 1024, 768, layout=(2, 1, 0)), [4, 128, 6]),
    (node(4, 1024, 768), [4, 128, 6]),  # no order of dimensions: the last one is minor
    (node(33, layout=(0,)), [1]), (node(4096, layout=(0,)), [4]), (node(), []),
    (node(7, 129, layout=(1, 0)), [1, 2]), (node(7, 129, layout=(0, 1)), [17, 1]),
])
def test_registers_of_an_array(array, expected):
  assert tile_counts.registers(array).tolist() == expected


def kernel(opcodes, arrays, edges, configs):
  """A kernel of these arrays; configurations are (kernel bounds, output bounds)."""
  graph = random_graphs.tile_graph(
      np.random.default_rng(0), nodes=len(opcodes), edges=0, configs=len(configs))
  feat = np.zeros((len(configs), 24), np.float32)
  for row, (kernel_bounds, output_bounds) in zip(feat, configs):
    row[: len(kernel_bounds)] = kernel_bounds
    row[8 : 8 + len(output_bounds)] = output_bounds
  return dataclasses.replace(
      graph, node_opcode=np.array(opcodes, np.uint8), node_feat=np.array(arrays),
      edge_index=np.array(edges, np.int32).reshape(-1, 2),
      configs=dataclasses.replace(graph.configs, config_feat=feat))


PARAMETER, CONVOLUTION, DOT, ADD = 63, 26, 34, 2
ARRAYS = [node(32, 4096), node(4096, 1000), node(32, 1000), node(32, 1000)]


@pytest.mark.parametrize("contraction", [CONVOLUTION, DOT])
def test_bounds_of_a_contraction_cut_its_output_and_its_second_operand(contraction):
  graph = kernel([PARAMETER, PARAMETER, contraction, ADD], ARRAYS,
                 [(2, 0), (2, 1), (3, 2)], [((100, 3), (3, 8)), ((512, 8), (4, 8)), ((), ())])
  assert tile_counts.tiled_arrays(graph)["kernel"].tolist() == [512, 8]
  found = tile_counts.tile_counts(graph)
  assert found.shape == (3, tile_counts.FEATURES) and found.dtype == np.float32

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
  found = tile_counts.tiled_arrays(graph)
  assert found["output"].tolist() == [64, 12, 2, 2] and not len(found["kernel"])
  assert tile_counts.tile_counts(graph)[0, 1] == pytest.approx(math.log(2))


def test_a_contraction_with_one_operand_and_an_empty_kernel_have_no_kernel_array():
  graph = kernel([PARAMETER, DOT], [node(8, 128), node(8, 256)], [(1, 0)], [((1,), (1, 1))])
  assert not len(tile_counts.tiled_arrays(graph)["kernel"])
  nothing = kernel([ADD], [node()], [], [((), (1, 1))])
  np.testing.assert_array_equal(tile_counts.tile_counts(nothing), 0)


@recorded.needs_npz
def test_the_largest_bounds_of_released_contractions_are_the_registers():
  """The arrays are the right ones: some tile is the whole array, and none is longer."""
  checked = 0
  for path in sorted((recorded.NPZ / "tile" / "xla").rglob("*.npz")):
    graph = npz.read_tile(path)
    arrays, feat = tile_counts.tiled_arrays(graph), graph.configs.config_feat
    if not len(arrays["kernel"]) or not feat.any():
      continue
    for name, first in (("output", 8), ("kernel", 0)):
      largest = feat[:, first : first + len(arrays[name])].max(axis=0)
      assert largest.tolist() == arrays[name].tolist(), (path.name, name)
    checked += 1
  assert checked >= 3


def test_a_ranker_gets_the_counts_where_its_config_says_so():
  graph = kernel([PARAMETER, PARAMETER, DOT], ARRAYS[:3], [(2, 0), (2, 1)], 5 * [((1, 2), (3, 4))])
  plain, more = (parts.make("tile", variant) for variant in ("ci", "recommended,ci"))
  for job, columns in ((plain, 24), (more, 24 + tile_counts.FEATURES)):
    assert job.data.config_values(graph).shape == (5, columns)
    job.fit([graph])
    prepared = job.ranker.prepare(graph)
    assert prepared.configs.config_feat.shape == (5, columns)
    np.testing.assert_array_equal(prepared.configs.config_feat[:, :24], graph.configs.config_feat)


def test_other_blocks_are_refused():
  with pytest.raises(ValueError, match="data.config_features is .*'sizes'.*expected one of"):
    parts.make("tile", "ci", **{"data.config_features": ("released", "sizes")})
