"""Every field of a config is declared once, and some code reads it."""

import ast

import commands
import pytest

from tpugraphs_jax import losses, options
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.base import TASKS
from tpugraphs_jax.train import schema


def names_in_use():
  """Attributes and strings in the package: a field is read by one of them."""
  for path in (commands.ROOT / "tpugraphs_jax").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Attribute):
        yield node.attr
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


@pytest.fixture(scope="module")
def in_use():
  return set(names_in_use())


@pytest.mark.parametrize("task", TASKS)
def test_some_code_reads_every_field(task, in_use):
  for section, of_class in schema.sections(task).items():
    # Losses get options as arguments of the same name.
    arguments = {
      name
      for name in of_class.defaults()
      if of_class is losses.LossOptions
      and any(
        of_class(**{name: value}).arguments(loss).get(name) is not None
        for loss in losses.LOSSES.values()
        for value in [of_class.defaults()[name]]
      )
    }
    unread = set(of_class.defaults()) - in_use - arguments
    assert not unread, f"{section}: {sorted(unread)}"


@pytest.mark.parametrize("kind", base.MODELS)
def test_some_code_reads_every_option_of_a_network(kind, in_use):
  for name, build in base.MODELS[kind].items():
    assert not set(base.options_of(build)) - in_use, name


@pytest.mark.parametrize("task", TASKS)
def test_defaults_are_accepted_and_every_field_has_a_line_of_help(task):
  config = schema.defaults(task)
  if task != "tile":
    config.data.search = "random"
  config.model = schema.model(schema.kind_of(config), "SAGE" if task != "tile" else "MLP")
  schema.check(config)
  told = schema.limits(config)
  for name, limits in told.items():
    assert limits.help and "\n" not in limits.help, name
  fields = {
    f"{section}.{name}".lstrip(".")
    for section, of_class in schema.sections(task).items()
    for name in options.limits_of(of_class)
  }
  assert fields <= told.keys()
