"""Configs: where one comes from, how flags change it, and how it is shown.

A config is a `ConfigDict` made by a file with variants (`layout.py:xla-random,recommended`).
`--print_config` shows the comments of that file beside the fields, and `--help` its variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import difflib
import functools
import inspect
from pathlib import Path
import re
import runpy
import sys
import textwrap
from typing import Any

from absl import flags
from flax import traverse_util
import ml_collections
from ml_collections import config_flags

import tpugraphs_jax
from tpugraphs_jax import registry
from tpugraphs_jax.infra import console
from tpugraphs_jax.rankers import base
from tpugraphs_jax.run import checks

PRESET = "preset="  # before the name of a published system among the variants

_SECTIONS = ("data", "batch", "model", "loss", "optimizer", "train", "eval", "segments")
_FIELD = re.compile(rf"(?<![\w./-])((?:{'|'.join(_SECTIONS)})(?:\.[a-z]\w*)+)")
_OF_ALL_MODELS = ("dtype", "precision")  # options that a change of model keeps
_WIDTH, _FLAG = 98, 44  # columns of a line of `--print_config`, and of its flag


# Files and variants.


def folder() -> Path:
  """The project's config files: in a checkout at its top, else inside the package."""
  package = Path(tpugraphs_jax.__file__).parent
  beside, inside = package.parent / "configs", package / "configs"
  return inside if inside.is_dir() else beside


def resolve(value: str, default: str) -> str:
  """The config file and variant that a value of `--config` stands for.

  Args:
    value: `FILE.py:VARIANT`, `FILE.py` or a variant of the default file alone
      (`xla-random,gst_ed`). A file of the project is also found where it is installed.
    default: name of the default file (`layout.py`).
  """
  file, colon, variant = value.partition(":")
  if not file.endswith(".py"):
    return f"{folder() / default}:{value}"
  path = Path(file)
  if not path.exists() and path.parent.name in ("", "configs"):
    installed = folder() / path.name
    path = installed if installed.exists() else path
  return f"{path}{colon}{variant}"


def load(value: str) -> ml_collections.ConfigDict:
  """The config of a value of `--config`.

  Args:
    value: such as `tile.py:recommended`, or `FILE.py:VARIANT` for a file of the user's.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file has no such variant.

  Example:
    >>> from tpugraphs_jax.run import configs
    >>> config = configs.load("layout.py:xla-random,recommended")
    >>> config.model.name, config.data.search
    ('ScoreTables', 'random')
  """
  path, colon, variant = resolve(value, "").partition(":")
  if not Path(path).is_file():
    raise FileNotFoundError(f"{path} is missing: name one of the project's configs "
                            f"({', '.join(sorted(p.name for p in folder().glob('[a-z]*.py')))}) or "
                            "a file of your own")
  get_config = runpy.run_path(path)["get_config"]
  return get_config(variant) if colon else get_config()


@dataclasses.dataclass(frozen=True)
class Preset:
  """The settings of a published system.

  Attributes:
    settings: changes a config; the first line of its docstring describes the system.
    small: options of networks in the variant `ci`; those that the system's network has count.
    in_segments: whether the system trains on segments of graphs.
  """

  settings: Callable[[ml_collections.ConfigDict], None]
  small: Mapping[str, Any]
  in_segments: bool = False

  @property
  def description(self) -> str:
    """One line."""
    return self.settings.__doc__.splitlines()[0].removesuffix(".")

  def apply(self, config: ml_collections.ConfigDict) -> None:
    """Gives a config the settings.

    They start from AdamW as PyTorch has it without decay, clipping and warm-up, a constant
    rate, released files as they are, and a loss without penalties.
    """
    config.data.update(features=("released",), pad_value=0, duplicate_policy="keep")
    config.loss.update(temperature=1.0, kernel_l2=0.0, activity_l2=0.0)
    config.optimizer.update(
        name="adamw", learning_rate=1e-3, schedule="constant", warmup_fraction=0.0, eps=1e-8,
        weight_decay=0.0, clip_norm=0.0, clip_norm_per_variable=0.0, final_learning_rate=0.0,
        average_decay=0.0)
    self.settings(config)

  def shrink(self, config: ml_collections.ConfigDict) -> None:
    """Makes a run of a few seconds: narrow layers, of which no more than two of a kind are left."""
    config.model.update(
        {name: size for name, size in self.small.items() if name in config.model})
    config.batch.update(graphs=4, configs=8, slates_per_epoch=16, min_configs=4)
    config.optimizer.accumulation_steps = 1
    config.train.update(epochs=2, valid_configs=50, log_every_steps=4)
    config.eval.configs = 8


@functools.cache
def systems(kind: str) -> dict[str, Preset]:
  """The presets of `configs/systems` by name.

  Args:
    kind: `layout` or `tile`.
  """
  presets = {}
  for path in sorted((folder() / "systems").glob("[a-z]*.py")):
    file = runpy.run_path(str(path))
    presets |= {name: Preset(settings, file["SMALL"], name in file.get("IN_SEGMENTS", ()))
                for name, settings in file[f"{kind.upper()}S"].items()}
  return presets


def model(kind: str, name: str, **options: Any) -> ml_collections.ConfigDict:
  """The section `model` of a config: all options of a network, those given and the defaults.

  Args:
    kind: `layout` or `tile`.
    name: a registered name.
    **options: of the network.
  """
  fields = base.options_of(base.MODELS[kind][name]) | options
  return ml_collections.ConfigDict({"name": name} | fields)


def take_preset(
    presets: Mapping[str, Preset], names: Sequence[str], file: str
) -> tuple[list[str], Preset | None]:
  """The variants that are no presets, and the one preset among them, if there is one.

  Args:
    presets: by name.
    names: variants.
    file: the config file, for errors.

  Raises:
    ValueError: an unknown preset, or more than one.
  """
  chosen = [name.removeprefix(PRESET) for name in names if name.startswith(PRESET)]
  if unknown := [name for name in chosen if name not in presets]:
    raise ValueError(f"{file} has no preset {unknown[0]!r}; it has {', '.join(presets)}")
  if len(chosen) > 1:
    raise ValueError(f"{file} takes one of the presets {' and '.join(chosen)}")
  others = [name for name in names if not name.startswith(PRESET)]
  return others, presets[chosen[0]] if chosen else None


def preset_variants(presets: Mapping[str, Preset]) -> dict[str, str]:
  """Every preset as a variant, with its description."""
  return {PRESET + name: preset.description for name, preset in presets.items()}


# Flags.


def parse_flags(argv: Sequence[str], default_config: str) -> list[str]:
  """Defines the flag `--config` and parses all flags; every mistake takes one line.

  Afterwards `flags.FLAGS.config` is the config with the fields that flags change; the
  flag's default says which `FILE.py:VARIANT` it came from.

  Args:
    argv: the program, then its arguments.
    default_config: name of the config file used when `--config` is not given.
  """
  given, rest = _take(argv, "config")
  place = resolve(given, default_config) if given else str(folder() / default_config)
  config = _load_or_fail(place)
  try:
    _follow_model(config, rest)
    _define_config(config, rest, place, is_given=given is not None)
    return flags.FLAGS(rest)
  except (AttributeError, KeyError) as error:  # from ml_collections, whose words are escaped
    console.fail(_unknown_field(config, rest) or one_line(str(error)))
  except (flags.Error, ValueError) as error:
    console.fail(one_line(str(error).splitlines()[-1]))


def one_line(message: object) -> str:
  """The message as one line, without the backslashes of a message quoted within a message."""
  return re.sub(r"\\+(?=['\"])", "", console.one_line(message))


def as_flags(message: str, config: ml_collections.ConfigDict | None) -> str:
  """The message with the fields of a config (`batch.graphs`) as the flags that set them."""
  known = traverse_util.flatten_dict(config.to_dict(), sep=".") if config else {}

  def flag(match: re.Match) -> str:
    is_field = any(f"{name}.".startswith(f"{match[1]}.") for name in known)
    return f"--config.{match[1]}" if is_field else match[0]

  return _FIELD.sub(flag, message)


def nearest(field: str, known: Iterable[str]) -> str:
  """The question whether a near field was meant, and a space; empty where none is near."""
  near = difflib.get_close_matches(field, known, n=1)
  return f"did you mean {near[0]}? " if near else ""


def no_variant(name: str, file: str) -> str:
  """The message that a config file of the project has no such variant, and which one has it.

  Args:
    name: of the variant.
    file: `tile.py` or `layout.py`.
  """
  other, = {"tile.py", "layout.py"} - {file}
  known, elsewhere = (runpy.run_path(str(folder() / each))["VARIANTS"] for each in (file, other))
  found = f"configs/{file} has no variant {name!r}; "
  if name in elsewhere and name not in known:
    return (f"{found}it is a variant of configs/{other}, of the command run_{other}; "
            f"configs/{file} has {', '.join(known)}")
  return f"{found}{nearest(name, known)}it has {', '.join(known)}"


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


def _load_or_fail(place: str) -> ml_collections.ConfigDict:
  try:
    return load(place)
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
  models = checks.models_of(config)
  if name not in models:
    return  # A module that a flag names may have it; else the check lists the names.
  options = base.options_of(models[name])
  kept = {key: config.model[key] for key in _OF_ALL_MODELS
          if key in options and key in config.model}
  known = {key: tuple(value) if isinstance(value, list) else value
           for key, value in options.items() if value not in (None, inspect.Parameter.empty)}
  config.model = ml_collections.ConfigDict({"name": name} | known | kept)


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
  sys.modules["__main__"].__doc__ = f"\n{variants(place)}\n"


# A config in words.


def variants(place: str) -> str:
  """The variants of a config file, one to a line; empty if the file names none."""
  path = Path(place.partition(":")[0])
  known = runpy.run_path(str(path)).get("VARIANTS", {}) if path.is_file() else {}
  width = max(map(len, known), default=0)
  lines = [f"  {name:<{width}}  {text}" for name, text in known.items()]
  title = f"Variants of {path.name}, separated by commas (--config={path.name}:A,B):"
  return "\n".join([title, *lines]) if lines else ""


def described(fields: ml_collections.ConfigDict, place: str) -> str:
  """All fields of a config with their values, the values they may have, and their comments.

  Args:
    fields: the config, with the fields that flags changed.
    place: `FILE.py:VARIANT` that it came from.
  """
  # A config of the user's own starts from one of the project's: its comments hold too.
  own = "tile.py" if fields.task == "tile" else "layout.py"
  comments = comments_of(folder() / own) | comments_of(Path(place.partition(":")[0]))
  comments |= {f"model.{name}": text for name, text in _notes_of_model(fields).items()}
  choices, parts, lines = checks.choices(fields), checks.parts(), []
  for name, value in traverse_util.flatten_dict(fields.to_dict(), sep=".").items():
    note = comments.get(name) or comments.get(name.removeprefix("segments.finetune."), "")
    said = (*note.replace(",", " ").split(), str(value))
    if not all(str(choice) in said for choice in choices.get(name, ())):
      note = "; ".join(filter(None, [note, f"one of {', '.join(map(str, choices[name]))}"]))
    if name in parts:
      note = "; ".join(filter(None, [note, f"made of {', '.join(parts[name])}"]))
    shown = f'"{value}"' if isinstance(value, tuple) else value  # as a shell takes it
    lines += _field_lines(f"--config.{name}={shown}", note)
  return "\n".join([*lines, "", variants(place)]).rstrip()


def _field_lines(flag: str, note: str) -> Iterator[str]:
  if not note or len(flag) > _FLAG:
    yield flag
    flag = ""
  for line in textwrap.wrap(note, _WIDTH - _FLAG - 4):
    yield f"{flag:<{_FLAG}}  # {line}"
    flag = ""


def _notes_of_model(fields: ml_collections.ConfigDict) -> dict[str, str]:
  """The descriptions of a model's options in the docstrings of its class and bases, by name."""
  models = checks.models_of(fields)
  if fields.model.name not in models:
    return {}  # of a module that is not imported
  build = models[fields.model.name]
  build = build.func if isinstance(build, functools.partial) else build
  notes: dict[str, str] = {}
  for of_class in inspect.getmro(build) if inspect.isclass(build) else [build]:
    _, _, text = (inspect.getdoc(of_class) or "").partition("\nAttributes:\n")
    for name, note in re.findall(r"^  (\w+): (.+(?:\n {3,}.+)*)", text, re.MULTILINE):
      notes.setdefault(name, " ".join(note.split()).replace("`", "").rstrip("."))
  return notes


def comments_of(path: Path) -> dict[str, str]:
  """Comments beside the fields of a config file, by field (`batch.graphs`).

  A comment belongs to the last field on its line: `config.seed = 0  # ...`, or a keyword in
  the lines after `config.batch = ConfigDict(dict(`.
  """
  comments: dict[str, str] = {}
  section = name = ""
  for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
    code, _, comment = line.partition("  # ")
    code = re.sub(r'"[^"]*"', '""', code)  # a value may look like a field
    if assigned := re.search(r"\bconfig\.([\w.]+)(?: = |\.update\()", code):
      section = name = assigned[1]
      code = code[assigned.end():]
    if fields := re.findall(r"(\w+)=(?!=)", code):
      name = f"{section}.{fields[-1]}"
    if comment and code.strip():
      comments.setdefault(name, comment)
  return comments
