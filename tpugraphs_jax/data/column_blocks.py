"""Blocks of node features that a model reads column by column: nothing may scale them."""

from __future__ import annotations

import numpy as np

from tpugraphs_jax.data import features
from tpugraphs_jax.graph import OpGraph

DIMENSIONS = 6
# First columns of what is said of each dimension of a node: its shape, `dimensions`, windows
# (size, stride, low and high padding, both dilations, reversal).
_PER_DIMENSION = (21, 31, 37, 45, 53, 61, 69, 77, 85)
_CONVOLUTION = slice(93, 107)  # numbers of dimensions
_LAYOUT = slice(134, 140)


def node_layout(graph: OpGraph) -> np.ndarray:
  """The layout of each node's result, minor to major, -1 beyond its rank: `[N, 6]` float32."""
  return features.node_features(graph, pad_value=-1)[:, _LAYOUT].astype(np.float32)


def dimension_tokens(graph: OpGraph) -> np.ndarray:
  """What nodes say of each of their six dimensions, `[N, 6 * 23]` float32.

  A dimension has 23 columns, dimension after dimension: the signed logarithm of nine
  sizes, then which of the 14 numbers of convolutions name it. A number 0 names none: it
  also stands for no convolution (5th place of the "Fast or Slow?" competition).
  """
  feat = graph.node_feat
  sizes = np.stack([feat[:, first : first + DIMENSIONS] for first in _PER_DIMENSION], axis=2)
  numbers = feat[:, None, _CONVOLUTION]
  named = (numbers == np.arange(DIMENSIONS)[None, :, None]) & (numbers > 0)
  logarithms = np.sign(sizes) * np.log1p(np.abs(sizes))
  tokens = np.concatenate([logarithms, named], axis=2)
  return tokens.reshape(graph.num_nodes, -1).astype(np.float32)
