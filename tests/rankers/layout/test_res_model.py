"""Blocks of the official layout model: edges inside them, and nodes of two passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from edge_cases import (
    DIRECTIONS, NODES, dense_matrix, graph_edges, layout_batch, merged, random_split, random_values,
    tables)

from tpugraphs_jax.nn import aggregation
from tpugraphs_jax.rankers.layout import res_model


def some_nodes(which) -> np.ndarray:
  """`[NODES]` bool."""
  return {"some": random_values(NODES) > 0, "all": np.ones(NODES, bool),
          "none": np.zeros(NODES, bool)}[which]


@pytest.mark.parametrize("keep", ["some", "all", "none"])
@pytest.mark.parametrize("slots", [0, 2, 30])
def test_edges_among_some_nodes_have_both_ends_there(slots, keep):
  edges, x = graph_edges(), random_values(NODES, 3)
  kept = some_nodes(keep)
  inside = res_model.among(tables(edges, slots), jnp.asarray(kept))
  few = edges[kept[edges].all(axis=1)]
  if keep == "some":
    assert 0 < len(few) < len(edges)
  for direction in DIRECTIONS:
    total, vjp = jax.vjp(lambda x: aggregation.neighbour_sum(x, inside, direction), jnp.asarray(x))
    matrix = dense_matrix(few, direction)
    np.testing.assert_allclose(total, matrix @ x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vjp(x)[0], matrix.T @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hop", [0, 2])
def test_nodes_of_two_passes_are_merged_node_by_node(hop):
  _, batch = layout_batch(hops=2)
  split = random_split(batch, hop)
  others = jax.tree.map(lambda v: v + 1, split)
  keep = np.arange(len(batch.graph.nodes["opcode"])) % 3 > 0
  chosen = res_model.merged(jnp.asarray(keep), split, others, batch.by_hop)
  assert chosen.hop == hop
  np.testing.assert_array_equal(
      merged(chosen, batch.by_hop),
      np.where(keep[:, None, None], merged(split, batch.by_hop), merged(others, batch.by_hop)))
