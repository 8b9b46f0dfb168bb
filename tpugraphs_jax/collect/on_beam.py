"""Collects programs as jobs of Apache Beam, on machines that share the folder of the data.

    command ── one job per program ──► machine: workers, journal, npz ──► its outcome
       └──────────────── reads every outcome when all jobs have ended ◄──────┘
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import json

from tpugraphs_jax import files, jobs as jobs_lib
from tpugraphs_jax.collect import processes as processes_lib
from tpugraphs_jax.collect.job import Job


def run(jobs: Sequence[Job], *, processes: int, options: Sequence[str]) -> list[str]:
  """Collects every job; a line for each one that failed.

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
  with contextlib.suppress(OSError):  # the command tells of a machine that leaves no outcome
    failures = processes_lib.run([job], processes=1, progress=False)
    job.outcome.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(job.outcome) as file:
      file.write(json.dumps(failures) + "\n")


def _failures(job: Job) -> list[str]:
  if not job.outcome.exists():
    return [f"{job.name}: its machine left no {job.outcome}; expected --out in a folder that all "
            "machines share"]
  return json.loads(job.outcome.read_text())
