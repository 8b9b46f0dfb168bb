"""Collects many programs: with worker processes of this machine, or on a cluster by Apache Beam.

    command ── one request per program ──► worker process: labels, then the npz file
       └────── starts a worker again that was killed or that its compiler aborted

A compiler can end its process, which would end a process pool: here a thread waits for each
worker. On a cluster each machine does so for its programs, and leaves an outcome in the
folder of the data, which all machines share.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo import jaxprs
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.infra import console, files, machine, tasks, trust
from tpugraphs_jax.tuning import compiler, draw, label_file, labels, programs
from tpugraphs_jax.tuning.draw import OptionIndices
from tpugraphs_jax.tuning.label_file import LabelFile
from tpugraphs_jax.tuning.problem import kernel_times, Problem
from tpugraphs_jax.version import __version__

_SECONDS = 0.5  # between two looks at the files of labels
_TRIES = 3  # starts in a row of a worker that labels nothing
# Signals that come from outside: a scheduler, lack of memory.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
# Exit statuses of a worker: after an error with a message, and when all files are there. A program
# may end the process while jax traces it. The status is then another one, such as 0.
FAILED, DONE = 3, 4


@dataclasses.dataclass(frozen=True)
class LabelRequest:
  """One program to collect. Every field can be written as JSON, in which a worker gets it."""

  source: str  # of `programs.load`
  name: str  # of its files
  split: str
  collection: str  # layout:own:NAME
  out: str  # folder of the data
  label: str  # with `target`: of `labels.create`
  target: str | None
  configs: int
  seed: int
  operands: bool = False  # whether the orders of operands are chosen too
  timeout: float = 3600.0  # seconds without a label after which a worker is ended

  npz = property(lambda request: request.file("npz", ".npz"))
  labels = property(lambda request: request.file("npz", label_file.SUFFIX))
  log = property(lambda request: request.file("logs", ".log"))
  # Lines about failures, as JSON, which a machine of a cluster writes when it has ended.
  outcome = property(lambda request: request.file("logs", ".outcome.json"))

  def file(self, kind: str, suffix: str) -> Path:
    """A file of this program in the folder `kind` of the data."""
    folder = files.expanded(self.out).joinpath(kind, *self.collection.split(":"))
    return folder / self.split / f"{self.name}{suffix}"

  def check_folders(self) -> None:
    """Refuses (ValueError) data whose folders are links, because the program's files go there."""
    for path in (self.npz, self.log):
      files.check_way(files.expanded(self.out), path.parent)


def run(
  requests: Sequence[LabelRequest],
  *,
  processes: int,
  progress: bool = True,
  beam: Sequence[str] | None = None,
) -> list[str]:
  """Collects every request; a line for each failure.

  Args:
    requests: programs, which with `beam` every machine finds under the same name.
    processes: requests at a time on this machine.
    progress: shows a bar, unless `beam` is given.
    beam: flags of Apache Beam, such as `--runner=FlinkRunner`; None = on this machine.

  Raises:
    ImportError: Beam is asked for and not installed.
    ValueError: a link in the folder of the data, see `LabelRequest.check_folders`.
  """
  for request in requests:
    request.check_folders()
  if beam is not None:
    for request in requests:
      request.outcome.unlink(missing_ok=True)
    tasks.run(_collect_on_cluster, requests, processes=processes, beam=beam)
    return [line for request in requests for line in _failures(request)]
  pool = futures.ThreadPoolExecutor(processes)
  total = sum(request.configs for request in requests)
  with console.working("labelling", total=total, unit="configurations", is_on=progress) as work:
    done, stop = 0, threading.Event()
    try:
      results = {pool.submit(collect, request, stop): request for request in requests}
      running = set(results)
      while running:
        _, running = futures.wait(running, _SECONDS, return_when=futures.FIRST_COMPLETED)
        left = [results[future] for future in running]
        before, done = done, total - sum(request.configs for request in left) + labelled(left)
        work.update(done - before)
      return [line for future in results for line in future.result()]
    finally:
      stop.set()  # after Ctrl-C workers run
      pool.shutdown(cancel_futures=True)


def labelled(requests: Sequence[LabelRequest]) -> int:
  """How many configurations of the requests have a label or a failure in their files."""
  return sum(min(label_file.count(request.labels), request.configs) for request in requests)


def collect(request: LabelRequest, stop: threading.Event | None = None) -> list[str]:
  """Collects a program, with as many workers as it takes; a line where it failed.

  The candidate on which a compiler aborted or took too long counts as a failure. After a kill
  from outside the candidate is labelled again.

  Args:
    request: the program.
    stop: ends the worker where it is set.
  """
  tries, stop = _TRIES, stop or threading.Event()
  while tries:
    done = label_file.count(request.labels)
    status = _run_worker(request, stop)
    if stop.is_set():
      return []
    if status in (DONE, 0, FAILED):
      break
    begun = label_file.interrupted(request.labels)
    if status is None and (begun is None or request.label == labels.Measured.name):
      break  # the program itself does not end; candidates are measured together
    if status not in _FROM_OUTSIDE and begun is not None:
      label_file.append(request.labels, begun | {"error": _ended(request, status)})
    tries = _TRIES if label_file.count(request.labels) > done else tries - 1
  return [] if status == DONE else [_reason(request, status)]


def _run_worker(request: LabelRequest, stop: threading.Event) -> int | None:
  """The exit status of a worker; None: it labelled nothing for too long and was ended."""
  request.log.parent.mkdir(parents=True, exist_ok=True)
  described = json.dumps(dataclasses.asdict(request))
  command = tasks.python_command("-m", "tpugraphs_jax.tuning.workers", described)
  environment = tasks.python_environment() | {tasks.PARENT: str(os.getpid())}
  if request.label != labels.Measured.name:
    environment["JAX_PLATFORMS"] = "cpu"
  with files.open_plain(request.log, "ab") as log:
    worker = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
      return _status(worker, request, stop)
    finally:
      worker.kill()
      worker.wait()


def _status(worker: subprocess.Popen, request: LabelRequest, stop: threading.Event) -> int | None:
  """Waits until a worker ends, writes nothing into its file of labels for too long, or has to."""
  written, since = None, time.monotonic()
  while time.monotonic() - since < request.timeout and not stop.is_set():
    with contextlib.suppress(subprocess.TimeoutExpired):
      return worker.wait(_SECONDS)
    size = request.labels.stat().st_size if request.labels.exists() else None
    if size != written:
      written, since = size, time.monotonic()
  return None


def _ended(request: LabelRequest, status: int | None) -> str:
  """How a worker ended that was not killed from outside."""
  if status is None:
    return f"it labelled nothing for {request.timeout:g} s"
  return f"the compiler ended its process with status {status}"


def _reason(request: LabelRequest, status: int | None) -> str:
  lines = request.log.read_text(errors="replace").splitlines()
  said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
  if said and status in (FAILED, 1):  # 1: an exception, whose traceback is in the log
    return f"{request.name}: {said.removeprefix('error: ')}"
  if status is None:
    ended = _ended(request, status)
    return f"{request.name}: {ended}; see {request.log}, or give a larger --timeout"
  return f"{request.name}: its process ended with status {status}; see {request.log}"


def _collect_on_cluster(request: LabelRequest) -> None:
  """Collects a program on the machine at hand and leaves its outcome in the shared folder."""
  with contextlib.suppress(OSError):  # `_failures` tells of a machine that leaves no outcome
    failures = collect(request)
    files.write_json(request.outcome, failures)


def _failures(request: LabelRequest) -> list[str]:
  if not request.outcome.exists():
    return [
      f"{request.name}: its machine left no {request.outcome}; expected --out in a folder that all "
      "machines share"
    ]
  return trust.parse(request.outcome.read_text())


# In a worker process, which labels one program.


def label_program(request: LabelRequest) -> None:
  """Makes the missing labels of a program and writes its npz file.

  Returns at once if its files are there, of the same program, label and versions.

  Raises:
    ValueError: the program cannot be collected, or its file of labels is damaged.
  """
  request.check_folders()
  (program,) = programs.load(request.source, split=request.split)
  label = labels.create(request.label, target=request.target, seed=request.seed)
  key = {
    "source": programs.portable(request.source),
    "label": request.label,
    **label.versions(),
    "seed": request.seed,
    "operands": request.operands,
    "program_sha256": _sha256(program),
  }
  if is_finished(request, key, label):
    return
  # Waits for a worker whose command was killed.
  with files.appending(request.log), label.open() as label:
    problem = Problem(
      Call(program.function, program.args, program.kwargs),
      label,
      name=request.name,
      seed=request.seed,
      operands=request.operands,
    )
    file = LabelFile(request.labels, problem, key)
    _write(request, file, _label_all(file, request.configs), key)


def is_finished(request: LabelRequest, key: dict[str, Any], label: labels.Labeller) -> bool:
  """Whether the request's files are whole and equal what the request would write.

  Args:
    request: a program and the labels that are asked for.
    key: source, label, versions, seed and hash of the program.
    label: turns raw numbers into labels.
  """
  try:
    record = label_file.collected(request.npz)
    stored = npz.read_layout(request.npz).configs.labels.tolist()
    labelled = [label.value(raw) for raw in record["configs"]]
  except (OSError, ValueError, KeyError, IndexError, TypeError):
    return False  # missing, or damaged: it is made anew
  expected = {**key, "split": request.split, "configs_asked": request.configs}
  return stored == labelled and all(record.get(key) == expected[key] for key in expected)


def _label_all(file: LabelFile, configs: int) -> list[OptionIndices]:
  """Labels candidates until there are enough; all that were tried, in order."""
  stream = file.problem.candidates()
  drawn: list[OptionIndices] = []
  while True:
    # Times compare only within a session: failed choices are not replaced by later ones.
    if drawn and file.problem.label.made_together:
      return drawn
    if file.problem.default in file.errors:
      return drawn  # labels mean nothing without the compiler's own choice
    count = draw.wanted(_values(file, drawn), configs, draws=len(drawn))
    more = list(itertools.islice(stream, count))
    if not more:
      return drawn
    drawn += more
    file.label_choices(more)


def _values(file: LabelFile, drawn: Sequence[OptionIndices]) -> dict[int, int]:
  """The labels of candidates by their places, without failures."""
  raw = {place: file.raw[numbers] for place, numbers in enumerate(drawn) if numbers in file.raw}
  return {place: file.problem.label.value(numbers) for place, numbers in raw.items()}


def _write(
  request: LabelRequest, file: LabelFile, drawn: list[OptionIndices], key: dict[str, Any]
) -> None:
  problem = file.problem
  if why := file.errors.get(problem.default):
    raise ValueError(f"{request.source}: the compiler's own choice failed: {why}")
  values = _values(file, drawn)
  kept = draw.kept(values, request.configs)
  choices = [drawn[place] for place in kept]
  kernels = kernel_times([file.raw[numbers] for numbers in choices])
  labelled = problem.with_configs(choices, [values[place] for place in kept], kernels)
  npz.write_layout(request.npz, labelled)
  about = {
    "name": request.name,
    "split": request.split,
    "collection": request.collection,
    "configs_asked": request.configs,
    "config_runtime": file.problem.label.unit,
    "tpugraphs_jax": __version__,
    "machine": machine.described(),
    "groups": [str(group) for group in problem.choices.groups],
    "left_out": problem.choices.left_out,
    "ties_left_out": len(values) - len(kept),
    "kept": choices,
  }
  label_file.append(request.labels, {**key, "about": about})


def _sha256(program: programs.Program) -> str:
  """SHA-256 of the program without any choice: as jax lowers it for this machine.

  For programs that exist only for a TPU, such as Pallas kernels, SHA-256 of their equations.
  """
  call = Call(program.function, program.args, program.kwargs)
  try:
    text = call.lower(call.arrays).as_text()
  except (ValueError, NotImplementedError):
    text = "\n".join(jaxprs.operations(call.trace.program, with_details=True))
  return hashlib.sha256(text.encode()).hexdigest()


def main(argv: Sequence[str]) -> int:
  """Labels one program, described as JSON in the first argument; returns the exit code."""
  tasks.end_with_parent()
  try:
    label_program(LabelRequest(**json.loads(argv[0])))
  except (ValueError, OSError) as error:
    print(f"error: {console.one_line(error)}", file=sys.stderr)
    return FAILED
  except Exception as error:  # a program of the user may raise anything
    print(f"error: {type(error).__name__}: {compiler.reason(error)}", file=sys.stderr)
    raise
  return DONE


if __name__ == "__main__":
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends this process
  tasks.exit_at_once(main, sys.argv[1:])
