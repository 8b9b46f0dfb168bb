"""Config files, the flags that change a config, and its description for users.

A config is a `ConfigDict` that a file makes from the name of a variant
(`layout.py:xla-random,recommended`). `--print_config` lists its fields with the help of
`train.schema`, `--help` the variants. jax is imported when a config is made, not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import importlib.util
from pathlib import Path
import re
import runpy
import sys
import textwrap
from typing import Any

from absl import flags
import ml_collections
from ml_collections import config_flags

import tpugraphs_jax
from tpugraphs_jax import options
from tpugraphs_jax.infra import console

_SECTIONS = ("data", "batch", "model", "loss", "optimizer", "train", "eval", "segments")
_FIELD = re.compile(rf"(?<![\w./-])((?:{'|'.join(_SECTIONS)})(?:\.[a-z]\w*)+)")
_HELP = {"--help", "-help", "-h", "-?", "--helpfull", "--helpshort"}
_COMMON_OPTIONS = ("dtype", "precision")  # stay when a flag changes the model
_LINE_WIDTH, _FLAG_WIDTH = 98, 44  # of `--print_config`


# Files and variants.


def folder() -> Path:
  """The folder of config files: inside an installed package, else at the top of the checkout."""
  package = Path(tpugraphs_jax.__file__).parent
  inside = package / "configs"
  return inside if inside.is_dir() else package.parent / "configs"


def _importable() -> None:
  """Makes `folder()` importable as `tpugraphs_jax.configs`, in a checkout too."""
  name = f"{tpugraphs_jax.__name__}.configs"
  if name not in sys.modules:
    spec = importlib.util.spec_from_file_location(
      name, folder() / "__init__.py", submodule_search_locations=[str(folder())]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


_importable()


def resolve(value: str, default: str) -> str:
  """The path of the config file, and the variant, of a value of `--config`.

  Args:
    value: `FILE.py:VARIANT`, `FILE.py`, or a variant of the default file (`xla-random,gst_ed`).
      The name of a file in `folder()` needs no path.
    default: name of the default file (`layout.py`).
  """
  file, colon, variant = value.partition(":")
  if not file.endswith(".py"):
    return f"{folder() / default}:{value}"
  path = Path(file)
  if not path.exists() and path.parent.name in ("", "configs"):
    candidate = folder() / path.name
    path = candidate if candidate.exists() else path
  return f"{path}{colon}{variant}"


def load(value: str) -> ml_collections.ConfigDict:
  """Makes the config of a value of `--config`.

  Args:
    value: `FILE.py:VARIANT`, such as `tile.py:recommended`; also a file of your own.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file has no such variant, or fails.

  Examples:
    >>> from tpugraphs_jax.run import configs
    >>> config = configs.load("layout.py:xla-random,recommended")
    >>> config.model.name, config.data.search
    ('ScoreTables', 'random')
  """
  path, colon, variant = resolve(value, "").partition(":")
  if not Path(path).is_file():
    raise FileNotFoundError(
      f"there is no config file {value.partition(':')[0]}: name one of the "
      "project's with a variant, such as layout.py:xla-random or "
      "tile.py:recommended, or a file of your own"
    )
  try:
    get_config = _definitions(Path(path))["get_config"]
    return get_config(variant) if colon else get_config()
  except (ValueError, OSError):
    raise
  except Exception as error:  # a config file of the user may raise anything
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
  value, rest = _take(argv, "config")
  place = resolve(value, default_config) if value else str(folder() / default_config)
  if _HELP & set(rest):
    print(_help(argv[0], place))
    raise SystemExit(0)
  try:  # refuses mistyped flags before it makes a config, which takes a second
    flags.FLAGS([argument for argument in rest if not re.match("--?config[.]", argument)])
  except flags.Error as error:
    console.fail(one_line(str(error).splitlines()[-1]))
  config = _load_or_fail(place)
  try:
    _follow_model(config, rest)
    _define_config(config, rest, place, is_given=value is not None)
    return flags.FLAGS(rest)
  except (AttributeError, KeyError) as error:  # ml_collections escapes quotes in its messages
    console.fail(_unknown_field(config, rest) or one_line(str(error)))
  except (flags.Error, ValueError) as error:
    console.fail(one_line(str(error).splitlines()[-1]))


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


def fields_of(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The fields of a config by name, such as `batch.graphs`."""
  from flax import traverse_util  # slow to import

  return traverse_util.flatten_dict(config.to_dict(), sep=".")


def change(config: ml_collections.ConfigDict, fields: Mapping[str, Any]) -> None:
  """Changes fields of a config by name, such as `batch.graphs`.

  Raises:
    ValueError: a field that the config does not have.
  """
  names = fields_of(config)
  for name in fields:
    if name not in names:
      raise ValueError(
        f"the config has no field {name!r}; {options.nearest(name, names)}print it to see all"
      )
  config.update_from_flattened_dict(dict(fields))


def as_flags(message: str, config: ml_collections.ConfigDict | None) -> str:
  """The message with each field of the config (`batch.graphs`) written as its flag."""
  fields = fields_of(config) if config else {}

  def flag(match: re.Match) -> str:
    is_field = any(f"{name}.".startswith(f"{match[1]}.") for name in fields)
    return f"--config.{match[1]}" if is_field else match[0]

  return _FIELD.sub(flag, message)


def _unknown_field(config: ml_collections.ConfigDict, argv: Sequence[str]) -> str:
  """Message on the first flag of a field that the config does not have; empty without one."""
  fields = fields_of(config)
  for argument in argv:
    flag = argument.partition("=")[0]
    field = re.sub(r"^--?config\.", "", flag)
    if field != flag and not any(f"{name}.".startswith(f"{field}.") for name in fields):
      return (
        f"{argument}: the config has no field {field!r}; {options.nearest(field, fields)}"
        "--print_config lists them"
      )
  return ""


def _take(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
  """The value of a flag (None without the flag), and the other arguments."""
  value, rest, arguments = None, [], iter(argv)
  for argument in arguments:
    flag, equals, text = argument.partition("=")
    if flag in (f"--{name}", f"-{name}"):
      value = text if equals else next(arguments, "")
    else:
      rest.append(argument)
  return value, rest


def _load_or_fail(place: str) -> ml_collections.ConfigDict:
  try:
    return load(place)
  except (ValueError, OSError) as error:
    console.fail(one_line(str(error)))


def _follow_model(config: ml_collections.ConfigDict, argv: Sequence[str]) -> None:
  """Replaces the section `model` where a flag changes the model: its options at their defaults."""
  name, _ = _take(argv, "config.model.name")
  if name is None or name == config.model.get("name"):
    return
  from tpugraphs_jax.rankers import base
  from tpugraphs_jax.train import schema

  options.import_extensions(config.extensions)
  kind = schema.kind_of(config)
  if name not in base.MODELS[kind]:
    return  # A module of the flag `extensions` may register it; `schema.check` comes later.
  defaults = base.options_of(base.MODELS[kind][name])
  config.model = schema.model(
    kind,
    name,
    **{
      key: config.model[key] for key in _COMMON_OPTIONS if key in defaults and key in config.model
    },
  )


def _define_config(
  config: ml_collections.ConfigDict, argv: Sequence[str], place: str, *, is_given: bool
) -> None:
  config_flags.DEFINE_config_dict(
    "config",
    config,
    "FILE.py:VARIANT, or a variant alone; --config.FIELD changes a field.",
    sys_argv=list(argv),
  )
  flag = flags.FLAGS["config"]
  flag.default_as_str = place  # instead of the whole config, for --help
  flag.present = int(is_given)


# Descriptions for users.


def variants(place: str) -> str:
  """The variants of a config file, one per line; empty without `VARIANTS`."""
  path = Path(place.partition(":")[0])
  texts = _definitions(path).get("VARIANTS", {}) if path.is_file() else {}
  width = max(map(len, texts), default=0)
  lines = [f"  {name:<{width}}  {text}" for name, text in texts.items()]
  title = f"Variants of {path.name}, separated by commas (--config={path.name}:A,B):"
  return "\n".join([title, *lines]) if lines else ""


def listing(config: ml_collections.ConfigDict, place: str) -> str:
  """The text of `--print_config`: every field with its value, help and allowed values.

  Args:
    config: with the changes of the flags.
    place: its `FILE.py:VARIANT`.
  """
  from tpugraphs_jax.train import schema

  limits = schema.limits(config)
  lines: list[str] = []
  for name, value in fields_of(config).items():
    text = f'"{value}"' if isinstance(value, tuple) else value  # quotes for the shell
    lines += _field_lines(f"--config.{name}={text}", limits[name].text if name in limits else "")
  return "\n".join([*lines, "", variants(place)]).rstrip()


def _field_lines(flag: str, note: str) -> Iterator[str]:
  if not note or len(flag) > _FLAG_WIDTH:
    yield flag
    flag = ""
  for line in textwrap.wrap(note, _LINE_WIDTH - _FLAG_WIDTH - 4):
    yield f"{flag:<{_FLAG_WIDTH}}  # {line}"
    flag = ""
