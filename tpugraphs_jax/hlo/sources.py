"""HLO modules as bytes: from bytes, files, text, StableHLO, jax's stages and functions.

jax is imported only for the sources that need it.
"""

from __future__ import annotations

import codecs
import collections
from collections.abc import Callable, Mapping
import dataclasses
import gzip
import io
import os
from pathlib import Path
import re
import sys
from typing import Any
import zlib

from tpugraphs_jax.graph import BEFORE_LAYOUTS, LOWERED, OPTIMIZED
from tpugraphs_jax.hlo import profiles, text
from tpugraphs_jax.infra import console, files, machine

_ZIP, _GZIP, _MLIR = b"PK\x03\x04", b"\x1f\x8b", b"ML\xefR"  # first bytes
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # every serialized module has some
# Possessive (`*+`): a repeated group that can go back takes 80 bytes per character.
_MLIR_TEXT = re.compile(
  rb"(?:\s|//.*\n)*+(?:\"?builtin\.module\b|module\b|\"?func\.func\b|[#!][\w.]+ *=)"
)
_BLOCK_BYTES = 1 << 20
_COST = 4  # bytes of memory that reading a byte may take


@dataclasses.dataclass(frozen=True)
class Loaded:
  """The bytes of a module or of tuning data."""

  data: bytes
  where: str  # the source, with which error messages begin
  name: str = ""  # the graph's name; empty: the module's
  stage: str = ""  # of compilation, where it is known


def load(
  source: Any,
  *args: Any,
  optimized: bool = False,
  target: str | None = None,
  kwargs: Mapping[str, Any] | None = None,
) -> Loaded:
  """The serialized module of a source, as `featurize` describes it.

  Raises:
    ValueError: the source is of no known kind, jax does not accept it, or there is
      no compiler for the target.
    FileNotFoundError: there is no such file.
  """
  source, stages = _stage(source), _stages()
  is_compiled = isinstance(source, stages and stages.Compiled or ())
  is_lowered = isinstance(source, stages and stages.Lowered or ())
  is_stage = is_compiled or is_lowered
  if hasattr(source, "mlir_module_serialized"):  # of jax.export
    source = source.mlir_module_serialized
  is_function = callable(source) and not is_stage
  kind = type(source).__name__
  options = {"arguments": args or kwargs, "optimized": optimized and not is_stage, "target": target}
  if not is_function and (given := next((name for name in options if options[name]), "")):
    raise ValueError(
      f"{given} was given for a {kind}, expected a function, or for optimized a jax.stages.Lowered"
    )
  if is_function:
    return _function(source, args, kwargs or {}, optimized=optimized, target=target)
  if isinstance(source, (bytes, bytearray, memoryview)):
    return _read(bytes(source), "HLO bytes")
  if isinstance(source, str) and _is_text(source):
    return _read(source.encode(), "HLO text")
  if isinstance(source, (str, os.PathLike)):
    return load_file(source)
  if is_compiled:
    return Loaded(_compiled_module(source), "compiled program", stage=OPTIMIZED)
  if is_lowered:
    return _lowered(source, optimized=optimized, where="lowered program")
  raise ValueError(
    f"cannot read a {kind}, expected bytes, a path, HLO or StableHLO text, a "
    "jax.stages.Lowered or Compiled, or a function with its arguments"
  )


def _stages() -> Any:
  """The module `jax.stages`, where the caller has imported jax: only then there are stages."""
  return getattr(sys.modules.get("jax"), "stages", None)


def _stage(source: Any) -> Any:
  """A lowered or compiled program of jax, which nnx and Equinox wrap; other sources as they are."""
  stages = _stages()
  if stages is None:
    return source
  kinds = {"traced": stages.Traced, "lowered": stages.Lowered, "compiled": stages.Compiled}
  for name, kind in kinds.items():
    inner = getattr(source, name, None)
    source = inner if isinstance(inner, kind) else source
  return source.lower() if isinstance(source, stages.Traced) else source


def _is_text(source: str) -> bool:
  """Whether a string is a text and no path: it has lines, braces, or nothing at all."""
  is_line = "\n" not in source and bool(source.strip())
  return not is_line or "{" in source and not os.path.exists(source)


def load_file(path: str | os.PathLike[str]) -> Loaded:
  """The message in a file: serialized, made from HLO text or StableHLO, or of a profile.

  A profile (`profiles`) is a file `.xplane.pb` or a folder of such files. The name of a module of
  several comes after a colon: `vm.xplane.pb:jit_step`.

  Raises:
    FileNotFoundError: a folder, or no such file.
    ValueError: a file of another kind, or a profile with no such module or with several.
  """
  path, expected = Path(path), "a serialized HLO module, HLO text or StableHLO"
  profile, name = profiles.split(path)
  if profiles.is_profile(profile):
    name, module = profiles.read(profile).module(name, where=str(profile))
    return Loaded(module, f"{name} of {profile}", stage=OPTIMIZED)
  files.check_file(path, expected)
  _check_room(path.stat().st_size, str(path))
  return _read(path.read_bytes(), str(path), stem(path))


def _read(data: bytes, where: str, name: str = "") -> Loaded:
  """The message in the bytes of a file, see `load_file`."""
  if data.startswith(_ZIP):
    raise ValueError(
      f"{where} is an .npz or another archive, expected a serialized HLO module or "
      "HLO text: read graph files with tpugraphs_jax.read_layout or read_tile"
    )
  if data.startswith(_GZIP):
    data = _unpacked(data, where)
  if not data.strip(codecs.BOM_UTF8 + b" \t\r\n"):
    raise ValueError(f"{where} is empty, expected an HLO module")
  if data[2:4] == b"\0\0" and (at := data.find(_MLIR)) >= 4:
    # An artifact of jax.export, a FlatBuffer: the length of an array stands before the array.
    data = data[at : at + int.from_bytes(data[at - 4 : at], "little")]
  is_mlir = data.startswith(_MLIR)
  source = None if is_mlir else _text_of(data, where)
  if source:
    data = source
  if is_mlir or source and _MLIR_TEXT.match(source):
    module = text.module_of(data, where, kind=text.STABLEHLO)
    return Loaded(module, where, name, stage=LOWERED)
  return Loaded(text.module_of(data, where) if source else data, where, name)


def _check_room(size: int, where: str) -> None:
  """Refuses (ValueError) bytes whose reading could take more memory than there is."""
  if _COST * size > (available := machine.available()):
    raise ValueError(
      f"{where} has {console.size(size)} or more, and reading takes up to {_COST} times as much "
      f"memory: {console.size(available)} are available"
    )


def _unpacked(data: bytes, where: str) -> bytes:
  most, unpacked = machine.available() // _COST, bytearray()
  try:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
      while len(unpacked) <= most and (block := stream.read(_BLOCK_BYTES)):
        unpacked += block
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f"{where} is damaged or cut short ({error}): write it again") from None
  _check_room(len(unpacked), f"{where}, unpacked,")
  return bytes(unpacked)


def _text_of(data: bytes, where: str) -> bytes | None:
  """The text in a file, as UTF-8; None where its bytes are no text."""
  if _CONTROL.search(data):
    return None
  blocks = (data[at : at + _BLOCK_BYTES] for at in range(0, len(data), _BLOCK_BYTES))
  try:
    # A text of Python takes four bytes per character where one character does.
    collections.deque(codecs.iterdecode(blocks, "utf-8"), maxlen=0)  # raises at the first error
  except UnicodeDecodeError as error:
    raise ValueError(f"{where}: text that is not UTF-8 ({error}): save it as UTF-8") from None
  return data.removeprefix(codecs.BOM_UTF8)


def stem(path: Path) -> str:
  """The name that a file gives its graph: the file's, without `.hlo.pb` or `.pb`, also of `.gz`."""
  return path.name.removesuffix(".gz").removesuffix(".pb").removesuffix(".hlo")


def _function(
  function: Callable[..., Any],
  args: tuple,
  kwargs: Mapping[str, Any],
  *,
  optimized: bool,
  target: str | None,
) -> Loaded:
  from tpugraphs_jax.hlo import calls, tpu  # these import jax

  where = f"function {getattr(function, '__name__', type(function).__name__)}"
  if target is not None:
    target = tpu.full_name(target)
    program = tpu.compile_function(function, args, target, kwargs=kwargs, keep_stages=not optimized)
    if optimized:
      return Loaded(program.module, where, stage=f"{OPTIMIZED} for {target}")
    return Loaded(program.before_layouts, where, stage=f"{BEFORE_LAYOUTS} for {target}")
  call = calls.Call(function, args, kwargs)
  return _lowered(call.lower(call.arrays), optimized=optimized, where=where)


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
