"""Collects one program, in a process of its own.

A compiler that aborts takes only this process with it; `__main__` starts it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from pathlib import Path
import sys
from typing import Any

from tpugraphs_jax import atomic


@dataclasses.dataclass(frozen=True)
class Job:
  """One program to collect."""

  source: str  # of `programs.load`
  name: str
  split: str
  collection: str  # layout:own:NAME
  out: str
  label: str
  target: str | None
  configs: int
  seed: int

  @property
  def npz(self) -> Path:
    return self._path("npz", ".npz")

  @property
  def sidecar(self) -> Path:
    return self._path("npz", ".json")

  @property
  def journal(self) -> Path:
    return self._path("journal", ".jsonl")

  @property
  def module(self) -> Path:
    return self._path("journal", ".hlo.pb")

  @property
  def log(self) -> Path:
    return self._path("journal", ".log")

  def _path(self, kind: str, suffix: str) -> Path:
    return Path(self.out).joinpath(
        kind, *self.collection.split(":"), self.split, self.name + suffix)


def collect(job: Job) -> None:
  """Labels what is missing and writes the program's npz and sidecar.

  Raises:
    ValueError: the program cannot be collected, or its journal is another one's.
  """
  # Imported here: the process that starts the workers needs none of it.
  from tpugraphs_jax import hlo
  from tpugraphs_jax.collect import choosing
  from tpugraphs_jax.collect import journal as journals
  from tpugraphs_jax.collect import labels
  from tpugraphs_jax.collect import node_rows
  from tpugraphs_jax.collect import programs

  program, = programs.load(job.source, split=job.split)
  label = labels.create(job.label, target=job.target, seed=job.seed)
  choices = choosing.choices(program.function, *program.args)
  header = {"source": job.source, "label": job.label, **label.versions(), "seed": job.seed,
            "program_sha256": _sha256(program)}
  with contextlib.closing(journals.Journal(job.journal, header)) as journal:
    if not job.module.exists():
      default = choosing.apply(program.function, choices.default)
      with atomic.replacing(job.module, "wb") as file:
        file.write(label.graph(default, program.args))
    graph = dataclasses.replace(hlo.featurize(job.module), name=job.name)
    options = node_rows.visible_options(graph, choices)
    if max(map(len, options), default=1) < 2:
      raise ValueError(f"{job.source}: no layout of its {len(choices.groups)} groups of "
                       "equations can be chosen; expected a convolution, dot or reshape")
    drawn = _label_all(job, journal, label, program, choices, options)
    _write(job, journal, label, graph, choices, drawn, header)


def _label_all(job: Job, journal, label, program, choices, options) -> list[list[int]]:
  """Labels candidates until there are enough; option numbers of all that were tried."""
  from tpugraphs_jax.collect import choosing
  from tpugraphs_jax.collect import draw

  stream = draw.candidates(options, seed=job.seed, name=job.name)
  drawn: list[list[int]] = []
  parent = os.getppid()
  while True:
    known = {number: label.value(raw) for number, raw in journal.raw.items()
             if number < len(drawn)}
    more = list(itertools.islice(stream, draw.wanted(known, job.configs, draws=len(drawn))))
    if not more:
      return drawn
    todo = {number: choosing.apply(program.function, choices.choice(numbers))
            for number, numbers in enumerate(more, len(drawn))
            if number not in journal.raw and number not in journal.errors}
    drawn += more
    results = label.run(_announced(todo, journal), program.args)
    for number, raw in results:
      if isinstance(raw, Exception):
        journal.error(number, f"{type(raw).__name__}: {str(raw)[:500]}")
      else:
        journal.result(number, raw)
      if os.getppid() != parent:
        raise SystemExit(1)  # whoever waits for the results is gone


class _announced(dict):
  """Functions by candidate; the journal is told which one is about to be labelled."""

  def __init__(self, functions: dict, journal):
    super().__init__(functions)
    self._journal = journal

  def items(self):
    for number, function in super().items():
      self._journal.start(number)
      yield number, function


def _write(job: Job, journal, label, graph, choices, drawn, header: dict[str, Any]) -> None:
  import numpy as np
  from tpugraphs_jax.collect import draw
  from tpugraphs_jax.collect import node_rows
  from tpugraphs_jax.data import npz

  # A journal of a run with more configurations knows candidates that were not drawn now.
  values = {number: label.value(raw) for number, raw in journal.raw.items()
            if number < len(drawn)}
  if 0 not in values:
    raise ValueError(f"{job.source}: the compiler's own choice failed, "
                     f"{journal.errors.get(0, 'it was not labelled')}")
  kept = draw.kept(values, job.configs)
  configs = node_rows.layout_configs(
      graph, choices, np.array([drawn[number] for number in kept], np.int64),
      np.array([values[number] for number in kept], np.int64))
  npz.write_layout(job.npz, dataclasses.replace(graph, configs=configs))
  record = {
      **header, "name": job.name, "split": job.split, "collection": job.collection,
      "configs_asked": job.configs, "config_runtime": label.unit,
      "groups": [str(group) for group in choices.groups],
      "ties_left_out": len(values) - len(kept),
      "failures": [{"numbers": drawn[number], "error": error}
                   for number, error in sorted(journal.errors.items())
                   if number < len(drawn)],
      "configs": [{"numbers": drawn[number], **journal.raw[number]} for number in kept],
  }
  with atomic.replacing(job.sidecar) as file:
    file.write(_by_line(record))


def _by_line(record: dict[str, Any]) -> str:
  """JSON with a line per field, and per item of its lists."""
  lines = []
  for key, value in record.items():
    if isinstance(value, list) and value:
      items = ",\n".join(f"  {json.dumps(item)}" for item in value)
      lines.append(f"{json.dumps(key)}: [\n{items}]")
    else:
      lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
  return "{" + ",\n".join(lines) + "}\n"


def _sha256(program) -> str:
  """Of the program as jax lowers it for this machine: the same wherever it is."""
  import jax
  text = jax.jit(program.function).lower(*program.args).as_text()
  return hashlib.sha256(text.encode()).hexdigest()


def main(argv: list[str]) -> int:
  job = Job(**json.loads(argv[0]))
  try:
    collect(job)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 3
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
