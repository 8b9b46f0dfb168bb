"""Collects many programs: with worker processes of this machine, or on a cluster by Apache Beam.

    command ── one request per program ──► worker process: journal, npz, sidecar
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
import json
import os
import signal
import subprocess
import time

import tqdm

from tpugraphs_jax.infra import console, files, tasks, trust
from tpugraphs_jax.tuning import journal, labels, worker
from tpugraphs_jax.tuning.schedule import dump
from tpugraphs_jax.tuning.worker import LabelRequest

_SECONDS = 1.0  # between two looks at the journals
_TRIES = 3  # starts in a row of a worker that labels nothing
# Signals that come from outside: a scheduler, lack of memory.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


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
  with tqdm.tqdm(total=total, unit="configuration", disable=console.bar(progress)) as bar:
    try:
      results = {pool.submit(collect, request): request for request in requests}
      running = set(results)
      while running:
        _, running = futures.wait(running, _SECONDS, return_when=futures.FIRST_COMPLETED)
        left = [results[each] for each in running]
        bar.update(total - sum(request.configs for request in left) + labelled(left) - bar.n)
      return [line for each in results for line in each.result()]
    finally:
      pool.shutdown(cancel_futures=True)


def labelled(requests: Sequence[LabelRequest]) -> int:
  """How many configurations of the requests have a label or a failure in their journals."""
  return sum(min(journal.done(request.journal), request.configs) for request in requests)


def collect(request: LabelRequest) -> list[str]:
  """Collects a program, with as many workers as it takes; a line where it failed.

  The candidate on which a compiler aborted or took too long counts as a failure. After a kill
  from outside the candidate is labelled again.
  """
  tries = _TRIES
  while tries:
    done = journal.done(request.journal)
    status = _run_worker(request)
    if status in (worker.DONE, 0, worker.FAILED, -signal.SIGINT):
      break
    candidate = journal.interrupted(request.journal)
    if status is None and (candidate is None or request.label == labels.Measured.name):
      break  # the program itself does not end; candidates are measured together
    if status not in _FROM_OUTSIDE and candidate is not None:
      journal.add_error(request.journal, candidate, _ended(request, status))
    tries = _TRIES if journal.done(request.journal) > done else tries - 1
  return [] if status == worker.DONE else [_reason(request, status)]


def _run_worker(request: LabelRequest) -> int | None:
  """The exit status of a worker; None: it labelled nothing for too long and was ended."""
  request.log.parent.mkdir(parents=True, exist_ok=True)
  described = json.dumps(dataclasses.asdict(request))
  command = tasks.python_command("-m", "tpugraphs_jax.tuning.worker", described)
  environment = tasks.python_environment() | {tasks.PARENT: str(os.getpid())}
  if request.label != labels.Measured.name:
    environment["JAX_PLATFORMS"] = "cpu"
  with dump.folder() as schedules, files.open_plain(request.log, "ab") as log:
    environment |= dump.environment(schedules)
    worker = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
      return _status(worker, request)
    finally:
      worker.kill()


def _status(worker: subprocess.Popen, request: LabelRequest) -> int | None:
  """Waits until a worker ends, or writes nothing into its journal for too long."""
  written, since = None, time.monotonic()
  while time.monotonic() - since < request.timeout:
    with contextlib.suppress(subprocess.TimeoutExpired):
      return worker.wait(_SECONDS)
    size = request.journal.stat().st_size if request.journal.exists() else None
    if size != written:
      written, since = size, time.monotonic()
  worker.kill()
  worker.wait()
  return None


def _ended(request: LabelRequest, status: int | None) -> str:
  """How a worker ended that was not killed from outside."""
  if status is None:
    return f"it labelled nothing for {request.timeout:g} s"
  return f"the compiler ended its process with status {status}"


def _reason(request: LabelRequest, status: int | None) -> str:
  lines = request.log.read_text(errors="replace").splitlines()
  said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
  if said and status in (worker.FAILED, 1):  # 1: an exception, whose traceback is in the log
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
