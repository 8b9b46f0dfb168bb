"""Sums over neighbours equal products with a dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import random_graphs, recorded
from tests.support.system_cases import DIRECTIONS, random
from tpugraphs_jax.data import batching
from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.nn import aggregation

NODES = 12
EDGES = random_graphs.random_edges(np.random.default_rng(0), NODES, 30)


def dense_matrix(direction):
  """Entry [r, s] counts the edges along which r receives from s."""
  matrix = np.zeros((NODES, NODES), np.float32)
  for consumer, producer in EDGES:
    matrix[consumer, producer] += direction != aggregation.USERS
    matrix[producer, consumer] += direction != aggregation.OPERANDS
  return matrix


def tables(edges, slots, nodes=NODES):
  return batching.adjacency(edges[:, 0], edges[:, 1], nodes, slots=slots)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("slots", [0, 2, 30])
@pytest.mark.parametrize("receivers", [None, 5])
@pytest.mark.parametrize("self_loops", [False, True])
def test_value_and_gradient_are_those_of_the_dense_product(direction, slots, receivers, self_loops):
  x = random(NODES, 2, 3)
  weight = random(receivers or NODES, 2, 3, seed=2)
  matrix = dense_matrix(direction)
  assert matrix.max() > 1, "the case has no duplicate edge"
  assert (matrix.sum(axis=1) == 0).any(), "the case has no node without neighbours"
  matrix = jnp.asarray((matrix + self_loops * np.eye(NODES))[:receivers])

  def fast(x):
    return jnp.sum(
      weight
      * jnp.sin(
        aggregation.neighbour_sum(
          x, tables(EDGES, slots), direction, receivers=receivers, self_loops=self_loops
        )
      )
    )

  def slow(x):
    return jnp.sum(weight * jnp.sin(jnp.einsum("rs,scf->rcf", matrix, x, precision="highest")))

  value, gradient = jax.jit(jax.value_and_grad(fast))(x)
  expected, expected_gradient = jax.jit(jax.value_and_grad(slow))(x)
  np.testing.assert_allclose(value, expected, rtol=1e-4)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def pulled_back(function, x):
  """`function(x)`, and its pullback of this result."""

  @jax.jit
  def run(x):
    total, pullback = jax.vjp(function, x)
    return total, pullback(total)[0]

  return run(x)


@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("slots", [0, 2])
def test_no_rows_at_all_sum_to_zero(slots, self_loops):
  """As in a batch of segments without a configurable node."""
  adjacency, nothing = tables(EDGES, slots), jnp.zeros((0, 2, 3))
  total, back = pulled_back(
    lambda x: aggregation.neighbour_sum(
      x, adjacency, aggregation.BOTH, receivers=5, self_loops=self_loops
    ),
    nothing,
  )
  np.testing.assert_array_equal(total, np.zeros((5, 2, 3)))
  assert back.shape == (0, 2, 3)


def test_bfloat16_sums_accumulate_in_float32():
  # bfloat16 has no number between 256 and 258.
  many = 512
  edges = np.stack([np.zeros(many + 1), np.arange(many + 1)], axis=1).astype(np.int32)
  x = np.full((many + 1, 1), 1 / 256, np.float32)
  x[0] = 256
  for slots in (0, 4):
    table = tables(edges, slots, nodes=many + 1)
    total = aggregation.neighbour_sum(jnp.asarray(x, jnp.bfloat16), table, aggregation.OPERANDS)
    assert total.dtype == jnp.bfloat16
    # The exact sum is 258; bfloat16 additions of 1/256 would never leave 256.
    assert float(total[0, 0]) == 258


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("self_loops", [False, True])
def test_senders_beyond_the_rows_at_hand_do_not_count(direction, slots, self_loops):
  x = random(5, 3)
  matrix = dense_matrix(direction) + self_loops * np.eye(NODES)
  full = np.zeros((NODES, 3), np.float32)
  full[:5] = x
  total, back = pulled_back(
    lambda x: aggregation.neighbour_sum(
      x, tables(EDGES, slots), direction, receivers=NODES, self_loops=self_loops
    ),
    jnp.asarray(x),
  )
  np.testing.assert_allclose(total, matrix @ full, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(back, (matrix.T @ np.asarray(total))[:5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", [0, 2])
def test_rows_of_many_columns_are_added_in_blocks(slots, monkeypatch):
  x = random(NODES, 5, 3)
  total = lambda x: aggregation.neighbour_sum(x, tables(EDGES, slots), aggregation.BOTH)
  expected = jax.jit(total)(x)
  for columns in (1, 4, 14, 15):
    monkeypatch.setattr(aggregation, "_SCATTER_COLUMNS", columns)
    np.testing.assert_array_equal(jax.jit(lambda x: total(x))(x), expected)  # traced anew


@recorded.needs_libtpu
def test_rows_of_many_columns_compile_for_a_tpu():
  """A hundred configurations of 64 features, for which a TPU v3 has no room in one piece."""
  nodes = 4000
  edges = np.random.default_rng(0).integers(0, nodes, (2 * nodes, 2))
  device = jax.sharding.SingleDeviceSharding(tpu.devices("tpu:v3")[0])
  on_device = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
  adjacency = jax.tree.map(on_device, tables(edges, 0, nodes))
  x = on_device(jax.ShapeDtypeStruct((nodes, 100, 64), jnp.float32))
  total = lambda x, adjacency: aggregation.neighbour_sum(jnp.tanh(x), adjacency, aggregation.BOTH)
  assert "scatter" in jax.jit(total).lower(x, adjacency).compile().as_text()
