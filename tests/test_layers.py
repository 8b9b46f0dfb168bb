"""Imports point one way, config objects and flags stay at the top, functions stay short."""

import ast
import re

import commands
import pytest

PACKAGE = commands.ROOT / "tpugraphs_jax"
# From the bottom to the top: a module imports from its own layer and from those before it.
LAYERS = (
    ("atomic", "beam_jobs", "console", "graph", "host_memory", "integrity", "lock", "registry",
     "remote", "repeated"),
    ("batch", "collections", "table_batch"),
    ("losses", "metrics", "data", "hlo", "models", "submission"),
    ("batchers",),
    ("train",),
    ("segments",),
    ("predict",),
    ("collect", "report"),
    ("run",),
    ("sweep",),
)
# Within a layer these may import those.
WITHIN = {("models", "data"): False, ("hlo", "data"): True, ("submission", "data"): True,
          ("data", "hlo"): False}
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
  return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def part_of(module):
  """The folder or top module of the package that a module belongs to."""
  return (module.split(".") + [""])[1]


def imports(path):
  """Modules of the package that a file imports, wherever in the file."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path):
  here = part_of(name_of(path))
  if here in ("__init__", ""):  # names its homes as strings
    return
  for found in imports(path):
    if not found.startswith("tpugraphs_jax."):
      continue
    there = part_of(found)
    assert there in LAYER_OF, f"{name_of(path)} imports {found}, which is in no layer"
    assert LAYER_OF[there] <= LAYER_OF[here], f"{name_of(path)} imports {found}"
    if LAYER_OF[there] == LAYER_OF[here] and there != here:
      assert WITHIN.get((here, there), True), f"{name_of(path)} imports {found}"


def uses(path, package):
  return any(found.split(".")[0] == package for found in imports(path))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_layer_knows_only_its_own_tools(path):
  here = part_of(name_of(path))
  if here in ("data", "hlo", "graph", "collections", "registry", "metrics"):
    assert not uses(path, "flax")
  if here != "run":
    assert not uses(path, "ml_collections"), "config objects stop at run/"
    assert "--config." not in path.read_text(), "flags stop at run/"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_models_are_not_asked_with_getattr(path):
  if path.name in ("interface.py", "registry.py") or part_of(name_of(path)) in ("hlo", "data"):
    return
  for node in ast.walk(ast.parse(path.read_text())):
    is_ask = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr")
    if is_ask:
      assert "model" not in ast.unparse(node.args[0]).lower(), f"line {node.lineno}"


SOURCES = [*MODULES, *sorted((commands.ROOT / "configs").glob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_modules_and_functions_stay_short(path):
  text = path.read_text()
  if path.name != "hlo_pb2.py":  # generated
    assert len(text.splitlines()) <= 350
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef) and path.parent.name != "configs":
      assert node.end_lineno - node.lineno < 60, f"{node.name} of {path.name}"


def test_no_class_is_a_hub():
  for path in MODULES:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ClassDef):
        public = [item.name for item in node.body if isinstance(item, ast.FunctionDef)
                  and not item.name.startswith("_") and not item.decorator_list]
        assert len(public) <= 15, f"{node.name} of {path.name}"


def lines_of_code(path):
  """Lines of a file that are neither blank nor a comment nor part of a docstring."""
  text, documented = path.read_text(), set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
      documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
  return sum(
      bool(line.strip()) and not line.strip().startswith("#") and number not in documented
      for number, line in enumerate(text.splitlines(), start=1))


def test_there_is_as_much_test_as_code():
  tests = sum(map(lines_of_code, (commands.ROOT / "tests").rglob("*.py")))
  code = sum(lines_of_code(path) for path in MODULES if path.name != "hlo_pb2.py")
  assert tests >= code


def array_functions():
  """Public functions whose annotations speak of arrays, with their docstrings."""
  for path in MODULES:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
        parts = [arg.annotation for arg in (*node.args.args, *node.args.kwonlyargs)]
        text = " ".join(ast.unparse(part) for part in (*parts, node.returns) if part)
        if "np.ndarray" in text or "jax.Array" in text:
          yield f"{name_of(path)}.{node.name}", ast.get_docstring(node) or ""


def test_array_functions_give_shapes():
  found = dict(array_functions())
  silent = [name for name, text in found.items() if not re.search(r"\[[^\]]*\]", text)]
  assert len(silent) <= 0.1 * len(found), silent
