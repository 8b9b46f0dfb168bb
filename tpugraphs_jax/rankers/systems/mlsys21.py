"""The kernel model of "A Learned Performance Model for TPUs" (MLSys 2021).

    features and opcode of a node, tile -> linear -> rounds along edges -> reduction over nodes
      -> MLP -> score

Published: the rounds are GraphSAGE or graph attention. The reductions are `per_node` (the sum of a
score per node), `columns` (sums, means and maxima), `lstm` (over nodes in topological order) and
`transformer`. Guesses, because not published: widths, and one kernel for both directions of edges.
The paper's optional estimates of work (operations, bytes read and written, transcendental
functions) are not in the data set: the block `kernel_work` computes them from shapes.

The paper's code was written in TensorFlow and is not public. Layers are initialised as in Keras,
except queries, keys and values of the transformer, which are as in PyTorch.
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
from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data.batching import TileBatch
from tpugraphs_jax.data.features import BLOCKS, contraction_operands
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.aggregation import BOTH
from tpugraphs_jax.nn.attention import between_nodes, TransformerLayer
from tpugraphs_jax.nn.conv import Gatv2, Sage
from tpugraphs_jax.nn.embeddings import OpcodeEmbedding
from tpugraphs_jax.nn.layers import Tiles
from tpugraphs_jax.nn.nodes import Nodes, Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System

REDUCTIONS = ("per_node", "columns", "lstm", "transformer")
ROUNDS = ("sage", "attention")
_HEADS = 4  # of attention, along edges and in the transformer; not published
_KERAS = {"kernel_init": nn.initializers.glorot_uniform(), "bias_init": nn.initializers.zeros}

# Features.

# Instructions with one operation per element of their result.
_TRANSCENDENTAL = (
  "atan2 cbrt cosine exponential exponential-minus-one log log-plus-one logistic power rsqrt sine "
  "sqrt tan tanh"
).split()
_ARITHMETIC = (
  "abs add and ceil clamp compare convert divide floor is-finite maximum minimum multiply negate "
  "not or remainder round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic "
  "shift-right-logical sign subtract xor"
).split()
_REDUCE_OPCODES = ("reduce", "reduce-window")
_TYPE_BYTES = np.array(list(map(operator.attrgetter("bytes"), ELEMENT_TYPES)), np.float64)


@BLOCKS.register("kernel_work")
def kernel_work(graph: OpGraph) -> np.ndarray:
  """Estimates of the work of a kernel, equal for all of its nodes, `[N, 4]` float32.

  Columns: operations, bytes of parameters, bytes of results, values of transcendental functions. An
  element-wise instruction has one operation per element, a reduction one per input element, a
  convolution or dot two per element of its result and term of the sum (dots are assumed to have no
  batch dimensions). Instructions of computations that reductions apply count too. The paper has
  such features from XLA; these are estimated from shapes and opcodes.
  """
  feat, ids = graph.node_feat.astype(np.float64), opcode_ids()
  is_in = lambda names: np.isin(graph.node_opcode, [ids[name] for name in names])
  elements = feat[:, NODE["shape"]][:, -1]
  size = elements * (feat[:, NODE["element_type"]] @ _TYPE_BYTES)  # tuples have none
  consumer, producer = graph.edge_index.T
  read = np.zeros(graph.num_nodes)
  np.maximum.at(read, consumer, elements[producer])
  operations = elements * is_in(_TRANSCENDENTAL + _ARITHMETIC) + read * is_in(_REDUCE_OPCODES)
  nodes, operands = contraction_operands(graph)
  left, right = np.where(operands >= 0, elements[operands], 0).T
  number = NODE["output_feature_dimension"].start
  dimension = np.clip(feat[nodes, number], 0, MAX_RANK - 1).astype(int)
  features = feat[nodes, NODE["shape"].start + dimension]
  of_dot = np.sqrt(left * right / np.maximum(elements[nodes], 1))
  of_convolution = right / np.maximum(features, 1)
  terms = np.where(graph.node_opcode[nodes] == ids["dot"], of_dot, of_convolution)
  operations[nodes] = 2 * elements[nodes] * terms
  is_result = feat[:, NODE["is_root"].start] > 0
  is_result[producer[(is_result & is_in(["tuple"]))[consumer]]] = True
  parameters, transcendental = size[is_in(["parameter"])], elements[is_in(_TRANSCENDENTAL)]
  parts = (operations, parameters, size[is_result], transcendental)
  work = np.array([part.sum() for part in parts], np.float32)
  return np.tile(work, (graph.num_nodes, 1))


# Network.


@base.TILE_MODELS.register("MLSys21")
class MLSys21(System):
  """The learned performance model."""

  op_embed_dim: int = option(64, "width of the opcode vector", least=1)
  width: int = option(64, "width of every layer", least=1)
  rounds: int = option(3, "number of rounds along edges", least=1, most=MOST_LAYERS)
  convolution: str = option("sage", "convolution along edges; attention is GATv2", one_of=ROUNDS)
  reduction: str = option("columns", "reduction over nodes", one_of=REDUCTIONS)

  def __post_init__(self):
    super().__post_init__()
    if self.width % _HEADS:
      raise ValueError(f"model.width is {self.width}, expected a multiple of {_HEADS}")

  @property
  def sees_whole_graph(self) -> bool:
    return self.reduction in ("lstm", "transformer")

  @property
  def linear(self) -> functools.partial:
    """Creates a linear layer of a width on nodes, initialised as in Keras."""
    return functools.partial(super().linear, **_KERAS)

  @property
  def exact(self) -> functools.partial:
    """Creates a linear layer of a width on readouts, initialised as in Keras."""
    return functools.partial(super().exact, **_KERAS)

  def setup(self):
    if self.reduction != "per_node":
      self.hidden, self.last = self.exact(self.width), self.exact(1)

  @nn.compact
  def embed(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """The reduction over the nodes of each kernel, `[G, C, P]` float32."""
    del train  # no dropout
    slates, graph = Slates.of(batch), batch.graph
    opcode = OpcodeEmbedding(self.op_embed_dim, name="opcodes")(graph)
    node = slates.nodes(jnp.asarray(graph.nodes["feat"]), opcode)
    tiles = Tiles(slates, jnp.asarray(batch.config_feat))
    x = self.linear(self.width, name="first")(node, tiles).map(nn.relu)
    for number in range(self.rounds):
      x = self.round(f"round_{number}")(x).map(nn.relu)
    return self.reduce(x)

  def round(self, name: str) -> nn.Module:
    """A convolution along edges."""
    if self.convolution == "sage":
      return Sage(self.width, (BOTH,), self.linear, name=name)
    return Gatv2(self.width, BOTH, _HEADS, self.linear, name=name)

  def reduce(self, x: Nodes) -> jax.Array:
    """Reduces nodes `x [N, C, width]` to `[G, C, P]` float32."""
    if self.reduction == "per_node":
      return pooling.total(self.exact(1, name="node")(x))
    if self.reduction == "lstm":
      return LastState(self.width, self.exact, name="lstm")(x)
    if self.reduction == "transformer":
      layer = TransformerLayer(
        self.width, _HEADS, linear=self.exact, epsilon=1e-6, name="transformer"
      )
      attend = lambda tokens, mask: layer(tokens, mask=mask)
      return pooling.scaled_sum(between_nodes(attend, x))
    columns = (pooling.scaled_sum, pooling.mean, pooling.largest)
    return jnp.concatenate([pool(x) for pool in columns], axis=-1)

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., P]`."""
    if self.reduction == "per_node":
      return readout[..., 0]
    return self.last(nn.relu(self.hidden(readout)))[..., 0]


class LastState(nn.Module):
  """The state of an LSTM after the last node of each graph.

  Nodes are in the order of the file, in which operands precede their users. The LSTM and its
  initialisation are as in Keras:

      i, f, o = sigmoid(W x + U h + b), sigmoid(...), sigmoid(...)    c <- f c + i tanh(...)
      h <- o tanh(c)

  Attributes:
    features: width of the state.
    linear: creates a linear layer of a width.
  """

  features: int
  linear: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, x: Nodes) -> jax.Array:
    """Maps `x [N, C, F]` to `[G, C, features]` float32; undefined for graphs without nodes."""
    slates, size = x.slates, 4 * self.features
    # `W x + b` is one product before the scan, `U h` a product in each step.
    inputs = self.linear(size, bias_init=_forget_one, name="inputs")(x.everywhere())
    kernel = self.param("state", nn.initializers.orthogonal(), (self.features, size), jnp.float32)
    is_first = jnp.diff(slates.graph_of, prepend=-1) != 0

    def step(state, node):
      gates, reset = node
      hidden, cell = (jnp.where(reset, 0, part) for part in state)
      gates += hidden @ kernel
      i, f, new, o = jnp.split(gates, 4, axis=-1)
      cell = nn.sigmoid(f) * cell + nn.sigmoid(i) * jnp.tanh(new)
      hidden = nn.sigmoid(o) * jnp.tanh(cell)
      return (hidden, cell), hidden

    start = (jnp.zeros((inputs.shape[1], self.features)),) * 2
    _, states = jax.lax.scan(step, start, (inputs.astype(jnp.float32), is_first))
    last = jnp.cumsum(slates.batch.graph.n_node)[: slates.graphs] - 1
    return states[jnp.maximum(last, 0)]


def _forget_one(key, shape, dtype=jnp.float32):
  """Biases of an LSTM in Keras: 1 for the forget gate, the second of four, else 0."""
  del key
  quarter = shape[0] // 4
  return jnp.zeros(shape, dtype).at[quarter : 2 * quarter].set(1)
