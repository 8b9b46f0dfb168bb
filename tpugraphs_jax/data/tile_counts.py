"""How a tile cuts the arrays of a kernel, as features of its configurations.

A configuration of the data set gives bounds of the kernel's and of the output's tile. It
counts vector registers of 8 x 128 elements, dimension by dimension from major to minor.
Into how many tiles an array is cut, and how much the last ones overhang, follows from the
bounds and the array's own shape. A network could hardly learn to divide and round up.

The arrays are those to which the released bounds belong: the output and the second operand
of the last convolution or dot; without one the largest array, as that which a reduction
reads. In the released kernels at hand the largest bounds equal these registers.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from tpugraphs_jax.data.layout_waste import DIMENSIONS, LANES, SUBLANES
from tpugraphs_jax.graph import OpGraph

RANK = 6  # dimensions of an array, at most
_LAYOUT = slice(134, 140)  # of node features: minor to major
_CONTRACTIONS = (26, 34)  # opcodes of convolution and dot
_BOUNDS = {"output": slice(8, 14), "kernel": slice(0, 6)}  # of a configuration
CHOICES = (("released",), ("released", "tile_counts"))  # of data.config_features
_PER_ARRAY = 2 * (RANK + 1)
FEATURES = len(_BOUNDS) * _PER_ARRAY


def registers(node_feat: np.ndarray) -> np.ndarray:
  """Registers along each dimension of a node's array, major to minor, `[rank]` int64.

  Args:
    node_feat: `[140]` of one node. Where its layout is no order of the dimensions, the last
      dimension is the minor one.
  """
  sizes = node_feat[DIMENSIONS].astype(np.int64)
  rank = int((sizes > 0).sum())
  minor_to_major = node_feat[_LAYOUT].astype(np.int64)[:rank]
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
  contractions = np.flatnonzero(np.isin(graph.node_opcode, _CONTRACTIONS))
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
  found = np.zeros((len(bounds), 2, RANK + 1))
  bound = bounds[:, :rank].astype(np.float64)
  tiles = np.ceil(counts / np.maximum(bound, 1))
  logs = np.stack([np.log(np.maximum(tiles, 1)),
                   np.log(np.maximum(tiles * np.maximum(bound, 1) / np.maximum(counts, 1), 1))], 1)
  found[:, :, :rank] = np.where(bound[:, None] > 0, logs, 0)[..., ::-1]
  found[:, :, RANK] = found[:, :, :RANK].sum(axis=-1)
  return found.reshape(len(bounds), _PER_ARRAY).astype(np.float32)


def extended(graph: OpGraph, names: Sequence[str]) -> OpGraph:
  """The kernel with the features of these blocks as `config_feat`.

  Args:
    graph: with the released node features and configurations.
    names: one of `CHOICES`.
  """
  if "tile_counts" not in names:
    return graph
  feat = np.concatenate([graph.configs.config_feat, tile_counts(graph)], axis=1)
  return dataclasses.replace(
      graph, configs=dataclasses.replace(graph.configs, config_feat=feat))
