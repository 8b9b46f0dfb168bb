"""The examples of docstrings and of `examples/` give what they say."""

import contextlib
import doctest
import importlib
import re
import runpy
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from tests.support import commands
import tpugraphs_jax
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


def test_the_step_of_maxtext_is_estimated_in_the_place_of_its_compilation(monkeypatch, capsys):
  """A stand-in has MaxText's functions: it calls `jit_and_compile` as `train_compile.main` does."""
  mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
  made = types.ModuleType("train_compile")

  def main(argv):
    config = types.SimpleNamespace(compile_topology=argv[1].split("=")[1], compile_xla_flags="")
    batch = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    rules, step = contextlib.nullcontext(), lambda state, batch: (state + batch, batch.sum())
    given, returned = (split, split), (split, None)
    args = (batch, batch), {}, mesh, given, returned, (), (0,), config, rules
    made.jit_and_compile(step, *args)
    raise AssertionError("it went on to compile the step")

  made.main = main
  utils = types.ModuleType("max_utils")
  utils.parse_libtpu_flags_to_dict = lambda flags: {}
  for name in ("maxtext", "maxtext.trainers", "maxtext.trainers.pre_train", "maxtext.utils"):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
  sys.modules["maxtext.trainers.pre_train"].train_compile = made
  sys.modules["maxtext.utils"].max_utils = utils
  asked = []

  def estimate(function, *args, targets):
    asked.append((function.lower(*args).as_text(), targets))
    return "an estimate"

  monkeypatch.setattr(tpugraphs_jax, "estimate", estimate)
  monkeypatch.setattr(sys, "argv", ["maxtext_step.py", "compile_topology=v6e-4"])
  with pytest.raises(SystemExit):
    runpy.run_path(str(commands.ROOT / "examples" / "maxtext_step.py"), run_name="__main__")
  ((text, targets),) = asked
  assert targets == ["v6e-4"] and "fsdp" in text and "tf.aliasing_output" in text
  assert "an estimate" in capsys.readouterr().out
