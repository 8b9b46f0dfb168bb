import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_graphs

from tpugraphs_jax.batch import ABSENT, NodesByHop
from tpugraphs_jax.data import adjacency, batching
from tpugraphs_jax.models import message_passing as mp

NODES = 12
DIRECTIONS = (mp.OPERANDS, mp.USERS, mp.BOTH)


def graph_edges(seed=0, nodes=NODES, edges=30):
  return random_graphs.random_edges(np.random.default_rng(seed), nodes, edges)


def dense_matrix(edges, direction, nodes=NODES):
  """Entry [r, s] counts the edges along which r receives from s."""
  matrix = np.zeros((nodes, nodes), np.float32)
  for consumer, producer in edges:
    if direction in (mp.OPERANDS, mp.BOTH):
      matrix[consumer, producer] += 1
    if direction in (mp.USERS, mp.BOTH):
      matrix[producer, consumer] += 1
  return matrix


def tables(edges, slots, nodes=NODES):
  return adjacency.adjacency(edges[:, 0], edges[:, 1], nodes, slots=slots)


def random_values(*shape, seed=1):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def some_nodes(which) -> np.ndarray:
  """`[NODES]` bool."""
  return {"some": random_values(NODES) > 0, "all": np.ones(NODES, bool),
          "none": np.zeros(NODES, bool)}[which]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("slots", [0, 1, 4, 30])
def test_neighbour_sum_is_the_dense_product_with_duplicate_edges(direction, slots):
  edges, x = graph_edges(), random_values(NODES, 2, 3)
  matrix = dense_matrix(edges, direction)
  assert matrix.max() > 1, "the case has no duplicate edge"
  assert (matrix.sum(axis=1) == 0).any(), "the case has no node without neighbours"
  total = mp.neighbour_sum(x, tables(edges, slots), direction)
  np.testing.assert_allclose(total, np.einsum("rs,scf->rcf", matrix, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("receivers", [None, 5])
@pytest.mark.parametrize("own", [False, True])
def test_value_and_gradient_are_those_of_the_dense_product(direction, slots, receivers, own):
  edges, x = graph_edges(), random_values(NODES, 3)
  weight = random_values(receivers or NODES, 3, seed=2)
  matrix = jnp.asarray((dense_matrix(edges, direction) + own * np.eye(NODES))[:receivers])

  def fast(x):
    return jnp.sum(weight * jnp.sin(mp.neighbour_sum(
        x, tables(edges, slots), direction, receivers=receivers, own=own)))

  def slow(x):
    return jnp.sum(weight * jnp.sin(matrix @ x))

  np.testing.assert_allclose(fast(x), slow(x), rtol=1e-4)
  np.testing.assert_allclose(jax.grad(fast)(x), jax.grad(slow)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("slots", [0, 2])
def test_no_rows_at_all_sum_to_zero(slots, own):
  """Segments without a configurable node in by_hop, and nothing else in the batch."""
  adjacency, nothing = tables(graph_edges(), slots), jnp.zeros((0, 2, 3))
  total, vjp = jax.vjp(
      lambda x: mp.neighbour_sum(x, adjacency, mp.BOTH, receivers=5, own=own), nothing)
  np.testing.assert_array_equal(total, np.zeros((5, 2, 3)))
  assert vjp(total)[0].shape == (0, 2, 3)


def test_senders_beyond_the_rows_at_hand_do_not_count():
  edges, x = graph_edges(), random_values(5, 3)
  full = np.zeros((NODES, 3), np.float32)
  full[:5] = x
  for direction in DIRECTIONS:
    for slots in (0, 2):
      total = mp.neighbour_sum(x, tables(edges, slots), direction, receivers=NODES)
      np.testing.assert_allclose(
          total, dense_matrix(edges, direction) @ full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [0, 2])
def test_absent_entries_give_zero_and_no_gradient(slots):
  table = tables(graph_edges(), slots)
  hidden = jax.tree.map(lambda a: np.full_like(a, ABSENT), table)
  x = random_values(NODES, 3)
  value, grad = jax.value_and_grad(
      lambda x: jnp.sum(mp.neighbour_sum(x, hidden, mp.OPERANDS)))(x)
  assert value == 0
  np.testing.assert_array_equal(grad, np.zeros_like(x))


def test_bfloat16_sums_accumulate_in_float32():
  # 1 + 1/256 is not representable in bfloat16; 256 + 256 * (1/256) is.
  many = 256
  edges = np.stack([np.zeros(many + 1), np.arange(many + 1)], axis=1).astype(np.int32)
  x = np.full((many + 1, 1), 1 / 256, np.float32)
  x[0] = 256
  for slots in (0, 4):
    table = tables(edges, slots, nodes=many + 1)
    total = mp.neighbour_sum(jnp.asarray(x, jnp.bfloat16), table, mp.OPERANDS)
    assert total.dtype == jnp.bfloat16
    # The exact sum is 257; bfloat16 additions would never leave 256.
    assert float(total[0, 0]) in (256, 258)
    table_sum = mp.neighbour_sum(jnp.asarray(x, jnp.float32), table, mp.OPERANDS)
    assert float(table_sum[0, 0]) == 257


def test_degree_counts_every_edge():
  edges = graph_edges()
  for direction in DIRECTIONS:
    np.testing.assert_array_equal(
        mp.degree(tables(edges, 2), direction, NODES), dense_matrix(edges, direction).sum(axis=1))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_senders_that_are_fewer_than_receivers_hear_themselves(direction):
  edges, x = graph_edges(), random_values(5, 3)
  matrix = dense_matrix(edges, direction) + np.eye(NODES)
  full = np.zeros((NODES, 3), np.float32)
  full[:5] = x
  total, vjp = jax.vjp(lambda x: mp.neighbour_sum(
      x, tables(edges, 2), direction, receivers=NODES, own=True), jnp.asarray(x))
  np.testing.assert_allclose(total, matrix @ full, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
      vjp(total)[0], (matrix.T @ np.asarray(total))[:5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", ["some", "all", "none"])
@pytest.mark.parametrize("slots", [0, 2, 30])
def test_edges_among_some_nodes_have_both_ends_there(slots, keep):
  edges, x = graph_edges(), random_values(NODES, 3)
  kept = some_nodes(keep)
  inside = mp.among(tables(edges, slots), jnp.asarray(kept))
  few = edges[kept[edges].all(axis=1)]
  if keep == "some":
    assert 0 < len(few) < len(edges)
  for direction in DIRECTIONS:
    total, vjp = jax.vjp(lambda x: mp.neighbour_sum(x, inside, direction), jnp.asarray(x))
    matrix = dense_matrix(few, direction)
    np.testing.assert_allclose(total, matrix @ x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vjp(x)[0], matrix.T @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep", ["some", "all", "none"])
@pytest.mark.parametrize("slots", [0, 2, 30])
@pytest.mark.parametrize("senders", [NODES, 5])
@pytest.mark.parametrize("own", [False, True])
def test_two_passes_give_each_node_the_sum_of_its_own_pass(own, senders, slots, keep):
  x, others = random_values(2, senders, 3)
  kept, edges = some_nodes(keep), graph_edges()
  full = tables(edges, slots)
  passes = mp.two_passes(
      mp.among(full, jnp.asarray(kept)), full, jnp.asarray(kept), senders)
  cotangent = random_values(NODES, 3, seed=2)
  for direction in DIRECTIONS:
    matrix = dense_matrix(edges, direction) + own * np.eye(NODES, dtype=np.float32)
    # Rows of nodes that receive in the first pass, from nodes that send in it.
    inner = (matrix * kept[:, None] * kept)[:, :senders]
    outer = (matrix * ~kept[:, None])[:, :senders]
    total, vjp = jax.vjp(
        lambda x, others: mp.two_pass_sum(
            x, others, passes, direction, receivers=NODES, own=own), x, others)
    np.testing.assert_allclose(total, inner @ x + outer @ others, rtol=1e-5, atol=1e-5)
    gradient, none = vjp(cotangent)
    np.testing.assert_allclose(gradient, inner.T @ cotangent, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(none, np.zeros_like(others))
    if senders == NODES:
      edges_heard = dense_matrix(edges, direction) * np.where(kept[:, None], kept, True)
      np.testing.assert_array_equal(
          mp.degree(passes, direction, NODES), edges_heard.sum(axis=1))


def layout_batch(*, hops, reuse=True, config_nodes=(1, 17), nodes=20):
  graph = random_graphs.layout_graph(
      np.random.default_rng(3), nodes=nodes, edges=14, config_nodes=config_nodes, configs=4)
  prepared = batching.prepare(graph, graph.node_feat, hops=hops, slots=1, reuse=reuse)
  budget = random_graphs.common_budget([batching.total_sizes([prepared])], spare=1)
  batch = batching.assemble_layout(
      random_graphs.slots_of([prepared], 3), budget, graphs=1, configs=3,
      transform=lambda rows: rows.astype(np.float32))
  return graph, batch


def merged(split: mp.SplitNodes, by_hop: NodesByHop) -> np.ndarray:
  """The full `[N, C, F]` tensor that a split one stands for."""
  configs = split.varying.shape[1]
  full = np.repeat(np.asarray(split.shared), configs, axis=1)
  node = np.asarray(mp.nodes_within(by_hop, split.hop))
  real = node < len(full)
  full[node[real]] = np.asarray(split.varying)[real]
  return full


def random_split(batch, hop=0) -> mp.SplitNodes:
  nodes = len(batch.graph.nodes["opcode"])
  return mp.SplitNodes(
      random_values(nodes, 1, 2), random_values(mp.rows_within(batch.by_hop, hop), 3, 2, seed=5), hop)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("reuse", [True, False])
def test_split_sum_equals_the_full_sum_layer_by_layer(reuse, own):
  graph, batch = layout_batch(hops=3, reuse=reuse)
  split = random_split(batch)
  for direction in DIRECTIONS:
    matrix = dense_matrix(graph.edge_index, direction, nodes=graph.num_nodes)
    matrix += own * np.eye(graph.num_nodes, dtype=np.float32)
    before = merged(split, batch.by_hop)[: graph.num_nodes]
    split = mp.join(mp.split_neighbour_sum(
        split, batch.adjacency, batch.by_hop, direction, own=own), batch.by_hop)
    np.testing.assert_allclose(
        merged(split, batch.by_hop)[: graph.num_nodes],
        np.einsum("rs,scf->rcf", matrix, before), rtol=1e-4, atol=1e-5)


def test_growing_changes_no_value():
  _, batch = layout_batch(hops=2)
  split = random_split(batch)
  grown = mp.grow(split, batch.by_hop, 2)
  assert grown.hop == 2
  assert len(grown.varying) > len(split.varying)
  np.testing.assert_array_equal(merged(grown, batch.by_hop), merged(split, batch.by_hop))


@pytest.mark.parametrize("hop", [0, 2])
def test_nodes_of_two_passes_are_merged_node_by_node(hop):
  _, batch = layout_batch(hops=2)
  split = random_split(batch, hop)
  others = jax.tree.map(lambda v: v + 1, split)
  keep = np.arange(len(batch.graph.nodes["opcode"])) % 3 > 0
  chosen = mp.where(jnp.asarray(keep), split, others, batch.by_hop)
  assert chosen.hop == hop
  np.testing.assert_array_equal(
      merged(chosen, batch.by_hop),
      np.where(keep[:, None, None], merged(split, batch.by_hop), merged(others, batch.by_hop)))


def test_dividing_gives_every_node_its_own_divisor_and_padding_no_nan():
  _, batch = layout_batch(hops=2)
  split = random_split(batch)
  by = 1 + np.abs(random_values(len(batch.graph.nodes["opcode"])))
  divided = mp.divide_nodes(split, jnp.asarray(by), batch.by_hop)
  np.testing.assert_allclose(
      merged(divided, batch.by_hop), merged(split, batch.by_hop) / by[:, None, None], rtol=1e-6)
  assert (np.asarray(mp.nodes_within(batch.by_hop, split.hop)) == ABSENT).any()
  assert np.isfinite(divided.varying).all()


def test_more_rounds_than_the_batch_was_built_for_are_refused():
  _, batch = layout_batch(hops=1)
  split = mp.split_neighbour_sum(random_split(batch), batch.adjacency, batch.by_hop, mp.USERS)
  with pytest.raises(ValueError, match="round 2 needs 3 hops, the batch was built with 2"):
    mp.split_neighbour_sum(split, batch.adjacency, batch.by_hop, mp.USERS)


def test_node_graph_gives_padding_the_last_slot():
  _, batch = layout_batch(hops=1)
  slot = np.asarray(mp.node_graph(batch.graph))
  np.testing.assert_array_equal(slot[:20], 0)
  assert len(slot) > 20
  np.testing.assert_array_equal(slot[20:], 1)
