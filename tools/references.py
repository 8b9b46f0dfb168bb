"""Lists references in docstrings and comments of the package that name nothing.

The lane `lint` runs it.

    python -m tools.references
"""

from __future__ import annotations

import ast
import importlib
import itertools
from pathlib import Path
import pydoc
import re
import sys

import tpugraphs_jax

ROOT = Path(tpugraphs_jax.__file__).parent
PATHS = [path for path in sorted(ROOT.rglob("*.py")) if not path.name.endswith("_pb2.py")]
# `data.plan.BatchPlan`, `tpugraphs_jax.report`, `lax.pmean(x)`: names joined by dots.
REFERENCE = re.compile(r"`((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)(?:\([^`]*\))?`")
LIBRARIES = ("absl", "inspect", "jax", "jraph", "optax")
FILE = re.compile(r"\.(css|csv|html|js|jsonl?|npz|pb|py|tar|txt)$")


CONFIG_FIELDS = {"segments.finetune"} | {
  name
  for value in ("tile.py", "layout.py:gst_ed")
  for name in tpugraphs_jax.load_config(value).declared
}


def module_name(path: Path) -> str:
  """Dotted name of a file of the package."""
  parts = path.relative_to(ROOT.parent).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PATHS}
PLACES = {}  # modules by their last name and by the classes that they define
for module, path in MODULES.items():
  for name in (
    module.rpartition(".")[2],
    *(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)),
  ):
    PLACES.setdefault(name, []).append(module)


def has(owner: object, names: list[str]) -> bool:
  """Whether an object has the attribute; a class also has the fields that it declares."""
  for name in names:
    declared = itertools.chain.from_iterable(
      getattr(base, "__annotations__", ()) for base in getattr(owner, "__mro__", ())
    )
    if not hasattr(owner, name):
      return name in declared and name == names[-1]
    owner = getattr(owner, name)
  return True


def resolves(reference: str, module: str) -> bool:
  """Whether a reference in a module names a module, a class or an attribute."""
  names = reference.removeprefix("tpugraphs_jax.").split(".")
  starts = [(module, names), ("tpugraphs_jax", names)]
  starts += [(place, names) for place in PLACES.get(names[0], ())]
  starts += [(place, names[1:]) for place in PLACES.get(names[0], ())]
  for size in range(1, len(names) + 1):
    starts.append((".".join(["tpugraphs_jax", *names[:size]]), names[size:]))
  if any(place in MODULES and has(importlib.import_module(place), rest) for place, rest in starts):
    return True
  if names[0] not in LIBRARIES:
    return False
  # A module of a library may have to be imported.
  return has(importlib.import_module(names[0]), names[1:]) or bool(pydoc.locate(".".join(names)))


def is_variable(reference: str, path: Path) -> bool:
  """Whether a reference such as `state.extra` begins with a variable of the file."""
  first, *rest = reference.split(".")
  names = {
    getattr(node, "id", getattr(node, "arg", None))
    for node in ast.walk(ast.parse(path.read_text()))
  }
  return len(rest) == 1 and reference.islower() and first in names


def stale(path: Path) -> list[str]:
  """The references in a file that name nothing."""
  return [
    reference
    for reference in sorted(set(REFERENCE.findall(path.read_text())))
    if not FILE.search(reference)
    and reference.removeprefix("config.") not in CONFIG_FIELDS
    and not is_variable(reference, path)
    and not resolves(reference, module_name(path))
  ]


def main() -> None:
  found = [f"{path.relative_to(ROOT.parent)}: `{name}`" for path in PATHS for name in stale(path)]
  if found:
    sys.exit("\n".join([*found, "error: these references name nothing"]))


if __name__ == "__main__":
  main()
