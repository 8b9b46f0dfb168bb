"""Options of losses: noise that makes ties, reductions, margins, clipped scores."""

import doctest
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax import losses

PAIRWISE = ("PairwiseHingeLoss", "PairwiseLogisticLoss", "RankHingeLoss", "DiffMatLoss",
            "CrossHingeLoss", "CrossLogisticLoss", "InverseLogHingeLoss", "DCGHingeLoss")
RELATIVE = 0.1


def slates():
  """Scores, runtimes of which many are within a tenth, and a mask with holes."""
  rng = np.random.default_rng(0)
  scores = rng.normal(size=(4, 6)).astype(np.float32)
  runtime = np.array([[1, 1.05, 1.12, 1.3, 1.05, 2], [5, 5, 5.1, 5.2, 5.3, 5.4],
                      [3, 3, 3, 3, 3, 3], [9, 1, 4, 2, 8, 7]], np.float32)
  where = rng.random((4, 6)) < 0.8
  where[1] = True
  return scores, runtime, where


def slower(origin):
  """Whether a label is of a clearly slower run, as a person would say it."""
  return lambda a, b: (a + origin) - (b + origin) >= RELATIVE * (b + origin) and a > b


def slow_pairs(name, scores, labels, where, is_slower, reduction, margin=None):
  """Total and count of a pairwise loss by loops over pairs of lists of numbers."""
  if name.startswith("Cross"):
    scores, labels, where = (array.reshape(1, -1) for array in (scores, labels, where))
  own_margin = 0.005 if name == "DiffMatLoss" else 1.0
  m = margin or own_margin
  hinge = lambda d: max(0.0, m - d) / (m if name == "DiffMatLoss" else 1.0)
  pair = (lambda d: math.log1p(math.exp(-d))) if "Logistic" in name else hinge
  total = count = 0
  for s, y, real in zip(scores.astype(float), labels.astype(float), where):
    items = [i for i in range(len(s)) if real[i]]
    found = [pair(s[i] - s[j]) for i, j in itertools.product(items, items)
             if is_slower(y[i], y[j])]
    if not items:
      continue
    if name == "InverseLogHingeLoss":
      total, count = total - 1 / math.log(2 + sum(found)), count + 1
      continue
    n = len(items)
    by = {"items": 1, "sum": 1, "pairs": n * (n - 1) / 2, "mean_all": n * n,
          "mean_valid": len(found)}[reduction]
    if by:
      total, count = total + sum(found) / by, count + (n if reduction == "items" else 1)
  return total, count


OWN = {"PairwiseHingeLoss": "items", "PairwiseLogisticLoss": "items", "RankHingeLoss": "pairs",
       "DiffMatLoss": "pairs", "CrossHingeLoss": "mean_all", "CrossLogisticLoss": "mean_all",
       "InverseLogHingeLoss": ""}


def sums(name, options, scores, labels, where, **more):
  """Total, count and gradient of one loss with these options."""
  def value(scores):
    totals, counts = losses.loss_sums(
        ((name, 1.0),), scores, labels, where=where, options=options, **more)
    return totals[0], counts[0]

  (total, count), grad = jax.jit(jax.value_and_grad(value, has_aux=True))(jnp.asarray(scores))
  return float(total), float(count), np.asarray(grad)


@pytest.mark.parametrize("origin", [0.0, 1.0])
@pytest.mark.parametrize("name", OWN)
def test_runs_closer_than_the_noise_make_no_pair(name, origin):
  scores, runtime, where = slates()
  labels = runtime - origin  # runtime, or what it is above a fastest one of 1
  options = losses.Options(noise=losses.Noise(RELATIVE, origin))
  total, count, grad = sums(name, options, scores, labels, where)
  expected = slow_pairs(name, scores, labels, where, slower(origin), OWN[name])
  np.testing.assert_allclose((total, count), expected, rtol=1e-5)
  exact, _, _ = sums(name, losses.Options(), scores, labels, where)
  assert total != exact and np.isfinite(grad).all() and not grad[~where].any()
  assert not grad[2].any() or name.startswith("Cross")  # a slate of ties teaches nothing


def slow_dcg(s, y):
  """The sum over clear pairs of one list of real items."""
  rank = {i: r for r, i in enumerate(sorted(range(len(s)), key=lambda i: s[i]), 1)}
  gain, discount = [min(y) / v for v in y], [1 / math.log2(1 + rank[i]) for i in range(len(s))]
  return sum(abs(gain[i] - gain[j]) * abs(discount[i] - discount[j]) * max(0, 1 - (s[i] - s[j]))
             for i, j in itertools.product(range(len(s)), repeat=2) if slower(0.0)(y[i], y[j]))


def test_dcg_hinge_leaves_close_pairs_out():
  scores, runtime, where = slates()
  options = losses.Options(noise=losses.Noise(RELATIVE))
  total, count, grad = sums("DCGHingeLoss", options, scores, runtime, where)
  expected = sum(slow_dcg(s[real].astype(float), y[real].astype(float))
                 for s, y, real in zip(scores, runtime, where))
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  assert count == where.sum() and not grad[1:3].any()  # all within a tenth of each other


@pytest.mark.parametrize("reduction", losses.REDUCTIONS[1:])
@pytest.mark.parametrize("name", ["PairwiseHingeLoss", "PairwiseLogisticLoss", "CrossHingeLoss"])
def test_reductions_divide_by_what_they_say(name, reduction):
  scores, labels, where = slates()
  where[0] = False  # nothing there
  where[3, 1:] = False  # one item
  options = losses.Options(reduction=reduction, noise=losses.Noise(RELATIVE))
  total, count, grad = sums(name, options, scores, labels, where)
  expected = slow_pairs(name, scores, labels, where, slower(0.0), reduction)
  np.testing.assert_allclose((total, count), expected, rtol=1e-5)
  assert np.isfinite(grad).all()


@pytest.mark.parametrize("name", ["PairwiseHingeLoss", "DiffMatLoss", "CrossHingeLoss",
                                  "RankHingeLoss"])
def test_a_margin_takes_the_place_of_the_losses_own(name):
  scores, labels, where = slates()
  total, count, _ = sums(name, losses.Options(margin=0.3), scores, labels, where)
  expected = slow_pairs(
      name, scores, labels, where, lambda a, b: a > b, OWN[name], margin=0.3)
  np.testing.assert_allclose((total, count), expected, rtol=1e-5)


def test_options_leave_losses_without_them_alone():
  scores, labels, where = slates()
  options = losses.Options("sum", 0.3, 0.0, losses.Noise(RELATIVE))
  for name in ("MSE", "LogMSE", "MAPE"):
    np.testing.assert_array_equal(
        sums(name, options, scores, labels, where)[2],
        sums(name, losses.Options(), scores, labels, where)[2])


def test_scores_are_scaled_down_to_the_norm_and_never_up():
  scores, labels, where = slates()
  scores[1], scores[2] = 100 * scores[1], 0
  scores[3, ~where[3]] = np.nan
  options = losses.Options(score_norm_clip=5.0)
  clipped = np.array(scores)
  for row, real in zip(clipped, where):
    norm = math.sqrt(sum(float(s) ** 2 for s in row[real]))
    row *= min(1.0, 5.0 / norm) if norm else 1.0
  for name in ("PairwiseHingeLoss", "ListMLELoss", "MSE"):
    total, count, grad = sums(name, options, scores, labels, where)
    expected = sums(name, losses.Options(), clipped, labels, where)
    np.testing.assert_allclose((total, count), expected[:2], rtol=1e-5)
    assert np.isfinite(grad).all() and not grad[~where].any()
  # A list at its limit cannot be made longer: the gradient has no part along it.
  grad = sums("ListMLELoss", options, scores, labels, where)[2]
  assert abs(float(grad[1] @ scores[1])) < 1e-3


@functools.cache
def orders_of_listmle(relative):
  """Which orders 300 keys give runs of 1, 1.05, 1.12 and 2, told by the value of the loss."""
  scores = np.array([[0.0, 1.0, 3.0, 7.0]], np.float32)
  labels = np.array([[1, 1.05, 1.12, 2]], np.float32)
  noise = losses.Noise(relative)
  value = jax.jit(jax.vmap(
      lambda key: losses.listmle(scores, labels, key=key, noise=noise)[0]))
  by_value = {}
  for order in itertools.permutations(range(4)):
    s = scores[0, list(order)].astype(float)
    by_value[round(sum(math.log(sum(math.exp(r - s[k]) for r in s[k:]))
                       for k in range(4)), 3)] = order
  found = np.asarray(value(jax.random.split(jax.random.key(0), 300)))
  return [by_value[round(float(v), 3)] for v in found]


def test_listmle_lets_close_runs_change_places_and_no_others():
  assert set(orders_of_listmle(0.0)) == {(3, 2, 1, 0)}
  orders = orders_of_listmle(0.1)
  # 2 is far from all; 1.12 and 1 differ by more than a tenth.
  assert all(order[0] == 3 and order.index(2) < order.index(0) for order in orders)
  swapped = sum(order.index(0) < order.index(1) for order in orders) / len(orders)
  assert len(set(orders)) == 3
  # Two random numbers from 0 to 1 must differ by more than the distance in units of the noise.
  apart = math.log(1.05) / math.log(1.1)
  assert abs(swapped - (1 - apart) ** 2 / 2) < 0.1


def test_listmle_shakes_each_list_by_its_own_key_and_none_without_keys():
  scores, labels, where = slates()
  noise, keys = losses.Noise(0.5), jax.random.split(jax.random.key(3), 4)
  listmle = jax.jit(lambda s, y, w, key: losses.listmle(s, y, where=w, key=key, noise=noise)[0])
  whole = listmle(scores, labels, where, keys)
  parts = [listmle(scores[i:i + 2], labels[i:i + 2], where[i:i + 2], keys[i:i + 2])
           for i in (0, 2)]
  np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)
  shown = losses.listmle(scores, labels, where=where, noise=noise)[0]
  np.testing.assert_array_equal(shown, losses.listmle(scores, labels, where=where)[0])


def test_one_key_for_all_lists_shakes_them_too():
  scores, labels, where = slates()
  found = {float(losses.listmle(scores, labels, where=where, key=jax.random.key(i),
                                noise=losses.Noise(0.5))[0]) for i in range(4)}
  assert len(found) > 1 and all(math.isfinite(value) for value in found)


def test_cross_losses_compare_what_no_slate_compares():
  """Two graphs of one configuration each: only a loss across graphs has a pair."""
  scores, labels = np.float32([[0.0], [0.5]]), np.float32([[1.0], [2.0]])
  assert losses.LOSSES["PairwiseHingeLoss"](scores, labels)[0] == 0
  total, count = losses.LOSSES["CrossHingeLoss"](scores, labels)
  assert (float(total), float(count)) == (0.5 / 4, 1)


@pytest.mark.parametrize("field, values", [
    ("reduction", ("mean",)), ("margin", (-1.0, math.nan)), ("score_norm_clip", (-1.0, math.inf)),
    ("noise", (losses.Noise(-0.1),)),
])
def test_impossible_options_are_refused(field, values):
  for value in values:
    with pytest.raises(ValueError, match=field):
      losses.Options(**{field: value})


@pytest.mark.parametrize("text, expected", [
    ("MSE:1", (("MSE", 1.0),)), ("MSE:7", (("MSE", 1.0),)),
    ("ListMLELoss:1,MSE:0.02", (("ListMLELoss", 1 / 1.02), ("MSE", 0.02 / 1.02))),
    (" LogMSE : 1 , MSE:3", (("LogMSE", 0.25), ("MSE", 0.75))),
])
def test_parsed_weights_sum_to_one(text, expected):
  assert losses.parse_losses(text) == expected


@pytest.mark.parametrize("text", [
    "", "MSE", "MSE:1,", "mse:1", "MSE:", "MSE:one", "MSE:-1", "MSE:0", "MSE:nan", "MSE:inf",
    "MSE:1:2", "MSE:1,MSE:1"])
def test_bad_losses_are_refused_in_one_line(text):
  with pytest.raises(ValueError, match="losses: ") as error:
    losses.parse_losses(text)
  assert "\n" not in str(error.value)


def test_examples_in_the_module_docstring_hold():
  result = doctest.testmod(losses)
  assert result.attempted and not result.failed
