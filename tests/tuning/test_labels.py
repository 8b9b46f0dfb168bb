"""Labels of TPUs, from made-up raw numbers and from the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import recorded
import tpugraphs_jax
from tpugraphs_jax.hlo import calls, names, tpu
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.tuning import costs, labels, problem
from tpugraphs_jax.tuning.schedule import chips

_KERNEL = {"picoseconds": 2 * 10**6, "group": None, "nodes": [3]}


def _raw(milliseconds=0.003):
  return {"milliseconds": milliseconds, "kernels": [_KERNEL]}


@pytest.mark.parametrize("target", GENERATIONS)
def test_a_label_of_a_tpu_is_a_time(target, monkeypatch):
  monkeypatch.setattr(tpu, "libtpu_version", lambda: "0.0.42.1")
  label = labels.TpuEstimate(target)
  assert label.value(_raw()) == 3_000_000
  assert "picoseconds" in label.unit and label.noun == f"estimated time on {target}"
  assert label.versions().keys() == {"target", "libtpu", "jax", "simulator"}


def test_the_caveat_of_a_label_is_that_of_the_constants():
  for target, chip in chips.chips().items():
    caveat = labels.TpuEstimate(target).caveat
    assert ("no program was measured" in caveat) == (chip.low is None)
    assert chip.low is None or f"{chip.low:.2f} to {chip.high:.2f}" in caveat


def test_another_constant_is_another_version_of_the_simulator(monkeypatch):
  before = {target: chips.version(target) for target in GENERATIONS}
  assert len(set(before.values())) == len(before)
  changed = chips.dataclasses.replace(chips.chips()["tpu:v6e"], latency=1.0)
  monkeypatch.setattr(chips, "chips", lambda: {"tpu:v6e": changed})
  assert chips.version("tpu:v6e") != before["tpu:v6e"]


@pytest.mark.parametrize("raw", [{"optimal_seconds": 8.8e-07}, {"estimated_cycles": 5171}])
def test_labels_of_earlier_versions_are_refused_by_their_name(raw):
  with pytest.raises(ValueError, match=f"its label is {min(raw)}, of an earlier version"):
    labels.TpuEstimate("tpu:v3").value(raw | _raw())


def _call():
  return calls.Call(lambda x: x, (1.0,), {})


def test_without_a_time_there_is_a_reason_and_no_label(monkeypatch):
  row = costs.TargetEstimate("tpu:v6e", cycles=5, why="it has a loop")
  monkeypatch.setattr(costs, "cost", lambda *_: row)
  with pytest.raises(ValueError, match="it has no time, because it has a loop"):
    labels.TpuEstimate("tpu:v6e").estimate(None, _call(), lambda operations: [])


def test_kernels_that_have_only_a_bound_are_no_labels(monkeypatch):
  name = f"jit(f)/{names.LAYOUT_GROUP}2/dot_general"
  timed = costs.KernelCost("dot.1", milliseconds=0.002, operations=(costs.Operation(name, "", ()),))
  bound = costs.KernelCost("sort.1", milliseconds=0.001, is_bound=True)
  row = costs.TargetEstimate("tpu:v6e", 0.004, kernels=(timed, bound, costs.KernelCost("copy.1")))
  monkeypatch.setattr(costs, "cost", lambda *_: row)
  found = labels.TpuEstimate("tpu:v6e").estimate(None, _call(), lambda operations: [7])
  kernel = {"picoseconds": 2 * 10**6, "group": 2, "nodes": [7]}
  assert found == {"milliseconds": 0.004, "kernels": [kernel]}


@recorded.needs_libtpu
def test_the_time_of_a_label_is_that_of_estimate_also_of_loops_that_end_at_an_argument():
  def step(w, x, n):
    return jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x) @ w.T

  label = labels.create("tpu_estimate", target="v6e", seed=0)
  found = []
  with label.open() as opened:
    for n in (3, 300):
      args = jnp.ones((128, 128)), jnp.ones((256, 128)), np.int32(n)
      choices = problem.Problem(Call(step, args), opened)
      ((_, raw),) = choices.label_records([choices.default])
      (row,) = tpugraphs_jax.estimate(step, *args, targets=["v6e"]).rows
      assert raw["milliseconds"] == row.milliseconds
      assert sum(kernel["picoseconds"] for kernel in raw["kernels"]) <= opened.value(raw)
      found.append((raw["milliseconds"], choices.fingerprint()))
  (few, first), (many, second) = found
  assert many > 5 * few and first != second
