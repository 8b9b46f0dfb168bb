"""Labels of the TPU compiler from made-up raw numbers, for every target."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded

import tpugraphs_jax
from tpugraphs_jax import collect
from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.tuning import costs, labels, problem

_ROOT = Path(__file__).parents[2]
_OF_SECONDS = {"tpu:v2", "tpu:v3", "tpu:v4"}


def _raw(cycles=7000, seconds=3e-6, kernels=6, without=0):
  return {
    "estimated_cycles": cycles,
    "optimal_seconds": seconds,
    "bytes_accessed": 10,
    "kernels": kernels,
    "without_estimate": without,
    "cycles": {"rest": [cycles]},
    "loops_counted_once": 0,
  }


def _label(target, own):
  return labels.TpuEstimate(target).of(own)


@pytest.mark.parametrize("target", tpu.TARGETS)
def test_seconds_label_up_to_v4_and_cycles_newer_ones(target):
  is_of_seconds = target in _OF_SECONDS
  label = _label(target, _raw())
  assert label.value(_raw()) == (3_000_000 if is_of_seconds else 7000)
  assert ("picoseconds" in label.unit) == is_of_seconds and label.gap == ""
  assert label.what.endswith(f"estimated {'time' if is_of_seconds else 'cycles'} on {target}")
  assert (f"{labels.ALEXNET_TAU['optimal seconds']:.2f}" in label.worth) == is_of_seconds


def test_the_worth_of_a_label_is_that_of_the_records():
  recorded_tau = json.loads((_ROOT / "benchmarks/bridge.json").read_text())["tau_b"]
  assert labels.ALEXNET_TAU.items() <= recorded_tau.items()
  for target, time in costs.times().items():
    worth = _label(target, _raw()).worth
    assert f"Of {time.programs} programs" in worth and f"{time.low:.2f} to {time.high:.2f}" in worth
  assert "No program was measured" in _label("tpu:v5e", _raw()).worth


@pytest.mark.parametrize("target", tpu.TARGETS)
@pytest.mark.parametrize("seconds", [-0.9999974, -4.999, 0.0])
def test_cycles_label_all_choices_of_a_program_whose_own_choice_lacks_seconds(target, seconds):
  own = _raw(seconds=seconds, without=1)
  label = _label(target, own)
  others = [_raw(6500), _raw(9000, seconds=-2.0, without=1)]
  assert [label.value(raw) for raw in (own, *others)] == [7000, 6500, 9000]
  assert label.unit.startswith("cycles") and "1 of 6 kernels" in label.gap
  with pytest.raises(ValueError, match="no estimated cycles for 2 of its 6 kernels"):
    label.value(_raw(10, seconds=seconds, without=2))  # cheap, because more is not counted


@pytest.mark.parametrize("target", sorted(_OF_SECONDS))
def test_a_choice_without_all_seconds_does_not_compare_with_a_whole_one(target):
  with pytest.raises(ValueError, match="no estimated seconds"):
    _label(target, _raw()).value(_raw(seconds=-1.0))


def test_a_second_that_is_left_out_of_a_long_program_is_noticed():
  long = _raw(cycles=2 * 10**9, seconds=1.1, without=1)
  assert _label("tpu:v3", long).value(long) == 2 * 10**9
  whole = _raw(cycles=2 * 10**9, seconds=2.1)
  assert _label("tpu:v3", whole).value(whole) == 2_100_000_000_000
  with pytest.raises(ValueError, match="seconds"):
    _label("tpu:v3", whole).value(long)
  short = _raw(without=2)  # a gather has seconds and no cycles
  assert _label("tpu:v3", short).value(short) == 3_000_000


@pytest.mark.parametrize("target", tpu.TARGETS)
@pytest.mark.parametrize("cycles", [0, -5, 2**63 - 1, 2**62])
def test_without_any_estimate_there_is_no_label(target, cycles):
  raw = _raw(cycles, seconds=-1.0, kernels=1, without=1)
  with pytest.raises(ValueError, match="no estimate for this program"):
    _label(target, raw).value(raw)


def test_labels_of_older_files_stay():
  raw = {"estimated_cycles": 5171, "optimal_seconds": 8.773803301664884e-07, "cycles": {}}
  assert _label("tpu:v3", raw).value(raw) == 877380


@pytest.mark.parametrize(
  "text, line",
  [
    ("INVALID: no such type\n\nFailed after pass", "INVALID: no such type"),
    (
      "INTERNAL: callback: Traceback (most recent call last):\n  File\nKeyError: 'table'\n",
      "KeyError: 'table'",
    ),
    ("", "ValueError"),
  ],
)
def test_the_reason_of_a_failure_is_a_line(text, line):
  assert labels.reason(ValueError(text)) == line


def _cholesky(x, w, k):
  return jnp.tanh(jnp.linalg.cholesky(x @ x.T + jnp.eye(128) * 300) @ w) @ k


def _step(params, x):
  loss = lambda params: jnp.mean((jax.nn.relu(x @ params[0]) @ params[1]) ** 2)
  return jax.tree.map(lambda one, other: one - 0.1 * other, params, jax.grad(loss)(params))


def _arrays(dtype, *shapes):
  return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


_SOLVED = _arrays(jnp.float32, (128, 256), (128, 512), (512, 24))


@recorded.needs_libtpu
@pytest.mark.parametrize(
  "target, lacking, function, args",
  [
    *((target, 1, _cholesky, _SOLVED) for target in tpu.TARGETS),
    (
      "v6e",
      0,  # a custom call that takes no time lacks its second
      _step,
      (_arrays(jnp.bfloat16, (512, 8192), (8192, 512)), *_arrays(jnp.bfloat16, (512, 512))),
    ),
  ],
  ids=[*(f"Cholesky on {target}" for target in tpu.TARGETS), "gradient in bfloat16 on v6e"],
)
def test_programs_without_some_seconds_have_different_labels(target, lacking, function, args):
  label = labels.create("tpu_estimate", target=target, seed=0)
  found = collect.choices(function, *args)
  numbers = np.eye(2, len(found.groups), k=-1, dtype=int)  # the compiler's own, and another
  functions = [(0, collect.apply(function, found.choice(each)), {}) for each in numbers]
  raw = [raw | {"milliseconds": None} for _, raw in label.run(functions, args)]  # without a time
  assert raw[0]["optimal_seconds"] < 0 and raw[0]["without_estimate"] == lacking
  label = label.of(raw[0])
  values = [label.value(each) for each in raw if each["without_estimate"] == lacking]
  assert len(set(values)) > 1 and min(values) > 1 and values[0] == raw[0]["estimated_cycles"]
  assert (f"1 of {raw[0]['kernels']} kernels" in label.gap) == bool(lacking)


@recorded.needs_libtpu
def test_the_time_of_a_label_is_that_of_estimate_also_of_loops_that_end_at_an_argument():
  def step(w, x, n):
    return jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x) @ w.T

  label = labels.create("tpu_estimate", target="v6e", seed=0)
  found = []
  with label.opened() as opened:
    for n in (3, 30):
      args = jnp.ones((128, 128)), jnp.ones((256, 128)), np.int32(n)
      choices = problem.Problem(step, args, opened)
      ((_, raw),) = choices.raw_labels([choices.default])
      (row,) = tpugraphs_jax.estimate(step, *args, targets=["v6e"]).rows
      assert raw["milliseconds"] == row.milliseconds
      found.append((raw["milliseconds"], choices.fingerprint()))
  (few, first), (many, second) = found
  assert many > 5 * few and first != second


def test_a_choice_without_a_time_is_refused_beside_an_own_choice_that_has_one():
  label = labels.TpuEstimate("tpu:v6e").of({"milliseconds": 1.0, "basis": "schedule"})
  assert label.value({"milliseconds": 0.5, "basis": "schedule"}) == 500_000_000
  for raw in ({"estimated_cycles": 5}, {"milliseconds": None, "without_time": "a loop"}):
    with pytest.raises(ValueError, match="it has no time, because"):  # also of an earlier version
      label.value(raw)
  with pytest.raises(ValueError, match="do not compare"):
    label.value({"milliseconds": 0.5, "basis": "cycles"})
