"""Searches over pools of choices with made-up labels."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks import blind
from tests.support import commands
from tests.support.hlo_modules import ARGS, network
from tools import search_prior
from tpugraphs_jax import columns
from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.rankers.ranker import load
from tpugraphs_jax.tuning import labels, strategies, tune
from tpugraphs_jax.tuning.prior import (
  change_features,
  COSTS,
  LARGEST_EFFECT,
  OPERATIONS,
  ORDERS,
  read,
)
from tpugraphs_jax.tuning.problem import Problem


@pytest.fixture(scope="module")
def problem():
  return Problem(Call(network, ARGS), labels.Measured())


@pytest.fixture(scope="module")
def ranker():
  return load("layout-cpu-measured")


@pytest.fixture(scope="module")
def prior():
  return tune.prior_of(None)


def _pool(problem, count=None, *, is_open=False):
  choices = list(itertools.islice(problem.candidates(), count))
  return strategies.Pool(choices, problem.with_configs, problem.numbers_of if is_open else None)


def _searches(pool, ranker, prior, seed=0):
  return {
    "learned": strategies.learned(pool, ranker, prior),
    "model": strategies.model(pool, ranker),
    "random": blind.random(pool, seed),
    "coordinate": blind.coordinate(pool, seed),
  }


def _run(search, ratio, count=10_000):
  """The choices that a search yields when it is told `ratio(numbers)`."""
  tried = [next(search)]
  while len(tried) < count:
    try:
      tried.append(search.send(ratio(tried[-1])))
    except StopIteration:
      break
  return tried


@pytest.mark.parametrize("predicts_times", [False, True])
def test_predicted_times_are_compared_with_the_time_of_the_compilers_own_choice(
  problem, predicts_times
):
  class Fake:
    def scores(self, graphs):
      return [np.arange(5, 5 + len(graph.configs), dtype=np.float32) for graph in graphs]

  ranker = Fake()
  ranker.predicts_times = predicts_times
  _, found = strategies.costs(_pool(problem, 20), ranker)
  differences = np.arange(1, len(found) + 1)
  np.testing.assert_allclose(found, differences / 5 if predicts_times else differences)


def _sums(numbers):
  return math.exp(0.02 * sum(numbers))


@pytest.mark.parametrize(
  "told", [_sums, lambda numbers: None, lambda numbers: math.inf if any(numbers) else 1]
)
@pytest.mark.parametrize("name", ["learned", "model", "random", "coordinate"])
def test_every_choice_is_tried_once_the_compilers_own_first(problem, ranker, prior, name, told):
  pool = _pool(problem, 12)
  tried = _run(_searches(pool, ranker, prior)[name], told)
  assert tried[0] == (0,) * len(problem.options)
  assert sorted(tried) == sorted(pool.choices)


@pytest.mark.parametrize("name", ["learned", "model", "random", "coordinate"])
def test_a_search_is_the_same_for_the_same_seed(problem, ranker, prior, name):
  runs = [_run(_searches(_pool(problem), ranker, prior, seed=3)[name], _sums) for _ in range(2)]
  assert runs[0] == runs[1]
  if name in ("random", "coordinate"):
    assert runs[0] != _run(_searches(_pool(problem), ranker, prior, seed=4)[name], _sums)


def test_where_the_pool_is_open_what_gained_is_tried_with_everything_else(problem, ranker, prior):
  pool = _pool(problem, 4, is_open=True)
  gains = {change: 0.9 for change in pool.changes}
  ratio = lambda numbers: math.prod(gains.get(change, 1) for change in enumerate(numbers))
  tried = _run(strategies.learned(pool, ranker, prior), ratio, 30)
  values = [{0} for _ in problem.options]
  for group, option in pool.changes:
    values[group].add(option)
  every = list(itertools.product(*values))
  assert min(map(ratio, tried)) == min(map(ratio, every)) < min(map(ratio, pool.choices))


def test_a_change_that_cost_is_not_combined_and_one_that_gained_is(problem, ranker, prior):
  pool = _pool(problem)
  good, bad = (
    pool.changes[0],
    next(change for change in pool.changes if change[0] != pool.changes[0][0]),
  )
  belief = strategies.Belief.of(pool, ranker, prior)
  single = lambda change: tuple(
    change[1] if place == change[0] else 0 for place in range(len(problem.options))
  )
  before = belief.expected([single(good), single(bad)])
  belief.learn(single(good), -0.2)
  belief.learn(single(bad), 0.5)
  after = belief.expected([single(good), single(bad)])
  assert after[0] < before[0] and after[1] > before[1]
  assert after[1] < LARGEST_EFFECT + 0.05  # larger costs are all the same


def test_a_belief_is_the_posterior_of_linear_regression(problem, ranker, prior):
  pool = _pool(problem)
  belief, rng = strategies.Belief.of(pool, ranker, prior), np.random.default_rng(0)
  mean, covariance = belief.mean.copy(), belief.covariance.copy()
  chosen = [pool.choices[place] for place in rng.permutation(len(pool.choices))[:5]]
  effects = rng.normal(0, 0.03, 5)
  for numbers, effect in zip(chosen, effects):
    belief.learn(numbers, effect)
  rows = np.array(
    [[numbers[group] == option for group, option in pool.changes] for numbers in chosen], float
  )
  # All labels at once, in the form with inverses of covariances.
  precision = np.linalg.inv(covariance) + rows.T @ rows / prior.noise**2
  expected = np.linalg.solve(
    precision, np.linalg.solve(covariance, mean) + rows.T @ effects / prior.noise**2
  )
  np.testing.assert_allclose(belief.mean, expected, rtol=1e-6, atol=1e-9)
  np.testing.assert_allclose(belief.covariance, np.linalg.inv(precision), rtol=1e-5, atol=1e-9)


def test_the_most_promising_choice_has_the_largest_mean_gain_of_many_draws(problem, ranker, prior):
  pool = _pool(problem)
  belief, rng = strategies.Belief.of(pool, ranker, prior), np.random.default_rng(0)
  draws = rng.multivariate_normal(belief.mean, belief.covariance, 200_000)
  others = pool.choices[1:]
  gains = np.maximum(-0.01 - draws @ pool.rows(others).T, 0).mean(axis=0)
  found = belief.most_promising(others, -0.01)
  assert gains[found] >= gains.max() * 0.97
  assert stats.rankdata(-gains)[found] <= 2


def test_coordinate_search_keeps_a_change_that_gains(problem):
  pool = _pool(problem, is_open=True)
  gain = pool.changes[-1]
  tried = _run(
    blind.coordinate(pool, 0),
    lambda numbers: 0.5 if numbers[gain[0]] == gain[1] else 1,
    len(pool.changes) + 1,
  )
  place = next(place for place, numbers in enumerate(tried) if numbers[gain[0]] == gain[1])
  assert all(
    numbers[gain[0]] == gain[1] for numbers in tried[place:] if sum(map(bool, numbers)) > 1
  )


def test_beliefs_about_compiler_options_are_wide_and_cost_nothing_of_the_model(ranker, prior):
  options = {"xla_flag": [1, 2]}
  with_options = Problem(Call(network, ARGS), labels.Measured(), compiler_options=options)
  pool = _pool(with_options, is_open=True)
  pool = strategies.Pool(pool.choices, pool.graph, pool.numbers_of, compiler_options=1)
  belief = strategies.Belief.of(pool, ranker, prior)
  plain = strategies.Belief.of(
    _pool(Problem(Call(network, ARGS), labels.Measured())), ranker, prior
  )
  count = len(plain.mean)
  assert [group for group, _ in pool.changes[count:]] == [pool.layouts] * 2
  np.testing.assert_array_equal(belief.mean[:count], plain.mean)
  np.testing.assert_array_equal(belief.covariance[:count, :count], plain.covariance)
  assert not belief.covariance[:count, count:].any()
  deviation = np.sqrt(np.diag(belief.covariance))
  assert deviation[count:].min() > deviation[:count].max() and np.ptp(belief.mean[count:]) == 0


def test_options_of_the_best_choice_go_into_the_models_turns(ranker, prior):
  options = {"xla_flag": [1, 2]}
  with_options = Problem(Call(network, ARGS), labels.Measured(), compiler_options=options)
  choices = list(with_options.candidates())
  pool = strategies.Pool(choices, with_options.with_configs, with_options.numbers_of, 1)
  ratio = lambda numbers: 0.7 if numbers[-1] == 2 else 1 + 0.05 * sum(numbers)
  assert all(numbers[-1] == 0 for numbers in _run(strategies.model(pool, ranker), ratio, 4))
  tried = _run(strategies.learned(pool, ranker, prior), ratio, 12)
  found = next(place for place, numbers in enumerate(tried) if numbers[-1] == 2)
  assert {numbers[-1] for numbers in tried[found + 1 + found % 2 :: 2]} == {2}
  assert (0,) * (len(choices[0]) - 1) + (2,) in tried


def test_a_pool_names_the_changes_of_each_choice(problem):
  pool = _pool(problem, 9)
  rows = pool.rows(pool.choices)
  assert not rows[0].any()
  for numbers, row in zip(pool.choices, rows):
    assert {change for change, has in zip(pool.changes, row) if has} == {
      (group, option) for group, option in enumerate(numbers) if option
    }


def test_a_prior_is_read_as_it_was_written_and_a_damaged_one_refused(prior, tmp_path):
  path = tmp_path / "some.prior.json"
  search_prior.write(path, prior)
  again = read(path)
  np.testing.assert_array_equal(again.mean, prior.mean)
  np.testing.assert_array_equal(again.log_spread, prior.log_spread)
  assert (again.noise, again.correlation, again.unit) == (
    prior.noise,
    prior.correlation,
    prior.unit,
  )
  path.write_text(path.read_text()[:-40])
  with pytest.raises(ValueError, match="some.prior.json is damaged"):
    read(path)


def test_effects_of_one_kind_are_correlated_and_of_others_not(prior):
  feat = np.zeros((3, len(prior.mean)))
  feat[:, 0] = 1
  _, covariance = prior.effects(feat, np.array([4, 4, 7]))
  spread = np.sqrt(np.diag(covariance))
  correlation = covariance / spread[:, None] / spread
  np.testing.assert_allclose(
    correlation, [[1, prior.correlation, 0], [prior.correlation, 1, 0], [0, 0, 1]]
  )


def test_kinds_of_changes_are_those_of_a_slow_formulation():
  path = commands.ROOT / "data/own/npz/layout/own/kept_out/test/kept_out_diffusion.npz"
  graph = npz.read_layout(path)
  rows = graph.configs.row_id(np.arange(len(graph.configs)))
  config, node = np.nonzero(rows[1:] != rows[0])
  row, cost = rows[1:][config, node], np.linspace(0, 0.4, len(node))
  feat, kind = change_features(graph, node, row, cost)
  names = {number: name for name, number in columns.opcode_ids().items()}
  column = lambda at, block: graph.node_feat[at, columns.NODE[block]]
  shape = lambda at: tuple(column(at, "shape")[: columns.MAX_RANK].astype(int))
  for each, (k, r) in enumerate(zip(node, row)):
    at = graph.config_node[k]
    rank = sum(size > 0 for size in shape(at))
    operation = {
      "convolution": "weight gradient"
      if column(at, "output_batch_dimension")[0] > 0
      else "convolution",
      "dot": "batched dot" if rank > 2 else "dot",
    }.get(names[graph.node_opcode[at]], "reshape")
    given = [dim for dim in graph.configs.rows[r, :6] if dim >= 0]
    order = given + [dim for dim in reversed(range(rank)) if dim not in given]
    users = [user for user, producer in graph.edge_index if producer == at]
    alike = [user for user in users if shape(user) == shape(at)]
    layout = lambda at: column(at, "minor_to_major")[:rank].tolist()
    expected = 2 if alike else 3
    if order == layout(at):
      expected = int(
        any(layout(user) != layout(at) for user in alike if user not in graph.config_node)
      )
    assert kind[each] == OPERATIONS.index(operation) * len(ORDERS) + expected
    *classes, last = feat[each, -5:]
    assert last == min(cost[each], 0.3) and sum(classes) == 1
    assert classes[sum(cost[each] >= edge for edge in COSTS)] == 1
  assert len(set(kind.tolist())) > 4


def test_first_comes_one_choice_of_every_score_and_of_every_set_of_groups():
  changed = np.array([[0, 0], [1, 0], [1, 0], [0, 1], [1, 1], [1, 0]], bool)
  scores = np.array([0, 3, 2, 0, 2.5, 1], np.float32)
  order = np.argsort(scores, kind="stable")
  # 3 has the score of 0, the compiler's own; 2 and 1 change the same group as 5.
  assert strategies.spread(order, scores, changed) == [0, 5, 4, 2, 1, 3]
  assert strategies.spread(order[::-1], scores, changed) == [0, 1, 4, 2, 5, 3]
