from pathlib import Path
import sys

import jax
import pytest

from tpugraphs_jax.collect import programs

_EXAMPLES = Path(__file__).parents[2] / "examples" / "programs"
_FILE = """
import jax
import jax.numpy as jnp
from tpugraphs_jax import collect

SPLIT = "valid"
x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
PROGRAMS = {"sine": (jnp.sin, (x,)), "cosine of x": (jnp.cos, (x,))}
pair = (jnp.tan, (x,))
number = 3

@collect.example(x, x)
def product(x, y):
  return x @ y
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
  path = tmp_path / "some_programs.py"
  path.write_text(_FILE)
  monkeypatch.syspath_prepend(tmp_path)
  yield path
  sys.modules.pop("some_programs", None)


def test_a_file_gives_all_its_programs_or_the_one_asked_for(file):
  found = programs.load(str(file))
  assert [program.name for program in found] == [
      "some_programs_sine", "some_programs_cosine_of_x"]
  assert {program.split for program in found} == {"valid"}
  one, = programs.load(found[1].source)
  assert one.name == found[1].name
  assert programs.load(found[0].source, split="test")[0].split == "test"


@pytest.mark.parametrize("name, arguments", [("product", 2), ("pair", 1), ("PROGRAMS:sine", 1)])
def test_an_import_path_names_a_marked_function_a_pair_or_one_of_a_dictionary(
    file, name, arguments):
  program, = programs.load(f"some_programs:{name}")
  assert program.source == f"some_programs:{name}"
  assert len(program.args) == arguments
  assert callable(program.function)


@pytest.mark.parametrize("source, message", [
    ("missing.py", "missing.py: no such file"),
    ("some_programs", "expected a folder, FILE.py or an import path module:name"),
    ("some_programs:nothing", "some_programs has no nothing, expected a pair"),
    ("some_programs:number", "is a int, expected a pair"),
    ("some_programs:PROGRAMS:tan", "has no program 'tan', it has sine, cosine of x"),
    ("no_such_module_here:x", "cannot import no_such_module_here"),
])
def test_what_is_no_program_is_named(file, source, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    programs.load(source)


def test_a_drawn_program_is_the_same_at_every_call():
  sources = [f"{_EXAMPLES}/generated_{name}" for name in (
      "train.py:plain_1", "valid.py:mixing_2", "test.py:bilinear_3")]
  with jax.numpy_rank_promotion("allow"):
    for source in sources:
      first, second = (programs.load(source)[0] for _ in range(2))
      texts = [jax.jit(each.function).lower(*each.args).as_text() for each in (first, second)]
      assert texts[0] == texts[1]
