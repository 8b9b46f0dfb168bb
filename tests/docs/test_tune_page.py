"""The Python of docs/tune.md, docs/estimate.md, docs/tiles.md and docs/own_programs.md."""

import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from tests.support import commands, recorded
from tpugraphs_jax.tuning import costs, estimate, estimate_command, measure, programs, summary


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
  arrays = [
    jnp.asarray(rng.normal(size=argument.shape), argument.dtype) for argument in names["arguments"]
  ]
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
def test_what_a_step_costs_on_a_tpu_target(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = {}
  small, _, save = (
    re.sub(r"\d{4}", lambda size: str(int(size[0]) // 8), block) for block in blocks("estimate")
  )
  exec(small, names)  # pylint: disable=exec-used
  said = capsys.readouterr().out
  assert "dearest of" in said and "mlp" in said
  for row in names["cost"].rows:
    assert row.fits and row.milliseconds
    assert sum(row.groups.values()) == pytest.approx(row.milliseconds)
  exec(save, names)  # pylint: disable=exec-used
  (kept,) = summary.load(tmp_path / "before.json")
  assert [row.milliseconds for row in kept.rows] == [r.milliseconds for r in names["cost"].rows]


def test_variants_of_the_page_are_programs_with_their_tokens(tmp_path):
  path = tmp_path / "steps.py"
  given = "import jax.numpy as jnp\npolicies = ('full', 'products')\nweights = jnp.ones(2)\n"
  given += "step = lambda policy: lambda w, x: w * x.sum()\ninputs = jnp.ones\n"
  path.write_text(given + blocks("estimate")[1])
  loaded = programs.load(str(path))
  assert [each.source.rpartition(":")[2] for each in loaded] == [
    f"{policy}_{batch}" for batch in (1, 2, 4) for policy in ("full", "products")
  ]
  assert (loaded[0].count, loaded[0].unit, loaded[1].count) == (8192, "token", None)


def test_the_workflow_of_the_page_fails_where_a_step_got_slower(tmp_path, monkeypatch):
  """Its commands run with estimates in the place of those of the compiler."""
  text = (commands.ROOT / "docs" / "estimate.md").read_text()
  (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
  steps = yaml.safe_load(block)["jobs"]["estimate"]["steps"]
  made = [step for step in steps if "tpugraphs_jax.estimate" in step.get("run", "")]
  assert [step["working-directory"] for step in made] == ["before", "after"]
  for milliseconds, status in ((1.0, 0), (1.01, 0), (1.05, 1)):
    for folder, ms, expected in (("before", 1.0, 0), ("after", milliseconds, status)):
      (tmp_path / folder).mkdir(exist_ok=True)
      monkeypatch.chdir(tmp_path / folder)
      (tmp_path / folder / "steps.py").write_text(
        "PROGRAMS = {'train': (lambda x: x, (1.0,)), 'other': (lambda x: x, (1.0,))}\n"
      )
      row = costs.TargetEstimate("tpu:v6e", ms)
      monkeypatch.setattr(
        estimate, "estimate_call", lambda *_, row=row, **__: summary.Estimate("train", (row,))
      )
      (step,) = (step_ for step_ in made if step_["working-directory"] == folder)
      _, module, *arguments = shlex.split(step["run"])[1:]
      assert module == "tpugraphs_jax.estimate"
      assert estimate_command.main(arguments) == expected


@recorded.needs_libtpu
def test_tiles_of_flash_attention_are_ordered(capsys):
  names = {}
  small = re.sub(r"\b(2048|1024)\b", lambda size: str(int(size[0]) // 2), blocks("tiles")[0])
  exec(small, names)  # pylint: disable=exec-used
  assert "attention: tiles by time" in capsys.readouterr().out
  times = [time.milliseconds for time in names["found"].times]
  assert len(times) == 4 and times == sorted(times) and names["found"].best


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


def front_page(call):
  """The program of README.md that has a call, with the output that it shows."""
  text = (commands.ROOT / "README.md").read_text()
  found = re.findall(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```", text, re.M | re.S)
  ((code, output),) = [program for program in found if call in program[0]]
  return code, output


def test_the_front_page_ranks(monkeypatch, capsys):
  monkeypatch.chdir(commands.ROOT)
  code, output = front_page("tpugraphs_jax.rank(")
  exec(code, {})  # pylint: disable=exec-used
  assert capsys.readouterr().out == output


@recorded.needs_libtpu
def test_the_front_page_tunes_for_a_tpu_target(capsys):
  code, output = front_page("tpugraphs_jax.tune(")
  names = {"__name__": "front_page"}
  small = code.replace("(16, 24, 24, 8)", "(2, 8, 8, 8)")
  assert small != code
  exec(small, names)  # pylint: disable=exec-used
  tuned, said = names["tuned"], capsys.readouterr().out
  assert said.endswith(f"\n{tuned.decision}\n") and tuned.ratio <= 1
  words = lambda text: re.sub(r"[\d.]+", "", text).split()
  if not tuned.keeps_default:
    assert words(said) == words(output)
