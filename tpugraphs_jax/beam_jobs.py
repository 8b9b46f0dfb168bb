"""Many independent jobs on Apache Beam: here by default, on a cluster by Beam's own flags.

A job writes what it finds to a place of its own and can be done again without harm: a
cluster may start one twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Job = TypeVar("_Job")


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
  """A command's own arguments, and Beam's flags behind `--`; None where there is no `--`."""
  items = list(argv)
  if "--" not in items:
    return items, None
  place = items.index("--")
  return items[:place], items[place + 1:]


def run_all(
    work: Callable[[_Job], Any], jobs: Sequence[_Job], *, processes: int = 1,
    options: Sequence[str] = (),
) -> None:
  """Does every job; returns when the last one has ended.

  Args:
    work: does one job. A function of a module, since other machines have to find it.
    jobs: what it takes, as Beam can send it: numbers, strings, tuples, dataclasses.
    processes: jobs at a time on this machine; a cluster decides that itself.
    options: Beam's own flags, such as `--runner=FlinkRunner`.

  Raises:
    ImportError: Beam is not installed; says how to install it.
  """
  try:
    import apache_beam as beam
    from apache_beam.options import pipeline_options
  except ImportError as error:
    raise ImportError("apache-beam is missing: pip install 'tpugraphs-jax[beam]' (or pip install "
                      "apache-beam)") from error
  if not jobs:
    return
  given = list(options)
  if not any(option.startswith("--runner") for option in given):
    # Threads of this process: what computes for long are processes of the jobs' own.
    given += ["--runner=FnApiRunner", "--direct_running_mode=multi_threading",
              f"--direct_num_workers={min(processes, len(jobs))}"]
  with beam.Pipeline(options=pipeline_options.PipelineOptions(given)) as pipeline:
    _ = pipeline | beam.Create(list(jobs)) | beam.Reshuffle() | beam.Map(work)
