import os
from pathlib import Path
import sys

import jax
import pytest

from tests.support import commands
from tpugraphs_jax.tuning import programs

_EXAMPLES = Path(__file__).parents[2] / "examples" / "programs"
_FILE = """
import jax
import jax.numpy as jnp

SPLIT = "valid"
x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
PROGRAMS = {"sine": (jnp.sin, (x,)), "cosine of x": (jnp.cos, (x,))}
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "some_programs.py"
  path.write_text(_FILE)
  return path


def test_a_file_gives_all_its_programs_or_the_one_asked_for(file):
  found = programs.load(str(file))
  assert [program.name for program in found] == ["some_programs_sine", "some_programs_cosine_of_x"]
  assert {program.split for program in found} == {"valid"}
  (one,) = programs.load(found[1].source)
  assert one.name == found[1].name
  assert programs.load(found[0].source, split="test")[0].split == "test"


@pytest.mark.parametrize(
  "text, key, error",
  [
    (None, "", FileNotFoundError),
    (_FILE, ":tan", ValueError),
    ("number = 3", "", ValueError),
    ("PROGRAMS = {'a': 3}", "", ValueError),
    ("PROGRAMS = {1: 2}", "", ValueError),
    ("PROGRAMS = {'a': (print, (), 3)}", "", ValueError),
    ("number = nothing", "", ValueError),
    (_FILE + "\nSPLIT = 'all'", "", ValueError),
  ],
)
def test_a_file_without_valid_programs_is_refused(tmp_path, text, key, error):
  path = tmp_path / "programs.py"
  if text is not None:
    path.write_text(text)
  with pytest.raises(error, match="programs.py"):
    programs.load(f"{path}{key}")


def test_a_source_that_is_no_file_is_refused():
  with pytest.raises(ValueError, match="FILE.py"):
    programs.load("module:name")


def test_a_drawn_program_is_the_same_at_every_call():
  sources = [
    f"{_EXAMPLES}/generated_{name}"
    for name in ("train.py:plain_1", "valid.py:mixing_2", "test.py:bilinear_3")
  ]
  with jax.numpy_rank_promotion("allow"):
    for source in sources:
      first, second = (programs.load(source)[0] for _ in range(2))
      texts = [
        jax.jit(program.function).lower(*program.args).as_text() for program in (first, second)
      ]
      assert texts[0] == texts[1]


def test_a_file_may_define_dataclasses_with_annotations_as_texts(tmp_path):
  path = tmp_path / "with_a_dataclass.py"
  path.write_text(
    "from __future__ import annotations\nimport dataclasses\n"
    + _FILE
    + """
@dataclasses.dataclass
class Layer:
  width: int
"""
  )
  assert len(programs.load(str(path))) == 2


def test_a_program_may_have_keyword_arguments(tmp_path):
  path = tmp_path / "programs.py"
  path.write_text(_FILE.replace("(jnp.sin, (x,))", "(jnp.matmul, (x,), {'b': x})"))
  (program,) = programs.load(f"{path}:sine")
  assert list(program.kwargs) == ["b"] and len(program.args) == 1
  assert programs.load(f"{path}:cosine of x")[0].kwargs == {}


def test_a_program_finds_its_neighbours_and_then_modules_of_the_current_folder(
  tmp_path, monkeypatch
):
  (tmp_path / "here").mkdir()
  (tmp_path / "there").mkdir()
  for folder in ("here", "there"):
    (tmp_path / folder / "neighbour_of_test.py").write_text(f"place = {folder!r}")
  (tmp_path / "here" / "only_here_of_test.py").write_text("place = 'here'")
  (tmp_path / "here" / "numpy.py").write_text("raise ImportError('not the package')")
  (tmp_path / "there" / "net_of_test.py").write_text(
    "import neighbour_of_test, only_here_of_test, numpy\n"
    "assert numpy.zeros(1).shape == (1,)\n"
    "PROGRAMS = {neighbour_of_test.place + only_here_of_test.place: (abs, (1,))}\n"
  )
  monkeypatch.chdir(tmp_path / "here")
  monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
  (program,) = programs.load("../there/net_of_test.py")
  assert program.name == "net_of_test_therehere"


def test_a_file_that_changed_within_a_second_at_the_same_size_is_read_anew(tmp_path):
  path = tmp_path / "steps.py"
  for count in (1, 2):
    path.write_text(f"PROGRAMS = {{'step': (lambda x: {count} * x, (1.0,))}}\n")
    os.utime(path, (1, 1))
    (program,) = programs.load(str(path))
    assert program.function(1.0) == count


def test_a_program_may_use_a_library_with_flags_of_its_own(tmp_path):
  """Such as tokamax, which reads the command line unless somebody has read it."""
  path = tmp_path / "programs.py"
  path.write_text(
    "import sys\nfrom absl import flags\nflags.DEFINE_integer('of_a_library', 3, '')\n"
    "if not flags.FLAGS.is_parsed():\n  flags.FLAGS(sys.argv)\n"
    "PROGRAMS = {'three': (lambda x: x * flags.FLAGS.of_a_library, (1.0,))}\n"
  )
  code = "import sys; from tpugraphs_jax.tuning import programs; programs.load(sys.argv[2])"
  ended = commands.python("-c", code, "--targets=v6e", path, cwd=tmp_path)
  assert ended.returncode == 0, ended.stderr
