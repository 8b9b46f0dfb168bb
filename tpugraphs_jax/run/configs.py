"""Config files, the flags that change a config, and its description for users.

A file makes a `rankers.config.Config` from the name of a variant
(`layout.py:xla-random,recommended`). ml_collections parses the flags that change it.
`--print_config` lists its fields, `--help` the variants. jax is imported when a config is made, not
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import importlib.util
import os
from pathlib import Path
import re
import runpy
import sys
import textwrap
from typing import Any, TYPE_CHECKING

from absl import flags
from ml_collections import config_flags, ConfigDict

from tpugraphs_jax.config_fields import Limits
from tpugraphs_jax.infra import console, files

if TYPE_CHECKING:
  from tpugraphs_jax.rankers.config import Config

_SECTIONS = ("data", "batch", "model", "loss", "optimizer", "train", "eval", "segments")
_FIELD = re.compile(rf"(?<![\w./-])((?:{'|'.join(_SECTIONS)})(?:\.[a-z]\w*)+)")
_FIELD_FLAG = re.compile(r"--?(no)?config\.")
_MODEL_FLAG = re.compile(r"--?config\.(model\.name|extensions)(=|$)")
_HELP = {"--help", "-help", "-h", "-?", "--helpfull", "--helpshort"}
_LINE_WIDTH, _FLAG_WIDTH = 98, 44  # of `--print_config`


# Files and variants.


def folder() -> Path:
  """The folder of config files: inside an installed package, else at the top of the checkout."""
  package = Path(__file__).parents[1]
  inside = package / "configs"
  return inside if inside.is_dir() else package.parent / "configs"


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


def load(value: str) -> Config:
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
  from tpugraphs_jax.rankers.config import Config

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
  except (ValueError, OSError):
    raise
  except (Exception, SystemExit) as error:  # a config file of the user may raise anything
    raise ValueError(f"{value}: {type(error).__name__}: {one_line(str(error))}") from error
  if not isinstance(config, Config):
    raise ValueError(
      f"get_config of {path} returns a {type(config).__name__}, expected a Config of "
      "tpugraphs_jax.rankers.config: see docs/add_your_own.md"
    )
  return config


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
    files.run_python(path, module)
  except BaseException:
    del sys.modules[name]
    raise
  return vars(module)


# Flags.


@dataclasses.dataclass(frozen=True)
class Given:
  """The value of the flag `--config` and of the flags that change its fields.

  Attributes:
    place: `FILE.py:VARIANT`.
    is_given: whether the command line has the flag `--config`.
    config: with the changes.
    changes: the values of the fields that flags change, by name.
  """

  place: str
  is_given: bool
  config: Config
  changes: Mapping[str, Any]


def parse_flags(argv: Sequence[str], default_config: str) -> list[str]:
  """Defines the flag `--config` and parses all flags; a mistake of the user ends in one line.

  Afterwards the value of the flag is a `Given`.

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
    place, is_given = resolve(values.config, default_config), bool(values["config"].present)
    if len(known) < len(argv):
      print(_help(argv[0], place))
      raise SystemExit(0)
    # Refuses mistyped flags before it makes a config, which takes a second.
    values([argument for argument in rest if not _FIELD_FLAG.match(argument)])
    config, changes, rest = with_flags(place, rest)
    values["config"].value = Given(place, is_given, config, changes)
    return rest
  except flags.UnrecognizedFlagError as error:
    console.fail(one_line(error))
  except (flags.Error, ValueError, OSError, AttributeError, KeyError, TypeError) as error:
    console.fail(one_line(str(error).splitlines()[-1]))


def with_flags(place: str, argv: Sequence[str]) -> tuple[Config, dict[str, Any], list[str]]:
  """The config of `--config=PLACE` and further flags.

  Args:
    place: `FILE.py:VARIANT`.
    argv: the program, then its arguments, of which `--config.FIELD=VALUE` are read.

  Returns:
    The config, the fields that flags changed by name, and the arguments that are left.

  Raises:
    ValueError, FileNotFoundError: there is no such config, network, extension or field, or a value
      has another type.
  """
  config = load(place)
  model = {"model.name": config.model.name, "extensions": config.extensions}
  try:
    changes, _ = _changed(model, argv, [word for word in argv if _MODEL_FLAG.match(word)])
    config = config.replace(**changes)
    flags_of_fields = [word for word in argv if _FIELD_FLAG.match(word)]
    for word in flags_of_fields:
      config.check_name(_FIELD_FLAG.sub("", word).partition("=")[0])
    changes, rest = _changed(config.fields, argv, flags_of_fields)
  except (flags.Error, AttributeError, KeyError, TypeError) as error:
    raise ValueError(one_line(str(error).splitlines()[-1])) from error
  try:
    return config.replace(**changes), changes, rest
  except ValueError as error:
    raise ValueError(as_flags(one_line(error), config)) from error


def _changed(
  fields: Mapping[str, Any], argv: Sequence[str], words: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
  """The values of fields that flags change by name, and the arguments that are left.

  Args:
    fields: values by name, which have the types.
    argv: the program, then its arguments.
    words: the flags to parse, among them.
  """
  from flax import traverse_util  # slow to import

  values, nested = flags.FlagValues(), traverse_util.unflatten_dict(dict(fields), sep=".")
  values.set_gnu_getopt()
  config_flags.DEFINE_config_dict("config", ConfigDict(nested), flag_values=values, sys_argv=words)
  rest = values(argv, known_only=True)
  return config_flags.get_override_values(values["config"]), rest


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


def as_flags(message: str, config: Config) -> str:
  """The message with each field of the config (`batch.graphs`) written as its flag."""
  fields = config.fields

  def flag(match: re.Match) -> str:
    is_field = any(f"{name}.".startswith(f"{match[1]}.") for name in fields)
    return f"--config.{match[1]}" if is_field else match[0]

  return _FIELD.sub(flag, message)


# Descriptions for users.


def variants(place: str) -> str:
  """The variants of a config file, one per line; empty without `VARIANTS`."""
  path = Path(place.partition(":")[0])
  texts = _definitions(path).get("VARIANTS", {}) if path.is_file() else {}
  width = max(map(len, texts), default=0)
  lines = [f"  {name:<{width}}  {text}" for name, text in texts.items()]
  title = f"Variants of {path.name}, separated by commas (--config={path.name}:A,B):"
  return "\n".join([title, *lines]) if lines else ""


def listing(config: Config, place: str) -> str:
  """The text of `--print_config`: the variants, then every field with its help.

  The listing has the default of a field if the value differs.

  Args:
    config: with the changes of the flags.
    place: its `FILE.py:VARIANT`.
  """
  declared, lines = config.declared, list[str]()
  for name, value in config.fields.items():
    text = f'"{value}"' if isinstance(value, tuple) else value  # quotes for the shell
    default, limits = declared.get(name, (value, Limits("")))
    note = limits.text
    if value != default:
      note = f"[default {default}] {note}"
    lines += _field_lines(f"--config.{name}={text}", note)
  return "\n".join([variants(place), "", *lines]).lstrip()


def _field_lines(flag: str, note: str) -> Iterator[str]:
  if not note or len(flag) > _FLAG_WIDTH:
    yield flag
    flag = ""
  for line in textwrap.wrap(note, _LINE_WIDTH - _FLAG_WIDTH - 4):
    yield f"{flag:<{_FLAG_WIDTH}}  # {line}"
    flag = ""
