"""Collects many programs: with worker processes of this machine, or on a cluster by Apache Beam.

    command ── one job per program ──► worker process: journal, npz, sidecar
       └────── starts a worker again that was killed or that its compiler aborted

A compiler can end its process, which would end a process pool: here a thread waits for each
worker. On a cluster each machine does so for its programs, and leaves an outcome in the
folder of the data, which all machines share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading

import tqdm

from tpugraphs_jax import console, files, jobs as jobs_lib
from tpugraphs_jax.collect import job as job_lib, journal, labels
from tpugraphs_jax.collect.job import Job

_TRIES = 3  # starts in a row of a worker that labels nothing
_POLL_SECONDS = 0.3
# Signals that come from outside: a kill from a terminal, a scheduler, lack of memory.
_FROM_OUTSIDE = (-2, -9, -15)


def run(jobs: Sequence[Job], *, processes: int, progress: bool = True) -> list[str]:
  """Collects every job on this machine, `processes` at a time; a line for each failure."""
  workers = _Workers()
  pool = concurrent.futures.ThreadPoolExecutor(processes)
  with tqdm.tqdm(total=sum(job.configs for job in jobs), initial=labelled(jobs),
                 unit="config", disable=console.bar(progress), smoothing=0) as bar:
    try:
      pending = {pool.submit(workers.collect, job): job for job in jobs}
      left = set(pending)
      while left:
        _, left = concurrent.futures.wait(left, timeout=_POLL_SECONDS)
        finished = {pending[each] for each in pending.keys() - left}
        bar.update(labelled(jobs, finished) - bar.n)
      return [line for each in pending for line in each.result()]
    finally:
      workers.stop()
      pool.shutdown(cancel_futures=True)


def labelled(jobs: Sequence[Job], finished: Collection[Job] = ()) -> int:
  """How many configurations are labelled: all of a `finished` program, else as its journal says."""
  return sum(job.configs if job in finished else min(journal.done(job.journal), job.configs)
             for job in jobs)


class _Workers:
  """Worker processes, each waited for by the thread that collects its program."""

  def __init__(self):
    self._lock = threading.Lock()
    self._running: set[subprocess.Popen] = set()
    self._stopped = False

  def collect(self, job: Job) -> list[str]:
    """Collects a program, with as many workers as it takes; a line where it failed.

    The candidate on which a compiler aborted counts as a failure. After a kill from
    outside the candidate is labelled again.
    """
    tries = _TRIES
    while tries:
      done = journal.done(job.journal)
      status = self._run(job)
      if status in (0, job_lib.FAILED):
        break
      candidate = journal.interrupted(job.journal)
      if status not in _FROM_OUTSIDE and candidate is not None:
        journal.add_error(
            job.journal, candidate, f"the compiler ended its process with status {status}")
      tries = _TRIES if journal.done(job.journal) > done else tries - 1
    return [_reason(job, status)] if status else []

  def stop(self) -> None:
    """Kills every worker; no other one is started."""
    with self._lock:
      self._stopped = True
      for process in self._running:
        process.kill()

  def _run(self, job: Job) -> int:
    """The exit status of a worker."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    command = json.dumps(dataclasses.asdict(dataclasses.replace(job, parent=os.getpid())))
    is_measured = job.label == labels.Measured.name
    environment = os.environ | ({} if is_measured else {"JAX_PLATFORMS": "cpu"})
    with open(job.log, "ab") as log, self._lock:
      if self._stopped:
        return job_lib.FAILED
      process = subprocess.Popen([sys.executable, "-m", "tpugraphs_jax.collect.job", command],
                                 stdout=log, stderr=log, env=environment)
      self._running.add(process)
    status = process.wait()
    with self._lock:
      self._running.discard(process)
    return status


def _reason(job: Job, status: int) -> str:
  lines = job.log.read_text(errors="replace").splitlines()
  said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
  if status == job_lib.FAILED and said:
    return f"{job.name}: {said.removeprefix('error: ')}"
  return f"{job.name}: its process ended with status {status}; see {job.log}"


def run_on_beam(jobs: Sequence[Job], *, processes: int, options: Sequence[str]) -> list[str]:
  """Collects every job on a cluster; a line for each failure.

  Args:
    jobs: programs that every machine finds under the same name.
    processes: jobs at a time where Beam runs on this machine.
    options: Beam's own flags, such as `--runner=FlinkRunner`.

  Raises:
    ImportError: Beam is not installed.
  """
  for job in jobs:
    job.outcome.unlink(missing_ok=True)
  jobs_lib.run(collect, jobs, processes=processes, beam=options)
  return [line for job in jobs for line in _failures(job)]


def collect(job: Job) -> None:
  """Collects a program on the machine at hand and leaves its outcome in the shared folder."""
  with contextlib.suppress(OSError):  # `_failures` tells of a machine that leaves no outcome
    failures = run([job], processes=1, progress=False)
    with files.replacing(job.outcome) as file:
      file.write(json.dumps(failures) + "\n")


def _failures(job: Job) -> list[str]:
  if not job.outcome.exists():
    return [f"{job.name}: its machine left no {job.outcome}; expected --out in a folder that all "
            "machines share"]
  return json.loads(job.outcome.read_text())
