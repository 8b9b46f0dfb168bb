"""Time and memory of a function on TPUs, from their compiler, before a run.

    python -m tpugraphs_jax.estimate FILE.py:NAME --targets v5e v6e:2x4

It needs libtpu and no TPU. The compiler runs in a process of its own (`compiler`), `costs` reads
what it wrote, and `comparison` compares two estimates.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import os
from pathlib import Path
import queue
import sys
import time
from typing import Any

import jax

from tpugraphs_jax.hlo import calls, jaxprs, meshes, topology, tpu
from tpugraphs_jax.infra import console, tasks
from tpugraphs_jax.tuning import (
  comparison,
  compiler,
  costs,
  page,
  profile,
  programs,
  summary,
  variants,
)
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


# How the files begin that the command writes.
_OUTPUTS = {"save": b"{", "html": b"<!doctype html>", "trace": b"{"}


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Prints what each program of a source costs.

  Returns:
    0; 1 where a program got slower than the one that it is compared with; 2 where the command was
    used wrongly.
  """
  parser = console.parser("estimate", "Estimates what functions cost on TPUs, without a TPU.")
  parser.add_argument(
    "source",
    nargs="?",
    help="FILE.py:KEY, FILE.py with a dictionary PROGRAMS, or a folder of such files",
  )
  parser.add_argument(
    "--targets", nargs="+", help=f"default: {' '.join(TARGETS)}, or those of the file of --against"
  )
  parser.add_argument("--save", type=Path, help="a file for the estimates, such as a.json")
  parser.add_argument("--against", type=Path, help="such a file: compares with its estimates")
  parser.add_argument(
    "--slower",
    type=float,
    help="part by which a program may be slower than in the file of --against, .02 is 2 %%, before "
    "the command ends with status 1; default: 0",
  )
  parser.add_argument(
    "--profile",
    type=Path,
    metavar="DIR",
    help="a profile of a TPU, or XProf's HLO Op Stats: prints its times beside estimates of the "
    "source, or of the HLO modules in the profile",
  )
  parser.add_argument("--html", type=Path, help="a page with the pictures of the result")
  parser.add_argument("--trace", type=Path, help="a timeline in JSON, which Perfetto opens")
  parser.add_argument(
    "--variants",
    type=Path,
    metavar="RESULTS",
    help="one table of all programs of the source on one target, the cheapest that fits first; the "
    "file keeps their results, and a second call goes on from it",
  )
  parser.add_argument(
    "--processes", type=int, help="variants at a time; default: as cores and memory allow"
  )
  parser.add_argument(
    "--timeout", type=float, default=compiler.TIMEOUT, help="seconds for one compilation"
  )
  parser.add_argument(
    "--memory",
    action="store_true",
    help="says what fits, without times, which take most of the work",
  )
  flags, beam = tasks.split_flags(sys.argv[1:] if argv is None else argv)
  args = parser.parse_args(flags)
  console.check_seconds("--timeout", args.timeout)
  comparison.check_slower(args.slower or 0.0)
  if args.slower is not None and not args.against:
    raise ValueError("--slower is a part by which --against may fail: name a file with --against")
  for flag, begin in _OUTPUTS.items():
    if path := getattr(args, flag):
      _check_output(f"--{flag}", path, begin)
  if args.targets:
    args.targets = [name for target in args.targets for name in filter(None, target.split(","))]
  if args.profile:
    if args.save or args.against or args.trace or args.variants:
      raise ValueError("--profile takes a source, --targets, --timeout and --html alone")
    return _beside_profile(args.profile, args.source, args.targets, args.timeout, args.html)
  if args.source is None:
    raise ValueError("there is no source: name FILE.py:KEY, or a profile with --profile")
  if args.variants:
    return _variants(args, beam)
  before = summary.load(args.against) if args.against else []
  if args.against and not before:
    raise ValueError(f"{args.against} has no programs to compare with")
  rows = before[0].rows if before else ()
  targets = args.targets or [row.target for row in rows] or TARGETS
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  estimates = []
  asked = programs.load(args.source)
  if before:
    _check_comparable(before, [program.name for program in asked], targets)
  for program in asked:
    call = calls.Call(program.function, program.args, program.kwargs)
    try:
      estimated = estimate_call(call, targets, timeout=args.timeout, memory_only=args.memory)
    except Interrupted as error:
      print(f"{dataclasses.replace(error.estimate, name=program.name)}\n", flush=True)
      raise
    estimates.append(dataclasses.replace(estimated, name=program.name))
    print(f"{estimates[-1]}\n", flush=True)
  if args.save:
    summary.save(estimates, args.save)
  compared = None
  if args.against:
    compared = comparison.compare(before, estimates, slower=args.slower or 0.0)
    print(compared)
  if args.html:
    (compared or page.together(estimates)).save_html(args.html)
  if args.trace:
    page.together(estimates).save_trace(args.trace)
  for path in filter(None, (args.save, args.html, args.trace)):
    console.say(f"{path}: written")
  return int(compared is not None and compared.is_slower)


def _check_output(flag: str, path: Path, begin: bytes) -> None:
  """Refuses a file before the work for it: one of another kind is not replaced.

  Raises:
    ValueError, OSError: it holds something else, or its folder is missing.
  """
  if path.is_dir():
    raise IsADirectoryError(f"{flag} is {path}, a folder: name a file")
  if path.is_file():
    with path.open("rb") as file:
      found = file.read(len(begin))
    if found and found.lower() != begin:
      raise ValueError(f"{flag} is {path}, a file of another kind: name a new one")
  if not path.parent.is_dir():
    raise FileNotFoundError(f"{flag} is {path}, and there is no folder {path.parent}")


def _check_comparable(
  before: Sequence[Estimate], asked: Sequence[str], targets: Sequence[str]
) -> None:
  """Refuses (ValueError) a comparison without a program and target of both sides, before the work.

  Args:
    before: estimates of a file.
    asked: names of the programs to estimate.
    targets: for which.
  """
  matched = (comparison.counterpart(before, name, len(asked)) for name in asked)
  known = {row.target for one in matched if one for row in one.rows}
  is_slice = any("-" in target for target in targets)  # `v6e-8` is v6e:2x4, as libtpu knows
  if not is_slice and not known & {tpu.short_name(target) for target in targets}:
    describe = ", ".join(
      f"{one.name} for {' '.join(row.target for row in one.rows)}" for one in before
    )
    raise ValueError(
      f"nothing to compare: the file has {describe}, and asked is {', '.join(asked)} for "
      f"{' '.join(targets)}: estimate the same programs for the same targets"
    )


def _variants(args: argparse.Namespace, beam: Sequence[str] | None) -> int:
  """Prints the variants of a step as one table."""
  if args.targets is None or len(args.targets) != 1:
    raise ValueError(f"--targets is {args.targets}, and variants are compared on one target")
  if args.processes is not None and args.processes < 1:
    raise ValueError(f"--processes is {args.processes}, expected at least 1")
  if args.save or args.against or args.trace:
    raise ValueError("--variants keeps its results itself: leave --save, --against, --trace out")
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  target = topology.full_name(args.targets[0])
  compared = variants.compare(
    args.source,
    target,
    args.variants,
    timeout=args.timeout,
    memory_only=args.memory,
    processes=args.processes,
    beam=beam,
  )
  print(compared)
  if args.html:
    compared.save_html(args.html)
  return 0


def _beside_profile(
  path: Path, source: str | None, targets: Sequence[str] | None, timeout: float, html: Path | None
) -> int:
  """Prints the times of a profile beside estimates, and writes their page.

  Raises:
    ValueError: there are several targets or programs, or as `profile.compare`.
  """
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  found = programs.load(source) if source else []
  for name, several in (("--targets", targets), ("the source", found)):
    if several and len(several) > 1:
      raise ValueError(f"{name} has {len(several)} values, and a profile is compared with one")
  call = calls.Call(found[0].function, found[0].args, found[0].kwargs) if found else None
  one = lambda call, target: estimate_call(call, [target], timeout=timeout).rows[0]
  compared = profile.compare(path, one, call=call, target=targets[0] if targets else "")
  print("\n\n".join(map(str, compared)))
  if html:
    page.together(compared).save_html(html)
  return 0
