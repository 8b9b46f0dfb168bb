"""HLO modules as bytes: from bytes, files, HLO text, jax's stages and functions.

jax is imported only for the sources that need it.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

from tpugraphs_jax.graph import BEFORE_LAYOUTS, LOWERED, OPTIMIZED
from tpugraphs_jax.hlo import text

_TEXT_START, _ZIP_START = "HloModule", b"PK\x03\x04"


@dataclasses.dataclass(frozen=True)
class Loaded:
  """The bytes of a module or of tuning data."""

  data: bytes
  where: str  # the source, with which error messages begin
  name: str | None = None  # the graph's name; None: the module's
  stage: str = ""  # of compilation, where it is known


def load(source: Any, *args: Any, optimized: bool = False, target: str | None = None) -> Loaded:
  """The serialized module of a source, as `featurize` describes it.

  Raises:
    ValueError: the source is of no known kind, jax does not accept it, or there is
      no compiler for the target.
    FileNotFoundError: there is no such file.
  """
  is_compiled, is_lowered = (
    hasattr(source, name) for name in ("runtime_executable", "compiler_ir")
  )
  is_stage = is_compiled or is_lowered
  is_function = callable(source) and not is_stage
  kind = type(source).__name__
  if args and not is_function:
    raise ValueError(
      f"{len(args)} arguments were given for a {kind}, which takes none; "
      "pass a function to give it example arguments"
    )
  if optimized and not (is_function or is_stage):
    raise ValueError(
      f"optimized=True was given for a {kind}, which jax cannot compile; "
      "pass a function or a jax.stages.Lowered"
    )
  if target is not None and not is_function:
    raise ValueError(
      f"target={target!r} was given for a {kind}, which is compiled or "
      "lowered already; pass a function with its example arguments"
    )
  if is_function:
    return _function(source, args, optimized=optimized, target=target)
  if isinstance(source, (bytes, bytearray, memoryview)):
    return Loaded(bytes(source), "HLO bytes")
  if isinstance(source, str) and source.lstrip().startswith(_TEXT_START):
    return Loaded(text.module_of(source, "HLO text"), "HLO text")
  if isinstance(source, (str, os.PathLike)):
    return load_file(source)
  if is_compiled:
    return Loaded(_compiled_module(source), "compiled program", stage=OPTIMIZED)
  if is_lowered:
    return _lowered(source, optimized=optimized, where="lowered program")
  raise ValueError(
    f"cannot read a {kind}, expected bytes, a path, HLO text, a "
    "jax.stages.Lowered or Compiled, or a function with its arguments"
  )


def load_file(path: str | os.PathLike[str]) -> Loaded:
  """The message in a file: serialized, or made from HLO text."""
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file, expected a serialized HLO module or HLO text")
  data = path.read_bytes()
  if data.startswith(_ZIP_START):
    raise ValueError(
      f"{path} is an .npz or another archive, expected a serialized HLO module or "
      "HLO text: read graph files with tpugraphs_jax.read_layout or read_tile"
    )
  if data.lstrip().startswith(_TEXT_START.encode()):
    try:
      data = text.module_of(data.decode(), str(path))
    except UnicodeDecodeError as error:
      raise ValueError(f"{path}: HLO text that is not UTF-8 ({error})") from error
  return Loaded(data, str(path), stem(path))


def stem(path: Path) -> str:
  """The name that a file gives its graph: the file's, without `.hlo.pb` or `.pb`."""
  return path.name.removesuffix(".pb").removesuffix(".hlo")


def _function(
  function: Callable[..., Any], args: tuple, *, optimized: bool, target: str | None
) -> Loaded:
  where = f"function {getattr(function, '__name__', type(function).__name__)}"
  if target is not None:
    tpu = importlib.import_module("tpugraphs_jax.tuning.tpu")  # stands above this package
    target = tpu.full_name(target)
    program = tpu.compile_function(function, args, target, keep_stages=not optimized)
    if optimized:
      return Loaded(program.module, where, stage=f"{OPTIMIZED} for {target}")
    return Loaded(program.before_layouts, where, stage=f"{BEFORE_LAYOUTS} for {target}")
  import jax

  jitted = function if hasattr(function, "lower") else jax.jit(function)
  return _lowered(jitted.lower(*args), optimized=optimized, where=where)


def _lowered(lowered: Any, *, optimized: bool, where: str) -> Loaded:
  if optimized:
    return Loaded(_compiled_module(lowered.compile()), where, stage=OPTIMIZED)
  module = lowered.compiler_ir(dialect="hlo").as_serialized_hlo_module_proto()
  return Loaded(module, where, stage=LOWERED)


def _compiled_module(compiled: Any) -> bytes:
  modules = compiled.runtime_executable().hlo_modules()
  if len(modules) != 1:
    raise ValueError(f"compiled program: {len(modules)} HLO modules, expected one")
  return modules[0].as_serialized_hlo_module_proto()
