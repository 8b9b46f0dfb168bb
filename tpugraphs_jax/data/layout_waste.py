"""What a layout choice costs in padding, from dimensions and tiles alone.

A TPU keeps an array in tiles of 8 x 128 elements: the minor dimension of its layout
is padded to a multiple of 128 and the next one to a multiple of 8 (XLA, "Tiled
layout"). The logarithms of both factors are features of a choice; a network could
hardly learn to round up.
"""

from __future__ import annotations

import numpy as np

from tpugraphs_jax.graph import OpGraph

LANES, SUBLANES = 128, 8
DIMENSIONS = slice(21, 27)  # of node features: the output's, 0 beyond its rank
_WIDTH = 6  # dimensions of the output, of the input and of the kernel in a row
ROLES = 3
FEATURES = 3 * ROLES


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
  layout = graph.configs.rows[row].reshape(len(row), ROLES, _WIDTH).astype(int)
  minor, second = layout[..., 0], layout[..., 1]
  size = lambda axis: np.where(
      (axis >= 0) & (tensors >= 0), dims[np.maximum(tensors, 0), np.maximum(axis, 0)], 0)
  return np.concatenate([
      padding(size(minor), LANES), padding(size(second), SUBLANES),
      (minor < 0).astype(np.float32)], axis=1)
