"""Slates follow the exact distributions; targets keep what int64 tells apart."""

import collections
import itertools
import math

import numpy as np
import pytest

from tpugraphs_jax.data import sampling
from tpugraphs_jax.graph import LayoutConfigs

DRAWS = 20_000


def counts_of(runtime, count, kind, seed=0):
  rng, draw = np.random.default_rng(seed), sampling.config_draw(np.array(runtime), count, kind)
  return collections.Counter(tuple(sorted(draw(rng).tolist())) for _ in range(DRAWS))


def assert_frequencies(counts, probability):
  """Every outcome within four standard errors of its exact probability."""
  assert math.isclose(sum(probability.values()), 1)
  assert counts.keys() <= probability.keys()
  for outcome, p in probability.items():
    assert abs(counts[outcome] / DRAWS - p) < 4 * math.sqrt(p * (1 - p) / DRAWS), outcome


def gumbel_top_k(keys, count):
  """Probability of each set: draw one after the other by exp(key), without putting back."""
  total = collections.Counter()
  for order in itertools.permutations(range(len(keys)), count):
    left, p = list(range(len(keys))), 1.0
    for config in order:
      p *= math.exp(keys[config]) / sum(math.exp(keys[other]) for other in left)
      left.remove(config)
    total[tuple(sorted(order))] += p
  return total


@pytest.mark.parametrize("count", [1, 2, 4])
def test_skewed_slates_follow_gumbel_top_k(count):
  # Official weights: the share of configurations that are not faster.
  assert_frequencies(counts_of([900, 100, 300, 500, 700], count, "skewed"),
                     gumbel_top_k([1 / 5, 5 / 5, 4 / 5, 3 / 5, 2 / 5], count))


@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_slates_with_replacement_are_independent_draws(kind):
  weight = np.exp([1 / 3, 1, 2 / 3]) if kind == "skewed" else np.ones(3)
  expected = collections.Counter()
  for pair in itertools.product(range(3), repeat=2):
    expected[tuple(sorted(pair))] += np.prod(weight[list(pair)]) / weight.sum() ** 2
  assert_frequencies(counts_of([50, 10, 30], 2, f"{kind}_replacement"), expected)


def test_uniform_slates_give_every_set_the_same_chance():
  sets = list(itertools.combinations(range(5), 3))
  assert_frequencies(counts_of(range(5), 3, "uniform"), dict.fromkeys(sets, 1 / len(sets)))


def test_every_other_slate_is_of_close_runtimes():
  order, count = np.random.default_rng(0).permutation(12), 2
  expected = collections.Counter()
  for pair in itertools.combinations(range(12), 2):
    p = 0.5 / math.comb(12, 2)
    for length in (2, 4, 6, 8):  # windows of one to four slates
      starts = 12 - length + 1
      holding = sum(start <= pair[0] and pair[1] < start + length for start in range(starts))
      p += 0.5 / 4 * holding / starts / math.comb(length, 2)
    expected[tuple(sorted(order[list(pair)].tolist()))] = p
  assert_frequencies(counts_of(np.argsort(order), count, "close_runtimes"), expected)


def test_the_sampler_knows_the_order_of_runtimes():
  configs = configs_of(np.array([50, 10, 40, 20, 30] * 8) * 1000 + np.arange(40))
  target = lambda configs, ids: configs.runtime_ns[ids].astype(np.float32)
  sampler = sampling.ConfigSampler(
      [configs], count=3, sampling="close_runtimes", targets=target)
  place, spread = np.argsort(np.argsort(configs.runtime_ns)), []
  for seed in range(400):
    ids, runtime = sampler(0, np.random.default_rng(seed))
    np.testing.assert_array_equal(runtime, configs.runtime_ns[ids].astype(np.float32))
    spread.append(np.ptp(place[ids]))
  near = np.mean(np.array(spread) < 12)  # windows are of at most 12 of the 40
  assert 0.5 < near < 0.7


def test_graphs_weigh_by_their_configurations():
  configs = [configs_of(np.arange(1, n + 1)) for n in (4, 9, 1)]
  assert sampling.graph_weights(configs, "uniform") is None
  np.testing.assert_array_equal(sampling.graph_weights(configs, "proportional"), [4, 9, 1])
  np.testing.assert_array_equal(sampling.graph_weights(configs, "sqrt"), [2, 3, 1])


@pytest.mark.parametrize("kind", sampling.SAMPLINGS)
def test_a_slate_is_a_pure_function_of_the_generator(kind):
  draw = sampling.config_draw(np.arange(40), 10, kind)
  first, second = (draw(np.random.default_rng(7)) for _ in range(2))
  np.testing.assert_array_equal(first, second)
  assert len(first) == 10 and first.min() >= 0 and first.max() < 40
  assert kind.endswith("replacement") or len(set(first.tolist())) == 10


@pytest.mark.parametrize("kind", sampling.SAMPLINGS)
@pytest.mark.parametrize("count", [4, 5, 16])
def test_fewer_configurations_than_the_slate_give_all_of_them(kind, count):
  ids = sampling.config_draw(np.array([4, 3, 2, 1]), count, kind)(np.random.default_rng(0))
  if kind.endswith("replacement"):
    assert len(ids) == count and set(ids.tolist()) <= {0, 1, 2, 3}
  else:
    assert sorted(ids.tolist()) == [0, 1, 2, 3]


def configs_of(runtime_ns):
  return LayoutConfigs(np.zeros((1, 18), np.int8), np.zeros(1, np.int32),
                       np.zeros((len(runtime_ns), 1), np.uint8), np.asarray(runtime_ns))


def test_official_targets_are_normalised_in_float64():
  runtime, unit = np.array([2**40 + 1, 3, 2**33 + 5]), np.array([7, 5, 2**34])
  for given in (unit, 1e7):
    found = sampling.slate_target(runtime, given, "official")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32([
        int(r) / float(u) for r, u in zip(runtime, np.broadcast_to(given, 3))]))


@pytest.mark.parametrize("kind", ["ratio", "rank"])
@pytest.mark.parametrize("base", [2**31, 2**53, 2**61])
def test_runtimes_one_nanosecond_apart_stay_apart(kind, base):
  runtime = base + np.array([2, 0, 1, 2, 5])
  target = sampling.slate_target(runtime, 1.0, kind)
  assert target.dtype == np.float32
  np.testing.assert_array_equal(np.sign(np.subtract.outer(target, target)),
                                np.sign(np.subtract.outer(runtime, runtime)))


def test_ratio_and_rank_by_their_formulas():
  target = lambda runtime, kind: sampling.slate_target(np.array(runtime), 1.0, kind)
  np.testing.assert_array_equal(target([40, 10, 25, 10], "ratio"), [3.0, 0.0, 1.5, 0.0])
  np.testing.assert_array_equal(target([40, 10, 25, 10], "rank"), [1.0, 0.0, 0.5, 0.0])
  for kind in ("ratio", "rank"):
    np.testing.assert_array_equal(target([7, 7], kind), [0, 0])


@pytest.mark.parametrize("count", [3, 7, 10, 29])
def test_thirds_keep_the_fastest_the_slowest_and_some_between(count):
  runtime = np.random.default_rng(1).permutation(30) * 10**10
  kept = sampling.thirds(runtime, count, np.random.default_rng(2))
  assert len(set(kept.tolist())) == count and (np.diff(kept) > 0).all()
  order, third = np.argsort(runtime), count // 3
  assert {*order[:third], *order[30 - third :]} <= {*kept}


def test_thirds_draw_the_middle_evenly_and_keep_small_graphs_whole():
  runtime, rng = np.arange(10), np.random.default_rng(3)
  counts = collections.Counter(
      config for _ in range(3000) for config in sampling.thirds(runtime, 4, rng).tolist())
  assert counts[0] == counts[9] == 3000
  for config in range(1, 9):
    assert abs(counts[config] - 750) < 4 * math.sqrt(3000 * 0.25 * 0.75)
  for count in (10, 11):
    np.testing.assert_array_equal(sampling.thirds(runtime, count, rng), np.arange(10))


@pytest.mark.parametrize("nodes, keep", [(10, 3), (9, 3), (3, 3), (2, 5), (1, 1)])
def test_blocks_partition_the_graph_and_each_is_drawn_evenly(nodes, keep):
  rng, draws = np.random.default_rng(4), 4000
  counts = collections.Counter(sampling.sample_block(nodes, keep, rng) for _ in range(draws))
  covered = [node for start, stop in sorted(counts) for node in range(start, stop)]
  assert covered == list(range(nodes))
  assert max(stop - start for start, stop in counts) == min(nodes, keep)
  p = 1 / len(counts)
  assert all(abs(n / draws - p) <= 4 * math.sqrt(p * (1 - p) / draws) for n in counts.values())
