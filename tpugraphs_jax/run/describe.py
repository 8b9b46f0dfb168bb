"""`--print_config` and the list of variants in `--help`: a config in words.

Comments stand in the config file beside the fields and are read from its source: a comment
belongs to the last field on its line. Docstrings of models describe their options.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import functools
import inspect
import io
from pathlib import Path
import re
import runpy
import textwrap
import tokenize
from typing import Any

from flax import traverse_util
import ml_collections

from tpugraphs_jax.rankers import base
from tpugraphs_jax.run import checks, configs

_WIDTH, _FLAG = 98, 44  # of a line, and of its first column


def variants(place: str) -> str:
  """The variants of a config file, one to a line; empty if the file names none."""
  path = Path(place.partition(":")[0])
  known = runpy.run_path(str(path)).get("VARIANTS", {}) if path.is_file() else {}
  width = max(map(len, known), default=0)
  lines = [f"  {name:<{width}}  {text}" for name, text in known.items()]
  title = f"Variants of {path.name}, separated by commas (--config={path.name}:A,B):"
  return "\n".join([title, *lines]) if lines else ""


def config(fields: ml_collections.ConfigDict, place: str) -> str:
  """All fields of a config with values, what they may be, and their comments.

  Args:
    fields: the config, with whatever flags changed.
    place: `FILE.py:VARIANT` that it came from.
  """
  # A config of the user's own starts from one of the project's: its comments hold too.
  own = "tile.py" if fields.task == "tile" else "layout.py"
  comments = comments_of(configs.folder() / own) | comments_of(Path(place.partition(":")[0]))
  comments |= {f"model.{name}": text for name, text in _of_model(fields).items()}
  choices, parts, lines = checks.choices(fields), checks.parts(), []
  for name, value in traverse_util.flatten_dict(fields.to_dict(), sep=".").items():
    note = comments.get(name) or comments.get(name.removeprefix("segments.finetune."), "")
    if not all(str(choice) in (*note.replace(",", " ").split(), str(value))
               for choice in choices.get(name, ())):  # else the comment says it
      note = "; ".join(filter(None, [note, f"one of {', '.join(map(str, choices[name]))}"]))
    if name in parts:
      note = "; ".join(filter(None, [note, f"made of {', '.join(parts[name])}"]))
    lines += _field(f"--config.{name}={_shown(value)}", note)
  return "\n".join([*lines, "", variants(place)]).rstrip()


def _shown(value: Any) -> str:
  """A value as the flag takes it in a shell."""
  text = str(value)
  return f'"{text}"' if isinstance(value, tuple) else text


def _field(flag: str, note: str) -> Iterator[str]:
  if not note:
    yield flag
    return
  if len(flag) > _FLAG:
    yield flag
    flag = ""
  for line in textwrap.wrap(note, _WIDTH - _FLAG - 4):
    yield f"{flag:<{_FLAG}}  # {line}"
    flag = ""


def _of_model(fields: ml_collections.ConfigDict) -> dict[str, str]:
  """What the docstrings of a model and of its bases say of its options, by name."""
  models = base.MODELS["tile" if fields.task == "tile" else "layout"]
  if fields.model.name not in models:
    return {}  # of a module that is not imported
  build = models[fields.model.name]
  build = build.func if isinstance(build, functools.partial) else build
  found: dict[str, str] = {}
  for described in inspect.getmro(build) if inspect.isclass(build) else [build]:
    _, _, text = (inspect.getdoc(described) or "").partition("\nAttributes:\n")
    for name, note in re.findall(r"^  (\w+): (.+(?:\n {3,}.+)*)", text, re.MULTILINE):
      found.setdefault(name, " ".join(note.split()).replace("`", "").rstrip("."))
  return found


def comments_of(path: Path) -> dict[str, str]:
  """Comments beside the fields of a config file, by field (`batch.graphs`).

  Fields are found in assignments to an attribute of `config`: of a value, or of a
  `ConfigDict(dict(...))` with fields as keywords.
  """
  if not path.is_file():
    return {}
  source = path.read_text(encoding="utf-8")
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  beside = {token.start[0]: token.string.lstrip("# ") for token in tokens
            if token.type == tokenize.COMMENT and token.line.split("#")[0].strip()}
  last: dict[int, str] = {}
  for name, line in sorted(_places(ast.parse(source)), key=lambda place: place[1]):
    last[line] = name
  found: dict[str, str] = {}
  for line, name in last.items():
    if line in beside:
      found.setdefault(name, beside[line])
  return found


def _places(tree: ast.AST) -> Iterator[tuple[str, int]]:
  """Every field that a config file sets, with the line on which its value ends."""
  for node in ast.walk(tree):
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
      continue
    target = ast.unparse(node.targets[0])
    if not target.startswith("config."):
      continue
    name = target.removeprefix("config.")
    keywords = [keyword for call in ast.walk(node.value) if isinstance(call, ast.Call)
                for keyword in call.keywords if keyword.arg]
    if keywords:
      yield from ((f"{name}.{keyword.arg}", keyword.value.end_lineno) for keyword in keywords)
    else:
      yield name, node.value.end_lineno
