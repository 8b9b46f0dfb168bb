"""Batches of awkward graphs, and parameters, for tests of the ranker of many options."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import random_graphs

from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.composed import inputs

CONFIGS = 3
HOPS = 2
# Programs that run once: compiling them is all that takes time.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Every block that a ranker can read column by column, behind other features.
READS = tuple(inputs.READ_BLOCKS)


def features(rng: np.random.Generator, nodes: int, reads: tuple[str, ...]) -> np.ndarray:
  """Random node features `[nodes, F]` float32 with these blocks at the end."""
  parts = [rng.normal(size=(nodes, 4))]
  for name in reads:
    shape = nodes, inputs.READ_BLOCKS[name]
    parts.append(rng.integers(-1, 6, shape) if name == "node_layout" else rng.random(shape))
  return np.concatenate(parts, axis=1).astype(np.float32)


def raw_layouts() -> list:
  """Several programs: a node alone with one configuration, an isolated choice, no order."""
  rng = np.random.default_rng(0)
  make = functools.partial(random_graphs.layout_graph, rng)
  return [make(nodes=9, edges=14, config_nodes=[2, 0], configs=7),
          make(nodes=1, edges=0, config_nodes=[0], configs=1),
          make(nodes=16, edges=22, config_nodes=[15, 3], configs=2),
          make(nodes=6, edges=8, config_nodes=rng.permutation(6), configs=5)]


def layout_batch(
    reads: tuple[str, ...] = (), *, spare: int = 2, hops: int = HOPS, slots: int = 1,
    graphs: list | None = None, configs: int = CONFIGS,
) -> LayoutBatch:
  """The programs in one batch with an empty slate, padding nodes and padding edges."""
  rng, prepared = np.random.default_rng(1), []
  for graph in graphs or raw_layouts():
    prepared.append(batching.prepare(
        graph, features(rng, graph.num_nodes, reads), hops=hops, slots=slots))
  budget = random_graphs.common_budget([batching.total_sizes(prepared)], spare=spare)
  return batching.assemble_layout(
      random_graphs.slots_of(prepared, configs), budget, graphs=len(prepared) + 1,
      configs=configs, transform=lambda rows: rows.astype(np.float32))


def tile_batch(reads: tuple[str, ...] = (), *, spare: int = 2, features_of_tile: int = 24,
               configs: int = CONFIGS) -> TileBatch:
  """Three kernels, one of a single node, in a batch with an empty slate.

  Nodes have at most three kinds of tokens of dimensions in a kernel, where these are read.
  """
  rng, prepared = np.random.default_rng(2), []
  tokens = "dimension_tokens" in reads and sum(
      inputs.READ_BLOCKS[name] for name in reads if name != "random_walk")
  for nodes, edges, count in ((9, 14, 7), (1, 0, 1), (6, 9, 2)):
    graph = random_graphs.tile_graph(rng, nodes=nodes, edges=edges, configs=count)
    feat = features(rng, nodes, reads)
    if tokens:
      feat[:, -tokens:] = feat[rng.integers(min(nodes, 3), size=nodes), -tokens:]
    prepared.append(batching.prepare(graph, feat, slots=1, distinct=tokens))
  budget = random_graphs.common_budget([batching.total_sizes(prepared)], spare=spare)
  batch = batching.assemble_tile(
      random_graphs.slots_of(prepared, configs), budget, graphs=len(prepared) + 1,
      configs=configs, transform=lambda x: x)
  feat = rng.random((*batch.config_mask.shape, features_of_tile)).astype(np.float32)
  return batch._replace(config_feat=np.where(batch.config_mask[..., None], 4 * feat, 0))


def random_params(model: Any, batch: Any, seed: int = 0) -> Any:
  """Parameters that are all nonzero, biases too; scalars, of which one divides, above 0.5."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
  rng = np.random.default_rng(seed)
  draw = lambda shape: rng.normal(0, 0.3, shape) if shape else 0.5 + rng.random()
  return jax.tree.map(lambda leaf: np.asarray(draw(leaf.shape), np.float32), shapes)


def scores_and_gradients(
    kind: str, batch: Any, *, params: Any = None, train: bool = True, **options: Any
) -> list[tuple[np.ndarray, Any]]:
  """Scores `[G, C]` (0 where nothing is) and gradients, shared and then plain."""
  models = [base.create_network(kind, options.get("name", "Composed"), **{
      k: v for k, v in options.items() if k != "name"}, share=share) for share in (True, False)]
  params = random_params(models[0], batch) if params is None else params
  weight = np.random.default_rng(3).normal(size=batch.target.shape).astype(np.float32)

  def loss(params, model):
    scores = model.apply(
        {"params": params}, batch, train=train, rngs={"dropout": jax.random.key(5)})
    scores = jax.numpy.where(batch.config_mask, scores, 0)
    return (scores * weight).sum(), scores

  @functools.partial(jax.jit, compiler_options=QUICK)
  def both(params):
    return [jax.grad(lambda p, m=model: loss(p, m), has_aux=True)(params) for model in models]

  return [(np.asarray(scores), grads) for grads, scores in both(params)]
