"""Compiles functions with the TPU compiler, on a machine without a TPU.

The compiler is in libtpu, which `pip install "jax[tpu]"` installs. It writes modules of the two
stages at which the data set's graphs were taken: before layout assignment for layout graphs, and
after all optimisations for tile kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from pathlib import Path
import tempfile
from typing import Any
import warnings

import jax
from jax.extend import backend

from tpugraphs_jax.hlo import calls, collectives, jaxprs, proto, schedule_dump
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.infra import console, parallel

_STAGES = ("before_layout-assignment", "after_layout-assignment")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
  """Bytes of a device's memory that the compiler plans."""

  arguments: int
  outputs: int  # without outputs that take the place of donated arguments
  temporaries: int
  code: int = 0  # of the program, with the arrays that it captures

  @property
  def total(self) -> int:
    return self.arguments + self.outputs + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class TpuProgram:
  """A compiled function."""

  module: bytes  # serialized HloModuleProto after all optimisations, with windows
  optimal_seconds: float  # the compiler's estimate, no measurement; 0 of a program without kernels
  bytes_accessed: int  # the compiler's estimate too
  flops: float  # as the compiler counts them; kernels of other compilers add nothing
  memory: MemoryPlan
  # Serialized HloModuleProto before layout assignment, with the layouts that the compiler then
  # assigns; empty unless asked for.
  before_layouts: bytes
  # Texts of final schedules by kernel, and of the whole program as `TLP`; empty unless the process
  # was started with `schedule_dump.environment`.
  schedules: Mapping[str, str] = dataclasses.field(default_factory=dict)
  rings: tuple[collectives.Ring, ...] = ()  # of the collectives of a program of a mesh


def full_name(target: str) -> str:
  """The key of `GENERATIONS` for a target such as `v3` or `tpu:v3`.

  Raises:
    ValueError: the target is unknown, or libtpu is missing.
  """
  name = f"tpu:{str(target).removeprefix('tpu:')}"
  if name not in GENERATIONS:
    short = ", ".join(key.removeprefix("tpu:") for key in GENERATIONS)
    raise ValueError(f"target is {target!r}, expected a TPU generation, one of {short}")
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError(
      f"target {target!r} needs the TPU compiler, and no libtpu is installed; "
      f"{console.to_install('tpu')}"
    )
  return name


def short_name(target: str) -> str:
  """A key of `GENERATIONS` as people write it, such as `v3`."""
  return target.removeprefix("tpu:")


def libtpu_version() -> str:
  """The version of the installed TPU compiler."""
  return importlib.metadata.version("libtpu")


def lower(call: calls.Call, target: str) -> jax.stages.Lowered:
  """A call as jax lowers it for one device of a target.

  Args:
    call: of `jaxprs.for_one_device`.
    target: a TPU generation such as `v3`.

  Raises:
    ValueError: as `full_name`.
  """
  sharding = jax.sharding.SingleDeviceSharding(devices(target)[0])
  with parallel.no_mesh(), as_device(target):
    return call.lower(call.shapes(sharding))


@contextlib.contextmanager
def as_device(target: str) -> Iterator[None]:
  """Inside, code that asks jax for its device while it is traced gets a device of a target.

  It asks with `jax.devices`, `jax.local_devices`, `jax.default_backend` or, as tokamax does,
  `jax.extend.backend.get_default_device`; or, for a Pallas kernel, for the properties of the chip
  (get_tpu_info), as jax itself does for a block of one dimension.

  Args:
    target: a TPU generation such as `v3`.

  Raises:
    ValueError: as `full_name`.
  """
  device = devices(target)[0]
  one = lambda *_, **__: [device]
  answers: list[tuple[Any, str, Callable[..., Any]]] = [
    (jax, "devices", one),
    (jax, "local_devices", one),
    (jax, "default_backend", lambda: device.platform),
    (backend, "get_default_device", lambda: device),
  ]
  chip: Any = None  # of jax 0.7
  with contextlib.suppress(ImportError):
    # In `jax.shard_map` Pallas asks the mesh, which has the devices at hand, or none.
    chip = importlib.import_module("jax._src.pallas.mosaic.tpu_info")
    answers += [
      (chip, "get_device_kind", lambda: device.device_kind),
      (chip, "get_num_device_cores", lambda: device.num_cores),
    ]
  with contextlib.ExitStack() as stack:
    for module, name, answer in answers:
      if hasattr(module, name):
        stack.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, answer)
    stack.enter_context(_abstract_device(device))
    # Pallas keeps the properties of the chip by the mesh, which may be the same for two targets.
    forget = getattr(getattr(chip, "get_tpu_info", None), "cache_clear", lambda: None)
    forget()
    stack.callback(forget)
    yield


def _abstract_device(device: Any) -> contextlib.AbstractContextManager:
  """The device for which Pallas asks; a mesh of `jax.set_mesh` stays as it is.

  jax 0.7 has none: there Pallas asks for `jax.devices`.
  """
  kind = getattr(jax.sharding, "AbstractDevice", None)
  if kind is None or not jax.sharding.get_abstract_mesh().empty:
    return contextlib.nullcontext()
  known = {
    "device_kind": device.device_kind,
    "num_cores": getattr(device, "num_cores", None),
    "platform": device.platform,
  }
  fields = {name: known[name] for name in inspect.signature(kind).parameters if name in known}
  empty = jax.sharding.AbstractMesh((), (), abstract_device=kind(**fields))
  return jax.sharding.use_abstract_mesh(empty)


def compile_function(
  function: Callable[..., Any],
  args: tuple,
  target: str,
  *,
  kwargs: Mapping[str, Any] | None = None,
  compiler_options: Mapping[str, Any] | None = None,
  keep_stages: bool = False,
) -> TpuProgram:
  """Compiles a function for a target, in this process; it takes seconds.

  The compiler aborts on some functions and ends the process: compile many functions in
  separate processes, as `compiler.Compiler` does.

  Args:
    function: a function, or one that `jax.jit` returned. Its constraints on shardings are left out.
    args: its example arguments, arrays or `jax.ShapeDtypeStruct`.
    target: a TPU generation such as `v3`.
    kwargs: keyword arguments of the function.
    compiler_options: as of `jax.jit`.
    keep_stages: whether `before_layouts` is kept.

  Raises:
    ValueError: the function maps over devices, or as `full_name`.
    jax.errors.JaxRuntimeError: the compiler refuses the function or an option.
  """
  with console.working(f"lowering for {short_name(target)}"):
    with as_device(target):
      call = jaxprs.for_one_device(calls.Call(function, args, kwargs or {}))
    lowered, options = lower(call, target), call.compiler_options(compiler_options or {})
  with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    # jax keeps programs for a topology in its cache and cannot read them: it compiles again.
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
    before_layouts = b""
    if keep_stages:
      options |= {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "layout-assignment"}
      options["xla_dump_hlo_as_proto"] = True
    schedule_dump.clear()
    with console.working(f"compiling for {short_name(target)}"):
      compiled = lowered.compile(compiler_options=options)
    schedules = schedule_dump.take()
    if keep_stages:
      before_layouts = with_layouts_of(*(_stage(Path(folder), name) for name in _STAGES))
  program = program_of(compiled.runtime_executable())
  return dataclasses.replace(program, before_layouts=before_layouts, schedules=schedules)


def program_of(executable: Any) -> TpuProgram:
  """What a compiled program of jaxlib says of itself."""
  (module,) = executable.hlo_modules()
  cost = executable.cost_analysis()
  planned = executable.get_compiled_memory_stats()
  memory = MemoryPlan(
    planned.argument_size_in_bytes,
    planned.output_size_in_bytes - planned.alias_size_in_bytes,
    planned.temp_size_in_bytes,
    planned.generated_code_size_in_bytes,
  )
  return TpuProgram(
    module.as_serialized_hlo_module_proto(),
    float(cost.get("optimal_seconds", 0.0)),
    int(cost.get("bytes accessed", 0)),
    float(cost.get("flops", 0)),
    memory,
    before_layouts=b"",
  )


def _stage(folder: Path, name: str) -> bytes:
  files = sorted(folder.glob(f"*{name}*.hlo.pb"))
  if not files:
    names = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(f"the TPU compiler wrote no stage {name}, found {names}")
  return files[0].read_bytes()


def with_layouts_of(module: bytes, assigned: bytes) -> bytes:
  """Copies layouts from `assigned` to the instructions of `module` with the same name and shape.

  Args:
    module: serialized HLO module before layout assignment.
    assigned: the same module after it. Instructions keep their names; an instruction without a
      counterpart keeps its layout.

  Returns:
    The serialized `HloModuleProto`.
  """
  after = proto.parse_module(assigned, where="TPU program with layouts")
  shapes = {node.name: node.shape for node in proto.instructions(after)}
  result = proto.parse_module(module, where="TPU program before layouts")
  for instruction in proto.instructions(result):
    shape = shapes.get(instruction.name)
    if shape is not None and shape.dimensions == instruction.shape.dimensions:
      instruction.shape.layout.CopyFrom(shape.layout)
  return result.SerializeToString()


@functools.cache
def devices(target: str) -> tuple[Any, ...]:
  """The devices of the smallest topology of a target, to compile for.

  Raises:
    ValueError: as `full_name`.
  """
  name = full_name(target)
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  from jax.experimental import topologies

  generation = GENERATIONS[name]
  described = topologies.get_topology_desc(
    platform="tpu", topology_name=generation.topology, **generation.options
  )
  return tuple(described.devices)
