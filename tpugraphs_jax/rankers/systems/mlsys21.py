"""Kernels after "A Learned Performance Model for TPUs" (MLSys 2021).

    features and opcode of a node and the tile -> linear -> rounds along edges -> a reduction
    over nodes -> MLP -> score

Published: GraphSAGE or graph attention as the rounds; the reductions `per_node` (a score per
node and their sum), `columns` (sums, means and maxima), `lstm` (over the nodes in topological
order) and `transformer`. Not published, and guesses here: widths, and that edges count alike in
both directions. The paper's optional estimates of a kernel's work (operations, bytes read and
written, transcendental functions) are no part of the data set: the block `kernel_work` has
estimates from shapes.

The paper's code was written in TensorFlow and is not public. Layers begin as in Keras.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import operator

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.columns import ELEMENT_TYPES, MAX_RANK, NODE, opcode_ids
from tpugraphs_jax.data.batching import TileBatch
from tpugraphs_jax.data.feature_blocks import BLOCKS, contraction_operands
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.aggregation import BOTH
from tpugraphs_jax.nn.attention import same_graph, TransformerLayer
from tpugraphs_jax.nn.conv import Gatv2, Sage
from tpugraphs_jax.nn.layers import OpcodeEmbedding
from tpugraphs_jax.nn.linear import Tiles
from tpugraphs_jax.nn.nodes import Nodes, Slates
from tpugraphs_jax.options import option
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System

REDUCTIONS = ("per_node", "columns", "lstm", "transformer")
ROUNDS = ("sage", "attention")

# Features.

# Instructions that compute a number per element of their result, and of these the transcendental.
_TRANSCENDENTAL = (
    "atan2", "cbrt", "cosine", "exponential", "exponential-minus-one", "log", "log-plus-one",
    "logistic", "power", "rsqrt", "sine", "sqrt", "tan", "tanh")
_ARITHMETIC = _TRANSCENDENTAL + (
    "abs", "add", "and", "ceil", "clamp", "compare", "convert", "divide", "floor", "is-finite",
    "maximum", "minimum", "multiply", "negate", "not", "or", "remainder", "round-nearest-afz",
    "round-nearest-even", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "subtract", "xor")
_REDUCTIONS = ("reduce", "reduce-window")
_TYPE_BYTES = np.array(list(map(operator.attrgetter("bytes"), ELEMENT_TYPES)), np.float64)


@BLOCKS.register("kernel_work")
def kernel_work(graph: OpGraph) -> np.ndarray:
  """Estimates of the work of a kernel, the same for all of its nodes, `[N, 4]` float32.

  Operations; bytes of its parameters; bytes of its results; values of transcendental functions.
  An addition is one operation per element, a reduction one per element that it reads, a
  convolution or product two per element of its result and number that is summed (products are
  taken to have no batches). Scalars of the computations that reductions apply are counted too.
  "A Learned Performance Model for TPUs" (MLSys 2021) has such features from XLA, which are no
  part of the data set: these are from shapes and opcodes alone.
  """
  feat, ids = graph.node_feat.astype(np.float64), opcode_ids()
  of = lambda names: np.isin(graph.node_opcode, [ids[name] for name in names])
  elements = feat[:, NODE["shape"]][:, -1]
  size = elements * (feat[:, NODE["element_type"]] @ _TYPE_BYTES)  # tuples have none
  consumer, producer = graph.edge_index.T
  read = np.zeros(graph.num_nodes)
  np.maximum.at(read, consumer, elements[producer])
  operations = elements * of(_ARITHMETIC) + read * of(_REDUCTIONS)
  nodes, operands = contraction_operands(graph)
  left, right = np.where(operands >= 0, elements[operands], 0).T
  number = NODE["output_feature_dimension"].start
  dimension = np.clip(feat[nodes, number], 0, MAX_RANK - 1).astype(int)
  features = feat[nodes, NODE["shape"].start + dimension]
  summed = np.where(
      graph.node_opcode[nodes] == ids["dot"],
      np.sqrt(left * right / np.maximum(elements[nodes], 1)), right / np.maximum(features, 1))
  operations[nodes] = 2 * elements[nodes] * summed
  is_result = feat[:, NODE["is_root"].start] > 0
  is_result[producer[(is_result & of(["tuple"]))[consumer]]] = True
  work = [operations.sum(), size[of(["parameter"])].sum(), size[is_result].sum(),
          elements[of(_TRANSCENDENTAL)].sum()]
  return np.tile(np.float32(work), (graph.num_nodes, 1))


# Network.


@base.TILE_MODELS.register("MLSys21")
class MLSys21(System):
  """The learned performance model of kernels."""

  op_embed_dim: int = option(64, "width of the opcode vector", least=1)
  width: int = option(64, "width of every layer", least=1)
  rounds: int = option(3, "number of rounds along edges", least=1)
  convolution: str = option(
      "sage", "convolution along edges; attention is GATv2", one_of=tuple(ROUNDS))
  reduction: str = option("columns", "reduction over nodes", one_of=tuple(REDUCTIONS))
  heads: int = option(4, "number of heads of attention along edges and of the transformer", least=1)

  def __post_init__(self):
    super().__post_init__()
    if self.width % self.heads:
      raise ValueError(f"model.heads is {self.heads}, expected a divisor of model.width, which is "
                       f"{self.width}")

  @property
  def sees_whole_graph(self) -> bool:
    return self.reduction in ("lstm", "transformer")

  @property
  def linear(self) -> functools.partial:
    """Makes linear layers on nodes that begin as in Keras."""
    return functools.partial(super().linear, kernel_init=_glorot, bias_init=_zeros)

  @property
  def exact(self) -> functools.partial:
    """Makes linear layers on readouts that begin as in Keras."""
    return functools.partial(super().exact, kernel_init=_glorot, bias_init=_zeros)

  def setup(self):
    if self.reduction != "per_node":
      self.hidden, self.last = self.exact(self.width), self.exact(1)

  @nn.compact
  def embed(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """The nodes of each kernel, reduced: `[G, C, P]` float32."""
    del train  # no dropout
    slates, graph = Slates.of(batch), batch.graph
    opcode = OpcodeEmbedding(self.op_embed_dim, name="opcodes")(graph)
    node = slates.nodes(jnp.concatenate([jnp.asarray(graph.nodes["feat"]), opcode], axis=-1))
    tiles = Tiles(slates, jnp.asarray(batch.config_feat))
    x = self.linear(self.width, name="first")(node, tiles).map(nn.relu)
    for number in range(self.rounds):
      x = self.round(f"round_{number}")(x).map(nn.relu)
    return self.reduced(x)

  def round(self, name: str) -> nn.Module:
    """A convolution along edges."""
    if self.convolution == "sage":
      return Sage(self.width, (BOTH,), self.linear, name=name)
    return Gatv2(self.width, BOTH, self.heads, self.linear, name=name)

  def reduced(self, x: Nodes) -> jax.Array:
    """Nodes `x [N, C, width]` reduced to `[G, C, P]` float32."""
    if self.reduction == "per_node":
      return pooling.total(self.exact(1, name="node")(x))
    if self.reduction == "lstm":
      return LastState(self.width, self.exact, name="lstm")(x)
    if self.reduction == "transformer":
      layer = TransformerLayer(self.width, self.heads, linear=self.exact, epsilon=1e-6,
                               name="transformer")
      return pooling.scaled_sum(between_nodes(layer, x))
    columns = (pooling.scaled_sum, pooling.mean, pooling.largest)
    return jnp.concatenate([pool(x) for pool in columns], axis=-1)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    if self.reduction == "per_node":
      return readout[..., 0]
    return self.last(nn.relu(self.hidden(readout)))[..., 0]


def _glorot(inputs: int) -> Callable[..., jax.Array]:
  """Keras' initialiser of kernels."""
  del inputs  # glorot_uniform takes them from the shape
  return nn.initializers.glorot_uniform()


def _zeros(inputs: int) -> Callable[..., jax.Array]:
  """Keras' initialiser of biases."""
  del inputs
  return nn.initializers.zeros


def between_nodes(layer: TransformerLayer, x: Nodes) -> Nodes:
  """A transformer layer over the nodes of each graph, for every configuration by itself."""
  tokens = jnp.swapaxes(x.everywhere(), 0, 1)
  tokens = layer(tokens, mask=same_graph(x.slates)[None, None])
  return x.slates.from_all(jnp.swapaxes(tokens, 0, 1), x)


class LastState(nn.Module):
  """The state of an LSTM behind the last node of each graph.

  Nodes come in the order of the file, in which operands are before their users. The LSTM and
  its initial parameters are Keras':

      i, f, o = sigmoid(W x + U h + b), sigmoid(...), sigmoid(...)    c <- f c + i tanh(...)
      h <- o tanh(c)

  Attributes:
    features: width of the state.
    linear: makes linear layers by their width.
  """

  features: int
  linear: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, x: Nodes) -> jax.Array:
    """`[G, C, features]` float32 of `x [N, C, F]`; a graph without nodes has no meaning."""
    slates, size = x.slates, 4 * self.features
    # The half of the nodes is one product in front of the scan, the half of the state one a step.
    inputs = self.linear(size, bias_init=_forget_one, name="inputs")(x.everywhere())
    kernel = self.param("state", nn.initializers.orthogonal(), (self.features, size), jnp.float32)
    is_first = jnp.diff(slates.graph_of, prepend=-1) != 0

    def step(state, node):
      own, first = node
      hidden, cell = (jnp.where(first, 0, part) for part in state)
      gates = own + hidden @ kernel
      i, f, new, o = jnp.split(gates, 4, axis=-1)
      cell = nn.sigmoid(f) * cell + nn.sigmoid(i) * jnp.tanh(new)
      hidden = nn.sigmoid(o) * jnp.tanh(cell)
      return (hidden, cell), hidden

    start = (jnp.zeros((inputs.shape[1], self.features)),) * 2
    _, states = jax.lax.scan(step, start, (inputs.astype(jnp.float32), is_first))
    last = jnp.cumsum(slates.batch.graph.n_node)[: slates.graphs] - 1
    return states[jnp.maximum(last, 0)]


def _forget_one(inputs: int) -> Callable[..., jax.Array]:
  """Biases of an LSTM in Keras: 1 for the gate that forgets, the second of four, else 0."""
  del inputs

  def init(key, shape, dtype=jnp.float32):
    del key
    quarter = shape[0] // 4
    return jnp.zeros(shape, dtype).at[quarter : 2 * quarter].set(1)

  return init
