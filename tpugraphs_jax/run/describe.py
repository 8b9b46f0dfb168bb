"""`--print_config` and the list of variants in `--help`: a config in words.

Comments stand in the config file beside the fields and are read from its source: a comment
belongs to the last field on its line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import io
from pathlib import Path
import runpy
import textwrap
import tokenize
from typing import Any

from flax import traverse_util
import ml_collections

from tpugraphs_jax.run import checks, configs

_WIDTH = 96


def variants(place: str) -> str:
  """The variants of a config file, one to a line; empty if the file names none."""
  path = Path(place.partition(":")[0])
  known = runpy.run_path(str(path)).get("VARIANTS", {}) if path.is_file() else {}
  lines = [f"  {name:<20} {text}" for name, text in known.items()]
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
  choices, lines = checks.choices(fields), []
  for name, value in traverse_util.flatten_dict(fields.to_dict(), sep=".").items():
    note = comments.get(name, "")
    if not all(str(choice) in (*note.replace(",", " ").split(), str(value))
               for choice in choices.get(name, ())):  # else the comment says it
      note = "; ".join(filter(None, [note, f"one of {', '.join(map(str, choices[name]))}"]))
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
  first, *rest = textwrap.wrap(note, _WIDTH - 46) or [""]
  yield f"{flag:<44}  # {first}"
  for line in rest:
    yield f"{'':<44}  # {line}"


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
