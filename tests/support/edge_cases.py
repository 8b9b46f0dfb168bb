"""Random edges with their dense matrix, and features that configurations reach."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import random_graphs

from tpugraphs_jax.data import batching
from tpugraphs_jax.nn import aggregation
from tpugraphs_jax.nn.nodes import Nodes, Slates

NODES = 12
DIRECTIONS = (aggregation.OPERANDS, aggregation.USERS, aggregation.BOTH)


def graph_edges():
  return random_graphs.random_edges(np.random.default_rng(0), NODES, 30)


def dense_matrix(edges, direction, nodes=NODES):
  """Entry [r, s] counts the edges along which r receives from s."""
  matrix = np.zeros((nodes, nodes), np.float32)
  for consumer, producer in edges:
    if direction in (aggregation.OPERANDS, aggregation.BOTH):
      matrix[consumer, producer] += 1
    if direction in (aggregation.USERS, aggregation.BOTH):
      matrix[producer, consumer] += 1
  return matrix


def tables(edges, slots, nodes=NODES):
  return batching.adjacency(edges[:, 0], edges[:, 1], nodes, slots=slots)


def random_values(*shape, seed=1):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def layout_batch(*, hops, reuse=True):
  graph = random_graphs.layout_graph(
      np.random.default_rng(3), nodes=20, edges=14, config_nodes=(1, 17), configs=4)
  prepared = random_graphs.prepare(graph, hops=hops, slots=1, reuse=reuse)
  budget = random_graphs.common_budget([batching.total_sizes([prepared])], spare=1)
  batch = batching.assemble_layout(
      random_graphs.slots_of([prepared], 3), budget, graphs=1, configs=3,
      transform=lambda rows: rows.astype(np.float32))
  return graph, batch


def reached_nodes(batch) -> Nodes:
  """Random features `[N, 3, 2]` that differ on the nodes of hop 0."""
  slates = Slates.of(batch)
  shared = jnp.asarray(random_values(slates.num_nodes, 1, 2))
  return Nodes(slates, shared, jnp.asarray(random_values(slates.rows_within(0), 3, 2, seed=5)), 0)
