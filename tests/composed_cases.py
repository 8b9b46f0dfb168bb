"""Cases of the composed ranker, in its own form of node features."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import random_graphs

from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.nn.layers import Dense
from tpugraphs_jax.rankers.composed.split_nodes import SplitNodes, nodes_within
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.composed import inputs, nodes

CONFIGS, WIDTH = 3, 4
HOPS = 2
# For programs that run once, whose time is all compilation.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def features(rng: np.random.Generator, nodes: int, reads: tuple[str, ...]) -> np.ndarray:
  """Random node features `[nodes, F]` float32 with these blocks at the end."""
  parts = [rng.normal(size=(nodes, 4))]
  for name in reads:
    shape = nodes, inputs.READ_BLOCKS[name]
    parts.append(rng.integers(-1, 6, shape) if name == "node_layout" else rng.random(shape))
  return np.concatenate(parts, axis=1).astype(np.float32)


def raw_layouts() -> list:
  """Four programs; one is a single node, one has an isolated configurable node."""
  rng = np.random.default_rng(0)
  make = functools.partial(random_graphs.layout_graph, rng)
  return [make(nodes=9, edges=14, config_nodes=[2, 0], configs=7),
          make(nodes=1, edges=0, config_nodes=[0], configs=1),
          make(nodes=16, edges=22, config_nodes=[15, 3], configs=2),
          make(nodes=6, edges=8, config_nodes=rng.permutation(6), configs=5)]


def layout_batch(
    reads: tuple[str, ...] = (), *, spare: int = 2, hops: int = HOPS, slots: int = 1,
    graphs: list | None = None, configs: int = CONFIGS, reuse: bool = True,
) -> LayoutBatch:
  """The programs in one batch with an empty slate, padding nodes and padding edges.

  Without reuse every node has values of its own for each configuration, `[N, C, F]`.
  """
  rng, prepared = np.random.default_rng(1), []
  for graph in graphs or raw_layouts():
    graph = dataclasses.replace(graph, node_feat=features(rng, graph.num_nodes, reads))
    prepared.append(random_graphs.prepare(graph, hops=hops, slots=slots, reuse=reuse))
  budget = random_graphs.common_budget([batching.total_sizes(prepared)], spare=spare)
  return batching.assemble_layout(
      random_graphs.slots_of(prepared, configs), budget, graphs=len(prepared) + 1,
      configs=configs, transform=lambda rows: rows.astype(np.float32))


def tile_batch(reads: tuple[str, ...] = (), *, spare: int = 2, reuse: bool = True) -> TileBatch:
  """Three kernels, one of a single node, in a batch with an empty slate.

  Where tokens of dimensions are read, the nodes of a kernel have at most three distinct ones.
  Without reuse the transformer runs on the tokens of every node, equal or not.
  """
  rng, prepared = np.random.default_rng(2), []
  tokens = "dimension_tokens" in reads and sum(
      inputs.READ_BLOCKS[name] for name in reads if name != "random_walk")
  for nodes, edges, count in ((9, 14, 7), (1, 0, 1), (6, 9, 2)):
    graph = random_graphs.tile_graph(rng, nodes=nodes, edges=edges, configs=count)
    feat = features(rng, nodes, reads)
    if tokens:
      feat[:, -tokens:] = feat[rng.integers(min(nodes, 3), size=nodes), -tokens:]
    prepared.append(batching.prepare(graph, feat, slots=1, distinct=tokens * reuse))
  budget = random_graphs.common_budget([batching.total_sizes(prepared)], spare=spare)
  batch = batching.assemble_tile(
      random_graphs.slots_of(prepared, CONFIGS), budget, graphs=len(prepared) + 1,
      configs=CONFIGS, transform=lambda x: x)
  feat = rng.random((*batch.config_mask.shape, 24)).astype(np.float32)
  return batch._replace(config_feat=np.where(batch.config_mask[..., None], 4 * feat, 0))


def random_params(model: Any, batch: Any, seed: int = 0) -> Any:
  """Nonzero parameters, biases too. Scalars are above 0.5, because one is a divisor."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
  rng = np.random.default_rng(seed)
  draw = lambda shape: rng.normal(0, 0.3, shape) if shape else 0.5 + rng.random()
  return jax.tree.map(lambda leaf: np.asarray(draw(leaf.shape), np.float32), shapes)


def scores_and_gradients(
    kind: str, name: str, batches: list[Any], **options: Any
) -> list[tuple[np.ndarray, Any]]:
  """Scores `[G, C]` (0 for padding) and gradients in training, of each batch."""
  model = base.create_network(kind, name, **options)
  params = random_params(model, batches[0])
  weight = np.random.default_rng(3).normal(size=batches[0].target.shape).astype(np.float32)

  def loss(params, batch):
    scores = model.apply({"params": params}, batch, train=True, rngs={"dropout": jax.random.key(5)})
    scores = jnp.where(batch.config_mask, scores, 0)
    return (scores * weight).sum(), scores

  @functools.partial(jax.jit, compiler_options=QUICK)
  def each(params):
    return [jax.grad(functools.partial(loss, batch=batch), has_aux=True)(params)
            for batch in batches]

  return [(np.asarray(scores), grads) for grads, scores in each(params)]


BATCH = layout_batch()
GRAPH = BATCH.graph
NODES = len(BATCH.block_mask)
OF_GRAPH = np.repeat(np.arange(len(GRAPH.n_node)), GRAPH.n_node)
REAL = OF_GRAPH < len(BATCH.target)
EDGES = int(GRAPH.n_edge[:-1].sum())
EXACT = functools.partial(Dense, precision="highest")
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def split_and_full():
  """Random features as split nodes and as the full `[N, C, F]` that they stand for."""
  shared, hop = random(NODES, 1, WIDTH), 0
  rows = np.asarray(nodes_within(BATCH.by_hop, hop))
  varying = random(len(rows), CONFIGS, WIDTH, seed=1)
  full = np.repeat(shared, CONFIGS, axis=1)
  full[rows[rows < NODES]] = varying[rows < NODES]
  return SplitNodes(jnp.asarray(shared), jnp.asarray(varying), hop), full


def run(module, *inputs, **kwargs):
  """Parameters and the result of a module on both forms of its first input."""
  split, full = inputs[0]
  slates = nodes.Slates.of(BATCH)
  shapes = jax.eval_shape(
      lambda x: module.init(jax.random.key(0), x, *inputs[1:], slates, **kwargs), full)
  rng = np.random.default_rng(7)
  params = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32),
                        shapes.get("params", {}))

  @functools.partial(jax.jit, compiler_options=QUICK)
  def both(params, split, full):
    results = (module.apply({"params": params}, x, *inputs[1:], slates, **kwargs)
               for x in (split, full))
    return [nodes.everywhere(x, slates) if isinstance(x, SplitNodes) else x for x in results]

  from_split, from_full = both(params, split, full)
  return params, from_split, from_full


def check(results, expected, tolerance=2e-5):
  """Both forms give the expected `[N, C, F]` on real nodes."""
  for found in results:
    np.testing.assert_allclose(found[REAL], expected[REAL], rtol=tolerance, atol=tolerance)


def neighbours(direction):
  """Of every node the nodes that it receives from, one entry per edge."""
  heard = [[] for _ in range(NODES)]
  for consumer, producer in zip(GRAPH.receivers[:EDGES], GRAPH.senders[:EDGES]):
    if direction in ("operands", "both"):
      heard[consumer].append(producer)
    if direction in ("users", "both"):
      heard[producer].append(consumer)
  return heard


def dense(x, params):
  return x @ params["kernel"] + params.get("bias", 0)


def slow_sage(x, params, direction, options):
  sent = dense(x, params["neighbours"])
  mean = np.stack([np.mean([sent[u] for u in heard], axis=0) if heard else np.zeros_like(sent[0])
                   for heard in neighbours(direction)])
  return mean + (dense(x, params["self"]) if "self" in params else 0)


def each_graph(function):
  """`[N, C, F]` from a function of the node numbers of one graph."""
  result = np.zeros((NODES, CONFIGS, WIDTH), np.float32)
  for graph in range(len(BATCH.target)):
    members = np.flatnonzero(OF_GRAPH == graph)
    if len(members):
      result[members] = function(members)
  return result


def slow_normal(x, axis, eps=1e-5):
  return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + eps)


def real_configs(node):
  return np.flatnonzero(BATCH.config_mask[OF_GRAPH[node]])


def slow_layer_norm(x, params):
  return slow_normal(x, -1, 1e-6) * params["scale"] + params["bias"]


def slow_encoder(x, to, params):
  """A transformer layer with one head on tokens `x [L, F]` that attend to `to [M, F]`."""
  heads = params["heads"]
  part = lambda name, tokens: tokens @ heads[name]["kernel"][:, 0] + heads[name]["bias"][0]
  logits = part("query", x) @ part("key", to).T / np.sqrt(x.shape[1])
  weights = np.exp(logits - logits.max(axis=1, keepdims=True))
  mixed = weights / weights.sum(axis=1, keepdims=True) @ part("value", to)
  x = slow_layer_norm(x + mixed @ heads["out"]["kernel"][0] + heads["out"]["bias"],
                      params["norm_0"])
  hidden = np.maximum(dense(x, params["hidden"]), 0)
  return slow_layer_norm(x + dense(hidden, params["out"]), params["norm_1"])


def check_pooled(found, expected, tolerance=2e-5):
  """Every result has the expected `[G, C, F]` for real graphs."""
  real = np.arange(len(BATCH.target)) < len(raw_layouts())
  for result in found:
    np.testing.assert_allclose(
        np.asarray(result)[real], expected[real], rtol=tolerance, atol=tolerance)


def per_graph(function, width):
  result = np.zeros((len(BATCH.target), CONFIGS, width))
  for graph in range(len(BATCH.target)):
    members = np.flatnonzero(OF_GRAPH == graph)
    result[graph] = function(members) if len(members) else 0
  return result


def elu(x):
  return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def draw(module, *arguments, slates=None):
  """Random parameters of a module for these arguments, and for slates behind them."""
  more = () if slates is None else (slates,)
  shapes = jax.eval_shape(lambda *a: module.init(jax.random.key(0), *a, *more), *arguments)
  rng = np.random.default_rng(5)
  return jax.tree.map(
      lambda leaf: rng.normal(0, 0.4, leaf.shape).astype(np.float32), shapes.get("params", {}))


def slow_configs(batch, missing="zero"):
  """The raw configuration of every node, `[N, C, 18 or 24]`, and which nodes have their own."""
  graph, configs = batch.graph, batch.config_mask.shape[1]
  count = len(graph.nodes["opcode"])
  own_layout = np.asarray(graph.nodes["feat"])[:, -6:]
  if hasattr(batch, "config_feat"):
    result, node = np.zeros((count, configs, 24)), 0
    for number, size in enumerate(graph.n_node[:-1]):
      result[node : node + size] = batch.config_feat[number]
      node += size
    return result, np.zeros(count, bool)
  result, configured = np.zeros((count, configs, 18)), np.zeros(count, bool)
  if missing == "sentinel":
    result[:] = -2
  elif missing == "layout":
    for slot in range(3):
      result[:, :, 6 * slot : 6 * slot + 6] = own_layout[:, None]
  for node, row_ids in zip(batch.by_hop.nodes[0], batch.row_id):
    if (row_ids < len(batch.rows)).any():
      configured[node] = True
      for config, row in enumerate(row_ids):
        # NaN marks padding configurations, which have no encoded features either.
        result[node, config] = batch.rows[row] if row < len(batch.rows) else np.nan
  return result, configured


def slow_opcodes(batch, params, max_norm, gain):
  table = params["embedding"]["table"]["embedding"]
  result = []
  for opcode in np.asarray(batch.graph.nodes["opcode"]):
    vector = np.array(table[opcode], np.float64)
    length = np.linalg.norm(vector)
    result.append(vector * min(1, max_norm / length) if max_norm else vector)
  return np.stack(result) * (params["gain"] if gain else 1)
