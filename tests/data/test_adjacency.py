import numpy as np
import pytest
import random_graphs

from tpugraphs_jax.data import adjacency
from tpugraphs_jax.data.batch import ABSENT


@pytest.mark.parametrize("slots", [0, 1, 2, 4, 9])
def test_table_and_overflow_hold_every_edge_exactly_once(slots):
  rng = np.random.default_rng(slots)
  receiver, sender = rng.integers(0, 7, (2, 40)).astype(np.int32)
  table = adjacency.neighbours(receiver, sender, 10, slots=slots)
  assert table.index.shape == (10, slots)
  assert random_graphs.table_edges(table) == sorted(zip(receiver.tolist(), sender.tolist()))


@pytest.mark.parametrize("platform, slots", [("cpu", 4), ("tpu", 0), ("gpu", 4), ("other", 4)])
def test_a_tpu_sums_sorted_segments_and_others_look_into_tables(platform, slots):
  assert adjacency.slots_of(platform) == slots


def test_overflow_is_sorted_by_receiver_and_only_holds_what_does_not_fit():
  receiver = np.array([3, 1, 1, 3, 1, 0], np.int32)
  sender = np.array([5, 4, 2, 0, 2, 3], np.int32)
  table = adjacency.neighbours(receiver, sender, 6, slots=2)
  np.testing.assert_array_equal(table.overflow_receiver, [1])
  np.testing.assert_array_equal(table.overflow_index, [[4, ABSENT]])
  np.testing.assert_array_equal(table.index[[0, 1, 3]], [[3, ABSENT], [2, 2], [0, 5]])
  assert (table.index[[2, 4, 5]] == ABSENT).all()


def test_a_receiver_has_as_many_overflow_rows_as_it_needs():
  receiver, sender = np.repeat([2, 0], [8, 5]), np.concatenate([np.arange(8), np.arange(5)])
  table = adjacency.neighbours(receiver, sender, 3, slots=3)
  np.testing.assert_array_equal(table.overflow_receiver, [0, 2, 2])
  np.testing.assert_array_equal(
      table.overflow_index, [[3, 4, ABSENT], [3, 4, 5], [6, 7, ABSENT]])
  table = adjacency.neighbours(receiver, sender, 3, slots=0)
  np.testing.assert_array_equal(table.overflow_receiver, np.sort(receiver))
  np.testing.assert_array_equal(table.overflow_index[:, 0], [*range(5), *range(8)])


@pytest.mark.parametrize("slots", [0, 3])
def test_no_edges_and_no_nodes(slots):
  none = np.zeros(0, np.int32)
  for nodes in (0, 3):
    table = adjacency.neighbours(none, none, nodes, slots=slots)
    assert table.index.shape == (nodes, slots)
    assert random_graphs.table_edges(table) == []


def test_all_arrays_are_int32():
  table = adjacency.neighbours(np.array([1, 1, 1]), np.array([0, 0, 2]), 3, slots=1)
  assert {array.dtype for array in table} == {np.dtype(np.int32)}


def test_users_are_the_transpose_of_operands():
  consumer, producer = np.random.default_rng(0).integers(0, 9, (2, 30)).astype(np.int32)
  both = adjacency.adjacency(consumer, producer, 9)
  operands, users = map(random_graphs.table_edges, both)
  assert operands == sorted((v, u) for u, v in users)
  assert operands == sorted(zip(consumer.tolist(), producer.tolist()))


def slow_distance(start, edge_index, nodes, hops):
  """Matrix powers: a node is h away when I + A + A^T reaches it in h steps, not fewer."""
  step = np.eye(nodes, dtype=int)
  for consumer, producer in edge_index:
    step[consumer, producer] = step[producer, consumer] = 1
  seen = np.isin(np.arange(nodes), start).astype(int)
  distance = np.where(seen, 0, ABSENT)
  for hop in range(1, hops + 1):
    reached = step @ seen > 0
    distance[reached & (distance == ABSENT)] = hop
    seen = reached.astype(int)
  return distance


@pytest.mark.parametrize("hops", [0, 1, 2, 5])
@pytest.mark.parametrize("starts", [0, 1, 4, 20])
def test_distance_equals_a_slow_formulation(hops, starts):
  rng = np.random.default_rng(hops + starts)
  edges = rng.integers(0, 15, (16, 2)).astype(np.int32)  # Nodes 15..19 are isolated.
  start = rng.permutation(20)[:starts]
  distance = adjacency.hops_from(start, edges, 20, hops=hops)
  assert distance.dtype == np.int32
  np.testing.assert_array_equal(distance, slow_distance(start, edges, 20, hops))


def test_distance_goes_along_and_against_edges():
  chain = np.array([[1, 0], [2, 1], [3, 2], [4, 3]], np.int32)
  np.testing.assert_array_equal(
      adjacency.hops_from(np.array([2]), chain, 5, hops=1), [ABSENT, 1, 0, 1, ABSENT])
