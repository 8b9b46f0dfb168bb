"""Losses against slow float64 formulations, and what every loss promises."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax import losses

GRAPHS, CONFIGS = 4, 5
NAMES = list(losses.LOSSES)
RANKING = [name for name in NAMES if name not in ("MSE", "LogMSE", "MAPE")]
CROSS = ("CrossHingeLoss", "CrossLogisticLoss")


def _log1p_exp(x):
  return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _slow_listmle(s, y):
  order = sorted(range(len(s)), key=lambda i: -y[i])
  total = 0.0
  for k, item in enumerate(order):
    rest = [s[other] for other in order[k:]]
    largest = max(rest)
    total += largest + math.log(sum(math.exp(r - largest) for r in rest)) - s[item]
  return total, 1


def _slow_pairs(s, y, pair_loss, divisor, is_slower=lambda a, b: a > b):
  n = len(s)
  found = [pair_loss(s[i] - s[j]) for i in range(n) for j in range(n) if is_slower(y[i], y[j])]
  divisors = {"items": 1, "sum": 1, "pairs": n * (n - 1) / 2, "mean_all": n * n,
              "mean_valid": len(found)}
  if not divisors[divisor]:
    return 0.0, 0
  return sum(found) / divisors[divisor], n if divisor == "items" else 1


def _slow_inverse_log_hinge(s, y):
  return -1 / math.log(2 + _slow_pairs(s, y, _hinge(1.0), "sum")[0]), 1


def _slow_dcg_hinge(s, y):
  rank = {i: r for r, i in enumerate(sorted(range(len(s)), key=lambda i: s[i]), 1)}
  gain = [min(y) / label for label in y]
  discount = [1 / math.log2(1 + rank[i]) for i in range(len(s))]
  total = sum(
      abs(gain[i] - gain[j]) * abs(discount[i] - discount[j])
      * max(0.0, 1 - (s[i] - s[j]))
      for i in range(len(s)) for j in range(len(s)) if y[i] > y[j]
  )
  return total, len(s)


def _hinge(margin):
  return lambda difference: max(0.0, margin - difference)


def _logistic(difference):
  return _log1p_exp(-difference)


def _slow_cost_logistic(s, y):
  costs = [2 * math.log1p(max(cost, 0) / 0.01) for cost in s]
  pairs = sum(a > b for a in y for b in y)
  total, count = _slow_pairs(costs, y, _logistic, "sum")
  return (total / pairs, count) if pairs else (0.0, 0)


SLOW = {
    "ListMLELoss": _slow_listmle,
    "PairwiseHingeLoss": lambda s, y: _slow_pairs(s, y, _hinge(1.0), "items"),
    "PairwiseLogisticLoss": lambda s, y: _slow_pairs(s, y, _logistic, "items"),
    "MSE": lambda s, y: (sum((a - b) ** 2 for a, b in zip(s, y)), len(s)),
    "RankHingeLoss": lambda s, y: _slow_pairs(s, y, _hinge(1.0), "pairs"),
    "RankLogisticLoss": lambda s, y: _slow_pairs(s, y, _logistic, "pairs"),
    "SumHingeLoss": lambda s, y: _slow_pairs(s, y, _hinge(0.1), "sum"),
    "DiffMatLoss": lambda s, y: _slow_pairs(
        s, y, lambda difference: max(0.0, 1 - difference / 0.005), "pairs"),
    "CrossHingeLoss": lambda s, y: _slow_pairs(s, y, _hinge(1.0), "mean_all"),
    "CrossLogisticLoss": lambda s, y: _slow_pairs(s, y, _logistic, "mean_all"),
    "InverseLogHingeLoss": _slow_inverse_log_hinge,
    "MAPE": lambda s, y: (sum(abs(a - b) / b for a, b in zip(s, y)), len(s)),
    "CostLogisticLoss": _slow_cost_logistic,
    "DCGHingeLoss": _slow_dcg_hinge,
    "LogMSE": lambda s, y: (
        sum((a - math.log(b)) ** 2 for a, b in zip(s, y)), len(s)
    ),
}


def _slow(name, scores, labels, where):
  total, count = 0.0, 0
  if name in CROSS:
    scores, labels, where = (array.reshape(1, -1) for array in (scores, labels, where))
  for s, y, real in zip(scores, labels, where):
    if real.any():
      part = SLOW[name](s[real].astype(float).tolist(), y[real].astype(float).tolist())
      total, count = total + part[0], count + part[1]
  return total, count


def _slates(seed=0):
  rng = np.random.default_rng(seed)
  scores = rng.normal(size=(GRAPHS, CONFIGS)).astype(np.float32)
  labels = rng.uniform(0.5, 4.0, size=(GRAPHS, CONFIGS)).astype(np.float32)
  return scores, labels, np.ones((GRAPHS, CONFIGS), bool)


def _ragged_mask():
  """Holes at the start, in the middle and at the end; one item; everything."""
  where = np.ones((GRAPHS, CONFIGS), bool)
  where[0, 0] = where[0, 2] = where[1, 3:] = where[2, 1:] = False
  return where


def _case(case):
  scores, labels, where = _slates()
  if case != "no mask":
    where = _ragged_mask()
  if case == "all-masked list":
    where[1] = False
  if case == "everything masked":
    where[:] = False
  if case == "tied labels":
    labels[:] = 2.0
    labels[3, :2] = 1.0
  if case == "extreme scores":
    scores[0] = [1e15, -1e15, 0.0, 90.0, -110.0]
    scores[3] = [-110.0, 3e4, 90.0, 1e15, -1e15]
  return scores, labels, where


CASES = [
    "no mask", "ragged mask", "all-masked list", "everything masked", "tied labels",
    "extreme scores",
]


@functools.cache
def _compiled(name):
  def value(scores, labels, where):
    return losses.LOSSES[name](scores, labels, where=where)

  return jax.jit(jax.value_and_grad(value, has_aux=True))


_loss_sums = jax.jit(
    losses.loss_sums, static_argnames=("losses", "temperature")
)


def _evaluate(name, scores, labels, where):
  """Total, count and the total's gradient with respect to the scores."""
  (total, count), grad = _compiled(name)(scores, labels, where)
  return total, count, np.asarray(grad)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_value_equals_slow_formulation_and_gradient_is_finite(name, case):
  scores, labels, where = _case(case)
  total, count, grad = _evaluate(name, scores, labels, where)
  expected_total, expected_count = _slow(name, scores, labels, where)
  np.testing.assert_allclose(total, expected_total, rtol=1e-5, atol=1e-6)
  assert count == expected_count
  assert total.dtype == count.dtype == jnp.float32
  assert np.isfinite(grad).all()
  assert not grad[~where].any()


@pytest.mark.parametrize("filler", [np.nan, np.inf, -1e30, 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_content_of_masked_slots_has_no_influence(name, filler):
  scores, labels, where = _case("all-masked list")
  expected = _evaluate(name, scores, labels, where)
  filled = [np.where(where, array, filler) for array in (scores, labels)]
  for actual, value in zip(_evaluate(name, *filled, where), expected):
    np.testing.assert_array_equal(actual, value)


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_a_missing_mask_do_not_change_the_loss(name):
  scores, labels, where = _slates()
  expected = _evaluate(name, scores, labels, where)
  padded = [np.pad(array, ((0, 2), (0, 3))) for array in (scores, labels, where)]
  loss = jax.jit(losses.LOSSES[name])
  for total, count in (loss(scores, labels), loss(*padded[:2], where=padded[2])):
    np.testing.assert_allclose(total, expected[0], rtol=1e-6)
    assert count == expected[1]


@pytest.mark.parametrize("name", RANKING)
def test_right_order_costs_less_than_wrong_order(name):
  _, labels, where = _slates()
  right = _evaluate(name, labels, labels, where)[0]
  wrong = _evaluate(name, -labels, labels, where)[0]
  assert right < wrong


def test_step_over_two_devices_gives_the_loss_and_gradient_of_one():
  scores, labels, where = _case("all-masked list")
  weighted = losses.parse_losses(
      "ListMLELoss:1,PairwiseHingeLoss:2,RankLogisticLoss:3,MSE:4,CrossHingeLoss:5,"
      "InverseLogHingeLoss:6"
  )

  def step(scores, labels, where, sum_over_devices, axis=None):
    def local_loss(scores):
      totals, counts = losses.loss_sums(
          weighted, scores, labels, where=where, temperature=10.0, axis=axis
      )
      return losses.combine(weighted, totals, sum_over_devices(counts))

    loss, grad = jax.value_and_grad(local_loss)(scores)
    return sum_over_devices(loss), grad

  one = jax.jit(functools.partial(step, sum_over_devices=lambda x: x))
  two = jax.pmap(
      functools.partial(
          step, sum_over_devices=functools.partial(jax.lax.psum, axis_name="devices"),
          axis="devices",
      ),
      axis_name="devices",
      devices=jax.local_devices()[:2],
  )
  halves = [a.reshape(2, GRAPHS // 2, CONFIGS) for a in (scores, labels, where)]
  loss, grad = one(scores, labels, where)
  loss_two, grad_two = two(*halves)
  np.testing.assert_allclose(loss_two, [loss, loss], rtol=1e-6)
  np.testing.assert_allclose(
      np.reshape(grad_two, grad.shape), grad, rtol=1e-5, atol=1e-7
  )


def test_combined_loss_is_the_weighted_sum_of_the_means():
  scores, labels, where = _case("ragged mask")
  weighted = losses.parse_losses("ListMLELoss:3,MSE:1")
  totals, counts = _loss_sums(
      weighted, scores, labels, where=where, temperature=10.0
  )
  listmle = _slow("ListMLELoss", scores / 10.0, labels, where)
  mse = _slow("MSE", scores, labels, where)
  expected = 0.75 * listmle[0] / listmle[1] + 0.25 * mse[0] / mse[1]
  np.testing.assert_allclose(
      losses.combine(weighted, totals, counts), expected, rtol=1e-6
  )


def test_combined_loss_of_nothing_is_zero():
  scores, labels, where = _case("everything masked")
  weighted = losses.parse_losses("ListMLELoss:1,RankHingeLoss:1")
  sums = _loss_sums(weighted, scores, labels, where=where)
  assert losses.combine(weighted, *sums) == 0.0


def test_temperature_divides_the_scores_of_listmle_and_of_nothing_else():
  scores, labels, where = _slates()
  weighted = tuple((name, 1.0) for name in NAMES)
  hot = _loss_sums(weighted, scores, labels, temperature=4.0)[0]
  for name, total in zip(NAMES, hot):
    used = scores / 4.0 if name == "ListMLELoss" else scores
    np.testing.assert_allclose(
        total, _slow(name, used, labels, where)[0], rtol=1e-5, err_msg=name
    )


def test_hinge_has_no_cost_beyond_its_margin():
  labels = np.array([[2.0, 1.0]], np.float32)
  for gap, expected in ((0.3, 0.2), (0.5, 0.0), (-1.0, 1.5)):
    scores = np.array([[gap, 0.0]], np.float32)
    total, _ = losses.pairwise_hinge(scores, labels, margin=0.5)
    np.testing.assert_allclose(total, expected, atol=1e-6)


def test_keys_put_tied_items_in_every_order():
  scores = np.array([[0.0, 1.0, 3.0]], np.float32)
  labels = np.ones_like(scores)
  keys = jax.random.split(jax.random.key(0), 60)
  shuffled = jax.jit(
      jax.vmap(lambda key: losses.listmle(scores, labels, key=key)[0])
  )
  seen = {f"{total:.4f}" for total in np.asarray(shuffled(keys))}
  orders = ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])
  expected = {f"{_slow_listmle(scores[0, o], labels[0])[0]:.4f}" for o in orders}
  assert seen == expected


def test_one_key_per_list_shuffles_ties_alike_however_lists_are_split():
  scores, _, _ = _slates()
  labels = np.ones_like(scores)
  keys = jax.random.split(jax.random.key(0), GRAPHS)
  listmle = jax.jit(lambda s, y, key: losses.listmle(s, y, key=key)[0])
  whole = listmle(scores, labels, keys)
  halves = np.split(np.arange(GRAPHS), 2)
  parts = [listmle(scores[half], labels[half], keys[half]) for half in halves]
  np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)


def test_raw_keys_shuffle_like_typed_ones():
  scores, _, _ = _slates()
  labels = np.ones_like(scores)
  listmle = jax.jit(lambda key: losses.listmle(scores, labels, key=key)[0])
  typed = listmle(jax.random.key(7))
  raw = listmle(jax.random.PRNGKey(7))
  assert typed == raw


def test_low_precision_scores_are_summed_in_float32():
  scores, labels, where = _slates()
  low = jnp.asarray(scores, jnp.bfloat16)
  total, _ = losses.mse(low, labels)
  expected, _ = _slow("MSE", np.asarray(low, np.float64), labels, where)
  assert total.dtype == jnp.float32
  np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_that_would_broadcast_are_refused(name):
  scores, labels, where = _slates()
  loss = losses.LOSSES[name]
  for bad in (
      lambda: loss(scores, labels[:1]),
      lambda: loss(scores, labels, where=where[:, :1]),
      lambda: loss(scores[0], labels[0]),
  ):
    with pytest.raises(ValueError, match="shape"):
      bad()


@pytest.mark.parametrize("word, bad", [
    ("labels", lambda s, y, w: losses.mse(s, y.astype(np.int64))),
    ("where", lambda s, y, w: losses.mse(s, y, where=w.astype(np.float32))),
    ("temperature", lambda s, y, w: losses.listmle(s, y, temperature=0)),
    ("margin", lambda s, y, w: losses.pairwise_hinge(s, y, margin=-1)),
    ("reduction", lambda s, y, w: losses.pairwise_logistic(s, y, reduction="mean")),
])
def test_wrong_dtypes_and_options_are_refused(word, bad):
  with pytest.raises(ValueError, match=word):
    bad(*_slates())
