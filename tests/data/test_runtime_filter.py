"""The entropy filter against loops, and what it leaves alone."""

import dataclasses
import math

import numpy as np
import pytest
import random_graphs

from tpugraphs_jax import collections
from tpugraphs_jax.data import runtime_filter
from tpugraphs_jax.data.layout_data import LayoutData


def graph_of(runtime_ns):
  graph = random_graphs.layout_graph(
      np.random.default_rng(0), nodes=4, edges=3, config_nodes=[1], configs=len(runtime_ns))
  return dataclasses.replace(graph, configs=dataclasses.replace(
      graph.configs, runtime_ns=np.asarray(runtime_ns, np.int64)))


def slow_divergences(runtime):
  """Divergences between blocks of 100, and means over two on each side."""
  low, high = min(runtime), max(runtime)
  share = [(r - low) / max(high - low, 1) + 1e-3 for r in runtime]
  blocks = [share[i:i + 100] for i in range(0, len(share) - 99, 100)]
  found = []
  for before, block in zip(blocks, blocks[1:]):
    p, q = [b / sum(block) for b in block], [b / sum(before) for b in before]
    found.append(sum(a * math.log(a / b) for a, b in zip(p, q)))
  return [np.mean(found[max(0, i - 2): i + 3]) for i in range(len(found))]


def slow_kept(runtime, threshold):
  values = slow_divergences(runtime)
  blocks, kept = len(values) + 1, []
  for i in range(len(runtime)):
    block = min(i // 100, blocks - 1)
    sides = [values[s] for s in (block - 1, block) if 0 <= s < len(values)]
    kept += [i] * all(side >= threshold for side in sides)
  return kept if len(kept) >= 0.1 * len(runtime) else []


def runtimes(count, seed=0):
  """Lively stretches and dull ones by turns, around 2^45 nanoseconds."""
  rng = np.random.default_rng(seed)
  spread = np.where(np.arange(count) // 700 % 2, 10**4, 10**9)
  return 2**45 + (rng.random(count) * spread).astype(np.int64)


@pytest.mark.parametrize("count", [200, 399, 1000, 3456])
def test_divergences_equal_loops(count):
  runtime = runtimes(count)
  np.testing.assert_allclose(
      runtime_filter.divergences(runtime), slow_divergences(runtime.tolist()), rtol=1e-9)


@pytest.mark.parametrize("threshold", [0.1, 0.3, 1.0, 100.0])
@pytest.mark.parametrize("count", [200, 399, 3456])
def test_kept_configurations_equal_loops(count, threshold):
  graph = graph_of(runtimes(count))
  found = runtime_filter.drop_flat(graph, threshold).configs
  kept = slow_kept(graph.configs.runtime_ns.tolist(), threshold)
  np.testing.assert_array_equal(found.runtime_ns, graph.configs.runtime_ns[kept])
  np.testing.assert_array_equal(found.group_row, graph.configs.group_row[kept])


def test_dull_stretches_go():
  graph = graph_of(runtimes(3500))
  found = runtime_filter.drop_flat(graph, 0.3).configs
  assert 0 < len(found) < 3500
  dull = np.ptp(graph.configs.runtime_ns[900:1200])
  assert np.ptp(found.runtime_ns) > 1000 * dull


@pytest.mark.parametrize("runtime, threshold", [
    (runtimes(500), 0.0), (runtimes(199), 0.3), ([0] * 500, 0.3)])
def test_no_filter_few_configurations_and_no_labels_change_nothing(runtime, threshold):
  graph = graph_of(runtime)
  assert runtime_filter.drop_flat(graph, threshold) is graph


def test_equal_runtimes_have_no_divergence_and_leave_nothing():
  graph = graph_of([7] * 500)
  np.testing.assert_allclose(runtime_filter.divergences(graph.configs.runtime_ns), 0, atol=1e-12)
  assert len(runtime_filter.drop_flat(graph, 0.3).configs) == 0


def test_a_graph_with_nothing_left_is_left_out_with_a_reason():
  data = LayoutData(collections.of("layout", "xla", "random"), entropy_threshold=0.3)
  empty = runtime_filter.drop_flat(graph_of([7] * 500), 0.3).configs
  assert data.why_not_trained(empty, min_configs=2) == "fewer than 2 configurations"
