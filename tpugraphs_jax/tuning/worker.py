"""Collects one program in a separate process, which `workers` starts.

If a compiler aborts, only this process ends.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from pathlib import Path
import platform
import sys
from typing import Any

import tpugraphs_jax
from tpugraphs_jax.data import npz
from tpugraphs_jax.infra import console, files, tasks, trust
from tpugraphs_jax.tuning import choosing, draw, labels, programs
from tpugraphs_jax.tuning.calls import Call
from tpugraphs_jax.tuning.draw import Numbers
from tpugraphs_jax.tuning.journal import Journal
from tpugraphs_jax.tuning.measure import Functions
from tpugraphs_jax.tuning.problem import Problem

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
  sidecar = property(lambda request: request.file("npz", ".json"))
  journal = property(lambda request: request.file("journal", ".jsonl"))
  # The serialized module that the graph is made of.
  module = property(lambda request: request.file("journal", ".hlo.pb"))
  log = property(lambda request: request.file("journal", ".log"))
  # Lines about failures, as JSON, which a machine of a cluster writes when it has ended.
  outcome = property(lambda request: request.file("journal", ".outcome.json"))

  def file(self, kind: str, suffix: str) -> Path:
    """A file of this program in the folder `kind` of the data."""
    folder = files.expanded(self.out).joinpath(kind, *self.collection.split(":"))
    return folder / self.split / f"{self.name}{suffix}"

  def check_folders(self) -> None:
    """Refuses (ValueError) data whose folders are links, because the program's files go there."""
    for path in (self.npz, self.journal):
      files.check_way(files.expanded(self.out), path.parent)


def collect(request: LabelRequest) -> None:
  """Makes the missing labels and writes the program's npz and sidecar.

  Returns at once if both files exist, of the same program, label and versions.

  Raises:
    ValueError: the program cannot be collected, or the journal belongs to another program.
  """
  request.check_folders()
  (program,) = programs.load(request.source, split=request.split)
  label = labels.create(request.label, target=request.target, seed=request.seed)
  header = {
    "source": _source(request),
    "label": request.label,
    **label.versions(),
    "seed": request.seed,
    "operands": request.operands,
    "program_sha256": _sha256(program),
  }
  if is_finished(request, header, label):
    return
  with contextlib.closing(Journal(request.journal, header)) as journal:
    kept = journal.kept_module(request.module)
    problem = Problem(
      program.function,
      program.args,
      label,
      kwargs=program.kwargs,
      name=request.name,
      seed=request.seed,
      operands=request.operands,
      module=kept,
    )
    if kept is None:
      journal.keep_module(request.module, problem.module)
    drawn = _label_all(problem, journal, request.configs)
    _write(request, problem, journal, drawn, header)


def is_finished(request: LabelRequest, header: dict[str, Any], label: labels.Label) -> bool:
  """Whether the request's files are whole and equal what the request would write; needs no journal.

  Args:
    request: a program and the labels that are asked for.
    header: source, label, versions, seed and hash of the program, as in the sidecar.
    label: turns the sidecar's raw numbers into labels.
  """
  try:
    record = trust.parse(request.sidecar.read_text())
    stored = npz.read_layout(request.npz).configs.runtime_ns.tolist()
    label = label.of(record["configs"][0])
    labelled = [label.value(raw) for raw in record["configs"]]
  except (OSError, ValueError, KeyError, IndexError, TypeError):
    return False  # missing, or damaged: it is made anew
  expected = {**header, "split": request.split, "configs_asked": request.configs}
  return stored == labelled and all(record.get(key) == expected[key] for key in expected)


def _label_all(problem: Problem, journal: Journal, configs: int) -> list[Numbers]:
  """Labels candidates until there are enough; all that were tried, in order."""
  stream = problem.candidates()
  drawn: list[Numbers] = []
  while True:
    # Times compare only within a session: failed choices are not replaced by later ones.
    if drawn and problem.label.made_together:
      return drawn
    if 0 in journal.errors:
      return drawn  # labels mean nothing without the compiler's own choice
    _, values, _ = _labels(problem.label, journal, len(drawn))
    count = draw.wanted(values, configs, draws=len(drawn))
    more = dict(enumerate(itertools.islice(stream, count), len(drawn)))
    if not more:
      return drawn
    drawn += more.values()
    done = journal.raw.keys() | journal.errors.keys()
    if problem.label.made_together and not more.keys() <= done:
      done = set(journal.errors)  # all others are measured again, together
    new = {number: numbers for number, numbers in more.items() if number not in done}
    _label(problem, journal, new)


def _label(problem: Problem, journal: Journal, candidates: dict[int, Numbers]) -> None:
  """Writes a result or an error of every candidate into the journal."""

  def functions() -> Functions:
    for number, numbers in candidates.items():
      journal.start(number)
      yield number, problem.apply(numbers), {}

  for number, outcome in problem.label.run(functions(), problem.call.arrays):
    if isinstance(outcome, Exception):
      journal.error(number, labels.reason(outcome))
    else:
      journal.result(number, outcome)


def _labels(
  label: labels.Label, journal: Journal, drawn: int
) -> tuple[labels.Label, dict[int, int], dict[int, str]]:
  """The program's label, labels of the first `drawn` candidates, and reasons of those without one.

  The journal may hold more candidates, of an earlier run.
  """
  own, values = journal.raw.get(0), {}
  label = label.of(own) if own else label
  errors = {number: text for number, text in journal.errors.items() if number < drawn}
  for number, raw in sorted(journal.raw.items()):
    if number < drawn:
      try:
        values[number] = label.value(raw)
      except ValueError as error:
        errors[number] = str(error)
  return label, values, errors


def _write(
  request: LabelRequest,
  problem: Problem,
  journal: Journal,
  drawn: list[Numbers],
  header: dict[str, Any],
) -> None:
  label, values, errors = _labels(problem.label, journal, len(drawn))
  if 0 not in values:
    why = errors.get(0, "it was not labelled")
    raise ValueError(f"{request.source}: the compiler's own choice failed: {why}")
  kept = draw.kept(values, request.configs)
  choices = [drawn[number] for number in kept]
  graph = problem.with_configs(choices, [values[number] for number in kept])
  npz.write_layout(request.npz, graph)
  record = {
    **header,
    "name": request.name,
    "split": request.split,
    "collection": request.collection,
    "configs_asked": request.configs,
    "config_runtime": label.unit,
    "not_labelled": label.gap,
    "tpugraphs_jax": tpugraphs_jax.__version__,
    "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
    "groups": [str(group) for group in problem.choices.groups],
    "left_out": problem.choices.left_out,
    "ties_left_out": len(values) - len(kept),
    "failures": [
      {"numbers": drawn[number], "error": error} for number, error in sorted(errors.items())
    ],
    "configs": [{"numbers": drawn[number], **journal.raw[number]} for number in kept],
  }
  with files.replacing(request.sidecar) as file:
    file.write(_by_line(record))


def _source(request: LabelRequest) -> str:
  """The source as the files of the data name it: without the folders of this machine."""
  place, _, key = request.source.rpartition(":")
  return f"{Path(place).name if Path(place).is_absolute() else place}:{key}"


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
  """SHA-256 of the program without any choice: as jax lowers it for this machine.

  For programs that exist only for a TPU, such as Pallas kernels, SHA-256 of their equations.
  """
  call = Call(program.function, program.args, program.kwargs)
  try:
    text = call.lower(call.arrays).as_text()
  except (ValueError, NotImplementedError):
    text = "\n".join(choosing.operations(call.trace.program, with_details=True))
  return hashlib.sha256(text.encode()).hexdigest()


def main(argv: Sequence[str]) -> int:
  """Labels one program, described as JSON in the first argument; returns the exit code."""
  tasks.end_with_parent()
  try:
    collect(LabelRequest(**json.loads(argv[0])))
  except (ValueError, OSError) as error:
    print(f"error: {console.one_line(error)}", file=sys.stderr)
    return FAILED
  except Exception as error:  # a program of the user may raise anything
    print(f"error: {type(error).__name__}: {labels.reason(error)}", file=sys.stderr)
    raise
  return DONE


if __name__ == "__main__":
  tasks.exit_at_once(main, sys.argv[1:])
