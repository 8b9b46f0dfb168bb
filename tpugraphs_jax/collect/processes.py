"""Collects programs with worker processes on this machine, and starts again what was killed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

import tqdm

from tpugraphs_jax import console
from tpugraphs_jax.collect import journal, labels, worker
from tpugraphs_jax.collect.job import Job

_TRIES = 3  # in a row that label nothing
_POLL_SECONDS = 0.3
# Signals that come from outside: a kill from a terminal, a scheduler, lack of memory.
_FROM_OUTSIDE = (-2, -9, -15)


@dataclasses.dataclass(frozen=True)
class _Running:
  """A worker."""

  process: subprocess.Popen
  done: int  # candidates that were done when it began
  tries: int  # how often it may be started before it has to label something


def run(jobs: list[Job], *, processes: int, progress: bool = True) -> list[str]:
  """Collects every job, `processes` at a time; a line for each one that failed."""
  todo = list(jobs)
  running: dict[Job, _Running] = {}
  failures, finished = [], set()
  with tqdm.tqdm(total=sum(job.configs for job in jobs), initial=_labelled(jobs, finished),
                 unit="config", disable=console.bar(progress), smoothing=0) as bar:
    try:
      while todo or running:
        while todo and len(running) < processes:
          job = todo.pop(0)
          running[job] = _start(job, tries=_TRIES)
        time.sleep(_POLL_SECONDS)
        for job, state in list(running.items()):
          status = state.process.poll()
          if status is None:
            continue
          del running[job]
          again = _start_again(job, state, status)
          if again is not None:
            running[job] = again
            continue
          finished.add(job)
          failures += [_reason(job, status)] if status else []
        bar.set_postfix_str(" ".join(job.name for job in running), refresh=False)
        bar.update(_labelled(jobs, finished) - bar.n)
    finally:
      for state in running.values():
        state.process.kill()
  return failures


def _labelled(jobs: list[Job], finished: set[Job]) -> int:
  """How many configurations are done; a finished program counts in full."""
  return sum(job.configs if job in finished else min(journal.done(job.journal), job.configs)
             for job in jobs)


def _start(job: Job, *, tries: int) -> _Running:
  job.log.parent.mkdir(parents=True, exist_ok=True)
  job = dataclasses.replace(job, parent=os.getpid())
  environment = dict(os.environ)
  if job.label != labels.Measured.name:
    environment["JAX_PLATFORMS"] = "cpu"
  with open(job.log, "ab") as log:
    process = subprocess.Popen(
        [sys.executable, "-m", "tpugraphs_jax.collect.worker",
         json.dumps(dataclasses.asdict(job))], stdout=log, stderr=log, env=environment)
  return _Running(process, journal.done(job.journal), tries)


def _start_again(job: Job, ended: _Running, status: int) -> _Running | None:
  """A worker in place of one that was killed or crashed; None where that is no use.

  The candidate that crashed its compiler is a failure from then on; a kill from
  outside tells nothing about a candidate.
  """
  if status in (0, worker.FAILED):
    return None
  candidate = journal.interrupted(job.journal)
  if status not in _FROM_OUTSIDE and candidate is not None:
    journal.add_error(
        job.journal, candidate, f"the compiler ended its process with status {status}")
  tries = _TRIES if journal.done(job.journal) > ended.done else ended.tries - 1
  return _start(job, tries=tries) if tries else None


def _reason(job: Job, status: int) -> str:
  lines = job.log.read_text(errors="replace").splitlines()
  said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
  if status == worker.FAILED and said:
    return f"{job.name}: {said.removeprefix('error: ')}"
  return f"{job.name}: its process ended with status {status}; see {job.log}"
