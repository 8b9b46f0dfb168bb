"""Imports point one way, a family imports no other, config objects and flags stay at the top."""

import ast

import pytest

from tests.support import commands

PACKAGE = commands.ROOT / "tpugraphs_jax"
# From the bottom to the top: a module imports from the layers before its own.
LAYERS = (
  ("infra", "version"),
  ("config_fields",),
  ("columns", "datasets", "graph"),
  ("losses", "metrics", "data", "hlo", "nn", "optimizer", "submission"),
  ("synthetic",),
  ("rankers",),
  ("train",),
  ("tuning", "report", "view", "run", "__main__"),
  ("collect", "estimate", "leaderboard", "sweep", "tune_tiles"),
  ("__init__",),
)
# All imports within a layer: the first imports the second.
WITHIN = {
  ("data", "metrics"),
  ("graph", "columns"),
  ("hlo", "data"),
  ("nn", "data"),
  ("run", "report"),
  ("submission", "data"),
  ("submission", "metrics"),
  ("tuning", "report"),
  ("view", "tuning"),
}
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
  return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def part_of(module):
  """The folder or top module of the package that a module belongs to."""
  return (module.split(".") + [""])[1]


def imports(path):
  """Modules and names of the package that a file imports or uses, also inside of functions."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
      yield from (part.value for part in node.args if isinstance(part, ast.Constant))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path):
  here = part_of(name_of(path))
  for found in imports(path):
    assert found != "tpugraphs_jax", f"{name_of(path)} imports the package above it"
    if not found.startswith("tpugraphs_jax."):
      continue
    there = part_of(found)
    assert there in LAYER_OF, f"{name_of(path)} imports {found}, which is in no layer"
    assert LAYER_OF[there] <= LAYER_OF[here], f"{name_of(path)} imports {found}"
    if LAYER_OF[there] == LAYER_OF[here] and there != here:
      assert (here, there) in WITHIN, f"{name_of(path)} imports {found}"


def uses(path, package):
  return any(found.split(".")[0] == package for found in imports(path))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_layer_knows_only_its_own_tools(path):
  here = part_of(name_of(path))
  if here in ("data", "hlo", "graph", "datasets", "metrics"):
    assert not uses(path, "flax")
  if here != "run":
    assert not uses(path, "ml_collections"), "config objects of flags stop at run/"
  if here not in ("leaderboard", "run", "sweep"):
    assert "--config." not in path.read_text(), "flags stop at the commands"


# Modules of `rankers` that all families share; every other folder or module is a family.
SHARED = set("base config explain family model_file official_weights ranker scorer".split())
# `segments` wraps families of whole programs; `late_join` is a part of the family of tiles.
WRAPPED = {"segments": {"layout"}, "tile": {"late_join"}}


def family_of(module):
  """The ranker family that a module belongs to; None for the modules that all families share."""
  name = module.removeprefix("tpugraphs_jax.rankers.").split(".")[0]
  is_ours = module.startswith("tpugraphs_jax.rankers.") and name not in SHARED | {"__init__"}
  return name if is_ours else None


@pytest.mark.parametrize("path", sorted((PACKAGE / "rankers").rglob("*.py")), ids=name_of)
def test_a_family_imports_no_other_familys_modules_except_segments(path):
  family = family_of(name_of(path))
  if family is None:
    return
  others = {family_of(found) for found in imports(path)} - {None, family}
  assert others <= WRAPPED.get(family, set()), f"{name_of(path)} imports {sorted(others)}"
