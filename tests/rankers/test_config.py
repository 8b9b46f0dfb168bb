"""Every field of a config is declared once, with its limits, and has them in a file too."""

import json
import math
import re

import pytest

from tpugraphs_jax.infra import trust
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.config import (
  Config,
  LayoutDataOptions,
  Model,
  SegmentOptions,
  TileDataOptions,
)
from tpugraphs_jax.rankers.ranker import Ranker

NETWORKS = [(kind, name) for kind, networks in base.MODELS.items() for name in networks]
DEFAULTS = {
  "tile": Config(data=TileDataOptions(), model=Model("MLP")),
  "layout": Config(data=LayoutDataOptions(search="random"), model=Model("SAGE")),
  "segments": Config(
    data=LayoutDataOptions(search="random"), model=Model("SAGE"), segments=SegmentOptions()
  ),
}


@pytest.mark.parametrize("task", DEFAULTS)
def test_every_field_has_its_default_and_a_line_of_help(task):
  config = DEFAULTS[task]
  assert config.declared.keys() == config.fields.keys()
  for name, (default, limits) in config.declared.items():
    assert limits.help and "\n" not in limits.help, name
    assert config.fields[name] == default or name == "data.search", name


def test_a_file_of_an_earlier_version_is_read():
  fields = DEFAULTS["segments"].to_dict()
  fields["data"] |= {"entropy_threshold": 0.0}  # a field that is gone
  del fields["train"]["result"], fields["segments"]["finetune"], fields["extensions"]
  assert Config.from_dict(fields) == DEFAULTS["segments"]
  with pytest.raises(ValueError, match="task is 'graph', expected one of tile, layout, segments"):
    Config.from_dict(fields | {"task": "graph"})


@pytest.mark.parametrize("steps", ["10", "5:5", "6:2", "-1:2", "a:b", "1:2:3"])
def test_wrong_profile_steps_are_refused(steps):
  assert DEFAULTS["tile"].replace(profile_steps="2:4").profiled_steps == (2, 4)
  with pytest.raises(ValueError, match=f"profile_steps is '{steps}', expected first:last"):
    DEFAULTS["tile"].replace(profile_steps=steps)


def test_a_replaced_section_or_field_leaves_the_rest():
  config = DEFAULTS["layout"]
  changed = config.replace(model=Model("ResModel", hidden_dim=8), batch__graphs=3)
  assert (changed.model.name, changed.model.hidden_dim, changed.batch.graphs) == ("ResModel", 8, 3)
  assert changed.replace(model=config.model, **{"batch.graphs": config.batch.graphs}) == config
  assert config.replace(segments=SegmentOptions()) == DEFAULTS["segments"]
  assert config.batch.graphs == 8  # a config never changes


# Limits are those of the options, wherever a value comes from.

KEPT_BY_TRUST = ("extensions", "data.store_dir", "eval.indices_dir", "model.name")


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


def check_field(config, name, default, limits):
  """Values at the edges are accepted alike by the section, from `config.json` and a model file."""
  inside, beyond = edges(default, limits)
  for value in [*inside, *beyond]:
    given = refusal(lambda: Ranker(config.replace(**{name: value})))
    sent = json.loads(json.dumps(config.to_dict()))
    *sections, field = name.split(".")
    part = sent
    for section in sections:
      part = part[section]
    part[field] = value
    loaded = refusal(lambda: Ranker(Config.from_dict(trust.config(sent))))
    assert loaded == given, (name, value)
    if value in beyond:
      assert given.startswith((f"{name} is", f"{name} has")), (name, value, given)
      assert "\n" not in given
    else:  # it may contradict another field
      assert not re.match(f"{re.escape(name)} is .*, expected (at|above|below|one|a num)", given)


@pytest.mark.parametrize("task", DEFAULTS)
def test_limits_of_a_field_are_the_same_in_a_file(task):
  for name, (default, limits) in DEFAULTS[task].declared.items():
    if name not in KEPT_BY_TRUST and not name.startswith("model."):
      check_field(DEFAULTS[task], name, default, limits)


@pytest.mark.parametrize("kind, network", NETWORKS)
def test_limits_of_an_option_of_a_network_are_the_same_in_a_file(kind, network):
  config = DEFAULTS[kind].replace(model=Model(network))
  for name, (default, limits) in base.limits_of_network(base.MODELS[kind][network]).items():
    check_field(config, f"model.{name}", default, limits)
