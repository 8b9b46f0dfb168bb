"""S2GNN: message passing and filters on the eigenvectors of a directed Laplacian, in turns.

    features, opcode, positions and configuration of a node -> sum of linear layers 128
      -> linear 96 twice, each with dropout and PReLU
      -> message passing -> filter -> message passing -> filter -> message passing
      -> sums over nodes and over configurable nodes, layer norm
         amplitudes of both filters and of a third one, layer norm
      -> linear 96, PReLU -> linear 1

The magnetic Laplacian of a program with adjacency A (consumers in rows), A + A^T with entries above
0 set to 1 as S, and degrees D of S is

    L = I - D^-1/2 (S * exp(2 pi i q (A - A^T))) D^-1/2 = V diag(values) V^H

with the 100 smallest eigenvalues and q = 2e-5. Directions are in the phases of V. A filter is

    y = V w(values) act(W ... act(W (g(values) * V^H f(x))))        act(z) = z sigmoid(|z|)

with one channel of g for each of x, from attention between the eigenvalues, a window w, and |z| the
norm over eigenvalues. f multiplies channels by complex vectors of the opcode; real and imaginary
part of y are added with learned factors. The amplitude is the norm over eigenvalues. The positions

    p_j = sum over neighbours u of sum over k of h_jk V_k conj(V_uk)

have weights h = softmax(-(value_j - value_k)^2 / 1e-7). All of these are the same for any
eigenvectors of a repeated eigenvalue. A message from v to u is divided by the root of (operands of
u + 1)(users of v + 1), with a half of the channels for operands and for users each, and a node
receives from itself.

Published: eigenvectors are 0 beyond the largest connected component, and eigenvalues equal to the
101st are left out, so that no eigenspace is cut. Neither messages nor filters have residuals.
Opcode vectors have at most length 1; learned factors, initially 5, scale them and configurations.

Different here: messages have no features of edges (places of operands and of tuples), and nodes 39
columns less, because the data set has no protobufs. The window is 0 from the cutoff on, as in the
paper; in the public code its cosine goes on, and becomes positive again. Absent eigenvalues have no
part in positions; in the public code they have the weight of an eigenvalue 0.

Source: Geisler et al., "Spatio-Spectral Graph Neural Networks" (NeurIPS 2024, arXiv 2405.19121),
sigeisler/s2gnn with configs/tpugraphs/tpugraphs-s2gnn-layout-mix-10000.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import hashlib
from pathlib import Path
from typing import NamedTuple

from absl import logging
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.sparse
from scipy.sparse import csgraph, linalg
import scipy.special

from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data import npz
from tpugraphs_jax.data.batching import LayoutBatch
from tpugraphs_jax.data.features import BLOCKS
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import files
from tpugraphs_jax.nn import attention, pooling
from tpugraphs_jax.nn.aggregation import degree, OPERANDS, USERS
from tpugraphs_jax.nn.dropout import Dropout
from tpugraphs_jax.nn.embeddings import Opcodes
from tpugraphs_jax.nn.layers import EPSILON, Layouts, Linear
from tpugraphs_jax.nn.nodes import concat, neighbours, Nodes, Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System

# Features.

# Columns with logarithms: all from the shape on but three low paddings, their sum and is_stable.
_WIDE = np.r_[21:61, 64:67, 68:133, 134:NODE_FEATURES]


@BLOCKS.register("logarithms_from_one")
def logarithms_from_one(graph: OpGraph) -> np.ndarray:
  """The released columns, `[N, 140]` float32: 1 + log(x) for x from 1 on in 114 of them."""
  feat = graph.node_feat[:, :NODE_FEATURES].astype(np.float32)
  wide = feat[:, _WIDE]
  feat[:, _WIDE] = np.where(wide >= 1, 1 + np.log(np.maximum(wide, 1)), wide)
  return feat


FREQUENCIES = 100  # most eigenvalues of a graph
POTENTIAL = 2e-5  # q: the phase of an edge, in turns
_NEAR = 1e-7  # square of the width of h
_ABSENT = -1.0  # in place of an eigenvalue
# Of graphs with more nodes the eigenvectors are found by shift and invert, and kept on the disk.
_DENSE_NODES = 512
_SHIFT = -1e-3  # below all eigenvalues
_AGAIN, _SAME = 8, 1e-7  # eigenvalues of a further search, and the difference of equal ones
# Columns of `spectrum_columns`: real and imaginary parts of positions and eigenvectors, then the
# eigenvalues of the graph and the bound.
_PARTS = tuple(slice(part * FREQUENCIES, (part + 1) * FREQUENCIES) for part in range(5))
COLUMNS = 5 * FREQUENCIES + 1


class Spectrum(NamedTuple):
  """The smallest eigenvalues of the magnetic Laplacian of a graph of N nodes.

  Attributes:
    values: `[k]` float64 ascending, 1 <= k <= FREQUENCIES.
    vectors: `[N, k]` complex64, orthonormal columns; 0 beyond the largest component.
    bound: the eigenvalue after the first FREQUENCIES; of a component without one the largest
      eigenvalue + 1.
  """

  values: np.ndarray
  vectors: np.ndarray
  bound: float


def phases(graph: OpGraph) -> scipy.sparse.csr_array:
  """`S * exp(2 pi i q (A - A^T))` of the module, `[N, N]` complex128."""
  consumer, producer = graph.edge_index[graph.edge_index[:, 0] != graph.edge_index[:, 1]].T
  ends = np.concatenate([consumer, producer]), np.concatenate([producer, consumer])
  signs = np.repeat([1.0, -1.0], len(consumer))
  shape = graph.num_nodes, graph.num_nodes
  flow = scipy.sparse.coo_array((signs, ends), shape).tocsr()  # keeps entries that add up to 0
  turns = np.exp(2j * np.pi * POTENTIAL * flow.data)
  return scipy.sparse.csr_array((turns, flow.indices, flow.indptr), shape)


def spectrum(graph: OpGraph) -> Spectrum:
  """The spectrum of a graph of at least one node; of large graphs it is kept in the user's cache.

  The 3,163 nodes of unet3d take 1.2 CPU seconds with OPENBLAS_NUM_THREADS=1, and more than ten
  times as much with two threads, which wait for each other.
  """
  if graph.num_nodes <= _DENSE_NODES:
    return _decompose(phases(graph))
  content = f"{graph.num_nodes} {FREQUENCIES} {POTENTIAL} {_SHIFT} {_AGAIN} ".encode()
  digest = hashlib.sha256(content + np.ascontiguousarray(graph.edge_index, np.int64).tobytes())
  path = files.cache() / "spectra" / f"{digest.hexdigest()}.npz"
  try:
    return _read(path, graph.num_nodes)
  except (FileNotFoundError, npz.NpzError):
    logging.info(f"{graph.name}: eigenvectors of {graph.num_nodes} nodes, to be kept in {path}")
  result = _decompose(phases(graph))
  with files.replacing(path, "wb") as file:
    np.savez(file, **result._asdict())
  return result


def _read(path: Path, nodes: int) -> Spectrum:
  with npz.NpzArchive(path) as archive:
    result = Spectrum(*(archive.read(name) for name in Spectrum._fields))
  shapes = [np.shape(array) for array in result]
  if shapes != [(len(result.values),), (nodes, len(result.values)), ()]:
    raise npz.NpzError(f"{path} has arrays {shapes}, expected a spectrum of {nodes} nodes")
  return result._replace(bound=float(result.bound))


def _decompose(phase: scipy.sparse.csr_array) -> Spectrum:
  """The spectrum of a graph with these phases `[N, N]`."""
  links = np.maximum(np.diff(phase.indptr), 1)
  scale = scipy.sparse.diags_array(1 / np.sqrt(links))
  laplacian = (scipy.sparse.eye_array(len(links)) - scale @ phase @ scale).tocsr()
  component = csgraph.connected_components(abs(phase), directed=False)[1]
  inside = np.flatnonzero(component == np.bincount(component).argmax())
  values, vectors = _smallest(laplacian[inside][:, inside], min(len(inside), FREQUENCIES + 1))
  count, bound = len(values), values[-1] + 1
  if count > FREQUENCIES:
    count, bound = FREQUENCIES, values[-1]
    while count > 1 and np.isclose(values[count - 1], bound):
      count -= 1
  whole = np.zeros((len(links), count), np.complex64)
  whole[inside] = vectors[:, :count]
  return Spectrum(np.maximum(values[:count], 0), whole, float(bound))


def _smallest(matrix: scipy.sparse.csr_array, count: int) -> tuple[np.ndarray, np.ndarray]:
  """The smallest eigenvalues `[count]` of a Hermitian matrix, and its eigenvectors in columns.

  ARPACK may miss vectors of a repeated eigenvalue. It begins again, orthogonal to the vectors that
  are known, until it finds no smaller eigenvalue than the largest known one.
  """
  nodes = matrix.shape[0]
  if nodes <= _DENSE_NODES:
    return scipy.linalg.eigh(matrix.toarray(), subset_by_index=(0, count - 1))
  solve = linalg.splu((matrix - _SHIFT * scipy.sparse.eye_array(nodes)).tocsc()).solve
  rng, asked = np.random.default_rng(0), count
  values, vectors = np.zeros(0), np.zeros((nodes, 0), complex)
  while True:
    beside = lambda x: x - vectors @ (vectors.conj().T @ x)
    inverse = linalg.LinearOperator(
      matrix.shape, lambda x: beside(solve(beside(x))), dtype=vectors.dtype
    )
    more, found = linalg.eigsh(
      matrix, k=asked, sigma=_SHIFT, OPinv=inverse, v0=beside(rng.normal(size=nodes))
    )
    if len(values) and more.min() > values[count - 1] - _SAME:
      return values[:count], vectors[:, :count]
    values, vectors = np.concatenate([values, more]), np.concatenate([vectors, found], axis=1)
    order, asked = np.argsort(values), _AGAIN
    # ARPACK's vectors of a repeated eigenvalue need not be orthogonal.
    values, vectors = values[order], np.linalg.qr(vectors[:, order])[0]


def positions(graph: OpGraph, of_graph: Spectrum) -> np.ndarray:
  """The positions p of the module, `[N, k]` complex64."""
  linked = abs(phases(graph)).astype(np.float32)
  near = scipy.special.softmax(
    -(np.subtract.outer(of_graph.values, of_graph.values) ** 2) / _NEAR, 1
  )
  return (of_graph.vectors * (linked @ of_graph.vectors).conj()) @ near.astype(np.float32)


@BLOCKS.register("spectrum")
def spectrum_columns(graph: OpGraph) -> np.ndarray:
  """Positions and eigenvectors of nodes, eigenvalues of their graph: `[N, 501]` float32.

  The eigenvalues and the bound are the same for all nodes. Absent eigenvalues are -1.
  """
  columns = np.zeros((graph.num_nodes, COLUMNS), np.float32)
  if not graph.num_nodes:
    return columns
  of_graph = spectrum(graph)
  place = positions(graph, of_graph)
  count, parts = (
    len(of_graph.values),
    [place.real, place.imag, of_graph.vectors.real, of_graph.vectors.imag],
  )
  columns[:, _PARTS[4]] = _ABSENT
  for part, values in zip(_PARTS, [*parts, of_graph.values]):
    columns[:, part][:, :count] = values
  columns[:, -1] = of_graph.bound
  return columns


# Layers.


class Modes:
  """Eigenvectors of the graphs of a batch.

  Args:
    slates: slates of G graphs.
    columns: `[N, 501]` of `spectrum_columns`.

  Attributes:
    basis: real and imaginary parts of the eigenvectors, `[N, 1, 2 k]`.
    values: `[G, k]` eigenvalues, 0 where absent.
    is_real: `[G, k, 1]` mask of the eigenvalues.
    bound: `[G, 1]`.
  """

  def __init__(self, slates: Slates, columns: jax.Array):
    n_node = jnp.asarray(slates.batch.graph.n_node)
    first = (jnp.cumsum(n_node) - n_node)[: slates.graphs]
    of_graph = columns.at[first].get(mode="fill", fill_value=0)
    self.slates, self.nodes = slates, n_node[: slates.graphs]
    self.basis = slates.nodes(columns[:, _PARTS[2].start : _PARTS[3].stop])
    self.values = jnp.maximum(of_graph[:, _PARTS[4]], 0)
    self.is_real = (of_graph[:, _PARTS[4]] > _ABSENT)[..., None]
    self.bound = jnp.where(of_graph[:, -1:] > 0, of_graph[:, -1:], 1)  # of an empty slate: 1

  def transform(self, real: Nodes, imag: Nodes) -> tuple[jax.Array, jax.Array]:
    """`V^H x`, real and imaginary, `[G, C, k, F]` float32."""
    by_real, by_imag = (attention.graph_products(self.basis, x) for x in (real, imag))
    first, second = slice(0, FREQUENCIES), slice(FREQUENCIES, None)
    return (
      by_real[:, :, first] + by_imag[:, :, second],
      by_imag[:, :, first] - by_real[:, :, second],
    )

  def real_part(self, real: jax.Array, imag: jax.Array) -> Nodes:
    """The real part of `V y`, `[N, C, F]`, of `y [G, C, k, F]`."""
    return attention.times_graph(self.basis, jnp.concatenate([real, -imag], axis=2))

  def window(self, cutoff: float) -> jax.Array:
    """A Tukey window, `[G, 1, k, 1]`: 1 up to half of the cutoff, then a cosine to 0 at the cutoff.

    The bound of a graph is its cutoff where it is lower.
    """
    share = self.values / jnp.minimum(self.bound, cutoff)
    falling = jnp.cos(jnp.pi * (jnp.clip(share, 0.5, 1) - 0.5))
    return falling[:, None, :, None]


def square(real: jax.Array, imag: jax.Array) -> jax.Array:
  """The sum of `|y|^2` over eigenvalues of `y [G, C, k, F]`: `[G, C, F]`."""
  return jnp.sum(jnp.square(real) + jnp.square(imag), axis=2)


def norm(real: jax.Array, imag: jax.Array) -> jax.Array:
  """The root of `square`, `[G, C, 1, F]`; its gradient at 0 is 0."""
  total = square(real, imag)[:, :, None]
  return jnp.where(total > 0, jnp.sqrt(jnp.where(total > 0, total, 1)), 0)


class Frequencies(nn.Module):
  """Vectors of eigenvalues, which attend to each other.

  Attributes:
    features: width of a vector.
    heads: number of heads of the attention.
  """

  features: int
  heads: int

  @nn.compact
  def __call__(self, modes: Modes) -> jax.Array:
    """The vectors of all eigenvalues, `[G, k, features]` float32."""
    values, is_real = modes.values[..., None], modes.is_real
    mean = jnp.broadcast_to(values.mean(axis=1, keepdims=True), values.shape)
    share = is_real.sum(axis=1, keepdims=True) / jnp.maximum(modes.nodes, 1)[:, None, None]
    scale = self.param("scale", nn.initializers.constant(10.0), (), jnp.float32)
    inputs = jnp.concatenate([values, mean, jnp.broadcast_to(share, values.shape)], axis=-1)
    x = nn.relu(Linear(self.features, name="linear")(scale * inputs))
    mask = jnp.broadcast_to(is_real[:, None, None, :, 0], (len(x), 1, FREQUENCIES, FREQUENCIES))
    attend = attention.SoftmaxAttention(self.features, self.heads, name="attention")
    return x + nn.LayerNorm(epsilon=EPSILON, name="norm")(attend(x, x, mask))


class Gains(nn.Module):
  """`g(values) * V^H f(x)`, the first half of a filter."""

  @nn.compact
  def __call__(self, x: Nodes, modes: Modes, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maps `x [N, C, F]` to its filtered transform, real and imaginary, `[G, C, k, F]` float32."""
    slates, graph = x.slates, x.slates.batch.graph
    times_opcode = lambda name: (
      x * slates.nodes(Opcodes(x.width, max_norm=1.0, name=name)(graph).astype(x.dtype))
    )
    real, imag = modes.transform(times_opcode("real"), times_opcode("imag"))
    gain = Linear(x.width, name="gain")(frequencies) * modes.is_real
    return gain[:, None] * real, gain[:, None] * imag


class Filter(nn.Module):
  """A filter of the module.

  Attributes:
    layers: number of linear layers W.
    cutoff: of the window.
  """

  layers: int
  cutoff: float

  @nn.compact
  def __call__(self, x: Nodes, modes: Modes, frequencies: jax.Array) -> tuple[Nodes, jax.Array]:
    """Maps `x [N, C, F]` to `[N, C, F]` and the amplitudes `[G, C, F]`, squared."""
    real, imag = Gains(name="gains")(x, modes, frequencies)
    for number in range(self.layers):
      mix = Linear(x.width, use_bias=False, name=f"mix_{number}")
      real, imag = mix(real), mix(imag)
      gate = nn.sigmoid(norm(real, imag))
      real, imag = gate * real, gate * imag
    window = modes.window(self.cutoff)
    real, imag = window * real, window * imag
    factor = self.param("factor", nn.initializers.ones, (2, x.width), jnp.float32)
    a, b = factor[:, None, None, None]
    # The imaginary part of V y is the real part of V (-i y).
    y = modes.real_part(a * real + b * imag, a * imag - b * real)
    return y.map(lambda rows: rows.astype(x.dtype)), square(real, imag)


class Messages(nn.Module):
  """Message passing in both directions: `[N, C, F]` to `[N, C, features]`.

  Attributes:
    features: width of the result, even.
    linear: creates a linear layer of a width.
  """

  features: int
  linear: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, x: Nodes) -> Nodes:
    count = lambda side: jnp.sqrt(1 + degree(x.slates.batch.adjacency, side, x.slates.num_nodes))
    halves, roots = [], {side: count(side) for side in (OPERANDS, USERS)}
    for side, opposite in ((OPERANDS, USERS), (USERS, OPERANDS)):
      sent = self.linear(self.features // 2, use_bias=False, name=side)(x).divide(roots[opposite])
      halves.append(neighbours(sent, side, self_loops=True).divide(roots[side]))
    bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
    return concat(*halves).map(lambda rows: rows + bias.astype(rows.dtype)[None, None])


# The network.

_GAIN = 5.0  # initial factor of opcode and configuration
_LEAST = 1e-9  # added to squared amplitudes


@base.LAYOUT_MODELS.register("S2GNN")
class S2GNN(System):
  """S2GNN on layouts."""

  op_embed_dim: int = option(128, "width of the opcode vector and of the first layers", least=1)
  width: int = option(96, "width of nodes, a multiple of 2 and of the heads", least=1)
  rounds: int = option(3, "rounds of message passing; all but the last precede a filter", least=1)
  filter_layers: int = option(2, "linear layers of a filter", least=0, most=MOST_LAYERS)
  heads: int = option(4, "heads of the attention between eigenvalues", least=1)
  cutoff: float = option(0.06, "smallest eigenvalue that a filter leaves out", above=0)
  dropout: float = option(0.25, "dropout rate", least=0, below=1)
  residual: bool = option(False, "add the input of a filter to its result (published: no)")

  reads = ("spectrum",)
  sees_whole_graph = True

  def __post_init__(self):
    super().__post_init__()
    if self.width % 2 or self.width % self.heads:
      raise ValueError(
        f"model.width is {self.width}, expected a multiple of 2 and of model.heads, {self.heads}"
      )

  @property
  def hops(self) -> int:
    return 1  # all nodes differ after the first filter

  @property
  def max_norms(self) -> Mapping[tuple[str, ...], float]:  # type: ignore[override]
    """The tables of opcodes: of the nodes, and two of every filter."""
    filters = [(f"filter_{number}", "gains") for number in range(self.rounds - 1)]
    parts = [(*path, part) for path in (*filters, ("readout",)) for part in ("real", "imag")]
    return {(*path, "embedding", "table"): 1.0 for path in (("opcodes",), *parts)}

  def setup(self):
    self.hidden, self.last = self.exact(self.width), self.exact(1)
    self.prelu = nn.PReLU(negative_slope_init=0.25)

  @nn.compact
  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """Sums over nodes and amplitudes of filters, `[G, C, (rounds + 2) width]` float32."""
    slates, feat = Slates.of(batch), jnp.asarray(batch.graph.nodes["feat"])
    modes = Modes(slates, feat[:, -COLUMNS:])
    activate = lambda x, name: x.map(nn.PReLU(negative_slope_init=0.25, name=f"{name}_prelu"))
    x = self.encode(slates, feat)
    for name in ("first", "second"):
      x = activate(Dropout(self.dropout)(self.linear(self.width, name=name)(x), train=train), name)

    frequencies, squares = Frequencies(self.width, self.heads, name="frequencies")(modes), []
    for number in range(self.rounds):
      x = Messages(self.width, self.linear, name=f"messages_{number}")(x)
      x = Dropout(self.dropout)(activate(x, f"messages_{number}"), train=train)
      if number < self.rounds - 1:
        filtered = Filter(self.filter_layers, self.cutoff, name=f"filter_{number}")
        y, amplitude = filtered(x, modes, frequencies)
        y = Dropout(self.dropout)(y, train=train)
        x = x + y if self.residual else y
        squares.append(amplitude)
    window = modes.window(jnp.inf)
    real, imag = Gains(name="readout")(x, modes, frequencies)
    squares.append(square(window * real, window * imag))
    amplitudes = jnp.sqrt(jnp.concatenate(squares, axis=-1) + _LEAST) - jnp.sqrt(_LEAST)
    sums = [pooling.total(x), pooling.total(x, configurable=True)]
    norm = lambda name: nn.LayerNorm(epsilon=EPSILON, name=name)
    parts = [norm("norm")(jnp.concatenate(sums, axis=-1)), norm("amplitude_norm")(amplitudes)]
    return Dropout(self.dropout)(jnp.concatenate(parts, axis=-1), train=train)

  def encode(self, slates: Slates[LayoutBatch], feat: jax.Array) -> Nodes:
    """The sum of linear layers on each kind of feature, `[N, C, op_embed_dim]`."""
    rows, init = jnp.asarray(slates.batch.rows), nn.initializers.constant(_GAIN)
    op_gain = self.param("op_weights", init, (), jnp.float32)
    config_gain = self.param("config_weights", init, (rows.shape[1],), jnp.float32)
    linear = lambda name: self.linear(self.op_embed_dim, name=name)
    opcode = Opcodes(self.op_embed_dim, max_norm=1.0, name="opcodes")(slates.batch.graph)
    place = feat[:, -COLUMNS:][:, : _PARTS[1].stop]
    static = linear("features")(feat[:, :-COLUMNS]) + linear("positions")(place)
    layouts = Layouts(slates, rows * config_gain[None]).map(linear("layouts"))
    return slates.nodes(static + (op_gain * opcode).astype(static.dtype)) + layouts

  def score(self, readout: jax.Array) -> jax.Array:
    """Scores `[...]` float32 of readouts `[..., (rounds + 2) width]`."""
    return self.last(self.prelu(self.hidden(readout)))[..., 0]
