"""Losses and their options against slow float64 formulations; masks, padding and devices."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tpugraphs_jax import losses

GRAPHS, CONFIGS = 4, 5
NAMES = list(losses.LOSSES)
CROSS = ("CrossHingeLoss",)


def _slow_listmle(s, y):
  order = sorted(range(len(s)), key=lambda i: -y[i])
  total = 0.0
  for k, item in enumerate(order):
    total += np.logaddexp.reduce([s[other] for other in order[k:]]) - s[item]
  return total, 1


def _slow_listmle_gradient(s, y, where):
  """The derivative of each item: its share of every rest of the list that it is in, less 1."""
  result = np.zeros(s.shape)
  for row, scores, labels, real in zip(result, s.astype(np.float64), y, where):
    order = [i for i in np.argsort(-labels, kind="stable") if real[i]]
    for k in range(len(order)):
      rest = order[k:]
      row[rest] += special.softmax(scores[rest])
      row[order[k]] -= 1
  return result


# Losses of a pair by the difference of its scores and the margin.
_hinge = lambda difference, margin: max(0.0, margin - difference)
_logistic = lambda difference, margin: np.logaddexp(0, -difference)
_in_margins = lambda difference, margin: max(0.0, 1 - difference / margin)
# The loss of a pair, the margin, and the reduction of each pairwise loss.
PAIRWISE = {
  "PairwiseHingeLoss": (_hinge, 1.0, "items"),
  "PairwiseLogisticLoss": (_logistic, 0, "items"),
  "OrderedLogisticLoss": (_logistic, 0, "pairs"),
  "DiffMatLoss": (_in_margins, 0.005, "pairs"),
  "CrossHingeLoss": (_hinge, 1.0, "mean_all"),
  "CostLogisticLoss": (_logistic, 0, "mean_valid"),
  "TimeLogisticLoss": (_logistic, 0, "mean_valid"),
  "InverseLogHingeLoss": (_hinge, 1.0, "inverse log"),
}


def _slow_pairs(name, s, y, reduction, margin):
  """Total and count of one list by a loop over its pairs."""
  loss, own_margin, own_reduction = PAIRWISE[name]
  reduction = reduction or own_reduction
  pair, n = functools.partial(loss, margin=margin or own_margin), len(s)
  if name == "CostLogisticLoss":
    s = [2 * math.log1p(max(cost, 0) / 0.01) for cost in s]
  if name == "TimeLogisticLoss":
    s = [50 * math.log(max(time, 1e-12)) for time in s]
  found = [pair(s[i] - s[j]) for i in range(n) for j in range(n) if y[i] > y[j]]
  if name == "OrderedLogisticLoss":  # of equal labels the first counts as larger
    found += [pair(s[i] - s[j]) for i in range(n) for j in range(i + 1, n) if y[i] == y[j]]
  if name == "DiffMatLoss":  # pairs of equal labels count like equal scores
    found += [1.0 for i in range(n) for j in range(i) if y[i] == y[j]]
  if reduction == "inverse log":
    return -1 / math.log(2 + sum(found)), 1
  divisor = {
    "items": 1,
    "sum": 1,
    "pairs": n * (n - 1) / 2,
    "mean_all": n * n,
    "mean_valid": len(found),
  }[reduction]
  if not divisor:
    return 0.0, 0
  return sum(found) / divisor, n if reduction == "items" else 1


SLOW = {
  "ListMLELoss": _slow_listmle,
  "MSE": lambda s, y: (sum((a - b) ** 2 for a, b in zip(s, y)), len(s)),
  "MAPE": lambda s, y: (sum(abs(a - b) / b for a, b in zip(s, y)), len(s)),
  "LogMSE": lambda s, y: (sum((a - math.log(b)) ** 2 for a, b in zip(s, y)), len(s)),
}


def _slow(name, scores, labels, where, reduction=None, margin=None):
  """Total and count of a loss, list by list in Python numbers."""
  total, count = 0.0, 0
  if name in CROSS:
    scores, labels, where = (array.reshape(1, -1) for array in (scores, labels, where))
  for s, y, real in zip(scores, labels, where):
    if real.any():
      s, y = s[real].astype(float).tolist(), y[real].astype(float).tolist()
      if name in PAIRWISE:
        part = _slow_pairs(name, s, y, reduction, margin)
      else:
        part = SLOW[name](s, y)
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
  "no mask",
  "ragged mask",
  "all-masked list",
  "everything masked",
  "tied labels",
  "extreme scores",
]


@functools.cache
def _compiled(name):
  def value(scores, labels, where):
    return losses.LOSSES[name](scores, labels, where=where)

  return jax.jit(jax.value_and_grad(value, has_aux=True))


_loss_sums = jax.jit(losses.loss_sums, static_argnames=("losses", "options"))


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


def _long_slates():
  """Lists of 256 with ties, holes, one item and none; scores from -90 to 90."""
  rng = np.random.default_rng(3)
  labels = rng.integers(1, 60, (GRAPHS, 256)).astype(np.float32)
  where = rng.random(labels.shape) < 0.8
  where[2], where[3] = np.arange(256) == 7, False
  return rng.uniform(-90, 90, labels.shape).astype(np.float32), labels, where


@pytest.mark.parametrize("case", [*CASES, "long lists"])
def test_gradient_of_listmle_equals_its_slow_formulation(case):
  scores, labels, where = _long_slates() if case == "long lists" else _case(case)
  total, _, grad = _evaluate("ListMLELoss", scores, labels, where)
  np.testing.assert_allclose(total, _slow("ListMLELoss", scores, labels, where)[0], rtol=1e-5)
  expected = _slow_listmle_gradient(scores, labels, where)
  np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_no_loss_is_a_loop_over_configurations(name):
  scores, labels, where = _long_slates()
  assert "while" not in _compiled(name).lower(scores, labels, where).as_text()


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


@pytest.mark.parametrize("reduction", ["own", "sum"])
def test_step_over_two_devices_gives_the_loss_and_gradient_of_one(reduction):
  scores, labels, where = _case("all-masked list")
  weighted = losses.parse_losses(
    "ListMLELoss:1,PairwiseHingeLoss:2,PairwiseLogisticLoss:3,MSE:4,CrossHingeLoss:5,"
    "InverseLogHingeLoss:6"
  )

  options = losses.LossOptions(temperature=10.0, pair_reduction=reduction)

  def step(scores, labels, where, axis=None):
    over_devices = lambda x: jax.lax.psum(x, axis) if axis else x

    def local_loss(scores):
      totals, counts = losses.loss_sums(
        weighted, scores, labels, where=where, options=options, axis=axis
      )
      return losses.combine(weighted, totals, over_devices(counts))

    loss, grad = jax.value_and_grad(local_loss)(scores)
    return over_devices(loss), grad

  on_one, on_devices = jax.jit(step), functools.partial(step, axis="devices")
  two = jax.pmap(on_devices, axis_name="devices", devices=jax.local_devices()[:2])
  halves = [a.reshape(2, GRAPHS // 2, CONFIGS) for a in (scores, labels, where)]
  loss, grad = on_one(scores, labels, where)
  loss_two, grad_two = two(*halves)
  np.testing.assert_allclose(loss_two, [loss, loss], rtol=1e-6)
  np.testing.assert_allclose(np.reshape(grad_two, grad.shape), grad, rtol=1e-5, atol=1e-7)


def test_combined_loss_is_the_weighted_sum_of_the_means():
  scores, labels, where = _case("ragged mask")
  weighted = losses.parse_losses("ListMLELoss:3,MSE:1")
  totals, counts = _loss_sums(
    weighted, scores, labels, where=where, options=losses.LossOptions(temperature=10.0)
  )
  listmle = _slow("ListMLELoss", scores / 10.0, labels, where)
  mse = _slow("MSE", scores, labels, where)
  expected = 0.75 * listmle[0] / listmle[1] + 0.25 * mse[0] / mse[1]
  np.testing.assert_allclose(losses.combine(weighted, totals, counts), expected, rtol=1e-6)


def test_combined_loss_of_nothing_is_zero():
  scores, labels, where = _case("everything masked")
  weighted = losses.parse_losses("ListMLELoss:1,PairwiseHingeLoss:1")
  sums = _loss_sums(weighted, scores, labels, where=where)
  assert losses.combine(weighted, *sums) == 0.0


def test_temperature_divides_the_scores_of_listmle_and_of_nothing_else():
  scores, labels, where = _slates()
  weighted = tuple((name, 1.0) for name in NAMES)
  hot = _loss_sums(weighted, scores, labels, options=losses.LossOptions(temperature=4.0))[0]
  for name, total in zip(NAMES, hot):
    used = scores / 4.0 if name == "ListMLELoss" else scores
    np.testing.assert_allclose(total, _slow(name, used, labels, where)[0], rtol=1e-5, err_msg=name)


def test_keys_put_tied_items_in_every_order():
  scores = np.array([[0.0, 1.0, 3.0]], np.float32)
  labels = np.ones_like(scores)
  keys = jax.random.split(jax.random.key(0), 60)
  shuffled = jax.jit(jax.vmap(lambda key: losses.listmle(scores, labels, key=key[None])[0]))
  seen = {f"{total:.4f}" for total in np.asarray(shuffled(keys))}
  orders = ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])
  expected = {f"{_slow_listmle(scores[0, o], labels[0])[0]:.4f}" for o in orders}
  assert seen == expected


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


@pytest.mark.parametrize(
  "word, bad",
  [
    ("labels", lambda s, y, w: losses.mse(s, y.astype(np.int64))),
    ("where", lambda s, y, w: losses.mse(s, y, where=w.astype(np.float32))),
    ("temperature", lambda s, y, w: losses.listmle(s, y, temperature=0)),
    ("margin", lambda s, y, w: losses.pairwise_hinge(s, y, margin=-1)),
    ("reduction", lambda s, y, w: losses.pairwise_logistic(s, y, reduction="mean")),
  ],
)
def test_wrong_dtypes_and_options_are_refused(word, bad):
  with pytest.raises(ValueError, match=word):
    bad(*_slates())


def close_slates():
  """Scores, runtimes of which many are within a tenth, and a mask with holes: `[4, 6]` each."""
  rng = np.random.default_rng(0)
  scores = rng.normal(size=(4, 6)).astype(np.float32)
  runtime = np.array(
    [
      [1, 1.05, 1.12, 1.3, 1.05, 2],
      [5, 5, 5.1, 5.2, 5.3, 5.4],
      [3, 3, 3, 3, 3, 3],
      [9, 1, 4, 2, 8, 7],
    ],
    np.float32,
  )
  where = rng.random((4, 6)) < 0.8
  where[1] = True
  return scores, runtime, where


def sums(name, options, scores, labels, where):
  """Total, count and gradient of one loss with these options."""

  def value(scores):
    totals, counts = losses.loss_sums(((name, 1.0),), scores, labels, where=where, options=options)
    return totals[0], counts[0]

  (total, count), grad = jax.jit(jax.value_and_grad(value, has_aux=True))(jnp.asarray(scores))
  return float(total), float(count), np.asarray(grad)


@pytest.mark.parametrize(
  "name, options",
  [
    *(
      (name, {"pair_reduction": reduction})
      for name in ("PairwiseHingeLoss", "PairwiseLogisticLoss", "CrossHingeLoss")
      for reduction in losses.REDUCTIONS[1:]
    ),
    *((name, {"margin": 0.3}) for name in ("PairwiseHingeLoss", "DiffMatLoss", "CrossHingeLoss")),
    *(
      (name, {"pair_reduction": "sum", "margin": 0.3}) for name in ("MSE", "LogMSE", "MAPE")
    ),  # losses without these options
  ],
)
def test_options_equal_their_slow_formulation(name, options):
  scores, labels, where = (np.concatenate([array, array[:2]]) for array in close_slates())
  where[4] = False  # no item
  where[5, 1:] = False  # one item
  total, count, grad = sums(name, losses.LossOptions(**options), scores, labels, where)
  expected = _slow(
    name, scores, labels, where, options.get("pair_reduction"), options.get("margin")
  )
  np.testing.assert_allclose((total, count), expected, rtol=1e-5)
  assert np.isfinite(grad).all() and not grad[~where].any()


def test_scores_are_scaled_down_to_the_norm_and_never_up():
  scores, labels, where = close_slates()
  scores[1], scores[2] = 100 * scores[1], 0
  scores[3, ~where[3]] = np.nan
  options = losses.LossOptions(score_norm_clip=5.0)
  clipped = np.array(scores)
  for row, real in zip(clipped, where):
    norm = math.sqrt(sum(float(s) ** 2 for s in row[real]))
    row *= min(1.0, 5.0 / norm) if norm else 1.0
  for name in ("PairwiseHingeLoss", "ListMLELoss", "MSE"):
    total, count, grad = sums(name, options, scores, labels, where)
    expected = sums(name, losses.LossOptions(), clipped, labels, where)
    np.testing.assert_allclose((total, count), expected[:2], rtol=1e-5)
    assert np.isfinite(grad).all() and not grad[~where].any()
  # A list at its limit cannot be made longer: the gradient has no part along it.
  grad = sums("ListMLELoss", options, scores, labels, where)[2]
  assert abs(float(grad[1] @ scores[1])) < 1e-3


@pytest.mark.parametrize(
  "text, expected",
  [
    ("MSE:1", (("MSE", 1.0),)),
    ("MSE:7", (("MSE", 1.0),)),
    ("ListMLELoss:1,MSE:0.02", (("ListMLELoss", 1 / 1.02), ("MSE", 0.02 / 1.02))),
    (" LogMSE : 1 , MSE:3", (("LogMSE", 0.25), ("MSE", 0.75))),
  ],
)
def test_parsed_weights_sum_to_one(text, expected):
  assert losses.parse_losses(text) == expected


@pytest.mark.parametrize(
  "text",
  [
    "",
    "MSE",
    "MSE:1,",
    "mse:1",
    "MSE:",
    "MSE:one",
    "MSE:-1",
    "MSE:0",
    "MSE:nan",
    "MSE:inf",
    "MSE:1:2",
    "MSE:1,MSE:1",
  ],
)
def test_bad_losses_are_refused_in_one_line(text):
  with pytest.raises(ValueError, match="losses") as error:
    losses.parse_losses(text)
  assert "\n" not in str(error.value)


def test_the_error_of_kernels_is_the_mean_distance_of_logarithms_where_there_is_a_kernel():
  rng = np.random.default_rng(0)
  times, labels = rng.uniform(0.1, 5, (2, 6, 3)).astype(np.float32)
  labels[1, 0] = labels[4] = 0
  total, count = losses.kernel_error(times, labels)
  errors = [abs(math.log(s / y)) for s, y in zip(times.ravel(), labels.ravel()) if y]
  np.testing.assert_allclose(total, sum(errors), rtol=1e-5)
  assert count == len(errors) == 6 * 3 - 4
  gradient = jax.grad(lambda x: losses.kernel_error(x, labels)[0])(times)
  assert np.isfinite(gradient).all() and not gradient[labels == 0].any()
