"""Options describe themselves: defaults, types, limits and near names."""

import dataclasses
import math

import pytest

from tpugraphs_jax import config_fields
from tpugraphs_jax.config_fields import limits_of, option, Options


@dataclasses.dataclass(frozen=True)
class Engine(Options):
  """Options with every kind of limit."""

  section = "engine"
  power: float = option(2.0, "kilowatts", above=0, most=9)
  wheels: int = option(4, "number of wheels", least=2)
  fuel: str = option("oil", "fuel: oil or gas", one_of=("oil", "gas"))
  parts: tuple[str, ...] = option(("a",), "parts", some_of=lambda: {"a": 1, "b": 2})
  is_loud: bool = option(False, "whether one hears it")

  def check(self):
    if self.is_loud and self.fuel == "gas":
      raise ValueError("engine.is_loud does not go with gas")


def test_defaults_are_those_of_the_declaration_and_missing_fields_have_them():
  defaults = {name: default for name, (default, _) in limits_of(Engine).items()}
  assert defaults == {"power": 2.0, "wheels": 4, "fuel": "oil", "parts": ("a",), "is_loud": False}
  made = Engine(wheels=3, parts=["b", "a"])
  assert (made.wheels, made.parts, made.power) == (3, ("b", "a"), 2.0)
  assert hash(made) == hash(Engine(wheels=3, parts=("b", "a")))


@pytest.mark.parametrize(
  "field, value",
  [
    ("power", 1),
    ("power", 9.0),
    ("wheels", 2),
    ("fuel", "gas"),
    ("parts", ()),
    ("parts", ("b",)),
    ("is_loud", True),
  ],
)
def test_values_within_the_limits_are_taken(field, value):
  assert getattr(Engine(**{field: value}), field) == value


@pytest.mark.parametrize(
  "field, value, expected",
  [
    ("power", 0.0, "above 0 and at most 9"),
    ("power", 9.5, "at most 9"),
    ("power", math.nan, "above 0"),
    ("power", -math.inf, "above 0"),
    ("power", True, "a number"),
    ("power", "2", "a number"),
    ("wheels", 1, "at least 2"),
    ("wheels", 4.0, "a whole number"),
    ("wheels", True, "a whole number"),
    ("fuel", "air", "one of oil, gas"),
    ("fuel", 3, "a text"),
    ("parts", ("a", "c"), "'c', expected some of a, b"),
    ("parts", "a", "a tuple"),
    ("is_loud", 1, "True or False"),
  ],
)
def test_values_of_another_type_or_beyond_the_limits_are_refused_by_name(field, value, expected):
  with pytest.raises(ValueError) as error:
    Engine(**{field: value})
  assert str(error.value).startswith(f"engine.{field} ") and expected in str(error.value)
  assert "\n" not in str(error.value)


def test_fields_that_contradict_each_other_are_refused():
  with pytest.raises(ValueError, match="does not go with gas"):
    Engine(fuel="gas", is_loud=True)


def test_the_line_of_help_names_values_that_its_words_do_not():
  told = {name: limits.text for name, (_, limits) in limits_of(Engine).items()}
  assert told["fuel"] == "fuel: oil or gas"
  assert told["parts"] == "parts; made of a, b"
  assert config_fields.Limits("how", one_of=("x", "y")).text == "how; one of x, y"


def test_a_near_name_is_a_field_of_the_same_name_elsewhere_or_of_nearly_the_same_spelling():
  known = ["train.epochs", "model.width", "batch.graphs"]
  assert config_fields.nearest("data.width", known) == "did you mean model.width? "
  assert config_fields.nearest("width", known) == "did you mean model.width? "
  assert config_fields.nearest("train.epoch", known) == "did you mean train.epochs? "
  assert config_fields.nearest("zzz", known) == ""
