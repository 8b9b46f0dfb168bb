"""Operations that tokamax timed on TPUs: their programs, and what the TPU compiler says of them.

A folder of tokamax' autotuning caches has `DEVICE/OPERATION.json`, from arguments as JSON to the
times of each configuration; the configuration `{}` is plain XLA. The operations are tokamax' own.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import math
from pathlib import Path
import pkgutil
import re
import signal
from typing import Any
import zlib

import jax
import numpy as np

from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.infra import files, trust
from tpugraphs_jax.tuning import label_file

# Targets by the name that tokamax' caches give a device.
DEVICES = {
  "tpu_v5_lite": "tpu:v5e",
  "tpu_v5": "tpu:v5p",
  "tpu_v6_lite": "tpu:v6e",
  "tpu7x": "tpu:7x",
}
_XLA = "{}"  # the configuration of an operation that XLA compiles without a choice
_TWIN = "return_residuals"
_SEED = 0
_SHAPE = re.compile(r"\b(?:bool|bf|f|i|u)(\d*)[a-z0-9_]*\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Program:
  """An operation with its arguments, and the times measured on a device."""

  device: str  # a key of `DEVICES`
  operation: str
  key: str  # arguments as JSON
  times_ms: tuple[float, ...]
  peak_mb: float = math.nan  # of memory, as the compiler of the measurement planned it

  @functools.cached_property
  def name(self) -> str:
    """Device, operation and a checksum of the arguments, the same for both twins."""
    arguments = {name: value for name, value in json.loads(self.key).items() if name != _TWIN}
    text = json.dumps(arguments, sort_keys=True)
    return f"{self.device}/{self.operation}/{hashlib.sha256(text.encode()).hexdigest()[:12]}"

  @property
  def size(self) -> int:
    """Bits of all arrays among the arguments."""
    return sum(
      int(bits or 8) * math.prod(int(size) for size in shape.split(",") if size)
      for bits, shape in _SHAPE.findall(self.key)
    )


def read(folder: Path) -> tuple[list[Program], list[str]]:
  """The distinct programs of a folder of caches, and a line for each file without any."""
  programs: dict[str, Program] = {}
  without = []
  for path in sorted(folder.glob("*/*.json")):
    device, operation = path.parent.name, path.stem
    if device not in DEVICES:
      continue
    try:
      cache = trust.parse(path.read_text() or "{}")
      measured = [
        Program(
          device,
          operation,
          key,
          tuple(row[_XLA]["evaluation_times_ms"]),
          row[_XLA].get("peak_memory_mb", math.nan),
        )
        for key, row in cache.items()
        if _XLA in row
      ]
    except (ValueError, KeyError, TypeError) as error:
      without.append(f"{device}/{operation}: {str(error) or type(error).__name__}")
      continue
    if not measured:
      without.append(f"{device}/{operation}: no times of plain XLA")
    # Programs that return no residuals come first and stay.
    for program in sorted(measured, key=lambda program: json.loads(program.key).get(_TWIN, False)):
      programs.setdefault(program.name, program)
  return list(programs.values()), without


def sample(programs: Sequence[Program], count: int | None) -> list[Program]:
  """At most `count` programs of each operation of each device, smallest first."""
  kept = []
  for pair in sorted({(program.device, program.operation) for program in programs}):
    members = sorted(
      (program for program in programs if (program.device, program.operation) == pair),
      key=lambda program: program.name,
    )
    order = np.random.default_rng(_SEED).permutation(len(members))[:count]
    kept += [members[place] for place in order]
  return sorted(kept, key=lambda program: (program.size, program.name))


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


def function(program: Program) -> tuple[Any, tuple[list[jax.ShapeDtypeStruct]]]:
  """The function of a program and its one argument, all arrays, as tokamax times it.

  Raises:
    ValueError: the installed tokamax has no such operation, or does not know its arguments.
  """
  from tokamax._src import benchmarking

  if program.operation not in operations():
    raise ValueError(f"tokamax {version()} has no operation {program.operation}")
  operation = operations()[program.operation]()
  values = arguments(program.operation, operation._fwd_signature, program.key)
  forward, arrays = benchmarking.standardize_function(operation, kwargs=values, seed=None)
  return forward, (arrays,)


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


class Work:
  """What the compiler said of programs, in a folder.

  Attributes:
    path: of a file of labels, whose choices are programs.
  """

  def __init__(self, folder: Path):
    self.folder, self.path = folder, folder / "labels.jsonl"

  def module(self, name: str) -> Path:
    """The file of a program's optimised module, compressed."""
    return self.folder / f"{name}.hlo.pb.z"

  def versions(self) -> dict[str, str]:
    return {"libtpu": tpu.libtpu_version(), "jax": jax.__version__, "tokamax": version()}

  def outcomes(self) -> dict[str, dict[str, Any] | str]:
    """By program what the compiler says of it, or its error."""
    lines = [line for line in label_file.records(self.path) if line.keys() & {"raw", "error"}]
    return {
      line["program"]: line["raw"] if "raw" in line else line["error"]
      for line in lines
      if self.versions().items() <= line.items()
    }

  def compile(self, programs: Sequence[Program], timeout: int) -> None:
    """Compiles programs, in this process, which a crash of the compiler ends."""
    known = self.outcomes()
    for program in programs:
      if program.name in known:
        continue
      line: dict[str, Any] = {"label": "compiled", **self.versions(), "program": program.name}
      label_file.append(self.path, line)
      signal.alarm(timeout)  # ends this process while the compiler is busy
      try:
        line["raw"] = self._compile(program)
      except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        line["error"] = f"{type(error).__name__}: {str(error)[:500]}"
      label_file.append(self.path, line)
      signal.alarm(0)

  def _compile(self, program: Program) -> dict[str, Any]:
    compiled = tpu.compile_function(*function(program), DEVICES[program.device])
    path = self.module(program.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path, "wb") as file:
      file.write(zlib.compress(compiled.module))
    return {
      "optimal_seconds": compiled.optimal_seconds,
      "bytes_accessed": compiled.bytes_accessed,
      "flops": compiled.flops,
      "memory": dataclasses.asdict(compiled.memory),
    }
