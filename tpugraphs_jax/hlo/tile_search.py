"""Tile sizes for a kernel of one's own, in the form of the data set.

The data set gives a tile as the number of vector registers along each
dimension, from major to minor: a register holds 8 elements of the second-minor
dimension and 128 of the minor one, or 1,024 of a vector's only dimension.
"""

from __future__ import annotations

import math

import numpy as np

from tpugraphs_jax.graph import TileConfigs
from tpugraphs_jax.hlo import module_graph, node_features, proto
from tpugraphs_jax.hlo.choices import distinct_choices
from tpugraphs_jax.hlo.ragged import Ragged

_LANES = 128
_SUBLANES = 8
# The largest tile, in registers, of the released kernels that were looked at.
_MAX_REGISTERS = 2400
_CONTRACTIONS = ("convolution", "dot")


def tile_configs(graph: module_graph.HloGraph, n: int, seed: int = 0) -> TileConfigs:
  """Up to `n` distinct tile sizes of a kernel, not labelled.

  The last convolution or dot has bounds for its output and its kernel. A kernel
  without one has output bounds for its largest array, as a reduction has for
  what it reduces. A bound divides the number of registers or is a power of two,
  and a tile has at most 2,400 registers, the most that the data set shows.

  Args:
    graph: a graph from `featurize`.
    n: how many configurations; a small kernel has fewer.
    seed: of the sample, where not all configurations are listed.

  Raises:
    ValueError: the graph has no array that a tile could cut.
  """
  blocks = [[_bounds(size) for size in _registers(shape)] for shape in _tiled_shapes(graph)]
  options = [bounds for block in blocks for bounds in block]
  if not options:
    raise ValueError(f"{graph.name}: no array with a dimension, expected one to tile")
  block_of = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])

  def bounds_of(choices: np.ndarray) -> np.ndarray:
    return np.stack(
        [np.array(bounds)[choices[:, k]] for k, bounds in enumerate(options)], axis=1)

  def fits(choices: np.ndarray) -> np.ndarray:
    bounds = bounds_of(choices).astype(np.float64)  # int64 would wrap
    return np.all([bounds[:, block_of == block].prod(axis=1) <= _MAX_REGISTERS
                   for block in range(len(blocks))], axis=0)

  choices = distinct_choices([len(bounds) for bounds in options], n, seed=seed, accept=fits)
  bounds = bounds_of(choices)
  empty = np.zeros((len(bounds), 0), np.int64)
  kernel_output_input = [bounds[:, block_of == 1], bounds[:, block_of == 0], empty]
  feat = [Ragged(block).aggregate(6, empty_product=0) for block in kernel_output_input]
  return TileConfigs(
      np.concatenate(feat, axis=1).astype(np.float32),
      runtime_ns=np.zeros(len(bounds), np.int64),
      normalizer_ns=np.ones(len(bounds), np.int64))


def _tiled_shapes(graph: module_graph.HloGraph) -> list[proto.ShapeProto]:
  """The output, and for a contraction its kernel."""
  nodes = node_features.instructions(graph.module)
  contractions = [node for node in nodes
                  if node.opcode in _CONTRACTIONS and len(node.operand_ids) == 2]
  if contractions:
    position = module_graph.node_positions(graph.module)
    kernel = nodes[position[contractions[-1].operand_ids[1]]]
    return [contractions[-1].shape, kernel.shape]
  arrays = [node.shape for node in nodes if node.shape.dimensions]
  return [max(arrays, key=lambda shape: math.prod(shape.dimensions))] if arrays else []


def _registers(shape: proto.ShapeProto) -> list[int]:
  """How many registers each dimension takes, from major to minor."""
  minor_to_major = list(shape.layout.minor_to_major)
  rank = len(shape.dimensions)
  if sorted(minor_to_major) != list(range(rank)):
    minor_to_major = list(reversed(range(rank)))
  sizes = [max(1, shape.dimensions[dim]) for dim in minor_to_major]
  units = [_LANES * _SUBLANES] if rank == 1 else [_LANES, _SUBLANES]
  for k, unit in enumerate(units[:rank]):
    sizes[k] = -(-sizes[k] // unit)
  return sizes[::-1]


def _bounds(size: int) -> list[int]:
  """The divisors of `size` and the powers of two below it, up to the largest tile."""
  return [bound for bound in range(1, min(size, _MAX_REGISTERS) + 1)
          if size % bound == 0 or bound & (bound - 1) == 0]
