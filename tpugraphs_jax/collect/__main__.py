"""`python -m tpugraphs_jax.collect`: labels layout choices of programs, as a data set.

  python -m tpugraphs_jax.collect --programs examples/programs/*.py --label tpu_estimate \\
      --target v3 --configs 48 --out data/own --collection layout:own:programs

writes `OUT/npz/layout/own/NAME/SPLIT/PROGRAM.npz` in the released format, and
beside it `PROGRAM.json` with versions and raw numbers. `OUT/journal` keeps what
is labelled while it runs, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time

import tqdm

from tpugraphs_jax import graph
from tpugraphs_jax.collect import journal
from tpugraphs_jax.collect.worker import Job

_RESTARTS = 3
_FAILED = 3  # the exit status of a worker that says why
_COLLECTION = re.compile(r"layout:own:[A-Za-z0-9_.-]+")


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
  running: dict[str, tuple[Job, subprocess.Popen, int]] = {}
  failures = []
  bar = tqdm.tqdm(total=sum(job.configs for job in jobs), unit="config", disable=not progress,
                  smoothing=0)
  finished = 0
  try:
    while todo or running:
      while todo and len(running) < processes:
        job = todo.pop(0)
        running[job.name] = job, _start(job), 0
      for name, (job, process, restarts) in list(running.items()):
        if process.poll() is None:
          continue
        del running[name]
        if _worth_another_try(job, process.returncode) and restarts < _RESTARTS:
          running[name] = job, _start(job), restarts + 1
          continue
        finished += job.configs
        if process.returncode:
          failures.append(_reason(job, process.returncode))
      _show(bar, finished, [job for job, *_ in running.values()])
      time.sleep(0.2)
  finally:
    bar.close()
    for _, process, _ in running.values():
      process.kill()
  return failures


def _start(job: Job) -> subprocess.Popen:
  job.log.parent.mkdir(parents=True, exist_ok=True)
  environment = dict(os.environ)
  if job.label != "measured":
    environment["JAX_PLATFORMS"] = "cpu"
  with open(job.log, "ab") as log:
    return subprocess.Popen(
        [sys.executable, "-m", "tpugraphs_jax.collect.worker", json.dumps(dataclasses.asdict(job))],
        stdout=log, stderr=log, env=environment)


def _worth_another_try(job: Job, status: int) -> bool:
  """Whether a worker was killed; one that crashed gets its failure written down.

  A kill from outside says nothing of the configuration that was being compiled.
  """
  if status in (0, _FAILED):
    return False
  candidate = journal.interrupted(job.journal)
  if status not in (-9, -15, -2) and candidate is not None:
    with open(job.journal, "ab") as file:
      record = {"candidate": candidate, "error": f"the compiler ended its process ({status})"}
      file.write(json.dumps(record).encode() + b"\n")
  return True


def _reason(job: Job, status: int) -> str:
  lines = job.log.read_text(errors="replace").splitlines()
  said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
  if status == _FAILED and said:
    return f"{job.name}: {said.removeprefix('error: ')}"
  return f"{job.name}: its process ended with status {status}; see {job.log}"


def _show(bar: tqdm.tqdm, finished: int, running: list[Job]) -> None:
  bar.update(finished + sum(
      min(journal.done(job.journal), job.configs) for job in running) - bar.n)
  bar.set_postfix_str(" ".join(job.name for job in running), refresh=False)


def _jobs(args: argparse.Namespace) -> list[Job]:
  """One job per program, in the order given.

  Raises:
    ValueError, FileNotFoundError: as `programs.load`, or two have one name.
  """
  if not _COLLECTION.fullmatch(args.collection):
    raise ValueError(f"--collection={args.collection}, expected layout:own:NAME")
  if args.configs < 2:
    raise ValueError(f"--configs={args.configs}, expected at least 2")
  if args.label != "measured":
    os.environ["JAX_PLATFORMS"] = "cpu"
  from tpugraphs_jax.collect import labels
  from tpugraphs_jax.collect import programs
  labels.create(args.label, target=args.target, seed=args.seed)
  found = [program for source in args.programs
           for program in programs.load(source, split=args.split)]
  names = [program.name for program in found]
  if repeated := {name for name in names if names.count(name) > 1}:
    raise ValueError(f"{len(repeated)} names of programs are used twice, such as "
                     f"{min(repeated)}; rename the file or the key")
  return [Job(program.source, program.name, program.split, args.collection, args.out, args.label,
              args.target, args.configs, args.seed) for program in found]


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
      prog="python -m tpugraphs_jax.collect", description=__doc__.splitlines()[0])
  parser.add_argument("--programs", nargs="+", required=True, metavar="SOURCE",
                      help="FILE.py with a dictionary PROGRAMS, FILE.py:KEY, or module:name")
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
                      help="processes (default: one per processor; one for measured)")
  parser.add_argument("--quiet", action="store_true", help="no progress bar")
  args = parser.parse_args(argv)
  if args.label == "measured":
    args.jobs = 1  # programs at the same time would disturb each other
  return args


if __name__ == "__main__":
  sys.exit(main())
