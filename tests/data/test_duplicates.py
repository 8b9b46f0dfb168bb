"""One configuration for each set of equal ones, and every policy's runtime."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import random_graphs

from tpugraphs_jax.data import distinct, duplicates


def graph_of(group_row, runtime_ns):
  graph = random_graphs.layout_graph(
      np.random.default_rng(0), nodes=6, edges=8, config_nodes=[1, 3, 4, 5], configs=1)
  group_row = np.asarray(group_row, np.uint8)
  configs = dataclasses.replace(
      graph.configs, group_row=group_row, runtime_ns=np.asarray(runtime_ns, np.int64),
      node_group=np.arange(4, dtype=np.int32) % group_row.shape[1])
  return dataclasses.replace(graph, configs=configs)


def slow(graph, policy):
  """Rows and runtimes by a dictionary of tuples; means as exact fractions."""
  runtimes = {}
  for row, runtime in zip(graph.configs.group_row.tolist(), graph.configs.runtime_ns.tolist()):
    runtimes.setdefault(tuple(row), []).append(runtime)
  combine = {"first": lambda r: r[0], "min": min, "mean": lambda r: Fraction(sum(r), len(r))}
  return list(runtimes), [combine[policy](r) for r in runtimes.values()]


@pytest.mark.parametrize("policy", ["first", "min", "mean"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_policies_equal_a_slow_dictionary(policy, groups):
  rng = np.random.default_rng(groups)
  # Around 2^60: neither a sum in int64 nor a mean in float64 would be exact.
  graph = graph_of(rng.integers(0, 3, (80, groups)), 2**60 + rng.integers(0, 100, 80))
  found = duplicates.apply_policy(graph, policy).configs
  rows, runtimes = slow(graph, policy)
  assert [tuple(row) for row in found.group_row.tolist()] == rows
  half = Fraction(policy == "mean", 2)  # rounded to nanoseconds
  assert all(abs(a - b) <= half for a, b in zip(found.runtime_ns.tolist(), runtimes, strict=True))
  assert found.runtime_ns.dtype == np.int64 and found.group_row.dtype == np.uint8


def test_keep_leaves_the_graph_alone():
  graph = graph_of([[0], [0]], [5, 6])
  assert duplicates.apply_policy(graph, "keep") is graph


@pytest.mark.parametrize("policy", duplicates.POLICIES)
def test_distinct_configurations_stay_as_they_are(policy):
  graph = graph_of([[2, 0], [0, 2], [1, 1]], [7, 5, 6])
  found = duplicates.apply_policy(graph, policy).configs
  np.testing.assert_array_equal(found.group_row, graph.configs.group_row)
  np.testing.assert_array_equal(found.runtime_ns, [7, 5, 6])


def test_equal_configurations_become_one_and_no_labels_stay_no_labels():
  found = duplicates.apply_policy(graph_of([[1, 2]] * 4, [0] * 4), "mean").configs
  assert found.group_row.tolist() == [[1, 2]] and not found.is_labelled


def test_memory_maps_and_two_byte_rows_are_taken(tmp_path):
  rows = np.array([[300, 1], [2, 300], [300, 1]], np.uint16)
  np.save(tmp_path / "rows.npy", rows)
  graph = graph_of([[0, 0]] * 3, [3, 2, 1])
  configs = dataclasses.replace(
      graph.configs, group_row=np.load(tmp_path / "rows.npy", mmap_mode="r"))
  found = duplicates.apply_policy(dataclasses.replace(graph, configs=configs), "min").configs
  np.testing.assert_array_equal(found.group_row, rows[:2])
  np.testing.assert_array_equal(found.runtime_ns, [1, 2])


@pytest.mark.parametrize("array", [
    np.array([[1, 2], [3, 4], [1, 2], [0, 9], [3, 4]], np.uint8),
    np.array([[[0.5, 2]], [[0.5, 2]]], np.float32), np.array([[7], [300]], np.uint16),
    np.broadcast_to(np.arange(3), (4, 3)), np.asfortranarray([[1, 2], [2, 1], [1, 2]]),
])
def test_distinct_rows_are_the_first_of_each_in_file_order(array):
  first, which = distinct.rows(array)
  rows = [row.tobytes() for row in np.ascontiguousarray(array)]
  assert [rows[i] for i in first] == list(dict.fromkeys(rows))
  assert first.tolist() == [rows.index(row) for row in dict.fromkeys(rows)]
  np.testing.assert_array_equal(array[first][which], array)


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="duplicate_policy is 'max', expected one of keep, first"):
    duplicates.apply_policy(graph_of([[0]], [1]), "max")
