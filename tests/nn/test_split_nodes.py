import jax.numpy as jnp
import numpy as np
import pytest
from edge_cases import (
    DIRECTIONS, dense_matrix, layout_batch, merged, random_split, random_values)

from tpugraphs_jax.nn import aggregation, split_nodes


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


def test_more_rounds_than_the_batch_was_built_for_are_refused():
  _, batch = layout_batch(hops=1)
  split = partial_sum(batch).complete(batch.by_hop)
  with pytest.raises(ValueError, match="hops"):
    split_nodes.split_neighbour_sum(split, batch.adjacency, batch.by_hop, aggregation.USERS)


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
