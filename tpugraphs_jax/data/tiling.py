"""What configurations cost in padding and in number of tiles, from dimensions alone.

A TPU keeps an array in registers of 8 x 128 elements: the minor dimension of its layout is
padded to a multiple of 128 and the next one to a multiple of 8 (XLA, "Tiled layout"). Two sets
of features follow, because a network could hardly learn to divide and round up:

* of a layout choice, the padding of the tensors that it orders (`choice_features`);
* of a tile, into how many tiles it cuts the arrays of its kernel, and how far the last ones
  overhang (`tile_counts`). The bounds of a tile count registers, dimension by dimension from
  major to minor. They belong to the output and the second operand of the last convolution or
  dot; in a kernel without one, to the largest array, which a reduction reads. In the released
  kernels at hand the largest bounds equal the registers of these arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from tpugraphs_jax.columns import MAX_RANK, NODE, TILE, opcode_ids, sizes as sizes_of
from tpugraphs_jax.graph import OpGraph

LANES, SUBLANES = 128, 8
DIMENSIONS = sizes_of(NODE["shape"])  # of the output of a node, 0 beyond its rank
ROLES = 3  # output, input and kernel, of which a choice has an order each
CHOICE_FEATURES = 3 * ROLES
CONTRACTIONS = tuple(opcode_ids()[name] for name in ("convolution", "dot"))
CONFIG_FEATURES = (("released",), ("released", "tile_counts"))  # of data.config_features
_BOUNDS = {"output": sizes_of(TILE["output_bounds"]), "kernel": sizes_of(TILE["kernel_bounds"])}
_PER_ARRAY = 2 * (MAX_RANK + 1)


def padding(sizes: np.ndarray, tile: int) -> np.ndarray:
  """Logarithm of sizes `[...]` rounded up to `tile` over sizes, `[...]` float32; 0 below 1."""
  size = np.maximum(np.asarray(sizes, np.float64), 1)
  padded = np.log(np.ceil(size / tile) * tile / size)
  return np.where(np.asarray(sizes) < 1, 0, padded).astype(np.float32)


def node_padding(node_feat: np.ndarray) -> np.ndarray:
  """Padding of every dimension of each node as minor and as second, `[N, 12]` float32."""
  dims = node_feat[:, DIMENSIONS]
  return np.concatenate([padding(dims, LANES), padding(dims, SUBLANES)], axis=1)


def operand_table(graph: OpGraph) -> np.ndarray:
  """The first two operands of each configurable node in file order, `[K, 2]`, -1 = none."""
  order = np.argsort(graph.edge_index[:, 0], kind="stable")
  consumer, producer = graph.edge_index[order].T
  first = np.searchsorted(consumer, graph.config_node)
  count = np.searchsorted(consumer, graph.config_node, side="right") - first
  at = np.minimum(first[:, None] + np.arange(2), max(len(consumer) - 1, 0))
  if not len(producer):
    return np.full((len(graph.config_node), 2), -1, np.int64)
  return np.where(np.arange(2) < count[:, None], producer[at], -1)


def choice_features(graph: OpGraph, node: np.ndarray, row: np.ndarray) -> np.ndarray:
  """Features of choices of configurable nodes.

  Args:
    graph: with `LayoutConfigs`.
    node: `[U]` numbers among the configurable nodes.
    row: `[U]` dictionary rows.

  Returns:
    `[U, 9]` float32: for the layouts of the output, the input and the kernel the
    padding of the minor dimension, of the next one, and 1 where the choice leaves the
    layout open. Operands are those of the file, in its order.
  """
  dims = graph.node_feat[:, DIMENSIONS]
  tensors = np.concatenate([graph.config_node[:, None], operand_table(graph)], axis=1)[node]
  layout = graph.configs.rows[row].reshape(len(row), ROLES, MAX_RANK).astype(int)
  minor, second = layout[..., 0], layout[..., 1]
  size = lambda axis: np.where(
      (axis >= 0) & (tensors >= 0), dims[np.maximum(tensors, 0), np.maximum(axis, 0)], 0)
  return np.concatenate([
      padding(size(minor), LANES), padding(size(second), SUBLANES),
      (minor < 0).astype(np.float32)], axis=1)


def registers(node_feat: np.ndarray) -> np.ndarray:
  """Registers along each dimension of a node's array, major to minor, `[rank]` int64.

  Args:
    node_feat: `[140]` of one node. Where its layout is no order of the dimensions, the last
      dimension is the minor one.
  """
  sizes = node_feat[DIMENSIONS].astype(np.int64)
  rank = int((sizes > 0).sum())
  minor_to_major = node_feat[NODE["minor_to_major"]].astype(np.int64)[:rank]
  if sorted(minor_to_major.tolist()) != list(range(rank)):
    minor_to_major = np.arange(rank)[::-1]
  counts = sizes[minor_to_major]
  units = (LANES * SUBLANES,) if rank == 1 else (LANES, SUBLANES)[:rank]
  counts[: len(units)] = -(-counts[: len(units)] // units)
  return counts[::-1]


def tiled_arrays(graph: OpGraph) -> dict[str, np.ndarray]:
  """Registers `[rank]` of the arrays that bounds of the output and of the kernel cut."""
  none = np.zeros(0, np.int64)
  if not graph.num_nodes:
    return {"output": none, "kernel": none}
  contractions = np.flatnonzero(np.isin(graph.node_opcode, CONTRACTIONS))
  for node in contractions[::-1]:
    operands = graph.edge_index[graph.edge_index[:, 0] == node, 1]
    if len(operands) == 2:
      return {"output": registers(graph.node_feat[node]),
              "kernel": registers(graph.node_feat[operands[1]])}
  sizes = graph.node_feat[:, DIMENSIONS].astype(np.float64)
  elements = np.where(sizes[:, 0] > 0, np.maximum(sizes, 1).prod(axis=1), 0)
  return {"output": registers(graph.node_feat[elements.argmax()]), "kernel": none}


def tile_counts(graph: OpGraph) -> np.ndarray:
  """Features of every configuration of a kernel.

  Returns:
    `[C, 28]` float32. For the output and then the kernel, of each dimension from minor to
    major the logarithm of the number of tiles along it, and their sum; likewise the
    logarithm of registers that the tiles cover over registers that the array has. Zeros
    where there is no bound or no dimension.
  """
  arrays, feat = tiled_arrays(graph), graph.configs.config_feat
  return np.concatenate(
      [_cuts(arrays[name], feat[:, bounds]) for name, bounds in _BOUNDS.items()], axis=1)


def _cuts(counts: np.ndarray, bounds: np.ndarray) -> np.ndarray:
  """Tiles and overhang `[C, 14]` float32 of an array `[rank]` and bounds `[C, 6]`."""
  rank = len(counts)
  found = np.zeros((len(bounds), 2, MAX_RANK + 1))
  bound = bounds[:, :rank].astype(np.float64)
  tiles = np.ceil(counts / np.maximum(bound, 1))
  logs = np.stack([np.log(np.maximum(tiles, 1)),
                   np.log(np.maximum(tiles * np.maximum(bound, 1) / np.maximum(counts, 1), 1))], 1)
  found[:, :, :rank] = np.where(bound[:, None] > 0, logs, 0)[..., ::-1]
  found[:, :, MAX_RANK] = found[:, :, :MAX_RANK].sum(axis=-1)
  return found.reshape(len(bounds), _PER_ARRAY).astype(np.float32)


def extended(graph: OpGraph, names: Sequence[str]) -> OpGraph:
  """The kernel with the features of these blocks as `config_feat`.

  Args:
    graph: with the released node features and configurations.
    names: one of `CONFIG_FEATURES`.
  """
  if "tile_counts" not in names:
    return graph
  feat = np.concatenate([graph.configs.config_feat, tile_counts(graph)], axis=1)
  return dataclasses.replace(
      graph, configs=dataclasses.replace(graph.configs, config_feat=feat))
