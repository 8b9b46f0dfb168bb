import itertools

import numpy as np
import pytest

from tpugraphs_jax.data import buckets


def random_sizes(seed, count, largest=200):
  rng = np.random.default_rng(seed)
  nodes = rng.integers(1, largest, count)
  return [
      {"nodes": int(n), "edges": int(rng.integers(0, 2 * n)), "hop0": int(rng.integers(0, n))}
      for n in nodes
  ]


def waste(sizes, budgets):
  """Share of padding when every batch takes the first budget it fits into."""
  room = [budgets[buckets.smallest_fit([size], budgets)]["nodes"] for size in sizes]
  return 1 - sum(size["nodes"] for size in sizes) / sum(room)


@pytest.mark.parametrize("count", [1, 2, 5, 40, 300])
@pytest.mark.parametrize("max_budgets", [1, 3, 8])
def test_every_batch_fits_and_there_are_not_too_many_budgets(count, max_budgets):
  sizes = random_sizes(count, count)
  budgets = buckets.choose_budgets(sizes, max_budgets=max_budgets)
  assert 1 <= len(budgets) <= max_budgets
  for size in sizes:
    index = buckets.smallest_fit([size], budgets)
    assert index is not None
    # The padding graph needs a node of its own.
    assert size["nodes"] < budgets[index]["nodes"]


def test_budgets_are_multiples_and_grow():
  budgets = buckets.choose_budgets(random_sizes(0, 50), multiple=8)
  assert all(value % 8 == 0 for budget in budgets for value in budget.values())
  rows = [budget["nodes"] + 16 * budget["hop0"] for budget in budgets]
  assert rows == sorted(rows)


def test_reached_positions_cost_more_than_nodes():
  # Alike in nodes, so that only the reached ones tell the batches apart.
  sizes = [{"nodes": 1000, "hop0": tier0} for tier0 in (100, 110, 400, 410)]
  assert [b["hop0"] for b in buckets.choose_budgets(sizes, steps=1000, multiple=10)] == [
      110, 410]


def least_waste(nodes, runs):
  """Brute force over all ways to cut the sorted sizes into at most `runs` runs."""
  nodes = sorted(nodes)
  best = 1.0
  for count in range(runs):
    for cuts in itertools.combinations(range(1, len(nodes)), count):
      parts = [nodes[a:b] for a, b in zip((0, *cuts), (*cuts, len(nodes)))]
      padded = sum(len(part) * part[-1] for part in parts)
      best = min(best, 1 - sum(nodes) / padded)
  return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_budgets", [1, 2, 3])
def test_waste_of_an_endless_run_is_the_least_possible(seed, max_budgets):
  nodes = np.random.default_rng(seed).integers(1, 400, 9)
  # Only nodes, so that no other entry forces a batch into a larger budget.
  sizes = [{"nodes": int(n) - 1} for n in nodes]
  budgets = buckets.choose_budgets(sizes, max_budgets=max_budgets, multiple=1)
  found = 1 - nodes.sum() / sum(
      budgets[buckets.smallest_fit([size], budgets)]["nodes"] for size in sizes)
  assert found <= least_waste(nodes, max_budgets) + 0.02


def test_equal_batches_need_one_budget():
  sizes = [{"nodes": 31, "edges": 40}] * 20
  assert buckets.choose_budgets(sizes) == [{"nodes": 32, "edges": 48}]


def test_a_budget_must_save_more_padding_than_its_compilation_costs():
  sizes = [{"nodes": n} for n in (100, 200, 400, 800)]
  # The second of two budgets saves 1,200 nodes in four steps, each in 16 configurations.
  saved_rows = 16 * (4 * 800 - (2 * 200 + 2 * 800)) / 4
  short, long = (1.5e6 / saved_rows * factor for factor in (0.99, 1.01))
  assert len(buckets.choose_budgets(sizes, steps=short)) == 1
  assert len(buckets.choose_budgets(sizes, steps=long)) == 2
  assert len(buckets.choose_budgets(sizes)) == 4


def test_nodes_of_score_tables_count_once():
  kernels = [{"nodes": n} for n in (100, 200, 400, 800)]
  tables = [size | {"choices": 7} for size in kernels]
  assert buckets.cost(tables).tolist() == [100, 200, 400, 800]
  assert len(buckets.choose_budgets(kernels, steps=600)) > 1
  assert len(buckets.choose_budgets(tables, steps=600)) == 1


def test_large_batches_are_worth_more_budgets_than_small_ones():
  small = [{"nodes": n, "hop0": n // 10} for n in (100, 200, 400, 800)]
  large = [{key: 100 * size[key] for key in size} for size in small]
  assert len(buckets.choose_budgets(small, steps=1000)) == 1
  assert len(buckets.choose_budgets(large, steps=1000)) > 1


def test_frequent_sizes_weigh_more():
  # One budget may be spared; it goes to the size that almost all batches have.
  sizes = [{"nodes": 15}] * 1000 + [{"nodes": 500}, {"nodes": 900}]
  small = buckets.choose_budgets(sizes, max_budgets=2)[0]
  assert small["nodes"] == 16


def test_sizes_of_a_real_collection_waste_less_than_35_percent():
  """Batches of four graphs of 1 to 40 thousand nodes, sizes as skewed as real ones."""
  rng = np.random.default_rng(0)
  graphs = np.exp(rng.normal(np.log(6000), 0.9, 800)).clip(400, 40_000).astype(int)
  nodes = graphs.reshape(-1, 4).sum(axis=1)
  sizes = [{"nodes": int(n), "edges": int(1.65 * n), "hop0": int(n * rng.uniform(0.02, 0.1))}
           for n in nodes]
  budgets = buckets.choose_budgets(sizes, steps=1000)
  assert len(budgets) <= 8
  assert waste(sizes, budgets) < 0.35


def test_smallest_fit_takes_the_first_that_holds_all():
  budgets = [{"nodes": 16, "edges": 8}, {"nodes": 32, "edges": 64}]
  assert buckets.smallest_fit([{"nodes": 15, "edges": 8}], budgets) == 0
  assert buckets.smallest_fit([{"nodes": 15, "edges": 9}], budgets) == 1
  assert buckets.smallest_fit([{"nodes": 3, "edges": 1}, {"nodes": 16, "edges": 1}], budgets) == 1
  assert buckets.smallest_fit([{"nodes": 32, "edges": 1}], budgets) is None
