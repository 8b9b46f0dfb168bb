"""Batches of awkward graphs, node features in all forms, and slow formulas of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.support import comparing, parts, random_graphs
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn import aggregation
from tpugraphs_jax.nn.nodes import EVERYWHERE, Nodes, NONE, Slates

CONFIGS, WIDTH = 3, 4
HOPS = 2
DIRECTIONS = (aggregation.OPERANDS, aggregation.USERS, aggregation.BOTH)


# Batches.


def raw_layouts() -> list[OpGraph]:
  """Five programs.

  One is a single node, one has an isolated configurable node, one no configurable node. Some
  edges occur twice, and a quarter of the nodes is isolated (`random_graphs.random_edges`).
  """
  rng = np.random.default_rng(0)
  make = functools.partial(random_graphs.layout_graph, rng)
  return [
    make(nodes=9, edges=14, config_nodes=[2, 0], configs=7),
    make(nodes=1, edges=0, config_nodes=[0], configs=1),
    make(nodes=16, edges=22, config_nodes=[15, 3], configs=2),
    make(nodes=6, edges=8, config_nodes=rng.permutation(6), configs=5),
    make(nodes=5, edges=6, config_nodes=[], configs=3),
  ]


def raw_tiles() -> list[OpGraph]:
  """Three kernels, one of a single node."""
  rng = np.random.default_rng(2)
  return [
    random_graphs.tile_graph(rng, nodes=nodes, edges=edges, configs=count)
    for nodes, edges, count in ((9, 14, 7), (1, 0, 1), (6, 9, 2))
  ]


def layout_batch(
  *,
  spare: int = 2,
  hops: int = HOPS,
  slots: int = 1,
  graphs: Sequence[OpGraph] = (),
  configs: int = CONFIGS,
  reuse: bool = True,
) -> LayoutBatch:
  """The programs in one batch with an empty slate, padding nodes and padding edges.

  Without reuse every node has values of its own for each configuration, `[N, C, F]`.
  """
  prepared = [
    random_graphs.prepare(graph, hops=hops, slots=slots, reuse=reuse)
    for graph in graphs or raw_layouts()
  ]
  return random_graphs.batch_of(prepared, configs, spare=spare, graphs=len(prepared) + 1)


def tile_batch(*, spare: int = 2, graphs: Sequence[OpGraph] = ()) -> TileBatch:
  """The kernels in one batch with an empty slate, padding nodes and padding edges."""
  prepared = [batching.prepare(graph, graph.node_feat, slots=1) for graph in graphs or raw_tiles()]
  batch = random_graphs.batch_of(prepared, CONFIGS, spare=spare, graphs=len(prepared) + 1)
  feat = np.random.default_rng(4).random((*batch.config_mask.shape, 24)).astype(np.float32)
  return batch._replace(config_feat=np.where(batch.config_mask[..., None], 4 * feat, 0))


def batches_of(*devices: Sequence[OpGraph]) -> list[LayoutBatch]:
  """A batch of the given programs for each device, all of one shape."""
  prepared = [[random_graphs.prepare(graph, hops=0) for graph in graphs] for graphs in devices]
  sizes = [batching.total_sizes(graphs) for graphs in prepared]
  budget = random_graphs.common_budget(sizes, spare=1)
  return [
    random_graphs.assemble(
      random_graphs.slots_of(graphs, CONFIGS), budget, graphs=len(graphs), configs=CONFIGS
    )
    for graphs in prepared
  ]


def on_devices(function: Callable[[Any], Any], batches: Sequence[Any]) -> np.ndarray:
  """`function` of every batch on a device of its own."""
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
  return np.asarray(jax.jit(jax.vmap(function, axis_name=parallel.DEVICES))(stacked))


BATCH, TILES = layout_batch(), tile_batch()
GRAPH = BATCH.graph
GRAPHS = len(BATCH.target)
NODES = len(BATCH.block_mask)
OF_GRAPH = np.repeat(np.arange(len(GRAPH.n_node)), GRAPH.n_node)
REAL = OF_GRAPH < GRAPHS
EDGES = int(GRAPH.n_edge[:-1].sum())


def slow_configs(batch: Any, elsewhere: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
  """The configuration of every node, `[N, C, 18 or 24]`, and which nodes have a layout `[N]`.

  Nodes without a layout have `elsewhere`, padding configurations of other nodes have NaN.
  """
  graph, configs = batch.graph, batch.config_mask.shape[1]
  count = len(graph.nodes["opcode"])
  if hasattr(batch, "config_feat"):
    result, node = np.zeros((count, configs, 24)), 0
    for number, size in enumerate(graph.n_node[:-1]):
      result[node : node + size] = batch.config_feat[number]
      node += size
    return result, np.zeros(count, bool)
  result, configured = np.full((count, configs, 18), elsewhere), np.zeros(count, bool)
  for node, row_ids in zip(batch.by_hop.nodes[0], batch.row_id):
    if (row_ids < len(batch.rows)).any():
      configured[node] = True
      for config, row in enumerate(row_ids):
        result[node, config] = batch.rows[row] if row < len(batch.rows) else np.nan
  return result, configured


def neighbours(direction: str, batch: Any = BATCH) -> list[list[int]]:
  """Of every node the nodes that it receives from, one entry per edge."""
  heard = [[] for _ in batch.graph.nodes["opcode"]]
  edges = int(batch.graph.n_edge[:-1].sum())
  for consumer, producer in zip(batch.graph.receivers[:edges], batch.graph.senders[:edges]):
    if direction in ("operands", "both"):
      heard[consumer].append(producer)
    if direction in ("users", "both"):
      heard[producer].append(consumer)
  return heard


# Node features.


def random(*shape: int, seed: int = 0) -> np.ndarray:
  """Normal numbers, float32."""
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def features(hop: int, width: int = WIDTH, seed: int = 0) -> tuple[np.ndarray | None, ...]:
  """The halves `shared` and `varying` of random features of `BATCH` in one form."""
  shared = random(NODES, 1, width, seed=seed)
  if hop == NONE:
    return shared, None
  if hop == EVERYWHERE:
    return None, random(NODES, CONFIGS, width, seed=seed)
  rows = sum(len(nodes) for nodes in BATCH.by_hop.nodes[: hop + 1])
  return shared, random(rows, CONFIGS, width, seed=seed + 1)


def nodes_of(halves: Sequence[Any], hop: int, batch: Any = BATCH) -> Nodes:
  """`features` as `Nodes`."""
  return Nodes(
    Slates.of(batch), *(None if part is None else jnp.asarray(part) for part in halves), hop
  )


def full_of(halves: Sequence[Any], hop: int) -> np.ndarray:
  """The tensor `[N, C, F]` that `features` stand for, row by row."""
  shared, varying = halves
  if hop == EVERYWHERE:
    return varying
  full = np.repeat(shared, CONFIGS, axis=1)
  if hop != NONE:
    for node, row in zip(np.concatenate(BATCH.by_hop.nodes[: hop + 1]), varying, strict=True):
      if node < NODES:
        full[node] = row
  return full


FORMS = (NONE, 0, 1, EVERYWHERE)


def apply_to(
  module: nn.Module, hop: int, *more: Any, seed: int = 0, scale: float = 0.5, **options: Any
) -> tuple[Any, np.ndarray, np.ndarray]:
  """Parameters of a module, random features `[N, C, F]` and the module's result of them.

  The module takes `Nodes` in the form `hop`, and the result is brought to `[N, C, F']`.
  """
  halves = features(hop, seed=seed)
  call = lambda params, halves: module.apply(
    {"params": params}, nodes_of(halves, hop), *more, **options
  )
  shapes = jax.eval_shape(
    lambda halves: module.init(jax.random.key(0), nodes_of(halves, hop), *more, **options), halves
  )
  params = random_like(shapes.get("params", {}), scale)

  @jax.jit
  def run(params, halves):
    found = call(params, halves)
    return found.everywhere() if isinstance(found, Nodes) else found

  found = np.asarray(run(params, halves))
  if found.shape[:2] == (NODES, 1):
    found = np.repeat(found, CONFIGS, axis=1)
  return params, full_of(halves, hop), found


def random_like(shapes: Any, scale: float = 0.5, seed: int = 7) -> Any:
  """Normal numbers in the shapes of parameters, biases too."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.normal(0, scale, leaf.shape).astype(np.float32), shapes)


def params_of(module: nn.Module, *inputs: Any, scale: float = 0.5) -> Any:
  """Random parameters of a module for these inputs."""
  shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))
  return random_like(shapes.get("params", {}), scale)


def check(found: np.ndarray, expected: np.ndarray, tolerance: float = 2e-5) -> None:
  """A result is the expected `[N, C, F]` on nodes of graphs."""
  assert found.shape == expected.shape
  np.testing.assert_allclose(found[REAL], expected[REAL], rtol=tolerance, atol=tolerance)


# Slow formulas.


def members() -> Iterator[tuple[int, np.ndarray]]:
  """Every graph with its nodes."""
  for graph in range(GRAPHS):
    yield graph, np.flatnonzero(OF_GRAPH == graph)


def each_graph(function: Callable[[np.ndarray], np.ndarray], width: int = WIDTH) -> np.ndarray:
  """`[N, C, width]` from a function of the node numbers of one graph."""
  result = np.zeros((NODES, CONFIGS, width))
  for _, nodes in members():
    if len(nodes):
      result[nodes] = function(nodes)
  return result


def dense(x: np.ndarray, params: Any) -> np.ndarray:
  """A linear layer."""
  return x @ params["kernel"] + params.get("bias", 0)


def sigmoid(x: np.ndarray) -> np.ndarray:
  """The logistic function."""
  return 1 / (1 + np.exp(-x))


def slow_mean(x: np.ndarray, direction: str, batch: Any = BATCH) -> np.ndarray:
  """The mean of each node's neighbours, 0 without any."""
  return np.stack(
    [
      np.mean([x[u] for u in heard], axis=0) if heard else np.zeros_like(x[0])
      for heard in neighbours(direction, batch)
    ]
  )


def slow_normal(x: np.ndarray, axis: int, epsilon: float = 1e-5) -> np.ndarray:
  """Mean 0 and variance 1 over an axis."""
  return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + epsilon)


def slow_layer_norm(x: np.ndarray, params: Any, epsilon: float = 1e-6) -> np.ndarray:
  """A layer norm with scale and bias."""
  return slow_normal(x, -1, epsilon) * params["scale"] + params["bias"]


def softmax(logits: np.ndarray) -> np.ndarray:
  """Softmax over the last axis."""
  power = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return power / power.sum(axis=-1, keepdims=True)


def slow_attention(x: np.ndarray, to: np.ndarray, params: Any, heads: int) -> np.ndarray:
  """Softmax attention of tokens `x [L, F]` to `to [M, F]`, head by head."""
  query, key, value = (
    dense(tokens, params[name]) for name, tokens in (("query", x), ("key", to), ("value", to))
  )
  size, heard = query.shape[1] // heads, []
  for head in range(heads):
    block = slice(head * size, (head + 1) * size)
    weights = softmax(query[:, block] @ key[:, block].T / np.sqrt(size))
    heard.append(weights @ value[:, block])
  return dense(np.concatenate(heard, axis=1), params["out"])


def elu_and_one(x: np.ndarray) -> np.ndarray:
  """The kernel of linear attention."""
  return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def unit_and_one(x: np.ndarray) -> np.ndarray:
  """The kernel of DIFFormer."""
  unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
  return np.concatenate([np.ones_like(x[..., :1]), unit], axis=-1)


def slow_kernel_attention(
  x: np.ndarray, params: Any, kernel: Callable[[np.ndarray], np.ndarray], heads: int
) -> np.ndarray:
  """Nodes `x [N, ..., F]` attend to all nodes of their graph by sums over pairs."""
  query, key, value = (
    dense(x, params[name]).reshape(*x.shape[:-1], heads, -1) for name in ("query", "key", "value")
  )
  result = np.zeros(x.shape)
  for _, nodes in members():
    weights = np.einsum("i...hd,j...hd->ij...h", kernel(query[nodes]), kernel(key[nodes]))
    weights /= weights.sum(axis=1, keepdims=True)
    heard = np.einsum("ij...h,j...hf->i...hf", weights, value[nodes])
    result[nodes] = heard.reshape(-1, *x.shape[1:])
  return result


def slow_appnp(x: np.ndarray, params: Any, direction: str) -> np.ndarray:
  """A linear layer, `HOPS` rounds of normalised sums, and a restart after each."""
  start = z = dense(x, params["dense"])
  heard = neighbours(direction)
  root = [np.sqrt(1 + len(of)) for of in heard]
  for _ in range(HOPS):
    moved = [
      sum((z[u] / root[u] for u in of), z[v] / root[v]) / root[v] for v, of in enumerate(heard)
    ]
    z = 0.9 * np.stack(moved) + 0.1 * start
  return z


def slow_transformer(
  x: np.ndarray, to: np.ndarray, params: Any, heads: int, epsilon: float = 1e-5
) -> np.ndarray:
  """A transformer layer on tokens `x [L, F]` that attend to `to [M, F]`."""
  x = slow_layer_norm(x + slow_attention(x, to, params["heads"], heads), params["norm_0"], epsilon)
  hidden = np.maximum(dense(x, params["hidden"]), 0)
  return slow_layer_norm(x + dense(hidden, params["out"]), params["norm_1"], epsilon)


def slow_inputs(batch: Any, table: np.ndarray) -> np.ndarray:
  """Features and opcode vectors of nodes, `[N, F]`."""
  opcode = table[np.asarray(batch.graph.nodes["opcode"])]
  return np.concatenate([np.asarray(batch.graph.nodes["feat"]), opcode], axis=1)


# Whole networks.


def assert_alike(network: Any, first: Any, second: Any, roundings: int = 1) -> None:
  """Asserts equal scores and gradients in training of two batches, up to rounding.

  Args:
    network: of both.
    one: a batch.
    other: with slates and places of configurations as in `one`.
    roundings: of sums of a thousand terms.
  """
  params = parts.params_of(network, first)
  weight = random(*first.target.shape, seed=3)

  def loss(params, batch):
    scores = network.apply(
      {"params": params}, batch, train=True, rngs={"dropout": jax.random.key(5)}
    )
    scores = jnp.where(batch.config_mask, scores, 0)
    return (scores * weight).sum(), scores

  @jax.jit
  def both(params):
    return [
      jax.grad(functools.partial(loss, batch=batch), has_aux=True)(params)
      for batch in (first, second)
    ]

  expected, found = both(params)
  comparing.assert_trees_close(found, expected, roundings * comparing.rounding(1_000))
