"""Blocks of features, computed from a graph before statistics are applied.

A block of node features maps an `OpGraph` to `[N, F]` and sees the whole graph, also where a model
gets a reduced one or a segment. `data.features` names the blocks of a model, and extensions
register their own in `BLOCKS`.

Two sets of features of configurations divide and round up, which a network could hardly learn. A
TPU keeps an array in registers of 8 x 128 elements: the minor dimension of its layout
is padded to a multiple of 128 and the next one to a multiple of 8 (XLA, "Tiled layout").

* Of a layout choice, the padding of the tensors that it orders (`choice_features`).
* Of a tile, into how many tiles it cuts the arrays of its kernel, and how far the last ones
  overhang (`tile_counts`). The bounds of a tile count registers, dimension by dimension from
  major to minor. They belong to the output and the second operand of the last convolution or
  dot; in a kernel without one, to the largest array, which a reduction reads. In the released
  kernels at hand the largest bounds equal the registers of these arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np
import scipy.sparse

from tpugraphs_jax.columns import (
    ELEMENT_TYPES, MAX_RANK, NODE, NODE_FEATURES, TILE, opcode_ids, sizes)
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.registry import Registry

LANES, SUBLANES = 128, 8
DIMENSIONS = sizes(NODE["shape"])  # of the output of a node, 0 beyond its rank
ROLES = 3  # output, input and kernel, of which a choice has an order each
CONTRACTIONS = tuple(opcode_ids()[name] for name in ("convolution", "dot"))
CONFIG_FEATURES = {  # of data.config_features
    "tile": (("released",), ("released", "tile_counts")),
    "layout": (("released",), ("outputs",))}  # all 18 integers, or `graph.output_orders`
_BOUNDS = {"output": sizes(TILE["output_bounds"]), "kernel": sizes(TILE["kernel_bounds"])}
_PER_ARRAY = 2 * (MAX_RANK + 1)


def padding(size: np.ndarray, tile: int) -> np.ndarray:
  """Logarithm of a size `[...]` rounded up to `tile`, over the size: `[...]` float32; 0 below 1."""
  least = np.maximum(np.asarray(size, np.float64), 1)
  padded = np.log(np.ceil(least / tile) * tile / least)
  return np.where(np.asarray(size) < 1, 0, padded).astype(np.float32)


def node_padding(node_feat: np.ndarray) -> np.ndarray:
  """Padding of every dimension of each node as minor and as second, `[N, 12]` float32."""
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


def choice_features(graph: OpGraph, node: np.ndarray, row: np.ndarray) -> np.ndarray:
  """Features of choices of configurable nodes.

  Args:
    graph: with `LayoutConfigs`.
    node: `[U]` numbers among the configurable nodes.
    row: `[U]` dictionary rows.

  Returns:
    `[U, 9]` float32: for the layouts of the output, the input and the kernel the
    padding of the minor dimension, of the next one, and 1 where the choice leaves the
    layout open. Operands are in the order of `edge_index`.
  """
  dims = graph.node_feat[:, DIMENSIONS]
  operands = operand_table(graph, graph.config_node)
  tensors = np.concatenate([graph.config_node[:, None], operands], axis=1)[node]
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
  features = np.zeros((len(bounds), 2, MAX_RANK + 1))
  bound = bounds[:, :rank].astype(np.float64)
  tiles = np.ceil(counts / np.maximum(bound, 1))
  logs = np.stack([np.log(np.maximum(tiles, 1)),
                   np.log(np.maximum(tiles * np.maximum(bound, 1) / np.maximum(counts, 1), 1))], 1)
  features[:, :, :rank] = np.where(bound[:, None] > 0, logs, 0)[..., ::-1]
  features[:, :, MAX_RANK] = features[:, :, :MAX_RANK].sum(axis=-1)
  return features.reshape(len(bounds), _PER_ARRAY).astype(np.float32)


def extended(graph: OpGraph, names: Sequence[str]) -> OpGraph:
  """The kernel with the features of these blocks as `config_feat`.

  Args:
    graph: with the released node features and configurations.
    names: one of `CONFIG_FEATURES["tile"]`.
  """
  if "tile_counts" not in names:
    return graph
  feat = np.concatenate([graph.configs.config_feat, tile_counts(graph)], axis=1)
  return dataclasses.replace(
      graph, configs=dataclasses.replace(graph.configs, config_feat=feat))


Block = Callable[[OpGraph], np.ndarray]  # raw features [N, F] of a graph of N nodes
BLOCKS = Registry("data.features")
RELEASED = "released"
_LAYOUT = NODE["minor_to_major"]


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the block `released`.

  Attributes:
    pad_value: of the positions of a layout beyond the rank of the shape. 0 leaves the
      released features, in which 0 is also a real dimension; -1 marks these positions.
  """

  pad_value: int = 0


@BLOCKS.register(RELEASED)
def released(graph: OpGraph, options: Options = Options()) -> np.ndarray:
  """The 140 released columns, `[N, 140]` float32."""
  feat = graph.node_feat[:, :NODE_FEATURES]
  if options.pad_value == 0:
    return feat
  feat = feat.copy()
  feat[:, _LAYOUT][np.arange(MAX_RANK)[None] >= _rank(feat)[:, None]] = options.pad_value
  return feat


def _rank(feat: np.ndarray) -> np.ndarray:
  """Dimensions of each node's result, `[N]`: the sizes in front of the first 0."""
  return np.cumprod(feat[:, sizes(NODE["shape"])] != 0, axis=1).sum(axis=1)


@BLOCKS.register("node_layout")
def node_layout(graph: OpGraph) -> np.ndarray:
  """The layout of each node's result, minor to major, -1 beyond its rank: `[N, 6]` float32."""
  return released(graph, Options(pad_value=-1))[:, _LAYOUT].astype(np.float32)


def signed_log(x: np.ndarray) -> np.ndarray:
  """sign(x) log(1 + |x|) of `x [...]`."""
  return np.sign(x) * np.log1p(np.abs(x))


# Columns that the 3rd place takes the logarithm of.
_WIDE = np.r_[21:31, 37:40, 43:45, 52:55, 59:61, 68, 76, 84, 107:113, 117:125, 126:128, 129:133]


@BLOCKS.register("wide_logarithms")
def wide_logarithms(graph: OpGraph) -> np.ndarray:
  """The released columns, 43 with many orders of magnitude as logarithms: `[N, 140]` float32.

  log(1 + x), below 0 -log(1 - x). Source: 3rd place of the competition, whose log(1 + x) is no
  number below -1.
  """
  feat = graph.node_feat[:, :NODE_FEATURES].astype(np.float32)
  feat[:, _WIDE] = signed_log(feat[:, _WIDE])
  return feat


_MISSING, _OTHER_OPCODE = -1, -2


def contraction_operands(graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
  """Convolutions and products `[M]`, and their left and right operands `[M, 2]`, -1 = none.

  Released edges are sorted by node and do not tell left from right, shapes do: the right operand
  of a convolution has the size of its window and the features of its result; a product has the
  dimensions of the left operand, then of the right operand, without the dimension that is summed.
  Where shapes fit both ways or neither (as with products in batches), the order of `edge_index`
  stays.
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
  features = size(right, "kernel_output_feature_dimension")
  elements = (feat[NODE["window_size"]][-1] * features
              * size(right, "kernel_input_feature_dimension"))
  return (features == size(feat[NODE["shape"]], "output_feature_dimension")
          and elements == np.maximum(right, 1).prod())


def _fits_product(feat: np.ndarray, left: np.ndarray, right: np.ndarray) -> bool:
  """Whether a product without batches of `left [6]` and `right [6]` has the shape in `feat`."""
  sides = [[int(size) for size in side if size] for side in (left, right)]
  result = [int(size) for size in feat[sizes(NODE["shape"])] if size]
  return any(
      a == b and sides[0][:i] + sides[0][i + 1 :] + sides[1][:j] + sides[1][j + 1 :] == result
      for i, a in enumerate(sides[0]) for j, b in enumerate(sides[1]))


@BLOCKS.register("operand_shapes")
def operand_shapes(graph: OpGraph) -> np.ndarray:
  """Shapes of the first two operands of convolutions and products, `[N, 16]` float32.

  Of each operand, left and then right (`contraction_operands`), the 6 dimensions, their sum and
  product; -1 where there is no such operand, -2 for other instructions. The 3rd place takes
  log(x + 3) of it (`log_offset(3)`). Source: 3rd place of the competition.
  """
  shape = graph.node_feat[:, NODE["shape"]]
  features = np.full((graph.num_nodes, 2, shape.shape[1]), _OTHER_OPCODE, np.float32)
  nodes, operands = contraction_operands(graph)
  features[nodes] = np.where(operands[..., None] >= 0, shape[operands], _MISSING)
  return features.reshape(graph.num_nodes, -1)


_COUNTED = np.r_[tuple(sizes(NODE[name]) for name in (
    "shape", "dimensions", "window_size", "window_padding_low", "window_padding_high"))]


@BLOCKS.register("tile_modulo")
def tile_modulo(graph: OpGraph) -> np.ndarray:
  """How dimensions fill registers of 128 lanes, `[N, 60]` float32.

  Of 30 columns x that count along a dimension first ((x + 127) mod 128) / 128, the place
  of the last number in its register, then floor(x / 128) / 10, the registers before. Source:
  3rd place of the competition.
  """
  x = graph.node_feat[:, _COUNTED]
  filled = np.mod(x + (LANES - 1), LANES) / LANES
  return np.concatenate([filled, np.floor(x / LANES) / 10], axis=1).astype(np.float32)


# Of the 3rd place of the competition: steps of walks along edges in both directions, from the
# second step on, and steps of walks from producers to consumers.
UNDIRECTED_STEPS = 112
DIRECTED_STEPS = 16
# Walks that start from so many nodes are followed at a time.
_NODES_AT_ONCE = 256


@BLOCKS.register("random_walk")
def return_probabilities(graph: OpGraph) -> np.ndarray:
  """How likely random walks are back where they began, `[N, 112 + 16]` float32.

  Edges lead from producers to consumers, and from the root of every computation to one node
  more, the output. Every node has an edge to itself, and P is the adjacency matrix with rows
  divided by their sums. The first columns are the diagonals of P^2 to P^113 of the undirected
  graph. The others are of the directed graph, see `directed_walk`.

  The time grows with N * E: about a second for 3,000 nodes, minutes for 40,000. Source: 3rd
  place of the competition.
  """
  adjacency = _towards_output(graph)
  undirected = ((adjacency + adjacency.T) > 0).astype(np.float32)
  both = _diagonals(_walk(undirected), UNDIRECTED_STEPS + 1)[:-1, 1:]
  return np.concatenate([both, directed_walk(graph)], axis=1).astype(np.float32)


@BLOCKS.register("directed_walk")
def directed_walk(graph: OpGraph) -> np.ndarray:
  """Random walks from producers to consumers and to the output, `[N, 16]` float32.

  The diagonal of P as in `random_walk`, then for k = 2 to 16 the column sums of P^k without
  the diagonal. Source: 3rd place of the competition.
  """
  walk = _walk(_towards_output(graph))
  returns = _diagonals(walk, DIRECTED_STEPS)
  reached, columns = walk.T @ np.ones(len(returns), np.float32), [returns[:, 0]]
  for step in range(1, DIRECTED_STEPS):
    reached = walk.T @ reached
    columns.append(reached - returns[:, step])
  return np.stack(columns, axis=1)[:-1].astype(np.float32)


def _towards_output(graph: OpGraph) -> scipy.sparse.csr_array:
  """Adjacency from producers to consumers with self edges, 0 or 1 `[N + 1, N + 1]`, output last."""
  nodes, (consumer, producer) = graph.num_nodes, graph.edge_index.T
  roots = np.flatnonzero(graph.node_feat[:, NODE["is_root"].start] > 0)
  senders = np.concatenate([producer, roots])
  receivers = np.concatenate([consumer, np.full(len(roots), nodes)])
  fed = scipy.sparse.csr_array(
      (np.ones(len(senders), np.float32), (senders, receivers)), shape=(nodes + 1, nodes + 1))
  return ((fed + scipy.sparse.eye_array(nodes + 1)) > 0).astype(np.float32)


def _walk(adjacency: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
  """The matrix with rows divided by their sums, which are above 0."""
  scale = scipy.sparse.diags_array(1 / adjacency.sum(axis=1))
  return (scale @ adjacency).tocsr().astype(np.float32)


def _diagonals(walk: scipy.sparse.csr_array, steps: int) -> np.ndarray:
  """Diagonals of `walk` to the powers 1 to `steps`, `[N, steps]` float32.

  With e the unit vector of a node, the entry of power a + b is (e P^a) (P^b e): each
  direction walks half of the steps.
  """
  nodes = walk.shape[0]
  result = np.zeros((nodes, steps), np.float32)
  transposed = walk.T.tocsr()
  for start in range(0, nodes, _NODES_AT_ONCE):
    stop = min(start + _NODES_AT_ONCE, nodes)
    ahead = np.eye(nodes, stop - start, -start, dtype=np.float32)  # P^b e, a column per node
    back = ahead.copy()
    for step in range(steps):
      if step % 2:
        back = transposed @ back
      else:
        ahead = walk @ ahead
      result[start:stop, step] = np.einsum("nc,nc->c", ahead, back)
  return result
