"""From the arguments of a command to flags: the config, and its fields by flag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import difflib
import functools
import inspect
import re
import sys

from absl import flags
from flax import traverse_util
from ml_collections import config_flags
import ml_collections

from tpugraphs_jax import console, registry
from tpugraphs_jax.rankers import base
from tpugraphs_jax.run import configs, describe

_OF_ALL_MODELS = ("dtype", "precision")  # options that a change of model keeps


def parse(argv: Sequence[str], default_config: str) -> list[str]:
  """Defines the flag `--config` and parses all flags; every mistake takes one line.

  Afterwards `flags.FLAGS.config` is the config with the fields that flags change; the
  flag's default says which `FILE.py:VARIANT` it came from.

  Args:
    argv: the program, then its arguments.
    default_config: name of the config file used when `--config` is not given.
  """
  given, rest = _take(argv, "config")
  place = configs.resolve(given or "", default_config)
  place = place.removesuffix(":") if not given else place
  config = _load(place)
  try:
    _follow_model(config, rest)
    _define_config(config, rest, place, is_given=given is not None)
    return flags.FLAGS(rest)
  except (AttributeError, KeyError) as error:  # from ml_collections, whose words are escaped
    console.fail(_unknown_field(config, rest) or one_line(str(error)))
  except (flags.Error, ValueError) as error:
    console.fail(one_line(str(error).splitlines()[-1]))


def one_line(message: str) -> str:
  """The message as one line, without the backslashes of a message quoted within a message."""
  return re.sub(r"\\+(?=['\"])", "", console.one_line(message))


def _unknown_field(config: ml_collections.ConfigDict, argv: Sequence[str]) -> str:
  """Which flag names a field that the config has not, with the nearest one; else empty."""
  known = traverse_util.flatten_dict(config.to_dict(), sep=".")
  for argument in argv:
    flag = argument.partition("=")[0]
    field = re.sub(r"^--?config\.", "", flag)
    if field != flag and not any(f"{name}.".startswith(f"{field}.") for name in known):
      return (f"{argument}: the config has no field {field!r}; {nearest(field, known)}"
              "--print_config lists them")
  return ""


def nearest(field: str, known: Iterable[str]) -> str:
  """The question whether a near field was meant, and a space; empty where none is near."""
  near = difflib.get_close_matches(field, known, n=1)
  return f"did you mean {near[0]}? " if near else ""


def _take(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
  """The value of a flag, None if it is not there, and the other arguments."""
  value, rest, arguments = None, [], iter(argv)
  for argument in arguments:
    flag, equals, text = argument.partition("=")
    if flag in (f"--{name}", f"-{name}"):
      value = text if equals else next(arguments, "")
    else:
      rest.append(argument)
  return value, rest


def _load(place: str) -> ml_collections.ConfigDict:
  try:
    return configs.load(place)
  except (ValueError, OSError) as error:
    console.fail(one_line(str(error)))
  except Exception as error:  # Whatever a config file of the user's does.
    console.fail(f"{place}: {type(error).__name__}: {one_line(str(error))}")


def _follow_model(config: ml_collections.ConfigDict, argv: Sequence[str]) -> None:
  """Gives a model that a flag names its own options, at their defaults."""
  name, _ = _take(argv, "config.model.name")
  if name is None or name == config.model.name:
    return
  registry.import_extensions(config.extensions)
  models = base.MODELS["tile" if config.task == "tile" else "layout"]
  if name not in models:
    return  # A module that a flag names may have it; else the check lists the names.
  options = _defaults(models[name])
  kept = {key: config.model[key] for key in _OF_ALL_MODELS
          if key in options and key in config.model}
  known = {key: value for key, value in options.items() if value is not None}
  config.model = ml_collections.ConfigDict({"name": name} | known | kept)


def _defaults(build: object) -> dict[str, object]:
  """Options of a model with their defaults."""
  fixed = build.keywords if isinstance(build, functools.partial) else {}
  found = {name: parameter.default
           for name, parameter in inspect.signature(build).parameters.items()
           if name not in {"parent", "name", *fixed} and parameter.default is not parameter.empty}
  return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def _define_config(
    config: ml_collections.ConfigDict, argv: Sequence[str], place: str, *, is_given: bool
) -> None:
  config_flags.DEFINE_config_dict(
      "config", config, "FILE.py:VARIANT, or a variant alone; --config.FIELD changes a field.",
      sys_argv=list(argv))
  flag = flags.FLAGS["config"]
  flag.default_as_str = place  # instead of the whole config, for --help
  flag.present = int(is_given)
  flags.FLAGS.register_key_flag_for_module(argv[0], flag)  # for --help
  # absl shows this above the flags.
  sys.modules["__main__"].__doc__ = f"\n{describe.variants(place)}\n"
