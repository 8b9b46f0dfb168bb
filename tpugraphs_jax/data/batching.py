"""Assembles padded batches of few fixed shapes from graphs and configurations.

A slate is one graph with some of its configurations. `assemble_tile` and `assemble_layout`
concatenate slates and pad them to a budget: a dictionary with the largest numbers of nodes, edges
and so on (`data.plan` chooses budgets). The network reads tiles from `TileBatch.config_feat`, and
layouts from `LayoutBatch.rows`.

Node-level tensors are `[N, C, F]` (nodes, configurations, features). A batch has G graphs and, as
in jraph, one more graph at the end with all padding nodes and edges. An index beyond the end of its
array means "absent": gathers give 0 there and scatters drop it, so that padding needs no mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jraph
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from tpugraphs_jax.graph import Configs, distinct_rows, LayoutConfigs, OpGraph

# An index beyond the end of every array. With an offset it stays beyond, without overflow of int32.
ABSENT = 1 << 30
# Labels of a program over absolute targets: a millisecond of nanoseconds, a microsecond of
# picoseconds.
ABSOLUTE_UNIT = 1e6

Array = np.ndarray | jax.Array  # of a batch: on the host, and on a device

Program = TypeVar("Program")  # a prepared graph
Batch = TypeVar("Batch")  # as a family assembles it


class Neighbours(NamedTuple):
  """The senders of every receiver: a table of fixed width, and an overflow table.

  Nearly all instructions have at most four operands and four users. A table of this width turns
  aggregation into a few dense gathers. Further senders of a receiver are in rows of the overflow
  table, sorted by receiver. With 0 slots the overflow table has one column and every edge, and
  aggregation is a sorted segment sum.
  """

  # [receivers, slots] int32 row of the sender, or ABSENT
  index: Array  # type: ignore[assignment]  # hides a method of tuple
  overflow_index: Array  # [overflow, max(slots, 1)] int32 likewise
  overflow_receiver: Array  # [overflow] int32 ascending, or ABSENT


class Adjacency(NamedTuple):
  """Edges in both directions; each half is the transpose of the other."""

  operands: Neighbours  # receiver = consumer, senders = its operands
  users: Neighbours  # receiver = producer, senders = its users


class NodesByHop(NamedTuple):
  """Nodes whose values depend on the configuration, nearest first.

  The hop of a node is the number of edges, in either direction, between it and the nearest
  configurable node. After h rounds of message passing, nodes of hops 0..h differ between
  configurations; every other node has one value for all configurations. Tensors of these nodes have
  a row per node, hop after hop.
  """

  nodes: tuple[Array, ...]  # per hop [nodes of that hop] int32 node, or ABSENT
  hop: Array  # [N] int32 hop of each node, or ABSENT
  adjacency: Adjacency  # among rows


class DistinctNodes(NamedTuple):
  """Sets of nodes of one graph with equal features; each set is computed once."""

  first: Array  # [T] int32 the first node of each set, or ABSENT
  which: Array  # [N] int32 the set of each node, or ABSENT


class TileBatch(NamedTuple):
  """G slates, each with one kernel and C of its tile configurations."""

  graph: jraph.GraphsTuple  # nodes {"opcode" [N] int32, "feat" [N, F] float32}
  adjacency: Adjacency
  config_feat: Array  # [G, C, F] float32, transformed
  target: Array  # [G, C] float32, larger = slower
  config_mask: Array  # [G, C] bool
  distinct: DistinctNodes | None = None  # for networks with `Network.distinct` above 0


class KernelBatch(NamedTuple):
  """The times of the kernels of G slates: D kernels, M pairs of a kernel and a node in it."""

  time: Array  # [D, C] float32, in the unit of absolute targets; 0 without such a kernel
  kernel: Array  # [M] int32 kernel of each pair, or ABSENT
  node: Array  # [M] int32 its node, or ABSENT


class LayoutBatch(NamedTuple):
  """G slates, each with one graph and C of its layout configurations."""

  graph: jraph.GraphsTuple  # nodes {"opcode" [N] int32, "feat" [N, F] float32}
  adjacency: Adjacency
  by_hop: NodesByHop
  rows: Array  # [R, F] float32 dictionary of configuration rows of all slates
  row_id: Array  # [hop 0, C] int32 row of each configurable node, or ABSENT
  block_mask: Array  # [N] bool nodes of the sampled block (all, if none is sampled)
  target: Array  # [G, C] float32, larger = slower
  config_mask: Array  # [G, C] bool


def take_configs(batch: TileBatch | LayoutBatch, start: jax.Array, size: int):
  """The batch restricted to the configurations `start` to `start + size`, `[G, size]`.

  Args:
    batch: with C configurations per slate.
    start: int32 scalar, may be traced.
    size: number of configurations, at most C.
  """
  fields = ["target", "config_mask"]
  fields += ["config_feat"] if isinstance(batch, TileBatch) else ["row_id"]
  cut = lambda array: jax.lax.dynamic_slice_in_dim(array, start, size, axis=1)
  sliced: dict[str, Any] = {name: cut(getattr(batch, name)) for name in fields}
  return batch._replace(**sliced)


def emptied(batch: TileBatch | LayoutBatch) -> TileBatch | LayoutBatch:
  """A batch of the same shapes without slates: all nodes and configurations are padding."""
  padding = lambda counts: np.append(np.zeros_like(counts[:-1]), counts.sum(dtype=counts.dtype))
  n_node, n_edge = padding(batch.graph.n_node), padding(batch.graph.n_edge)
  graph = batch.graph._replace(n_node=n_node, n_edge=n_edge)
  target, mask = np.zeros_like(batch.target), np.zeros_like(batch.config_mask)
  return batch._replace(graph=graph, target=target, config_mask=mask)


Budget = Mapping[str, int]
# Width of the tables. 99 % of nodes have at most four operands and users. On a 2-core CPU a table
# of this width is 1.5 to 2.9 times faster than a sorted segment sum (`aggregation` in
# benchmarks/results.json). On a TPU v3 the compiler estimates 22 times the time of a sorted segment
# sum (8 gathers instead of one, 2.63 ms instead of 0.12 on [6000, 1024]; benchmarks/tpu_sums.json).
# No TPU was measured, and the estimate for a gather is below the time to move its bytes.
SLOTS = 4
# Entries of a budget that are the maximum over the graphs of a batch, instead of the sum.
_WIDTHS = ("choices",)


@dataclasses.dataclass(frozen=True, eq=False)
class GraphByHop:
  """Nodes of one graph that configurations reach, hop after hop; hop 0 in file order."""

  node: np.ndarray  # [rows] int32
  hop_sizes: tuple[int, ...]
  hop: np.ndarray  # [N] int32, or ABSENT
  adjacency: Adjacency  # among rows


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedGraph(Generic[Configs]):
  """A graph with all arrays that do not depend on the batch."""

  name: str
  opcode: np.ndarray  # [N] int32
  feat: np.ndarray  # [N, F] float32, transformed
  edge_index: np.ndarray  # [E, 2] int32 (consumer, producer), sorted by consumer
  adjacency: Adjacency
  configs: Configs
  sizes: dict[str, int]  # of the graph, by entry of a budget
  distinct: DistinctNodes | None = None  # of kernels, for networks with `Network.distinct` above 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PreparedProgram(PreparedGraph[LayoutConfigs]):
  """A layout graph for networks that compute nodes by hop."""

  by_hop: GraphByHop


class Slate(NamedTuple, Generic[Program]):
  """A graph with the configurations that a loss compares."""

  graph: Program  # `PreparedGraph`, or as the family prepares it
  config_ids: np.ndarray  # [<= C] int64 configuration numbers
  target: np.ndarray  # [<= C] float32, larger = slower
  graph_id: int = 0  # number of the graph among the training graphs
  block: tuple[int, int] | None = None  # sampled node range, layout only


def slots_of(platform: str) -> int:
  """The width of tables on a platform of jax (`cpu`, `gpu`, `tpu`)."""
  return 0 if platform == "tpu" else SLOTS


def neighbours(
  receiver: np.ndarray, sender: np.ndarray, nodes: int, *, slots: int = SLOTS
) -> Neighbours:
  """Table of senders per receiver; see `Neighbours`.

  Args:
    receiver: `[E]` int32 receiving node of each edge.
    sender: `[E]` int32 sending node of each edge.
    nodes: number of nodes.
    slots: width of the table; 0 puts every edge into the overflow table.
  """
  order = np.lexsort((sender, receiver))
  receiver, sender = receiver[order], sender[order]
  slot = np.arange(len(receiver)) - np.searchsorted(receiver, receiver)
  index = np.full((nodes, slots), ABSENT, np.int32)
  fits = slot < slots
  index[receiver[fits], slot[fits]] = sender[fits]
  receiver, sender, slot = receiver[~fits], sender[~fits], slot[~fits] - slots
  width = max(slots, 1)
  column = slot % width
  overflow_index = np.full((np.sum(column == 0), width), ABSENT, np.int32)
  overflow_index[np.cumsum(column == 0) - 1, column] = sender
  return Neighbours(index, overflow_index, receiver[column == 0].astype(np.int32))


def adjacency(
  consumer: np.ndarray, producer: np.ndarray, nodes: int, *, slots: int = SLOTS
) -> Adjacency:
  """The tables of edges from `producer [E]` to `consumer [E]`, in both directions."""
  return Adjacency(
    operands=neighbours(consumer, producer, nodes, slots=slots),
    users=neighbours(producer, consumer, nodes, slots=slots),
  )


def hops_from(
  start: np.ndarray, edges: np.ndarray, nodes: int, *, hops: int, directed: bool = False
) -> np.ndarray:
  """Number of edges between the nearest of `start` and each node.

  Args:
    start: `[K]` int node numbers.
    edges: `[E, 2]` int rows (from, to).
    nodes: number of nodes N.
    hops: largest distance.
    directed: edges lead in one direction; otherwise in both.

  Returns:
    `[N]` int32, ABSENT beyond the largest distance.
  """
  matrix = sparse.coo_array((np.ones(len(edges)), edges.T), (nodes, nodes))
  distance = csgraph.dijkstra(
    matrix, directed=directed, indices=start, unweighted=True, limit=hops, min_only=True
  )
  return np.where(np.isinf(distance), ABSENT, distance).astype(np.int32)


def prepare(
  graph: OpGraph[Configs], feat: np.ndarray, *, slots: int = SLOTS, distinct: int = 0
) -> PreparedGraph[Configs]:
  """Sorts edges and builds neighbour tables.

  Args:
    graph: host graph.
    feat: `[N, F]` float32 transformed node features.
    slots: width of the neighbour tables (`SLOTS`).
    distinct: width of the trailing block of `feat` whose equal rows form sets (`DistinctNodes`);
      0 = no sets.
  """
  nodes = graph.num_nodes
  order = np.lexsort((graph.edge_index[:, 1], graph.edge_index[:, 0]))
  edges = np.ascontiguousarray(graph.edge_index[order], np.int32)
  tables = adjacency(edges[:, 0], edges[:, 1], nodes, slots=slots)
  sizes = {"nodes": nodes, "edges": len(edges), **_overflow_sizes(tables, "")}
  sets = None
  if distinct:
    first, which = distinct_rows(np.asarray(feat)[:, -distinct:])
    sets = DistinctNodes(first.astype(np.int32), which.astype(np.int32))
    sizes["distinct"] = len(first)
  return PreparedGraph(
    name=graph.name,
    opcode=graph.node_opcode.astype(np.int32),
    feat=np.ascontiguousarray(feat, np.float32),
    edge_index=edges,
    adjacency=tables,
    configs=graph.configs,
    sizes=sizes,
    distinct=sets,
  )


def prepare_program(
  graph: OpGraph[LayoutConfigs], feat: np.ndarray, *, hops: int, slots: int = SLOTS
) -> PreparedProgram:
  """`prepare`, with the nodes that configurations reach in `hops` rounds of message passing."""
  prepared = prepare(graph, feat, slots=slots)
  edges, nodes = prepared.edge_index, graph.num_nodes
  by_hop = _nodes_by_hop(graph.config_node, edges, nodes, hops=hops, slots=slots)
  sizes = prepared.sizes | {f"hop{h}": size for h, size in enumerate(by_hop.hop_sizes)}
  sizes |= _overflow_sizes(by_hop.adjacency, "by_hop_") | {"rows": len(graph.configs.rows)}
  return PreparedProgram(**vars(prepared) | {"by_hop": by_hop, "sizes": sizes})


def _overflow_sizes(tables: Adjacency, prefix: str) -> dict[str, int]:
  operands, users = (len(side.overflow_receiver) for side in tables)
  return {f"{prefix}operand_overflow": operands, f"{prefix}user_overflow": users}


def _nodes_by_hop(config_node, edges, nodes, *, hops, slots) -> GraphByHop:
  hop_of = hops_from(config_node, edges, nodes, hops=hops)
  rest = np.setdiff1d(np.flatnonzero(hop_of < ABSENT), config_node)
  rest = rest[np.argsort(hop_of[rest], kind="stable")]
  node = np.concatenate([config_node, rest]).astype(np.int32)
  sizes = tuple(int(np.sum(hop_of == hop)) for hop in range(hops + 1))
  row = np.full(nodes, ABSENT, np.int32)
  row[node] = np.arange(len(node))
  inner = row[edges]
  inner = inner[(inner < ABSENT).all(axis=1)]
  tables = adjacency(inner[:, 0], inner[:, 1], len(node), slots=slots)
  return GraphByHop(node, sizes, hop_of, tables)


def total_sizes(graphs: Sequence[PreparedGraph]) -> dict[str, int]:
  """The size of a batch of graphs, by entry of a budget."""
  return add_sizes([graph.sizes for graph in graphs])


def add_sizes(sizes: Sequence[Mapping[str, int]]) -> dict[str, int]:
  """The size of a batch of graphs or slates with these sizes."""
  return {key: (max if key in _WIDTHS else sum)(size[key] for size in sizes) for key in sizes[0]}


def fits(size: Mapping[str, int], budget: Budget) -> bool:
  """Whether a batch of this size has room in a budget; one node stays free for padding."""
  return size["nodes"] < budget["nodes"] and all(size[key] <= budget[key] for key in size)


def padded(parts: Sequence[Array], rows: int, fill: int) -> np.ndarray:
  """Concatenates the parts, and pads them to `rows` with `fill`."""
  joined = np.full((rows, *parts[0].shape[1:]), fill, parts[0].dtype)
  np.concatenate(parts, out=joined[: sum(len(part) for part in parts)])
  return joined


def shifted(parts: Sequence[Array], offsets, rows: int) -> np.ndarray:
  """Like `padded` with ABSENT, and the node offset of each part is added to its node numbers."""
  joined, lengths = padded(parts, rows, ABSENT), [len(part) for part in parts]
  shift = np.repeat(offsets[: len(parts)].astype(np.int32), lengths)
  joined[: len(shift)] += shift.reshape((-1,) + (1,) * (joined.ndim - 1))
  return joined


def _neighbour_rows(parts, offsets, rows: int, overflow: int) -> Neighbours:
  """Concatenates tables of several graphs, each shifted by its node offset."""
  return Neighbours(
    shifted([part.index for part in parts], offsets, rows),
    shifted([part.overflow_index for part in parts], offsets, overflow),
    shifted([part.overflow_receiver for part in parts], offsets, overflow),
  )


def assemble_graphs(
  graphs: Sequence[PreparedGraph], budget: Budget, slates: int
) -> tuple[jraph.GraphsTuple, Adjacency, np.ndarray]:
  """The jraph batch of `slates` graphs and one padding graph, and the node offsets."""
  if len(graphs) > slates:
    raise ValueError(f"{len(graphs)} graphs in a batch of {slates}")
  if not fits(total_sizes(graphs), budget):
    raise ValueError(f"graphs {[g.name for g in graphs]} exceed the budget {dict(budget)}")
  offsets = np.cumsum([0] + [len(graph.opcode) for graph in graphs])
  zero = np.zeros(1, np.int32)
  empty = jax.tree.map(lambda x: x[:0], _tuple_of(graphs[0]))._replace(n_node=zero, n_edge=zero)
  # On one CPU core jraph's batching and padding takes 0.1 ms of a step of 10 ms on ten kernels, and
  # 7 ms of a step of 120 ms on eight programs of 5,000 nodes. Filling arrays in place would take a
  # third of the time.
  batch = jraph.batch_np([*map(_tuple_of, graphs), *[empty] * (slates - len(graphs))])
  batch = jraph.pad_with_graphs(batch, budget["nodes"], budget["edges"], slates + 1)
  batch = batch._replace(  # int64 in jraph
    receivers=batch.receivers.astype(np.int32), senders=batch.senders.astype(np.int32)
  )
  operands, users = zip(*(graph.adjacency for graph in graphs))
  tables = Adjacency(
    _neighbour_rows(operands, offsets, budget["nodes"], budget["operand_overflow"]),
    _neighbour_rows(users, offsets, budget["nodes"], budget["user_overflow"]),
  )
  return batch, tables, offsets


def _tuple_of(graph: PreparedGraph) -> jraph.GraphsTuple:
  """One graph in the form of jraph."""
  return jraph.GraphsTuple(
    nodes={"opcode": graph.opcode, "feat": graph.feat},
    edges=None,
    globals=None,
    receivers=graph.edge_index[:, 0],
    senders=graph.edge_index[:, 1],
    n_node=np.array([len(graph.opcode)], np.int32),
    n_edge=np.array([len(graph.edge_index)], np.int32),
  )


def targets(slates: Sequence[Any], graphs: int, configs: int) -> tuple[np.ndarray, np.ndarray]:
  """Targets `[graphs, configs]` float32 of slates of any family, and their mask, True = real."""
  lengths = np.zeros((graphs, 1), np.int32)
  lengths[: len(slates), 0] = [len(slate.config_ids) for slate in slates]
  mask = np.arange(configs) < lengths
  target = np.zeros((graphs, configs), np.float32)
  target[mask] = np.concatenate([slate.target for slate in slates])
  return target, mask


def kernel_sizes(configs: LayoutConfigs) -> dict[str, int]:
  """The entries of a budget for the kernels of a program; 0 of a program without their times."""
  kernels = configs.kernels
  return {
    "kernels": kernels.runtime.shape[1] if kernels else 0,
    "kernel_nodes": len(kernels.node) if kernels else 0,
  }


def assemble_kernels(
  slates: Sequence[Slate], offsets: np.ndarray, budget: Budget, configs: int
) -> KernelBatch:
  """The times of the kernels of slates.

  Args:
    slates: whose graphs have the sizes of `kernel_sizes`.
    offsets: `[G]` number of the first node of each slate.
    budget: room for the entries of `kernel_sizes`.
    configs: configurations C per slate.
  """
  time = np.zeros((budget["kernels"], configs), np.float32)
  kernel, node = np.full((2, budget["kernel_nodes"]), ABSENT, np.int32)
  row = pair = 0
  for slate, offset in zip(slates, offsets):
    if (kernels := slate.graph.configs.kernels) is None:
      continue
    count, pairs = kernels.runtime.shape[1], slice(pair, pair + len(kernels.node))
    of_slate = kernels.runtime[slate.config_ids].T / ABSOLUTE_UNIT
    time[row : row + count, : of_slate.shape[1]] = of_slate
    kernel[pairs], node[pairs] = kernels.node[:, 0] + row, kernels.node[:, 1] + offset
    row, pair = row + count, pairs.stop
  return KernelBatch(time, kernel, node)


def assemble_tile(
  slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int, transform
) -> TileBatch:
  """A padded batch of tile slates.

  Args:
    slates: at most `graphs` slates.
    budget: numbers of nodes, edges and overflow rows of the batch.
    graphs: slates G of the batch.
    configs: configurations C per slate.
    transform: maps raw `[n, 24 or more]` configuration features to model inputs.

  Raises:
    ValueError: the slates exceed the budget.
  """
  parts = [slate.graph for slate in slates]
  graph, tables, offsets = assemble_graphs(parts, budget, graphs)
  target, mask = targets(slates, graphs, configs)
  feat = transform(np.concatenate([s.graph.configs.config_feat[s.config_ids] for s in slates]))
  config_feat = np.zeros((graphs, configs, feat.shape[1]), np.float32)
  config_feat[mask] = feat
  sets = [part.distinct for part in parts if part.distinct]
  distinct = _assemble_distinct(sets, offsets, budget) if sets else None
  return TileBatch(graph, tables, config_feat, target, mask, distinct)


def _assemble_distinct(parts: Sequence[DistinctNodes], offsets, budget: Budget) -> DistinctNodes:
  """The sets of all graphs, graph after graph; no set spans two graphs."""
  first = [part.first for part in parts]
  sets = np.cumsum([0] + [len(part) for part in first])
  which = shifted([part.which for part in parts], sets, budget["nodes"])
  return DistinctNodes(shifted(first, offsets, budget["distinct"]), which)


def assemble_layout(
  slates: Sequence[Slate[PreparedProgram]], budget: Budget, *, graphs: int, configs: int, transform
) -> LayoutBatch:
  """A padded batch of layout slates; arguments and errors as `assemble_tile`.

  `transform` maps raw configuration rows `[n, 18]` to model inputs.
  """
  parts = [slate.graph for slate in slates]
  graph, tables, offsets = assemble_graphs(parts, budget, graphs)
  values = transform(np.concatenate([g.configs.rows for g in parts]))
  rows = padded([values.astype(np.float32, copy=False)], budget["rows"], 0)
  row_id = np.full((budget["hop0"], configs), ABSENT, np.int32)
  block_mask = np.zeros(budget["nodes"], bool)
  row = config_node = 0
  for i, slate in enumerate(slates):
    layout, count = slate.graph.configs, len(slate.config_ids)
    ids = layout.row_id(slate.config_ids).T.astype(np.int32) + row
    row_id[config_node : config_node + len(ids), :count] = ids
    row += len(layout.rows)
    config_node += slate.graph.by_hop.hop_sizes[0]
    start, stop = slate.block or (0, len(slate.graph.opcode))
    block_mask[offsets[i] + start : offsets[i] + stop] = True
  target, mask = targets(slates, graphs, configs)
  by_hop = _assemble_by_hop(parts, offsets, budget)
  return LayoutBatch(graph, tables, by_hop, rows, row_id, block_mask, target, mask)


def _assemble_by_hop(graphs: Sequence[PreparedProgram], offsets, budget: Budget) -> NodesByHop:
  hop_count = len(graphs[0].by_hop.hop_sizes)
  room = [budget[f"hop{h}"] for h in range(hop_count)]
  nodes = [np.full(size, ABSENT, np.int32) for size in room]
  hop_start = np.cumsum([0] + room)
  hop_of = np.full(budget["nodes"], ABSENT, np.int32)
  used = [0] * hop_count
  places = []  # row in the batch of each row of each graph
  for graph, offset in zip(graphs, offsets):
    by_hop, place, first = graph.by_hop, [], 0
    for h, size in enumerate(by_hop.hop_sizes):
      nodes[h][used[h] : used[h] + size] = by_hop.node[first : first + size] + offset
      place.append(np.arange(size, dtype=np.int32) + np.int32(hop_start[h] + used[h]))
      used[h] += size
      first += size
    places.append(np.concatenate(place))
    hop_of[offset : offset + len(by_hop.hop)] = by_hop.hop
  rows, (operands, users) = int(hop_start[-1]), zip(*(g.by_hop.adjacency for g in graphs))
  tables = Adjacency(
    _place_rows(operands, places, rows, budget["by_hop_operand_overflow"]),
    _place_rows(users, places, rows, budget["by_hop_user_overflow"]),
  )
  return NodesByHop(tuple(nodes), hop_of, tables)


def _moved(index: np.ndarray, place: np.ndarray) -> np.ndarray:
  """Maps row numbers `index` to their new numbers in `place`; ABSENT stays ABSENT."""
  last = len(place) - 1
  return np.where(index > last, ABSENT, place[np.minimum(index, last)])


def _place_rows(parts, places, rows: int, overflow: int) -> Neighbours:
  """Merges tables of several graphs; row r of a graph moves to row `place[r]` of the batch.

  Hops of the graphs interleave in a batch: rows of one graph are not contiguous.
  """
  table = lambda rows, like: np.full((rows, like.shape[1]), ABSENT, np.int32)
  index = table(rows, parts[0].index)
  more, receivers = [table(0, parts[0].overflow_index)], [np.zeros(0, np.int32)]
  for part, place in zip(parts, places):
    if not len(place):
      continue
    index[place] = _moved(part.index, place)
    more.append(_moved(part.overflow_index, place))
    receivers.append(place[part.overflow_receiver])
  receiver = np.concatenate(receivers)
  order = np.argsort(receiver, kind="stable")
  overflow_index = padded([np.concatenate(more)[order]], overflow, ABSENT)
  return Neighbours(index, overflow_index, padded([receiver[order]], overflow, ABSENT))
