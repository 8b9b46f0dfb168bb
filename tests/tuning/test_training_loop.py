"""A step that is tuned, saved and applied elsewhere trains as the plain step does."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.support import training_steps
import tpugraphs_jax
from tpugraphs_jax.tuning import measure
from tpugraphs_jax.tuning.problem import Problem

# Layouts change the order in which sums are rounded: ten steps of Adam or of gradient descent.
_ROUNDING = 1e-5


@pytest.fixture(scope="module")
def tuned():
  """Tunes an example once, by labels by which the choice with the most changed groups is best."""
  raw = lambda numbers: {"seconds": [1 / (1 + sum(map(bool, numbers)))]}

  @functools.cache
  def tune(name):
    step, args, _ = training_steps.EXAMPLES[name]()
    return tpugraphs_jax.tune(step, *args, budget=8, progress=False)

  with pytest.MonkeyPatch.context() as patch:
    label_records = lambda problem, choices, begin: ((choice, raw(choice)) for choice in choices)
    patch.setattr(Problem, "label_records", label_records)
    patch.setattr(measure, "compare", lambda *args, **options: (0.9, 0.85, 0.95))
    yield tune


@functools.cache
def plain(name):
  """Losses of the plain step, and what it compiles to."""
  return training_steps.trained(training_steps.EXAMPLES[name], lambda step: step)


@pytest.mark.parametrize("name", training_steps.EXAMPLES)
def test_a_tuned_step_trains_as_the_plain_step(tuned, name):
  if name == "equinox" and not importlib.util.find_spec("equinox"):
    pytest.skip("needs equinox")
  found, (expected, *compiled) = tuned(name), plain(name)
  assert not found.keeps_default
  assert expected[-1] < expected[0]
  losses, *other = training_steps.trained(
    training_steps.EXAMPLES[name], lambda step: found.function
  )
  np.testing.assert_allclose(losses, expected, rtol=_ROUNDING)
  assert other == compiled


def test_applied_in_another_process_it_trains_alike(tuned, tmp_path):
  names = list(training_steps.EXAMPLES)
  if not importlib.util.find_spec("equinox"):
    names.remove("equinox")
  for name in names:
    tuned(name).save(tmp_path / f"{name}.json")
  inherited = os.environ["XLA_FLAGS"]  # compile quickly
  flags = f"{inherited} --xla_force_host_platform_device_count={jax.device_count()}"
  found = subprocess.run(
    [sys.executable, "-m", training_steps.__name__, str(tmp_path), *names],
    env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  )
  told = json.loads(found.stdout)
  assert list(told) == names
  for name, (losses, *applied) in told.items():
    expected, *compiled = plain(name)
    np.testing.assert_allclose(losses, expected, rtol=_ROUNDING, err_msg=name)
    assert applied == compiled, name
