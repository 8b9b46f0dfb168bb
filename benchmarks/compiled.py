"""Programs that the TPU compiler compiled, with their final schedules, in files of a folder.

A benchmark compiles in processes of its own, one after the other, which libtpu may end. Each
program is a zip file; a program that the compiler refuses is a text file with its reason. A
command that was stopped goes on with the next program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import io
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any
import zipfile

import jax
import numpy as np

from tpugraphs_jax.hlo import calls, proto, schedule_dump, tpu
from tpugraphs_jax.hlo.scalar_operands import scalar_operands
from tpugraphs_jax.infra import console, files, trust
from tpugraphs_jax.tuning import costs
from tpugraphs_jax.tuning.schedule import program

_SCHEDULE = "schedules/"
_REFUSALS = (ValueError, TypeError, NotImplementedError, AttributeError, ImportError)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled program and what the compiler says of it.

  Attributes:
    module: serialized, after all optimisations.
    schedules: texts by kernel.
    notes: `optimal_seconds`, `bytes_accessed`, `flops`, and `seconds` of the compilation.
    operands, arguments: of `program.Simulation`.
  """

  module: bytes
  schedules: Mapping[str, str]
  notes: Mapping[str, Any]
  operands: Mapping[str, Mapping[int, Sequence[int]]] = dataclasses.field(default_factory=dict)
  arguments: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)

  def parsed(self) -> proto.HloModuleProto:
    return proto.parse_module(self.module, where="a compiled program")

  def prepared(self, target: str) -> program.Simulation:
    """Its simulation."""
    return program.Simulation(
      self.parsed(), self.schedules, target, arguments=self.arguments, operands=self.operands
    )


class Folder:
  """Compiled programs by name."""

  def __init__(self, path: Path):
    self.path = path

  def _file(self, name: str, suffix: str) -> Path:
    return self.path / f"{name}{suffix}"

  def _current(self) -> Path:
    """A file with the name of the program that this script compiles now."""
    return self.path / f"current.{Path(sys.argv[0]).stem}"

  def has(self, name: str) -> bool:
    """Whether a program was compiled or refused."""
    return self._file(name, ".zip").exists() or self._file(name, ".txt").exists()

  def refusal(self, name: str) -> str:
    """Why a program was refused; empty if it was not."""
    path = self._file(name, ".txt")
    return path.read_text() if path.exists() else ""

  def refuse(self, name: str, why: str) -> None:
    path = self._file(name, ".txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
      file.write(why)

  def write(self, name: str, compiled: Compiled) -> None:
    path = self._file(name, ".zip")
    path.parent.mkdir(parents=True, exist_ok=True)
    arguments = {number: array.tolist() for number, array in compiled.arguments.items()}
    with (
      files.replacing(path, "wb") as file,
      zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
      archive.writestr("module.hlo.pb", compiled.module)
      archive.writestr("notes.json", json.dumps([compiled.notes, compiled.operands, arguments]))
      for kernel, text in compiled.schedules.items():
        archive.writestr(f"{_SCHEDULE}{kernel}", text)

  def read(self, name: str) -> Compiled | None:
    """A program; None if it was not compiled."""
    path = self._file(name, ".zip")
    if not path.exists():
      return None
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
      notes, operands, arguments = trust.parse(archive.read("notes.json"))
      schedules = {
        entry.removeprefix(_SCHEDULE): archive.read(entry).decode()
        for entry in archive.namelist()
        if entry.startswith(_SCHEDULE)
      }
      numbered = {
        kernel: {int(index): words for index, words in given.items()}
        for kernel, given in operands.items()
      }
      arrays = {int(number): np.array(words) for number, words in arguments.items()}
      return Compiled(archive.read("module.hlo.pb"), schedules, notes, numbered, arrays)

  def compile(self, names: Sequence[str], options: Sequence[str] = (), flags: str = "") -> None:
    """Compiles what is missing, in processes that run this script with `--worker` and options.

    Args:
      names: of programs.
      options: of the script.
      flags: of libtpu.
    """
    current = self._current()
    while missing := [name for name in names if not self.has(name)]:
      print(f"{len(missing)} programs to compile", flush=True)
      current.unlink(missing_ok=True)
      with schedule_dump.folder() as folder:
        environment = (
          os.environ
          | {name: f"{flags} {value}" for name, value in schedule_dump.environment(folder).items()}
          | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        )
        script = sys.modules["__main__"].__spec__.name  # of python -m
        command = [sys.executable, "-m", script, *sys.argv[1:], "--worker", *options]
        status = subprocess.run(command, env=environment).returncode
      if current.exists():
        self.refuse(current.read_text(), f"the compiler ended its process with status {status}")
      elif status:
        sys.exit(f"error: the compiling process ended with status {status}")

  def work(self, programs: Iterator[tuple[str, Callable[[], Compiled]]], timeout: int) -> None:
    """Compiles programs in this process; a program that takes too long ends the process."""
    self.path.mkdir(parents=True, exist_ok=True)
    current = self._current()
    for name, compile_ in programs:
      if self.has(name):
        continue
      current.write_text(name)
      signal.alarm(timeout)
      try:
        self.write(name, compile_())
      except (*_REFUSALS, jax.errors.JaxRuntimeError) as error:
        self.refuse(name, f"{type(error).__name__}: {console.one_line(error)[:300]}")
      signal.alarm(0)
      current.unlink(missing_ok=True)


def compile_function(
  function: Callable[..., Any], arguments: Sequence[Any], target: str, **options: Any
) -> Compiled:
  """Compiles a function for a target, in a process that `Folder.compile` started."""
  begin = time.perf_counter()
  outcome = tpu.compile_function(function, tuple(arguments), target, **options)
  notes = {
    "optimal_seconds": outcome.optimal_seconds,
    "bytes_accessed": outcome.bytes_accessed,
    "flops": outcome.flops,
    "seconds": round(time.perf_counter() - begin, 2),
    "target": target,
    "libtpu": tpu.libtpu_version(),
  }
  call, module = calls.Call(function, tuple(arguments), {}), outcome.module
  parsed = proto.parse_module(module, where="a compiled program")
  known = costs.known_integers(call.arrays)
  operands = scalar_operands(call, known, parsed).values
  words = {
    kernel: {index: values.reshape(-1).tolist() for index, values in given.items()}
    for kernel, given in operands.items()
  }
  arguments = known if costs.parameters(parsed) == len(call.arrays) else {}
  return Compiled(module, outcome.schedules, notes, words, arguments)
