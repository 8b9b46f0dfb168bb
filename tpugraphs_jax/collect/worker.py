"""Collects one program, in a process of its own.

A compiler that aborts takes only this process with it; `__main__` starts it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import platform
import sys
from typing import Any

import jax
import numpy as np

import tpugraphs_jax
from tpugraphs_jax import files, hlo
from tpugraphs_jax.collect import choosing, draw, labels, node_rows, programs
from tpugraphs_jax.collect.job import Job
from tpugraphs_jax.collect.journal import Journal
from tpugraphs_jax.data import npz

FAILED = 3  # the exit status after an error that was explained


@dataclasses.dataclass(frozen=True)
class _Collecting:
  """What is known of a program while it is collected."""

  job: Job
  program: programs.Program
  label: labels.Label
  choices: choosing.Choices
  journal: Journal
  graph: hlo.HloGraph

  def function(self, numbers: list[int]) -> Callable[..., Any]:
    return choosing.apply(self.program.function, self.choices.choice(numbers))


def collect(job: Job) -> None:
  """Labels what is missing and writes the program's npz and sidecar.

  Does nothing where both are there already, of the same program, label and versions.

  Raises:
    ValueError: the program cannot be collected, or its journal is another one's.
  """
  program, = programs.load(job.source, split=job.split)
  label = labels.create(job.label, target=job.target, seed=job.seed)
  header = {"source": job.source, "label": job.label, **label.versions(), "seed": job.seed,
            "operands": job.operands, "program_sha256": _sha256(program)}
  if is_finished(job, header, label):
    return
  choices = choosing.choices(program.function, *program.args, operands=job.operands)
  with contextlib.closing(Journal(job.journal, header)) as journal:
    if not job.module.exists():
      default = choosing.apply(program.function, choices.default)
      with files.replacing(job.module, "wb") as file:
        file.write(label.graph(default, program.args))
    graph = dataclasses.replace(hlo.featurize(job.module), name=job.name)
    work = _Collecting(job, program, label, choices, journal, graph)
    drawn = _label_all(work)
    _write(work, drawn, header)


def is_finished(job: Job, header: dict[str, Any], label: labels.Label) -> bool:
  """Whether the job's files are whole and what the job would write, with or without a journal.

  Args:
    job: a program and what is asked for.
    header: source, label, versions, seed and hash of the program, as in the sidecar.
    label: says what the sidecar's raw numbers are worth.
  """
  try:
    record = json.loads(job.sidecar.read_text())
    stored = npz.read_layout(job.npz).configs.runtime_ns.tolist()
    labelled = [label.value(raw) for raw in record["configs"]]
  except (OSError, ValueError, KeyError, TypeError):
    return False  # missing, or damaged: it is made anew
  asked = record.get("configs_asked", len(labelled))
  is_same = all(record.get(key) == value for key, value in header.items())
  return is_same and record["split"] == job.split and asked == job.configs and stored == labelled


def _label_all(work: _Collecting) -> list[list[int]]:
  """Labels candidates until there are enough; option numbers of all that were tried.

  Raises:
    ValueError: nothing can be chosen in the program.
  """
  options = node_rows.visible_options(work.graph, work.choices)
  if max(map(len, options), default=1) < 2:
    raise ValueError(f"{work.job.source}: no layout of its {len(options)} groups of equations "
                     "can be chosen; expected a convolution, dot or reshape")
  stream = draw.candidates(options, seed=work.job.seed, name=work.job.name)
  drawn: list[list[int]] = []
  while True:
    values = _values(work, len(drawn))
    count = draw.wanted(values, work.job.configs, draws=len(drawn))
    more = dict(enumerate(itertools.islice(stream, count), len(drawn)))
    if not more:
      return drawn
    drawn += more.values()
    _label(work, {number: numbers for number, numbers in more.items()
                  if number not in work.journal.raw and number not in work.journal.errors})


def _label(work: _Collecting, candidates: dict[int, list[int]]) -> None:
  """Writes a result or an error of every candidate into the journal."""
  def functions() -> Iterator[tuple[int, Callable[..., Any]]]:
    for number, numbers in candidates.items():
      if os.getppid() != work.job.parent:
        raise SystemExit(1)  # whoever waits for the results was killed
      work.journal.start(number)
      yield number, work.function(numbers)

  for number, found in work.label.run(functions(), work.program.args):
    if isinstance(found, Exception):
      work.journal.error(number, f"{type(found).__name__}: {str(found)[:500]}")
    else:
      work.journal.result(number, found)


def _values(work: _Collecting, drawn: int) -> dict[int, int]:
  """The labels of the first `drawn` candidates; an earlier run may know of more."""
  return {number: work.label.value(raw) for number, raw in sorted(work.journal.raw.items())
          if number < drawn}


def _write(work: _Collecting, drawn: list[list[int]], header: dict[str, Any]) -> None:
  job, journal = work.job, work.journal
  values = _values(work, len(drawn))
  if 0 not in values:
    raise ValueError(f"{job.source}: the compiler's own choice failed, "
                     f"{journal.errors.get(0, 'it was not labelled')}")
  kept = draw.kept(values, job.configs)
  configs = node_rows.layout_configs(
      work.graph, work.choices, np.array([drawn[number] for number in kept], np.int64),
      np.array([values[number] for number in kept], np.int64))
  npz.write_layout(job.npz, dataclasses.replace(work.graph, configs=configs))
  record = {
      **header, "name": job.name, "split": job.split, "collection": job.collection,
      "configs_asked": job.configs, "config_runtime": work.label.unit,
      "tpugraphs_jax": tpugraphs_jax.__version__,
      "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
      "groups": [str(group) for group in work.choices.groups],
      "ties_left_out": len(values) - len(kept),
      "failures": [{"numbers": drawn[number], "error": error}
                   for number, error in sorted(journal.errors.items()) if number < len(drawn)],
      "configs": [{"numbers": drawn[number], **journal.raw[number]} for number in kept],
  }
  with files.replacing(job.sidecar) as file:
    file.write(_by_line(record))


def _by_line(record: dict[str, Any]) -> str:
  """JSON with a line per field, and per item of its lists."""
  lines = []
  for key, value in record.items():
    text = json.dumps(value)
    if isinstance(value, list) and value:
      text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "]"
    lines.append(f"{json.dumps(key)}: {text}")
  return "{" + ",\n".join(lines) + "}\n"


def _sha256(program: programs.Program) -> str:
  """Of the program as jax lowers it for this machine, whatever is chosen for it."""
  text = jax.jit(program.function).lower(*program.args).as_text()
  return hashlib.sha256(text.encode()).hexdigest()


def main(argv: list[str]) -> int:
  try:
    collect(Job(**json.loads(argv[0])))
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return FAILED
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
