"""The 3rd place: linear attention beside GraphSAGE, and separate layers for positions.

    layouts:  features, opcode, configuration -> linear -> x      walks -> linear, tanh -> p
              four layers:  x <- join([sage(p, x), attention(p, x)])    p <- sage(p)
              score = w . sum over nodes of two linear blocks of [p, x]
    tiles:    features, walks, opcode, tile -> linear -> four SAGE layers over users
              score = w . sum over nodes + b

Published: an output node is added that consumes the roots of all computations. 43 released columns
are logarithms. Further columns are shapes of operands and positions in registers of 128 lanes.
Return probabilities of random walks are the positions p. Configurations are divided by 5, and 0 on
nodes that are not configurable. A block is a linear layer, SiLU and layer norm. Layers of layouts
have no residuals. SAGE concatenates channels of the node, 128 channels of messages from users and
128 from operands. Attention is `sum_j (q_i . k_j) v_j` over all nodes j of the graph, with elu + 1
applied to q and k, and without a normaliser.

Messages from operands are divided by the number of operands of the sender, where a mean divides by
the number of operands of the receiver. The defect is well defined and part of the published system.

Different here: logarithms below -1 have a sign, where the public logarithm is NaN. The 30 columns
from protobufs are missing, because the data set has no protobufs. Left and right operands are
distinguished by shapes. The tile model uses the 43 logarithms of the layout model (published: 48,
5 of them with offsets).

Source: jafluri/kaggle_tpu_graph, branches main (layouts) and submission_tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from tpugraphs_jax.columns import NODE, NODE_FEATURES, sizes
from tpugraphs_jax.config_fields import option
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.data.features import BLOCKS, contraction_operands, LANES, signed_log
from tpugraphs_jax.data.reduction import edge_matrix
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.nn import attention, pooling
from tpugraphs_jax.nn.aggregation import degree, OPERANDS, USERS
from tpugraphs_jax.nn.conv import sage
from tpugraphs_jax.nn.embeddings import Opcodes
from tpugraphs_jax.nn.layers import EPSILON, Layouts, Tiles
from tpugraphs_jax.nn.nodes import concat, neighbour_mean, neighbours, Nodes, Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System

# Features.

# Columns with many orders of magnitude.
_WIDE = np.r_[21:31, 37:40, 43:45, 52:55, 59:61, 68, 76, 84, 107:113, 117:125, 126:128, 129:133]


@BLOCKS.register("wide_logarithms")
def wide_logarithms(graph: OpGraph) -> np.ndarray:
  """The released columns, 43 of them as logarithms: `[N, 140]` float32.

  The logarithm is sign(x) log(1 + |x|); the published log(1 + x) is NaN below -1.
  """
  feat = graph.node_feat[:, :NODE_FEATURES].astype(np.float32)
  feat[:, _WIDE] = signed_log(feat[:, _WIDE])
  return feat


_MISSING, _OTHER_OPCODE, _OUTPUT = -1, -2, 0  # two values, and the opcode of the output node


@BLOCKS.register("operand_shapes")
def operand_shapes(graph: OpGraph) -> np.ndarray:
  """Shapes of the left and the right operand of convolutions and dots, `[N, 16]` float32.

  Per operand (`contraction_operands`): 6 dimensions, their sum and their product; -1 for a missing
  operand and for the output node, -2 for other opcodes. The transform `log_offset(3)` takes
  logarithms.
  """
  shape = graph.node_feat[:, NODE["shape"]]
  features = np.full((graph.num_nodes, 2, shape.shape[1]), _OTHER_OPCODE, np.float32)
  features[graph.node_opcode == _OUTPUT] = _MISSING
  nodes, operands = contraction_operands(graph)
  features[nodes] = np.where(operands[..., None] >= 0, shape[operands], _MISSING)
  return features.reshape(graph.num_nodes, -1)


_SIZED = "shape dimensions window_size window_padding_low window_padding_high".split()
_SIZES = np.r_[tuple(sizes(NODE[name]) for name in _SIZED)]


@BLOCKS.register("tile_modulo")
def tile_modulo(graph: OpGraph) -> np.ndarray:
  """Positions in registers of 128 lanes, `[N, 60]` float32.

  For 30 columns x with sizes of dimensions: ((x + 127) mod 128) / 128, the position of the last
  element in its register; then floor(x / 128) / 10, the number of full registers.
  """
  x = graph.node_feat[:, _SIZES]
  position = np.mod(x + (LANES - 1), LANES) / LANES
  return np.concatenate([position, np.floor(x / LANES) / 10], axis=1).astype(np.float32)


# Columns of walks in the undirected graph (step 2 on), and of walks from producers to consumers.
UNDIRECTED_STEPS, DIRECTED_STEPS = 112, 16
WALKS = DIRECTED_STEPS + UNDIRECTED_STEPS
_NODES_AT_ONCE = 256  # start nodes of walks in memory at a time


@BLOCKS.register("random_walk")
def return_probabilities(graph: OpGraph) -> np.ndarray:
  """Probabilities that random walks return to their start, `[N, 16 + 112]` float32.

  Edges lead from producers to consumers, and every node has an edge to itself. P is the adjacency
  matrix with rows divided by their sums. The first 16 columns are `directed_walk`. The others are
  the diagonals of P^2 to P^113 of the undirected graph.

  The time grows with N * E: about a second for 3,000 nodes, minutes for 40,000.
  """
  adjacency = _to_consumers(graph)
  undirected = ((adjacency + adjacency.T) > 0).astype(np.float32)
  both = _diagonals(_walk(undirected), UNDIRECTED_STEPS + 1)[:, 1:]
  return np.concatenate([directed_walk(graph), both], axis=1).astype(np.float32)


@BLOCKS.register("directed_walk")
def directed_walk(graph: OpGraph) -> np.ndarray:
  """Random walks from producers to consumers, `[N, 16]` float32.

  The diagonal of P (`return_probabilities`), then for k = 2 to 16 the column sums of P^k without
  its diagonal.
  """
  walk = _walk(_to_consumers(graph))
  returns = _diagonals(walk, DIRECTED_STEPS)
  sums, columns = walk.T @ np.ones(len(returns), np.float32), [returns[:, 0]]
  for step in range(1, DIRECTED_STEPS):
    sums = walk.T @ sums
    columns.append(sums - returns[:, step])
  return np.stack(columns, axis=1).astype(np.float32)


def _to_consumers(graph: OpGraph) -> scipy.sparse.csr_array:
  """Adjacency from producers to consumers with self edges, 0 or 1, `[N, N]` float32."""
  edges = edge_matrix(graph.edge_index[:, ::-1], graph.num_nodes)
  return ((edges + scipy.sparse.eye_array(graph.num_nodes)) > 0).astype(np.float32)


def _walk(adjacency: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
  """Transition probabilities: rows of `adjacency` divided by their sums, which are positive."""
  scale = scipy.sparse.diags_array(1 / adjacency.sum(axis=1))
  return (scale @ adjacency).tocsr().astype(np.float32)


def _diagonals(walk: scipy.sparse.csr_array, steps: int) -> np.ndarray:
  """Diagonals of the powers 1 to `steps` of `walk`, `[N, steps]` float32.

  With the unit vector e of a node, the entry of power a + b is (e P^a) (P^b e): each factor takes
  half of the steps.
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


# Layers.


class Block(nn.Module):
  """A linear layer, SiLU and layer norm.

  Attributes:
    features: width of the result.
    linear: creates a linear layer of a width.
  """

  features: int
  linear: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, *x: Any) -> Nodes:
    """Maps inputs of `Linear` to `[N, C, features]`."""
    norm = nn.LayerNorm(epsilon=EPSILON, name="norm")
    return self.linear(self.features, name="linear")(*x).map(activation(norm))


def activation(norm: nn.LayerNorm) -> Callable[[jax.Array], jax.Array]:
  """SiLU and `norm` of rows `[..., F]`.

  The backward pass recomputes both, which saves memory.
  """
  recompute = nn.remat(lambda norm, rows: norm(nn.silu(rows)))
  return lambda rows: recompute(norm, rows)


class SageConcat(nn.Module):
  """Concatenates channels of a node, of messages from its users and from its operands.

  Attributes:
    features: channels of the node.
    messages: channels of the messages from each side.
    linear: creates a linear layer of a width.
  """

  features: int
  messages: int
  linear: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, *x: Nodes) -> Nodes:
    """Maps node features, as one concatenation, to `[N, C, features + 2 messages]`."""
    slates = x[0].slates
    users = neighbour_mean(self.linear(self.messages, name="users")(*x), USERS)
    sent = self.linear(self.messages, name="operands")(*x)
    # Published: divided at the sender, not at the receiver.
    count = degree(slates.batch.adjacency, OPERANDS, slates.num_nodes)
    operands = neighbours(sent.divide(jnp.maximum(count, 1)), OPERANDS)
    return concat(self.linear(self.features, name="own")(*x), users, operands)


class Layer(nn.Module):
  """SAGE and attention on node features, and SAGE on positions.

  Attributes:
    features: width of the result.
    keys: width of queries and keys.
    messages: channels of a message.
    linear: creates a linear layer of a width.
  """

  features: int
  keys: int
  messages: int
  linear: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, positions: Nodes, x: Nodes) -> tuple[Nodes, Nodes]:
    """Maps positions `[N, C, P]` and features `[N, C, F]` to `[N, C, P]` and `[N, C, features]`."""
    local = SageConcat(self.features, self.messages, self.linear, name="sage")(positions, x)
    norm = nn.LayerNorm(epsilon=EPSILON, name="sage_norm")
    local = Block(self.features, self.linear, name="mixed")(local.map(activation(norm)))
    positive = lambda name: self.linear(self.keys, name=name)(positions, x).map(attention.positive)
    key, query = positive("key"), positive("query")
    products = [attention.graph_products(key, part) for part in (positions, x)]
    value = self.linear(self.features, use_bias=False, name="value")
    context = attention.TimesGraph(query, value(jnp.concatenate(products, axis=-1)))
    x = Block(self.features, self.linear, name="both")(local, context)
    width = positions.width
    hidden = SageConcat(width, width // 2, self.linear, name="track")(positions)
    positions = self.linear(width, name="positions")(hidden.map(jnp.tanh)).map(jnp.tanh)
    return positions, x


# Networks.


@base.LAYOUT_MODELS.register("Third")
class KaggleThirdLayout(System):
  """The 3rd place on layouts."""

  op_embed_dim: int = option(128, "width of the opcode vector", least=1)
  first_width: int = option(
    512, "width of the layer that joins features, opcode and configuration", least=1
  )
  position_width: int = option(64, "width of positions", least=1)
  widths: Sequence[int] = option((384, 256, 256, 256), "widths of the layers")
  keys: int = option(128, "width of queries and keys", least=1)
  messages: int = option(128, "channels of a message", least=1)

  reads = ("random_walk",)
  sees_whole_graph = True

  @property
  def hops(self) -> int:
    return 1  # all nodes differ after the first attention

  @nn.compact
  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The sum over nodes, `[G, C, widths[-1]]` float32."""
    del train  # no dropout
    slates, graph = Slates.of(batch), batch.graph
    feat = jnp.asarray(graph.nodes["feat"])
    opcode = Opcodes(self.op_embed_dim, name="opcodes")(graph)
    static = slates.nodes(opcode, feat[:, :-WALKS])
    layouts = Layouts(slates, jnp.asarray(batch.rows) / 5)
    x = Block(self.first_width, self.linear, name="first")(static, layouts)
    walks = slates.nodes(feat[:, -WALKS:])
    positions = self.linear(self.position_width, name="positions")(walks).map(jnp.tanh)
    for number, width in enumerate(self.widths):
      layer = Layer(width, self.keys, self.messages, self.linear, name=f"layer_{number}")
      positions, x = layer(positions, x)
    x = Block(self.position_width + x.width, self.linear, name="last_0")(positions, x)
    return pooling.total(Block(self.widths[-1], self.linear, name="last_1")(x))

  def setup(self):
    self.last = self.exact(1, use_bias=False)


@base.TILE_MODELS.register("Third")
class KaggleThirdTile(System):
  """The 3rd place on tiles."""

  op_embed_dim: int = option(32, "width of the opcode vector", least=1)
  first_width: int = option(256, "width of the layer that joins features, opcode and tile", least=1)
  widths: Sequence[int] = option((128,) * 4, "widths of the SAGE layers")

  @nn.compact
  def embed(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """The sum over nodes, `[G, C, widths[-1]]` float32."""
    del train  # no dropout
    slates, graph = Slates.of(batch), batch.graph
    opcode = Opcodes(self.op_embed_dim, name="opcodes")(graph)
    static = slates.nodes(opcode, jnp.asarray(graph.nodes["feat"]))
    tiles = Tiles(slates, jnp.asarray(batch.config_feat) / 5)
    x = Block(self.first_width, self.linear, name="first")(static, tiles)
    for number, width in enumerate(self.widths):
      node = self.linear(width, name=f"sage_{number}_own")
      users = self.linear(width, use_bias=False, name=f"sage_{number}_users")
      norm = nn.LayerNorm(epsilon=EPSILON, name=f"sage_{number}_norm")
      x = sage(x, node, {USERS: users}).map(lambda rows: norm(nn.silu(rows)))
    return pooling.total(x)
