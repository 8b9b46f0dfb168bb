"""Time and memory of a function on TPUs, from their compiler, before a run.

It needs libtpu and no TPU. The compiler runs in a process of its own (`compiler`), `costs` reads
what it wrote, and `comparison` compares two estimates. `estimate_command` is the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import os
import queue
import time
from typing import Any

import jax

from tpugraphs_jax.hlo import calls, jaxprs, meshes, topology, tpu
from tpugraphs_jax.infra import console
from tpugraphs_jax.tuning import compiler, costs, summary
from tpugraphs_jax.tuning.costs import TargetEstimate
from tpugraphs_jax.tuning.summary import Estimate

TARGETS = ("v5e", "v5p", "v6e", "7x")  # unless others are asked for
_SECONDS = 0.2  # between two looks at the compilers
_STOPPED = "it was stopped before this target was done"


class Interrupted(KeyboardInterrupt):
  """Ctrl-C, with the estimate of the targets that were done."""

  def __init__(self, estimate: Estimate):
    super().__init__()
    self.estimate = estimate


def estimate(
  function: Callable[..., Any], /, *args: Any, targets: Sequence[str] = TARGETS, **kwargs: Any
) -> Estimate:
  """What a function costs on TPUs, such as a training step; it is compiled and does not run.

  Compiling takes seconds to minutes a target, in a process of its own. The estimate is of one
  device; of a function with a mesh, of one of its devices.

  Args:
    function: a function, or one that `jax.jit` returned. Its mesh, of any devices or an
      `AbstractMesh`, is placed on the chips of a target as `jax.make_mesh` places it there.
    *args: its example arguments, arrays or `jax.ShapeDtypeStruct`.
    targets: TPU generations, `v2`, `v3`, `v4`, `v5e`, `v5p`, `v6e`, `7x`; for a function with a
      mesh topologies such as `v6e:2x4`, or slices as clouds name them, such as `v6e-8`.
    **kwargs: further keyword arguments of the function.

  Raises:
    ValueError: a target is unknown or does not fit the mesh of the function, or libtpu is missing.
  """
  calls.check_keywords(function, kwargs, estimate)
  return estimate_call(calls.Call(function, args, kwargs), targets)


def estimate_call(
  call: calls.Call,
  targets: Sequence[str],
  *,
  timeout: float = compiler.TIMEOUT,
  memory_only: bool = False,
) -> Estimate:
  """As `estimate`.

  Args:
    call: a function with its arguments.
    targets: as of `estimate`.
    timeout: seconds after which a compilation is ended.
    memory_only: whether it is ended once the memory is planned, so that rows have no time.

  Raises:
    Interrupted: Ctrl-C.
  """
  targets = [targets] if isinstance(targets, str) else targets
  if not isinstance(targets, (list, tuple)) or not targets:
    raise ValueError(f"targets is {targets!r}, expected TPU generations such as {list(TARGETS)}")
  targets = list(dict.fromkeys(topology.full_name(target) for target in targets))
  with console.working(call.__name__, total=len(targets), unit="targets") as work:
    with console.working("tracing"):
      with tpu.as_device(topology.generation_of(targets[0])):  # the first of them answers for all
        mesh = meshes.find(call)
        given = jaxprs.for_one_device(call) if mesh is None else call
      placements = {target: _place(mesh, target) for target in targets}
    rows = {target: TargetEstimate(target, why=_STOPPED) for target in targets}
    about = (*_about(call), *_about_devices(mesh, targets))
    devices = 1 if mesh is None else mesh.size
    made = lambda: Estimate(call.__name__, tuple(rows.values()), summary.versions(), about, devices)
    try:
      with _Compilers(len(targets), timeout=timeout, memory_only=memory_only) as compilers:
        _fill(rows, given, placements, compilers, work)
    except KeyboardInterrupt as error:
      raise Interrupted(made()) from error
    return made()


class _Compilers:
  """As many compilers as there are cores, in which programs are compiled side by side.

  Args:
    most: compilers.
    **options: of `compiler.Compiler`.
  """

  def __init__(self, most: int, **options: Any):
    self._count, self._options = min(most, len(os.sched_getaffinity(0))), options
    self._free: queue.SimpleQueue[compiler.Compiler] = queue.SimpleQueue()
    self._busy: dict[str, compiler.Compiler] = {}
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> _Compilers:
    self._pool = self._stack.enter_context(futures.ThreadPoolExecutor(self._count))
    for _ in range(self._count):
      self._free.put(self._stack.enter_context(compiler.Compiler(**self._options)))
    # Nothing begins once the compilers end, and they end before the threads that wait for them.
    self._stack.callback(self._pool.shutdown, wait=False, cancel_futures=True)
    return self

  def __exit__(self, *error: object) -> None:
    self._stack.close()

  def submit(self, lowered: compiler.Lowered) -> futures.Future[tpu.TpuProgram]:
    """Compiles a program of a target in another thread."""
    return self._pool.submit(self._compile, lowered)

  def _compile(self, lowered: compiler.Lowered) -> tpu.TpuProgram:
    self._busy[lowered.target] = self._free.get()
    try:
      return self._busy[lowered.target].compile_lowered(lowered)
    finally:
      self._free.put(self._busy.pop(lowered.target))

  def __str__(self) -> str:
    """The targets that are being compiled, with the kernels that are done."""
    busy = [*self._busy.items()]
    parts = [f"{tpu.short_name(target)}, {each.kernels} kernels" for target, each in busy]
    return f"compiling for {'; '.join(parts)}"


def _fill(
  rows: dict[str, TargetEstimate],
  call: calls.Call,
  placements: Mapping[str, meshes.Placement | None],
  compilers: _Compilers,
  work: console.Work,
) -> None:
  """Fills the rows of targets as they come; this thread lowers functions and reads schedules."""
  start = time.monotonic()
  left = {
    compilers.submit(compiler.lower(call, target, placement=placement)): target
    for target, placement in placements.items()
  }
  while left:
    with console.working("compiling") as part:
      # A wait without an end can miss the signal of Ctrl-C.
      while not (ended := futures.wait(left, _SECONDS, futures.FIRST_COMPLETED).done):
        part.begin(str(compilers))
    done = next(iter(ended))
    target = left.pop(done)
    rows[target] = row = _row(call, target, placements[target], done)
    work.update()
    if left and time.monotonic() > start + console.SECONDS:
      time_or_reason = row.why or f"{row.milliseconds:.4g} ms"
      work.note(f"{call.__name__}, {tpu.short_name(target)}: {time_or_reason}")


def _place(mesh: meshes.Mesh | None, target: str) -> meshes.Placement | None:
  """Where the mesh of a function runs on a target; None of a function without one."""
  if mesh is None:
    return None
  if topology.parse(target) is None:
    short = tpu.short_name(target)
    raise ValueError(
      f"target {short} is one device and the function has {meshes.named(mesh)}: give a topology "
      f"with as many devices, such as {topology.example(target, mesh.size)}"
    )
  return meshes.place(mesh, target)


def _row(
  call: calls.Call, target: str, placement: meshes.Placement | None, compiled: futures.Future
) -> TargetEstimate:
  """The row of a program that was compiled, or that the compiler refused."""
  try:
    program = compiled.result()
  except compiler.OutOfMemory as error:
    return costs.without_kernels(error.module, target, f"the compiler says: {error}", fits=False)
  except jax.errors.JaxRuntimeError as error:
    fits = False if compiler.EXHAUSTED in str(error) else None
    return TargetEstimate(target, fits=fits, why=f"the compiler says: {console.one_line(error)}")
  except compiler.Ended as error:
    why = (
      f"the compiler gave no kernels: {error}" if error.module else f"the compiler failed: {error}"
    )
    return (
      costs.without_kernels(error.module, target, why)
      if error.module
      else TargetEstimate(target, why=why)
    )
  with console.working(f"executing the schedules of {tpu.short_name(target)}"):
    return costs.cost(program, target, call, placement)


def _about_devices(mesh: meshes.Mesh | None, targets: Sequence[str]) -> Iterator[str]:
  """Which targets have more devices than the function uses."""
  for target in targets:
    if mesh is None and topology.parse(target) is not None:
      yield f"{tpu.short_name(target)}: the function has no mesh, the estimate is of one device"


def _about(call: calls.Call) -> Iterator[str]:
  """What a reader has to know of the function."""
  wide = {str(getattr(array, "dtype", "")) for array in call.arrays} & {"float64", "complex128"}
  if wide and jax.dtypes.canonicalize_dtype("float64") != "float64":
    yield (
      f"{', '.join(sorted(wide))} arguments are estimated with half the bits, as jax runs them "
      "unless jax_enable_x64 is set"
    )
  interpreted = sorted(set(_interpreted(call.trace.program.jaxpr)))
  if interpreted:
    yield (
      f"Pallas interprets {', '.join(interpreted)}, as on a CPU: pass interpret=False "
      f"(jax.default_backend() is {jax.default_backend()!r} here, whatever the target)"
    )


def _interpreted(jaxpr: Any) -> Iterator[str]:
  """The names of Pallas kernels that are interpreted."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "pallas_call":
      if equation.params.get("interpret"):
        yield str(equation.params.get("name") or "a kernel")
    else:
      for inner in jaxprs.programs_of(equation):
        yield from _interpreted(inner)
