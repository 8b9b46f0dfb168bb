from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse
from scipy.sparse import csgraph

from tests.support import comparing, parts, random_graphs
from tpugraphs_jax import losses
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import ABSENT
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.layout import res_model

CONFIGS = 3
HOPS = 1
SIZES = ((9, 14, [2, 0], 7), (1, 0, [0], 3), (16, 30, [3, 15, 5], 2))


@functools.cache
def layout_graphs() -> tuple[batching.PreparedProgram, ...]:
  rng = np.random.default_rng(0)
  graphs = [
    random_graphs.layout_graph(rng, nodes=n, edges=e, config_nodes=k, configs=c)
    for n, e, k, c in SIZES
  ]
  return tuple(batching.prepare_program(g, g.node_feat, hops=HOPS, slots=1) for g in graphs)


@functools.cache
def tile_graphs() -> tuple[batching.PreparedGraph, ...]:
  rng = np.random.default_rng(1)
  graphs = [random_graphs.tile_graph(rng, nodes=n, edges=e, configs=c) for n, e, _, c in SIZES]
  return tuple(batching.prepare(g, g.node_feat, slots=1) for g in graphs)


def batch_of(prepared, *, order=(0, 1, 2), graphs=3, spare=0, configs=CONFIGS):
  slots = random_graphs.slots_of(prepared, CONFIGS)
  budget = random_graphs.common_budget([batching.total_sizes(prepared)], spare=spare)
  return random_graphs.assemble([slots[i] for i in order], budget, graphs=graphs, configs=configs)


layout_batch = lambda **options: batch_of(layout_graphs(), **options)
tile_batch = lambda **options: batch_of(tile_graphs(), **options)


@pytest.mark.parametrize("kinds", [1, 2, 100])
def test_distinct_nodes_are_those_of_each_kernel_alone(kinds):
  rng, prepared = np.random.default_rng(3), []
  table = rng.random((kinds, 2)).astype(np.float32)  # kernels have these rows in common
  for nodes, edges, _, configs in SIZES:
    graph = random_graphs.tile_graph(rng, nodes=nodes, edges=edges, configs=configs)
    feat = np.concatenate([graph.node_feat, table[rng.integers(kinds, size=nodes)]], axis=1)
    prepared.append(batching.prepare(graph, feat, slots=1, distinct=2))
  batch = random_graphs.batch_of(prepared, CONFIGS, spare=3, graphs=4)
  (first, which), feat = batch.distinct, batch.graph.nodes["feat"]
  node_graph, seen = np.repeat(np.arange(5), batch.graph.n_node), {}
  for node, graph in enumerate(node_graph):
    if graph == 4:
      assert which[node] == ABSENT  # padding
    else:
      seen.setdefault((graph, feat[node, -2:].tobytes()), []).append(node)
  assert sorted(first[first != ABSENT]) == sorted(members[0] for members in seen.values())
  for members in seen.values():
    assert set(first[which[members]]) == {members[0]}
  assert len(first) == batching.total_sizes(prepared)["distinct"] + 3
  assert tile_batch().distinct is None


@pytest.mark.parametrize("make", [layout_batch, tile_batch])
def test_edges_are_sorted_by_receiver_and_all_indices_are_int32(make):
  batch = make(spare=4)
  assert (np.diff(batch.graph.receivers) >= 0).all()
  for leaf in jax.tree.leaves(batch):
    assert leaf.dtype in (np.int32, np.float32, bool)


@pytest.mark.parametrize("make", [layout_batch, tile_batch])
def test_neighbour_tables_hold_the_edges_of_the_jraph_batch(make):
  batch = make(spare=3)
  real = batch.graph.n_edge[:-1].sum()
  edges = list(zip(batch.graph.receivers[:real].tolist(), batch.graph.senders[:real].tolist()))
  assert random_graphs.table_edges(batch.adjacency.operands) == sorted(edges)
  assert random_graphs.table_edges(batch.adjacency.users) == sorted((v, u) for u, v in edges)


def test_reach_adjacency_holds_exactly_the_edges_among_reached_nodes():
  batch = layout_batch(spare=3)
  node = np.concatenate(batch.by_hop.nodes)
  for side in ("operands", "users"):
    pairs = node[random_graphs.table_edges(getattr(batch.by_hop.adjacency, side))]
    graph = batch.graph
    edges = np.stack([graph.receivers, graph.senders], axis=1)[: graph.n_edge[:-1].sum()]
    edges = edges[(batch.by_hop.hop[edges] < ABSENT).all(axis=1)]
    expected = edges if side == "operands" else edges[:, ::-1]
    assert sorted(map(tuple, pairs.tolist())) == sorted(map(tuple, expected.tolist()))


def test_a_batch_holds_rows_targets_and_blocks_of_its_slates():
  order = (2, 0, 1)
  batch = layout_batch(order=order, graphs=4, spare=2)
  slots = random_graphs.slots_of(layout_graphs(), CONFIGS)
  start = node_start = 0
  for place, i in enumerate(order):
    graph, chosen = slots[i].graph, slots[i].config_ids
    np.testing.assert_array_equal(batch.config_mask[place], np.arange(CONFIGS) < len(chosen))
    np.testing.assert_array_equal(batch.target[place, : len(chosen)], slots[i].target)
    count = graph.by_hop.hop_sizes[0]
    np.testing.assert_array_equal(
      batch.by_hop.nodes[0][start : start + count], graph.by_hop.node[:count] + node_start
    )
    row_id = batch.row_id[start : start + count]
    np.testing.assert_array_equal(
      batch.rows[row_id[:, : len(chosen)]].swapaxes(0, 1), graph.configs.decode(chosen)
    )
    assert (row_id[:, len(chosen) :] == ABSENT).all()
    start += count
    nodes = np.arange(len(graph.opcode))
    np.testing.assert_array_equal(
      batch.block_mask[node_start : node_start + len(nodes)],
      (nodes >= slots[i].block[0]) & (nodes < slots[i].block[1]),
    )
    node_start += len(nodes)
  assert (batch.row_id[start:] == ABSENT).all()
  assert not batch.block_mask[node_start:].any() and not batch.config_mask[3].any()


def results(model):
  def loss(params, batch):
    scores = model.apply({"params": params}, batch, train=True)
    total, count = losses.listmle(
      scores, jnp.asarray(batch.target), where=jnp.asarray(batch.config_mask)
    )
    return total / count, scores

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


CASES = {
  "tile": (
    base.create_network("tile", "EarlyJoinSAGE", op_embed_dim=4, hidden_dim=8, num_gnns=HOPS),
    tile_batch,
  ),
  "layout": (res_model.ResModel(op_embed_dim=4, hidden_dim=8, num_gnns=HOPS), layout_batch),
}


@pytest.mark.parametrize("kind", CASES)
def test_padding_and_order_do_not_change_scores_losses_or_gradients(kind):
  model, make = CASES[kind]
  run = results(model)
  batch = make()
  params = parts.params_of(model, batch)
  (loss, scores), grads = run(params, batch)
  cases = [((2, 0, 1), {}), ((1, 2, 0), {"graphs": 5, "spare": 19, "configs": CONFIGS + 2})]
  for order, options in cases:
    (other_loss, other_scores), other_grads = run(params, make(order=order, **options))
    mask = np.asarray(batch.config_mask)[list(order)]
    scores_there = np.asarray(other_scores)[:3, :CONFIGS][mask]
    comparing.assert_trees_close(
      (scores_there, other_loss, other_grads), (np.asarray(scores)[list(order)][mask], loss, grads)
    )


@pytest.mark.parametrize("make", [layout_batch, tile_batch])
def test_more_graphs_than_a_batch_holds_are_refused(make):
  with pytest.raises(ValueError, match="graphs"):
    make(graphs=2)


@pytest.mark.parametrize("key", ["nodes", "edges", "operand_overflow", "hop1", "rows"])
def test_a_batch_beyond_its_budget_is_refused(key):
  slots = random_graphs.slots_of(layout_graphs(), CONFIGS)
  budget = random_graphs.common_budget([batching.total_sizes(layout_graphs())])
  assert budget[key] > 0
  with pytest.raises(ValueError, match="budget"):
    random_graphs.assemble(slots, budget | {key: budget[key] - 1}, graphs=3, configs=CONFIGS)


@pytest.mark.parametrize("slots", [0, 1, 2, 4, 9])
def test_table_and_overflow_hold_every_edge_exactly_once(slots):
  rng = np.random.default_rng(slots)
  receiver, sender = rng.integers(0, 7, (2, 40)).astype(np.int32)
  table = batching.neighbours(receiver, sender, 10, slots=slots)
  assert table.index.shape == (10, slots)
  assert random_graphs.table_edges(table) == sorted(zip(receiver.tolist(), sender.tolist()))
  assert (np.diff(table.overflow_receiver) >= 0).all()
  width = table.overflow_index.shape[1]  # a receiver has no more rows than it needs
  left = np.maximum(np.bincount(receiver, minlength=10) - slots, 0)
  np.testing.assert_array_equal(
    np.bincount(table.overflow_receiver, minlength=10), -(-left // width)
  )


@pytest.mark.parametrize("slots", [0, 3])
def test_tables_without_edges_or_nodes_are_empty(slots):
  none = np.zeros(0, np.int32)
  for nodes in (0, 3):
    table = batching.neighbours(none, none, nodes, slots=slots)
    assert table.index.shape == (nodes, slots)
    assert random_graphs.table_edges(table) == []


@pytest.mark.parametrize("hops", [0, 1, 2, 5])
@pytest.mark.parametrize("starts", [0, 1, 4, 20])
def test_distance_equals_a_slow_formulation(hops, starts):
  rng = np.random.default_rng(hops + starts)
  edges = rng.integers(0, 15, (16, 2)).astype(np.int32)  # Nodes 15..19 are isolated.
  start = rng.permutation(20)[:starts]
  distance = batching.hops_from(start, edges, 20, hops=hops)
  assert distance.dtype == np.int32
  far = csgraph.shortest_path(
    sparse.coo_array((np.ones(16), edges.T), (20, 20)),
    directed=False,
    unweighted=True,
    indices=start,
  ).min(axis=0, initial=np.inf)
  np.testing.assert_array_equal(distance, np.where(far <= hops, far, ABSENT))
