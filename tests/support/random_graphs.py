"""Small random graphs with every awkward feature, for tests of models and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import ABSENT, LayoutBatch, Neighbours, TileBatch
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs

NODE_FEATURES = 5
TILE_FEATURES = 3


def random_edges(rng: np.random.Generator, nodes: int, edges: int) -> np.ndarray:
  """`[edges, 2]` rows (consumer, producer), unsorted, among the first 3/4 of the nodes.

  Some edges occur twice, one node in eight consumes much, and the last quarter
  of the nodes is isolated.
  """
  inner = max(1, nodes * 3 // 4)
  edge_index = rng.integers(0, inner, (edges, 2))
  edge_index[: edges // 3, 0] = rng.integers(0, max(1, inner // 8), edges // 3)
  edge_index[edges - edges // 5 :] = edge_index[: edges // 5]
  return rng.permutation(edge_index).astype(np.int32)


def layout_graph(
  rng: np.random.Generator,
  *,
  nodes: int,
  edges: int,
  config_nodes: Sequence[int],
  configs: int,
  rows: int = 6,
  name: str = "layout",
  features: int = NODE_FEATURES,
) -> OpGraph:
  """A program whose configurations choose among `rows` random rows per node."""
  count = len(config_nodes)
  groups = max(1, count // 2)
  layout = LayoutConfigs(
    rows=rng.integers(-1, 6, (rows, 18)).astype(np.int8),
    node_group=rng.integers(0, groups, count).astype(np.int32),
    group_row=rng.integers(0, rows, (configs, groups)).astype(
      np.uint8 if rows <= 256 else np.uint16
    ),
    labels=rng.integers(1, 1000, configs),
  )
  return _op_graph(rng, nodes, edges, np.asarray(config_nodes, np.int32), layout, name, features)


def config_runtime(configs: TileConfigs | LayoutConfigs) -> np.ndarray:
  """The numbers `[C]` of configurations in a file."""
  return configs.runtime_ns if isinstance(configs, TileConfigs) else configs.labels


def tile_graph(
  rng: np.random.Generator,
  *,
  nodes: int,
  edges: int,
  configs: int,
  name: str = "tile",
  features: int = NODE_FEATURES,
  columns: int = TILE_FEATURES,
) -> OpGraph:
  """A kernel with random tile configurations of so many columns."""
  tile = TileConfigs(
    config_feat=rng.normal(size=(configs, columns)).astype(np.float32),
    runtime_ns=rng.integers(1, 1000, configs),
    normalizer_ns=np.full(configs, 500),
  )
  return _op_graph(rng, nodes, edges, np.zeros(0, np.int32), tile, name, features)


def with_configs(graph: OpGraph, **fields: np.ndarray) -> OpGraph:
  """The graph with other fields of its configurations."""
  return dataclasses.replace(graph, configs=dataclasses.replace(graph.configs, **fields))


def _op_graph(rng, nodes, edges, config_node, configs, name, features) -> OpGraph:
  feat = rng.normal(size=(nodes, features)).astype(np.float32)
  opcode = rng.integers(1, 121, nodes).astype(np.uint8)
  return of_arrays(name, feat, opcode, random_edges(rng, nodes, edges), config_node, configs)


def of_arrays(
  name: str,
  node_feat: np.ndarray,
  node_opcode: np.ndarray,
  edge_index: np.ndarray,
  config_node: np.ndarray,
  configs: Any,
) -> OpGraph:
  """A graph of one computation."""
  splits = np.array([0, len(node_opcode)])
  return OpGraph(name, node_feat, node_opcode, edge_index, splits, config_node, configs)


def prepare(
  graph: OpGraph, *, hops: int, slots: int = batching.SLOTS, reuse: bool = True
) -> batching.PreparedProgram:
  """A prepared program; without reuse, configurations share no node.

  Without reuse every node counts as reached from the start, which gives the same scores.
  """
  prepared = batching.prepare_program(graph, graph.node_feat, hops=hops, slots=slots)
  if reuse:
    return prepared
  nodes = graph.num_nodes
  node = np.concatenate([graph.config_node, np.setdiff1d(np.arange(nodes), graph.config_node)])
  edges = np.argsort(node)[prepared.edge_index].astype(np.int32)
  tables = batching.adjacency(edges[:, 0], edges[:, 1], nodes, slots=slots)
  by_hop = batching.GraphByHop(
    node.astype(np.int32), (nodes,) + (0,) * hops, np.zeros(nodes, np.int32), tables
  )
  sizes = (
    prepared.sizes
    | {f"hop{hop}": size for hop, size in enumerate(by_hop.hop_sizes)}
    | {
      "by_hop_operand_overflow": len(tables.operands.overflow_receiver),
      "by_hop_user_overflow": len(tables.users.overflow_receiver),
    }
  )
  return dataclasses.replace(prepared, by_hop=by_hop, sizes=sizes)


def slots_of(graphs: Sequence[batching.PreparedGraph], configs: int) -> list[batching.Slate]:
  """A slate of at most `configs` configurations of each graph, with a random block."""
  rng = np.random.default_rng(0)
  slots = []
  for i, graph in enumerate(graphs):
    chosen = rng.permutation(len(graph.configs))[:configs]
    target = config_runtime(graph.configs)[chosen].astype(np.float32) / 1000
    cut = len(graph.opcode) // 2
    block = (cut // 2, cut // 2 + cut)
    slots.append(batching.Slate(graph, chosen, target, graph_id=i, block=block))
  return slots


def common_budget(sizes: Sequence[dict[str, int]], spare: int = 0) -> dict[str, int]:
  """Room for each of `sizes`, a padding node and `spare` of everything."""
  return {key: max(size[key] for size in sizes) + spare + (key == "nodes") for key in sizes[0]}


def assemble(
  slots: Sequence[batching.Slate], budget: Mapping[str, int], *, graphs: int, configs: int
) -> LayoutBatch | TileBatch:
  """A batch of programs or of kernels, with configurations as they are, in float32."""
  is_program = isinstance(slots[0].graph, batching.PreparedProgram)
  return (batching.assemble_layout if is_program else batching.assemble_tile)(
    slots, budget, graphs=graphs, configs=configs, transform=lambda rows: rows.astype(np.float32)
  )


def batch_of(
  prepared: Sequence[batching.PreparedGraph],
  configs: int,
  *,
  spare: int = 0,
  graphs: int = 0,
  places: int = 0,
) -> Any:
  """The slates of `slots_of` in one batch.

  Args:
    prepared: programs or kernels.
    configs: of a slate, at most.
    spare: room of the batch for more of everything in graphs.
    graphs: slates for which it has room, unless for these alone.
    places: configurations of a slate for which it has room, unless for `configs`.
  """
  budget = common_budget([batching.total_sizes(prepared)], spare=spare)
  return assemble(
    slots_of(prepared, configs), budget, graphs=graphs or len(prepared), configs=places or configs
  )


def table_edges(table: Neighbours) -> list[tuple[int, int]]:
  """All (receiver, sender) pairs of a table and its overflow rows, sorted."""
  pairs = []
  for receivers, index in (
    (np.arange(len(table.index)), table.index),
    (table.overflow_receiver, table.overflow_index),
  ):
    row, slot = np.nonzero(index < ABSENT)
    pairs += zip(receivers[row].tolist(), index[row, slot].tolist())
  return sorted(pairs)


# Columns that describe a convolution with a window of 3 x 3 and 8 features from 4: kernels are
# (H, W, in, out), other arrays (N, H, W, C).
NUMBERS = {44: 9, 93: 0, 94: 3, 99: 2, 100: 3, 105: 0, 106: 3, 107: 1}
Instruction = tuple[str, str, Sequence[int], Mapping[int, Any]]


def made_of(nodes: Sequence[Instruction], edges: Sequence[Sequence[int]]) -> OpGraph:
  """A graph of (opcode, type, shape, columns) for every node and edges (consumer, producer)."""
  ids, feat = columns.opcode_ids(), np.zeros((len(nodes), columns.NODE_FEATURES), np.float32)
  types = [kind.name for kind in columns.ELEMENT_TYPES]
  for node, (_, kind, shape, values) in enumerate(nodes):
    feat[node, 2 + types.index(kind)] = 1
    feat[node, 21 : 21 + len(shape)] = shape
    feat[node, 27:29] = sum(shape), math.prod(shape)
    for column, value in values.items():
      feat[node, column] = value
  graph = layout_graph(
    np.random.default_rng(0), nodes=len(nodes), edges=0, config_nodes=[0], configs=2
  )
  return dataclasses.replace(
    graph,
    node_feat=feat,
    node_opcode=np.array([ids[name] for name, *_ in nodes], np.uint8),
    edge_index=np.array(edges, np.int32),
  )


def whole_numbers(seed: int, nodes: int = 20, edges: int = 30) -> OpGraph:
  """A random program with whole numbers as features, and some convolutions and products."""
  rng = np.random.default_rng(seed)
  graph = layout_graph(rng, nodes=nodes, edges=edges, config_nodes=[0], configs=2)
  feat = rng.integers(-3, 400, (nodes, columns.NODE_FEATURES)).astype(np.float32)
  opcode = rng.choice([26, 34, 7, 1], nodes).astype(np.uint8)
  return dataclasses.replace(graph, node_feat=feat, node_opcode=opcode)
