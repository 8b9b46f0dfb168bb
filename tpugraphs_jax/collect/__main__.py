"""`python -m tpugraphs_jax.collect`: labels layout choices of programs, as a data set.

  python -m tpugraphs_jax.collect --programs examples/programs --label tpu_estimate \\
      --target v3 --configs 48 --out data/own --collection layout:own:programs

writes `OUT/npz/layout/own/NAME/SPLIT/PROGRAM.npz` in the released format, and
beside it `PROGRAM.json` with versions and raw numbers. `OUT/journal` keeps what
is labelled while it runs, so that a run that was killed goes on where it was.
Finished programs are not labelled again, also where the journal is gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time

import jax
import tqdm

from tpugraphs_jax import collections
from tpugraphs_jax import graph
from tpugraphs_jax import remote
from tpugraphs_jax.collect import journal
from tpugraphs_jax.collect import labels
from tpugraphs_jax.collect import programs
from tpugraphs_jax.collect import worker
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


def main(argv: list[str] | None = None) -> int:
  """Runs the command; 0 where every program was collected."""
  args = _parse(argv)
  try:
    jobs = _jobs(args)
    failures = run(jobs, processes=args.jobs, progress=not args.quiet)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("interrupted: what is labelled is kept, run again to go on", file=sys.stderr)
    return 130
  for line in failures:
    print(f"failed: {line}", file=sys.stderr)
  print(f"{len(jobs) - len(failures)} of {len(jobs)} programs collected in "
        f"{args.out} as {args.collection}")
  return 1 if failures else 0


def run(jobs: list[Job], *, processes: int, progress: bool = True) -> list[str]:
  """Collects every job, `processes` at a time; a line for each one that failed."""
  todo = list(jobs)
  running: dict[Job, _Running] = {}
  failures, finished = [], set()
  with tqdm.tqdm(total=sum(job.configs for job in jobs), initial=_labelled(jobs, finished),
                 unit="config", disable=not progress, smoothing=0) as bar:
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


def _jobs(args: argparse.Namespace) -> list[Job]:
  """One job per program, in the order given.

  Raises:
    ValueError, FileNotFoundError: an option is wrong, as `programs.load`, or two
      programs have one name.
  """
  remote.refuse(args.out, "--out")
  collection = collections.Collection(args.collection)
  if collection.kind != "layout" or collection.is_released:
    raise ValueError(f"--collection={args.collection}, expected layout:own:NAME")
  if args.configs < 2:
    raise ValueError(f"--configs={args.configs}, expected at least 2")
  if args.jobs < 1:
    raise ValueError(f"--jobs={args.jobs}, expected at least 1")
  if args.label != labels.Measured.name:
    jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  labels.create(args.label, target=args.target, seed=args.seed)
  found = [program for source in args.programs
           for program in programs.load(source, split=args.split)]
  names = [program.name for program in found]
  if repeated := {name for name in names if names.count(name) > 1}:
    raise ValueError(f"{len(repeated)} names of programs are used twice, such as "
                     f"{min(repeated)}; rename the file or the key")
  return [Job(program.source, program.name, program.split, args.collection, args.out,
              args.label, args.target, args.configs, args.seed, os.getpid()) for program in found]


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
      prog="python -m tpugraphs_jax.collect",
      description="Labels layout choices of programs and writes them as a data set.")
  parser.add_argument("--programs", nargs="+", required=True, metavar="SOURCE",
                      help="FILE.py with a dictionary PROGRAMS, a folder of them, FILE.py:KEY, "
                      "or module:name")
  parser.add_argument("--label", required=True,
                      help="tpu_estimate, bytes_estimate or measured")
  parser.add_argument("--target", help="of tpu_estimate: v2, v3, v4, v5e, v5p or v6e")
  parser.add_argument("--configs", type=int, default=64, help="per program (default: 64)")
  parser.add_argument("--out", required=True, help="folder of the data")
  parser.add_argument("--collection", required=True, help="layout:own:NAME")
  parser.add_argument("--split", choices=graph.SPLITS,
                      help="of all programs (default: what their file says in SPLIT)")
  parser.add_argument("--seed", type=int, default=0, help="of the choices (default: 0)")
  parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1,
                      help="processes (default: one per processor; always one for measured)")
  parser.add_argument("--quiet", action="store_true", help="no progress bar")
  args = parser.parse_args(argv)
  if args.label == labels.Measured.name:
    args.jobs = 1  # programs at the same time would disturb each other
  return args


if __name__ == "__main__":
  sys.exit(main())
