"""The examples of docstrings and of `examples/` give what they say."""

import doctest
import importlib
import re
import runpy

import pytest

from tests.support import commands
from tpugraphs_jax.tuning import measure

MODULES = (
  ".data.npz .hlo.module_graph .infra.tasks .infra.files .losses .metrics .run.configs "
  ".rankers.ranker .tuning.tune"
).split()


@pytest.mark.parametrize("name", ["", *MODULES])
def test_examples_give_what_they_say(name, monkeypatch):
  monkeypatch.chdir(commands.ROOT)  # where data/own is
  # In place of a quiet machine, a clock by which all choices take the same time.
  monkeypatch.setattr(measure, "seconds_of_call", lambda function, values, calls: 0.01)
  found = doctest.testmod(importlib.import_module(f"tpugraphs_jax{name}"))
  assert found.attempted and not found.failed


def test_the_example_goes_from_functions_to_rankings(capsys):
  example = runpy.run_path(str(commands.ROOT / "examples" / "rank_your_program.py"))
  example["main"](["--model=layout-cpu-measured", "--configs=50"])
  printed = capsys.readouterr().out
  for name in ("resnet_block", "transformer_layer"):
    assert f"{name}: " in printed
  assert printed.count("50 configurations") == 2
  for end in ("fastest", "slowest"):
    assert printed.count(f"predicted {end}: configuration ") == 2
  assert printed.count("output ") >= 4 * 5  # the choices of each configuration


def test_the_loop_of_ones_own_learns(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  runpy.run_path(str(commands.ROOT / "examples" / "own_loop.py"), run_name="__main__")
  before, after = (float(tau) for tau in re.findall(r"tau (-?[0-9.]+)", capsys.readouterr().out))
  assert after > before + 0.1
