"""Config files, the flags that change a config, and its description for users.

A config is a `ConfigDict` that a file makes from the name of a variant
(`layout.py:xla-random,recommended`). `--print_config` lists its fields with the help of
`train.schema`, `--help` the variants. jax is imported when a config is made, not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import importlib.util
import os
from pathlib import Path
import re
import runpy
import sys
import textwrap
from typing import Any

from absl import flags
from ml_collections import config_flags, ConfigDict

import tpugraphs_jax
from tpugraphs_jax import options
from tpugraphs_jax.infra import console

_SECTIONS = ("data", "batch", "model", "loss", "optimizer", "train", "eval", "segments")
_FIELD = re.compile(rf"(?<![\w./-])((?:{'|'.join(_SECTIONS)})(?:\.[a-z]\w*)+)")
_FIELD_FLAG = re.compile(r"--?(no)?config\.")
_MODEL_FLAG = re.compile(r"--?config\.(model\.name|extensions)(=|$)")
_HELP = {"--help", "-help", "-h", "-?", "--helpfull", "--helpshort"}
_LINE_WIDTH, _FLAG_WIDTH = 98, 44  # of `--print_config`
_GONE = {"mode": "--mode is gone: --do=train,evaluate,predict names the steps to take"}


# Files and variants.


def folder() -> Path:
  """The folder of config files: inside an installed package, else at the top of the checkout."""
  package = Path(tpugraphs_jax.__file__).parent
  inside = package / "configs"
  return inside if inside.is_dir() else package.parent / "configs"


# In a checkout Python finds `tpugraphs_jax.configs` beside the package.
tpugraphs_jax.__path__.append(str(folder().parent))


def resolve(value: str, default: str | None = None) -> str:
  """The path of the config file, and the variant, of a value of `--config`.

  A bare name (`tile.py`) is a file of the project, whatever the current folder has: that folder may
  be from somebody else, and a config file is code. A path with a separator (`./my_config.py`) is a
  file of the user.

  Args:
    value: `FILE.py:VARIANT` or `FILE.py`.
    default: name of the file of a variant alone (`xla-random,gst_ed`), such as `layout.py`.
  """
  file, colon, variant = value.partition(":")
  if default and not file.endswith(".py"):
    return f"{folder() / default}:{value}"
  place, name = os.path.split(file)
  is_the_projects = not place or (place == "configs" and not os.path.exists(file))
  if is_the_projects and (folder() / name).is_file():
    return f"{folder() / name}{colon}{variant}"
  return value


def load(value: str) -> ConfigDict:
  """Makes the config of a value of `--config`.

  Args:
    value: `FILE.py:VARIANT`, such as `tile.py:recommended` of the project, or `./my_config.py`, a
      file of your own.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file has no such variant, or fails.

  Examples:
    >>> from tpugraphs_jax.run import configs
    >>> config = configs.load("layout.py:xla-random,recommended")
    >>> config.model.name, config.data.search
    ('ScoreTables', 'random')
  """
  path, colon, variant = resolve(value).partition(":")
  if not os.path.dirname(path) or not Path(path).is_file():
    raise FileNotFoundError(
      f"there is no config file {path}: name one of the project's with a variant, such as "
      "layout.py:xla-random or tile.py:recommended, or a file of your own with its folder, such as "
      "./my_config.py"
    )
  try:
    definitions = _definitions(Path(path))
    if "get_config" not in definitions:
      raise ValueError(f"{path} has no function get_config, which returns a config: add it")
    get_config = definitions["get_config"]
    config = get_config(variant) if colon else get_config()
    if "extensions" in config:
      set_model(config, {})
    return config
  except (ValueError, OSError):
    raise
  except (Exception, SystemExit) as error:  # a config file of the user may raise anything
    raise ValueError(f"{value}: {type(error).__name__}: {one_line(str(error))}") from error


def _definitions(path: Path) -> dict[str, Any]:
  """Runs a config file and returns its names.

  A file outside of `folder()` is imported as a module, so that it can register parts and list
  itself in `extensions`. It runs anew each time, because it may have changed.
  """
  name, path = path.stem, path.resolve()
  known = getattr(sys.modules.get(name), "__file__", None)
  is_taken = name in sys.modules and (known is None or Path(known).resolve() != path)
  if path.parent == folder().resolve() or is_taken or not name.isidentifier():
    return runpy.run_path(str(path))
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None  # of a file .py
  module = sys.modules[name] = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except BaseException:
    del sys.modules[name]
    raise
  return vars(module)


# Flags.


def parse_flags(argv: Sequence[str], default_config: str) -> list[str]:
  """Defines the flag `--config` and parses all flags; a mistake of the user ends in one line.

  Afterwards the value of the flag is the config with the changes of further flags, and its default
  is the `FILE.py:VARIANT`.

  Args:
    argv: the program, then its arguments.
    default_config: name of the config file used when `--config` is not given.
  """
  values, known = flags.FLAGS, [argument for argument in argv if argument not in _HELP]
  values.set_gnu_getopt()
  about = (
    "FILE.py:VARIANT, or a variant alone; ./FILE.py is a file of your own; --config.FIELD=VALUE "
    "changes a field."
  )
  flags.DEFINE_string("config", default_config, about, allow_override=True)
  try:
    rest = values(known, known_only=True)
    place, is_given = resolve(values.config, default_config), values["config"].present
    if len(known) < len(argv):
      print(_help(argv[0], place))
      raise SystemExit(0)
    # Refuses mistyped flags before it makes a config, which takes a second.
    values([argument for argument in rest if not _FIELD_FLAG.match(argument)])
    delattr(values, "config")
    define(place, rest, values)
    values["config"].default_as_str, values["config"].present = place, is_given
    return values(rest)
  except flags.UnrecognizedFlagError as error:
    console.fail(_GONE.get(error.flagname) or one_line(error))
  except (flags.Error, ValueError, OSError, AttributeError, KeyError, TypeError) as error:
    console.fail(one_line(str(error).splitlines()[-1]))


def define(place: str, argv: Sequence[str], values: flags.FlagValues) -> None:
  """Defines the flag `config`; flags `--config.FIELD=VALUE` change it when `values` parses `argv`.

  Args:
    place: `FILE.py:VARIANT`.
    argv: the program, then its arguments.
    values: in which the flag is defined.

  Raises:
    ValueError, FileNotFoundError: there is no such config, network, extension or field.
  """
  config = load(place)
  set_model(config, _model_changes(argv))
  fields = filter(_FIELD_FLAG.match, argv)
  check_names(config, [_FIELD_FLAG.sub("", field).partition("=")[0] for field in fields])
  config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)


def with_flags(place: str, fields: Sequence[str]) -> ConfigDict:
  """The config of a command with the flags `--config=PLACE` and `fields`.

  Raises:
    ValueError, FileNotFoundError: there is no such config or field, or a value has another type.
  """
  values, argv = flags.FlagValues(), ["", *fields]
  try:
    define(place, argv, values)
    values(argv)
  except (flags.Error, AttributeError, KeyError, TypeError) as error:
    raise ValueError(one_line(str(error).splitlines()[-1])) from error
  return values.config


def _model_changes(argv: Sequence[str]) -> dict[str, Any]:
  """The values of the flags for `model.name` and `extensions`, by name."""
  values = flags.FlagValues()
  values.set_gnu_getopt()
  fields = ConfigDict({"model": {"name": ""}, "extensions": ()})
  given = [argument for argument in argv if _MODEL_FLAG.match(argument)]
  config_flags.DEFINE_config_dict("config", fields, flag_values=values, sys_argv=given)
  values(argv, known_only=True)
  return config_flags.get_override_values(values["config"])


def _help(program: str, place: str) -> str:
  """Description, example, flags and variants of a command."""
  name = Path(program).name
  kind = "tile sizes of fused kernels" if "tile" in name else "layouts of whole programs"
  config = Path(place.partition(":")[0]).name
  return f"""Trains a cost model that ranks {kind}, evaluates it, and ranks the test split.

  {name} --config={config}:recommended --workdir=out/first --synthetic

  --config=FILE.py:VARIANT, or a variant alone; --config.FIELD=VALUE changes a field
  (--print_config lists all fields).

{variants(place)}

{flags.FLAGS.main_module_help()}"""


def one_line(message: object) -> str:
  """The message on one line. Removes backslashes before quotes, left by nested messages."""
  return re.sub(r"\\+(?=['\"])", "", console.one_line(message))


def as_flags(message: str, config: ConfigDict | None) -> str:
  """The message with each field of the config (`batch.graphs`) written as its flag."""
  fields = fields_of(config) if config else {}

  def flag(match: re.Match) -> str:
    is_field = any(f"{name}.".startswith(f"{match[1]}.") for name in fields)
    return f"--config.{match[1]}" if is_field else match[0]

  return _FIELD.sub(flag, message)


def fields_of(config: ConfigDict) -> dict[str, Any]:
  """The fields of a config by name, such as `batch.graphs`."""
  from flax import traverse_util  # slow to import

  return traverse_util.flatten_dict(config.to_dict(), sep=".")


def set_model(config: ConfigDict, changes: Mapping[str, Any]) -> None:
  """Imports extensions and gives the section `model` all options of its network.

  A new network has the default of every option.

  Args:
    config: its section `model` is changed.
    changes: fields by name, of which `extensions` and `model.name` are read.

  Raises:
    ValueError: a module that cannot be imported, or no such network.
  """
  from tpugraphs_jax.train import schema

  options.import_extensions(changes.get("extensions", config.extensions))
  name = changes.get("model.name", config.model.get("name"))
  given = config.model.to_dict() if name == config.model.get("name") else {}
  with config.unlocked():
    config.model = schema.model(config.task, **{"name": name} | given)


def change(config: ConfigDict, changes: Mapping[str, Any]) -> None:
  """Changes fields of a config by name, such as `batch.graphs`.

  `model.name` resets the section `model` to the defaults of that network. Scalars and arrays of
  NumPy and jax become Python's.

  Raises:
    ValueError: a field that the config does not have, or an impossible value.
  """
  from tpugraphs_jax.train import schema

  changes = {name: _plain(value) for name, value in changes.items()}
  set_model(config, changes)
  check_names(config, changes)
  fields, limits = fields_of(config), schema.limits(config)
  for name, value in changes.items():
    options.check_value(name, value, fields[name], limits.get(name, options.Limits("")))
  config.update_from_flattened_dict(changes)


def _plain(value: Any) -> Any:
  value = value.tolist() if hasattr(value, "tolist") else value
  return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def check_names(config: ConfigDict, names: Iterable[str]) -> None:
  """Refuses (ValueError) fields that the config does not have."""
  fields = fields_of(config)
  for name in names:
    if name not in fields:
      raise ValueError(
        f"the config has no field {name!r}; {options.nearest(name, fields)}"
        "--print_config of the command lists them"
      )


# Descriptions for users.


def variants(place: str) -> str:
  """The variants of a config file, one per line; empty without `VARIANTS`."""
  path = Path(place.partition(":")[0])
  texts = _definitions(path).get("VARIANTS", {}) if path.is_file() else {}
  width = max(map(len, texts), default=0)
  lines = [f"  {name:<{width}}  {text}" for name, text in texts.items()]
  title = f"Variants of {path.name}, separated by commas (--config={path.name}:A,B):"
  return "\n".join([title, *lines]) if lines else ""


def listing(config: ConfigDict, place: str) -> str:
  """The text of `--print_config`: the variants, then every field with its help.

  The listing has the default of a field if the value differs.

  Args:
    config: with the changes of the flags.
    place: its `FILE.py:VARIANT`.
  """
  from tpugraphs_jax.train import schema

  limits, defaults = schema.limits(config), schema.defaults(config.task)
  defaults.model = schema.model(config.task, config.model.name)
  defaults = fields_of(defaults)
  lines: list[str] = []
  for name, value in fields_of(config).items():
    text = f'"{value}"' if isinstance(value, tuple) else value  # quotes for the shell
    note = limits[name].text if name in limits else ""
    if value != defaults.get(name, value):
      note = f"[default {defaults[name]}] {note}"
    lines += _field_lines(f"--config.{name}={text}", note)
  return "\n".join([variants(place), "", *lines]).lstrip()


def _field_lines(flag: str, note: str) -> Iterator[str]:
  if not note or len(flag) > _FLAG_WIDTH:
    yield flag
    flag = ""
  for line in textwrap.wrap(note, _LINE_WIDTH - _FLAG_WIDTH - 4):
    yield f"{flag:<{_FLAG_WIDTH}}  # {line}"
    flag = ""
