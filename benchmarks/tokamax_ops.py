"""The operations that tokamax timed on TPUs, and their arguments from the JSON of its caches."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import re
from typing import Any

# Targets by the name that tokamax' caches give a device.
DEVICES = {
  "tpu_v5_lite": "tpu:v5e",
  "tpu_v5": "tpu:v5p",
  "tpu_v6_lite": "tpu:v6e",
  "tpu7x": "tpu:7x",
}


@functools.cache
def operations() -> dict[str, type]:
  """The operations that tokamax computes with plain XLA, by the name of their caches."""
  from tokamax._src import ops
  from tokamax._src.ops import op

  operations_by_name = {}
  for part in pkgutil.iter_modules(ops.__path__):
    try:
      module = importlib.import_module(f"{ops.__name__}.{part.name}.base")
    except ModuleNotFoundError:
      continue
    for name, value in vars(module).items():
      if (
        inspect.isclass(value) and issubclass(value, op.Op) and value.__module__ == module.__name__
      ):
        operations_by_name[re.sub(r"(?!^)([A-Z])", r"_\1", name).lower()] = value
  return operations_by_name


def arguments(operation: str, signature: inspect.Signature, key: str) -> dict[str, Any]:
  """The arguments of an operation from their JSON, arrays as their shapes.

  Raises:
    ValueError: the installed tokamax does not know an argument.
  """
  import pydantic
  from tokamax._src.pydantic import get_arg_spec_model

  given = json.loads(key)
  for name in sorted(given.keys() - signature.parameters.keys()):
    # A newer tokamax writes its defaults.
    if given.pop(name) not in (None, False, True):
      raise ValueError(f"tokamax {version()} knows no argument {name} of {operation}")
  precision = given.get("precision")
  if isinstance(precision, list) and all(isinstance(pair, list) for pair in precision):
    if any(len(set(pair)) != 1 for pair in precision):
      raise ValueError(f"precision {precision}, expected one precision of each product")
    given["precision"] = [pair[0] for pair in precision]  # as older versions write it
  spec = pydantic.TypeAdapter(pydantic.Json[get_arg_spec_model("Spec", signature)])
  return dict(spec.validate_python(json.dumps(given)))


def version() -> str:
  """The version of the installed tokamax."""
  return importlib.metadata.version("tokamax")
