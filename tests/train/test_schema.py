"""Every field of a config is declared once, and some code reads it."""

import ast
import json
import math
import re

import commands
import ml_collections
import pytest

from tpugraphs_jax import losses, options
from tpugraphs_jax.infra import trust
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.base import TASKS
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.train import schema
from tpugraphs_jax.train.experiment import Experiment


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
    arguments = set()
    if of_class is losses.LossOptions:  # losses get options as arguments of the same name
      given = [of_class().arguments(loss) for loss in losses.LOSSES.values()]
      arguments = {name for each in given for name, value in each.items() if value is not None}
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
  config.model = schema.model(config.task, "SAGE" if task != "tile" else "MLP")
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


# Limits are those of the options, wherever a value comes from.

KEPT_BY_TRUST = ("task", "extensions", "store_dir", "indices_dir")
NETWORKS = [(kind, name) for kind, networks in base.MODELS.items() for name in networks]


def config_with(task, network, **changes):
  config = schema.defaults(task)
  if task != "tile":
    config.data.search = "random"
  if task == "segments":
    config.batch.drop_remainder = True
  config.model = schema.model(config.task, network)
  fields = config.to_dict()
  for name, value in changes.items():
    *sections, field = name.split(".")
    part = fields
    for section in sections:
      part = part[section]
    part[field] = value
  return ml_collections.ConfigDict(fields)


def edges(default, limits):
  """The smallest and largest allowed values, and values just beyond."""
  if limits.choices:
    return limits.choices, ["no such" if isinstance(default, str) else 7]
  if limits.entries:
    return [(limits.entries[0],)], [("no such",)]
  if isinstance(default, bool) or not isinstance(default, (int, float)):
    return [default], [3] if isinstance(default, (bool, str, tuple)) else []
  whole = lambda x, to: x + int(math.copysign(1, to))
  step = whole if isinstance(default, int) else math.nextafter
  bounds = [(limits.least, limits.above, -math.inf), (limits.most, limits.below, math.inf)]
  inside = [least if math.isfinite(least) else step(past, -away) for least, past, away in bounds]
  beyond = [past if math.isfinite(past) else step(least, away) for least, past, away in bounds]
  return inside, beyond


def refusal(make):
  try:
    make()
  except ValueError as error:
    return str(error)
  return ""


def check_field(name, default, limits, config_of, *, is_read_by_rankers=True):
  """Values at the edges are accepted alike from a flag, `config.json` and a model file."""
  inside, beyond = edges(default, limits)
  for value in [*inside, *beyond]:
    config = config_of(**{name: value})
    given = refusal(lambda: Experiment.of(config))
    sent = trust.config(json.loads(json.dumps(config.to_dict())))
    assert refusal(lambda: Experiment.of(ml_collections.ConfigDict(sent))) == given, (name, value)
    loaded = refusal(lambda: Ranker(sent))
    if value in beyond:
      assert given.startswith((f"{name} is", f"{name} has")), (name, value, given)
      assert "\n" not in given
      assert loaded == given or not is_read_by_rankers
    else:  # it may contradict another field
      limit = re.compile(f"{re.escape(name)} is .*, expected (at|above|below|one|a num)")
      assert not limit.match(given) and not limit.match(loaded)


@pytest.mark.parametrize("task", TASKS)
def test_limits_of_a_field_are_the_same_in_a_file(task):
  network = "MLP" if task == "tile" else "SAGE"
  read = {"", "data", "batch", "eval", "segments"}
  for section, of_class in schema.sections(task).items():
    for field, (default, limits) in options.limits_of(of_class).items():
      if field not in KEPT_BY_TRUST:
        check_field(
          f"{section}.{field}".lstrip("."),
          default,
          limits,
          lambda **changes: config_with(task, network, **changes),
          is_read_by_rankers=section in read,
        )


@pytest.mark.parametrize("kind, network", NETWORKS)
def test_limits_of_an_option_of_a_network_are_the_same_in_a_file(kind, network):
  for name, (default, limits) in base.limits_of_network(base.MODELS[kind][network]).items():
    check_field(
      f"model.{name}", default, limits, lambda **changes: config_with(kind, network, **changes)
    )
