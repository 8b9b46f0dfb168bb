"""Where a config comes from: a file with variants, a variant alone, or a working folder."""

from __future__ import annotations

from pathlib import Path
import re
import runpy

import ml_collections

import tpugraphs_jax

_SECTIONS = ("data", "batch", "model", "loss", "optimizer", "train", "eval", "segments")
_FIELD = re.compile(rf"(?<![\w./-])((?:{'|'.join(_SECTIONS)})(?:\.[a-z]\w*)+)")


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


def as_flags(message: str, config: ml_collections.ConfigDict | None) -> str:
  """The message with the fields of a config (`batch.graphs`) as the flags that set them."""
  if config is None:
    return message

  def flag(found: re.Match) -> str:
    section: object = config
    for name in found[1].split("."):
      if not isinstance(section, ml_collections.ConfigDict) or name not in section:
        return found[0]
      section = section[name]
    return f"--config.{found[1]}"

  return _FIELD.sub(flag, message)


def load(value: str) -> ml_collections.ConfigDict:
  """The config of a value of `--config`, such as `tile.py:recommended` or `FILE.py:VARIANT`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file has no such variant.
  """
  path, colon, variant = resolve(value, "").partition(":")
  if not Path(path).is_file():
    raise FileNotFoundError(f"{path} is missing: name one of the project's configs "
                            f"({', '.join(sorted(p.name for p in folder().glob('[a-z]*.py')))}) or "
                            "a file of your own")
  get_config = runpy.run_path(path)["get_config"]
  return get_config(variant) if colon else get_config()
