import jax
import jax.numpy as jnp
import numpy as np
import pytest
from edge_cases import (
    DIRECTIONS, dense_matrix, layout_batch, merged, random_split, random_values)

from tpugraphs_jax.data.batching import ABSENT
from tpugraphs_jax.nn import aggregation, pooling, split_nodes


def partial_sum(batch):
  return split_nodes.split_neighbour_sum(
      random_split(batch), batch.adjacency, batch.by_hop, aggregation.USERS)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("reuse", [True, False])
def test_split_sum_equals_the_full_sum_layer_by_layer(reuse, own):
  graph, batch = layout_batch(hops=3, reuse=reuse)
  split = random_split(batch)
  for direction in DIRECTIONS:
    matrix = dense_matrix(graph.edge_index, direction, nodes=graph.num_nodes)
    matrix += own * np.eye(graph.num_nodes, dtype=np.float32)
    before = merged(split, batch.by_hop)[: graph.num_nodes]
    split = split_nodes.split_neighbour_sum(
        split, batch.adjacency, batch.by_hop, direction, own=own).complete(batch.by_hop)
    np.testing.assert_allclose(
        merged(split, batch.by_hop)[: graph.num_nodes],
        np.einsum("rs,scf->rcf", matrix, before), rtol=1e-4, atol=1e-5)


def test_growing_changes_no_value():
  _, batch = layout_batch(hops=2)
  split = random_split(batch)
  grown = split_nodes.grow(split, batch.by_hop, 2)
  assert grown.hop == 2
  assert len(grown.varying) > len(split.varying)
  np.testing.assert_array_equal(merged(grown, batch.by_hop), merged(split, batch.by_hop))


def test_dividing_gives_every_node_its_own_divisor_and_padding_no_nan():
  _, batch = layout_batch(hops=2)
  split = random_split(batch)
  by = 1 + np.abs(random_values(len(batch.graph.nodes["opcode"])))
  divided = split_nodes.divide_nodes(split, jnp.asarray(by), batch.by_hop)
  np.testing.assert_allclose(
      merged(divided, batch.by_hop), merged(split, batch.by_hop) / by[:, None, None], rtol=1e-6)
  assert (np.asarray(split_nodes.nodes_within(batch.by_hop, split.hop)) == ABSENT).any()
  assert np.isfinite(divided.varying).all()


def test_more_rounds_than_the_batch_was_built_for_are_refused():
  _, batch = layout_batch(hops=1)
  split = partial_sum(batch).complete(batch.by_hop)
  with pytest.raises(ValueError, match="round 2 needs 3 hops, the batch was built with 2"):
    split_nodes.split_neighbour_sum(split, batch.adjacency, batch.by_hop, aggregation.USERS)


USES = {
    "activation": lambda total, batch: jax.tree.map(jax.nn.gelu, total),
    "addition": lambda total, batch: jax.tree.map(jnp.add, random_split(batch, 1), total),
    "growth": lambda total, batch: split_nodes.grow(total, batch.by_hop, 2),
    "division": lambda total, batch: split_nodes.divide_nodes(
        total, jnp.ones(len(batch.block_mask)), batch.by_hop),
    "next round": lambda total, batch: split_nodes.split_neighbour_sum(
        total, batch.adjacency, batch.by_hop, aggregation.USERS),
    "readout": lambda total, batch: pooling.split_pool_sum(
        total, pooling.split_selection(batch.graph, batch.by_hop, 1)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_sum_that_lacks_what_unreached_nodes_send_cannot_stand_for_nodes(use):
  _, batch = layout_batch(hops=2)
  total = partial_sum(batch)
  with pytest.raises((TypeError, AttributeError, ValueError)):
    use(total, batch)
  use(total.complete(batch.by_hop), batch)


def test_sums_divisions_and_biases_may_come_before_a_sum_is_complete():
  _, batch = layout_batch(hops=2)
  total, by_hop = partial_sum(batch), batch.by_hop
  by = 1 + np.abs(random_values(len(batch.block_mask)))
  bias = random_values(1, 2, seed=3)
  early = (total.divide(jnp.asarray(by), by_hop) + total).add_bias(jnp.asarray(bias))
  full = merged(total.complete(by_hop), by_hop)
  expected = full / by[:, None, None] + full + bias[None]
  np.testing.assert_allclose(
      merged(early.complete(by_hop), by_hop), expected, rtol=1e-5, atol=1e-5)
