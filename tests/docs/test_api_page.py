"""The examples of docs/api.md give what they say, and every public name is in one of them."""

import doctest
import importlib
import inspect
import re

import pytest

from tests.support import commands, recorded
import tpugraphs_jax
from tpugraphs_jax.rankers import base
from tpugraphs_jax.tuning import measure

PAGE = (commands.ROOT / "docs" / "api.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
ENTRIES = re.findall(r"^::: tpugraphs_jax\.(\S+)\n(?:    .*\n    +members: \[(.*)\])?", PAGE, re.M)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
  """A folder of its own with the data; a clock by which all choices take the same time."""
  monkeypatch.setattr(measure, "seconds_of_call", lambda function, values, calls: 0.01)
  monkeypatch.chdir(tmp_path)
  (tmp_path / "data").symlink_to(commands.ROOT / "data")
  yield tmp_path
  base.LAYOUT_MODELS.pop("Wide", None)  # of an example


def _run(blocks):
  runner, test = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), doctest.DocTestParser()
  example = test.get_doctest("\n".join(blocks), {}, "api.md", "docs/api.md", 0)
  runner.run(example)
  assert example.examples and not runner.failures


def test_the_examples_give_what_they_say():
  _run([block for block in BLOCKS if "targets=" not in block])


@recorded.needs_libtpu
def test_the_example_of_estimates_gives_what_it_says():
  first, *others = BLOCKS
  _run([first, *(block for block in others if "def layer" in block or "targets=" in block)])


@pytest.mark.parametrize("name, members", ENTRIES, ids=[name for name, _ in ENTRIES])
def test_what_is_public_has_a_docstring_and_an_example(name, members):
  module, _, last = f"tpugraphs_jax.{name}".rpartition(".")
  known = getattr(importlib.import_module(module), last)
  names = members.split(", ") if members else []
  assert all(inspect.getdoc(public) for public in [known, *(getattr(known, n) for n in names)])
  aliases = [n for n in tpugraphs_jax.__all__ if getattr(tpugraphs_jax, n) is known]
  assert re.search(rf"\b({'|'.join([last, *names, *aliases])})s?\b", "\n".join(BLOCKS))


def test_every_name_of_the_package_is_on_the_page():
  used = re.findall(r"\btg\.(\w+)", PAGE)
  listed = [
    part for name, members in ENTRIES for part in [name.split(".")[-1], *members.split(", ")]
  ]
  assert set(tpugraphs_jax.__all__) <= {*used, *listed}
