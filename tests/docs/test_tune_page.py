"""The Python of docs/tune.md, docs/estimate.md, docs/own_programs.md and README.md."""

import re

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded

from tpugraphs_jax.tuning import measure


def blocks(page="tune"):
  """The Python of a page; of `tune` the function, measured here, estimated for a TPU, in a file."""
  text = (commands.ROOT / "docs" / f"{page}.md").read_text()
  return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


@pytest.fixture(scope="module")
def names():
  found = {}
  exec(blocks()[0], found)  # pylint: disable=exec-used
  return found


def _assert_computes_the_same(function, names):
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.normal(size=each.shape), each.dtype) for each in names["arguments"]]
  np.testing.assert_allclose(
    jax.jit(function)(*arrays), jax.jit(names["step"])(*arrays), rtol=1e-4, atol=1e-3
  )


def test_measured_on_this_machine(names, monkeypatch, capsys):
  # In place of a quiet machine, a clock by which any choice but the default takes a fifth more.
  default = []

  def time(function, values, calls):
    del values, calls
    text = function.as_text()  # of copies too
    default[:] = default or [text]
    return 0.010 if text == default[0] else 0.012

  monkeypatch.setattr(measure, "seconds_of_call", time)
  exec(blocks()[1], names)  # pylint: disable=exec-used
  said = capsys.readouterr().out
  assert "8 of 27 layouts tried" in said
  assert "the compiler's own choice stays" in said
  assert names["tuned"].keeps_default and len(names["tuned"].tried) == 8
  _assert_computes_the_same(names["tuned"].function, names)


@recorded.needs_libtpu
def test_estimated_for_a_tpu_target(names, capsys):
  exec(blocks()[2], names)  # pylint: disable=exec-used
  said = capsys.readouterr().out
  assert "8 of 27 layouts tried" in said and "estimated time on tpu:v3" in said
  tuned = names["tuned"]
  assert tuned.ratio == 1 if tuned.keeps_default else tuned.ratio < 1
  assert tuned.ratio * tuned.tried[(0,) * len(tuned.numbers)] == pytest.approx(
    min(tuned.tried.values())
  )
  _assert_computes_the_same(names["tuned"].function, names)


@recorded.needs_libtpu
def test_what_a_step_costs_on_a_tpu_target(capsys):
  names = {}
  small = re.sub(r"\d{4}", lambda size: str(int(size[0]) // 8), blocks("estimate")[0])
  exec(small, names)  # pylint: disable=exec-used
  assert "v6e: the 5 dearest of" in capsys.readouterr().out
  old, new = names["cost"].rows
  assert old.fits and new.fits and new.interval[0] <= new.milliseconds < new.interval[1]


def test_layouts_are_saved_and_applied(names, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(measure, "seconds_of_call", lambda function, values, calls: 0.01)
  names = names | {
    "tuned": names["tpugraphs_jax"].tune(names["step"], *names["arguments"], budget=2)
  }
  exec(blocks()[3], names)  # pylint: disable=exec-used
  _assert_computes_the_same(names["fast_step"], names)


@recorded.needs_libtpu
def test_options_are_chosen_with_layouts_and_kept_in_the_file(names, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  exec(blocks()[4], names)  # pylint: disable=exec-used
  tuned, values = names["tuned"], names["options"]
  assert names["function"].compiler_options == tuned.compiler_options
  assert all(value in values[name] for name, value in tuned.compiler_options.items())
  assert "of 54 choices tried" in repr(tuned) and len(tuned.tried) + tuned.failed == 8
  _assert_computes_the_same(names["tuned"].function, names)


def test_a_function_becomes_a_ranked_graph():
  names = {"__name__": "own_programs"}
  exec(blocks("own_programs")[0], names)  # pylint: disable=exec-used
  assert sorted(names["order"]) == list(range(len(names["graph"].configs)))


@recorded.needs_libtpu
def test_a_function_as_the_tpu_compiler_sees_it():
  names = {"__name__": "own_programs"}
  for block in blocks("own_programs"):
    exec(block, names)  # pylint: disable=exec-used
  assert names["graph"].stage.startswith("before layout assignment") and names["kernels"]


def front_page():
  """The programs of README.md with the output that it shows."""
  return re.findall(
    r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```",
    (commands.ROOT / "README.md").read_text(),
    re.M | re.S,
  )


def test_the_front_page_ranks(monkeypatch, capsys):
  monkeypatch.chdir(commands.ROOT)
  code, output = front_page()[0]
  exec(code, {})  # pylint: disable=exec-used
  assert capsys.readouterr().out == output


@recorded.needs_libtpu
def test_the_front_page_tunes_for_a_tpu_target(capsys):
  code, output = front_page()[1]
  names = {"__name__": "front_page"}
  small = code.replace("(16, 24, 24, 8)", "(2, 8, 8, 8)")
  assert small != code
  exec(small, names)  # pylint: disable=exec-used
  words = lambda text: re.sub(r"[\d.]+", "", text).split()
  assert words(capsys.readouterr().out)[:6] == words(output)[:6]
  assert names["tuned"].ratio <= 1
