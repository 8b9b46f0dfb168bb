"""Blocks of raw features, computed from a graph before transforms.

A block of node features maps an `OpGraph` to `[N, F]`. It reads the whole graph, also for models on
reduced graphs or segments. `data.features` lists the blocks of a model; extensions register blocks
in `BLOCKS`.

A network hardly learns to divide and round up. Two blocks of configuration features do it. A TPU
stores an array in registers of 8 x 128 elements: the minor dimension of the layout is padded to a
multiple of 128 and the next one to a multiple of 8 (XLA, "Tiled layout").

* `choice_features`: the padding of tensors under a layout choice.
* `tile_counts`: the number of tiles along each dimension of the arrays of a kernel, and the
  overhang of the last tiles. The bounds of a tile count registers of two arrays, by dimension from
  major to minor: the output and the second operand of the last convolution or dot. In a kernel
  without a convolution or dot they count registers of the largest array, which a reduction reads.
  In the released kernels at hand the largest bounds equal the registers of these arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from tpugraphs_jax.columns import MAX_RANK, NODE, NODE_FEATURES, opcode_ids, sizes, TILE
from tpugraphs_jax.config_fields import Registry
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs

LANES, SUBLANES = 128, 8
DIMENSIONS = sizes(NODE["shape"])  # of the output of a node, 0 beyond its rank
PADDINGS = 2 * MAX_RANK  # columns of `node_padding`
ROLES = 3  # a choice has an order for output, input and kernel
CONTRACTIONS = tuple(opcode_ids()[name] for name in ("convolution", "dot"))
CONFIG_FEATURES = {  # of data.config_features
  "tile": (("released",), ("released", "tile_counts")),
  "layout": (("released",), ("outputs",)),
}  # all 18 integers, or `factoring.output_orders`
_BOUNDS = {"output": sizes(TILE["output_bounds"]), "kernel": sizes(TILE["kernel_bounds"])}
_PER_ARRAY = 2 * (MAX_RANK + 1)


def padding(size: np.ndarray, tile: int) -> np.ndarray:
  """log(size rounded up to `tile` / size) of sizes `[...]`: `[...]` float32; 0 if below 1."""
  least = np.maximum(np.asarray(size, np.float64), 1)
  padded = np.log(np.ceil(least / tile) * tile / least)
  return np.where(np.asarray(size) < 1, 0, padded).astype(np.float32)


def node_padding(node_feat: np.ndarray) -> np.ndarray:
  """Padding of every dimension as minor, then as second dimension: `[N, 12]` float32."""
  dims = node_feat[:, DIMENSIONS]
  return np.concatenate([padding(dims, LANES), padding(dims, SUBLANES)], axis=1)


def operand_table(graph: OpGraph, nodes: np.ndarray) -> np.ndarray:
  """The first two operands of each of `nodes [K]` in file order, `[K, 2]`, -1 = none."""
  order = np.argsort(graph.edge_index[:, 0], kind="stable")
  consumer, producer = graph.edge_index[order].T
  first = np.searchsorted(consumer, nodes)
  count = np.searchsorted(consumer, nodes, side="right") - first
  at = np.minimum(first[:, None] + np.arange(2), max(len(consumer) - 1, 0))
  if not len(producer):
    return np.full((len(nodes), 2), -1, np.int64)
  return np.where(np.arange(2) < count[:, None], producer[at], -1)


def choice_features(graph: OpGraph[LayoutConfigs], node: np.ndarray, row: np.ndarray) -> np.ndarray:
  """Features of choices of configurable nodes.

  Args:
    graph: the program.
    node: `[U]` numbers among the configurable nodes.
    row: `[U]` dictionary rows.

  Returns:
    `[U, 9]` float32: padding of the minor dimension of output, input and kernel, padding of the
    next dimension, and 1 where the choice leaves the layout open. Operands are in the order of
    `edge_index`.
  """
  dims = graph.node_feat[:, DIMENSIONS]
  operands = operand_table(graph, graph.config_node)
  tensors = np.concatenate([graph.config_node[:, None], operands], axis=1)[node]
  layout = graph.configs.rows[row].reshape(len(row), ROLES, MAX_RANK).astype(int)
  minor, second = layout[..., 0], layout[..., 1]
  size = lambda axis: np.where(
    (axis >= 0) & (tensors >= 0), dims[np.maximum(tensors, 0), np.maximum(axis, 0)], 0
  )
  lanes, sublanes = padding(size(minor), LANES), padding(size(second), SUBLANES)
  return np.concatenate([lanes, sublanes, (minor < 0).astype(np.float32)], axis=1)


def registers(node_feat: np.ndarray) -> np.ndarray:
  """Registers along each dimension of a node's array, major to minor, `[rank]` int64.

  Args:
    node_feat: `[140]` of one node. If its layout is not an order of the dimensions, the last
      dimension is minor.
  """
  shape = node_feat[DIMENSIONS].astype(np.int64)
  rank = int((shape > 0).sum())
  minor_to_major = node_feat[NODE["minor_to_major"]].astype(np.int64)[:rank]
  if sorted(minor_to_major.tolist()) != list(range(rank)):
    minor_to_major = np.arange(rank)[::-1]
  counts = shape[minor_to_major]
  units = (LANES * SUBLANES,) if rank == 1 else (LANES, SUBLANES)[:rank]
  counts[: len(units)] = -(-counts[: len(units)] // units)
  return counts[::-1]


def tiled_arrays(graph: OpGraph) -> dict[str, np.ndarray]:
  """Registers `[rank]` of the arrays that output bounds and kernel bounds tile."""
  if not graph.num_nodes:
    return {"output": np.zeros(0, np.int64), "kernel": np.zeros(0, np.int64)}
  contractions = np.flatnonzero(np.isin(graph.node_opcode, CONTRACTIONS))
  for node in contractions[::-1]:
    operands = graph.edge_index[graph.edge_index[:, 0] == node, 1]
    if len(operands) == 2:
      output, kernel = graph.node_feat[node], graph.node_feat[operands[1]]
      return {"output": registers(output), "kernel": registers(kernel)}
  shape = graph.node_feat[:, DIMENSIONS].astype(np.float64)
  elements = np.where(shape[:, 0] > 0, np.maximum(shape, 1).prod(axis=1), 0)
  largest = graph.node_feat[elements.argmax()]
  return {"output": registers(largest), "kernel": np.zeros(0, np.int64)}


def tile_counts(graph: OpGraph[TileConfigs]) -> np.ndarray:
  """Features of every configuration of a kernel.

  Returns:
    `[C, 28]` float32, for the output and then the kernel: the logarithm of the number of tiles
    along each dimension, from minor to major, and their sum; then likewise the logarithm of
    (registers covered by tiles / registers of the array). Positions without a bound or dimension
    are 0.
  """
  arrays, feat = tiled_arrays(graph), graph.configs.config_feat
  cuts = [_cuts(arrays[name], feat[:, bounds]) for name, bounds in _BOUNDS.items()]
  return np.concatenate(cuts, axis=1)


def _cuts(counts: np.ndarray, bounds: np.ndarray) -> np.ndarray:
  """Tiles and overhang `[C, 14]` float32 of an array `[rank]` and bounds `[C, 6]`."""
  rank = len(counts)
  features = np.zeros((len(bounds), 2, MAX_RANK + 1))
  bound = bounds[:, :rank].astype(np.float64)
  tiles = np.ceil(counts / np.maximum(bound, 1))
  overhang = tiles * np.maximum(bound, 1) / np.maximum(counts, 1)
  logs = np.log(np.maximum(np.stack([tiles, overhang], 1), 1))
  features[:, :, :rank] = np.where(bound[:, None] > 0, logs, 0)[..., ::-1]
  features[:, :, MAX_RANK] = features[:, :, :MAX_RANK].sum(axis=-1)
  return features.reshape(len(bounds), _PER_ARRAY).astype(np.float32)


def with_config_features(graph: OpGraph[TileConfigs], names: Sequence[str]) -> OpGraph[TileConfigs]:
  """The kernel with these blocks of features as `config_feat`.

  Args:
    graph: with the released node features and configurations.
    names: one of `CONFIG_FEATURES["tile"]`.
  """
  if "tile_counts" not in names:
    return graph
  feat = np.concatenate([graph.configs.config_feat, tile_counts(graph)], axis=1)
  return dataclasses.replace(graph, configs=dataclasses.replace(graph.configs, config_feat=feat))


Block = Callable[[OpGraph], np.ndarray]  # raw features [N, F] of a graph of N nodes
BLOCKS = Registry("data.features")
RELEASED = "released"


@BLOCKS.register(RELEASED)
def released(graph: OpGraph, pad_value: int = 0) -> np.ndarray:
  """The 140 released columns, `[N, 140]` float32.

  Args:
    graph: with the released features.
    pad_value: for positions of a layout beyond the rank. In the released features it is 0, which is
      also a dimension; -1 marks these positions.
  """
  feat = graph.node_feat[:, :NODE_FEATURES]
  if pad_value == 0:
    return feat
  feat = feat.copy()
  feat[:, NODE["minor_to_major"]][np.arange(MAX_RANK)[None] >= _rank(feat)[:, None]] = pad_value
  return feat


def _rank(feat: np.ndarray) -> np.ndarray:
  """Rank of each node's result, `[N]`: the number of sizes before the first 0."""
  return np.cumprod(feat[:, DIMENSIONS] != 0, axis=1).sum(axis=1)


def signed_log(x: np.ndarray) -> np.ndarray:
  """sign(x) log(1 + |x|) of `x [...]`."""
  return np.sign(x) * np.log1p(np.abs(x))


def contraction_operands(graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
  """Convolutions and dots `[M]`, and their left and right operands `[M, 2]`, -1 = none.

  Released edges are sorted by node and do not give the order of operands; shapes do. The right
  operand of a convolution has the size of the window and the features of the result. A dot has the
  dimensions of the left operand, then of the right operand, without the contracted dimension.
  Where both orders fit, or none (batched dots), the order of `edge_index` stays.
  """
  shape = graph.node_feat[:, DIMENSIONS].astype(np.int64)
  nodes = np.flatnonzero(np.isin(graph.node_opcode, CONTRACTIONS))
  operands = operand_table(graph, nodes)
  for row in np.flatnonzero((operands >= 0).all(axis=1)):
    feat, (left, right) = graph.node_feat[nodes[row]], operands[row]
    is_product = graph.node_opcode[nodes[row]] == opcode_ids()["dot"]
    fits = _fits_product if is_product else _fits_window
    if fits(feat, shape[right], shape[left]) and not fits(feat, shape[left], shape[right]):
      operands[row] = right, left
  return nodes, operands


def _fits_window(feat: np.ndarray, left: np.ndarray, right: np.ndarray) -> bool:
  """Whether `right [6]` can be the kernel of a convolution with features `feat [140]`."""
  del left
  size = lambda shape, name: shape[int(np.clip(feat[NODE[name].start], 0, MAX_RANK - 1))]
  inputs = size(right, "kernel_input_feature_dimension")
  outputs = size(right, "kernel_output_feature_dimension")
  if outputs != size(feat[NODE["shape"]], "output_feature_dimension"):
    return False
  return feat[NODE["window_size"]][-1] * outputs * inputs == np.maximum(right, 1).prod()


def _fits_product(feat: np.ndarray, left: np.ndarray, right: np.ndarray) -> bool:
  """Whether a dot without batches of `left [6]` and `right [6]` has the shape in `feat`."""
  sides = [[int(size) for size in side if size] for side in (left, right)]
  result = [int(size) for size in feat[DIMENSIONS] if size]
  return any(
    a == b and sides[0][:i] + sides[0][i + 1 :] + sides[1][:j] + sides[1][j + 1 :] == result
    for i, a in enumerate(sides[0])
    for j, b in enumerate(sides[1])
  )
