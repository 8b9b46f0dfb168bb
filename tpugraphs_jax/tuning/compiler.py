"""The TPU compiler in a process of its own, with the final schedules of its kernels.

  with Compiler() as compiler:
    program = compiler.compile(Call(function, (x, y), {}), "tpu:v6e")

libtpu reads its flags once, writes schedules into a folder, and on some programs ends its process
or does not come to an end. Functions are traced and lowered here, and compiled there. The folder is
on a memory file system where there is one, and is deleted with the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import io
import itertools
import json
import os
from pathlib import Path
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import jax
from jax.interpreters import mlir
import numpy as np

from tpugraphs_jax.hlo import (
  buffers,
  calls,
  collectives,
  meshes,
  module_graph,
  names,
  proto,
  schedule_dump,
  topology,
  tpu,
  tpu_kernels,
  work,
)
from tpugraphs_jax.infra import console, tasks

TIMEOUT = 3600.0  # seconds for one program
_SECONDS = 0.2  # between two looks at the process
_LARGEST = 4 << 30  # bytes of schedules
_FREE_SHARE = 1 / 4  # of a file system that schedules may take
_ROOT = Path(__file__).parents[2]  # of the package
EXHAUSTED = "RESOURCE_EXHAUSTED"  # in the refusal of a program whose memory does not fit
_MODULES = "modules"  # folder in which XLA writes the modules of the program that it compiles
_SCHEDULED = "*.after_optimizations.hlo.pb"  # of these the last, of a refused program too
_OTHER_KERNELS = ("custom-call", "sort")  # without tiles
_FOLLOWING = 2  # kernels that a message names
_REQUEST, _ANSWER, _LOG, _SCHEDULES = "request.mlir", "answer", "log", "schedules"
_LAST_WORDS = re.compile(r"(?:Check failed|\bF\d{4} ).*")  # of XLA


class OutOfMemory(jax.errors.JaxRuntimeError):
  """The compiler refused a program whose memory does not fit on the device.

  Attributes:
    module: serialized `HloProto` of the program as the compiler has scheduled it.
  """

  def __init__(self, said: str, module: bytes):
    super().__init__(said)
    self.module = module


class Ended(Exception):
  """The compiler gave no answer: it ended its process, took too long, or wrote too much.

  Attributes:
    module: serialized `HloProto` of the program as the compiler has scheduled it, before it writes
      kernels; empty if it has not come so far.
  """

  def __init__(self, said: str, module: bytes = b""):
    super().__init__(said)
    self.module = module


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A call as jax lowers it for a target.

  Attributes:
    module: StableHLO.
    target: of `compile`.
    options: of the compiler.
    devices: ids of the devices of a topology, in the order of the partitions.
  """

  module: bytes
  target: str
  options: Mapping[str, Any]
  devices: tuple[int, ...]


def lower(
  call: calls.Call,
  target: str,
  compiler_options: Mapping[str, Any] | None = None,
  placement: meshes.Placement | None = None,
) -> Lowered:
  """Lowers a call in the contexts of this thread, such as a precision; arguments as of `compile`.

  Raises:
    ValueError: as `tpu.full_name`.
  """
  as_device: contextlib.AbstractContextManager = contextlib.nullcontext()  # of `tpu.lower`
  if placement is None:
    target = topology.generation_of(target)  # one device is the same in every topology
  else:
    as_device = tpu.as_device(topology.generation_of(target))
  with console.working(f"lowering for {tpu.short_name(target)}"), as_device:
    lowered = tpu.lower(call, target) if placement is None else meshes.lower(call)
    devices = tuple(placement.ids) if placement else (topology.devices(target)[0].id,)
    options = call.compiler_options(compiler_options or {})
    return Lowered(_bytecode(lowered), target, options, devices)


def reason(error: Exception) -> str:
  """Why a function was not compiled: the first line of a compiler's, the last of a callback's."""
  lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
  return console.one_line(lines[-1 if "Traceback (most recent call last)" in lines[0] else 0])


class Compiler:
  """A process that compiles functions for TPUs, one after the other; started again if it ends.

  Args:
    timeout: seconds after which a compilation is ended.
    memory_only: whether it is ended once the memory of the program is planned.

  Attributes:
    kernels: how many kernels of the program that is compiled now are done.
  """

  def __init__(self, *, timeout: float = TIMEOUT, memory_only: bool = False):
    self._timeout, self._memory_only, self.kernels = timeout, memory_only, 0
    self._stack = contextlib.ExitStack()
    self._opened: Path | None = None
    self._process: subprocess.Popen | None = None

  def __enter__(self) -> Compiler:
    self._opened = self._stack.enter_context(schedule_dump.folder())
    self._stack.callback(self._end)
    self._start()  # its imports take as long as the first function's trace
    return self

  def __exit__(self, *error: object) -> None:
    self._opened = None
    self._stack.close()

  @property
  def _folder(self) -> Path:
    if self._opened is None:
      raise RuntimeError(
        "the compiler is not open, expected `with compiler:` or `with label.open():`"
      )
    return self._opened

  def compile(
    self,
    call: calls.Call,
    target: str,
    compiler_options: Mapping[str, Any] | None = None,
    *,
    placement: meshes.Placement | None = None,
  ) -> tpu.TpuProgram:
    """Compiles a call for a target, with the schedules of its kernels.

    Args:
      call: of `jaxprs.for_one_device` without a placement.
      target: a TPU generation such as `v3`, with a placement a topology such as `v6e:2x4`.
      compiler_options: as of `jax.jit`, beside those of the call.
      placement: of the mesh of the call.

    Raises:
      Ended: there is no answer of the compiler.
      jax.errors.JaxRuntimeError: the compiler refuses the function or an option.
      ValueError: as `tpu.full_name`.
    """
    lowered = lower(call, target, compiler_options, placement)
    with console.working(f"compiling for {tpu.short_name(target)}"):
      return self.compile_lowered(lowered)

  def compile_lowered(self, lowered: Lowered) -> tpu.TpuProgram:
    """Compiles what `lower` returns, in any thread; errors as of `compile`."""
    if self._process is None:
      self._start()
    try:
      (self._folder / _REQUEST).write_bytes(lowered.module)
      refusal = self._ask(
        {"target": lowered.target, "options": lowered.options, "devices": lowered.devices}
      )
    except BaseException:  # also Ctrl-C, after which the process would go on with this program
      self._end()
      raise
    answer = self._folder / _ANSWER
    if EXHAUSTED in refusal and answer.exists():
      raise OutOfMemory(console.one_line(refusal), answer.read_bytes())
    if refusal:
      raise jax.errors.JaxRuntimeError(refusal)
    with open(answer, "rb") as file:
      return pickle.load(file)  # of a process and a folder of this one alone

  def _ask(self, request: Mapping[str, Any]) -> str:
    """Waits until a request is done; why the compiler refused it, or an empty text.

    Raises:
      Ended: the process ended or was ended.
    """
    process, end, self.kernels = self._process, time.monotonic() + self._timeout, 0
    assert process is not None and process.stdin is not None and process.stdout is not None
    try:
      process.stdin.write(json.dumps(request).encode() + b"\n")
      process.stdin.flush()
      while not select.select([process.stdout], [], [], _SECONDS)[0]:
        if self._memory_only and (module := self._scheduled()):
          raise Ended("it was ended once its memory was planned, which leaves out its code", module)
        if time.monotonic() > end:
          said = f"it took more than {self._timeout:g} s{_progress(self._folder)}"
          raise Ended(said, self._scheduled())
        self.kernels = len(schedule_dump.kernels(self._folder / _SCHEDULES))
        if (size := _size(self._folder)) > self._most:
          raise Ended(f"its schedules take more than {console.size(size)}", self._scheduled())
      answer = process.stdout.readline()
    except BrokenPipeError:
      answer = b""
    if not answer:
      raise Ended(self._last_words(process.wait()), self._scheduled())
    return json.loads(answer)["refusal"]

  def _scheduled(self) -> bytes:
    """The module as the compiler has scheduled it; empty if it is not written, or not wholly."""
    for path in (self._folder / _MODULES).glob(_SCHEDULED):
      with contextlib.suppress(OSError, ValueError):  # of a file that is being written
        module = path.read_bytes()
        if proto.parse_module(module, where=path.name).schedule.sequences:
          return module
    return b""

  def _last_words(self, status: int) -> str:
    """How the process ended, and what the compiler said before."""
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    log = (self._folder / _LOG).read_text(errors="replace")
    said = _LAST_WORDS.findall(log) or (log.splitlines() if status == 1 else [])  # a traceback
    last = f": {console.one_line(said[-1])}" if said else ""
    return f"it ended its process with {ended}{last}{_progress(self._folder)}"

  def _start(self) -> None:
    for path in self._folder.iterdir():  # of a process that has ended
      shutil.rmtree(path) if path.is_dir() else path.unlink()
    (self._folder / _SCHEDULES).mkdir()
    self._most = min(_LARGEST, _FREE_SHARE * shutil.disk_usage(self._folder).free)
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_ROOT))))
    environment = {
      **os.environ,
      **schedule_dump.environment(self._folder / _SCHEDULES),
      "PYTHONPATH": paths,
      "JAX_PLATFORMS": "cpu",
      tasks.PARENT: str(os.getpid()),
    }
    # -P: without the working folder, which may have a numpy.py.
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(self._folder)]
    with open(self._folder / _LOG, "wb") as log:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,  # a signal for the group leaves it alive to delete the folder
      )

  def _end(self) -> None:
    if self._process is not None:
      self._process.kill()
      with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes and waits
        pass
      self._process = None


def _progress(folder: Path) -> str:
  """Which kernels a compiler that has ended was at; empty where it had begun with none."""
  done = schedule_dump.kernels(folder / _SCHEDULES)
  with contextlib.suppress(OSError, ValueError):  # of a file that it has not written to its end
    for path in sorted((folder / _MODULES).glob(_SCHEDULED))[-1:]:
      module = proto.parse_module(path.read_bytes(), where=path.name)
      last, *following = _last_and_following(module, done) or ("",)
      near = f"; it had compiled {len(done)} kernels, the last of {last}" if last else ""
      return near + f"; near it are {', '.join(following)}" * bool(near and following)
  return ""


def _last_and_following(module: proto.HloModuleProto, done: Sequence[str]) -> list[str]:
  """The last kernel of `done`, then those that the compiler most likely takes next.

  It takes kernels in the order of the schedule, equal ones once: of 625 kernels 471 were one of the
  next two (libtpu 0.0.42.1).
  """
  nodes = {node.name: node for node in proto.instructions(module)}
  order = buffers.live_memory(module).instructions
  known = [name for name in done if name in order]
  if not known:
    return []
  later = [nodes[name] for name in order[order.index(known[-1]) :] if name not in known[:-1]]
  parts = {part.id: part for part in module.computations}
  is_kernel = lambda node: tpu_kernels.window(node) or node.opcode in _OTHER_KERNELS
  following = itertools.islice(filter(is_kernel, later[1:]), _FOLLOWING)
  return [_described(node, parts, module) for node in (later[0], *following)]


def _described(
  node: proto.HloInstructionProto, parts: work.Computations, module: proto.HloModuleProto
) -> str:
  """A kernel by the operation and line of its first instruction that has them."""
  inside = (node, *tpu_kernels.fused(node, parts))
  main = next((each for each in inside if each.metadata.op_name), node)
  origin = module_graph.origin(main, module)
  operation = names.operation(origin.op_name) or node.opcode
  return f"{' at '.join(filter(None, (operation, origin.where)))} ({node.name})"


def _size(folder: Path) -> int:
  """Bytes of all files in a folder; files and folders in it may be deleted meanwhile."""
  total = 0
  for place, _, files_in in os.walk(folder):  # which leaves out folders that it cannot read
    for name in files_in:
      with contextlib.suppress(OSError):
        total += os.stat(os.path.join(place, name)).st_size
  return total


def _bytecode(lowered: jax.stages.Lowered) -> bytes:
  """The StableHLO of a lowered function, with its source lines."""
  file = io.BytesIO()
  module: Any = lowered.compiler_ir("stablehlo")
  module.operation.write_bytecode(file)
  return file.getvalue()


def _compile(
  module: bytes, target: str, options: Mapping[str, Any], ids: Sequence[int]
) -> tpu.TpuProgram:
  """Compiles StableHLO in this process, as jax compiles what it has lowered.

  Args:
    module: StableHLO.
    target: of whose topology the devices are.
    options: of the compiler.
    ids: of the device of each partition.
  """
  from jaxlib import _jax  # no public module of jax compiles StableHLO
  from jaxlib.mlir import ir

  by_id = {device.id: device for device in topology.devices(target)}
  devices = tuple(by_id[number] for number in ids)
  given = _jax.CompileOptions()
  given.num_replicas, given.num_partitions = 1, len(devices)
  given.device_assignment = _jax.DeviceAssignment.create(np.array([ids]))
  given.executable_build_options.use_spmd_partitioning = True
  given.executable_build_options.use_shardy_partitioner = getattr(
    jax.config, "jax_use_shardy_partitioner", True
  )
  given.env_option_overrides = list(options.items())
  schedule_dump.clear()
  with mlir.make_ir_context():
    executable = devices[0].client.compile(
      ir.Module.parse(module) if jax.__version_info__ >= (0, 8, 0) else module,
      executable_devices=_jax.DeviceList(devices),
      compile_options=given,
    )
  program = dataclasses.replace(tpu.program_of(executable), schedules=schedule_dump.take())
  if len(devices) == 1:
    return program
  return dataclasses.replace(program, rings=tuple(_rings(executable, program, ids)))


def _with_plan(program: tpu.TpuProgram, modules: Path) -> tpu.TpuProgram:
  """A program whose temporaries are the area that the compiler reserves for them in its module.

  What libtpu tells of their size also has memory on the chip, and up to a third more than the area.
  """
  memory = program.memory
  for path in modules.glob(_SCHEDULED):
    area = buffers.planned_bytes(path.read_bytes()) - memory.arguments - memory.outputs
    if area >= 0:
      memory = dataclasses.replace(memory, temporaries=area)
  return dataclasses.replace(program, memory=memory)


def _rings(
  executable: Any, program: tpu.TpuProgram, ids: Sequence[int]
) -> Iterator[collectives.Ring]:
  """The tables of neighbours of all collectives of a program."""
  module = proto.parse_module(program.module, where="TPU program")
  found = collectives.find(module, len(ids)).values()
  serialized = executable.serialize()
  for groups in dict.fromkeys(one.groups for several in found for one in several):
    ring = collectives.ring(serialized, groups, ids) if groups and len(groups[0]) > 1 else None
    if ring is not None:
      yield ring


def _end_with(parent: int, folder: Path) -> None:
  """Ends this process, and deletes its folder, once the process that started it has ended."""
  while os.getppid() == parent:
    time.sleep(_SECONDS)
  shutil.rmtree(folder, ignore_errors=True)
  os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
  """Answers requests of the process that started this one: a line of JSON for each."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
  parent = int(os.environ.pop(tasks.PARENT))
  watch = threading.Thread(target=_end_with, args=(parent, folder), daemon=True)
  watch.start()
  try:
    _answer(folder)
  finally:  # requests end with the process that made them: its folder goes before this one ends
    if sys.exc_info()[0] is None or os.getppid() != parent:
      watch.join()


def _answer(folder: Path) -> None:
  """Compiles what is asked for until there are no more requests."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # what libraries print is no answer
  answer, modules = folder / _ANSWER, folder / _MODULES
  for line in sys.stdin:
    request, refusal = json.loads(line), ""
    options = {"xla_dump_to": str(modules), "xla_dump_hlo_as_proto": True, **request["options"]}
    answer.unlink(missing_ok=True)
    try:
      module = (folder / _REQUEST).read_bytes()
      program = _compile(module, request["target"], options, request["devices"])
      answer.write_bytes(pickle.dumps(_with_plan(program, modules)))
    except jax.errors.JaxRuntimeError as error:
      refusal = str(error)
      for path in modules.glob(_SCHEDULED) if EXHAUSTED in refusal else ():
        answer.write_bytes(path.read_bytes())
    shutil.rmtree(modules, ignore_errors=True)
    print(json.dumps({"refusal": refusal}), file=answers, flush=True)


if __name__ == "__main__":
  main(Path(sys.argv[1]))
