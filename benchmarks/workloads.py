"""Random programs with the statistics of the released ones, and batches of them.

Sizes and degrees follow the released layout collections: 1.65 edges per node,
about 98 % of nodes with at most five edges, a few with dozens, producers mostly
shortly before their consumers. Configurable nodes stand at random places, so
that message passing spreads faster than in real programs, whose convolutions
and products come in clusters.
"""

from __future__ import annotations

import numpy as np

from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.data.batching import LayoutBatch
from tpugraphs_jax.graph import LayoutConfigs, OpGraph

_OPERANDS = (0.17, 0.30, 0.40, 0.12, 0.01)  # share of nodes with 0, 1, ... operands
_USERS = (0.03, 0.55, 0.32, 0.09, 0.01)
_HUBS = 0.004  # share of nodes with dozens of operands, and with dozens of users
_HUB_DEGREES = (20, 60)
_DISTANCE = 8.0  # mean distance of a producer in the order of nodes
_ROWS, _ROWS_PER_NODE, _NODES_PER_GROUP = 96, 8, 12


def edges(rng: np.random.Generator, nodes: int) -> np.ndarray:
  """`[E, 2]` int32 rows (consumer, producer) without cycles."""
  ends = []
  for shares in (_OPERANDS, _USERS):
    degree = rng.choice(len(shares), nodes, p=shares)
    hubs = rng.random(nodes) < _HUBS
    degree[hubs] = rng.integers(*_HUB_DEGREES, hubs.sum())
    # Each end of an edge waits for a partner, for a random time in units of nodes. Ends at hubs
    # wait longer, so that a hub's neighbours are spread over many nodes.
    place = np.repeat(np.arange(nodes), degree)
    mean_wait = np.where(np.repeat(hubs, degree), 20 * _DISTANCE, _DISTANCE)
    ends.append((place, place + rng.exponential(mean_wait)))
  (consumer, due), (producer, ready) = ends
  consumer, producer = consumer[np.argsort(due)], producer[np.argsort(ready)]
  count = min(len(consumer), len(producer))
  pairs = np.stack([consumer[:count], producer[:count]], axis=1)
  # The later node of a pair is the consumer.
  pairs = np.stack([pairs.max(axis=1), pairs.min(axis=1)], axis=1)
  return pairs[pairs[:, 0] > pairs[:, 1]].astype(np.int32)


def program(rng: np.random.Generator, *, nodes: int, config_nodes: int, configs: int) -> OpGraph:
  """A program with random features and configurations."""
  groups = max(1, config_nodes // _NODES_PER_GROUP)
  choices = rng.integers(0, _ROWS, (groups, _ROWS_PER_NODE))
  picked = rng.integers(0, _ROWS_PER_NODE, (configs, groups))
  layout = LayoutConfigs(
    rows=rng.integers(-1, 6, (_ROWS, 18)).astype(np.int8),
    node_group=rng.integers(0, groups, config_nodes).astype(np.int32),
    group_row=choices[np.arange(groups), picked].astype(np.uint8),
    labels=rng.integers(10**6, 10**7, configs),
  )
  return OpGraph(
    name=f"program_{nodes}",
    node_feat=rng.random((nodes, NODE_FEATURES), np.float32),
    node_opcode=rng.integers(1, 120, nodes).astype(np.uint8),
    edge_index=edges(rng, nodes),
    node_splits=np.array([0, nodes]),
    config_node=np.sort(rng.permutation(nodes)[:config_nodes]).astype(np.int32),
    configs=layout,
  )


def layout_batch(
  *,
  graphs: int,
  nodes: int,
  config_nodes: int,
  configs: int,
  hops: int,
  keep_nodes: int | None = None,
) -> LayoutBatch:
  """A training batch, padded like those of a run.

  Args:
    graphs: number of programs, one per slate.
    nodes: nodes of each program, give or take 10 % if there are several.
    config_nodes: configurable nodes of each program.
    configs: configurations per slate.
    hops: rounds of message passing of the model.
    keep_nodes: length of the sampled block of nodes; by default all nodes.
  """
  rng = np.random.default_rng(0)
  chosen = []
  for i in range(graphs):
    size = nodes if graphs == 1 else int(nodes * rng.uniform(0.9, 1.1))
    graph = program(rng, nodes=size, config_nodes=config_nodes, configs=configs)
    prepared = batching.prepare_program(graph, graph.node_feat, hops=hops)
    block = None if keep_nodes is None else (0, min(size, keep_nodes))
    chosen.append(_slot(prepared, np.arange(configs), i, block))
  return _assemble(chosen, configs)


def ranking_batches(
  *, nodes: int, config_nodes: int, configs: int, chunk: int, hops: int
) -> list[LayoutBatch]:
  """All configurations of one program in chunks; `configs` is a multiple of `chunk`."""
  graph = program(np.random.default_rng(0), nodes=nodes, config_nodes=config_nodes, configs=configs)
  prepared = batching.prepare_program(graph, graph.node_feat, hops=hops)
  chunks = np.arange(configs).reshape(-1, chunk)
  return [_assemble([_slot(prepared, ids)], chunk) for ids in chunks]


def _slot(graph: batching.PreparedGraph, ids: np.ndarray, number: int = 0, block=None):
  target = graph.configs.labels[ids].astype(np.float32) / 1e7
  return batching.Slate(graph, ids, target, number, block)


def _assemble(slots: list[batching.Slate], configs: int) -> LayoutBatch:
  (budget,) = plan.choose_budgets([batching.total_sizes([slot.graph for slot in slots])])
  return batching.assemble_layout(
    slots,
    budget,
    graphs=len(slots),
    configs=configs,
    transform=lambda rows: rows.astype(np.float32),
  )
