"""Small random programs with tensor sizes, groups and choices, for tests of score tables."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from tests.support import random_graphs
from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.data import batching
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers.tables import batches, terms

CONFIGS = 4


def program(
  seed: int,
  *,
  nodes: int = 30,
  edges: int = 50,
  config_nodes: Sequence[int] | None = None,
  configs: int = 12,
  rows: int = 6,
) -> OpGraph:
  """A program of float32 tensors without cycles, some of whose nodes share a group."""
  rng = np.random.default_rng(seed)
  if config_nodes is None:
    config_nodes = rng.permutation(nodes * 3 // 4)[: max(1, nodes // 5)]
  sizes = dict(nodes=nodes, edges=edges, config_nodes=config_nodes, configs=configs, rows=rows)
  graph = random_graphs.layout_graph(rng, **sizes, name=f"program {seed}")
  feat = np.zeros((nodes, NODE_FEATURES), np.float32)
  feat[:, 2 + 11] = 1  # float32
  feat[:, 21:24] = rng.integers(1, 300, (nodes, 3))
  feat[:, 28] = feat[:, 21:24].prod(axis=1)
  edge_index = np.sort(graph.edge_index, axis=1)[:, ::-1]
  edge_index = edge_index[edge_index[:, 0] != edge_index[:, 1]]
  return dataclasses.replace(graph, node_feat=feat, edge_index=edge_index)


def prepared(graph: OpGraph, **options) -> batches.PreparedTables:
  """The program with its node features scaled down and the terms of all configurations."""
  return batches.prepare(graph, np.log1p(graph.node_feat), terms.terms_of(graph), **options)


def slates(programs: Sequence[batches.PreparedTables], configs: int) -> list[batching.Slate]:
  """The first `configs` configurations of each program, last first."""
  made = []
  for i, program_ in enumerate(programs):
    ids = np.arange(min(configs, len(program_.configs)))[::-1]
    target = program_.configs.labels[ids].astype(np.float32) / 1000
    made.append(batching.Slate(program_, ids, target, graph_id=i))
  return made


@functools.cache
def three_programs() -> tuple[batches.PreparedTables, ...]:
  """Three programs, one with a single configurable node and fewer configurations than a slate."""
  cases = (
    dict(nodes=30, edges=50),
    dict(nodes=12, edges=8, config_nodes=[1], configs=3),
    dict(nodes=45, edges=110, rows=9),
  )
  return tuple(prepared(program(i, **case)) for i, case in enumerate(cases))


def batch_of(
  programs: Sequence[batches.PreparedTables] = (),
  *,
  order: Sequence[int] = (0, 1, 2),
  spare: int = 0,
  graphs: int = 3,
  configs: int = CONFIGS,
  choices: int = 0,
) -> batches.TableBatch:
  """Slates of some of the programs (three unless given), in a batch with room for all of them."""
  programs = programs or three_programs()
  sizes, made = batching.total_sizes(programs), slates(programs, CONFIGS)
  budget = random_graphs.common_budget([sizes], spare=spare)
  budget["choices"] = choices or sizes["choices"]
  return batches.assemble([made[i] for i in order], budget, graphs=graphs, configs=configs)


def gelu(x):
  return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
